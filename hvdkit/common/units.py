"""Times, sizes, shares and names as text for people.

Why this room exists: all tools print the same units in the same way.
"""

from __future__ import annotations


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
    """A share as a percentage."""
    percent = 100 * share
    return f"{percent:.0f}%" if percent >= 10 else f"{percent:.2g}%"


def printable(name: str) -> str:
    """A name from a file without anything that a terminal would obey."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in name)


def shortened(name: str, width: int) -> str:
    """A long name without its middle part, which the names of one model mostly share."""
    if len(name) <= width:
        return name
    head = width // 4
    return f"{name[:head]}…{name[head + 1 - width :]}"


def _three(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
