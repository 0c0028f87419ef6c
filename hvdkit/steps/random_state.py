"""The states of Python's and NumPy's global random generators as plain bytes, for checkpoints."""

from __future__ import annotations

import random
import struct

import numpy as np
import numpy.typing as npt

from hvdkit.errors import CheckpointError

# Mersenne Twister, twice: version or position, the words, whether a normal number is left over, and that number.
_PYTHON, _NUMPY = struct.Struct("<i625I?d"), struct.Struct("<i624I?d")
BYTES = _PYTHON.size + _NUMPY.size
"""Length of what ``capture`` returns."""


def capture() -> npt.NDArray[np.uint8]:
    """The states as uint8 (BYTES,)."""
    version, words, left_over = random.getstate()
    python = _PYTHON.pack(version, *words, left_over is not None, left_over or 0.0)
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    numpy = _NUMPY.pack(position, *keys.tolist(), bool(has_gauss), gauss)  # type: ignore[union-attr]
    return np.frombuffer(python + numpy, dtype=np.uint8).copy()


def restore(state: npt.NDArray[np.uint8]) -> None:
    """Go on from what ``capture`` returned.

    Raises:
        CheckpointError: bytes that no generator can be in.
    """
    try:
        contents = state.tobytes()
        version, *words, has_normal, normal = _PYTHON.unpack_from(contents)
        position, *keys, has_gauss, gauss = _NUMPY.unpack_from(contents, _PYTHON.size)
        random.setstate((version, tuple(words), normal if has_normal else None))
        np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, int(has_gauss), gauss))
    except (struct.error, ValueError, TypeError) as error:
        raise CheckpointError(f"the saved states of the random generators cannot be read: {error}") from error
