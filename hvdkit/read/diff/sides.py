"""A recording of a job, or a result of bench and emulate, as times that can be compared with those of another one."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from hvdkit.common import files, json_files
from hvdkit.common.json_files import Positive, Seconds, Whole
from hvdkit.common.units import bytes_text, count_text, printable, ranks_text
from hvdkit.errors import CorruptDataError, DataError
from hvdkit.observe import history, step_files
from hvdkit.observe.lateness import Floats
from hvdkit.read.explain.sources import BENCH, EMULATE, LAUNCH, MONITOR, MPI, STEPS, TIMELINE, TRACE, JobLaunch
from hvdkit.read.explain.step_table import table
from hvdkit.read.mpi_profile import reading as mpi_reading
from hvdkit.read.mpi_profile.model import PURPOSES
from hvdkit.read.mpi_profile.results import total as mpi_total
from hvdkit.read.spans import covered, union
from hvdkit.read.timeline import columns as timeline_columns
from hvdkit.read.timeline.reader import GROUPS
from hvdkit.read.timeline.reader import read as read_timeline
from hvdkit.read.timeline.summary import find_steps
from hvdkit.read.trace.reader import collect as collect_trace
from hvdkit.read.trace.summary import by_name, one_rank, step_windows, window_of

STEP = "step"
_MONITORED = ("step", "input", "compute", "wait")
_US = 1e-6
_LEFT_OUT = ("ranks", "repeats", "seed")
"""Of what was asked of a bench: they change how sure its result is, not what was measured."""
T = TypeVar("T")
Sources = Mapping[str, Sequence[Path]]
"""Files by what they are (``explain.sources``)."""


class Timings(NamedTuple):
    """How long one thing takes in a recording: seconds, one for each time that it was measured."""

    samples: Floats
    often: float = 1.0
    """How many of them a step has."""
    calls: float | None = None
    """Of a step (in all); None where a recording does not count them."""


@dataclass(frozen=True)
class Side:
    """One of two recordings.

    Attributes:
        says: what is in it, a few words.
        whole: what a user waits for; the first line is about the last one that both sides have.
        parts: what that one consists of.
        details: what the parts consist of: tensors, operators, routines, ranks.
        settings: what else can differ, by name.
        notes: what a reader should know, full sentences.
        missing: names of ``whole`` that were to be measured and were not.
    """

    says: str
    whole: Mapping[str, Timings]
    parts: Mapping[str, Timings] = field(default_factory=dict)
    details: Mapping[str, Timings] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def of_steps(sources: Sources) -> Side:
    """The times of the steps, and how the job was launched where that was recorded with them."""
    directory = sources[STEPS][0].parent
    job = table(step_files.read(directory), directory, least=3)
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
        f"{count_text(min(job.recorded), 'step')} of {ranks_text(len(job.numbers))}",
        {STEP: Timings(last + job.exchange)},
        {name: Timings(samples) for name, samples in parts.items()},
        {f"own time of rank {rank}": Timings(own) for rank, own in zip(job.numbers, job.own, strict=True) if job.ready},
        settings,
    )


def of_monitor(sources: Sources) -> Side:
    """The windows of a monitor's ``metrics.jsonl``, without the first."""
    (file,) = sources[MONITOR]
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
        f"{count_text(len(windows), 'window')} after the first, {ranks_text(sizes[-1]) if sizes else 'unknown ranks'}",
        {STEP: Timings(np.array([max(window["step"]) for window in windows]))},
        parts,
        settings={"ranks": str(sizes[-1]) if sizes else "unknown"},
    )


