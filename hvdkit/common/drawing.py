"""What the figures of the report are made of: marks on a surface, scales, numbers with their units."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from hvdkit.common.units import printable, shortened

LABEL = 34
"""Characters of a name that fit beside a lane or a bar."""
LONGEST_NAME = 1000
"""Characters of a name that are kept at all."""


@dataclass(frozen=True)
class Rect:
    """A bar; ``style`` is a class of the style sheet, ``tip`` is shown under the pointer."""

    x: float
    y: float
    width: float
    height: float
    style: str
    tip: str = ""
    shape: ClassVar[str] = "rect"


@dataclass(frozen=True)
class Line:
    """A straight line."""

    x1: float
    y1: float
    x2: float
    y2: float
    style: str
    shape: ClassVar[str] = "line"


@dataclass(frozen=True)
class Text:
    """One line of text; ``style`` says how it is aligned."""

    x: float
    y: float
    text: str
    style: str = ""
    tip: str = ""
    shape: ClassVar[str] = "text"


@dataclass(frozen=True)
class Upright:
    """One line of text that reads upwards: the title of a vertical axis."""

    x: float
    y: float
    text: str
    shape: ClassVar[str] = "upright"


@dataclass(frozen=True)
class Path:
    """A line or an area along points, or several bars in one."""

    steps: str
    style: str
    shape: ClassVar[str] = "path"


Mark = Rect | Line | Text | Upright | Path


@dataclass
class Figure:
    """A drawing of ``width`` times ``height`` units; ``description`` says in words what is seen."""

    name: str
    title: str
    description: str
    width: float
    height: float
    marks: list[Mark] = field(default_factory=list)


@dataclass(frozen=True)
class Unit:
    """A unit of time: how many microseconds it has."""

    name: str
    microseconds: float

    def of(self, microseconds: float) -> str:
        """The time as text, with three digits and the unit."""
        return f"{number(microseconds / self.microseconds)} {self.name}"


UNITS = (Unit("s", 1e6), Unit("ms", 1e3), Unit("us", 1.0))


def unit_for(microseconds: float) -> Unit:
    """The unit in which a time reads best."""
    return next((unit for unit in UNITS if microseconds >= unit.microseconds), UNITS[-1])


def number(value: float) -> str:
    """A number with three digits and no exponent; whole numbers from a thousand on with commas."""
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    if value == int(value):
        return str(int(value))
    decimals = min(6, max(0, 2 - math.floor(math.log10(abs(value)))))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def shown_name(name: str) -> str:
    """A name from a file as it may appear on a page: of bounded length, no character that hides or turns text."""
    return printable(shortened(name, LONGEST_NAME))


def ticks(last: float, about: int = 5, first: float = 0.0) -> list[float]:
    """Round values between ``first`` and ``last``, about as many as asked for."""
    span = last - first
    if not 0 < span < math.inf:
        return [first]
    rough = span / max(1, about)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    start = math.ceil(first / step - 1e-9)
    return [index * step for index in range(start, math.floor(last / step + 1e-9) + 1)]


def line_through(points: Sequence[tuple[float, float]]) -> str:
    """The steps of a path through the points."""
    return "".join(f"{'L' if index else 'M'}{x:.1f} {y:.1f}" for index, (x, y) in enumerate(points))


def bar_path(bars: Sequence[tuple[float, float]], y: float, height: float) -> str:
    """The steps of a path with one bar from each left to each right end."""
    return "".join(
        f"M{left:.1f} {y:.1f}h{max(right - left, 0.4):.1f}v{height:.1f}h{-max(right - left, 0.4):.1f}z"
        for left, right in bars
    )


def joined(bars: Sequence[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """The bars in order, those that overlap or are less than ``gap`` apart as one."""
    result: list[tuple[float, float]] = []
    for left, right in sorted(bars):
        if result and left - result[-1][1] < gap:
            result[-1] = (result[-1][0], max(result[-1][1], right))
        else:
            result.append((left, right))
    return result
