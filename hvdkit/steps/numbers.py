"""Numbers that a caller gives: Python's own, NumPy's and a framework's scalars alike."""

from __future__ import annotations

import math
import operator
from typing import Any

from hvdkit.errors import InvalidArgumentError


def whole(name: str, value: Any, least: int) -> int:
    """``value`` as an int.

    Raises:
        InvalidArgumentError: no integer, a bool, or less than ``least``.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise InvalidArgumentError(f"{name} must be an integer >= {least}, got {value!r}.")
    return number


def finite(name: str, value: Any, *, positive: bool = False) -> float:
    """``value`` as a float.

    Raises:
        InvalidArgumentError: no number, inf or nan, or with ``positive`` one that is not above 0.
    """
    try:
        number = float(value) if hasattr(value, "__float__") else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):  # an array of several
        number = math.nan
    if not math.isfinite(number) or (positive and number <= 0):
        raise InvalidArgumentError(f"{name} must be a {'positive, ' * positive}finite number, got {value!r}.")
    return number


def plain(value: Any) -> Any:
    """A scalar of NumPy or PyTorch as Python's, for ``json.dumps(default=plain)``.

    Raises:
        TypeError: something else.
    """
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