def of_timeline(sources: Sources) -> Side:
    """Horovod's timeline: its steps, what they consist of, and each phase of each tensor."""
    (file,) = sources[TIMELINE]
    found = timeline_columns.collect(read_timeline(file))
    numbers, in_steps, begins = find_steps(found)
    steps = len(begins) - 1
    if steps < 2:
        raise CorruptDataError(
            f"no steps in {str(file)!r}: no tensor is reduced three times; give a file that Horovod wrote with "
            "HOROVOD_TIMELINE, in which each tensor has the same name in all steps."
        )
    since, until = begins[1:-1], begins[2:]  # the first one compiles and allocates, the last one has no end
    nested = [until - since]
    for starts, ends in ((found.begin, found.end), (found.start, found.end), found.exchange.T):
        nested.append(covered(union(starts, ends), since, until))
    names = ("no operation (input, computation)", "negotiation", "copies and queue", "collectives")
    inner = [*nested[1:], np.zeros(len(since))]
    parts = {name: Timings((outer - one) * _US) for name, outer, one in zip(names, nested, inner, strict=True)}
    phases = {}
    for tensor, rows in zip(found.tensors, found.rows_by_tensor(), strict=True):
        name = tensor.name if tensor.is_reduced else f"{tensor.kind.lower()} {tensor.name}"
        for phase, samples in zip(GROUPS, found.durations[rows[1:]].T.astype(np.float64), strict=True):
            if len(known := samples[~np.isnan(samples)] * _US):  # without the first operation, which sets up
                often = len(known) / steps
                phases[f"{phase} of {name}"] = Timings(known, often, often)
    sums = np.bincount(numbers[in_steps], found.reduced_bytes()[in_steps])
    size = "unknown" if np.isnan(sums).all() else bytes_text(float(np.nanmedian(sums)))
    tensors = f"{count_text(len(np.unique(found.tensor[in_steps])), 'tensor')} of {size} a step"
    return Side(
        f"{count_text(len(found.tensor), 'operation')}, {tensors}",
        {STEP: Timings(nested[0] * _US)},
        parts,
        phases,
        {"ranks": str(found.ranks or "unknown"), "tensors": tensors},
        ("Tensors of one fused exchange each carry all of its time: their phases do not add up.",),
    )


def of_traces(sources: Sources) -> Side:
    """A trace of PyTorch's profiler, of several ranks that of the first: its steps, their parts and operators."""
    traces = sources[TRACE]
    columns = collect_trace(traces[0])
    rank = one_rank(columns)
    windows = [(start, end) for _, start, end in step_windows(columns)] or [window_of(columns)]
    notes = []
    if len(traces) > 1:
        where = printable(str(traces[0].parent))
        notes.append(f"Of {len(traces)} traces in {where}, {traces[0].name} is compared; name another.")
    if rank.steps:
        rows = [(one.duration, one.computation, one.exposed, one.data) for one in rank.steps]
    else:
        rows = [(rank.times.window, rank.times.computation, rank.times.exposed, rank.times.data)]
        notes.append(f"No steps in {printable(traces[0].name)} (no profiler.step()): all of it counts as one.")
    step, *parts = np.array(rows).T / 1e3
    names = ("computation", "exposed communication", "data loading")
    return Side(
        f"{count_text(len(rank.steps), 'step')}, {count_text(rank.events, 'event')} of {traces[0].name}",
        {STEP if rank.steps else "whole trace": Timings(step)},
        {name: Timings(part) for name, part in zip(names, parts, strict=True)},
        {
            f"{kind} {name}": Timings(own / 1e3, calls=float(calls.mean()))
            for (name, kind), (calls, own) in by_name(columns, windows).items()
        },
        {"ranks": "unknown" if rank.size is None else str(rank.size), "computed by": rank.computed_by},
        tuple(notes),
    )


