"""How far a training is, in one line: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Mapping
from typing import TextIO

_SHOWN = ("samples_per_s", "grad_norm", "step_s")
"""Values that are no logs of the training."""


def span_text(seconds: float) -> str:
    """A time for people who wait: ``42 s``, ``7 min``, ``3 h 05 min``, ``2 d 4 h``."""
    minutes = round(seconds / 60)
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if minutes < 100:
        return f"{minutes} min"
    hours = round(seconds / 3600)
    return f"{minutes // 60} h {minutes % 60:02} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def bar(share: float, width: int) -> str:
    """So much of ``width`` characters filled as is done."""
    done = math.floor(width * min(1.0, max(0.0, share)))
    return "#" * done + "." * (width - done)


class Progress:
    """Shows how far a training is whenever it is told: a tracker of ``hk.Monitor``.

    Args:
        stream: where; default: standard output. Where that is no terminal each window is a line.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._terminal = self._stream.isatty()
        self._steps: int | None = None
        self._open = False

    def begin(self, _step: int, steps: int | None = None) -> None:
        """A job has begun that ends after ``steps``."""
        self._steps = steps

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The windows up to ``step`` are done."""
        words = [f"step {step}/{self._steps}" if self._steps else f"step {step}"]
        words += [f"{name} {value:.4g}" for name, value in values.items() if name not in _SHOWN]
        if "samples_per_s" in values:
            words.append(f"{values['samples_per_s']:.0f} samples/s")
        if self._steps and "step_s" in values and step < self._steps:
            words.append(f"{span_text((self._steps - step) * values['step_s'])} left")
        self._show("  ".join(words), step / self._steps if self._steps else None)

    def report(self, _text: str) -> None:
        """Leave the line as it is, for what is written next."""
        self._end_line()

    def close(self) -> None:
        """End the line."""
        self._end_line()

    def _show(self, text: str, share: float | None) -> None:
        if not self._terminal:
            self._stream.write(f"{text}\n")
        else:
            width = shutil.get_terminal_size().columns - 1
            room = min(30, width - len(text) - 2)
            drawn = f"{bar(share, room)}  " if share is not None and room > 4 else ""
            self._stream.write(f"\r{(drawn + text)[:width]}\x1b[K")
            self._open = True
        self._stream.flush()

    def _end_line(self) -> None:
        if self._open:
            self._stream.write("\n")
            self._stream.flush()
            self._open = False
