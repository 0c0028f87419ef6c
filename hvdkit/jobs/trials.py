"""Short jobs that are run to be timed: what ``tune``, ``bench`` and ``emulate`` share.

First the default job as this machine and this command leave it, and the settings worth trying beside it; a setting is a
``Tuned``, and the empty one is what ``hvdkit launch`` does by itself. Then one job: a ``hvdkit launch`` in a process of
its own, from start to end, how long it took, and what ends it.
"""

from __future__ import annotations

import contextlib
import itertools
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

import numpy as np

from hvdkit.common.programs import handled
from hvdkit.common.units import count_text
from hvdkit.errors import InvalidArgumentError
from hvdkit.jobs.launch import facts, plan
from hvdkit.jobs.launch.model import LaunchFacts, LaunchPlan
from hvdkit.jobs.launch.options import Request, as_words
from hvdkit.jobs.launch.tuned import MIB, Tuned
from hvdkit.steps.device import threads_asked

DEFAULT = Tuned()
CYCLE_TIMES_MS = (0.1, 0.5, 5.0)
"""Around Horovod's own 1 ms: quicker answers for small models, fewer interruptions and more fusion for large ones."""
FUSION_THRESHOLDS_BYTES = (4 * MIB, 32 * MIB)
"""Below Horovod's own 128 MiB: less copying, and the first allreduce begins while gradients are still computed."""
WITH_A_CONTROLLER = ("mpirun", "horovodrun")
"""Launchers that stand for Horovod's two controllers, MPI and Gloo."""
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

    def launchers(self) -> tuple[str, ...]:
        """The other one of mpirun and horovodrun, where the launcher is open and Horovod was built for both."""
        horovod = self.facts.horovod
        name = self.plan.launcher_name
        if self.request.launcher != "auto" or name not in WITH_A_CONTROLLER or horovod is None:
            return ()
        works = {
            "mpirun": horovod.mpi and self.facts.mpi is not None,
            "horovodrun": horovod.gloo and self.facts.horovodrun is not None,
        }
        return tuple(launcher for launcher in WITH_A_CONTROLLER if works[launcher] and launcher != name)

    def threads(self) -> tuple[int, ...]:
        """Thread counts to try; none where the cores of a rank are not known."""
        together = plan.ranks_on_a_host(self.plan.launcher_name, self.request)
        share = None if together is None else max(1, self.facts.cores // together)
        return thread_choices(self.request.depth or share, threads_asked(self.plan.environment))

    def describe(self) -> str:
        """The default settings, for a reader."""
        threads = self.plan.environment.get("OMP_NUM_THREADS")
        words = [self.plan.launcher_name, f"OMP_NUM_THREADS={threads}" if threads else "OMP_NUM_THREADS unset"]
        set_before = [
            f"{name}={self.plan.environment[name]}"
            for name in ("HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD")
            if self.plan.environment.get(name)
        ]
        return ", ".join([*words, *set_before])

    def notes(self) -> tuple[str, ...]:
        """What a reader of the numbers should know."""
        if self.plan.elsewhere or self.request.n <= self.facts.cores:
            return ()
        return (
            f"{self.request.n} ranks share {count_text(self.facts.cores, 'core')}: what is measured is how they "
            "contend for them, and what is fast here may be slow where each rank has cores of its own.",
        )


def look(n: int, command: tuple[str, ...], given: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Here:
    """Plan the default job, so that a mistake is found before anything runs.

    Args:
        n: number of ranks, > 0.
        command: what each rank runs.
        given: options that are passed on to every ``hvdkit launch``, by the names of ``options.OPTIONS``.
        environ: the environment; default: that of this process.
    Raises:
        InvalidArgumentError: no such command, launcher or host, or Horovod's autotuner is on.
        LaunchError: there is nothing to launch with.
    """
    if not command:
        raise InvalidArgumentError("No command to run was given; write it last: hvdkit tune -n 2 -- python train.py")
    environ = dict(os.environ) if environ is None else dict(environ)
    autotune = {**environ, **given.get("variables", {})}.get("HOROVOD_AUTOTUNE", "")
    if autotune not in ("", "0"):
        raise InvalidArgumentError(
            f"HOROVOD_AUTOTUNE={autotune} has Horovod change the settings while they are measured; unset it."
        )
    request = facts.settle(command, environ, n=n, **given)
    return Here(request, *facts.planned(request, environ), tuple(as_words(given)))


@dataclass(frozen=True, slots=True)
class Space:
    """What to try beside the default, setting by setting.

    Attributes:
        launchers: "mpirun", "horovodrun".
        threads: compute threads per rank, > 0.
        cycle_times_ms: milliseconds, >= 0.
        fusion_thresholds_bytes: bytes, >= 0.
    """

    launchers: tuple[str, ...] = ()
    threads: tuple[int, ...] = ()
    cycle_times_ms: tuple[float, ...] = CYCLE_TIMES_MS
    fusion_thresholds_bytes: tuple[int, ...] = FUSION_THRESHOLDS_BYTES

    def candidates(self, limit: int, rng: np.random.Generator) -> list[Tuned]:
        """The settings to try: each change alone, then random combinations of several until there are ``limit``.

        Args:
            limit: the most to return, >= 1; the default is not counted and not among them.
            rng: draws what does not fit all together.
        """
        axes: dict[str, Sequence[Any]] = {
            "launcher": self.launchers,
            "threads": self.threads,
            "cycle_time_s": [time_ms / 1000 for time_ms in self.cycle_times_ms],
            "fusion_threshold_bytes": self.fusion_thresholds_bytes,
        }
        alone = [Tuned(**{name: value}) for name, values in axes.items() for value in dict.fromkeys(values)]
        every = itertools.product(*([None, *dict.fromkeys(values)] for values in axes.values()))
        combined = [Tuned(**dict(zip(axes, values, strict=True))) for values in every]
        combined = [setting for setting in combined if setting != DEFAULT and setting not in alone]
        shuffled = [combined[index] for index in rng.permutation(len(combined))]
        if len(alone) > limit:
            return [alone[index] for index in sorted(rng.permutation(len(alone))[:limit])]
        return [*alone, *shuffled][:limit]


def thread_choices(share: int | None, current: int | None) -> tuple[int, ...]:
    """Thread counts worth trying: the whole share of a rank, one less (for Horovod's own thread) and the half.

    Args:
        share: cores of a rank, None where they are not known.
        current: threads that a rank has by default, None where that is not known.
    """
    if share is None:
        return ()
    return tuple(sorted({threads for threads in (share, share - 1, share // 2) if threads >= 1} - {current}))


def label(setting: Tuned) -> str:
    """The setting for a reader: ``horovodrun, cycle 5 ms``."""
    words = [
        setting.launcher,
        None if setting.threads is None else f"{setting.threads} thread{'s' if setting.threads > 1 else ''}",
        None if setting.cycle_time_ms is None else f"cycle {setting.cycle_time_ms:g} ms",
        None if setting.fusion_threshold_bytes is None else f"fusion {setting.fusion_threshold_bytes / MIB:g} MiB",
    ]
    return ", ".join(word for word in words if word is not None) or "default"


def launch_words(setting: Tuned) -> list[str]:
    """The options of ``hvdkit launch`` that say the same."""
    return as_words({"launcher": setting.launcher, "threads": setting.threads, "variables": setting.variables()})


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
