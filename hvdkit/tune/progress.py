"""Progress on standard error, and the ways in which a user ends a search."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from rich.console import Console

from hvdkit.launch.tuned import Tuned
from hvdkit.tune.search import Watcher
from hvdkit.tune.space import label


class Shown(Watcher):
    """Tells what happens, line by line, and on a terminal also what is running now."""

    def __init__(self, console: Console, jobs: int) -> None:
        self._console = console
        self._jobs = jobs
        self._status = console.status("starting")
        self._stage = ""

    def __enter__(self) -> Shown:
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def begins(self, stage: str, setting: Tuned, job: int) -> None:
        """Show the job that runs now on a terminal; elsewhere, such as in a log, a line for each round."""
        if self._console.is_terminal:
            self._status.update(f"job {job} of at most {self._jobs}: {label(setting)} ({stage})")
        elif stage != self._stage:
            self.says(f"{stage}; job {job} of at most {self._jobs}")
        self._stage = stage

    def says(self, sentence: str) -> None:
        """Print a line."""
        self._console.print(f"hvdkit tune: {sentence}", soft_wrap=True)


class Ended(KeyboardInterrupt):
    """This program was told to end by a signal other than Ctrl-C's."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raise ``Ended`` when a batch system or a closed terminal ends this program, so that its job is ended too."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise Ended(number)

    watched = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, end) for number in watched}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