def of_mpi(sources: Sources) -> Side:
    """An MPI profile: the job, what its calls were for, and each routine; medians over the ranks."""
    profile = mpi_reading.read(sources[MPI])
    seconds = [rank.seconds for rank in profile.ranks if rank.seconds]
    whole = {"time in MPI": _median([rank.mpi_seconds for rank in profile.ranks])}
    if seconds:
        whole["job"] = _median(seconds)
    parts, details = {}, {}
    for purpose in PURPOSES:
        sums = [mpi_total(rank.of(purpose)) for rank in profile.ranks]
        parts[f"{purpose} in MPI"] = _median((of.seconds for of in sums), (of.calls for of in sums))
        for routine in sorted({row.routine for rank in profile.ranks for row in rank.of(purpose)}):
            sums = [mpi_total(rank.of(purpose, routine)) for rank in profile.ranks]
            details[f"{routine}, {purpose}"] = _median((of.seconds for of in sums), (of.calls for of in sums))
    return Side(
        f"{len(profile.ranks)} of {ranks_text(profile.size)}, recorded by {profile.source}",
        whole,
        parts,
        details,
        {"ranks": str(profile.size), "recorder": profile.source, "MPI": profile.library or "unknown"},
        (
            *([f"{printable(str(sources[MPI][0]))}: {profile.missing_text}"] if profile.missing else ()),
            "Of a job that runs longer, compare shares rather than sums.",
        ),
    )


def _median(values: Iterable[float], calls: Iterable[int] | None = None) -> Timings:
    often = None if calls is None else float(statistics.median(calls))
    return Timings(np.array([statistics.median(values)]), calls=often)


class _Steps(msgspec.Struct):
    count: Positive
    step_s: Annotated[float, msgspec.Meta(ge=1e-9, le=1e9)]
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


def of_bench(sources: Sources) -> Side:
    """Seconds of a step (weak scaling) or of all the work (strong scaling), at each number of ranks."""
    path = sources[BENCH][0]
    found = _read(path, _Bench, "hvdkit bench scaling")
    jobs = [job for job in found.jobs if job.failure is None]
    stepped = all(job.steps is not None for job in jobs)
    weak = found.asked.get("mode") == "weak"
    name = f"{'step' if weak else 'work'}{'' if stepped else ' (closing line)'} on"
    samples, parts = defaultdict(list), defaultdict(list)
    for job in jobs:
        taken = job.closing_s
        if stepped and job.steps is not None:
            count = 1 if weak else job.steps.count
            taken = job.steps.step_s * count
            for part, seconds in job.steps.parts.items() if job.ranks == max(one.ranks for one in jobs) else ():
                parts[part].append(np.nan if seconds is None else seconds * count)
        if taken:
            samples[job.ranks].append(taken)
    if not samples:
        raise DataError(f"{printable(str(path))} holds no job that counts; measure it again.")
    return Side(
        f"{sum(map(len, samples.values()))} jobs on {', '.join(map(str, sorted(samples)))} ranks",
        {f"{name} {ranks_text(n)}": Timings(np.array(samples[n])) for n in sorted(samples)},
        {part: Timings(np.array(seconds)) for part, seconds in parts.items() if not np.isnan(seconds).any()},
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
    size: Whole
    skew_s: Seconds
    transfer_s: Seconds
    slowest_s: Seconds


class _Emulated(msgspec.Struct):
    schema: Annotated[int, msgspec.Meta(ge=2, le=2)]
    asked: dict[str, Any]
    environment: dict[str, Any]
    plan: _Plan
    samples: list[_Sample]


def of_emulation(sources: Sources) -> Side:
    """The delay of the slowest rank, size by size, and of whole steps with the wait for the last rank apart."""
    path = sources[EMULATE][0]
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
    """Names and values in words; what is inside an entry is named after it: ``packages torch``."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name} {inner}", text) for inner, text in _flat(value))
        elif isinstance(value, list):
            yield name, " ".join(map(str, value))
        else:
            yield name, "none" if value is None else str(value)


READERS = {
    STEPS: of_steps,
    MONITOR: of_monitor,
    TIMELINE: of_timeline,
    TRACE: of_traces,
    MPI: of_mpi,
    BENCH: of_bench,
    EMULATE: of_emulation,
}
"""How each kind is read; of directories that hold several the first kind that both have counts."""
