"""A recording of a job, or a result of bench and emulate, as times that can be compared with those of another one.

Of the results only what is compared is read here: the rooms that write them stand above this one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from hvdkit.common import files, json_files
from hvdkit.common.json_files import Positive, Seconds, Whole
from hvdkit.common.units import bytes_text, count_text, printable, ranks_text
from hvdkit.errors import CorruptDataError, DataError
from hvdkit.observe import history, step_files
from hvdkit.observe.lateness import Floats
from hvdkit.read.explain.results import JobLaunch
from hvdkit.read.explain.sources import LAUNCH, STEPS
from hvdkit.read.explain.step_table import table
from hvdkit.read.mpi_profile import measures as mpi_measures
from hvdkit.read.mpi_profile import reading as mpi_reading
from hvdkit.read.mpi_profile.model import PURPOSES
from hvdkit.read.timeline import columns as timeline_columns
from hvdkit.read.timeline.measures import covered, union
from hvdkit.read.timeline.model import GROUPS
from hvdkit.read.timeline.reader import read as read_timeline
from hvdkit.read.timeline.summary import REDUCTIONS, find_steps
from hvdkit.read.trace.reader import collect as collect_trace
from hvdkit.read.trace.summary import by_name, files_of, one_rank, step_windows, window_of

STEP = "step"
_MONITORED = ("step", "input", "compute", "wait")
_US = 1e-6
_LEFT_OUT = ("ranks", "repeats", "seed")
"""Of what was asked of a bench: they change how sure its result is, not what was measured."""
_Measured = Annotated[float, msgspec.Meta(ge=1e-9, le=1e9)]
_Head = Annotated[int, msgspec.Meta(ge=2, le=2)]
T = TypeVar("T")


@dataclass(frozen=True)
class Timings:
    """How long one thing takes in a recording.

    Attributes:
        samples: seconds, one for each time that it was measured.
        often: how many of them a step has; where there are no steps, how many there are in all.
        calls: of a step (in all); None where a recording does not count them.
    """

    samples: Floats
    often: float = 1.0
    calls: float | None = None


@dataclass(frozen=True)
class Side:
    """One of two recordings.

    Attributes:
        path: the file or directory.
        says: what is in it, a few words.
        whole: what a user waits for; the first line is about the last one that both sides have.
        parts: what that one consists of.
        details: what the parts consist of: tensors, operators, routines, ranks.
        settings: what else can differ, by name.
        notes: what a reader should know, full sentences.
        missing: names of ``whole`` that were to be measured and were not.
    """

    path: Path
    says: str
    whole: Mapping[str, Timings]
    parts: Mapping[str, Timings] = field(default_factory=dict)
    details: Mapping[str, Timings] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def of_steps(path: Path, sources: Mapping[str, Sequence[Path]]) -> Side:
    """The times of the steps, and how the job was launched where that was recorded with them.

    Raises:
        DataError: a file that is not what a rank writes, or fewer than three steps.
    """
    job = table(step_files.read(sources[STEPS][0].parent), path, least=3)
    last = job.own.max(axis=0)
    parts = {"between steps": job.parts["between"].mean(axis=0), "input": job.parts["input"].mean(axis=0)}
    if job.ready:
        parts["computation"] = job.parts["work"].mean(axis=0)
    parts["wait for slower ranks"] = (last - job.own).mean(axis=0)
    parts["allreduce and update" if job.ready else "computation and allreduce"] = job.exchange
    settings = {"ranks": str(len(job.numbers))}
    if launched := sources.get(LAUNCH):
        how = json_files.read(launched[0], JobLaunch)
        settings |= {name: str(getattr(how, name)) for name in ("ranks", "launcher", "threads", "cores")} | how.settings
    return Side(
        path,
        f"{count_text(min(job.recorded), 'step')} of {ranks_text(len(job.numbers))}",
        {STEP: Timings(last + job.exchange)},
        {name: Timings(samples) for name, samples in parts.items()},
        {f"own time of rank {rank}": Timings(own) for rank, own in zip(job.numbers, job.own, strict=True) if job.ready},
        settings,
    )


def of_monitor(path: Path, file: Path) -> Side:
    """The windows of a monitor's ``metrics.jsonl``, without the first.

    Raises:
        DataError: it cannot be read, or has fewer than two windows with times.
    """
    lines = history.read(file)
    windows = [
        {name: [value for value in line["ranks"].get(name, ()) if value is not None] for name in _MONITORED}
        for line in lines
        if line["kind"] == "window"
    ]
    windows = [window for window in windows if window["step"]][1:]
    if not windows:
        raise CorruptDataError(
            f"{printable(str(file))} holds fewer than two windows with times of steps; expected a history that "
            "'hvdkit launch --monitor' or a Monitor wrote."
        )
    names = {"input": "input", "compute": "computation", "wait": "wait for slower ranks, and allreduce"}
    parts = {
        named: Timings(np.array([statistics.fmean(window[name]) for window in windows]))
        for name, named in names.items()
        if all(window[name] for window in windows)
    }
    sizes = [line["world_size"] for line in lines if isinstance(line.get("world_size"), int)]
    return Side(
        path,
        f"{count_text(len(windows), 'window')} after the first, {ranks_text(sizes[-1]) if sizes else 'unknown ranks'}",
        {STEP: Timings(np.array([max(window["step"]) for window in windows]))},
        parts,
        settings={"ranks": str(sizes[-1]) if sizes else "unknown"},
    )


def of_timeline(path: Path, file: Path) -> Side:
    """Horovod's timeline: its steps, what they consist of, and each phase of each tensor.

    Raises:
        DataError: it cannot be read, or holds no complete operation.
    """
    found = timeline_columns.collect(read_timeline(file))
    if not len(found.tensor):
        raise CorruptDataError(
            f"no complete operation in {str(file)!r}; give a file that Horovod wrote with HOROVOD_TIMELINE."
        )
    numbers, in_steps = find_steps(found)
    begins = found.begin[in_steps][np.unique(numbers[in_steps], return_index=True)[1]]
    steps = max(0, len(begins) - 1)
    whole, parts = {}, {}
    if steps > 1:
        since, until = begins[1:-1], begins[2:]  # the first one compiles and allocates, the last one has no end
        nested = [until - since]
        for starts, ends in ((found.begin, found.end), (found.start, found.end), found.exchange.T):
            nested.append(covered(union(starts, ends), since, until))
        names = ("no operation (input, computation)", "negotiation", "copies and queue", "collectives")
        inner = [*nested[1:], np.zeros(len(since))]
        parts = {name: Timings((outer - one) * _US) for name, outer, one in zip(names, nested, inner, strict=True)}
        whole = {STEP: Timings(nested[0] * _US)}
    sums = np.bincount(numbers[in_steps], found.bytes[in_steps]) if in_steps.any() else np.array([np.nan])
    size = "unknown" if np.isnan(sums).all() else bytes_text(float(np.nanmedian(sums)))
    reduced = len(np.unique(found.tensor[in_steps]))
    tensors = f"{count_text(reduced, 'tensor')} of {size} a step" if reduced else "no steps"
    notes = () if steps > 1 else (f"No steps are found in {printable(path.name)}: no tensor is reduced three times.",)
    return Side(
        path,
        f"{count_text(len(found.tensor), 'operation')}, {tensors}",
        whole,
        parts,
        _phases(found, steps if steps > 1 else None),
        {"ranks": str(found.ranks or "unknown"), "tensors": tensors},
        (*notes, "Tensors of one fused exchange each carry all of its time: their phases do not add up."),
    )


def _phases(found: timeline_columns.TimelineColumns, steps: int | None) -> dict[str, Timings]:
    """The phases of each tensor, without its first operation, which sets up and compiles."""
    named = {}
    for tensor, rows in zip(found.tensors, found.rows_by_tensor(), strict=True):
        name = tensor.name if tensor.kind in REDUCTIONS else f"{tensor.kind.lower()} {tensor.name}"
        for number, phase in enumerate(GROUPS):
            samples = found.durations[rows[1:], number].astype(np.float64) * _US
            samples = samples[~np.isnan(samples)]
            if len(samples):
                often = len(samples) / (steps or 1)
                named[f"{phase} of {name}"] = Timings(samples, often, often)
    return named


def of_traces(path: Path, traces: Sequence[Path]) -> Side:
    """A trace of PyTorch's profiler, of several ranks that of the first: its steps, their parts and operators.

    Raises:
        DataError: it is no whole trace.
    """
    traces = files_of(list(traces))
    columns = collect_trace(traces[0])
    rank = one_rank(columns)
    windows = [(start, end) for _, start, end in step_windows(columns)] or [window_of(columns)]
    notes = []
    if len(traces) > 1:
        notes.append(f"Of {len(traces)} traces in {printable(str(path))}, {traces[0].name} is compared; name another.")
    if rank.steps:
        rows = [(one.duration, one.computation, one.exposed, one.data) for one in rank.steps]
    else:
        rows = [(rank.times.window, rank.times.computation, rank.times.exposed, rank.times.data)]
        notes.append(f"No steps in {printable(traces[0].name)} (no profiler.step()): all of it counts as one.")
    step, *parts = np.array(rows).T / 1e3
    names = ("computation", "exposed communication", "data loading")
    return Side(
        path,
        f"{count_text(len(rank.steps), 'step')}, {count_text(rank.events, 'event')} of {traces[0].name}",
        {STEP if rank.steps else "whole trace": Timings(step)},
        {name: Timings(part) for name, part in zip(names, parts, strict=True)},
        {
            f"{kind} {name}": Timings(own / 1e3, calls=float(calls.mean()))
            for (name, kind), (calls, own, _) in by_name(columns, windows).items()
        },
        {"ranks": "unknown" if rank.size is None else str(rank.size), "computed by": rank.computed_by},
        tuple(notes),
    )


def of_mpi(path: Path, profiles: Sequence[Path]) -> Side:
    """An MPI profile: the job, what its calls were for, and each routine; medians over the ranks.

    Raises:
        DataError: a profile cannot be used.
    """
    profile = mpi_reading.read(profiles)
    seconds = [rank.seconds for rank in profile.ranks if rank.seconds]
    whole = {"time in MPI": _median([rank.mpi_seconds for rank in profile.ranks])}
    if seconds:
        whole["job"] = _median(seconds)
    parts, details = {}, {}
    for purpose in PURPOSES:
        sums = [mpi_measures.total(rank.of(purpose)) for rank in profile.ranks]
        parts[f"{purpose} in MPI"] = _median((of.seconds for of in sums), (of.calls for of in sums))
        for routine in sorted({row.routine for rank in profile.ranks for row in rank.of(purpose)}):
            sums = [mpi_measures.total(rank.of(purpose, routine)) for rank in profile.ranks]
            details[f"{routine}, {purpose}"] = _median((of.seconds for of in sums), (of.calls for of in sums))
    return Side(
        path,
        f"{len(profile.ranks)} of {ranks_text(profile.size)}, recorded by {profile.source}",
        whole,
        parts,
        details,
        {"ranks": str(profile.size), "recorder": profile.source, "MPI": profile.library or "unknown"},
        (
            *([f"{printable(path.name)}: {profile.missing_text}"] if profile.missing else ()),
            "Of a job that runs longer, compare shares rather than sums.",
        ),
    )


def _median(values: Iterable[float], calls: Iterable[int] | None = None) -> Timings:
    """Over the ranks."""
    return Timings(
        np.array([statistics.median(values)]), calls=None if calls is None else float(statistics.median(calls))
    )


class _Steps(msgspec.Struct):
    count: Positive
    step_s: _Measured
    parts: dict[str, Seconds | None]


class _Job(msgspec.Struct):
    ranks: Positive
    closing_s: Seconds | None = None
    steps: _Steps | None = None
    failure: str | None = None


class _Bench(msgspec.Struct):
    schema: Annotated[int, msgspec.Meta(ge=1, le=4)]
    asked: dict[str, Any]
    environment: dict[str, Any]
    jobs: list[_Job]


def of_bench(path: Path) -> Side:
    """Seconds of a step (weak scaling) or of all the work (strong scaling), at each number of ranks.

    Raises:
        DataError: it is no file of ``hvdkit bench scaling``, or no job in it counts.
    """
    found = _read(path, _Bench, "hvdkit bench scaling")
    jobs = [job for job in found.jobs if job.failure is None]
    stepped = bool(jobs) and all(job.steps is not None for job in jobs)
    weak = found.asked.get("mode") == "weak"
    name = f"{'step' if weak else 'work'}{'' if stepped else ' (closing line)'} on"
    samples: dict[int, list[float]] = {}
    parts: dict[str, list[float | None]] = {}
    for job in jobs:
        if not stepped or job.steps is None:
            taken = job.closing_s
        else:
            count = 1 if weak else job.steps.count
            taken = job.steps.step_s * count
            for part, seconds in job.steps.parts.items() if job.ranks == max(one.ranks for one in jobs) else ():
                parts.setdefault(part, []).append(None if seconds is None else seconds * count)
        if taken:
            samples.setdefault(job.ranks, []).append(taken)
    if not samples:
        raise DataError(f"{printable(str(path))} holds no job that counts; measure it again.")
    return Side(
        path,
        f"{sum(map(len, samples.values()))} jobs on {', '.join(map(str, sorted(samples)))} ranks",
        {f"{name} {ranks_text(n)}": Timings(np.array(samples[n])) for n in sorted(samples)},
        {part: Timings(np.array(seconds, float)) for part, seconds in parts.items() if None not in seconds},
        settings=dict(_flat({key: value for key, value in found.asked.items() if key not in _LEFT_OUT}))
        | dict(_flat(found.environment)),
        missing=tuple(
            f"{name} {ranks_text(n)}" for n in found.asked.get("ranks", ()) if isinstance(n, int) and n not in samples
        ),
    )


class _Collective(msgspec.Struct):
    bytes: Whole
    dtype: str
    gap_s: Seconds = 0.0


class _Plan(msgspec.Struct):
    collectives: list[_Collective]


class _Sample(msgspec.Struct):
    trial: Whole
    index: Whole
    size: Whole
    skew_s: Seconds
    transfer_s: Seconds
    slowest_s: Seconds


class _Emulated(msgspec.Struct):
    schema: _Head
    asked: dict[str, Any]
    environment: dict[str, Any]
    plan: _Plan
    samples: list[_Sample]


def of_emulation(path: Path) -> Side:
    """The delay of the slowest rank, size by size, and of whole steps with the wait for the last rank apart.

    Raises:
        DataError: it is no file of ``hvdkit emulate``, or holds no sample.
    """
    found = _read(path, _Emulated, "hvdkit emulate")
    if not found.samples:
        raise DataError(f"{printable(str(path))} holds no sample; measure it again.")
    planned = [collective.bytes for collective in found.plan.collectives]
    kind = str(found.asked.get("collective", "collective"))
    whole = {}
    for size in sorted({sample.size for sample in found.samples}):
        taken = np.array([sample.slowest_s for sample in found.samples if sample.size == size])
        whole[f"{kind} of {size} bytes"] = Timings(taken, float(planned.count(size)), float(planned.count(size)))
    _, trial, counts = np.unique([sample.trial for sample in found.samples], return_inverse=True, return_counts=True)
    complete = counts == len(planned)
    # with fusion all collectives of a step are under way at the same time: the longest counts
    gather = np.maximum if found.asked.get("fusion") else np.add

    def of_steps(values: list[float]) -> Timings:
        sums = np.zeros(len(counts))
        gather.at(sums, trial, values)
        return Timings(sums[complete])

    parts = {}
    if complete.any():
        name = f"step of {len(planned)} {kind}s, {bytes_text(sum(planned))}"
        whole[name] = of_steps([sample.slowest_s for sample in found.samples])
        parts["wait for the last rank"] = of_steps([sample.skew_s for sample in found.samples])
        parts["transfer"] = of_steps([sample.transfer_s for sample in found.samples])
    gaps = sum(collective.gap_s for collective in found.plan.collectives)
    types = ", ".join(sorted({collective.dtype for collective in found.plan.collectives}))
    return Side(
        path,
        f"{len(found.samples)} collectives in {len(counts)} trials",
        whole,
        parts,
        settings=dict(_flat(found.asked)) | dict(_flat(found.environment)) | {"types": types, "gaps": f"{gaps:g} s"},
        notes=("The intervals hold the noise within each run, not what changes from run to run.",),
    )


def _read(path: Path, shape: type[T], written_by: str) -> T:
    try:
        return msgspec.json.decode(files.content(path), type=shape)
    except OSError as error:
        raise DataError(f"{printable(str(path))} cannot be read ({error.strerror}).") from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptDataError(
            f"{printable(str(path))} is not a file of '{written_by}' that this version knows: "
            f"{printable(str(error))}; copy it again, or make it again."
        ) from error


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values in words; what is inside an entry is named after it: ``packages torch``. Lists are joined."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name} {inner}", text) for inner, text in _flat(value))
        elif isinstance(value, list):
            yield name, " ".join(map(str, value))
        else:
            yield name, "none" if value is None else str(value)
