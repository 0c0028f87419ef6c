"""What ranks of several frameworks disagree in."""

import numpy as np


def signs(rank: int) -> dict[str, np.ndarray]:
    """Values by type, of which ranks 0 and 1 differ in two top bits of eight bytes, and nowhere else."""
    values = {"float64": [1, -1], "float32": [1, 1, 1, -1]}
    return {kind: np.roll(np.array(one, dtype=kind), rank * len(one) // 2) for kind, one in values.items()}
