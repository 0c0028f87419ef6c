"""What the ranks of a start that runs many checks do with each: see checks_of_ranks.py, which reads the results."""

import json
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np


def run_checks(checks: Mapping[str, Callable[[], Any]], directory: str, rank: int) -> None:
    """Run the checks in order and write ``NAME.RANK.json`` after each: what this rank found, or its stack trace."""
    for name, check in checks.items():
        try:
            outcome = {"found": check()}
        except Exception:
            outcome = {"failed": traceback.format_exc()}
        (Path(directory) / f"{name}.{rank}.json").write_text(json.dumps(outcome))


def signs(rank: int) -> dict[str, np.ndarray]:
    """Values by type, of which ranks 0 and 1 differ in two top bits of eight bytes, and nowhere else."""
    values = {"float64": [1, -1], "float32": [1, 1, 1, -1]}
    return {kind: np.roll(np.array(one, dtype=kind), rank * len(one) // 2) for kind, one in values.items()}
