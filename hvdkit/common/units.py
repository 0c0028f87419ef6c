"""Times, sizes, shares and names as text for people."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvdkit.common.intervals import Estimate


ITEM_SIZES = {
    "bool": 1, "int8": 1, "uint8": 1, "float8": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4,
    "int64": 8, "uint64": 8, "float64": 8,
}  # fmt: skip
"""Bytes of one element, by the name of its type."""


def duration_text(microseconds: float) -> str:
    """A time with three digits and its unit."""
    for factor, unit in ((1e6, "s"), (1e3, "ms")):
        if microseconds >= factor:
            return f"{_three(microseconds / factor)} {unit}"
    return f"{_three(microseconds)} us"


def bytes_text(size: float) -> str:
    """A size with three digits, in units of 1000."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= factor:
            return f"{_three(size / factor)} {unit}"
    return f"{size:.0f} B"


def share_text(share: float) -> str:
    """A share as a percentage; 100% is the whole of it, and 0% none."""
    if 0.995 <= share < 1:
        return f"{math.floor(1000 * share) / 10:.1f}%"
    return f"{number_text(round(100 * share, 3), 2)}%"


def change_text(change: float) -> str:
    """By how much a value differs from another one, which is 1, as a percentage with its sign."""
    return f"{'-' if round(change, 5) < 0 else '+'}{share_text(abs(change))}"


def ranks_text(number: int) -> str:
    """``1 rank``, ``2 ranks``."""
    return count_text(number, "rank")


def count_text(number: int, what: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def printable(name: str) -> str:
    """A name from a file without anything that a terminal would obey."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in name)


def shortened(name: str, width: int) -> str:
    """A long name without its middle part, which the names of one model mostly share."""
    if len(name) <= width:
        return name
    head = width // 4
    return f"{name[:head]}…{name[head + 1 - width :]}"


def number_text(value: float, digits: int = 3) -> str:
    """A number with so many digits, and without an exponent where there are more before the point."""
    if value and abs(value) < 0.001:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{digits}g}" if abs(value) < 10**digits - 0.5 else f"{value:.0f}"


def interval_text(estimate: Estimate, digits: int = 3) -> str:
    """``1.92 [1.88, 1.95]``, or the value alone, with so many digits; the ends with three."""
    if estimate.low is None or estimate.high is None or estimate.low == estimate.high == estimate.value:
        return number_text(estimate.value, digits)
    return f"{number_text(estimate.value, digits)} [{number_text(estimate.low)}, {number_text(estimate.high)}]"


def _three(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
