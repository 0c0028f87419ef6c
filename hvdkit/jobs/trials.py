"""Short jobs that are run to be timed: what ``tune``, ``bench`` and ``emulate`` share.

Each is a ``hvdkit launch`` in a process of its own, from start to end: how long it took, and what ends it.
"""

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any

from hvdkit.common.programs import handled
from hvdkit.common.units import count_text
from hvdkit.errors import InvalidArgumentError
from hvdkit.jobs.launch import facts
from hvdkit.jobs.launch.model import LaunchFacts, LaunchPlan
from hvdkit.jobs.launch.options import Request, as_words
from hvdkit.jobs.launch.tuned import Tuned

DEFAULT = Tuned()
"""What ``hvdkit launch`` does by itself."""
_CLOSING_LINE = re.compile(
    r"Hvd Procs +([0-9]{1,9}) +Total time: *((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?) +second"
)
_LAST_LINES = 8
_PATIENCE_S = 10.0
"""Seconds that a job which is told to end has for it before it is killed."""


@dataclass(frozen=True, slots=True)
class Here:
    """The default job as it would be started here.

    Attributes:
        request: what is asked for.
        facts: what there is to launch with.
        plan: how ``hvdkit launch`` would start it.
        options: of ``hvdkit launch`` that ask for it, -n left out.
    """

    request: Request
    facts: LaunchFacts
    plan: LaunchPlan
    options: tuple[str, ...]

    def notes(self) -> tuple[str, ...]:
        """What a reader of the numbers should know."""
        if self.plan.elsewhere or self.request.n <= self.facts.cores:
            return ()
        return (
            f"{self.request.n} ranks share {count_text(self.facts.cores, 'core')}: what is measured is how they "
            "contend for them, and what is fast here may be slow where each rank has cores of its own.",
        )


def look(n: int, command: tuple[str, ...], given: Mapping[str, Any]) -> Here:
    """Plan the default job, so that a mistake is found before anything runs.

    Args:
        n: number of ranks, > 0.
        command: what each rank runs.
        given: options that are passed on to every ``hvdkit launch``, by the names of ``options.OPTIONS``.
    Raises:
        InvalidArgumentError: no such command, launcher or host, or Horovod's autotuner is on.
        LaunchError: there is nothing to launch with.
    """
    if not command:
        raise InvalidArgumentError("No command to run was given; write it last: hvdkit tune -n 2 -- python train.py")
    environ = dict(os.environ)
    autotune = {**environ, **given.get("variables", {})}.get("HOROVOD_AUTOTUNE", "")
    if autotune not in ("", "0"):
        raise InvalidArgumentError(
            f"HOROVOD_AUTOTUNE={autotune} has Horovod change the settings while they are measured; unset it."
        )
    request = facts.settle(command, environ, n=n, **given)
    return Here(request, *facts.planned(request, environ), tuple(as_words(given)))


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
        start = [sys.executable, "-P", "-m", "hvdkit.cli", "launch", "-n", str(self.n), "--no-tag"]
        tuned = {"launcher": setting.launcher, "threads": setting.threads, "variables": setting.variables()}
        return [*start, *self.options, *as_words(tuned), "--", *self.command]

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
        if status != 0:
            what = f"was ended after {timeout_s:g} seconds" if status is None else f"exited with status {status}"
            what += "; its last lines:" if last else " and printed nothing"
            return TrialJob(wall_s, failure="\n".join([what, *last]))
        if closing is None:
            return TrialJob(wall_s)
        ranks, seconds = closing
        if ranks != self.n:
            return TrialJob(wall_s, failure=f"says 'Hvd Procs {ranks}', not {self.n}: its ranks formed no single job")
        return TrialJob(wall_s, seconds)


def _run(argv: Sequence[str], output: IO[str], timeout_s: float | None) -> int | None:
    """Exit status, None when the time was up. The process has its own group, so that Ctrl-C reaches it once, by us.

    ``hvdkit launch`` leaves no rank behind, even when it is killed.
    """
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, process_group=0)
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
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
