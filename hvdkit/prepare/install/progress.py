"""Shows how far an install is: one line that changes on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from typing import TextIO

from hvdkit.common.units import share_text

STEP = 10
"""Percent between two lines where the output is no terminal."""

_NINJA = re.compile(r"^\[\s*(?P<percent>\d+)%\] (?P<what>Building \w+ object|Linking \w+ \w+ library) (?P<path>\S+)")


def parse_progress(line: str) -> tuple[int, str] | None:
    """Percent and source file of a line of the compile's output, None for any other line."""
    match = _NINJA.match(line)
    if match is None:
        return None
    place, name = match["path"].partition("/CMakeFiles/")[0], match["path"].rpartition("/")[2]
    compiles = match["what"].startswith("Building")
    return int(match["percent"]), f"{place}: {name.removesuffix('.o')}" if compiles else f"linking {name}"


class InstallProgress:
    """The lines that the user sees while Horovod is being installed."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._clock = clock
        self._start = clock()
        self._next_percent = 0
        self._unfinished = False

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return self._clock() - self._start

    def say(self, text: str) -> None:
        """Show a line that stays."""
        self.clear()
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def compiling(self, line: str) -> None:
        """Take a line of the compile's output and show what it tells."""
        parsed = parse_progress(line)
        if parsed is None:
            return
        percent, file = parsed
        minutes, seconds = divmod(int(self.seconds), 60)
        text = f"  compiling {share_text(percent / 100):>4}  {minutes}:{seconds:02d}  {file}"
        if self._terminal:
            width = shutil.get_terminal_size().columns
            self._stream.write(f"\r\x1b[2K{text[: width - 1]}")
            self._stream.flush()
            self._unfinished = True
        elif percent >= self._next_percent:
            self._next_percent = percent - percent % STEP + STEP
            self.say(text)

    def clear(self) -> None:
        """Take away the line that changes."""
        if self._unfinished:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
            self._unfinished = False
