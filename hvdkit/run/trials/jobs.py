"""One job: a ``hvdkit launch`` in a process of its own, from start to end, how long it took, and what ends it."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import IO

from hvdkit.common.signals import handled
from hvdkit.run.launch.tuned import Tuned
from hvdkit.run.trials.here import launch_words

_CLOSING_LINE = re.compile(
    r"Hvd Procs +([0-9]{1,9}) +Total time: *((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?) +second"
)
_LAST_LINES = 8
_PATIENCE_S = 10.0
"""Seconds that a job which is told to end has for it before it is killed."""


@dataclass(frozen=True, slots=True)
class TrialJob:
    """How a job ended.

    Attributes:
        wall_s: seconds from its start to its end.
        closing_s: seconds that its closing line ``Hvd Procs N Total time: X second`` names; None without one.
        failure: why it counts as failed, with its last lines; None when it did not fail.
    """

    wall_s: float
    closing_s: float | None = None
    failure: str | None = None


Run = Callable[[Tuned, float | None], TrialJob]
"""Runs the job with a setting, for at most so many seconds (None: no limit), and says how it ended."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Runs a command on ``n`` ranks through ``hvdkit launch``.

    Attributes:
        n: number of ranks, > 0.
        command: what each rank runs.
        options: further options of ``hvdkit launch``, the same in every job.
    """

    n: int
    command: Sequence[str]
    options: Sequence[str] = ()

    def argv(self, setting: Tuned) -> list[str]:
        """The command line of the job with a setting."""
        start = [sys.executable, "-m", "hvdkit.cli", "launch", "-n", str(self.n), "--no-tag"]
        return [*start, *self.options, *launch_words(setting), "--", *self.command]

    def __call__(self, setting: Tuned, timeout_s: float | None) -> TrialJob:
        """Run the job; its output is read for the closing line and for the reason when it fails.

        Raises:
            KeyboardInterrupt: by Ctrl-C; the job was ended.
        """
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            start = time.monotonic()
            status = _run(self.argv(setting), output, timeout_s)
            wall_s = time.monotonic() - start
            output.seek(0)
            closing, last = _read(output)
        if status is None:
            return TrialJob(wall_s, failure=_failure(f"was ended after {timeout_s:g} seconds", last))
        if status != 0:
            return TrialJob(wall_s, failure=_failure(f"exited with status {status}", last))
        if closing is None:
            return TrialJob(wall_s)
        ranks, seconds = closing
        if ranks != self.n:
            return TrialJob(wall_s, failure=f"says 'Hvd Procs {ranks}', not {self.n}: its ranks formed no single job")
        return TrialJob(wall_s, seconds)


def _run(argv: Sequence[str], output: IO[str], timeout_s: float | None) -> int | None:
    """Exit status, None when the time was up. The process has its own group, so that Ctrl-C reaches it once, by us."""
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, process_group=0)
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Have ``hvdkit launch`` end its ranks; it leaves none behind, even when it is killed."""
    if process.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _read(lines: Iterable[str]) -> tuple[tuple[int, float] | None, list[str]]:
    """Ranks and seconds of the last closing line, and the last lines that are not empty."""
    closing: tuple[int, float] | None = None
    last: list[str] = []
    for line in lines:
        match = _CLOSING_LINE.search(line)
        if match is not None and math.isfinite(float(match[2])):
            closing = int(match[1]), float(match[2])
        if line.strip():
            last = [*last[1 - _LAST_LINES :], line.rstrip()]
    return closing, last


def _failure(what: str, last: Sequence[str]) -> str:
    return "\n".join([f"{what}; its last lines:" if last else f"{what} and printed nothing", *last])


class ToldToEnd(KeyboardInterrupt):
    """This program was told to end by a signal other than Ctrl-C's."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raise ``ToldToEnd`` when a batch system or a closed terminal ends this program, so that its job is ended too."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise ToldToEnd(number)

    with handled((signal.SIGTERM, signal.SIGHUP), end):
        yield
