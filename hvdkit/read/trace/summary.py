"""From the arrays of a trace to what the time was spent on, and how far the ranks are apart."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from msgspec import structs

from hvdkit.common.files import is_directory
from hvdkit.errors import DataError, InvalidArgumentError
from hvdkit.observe import lateness
from hvdkit.observe.lateness import Floats
from hvdkit.read.causes import by_cost
from hvdkit.read.spans import common, covered, inside, joined, length, without
from hvdkit.read.trace.reader import LABELS, ON_GPU, STEP_NAME, SYNCHRONISES, Kind, TraceColumns, collect
from hvdkit.read.trace.results import IdleGpu, Operator, RankTrace, TraceStep, TraceSummary, TraceTimes, causes

_Waits = dict[tuple[int, str, int], float]
"""Milliseconds that a rank was in each collective: step, name, and the how many-th of this name in the step."""
HIDDEN = (
    "Horovod exchanges gradients in a thread that the profiler does not see: communication here is the wait for it, "
    "all of it exposed; for the rest record a timeline, too, `hvdkit timeline merge` both and read the merged file."
)
ROUNDING = 1.0
"""Microseconds by which a call inside another may seem to end after it, where times are whole microseconds."""
STARTS = ("nccl:", "c10d::", "_c10d_functional", "c10d_functional", "record_param_comms")
"""How the host's calls begin that start a collective and do not wait for its end."""
NO_STEPS = "no steps in the trace (no profiler.step()): everything from the first event to the last is one window."


def summarize(paths: Sequence[str | Path]) -> TraceSummary:
    """What the traces of one run were spent on, rank by rank, and how far the ranks are apart.

    Args:
        paths: of files that torch.profiler exported, one for each rank; a directory stands for the traces in it.
    Raises:
        InvalidArgumentError: no path, two files of the same rank, or files of jobs of different size.
        DataNotFoundError, DataError, CorruptDataError: a file is missing, cannot be read, or is no whole trace.
    """
    found = []
    for path in files_of(paths):
        columns = collect(path)
        one = one_rank(columns)
        found.append((one, _collectives(columns)))
    found.sort(key=lambda pair: (pair[0].rank is None, pair[0].rank or 0))
    _require_one_run([rank for rank, _ in found])
    ranks, note = _compared(found)
    summary = TraceSummary(tuple(ranks), note)
    return structs.replace(summary, causes=tuple(by_cost(causes(summary))))


def files_of(paths: Sequence[str | Path]) -> list[Path]:
    """The files, each directory replaced by its traces (*.json and *.json.gz)."""
    if not paths:
        raise InvalidArgumentError("give at least one trace, or a directory with traces.")
    files: list[Path] = []
    for path in map(Path, paths):
        if not is_directory(path):
            files.append(path)
            continue
        inside_it = sorted(one for one in path.iterdir() if one.name.endswith((".json", ".json.gz")))
        if not inside_it:
            raise DataError(f"no *.json and no *.json.gz in the directory {str(path)!r}; give the one with the traces.")
        files += inside_it
    return files


def one_rank(columns: TraceColumns) -> RankTrace:
    """What one trace holds."""
    since, until = window_of(columns)
    sets = Sets(columns)
    steps = _steps(columns, sets)
    notes = [] if steps else [NO_STEPS]
    if sets.only_waits:
        notes.append(HIDDEN)
    found = [
        Operator(name, label, int(calls.sum()), max(0.0, float(own.sum())))
        for (name, label), (calls, own) in by_name(columns, [(since, until)]).items()
    ]
    return RankTrace(
        path=str(columns.path),
        rank=columns.rank,
        size=columns.size,
        times=times_between(sets, since, until),
        computed_by=sets.computed_by,
        steps=steps,
        operators=tuple(sorted(found, key=lambda operator: (-operator.self_ms, operator.name))),
        events=columns.events,
        skipped=columns.skipped,
        notes=tuple(notes),
        gpu=_idle_gpu(columns, sets, since, until),
    )


def _idle_gpu(columns: TraceColumns, sets: Sets, since: float, until: float) -> IdleGpu | None:
    """When the GPU neither computes nor communicates in the window, and why."""
    if not columns.are(Kind.KERNEL, Kind.TRANSFER).any():
        return None
    idle = without((np.array([since]), np.array([until])), joined(sets.computation, sets.communication))
    copying = common(idle, sets.copies)
    loading = without(common(idle, sets.data), copying)
    left = without(idle, joined(copying, loading))
    waits = {
        name: common(left, columns.covered(columns.name == number))
        for number, name in enumerate(columns.names)
        if SYNCHRONISES.match(name)
    }
    synchronising = length(joined(*waits.values())) if waits else 0.0
    return IdleGpu(
        idle=length(idle) / 1e3,
        loading=length(loading) / 1e3,
        copying=length(copying) / 1e3,
        synchronising=synchronising / 1e3,
        launching=max(0.0, length(left) - synchronising) / 1e3,
        call=max(waits, key=lambda name: length(waits[name])) if synchronising else "",
    )


class Sets:
    """When a process computed, communicated, loaded data and copied: disjoint intervals in microseconds."""

    def __init__(self, columns: TraceColumns) -> None:
        # The host's calls that only start a collective count where nothing shows how long that ran.
        calls = columns.are(Kind.CALL, Kind.BACKGROUND, Kind.TRANSFER, Kind.EXCHANGE)
        starts = np.array([name.startswith(STARTS) for name in columns.names])[columns.name]
        shown = calls & (~starts | columns.are(Kind.TRANSFER))
        communication = shown if shown.any() or columns.are(*ON_GPU).any() else calls
        self.communication = columns.covered(communication)
        self.data = columns.covered(columns.are(Kind.DATA))
        self.copies = columns.covered(columns.are(Kind.COPY))
        names = [columns.names[number] for number in np.unique(columns.name[communication]).tolist()]
        self.only_waits = bool(names) and all(name.startswith("hvdkit:") for name in names)
        self.computed_by = "GPU kernels"
        self.computation = columns.covered(columns.are(Kind.KERNEL))
        if columns.are(Kind.KERNEL, Kind.TRANSFER).any():
            return
        self.computed_by = "CPU operators of the thread that computed longest"
        operators, elsewhere = columns.are(Kind.OPERATOR), columns.are(Kind.CALL, Kind.DATA)
        for thread in np.unique(columns.thread[operators]).tolist():
            mine = columns.thread == thread
            found = without(columns.covered(mine & operators), columns.covered(mine & elsewhere))
            self.computation = max(self.computation, found, key=length)


def window_of(columns: TraceColumns) -> tuple[float, float]:
    """From the first step to the last and the kernels that they started; without steps from first to last event."""
    steps = columns.are(Kind.STEP)
    counted = steps if steps.any() else np.ones(len(columns.start), bool)
    since, until = float(columns.start[counted].min()), float(columns.end[counted].max())
    late = columns.are(*ON_GPU) & (columns.start >= since)
    return since, max(until, float(columns.end[late].max(initial=until)))


def times_between(sets: Sets, since: float, until: float) -> TraceTimes:
    """Where the time went between two moments, in microseconds of the trace."""
    computation, communication, data, copies = (
        inside(one, since, until) for one in (sets.computation, sets.communication, sets.data, sets.copies)
    )
    overlapped = length(common(computation, communication))
    busy = joined(computation, communication)
    return TraceTimes(
        window=(until - since) / 1e3,
        computation=length(computation) / 1e3,
        communication=length(communication) / 1e3,
        overlapped=overlapped / 1e3,
        exposed=(length(communication) - overlapped) / 1e3,
        data=length(data) / 1e3,
        exposed_data=length(without(data, busy)) / 1e3,
        copies=length(copies) / 1e3,
        other=max(0.0, until - since - length(joined(busy, data, copies))) / 1e3,
    )


def step_windows(columns: TraceColumns) -> list[tuple[int, float, float]]:
    """Number, start and end of each step in order of time; those of one number that overlap are one step."""
    rows = np.flatnonzero(columns.are(Kind.STEP))
    found: list[tuple[int, float, float]] = []
    for row in rows[np.argsort(columns.start[rows], kind="stable")].tolist():
        number = int(STEP_NAME.findall(columns.names[int(columns.name[row])])[0])
        start, end = float(columns.start[row]), float(columns.end[row])
        if found and found[-1][0] == number and start < found[-1][2]:
            found[-1] = number, found[-1][1], max(end, found[-1][2])
        else:
            found.append((number, start, end))
    return found


def _steps(columns: TraceColumns, sets: Sets) -> tuple[TraceStep, ...]:
    windows = step_windows(columns)
    starts, ends = np.array([window[1] for window in windows]), np.array([window[2] for window in windows])
    exposed = without(sets.communication, sets.computation)
    parts = [covered(part, starts, ends) / 1e3 for part in (sets.computation, exposed, sets.data)]
    return tuple(
        TraceStep(number, (end - start) / 1e3, *(float(part[index]) for part in parts))
        for index, (number, start, end) in enumerate(windows)
    )


def _require_one_run(ranks: Sequence[RankTrace]) -> None:
    sizes = {one.size: one for one in ranks if one.size is not None}
    if len(sizes) > 1:
        told = " and ".join(f"{one.path!r} of {size} ranks" for size, one in list(sizes.items())[:2])
        raise InvalidArgumentError(
            f"not of one run: {told}; give the traces of one run, or compare two runs with `hvdkit diff`."
        )
    seen: dict[int, RankTrace] = {}
    for one in ranks:
        if one.rank is None:
            continue
        if one.rank in seen:
            raise InvalidArgumentError(
                f"{seen[one.rank].path!r} and {one.path!r} are both of rank {one.rank}; give one trace of each rank of "
                "one run, or compare two runs with `hvdkit diff`."
            )
        seen[one.rank] = one


def by_name(columns: TraceColumns, windows: Sequence[tuple[float, float]]) -> dict[tuple[str, str], Floats]:
    """Operators, kernels, ranges and copies by name and kind, without steps and what a merged timeline added.

    Args:
        columns: the trace.
        windows: start and end of each, in order of time, in microseconds of the trace.
    Returns:
        (2, windows): calls, and milliseconds in the calls themselves.
    """
    begins, ends = np.array(windows).T
    window = np.searchsorted(begins, columns.start, side="right") - 1
    counted = (window >= 0) & (columns.are(*ON_GPU) | (columns.start < ends[window]))
    rows = np.flatnonzero(counted & columns.are(*LABELS))
    cells, shape = columns.name[rows] * len(windows) + window[rows], (len(columns.names), len(windows))
    sums = [
        np.bincount(cells, times, shape[0] * shape[1]).reshape(shape)
        for times in (None, self_times(columns)[rows] / 1e3)
    ]
    found: dict[tuple[str, str], Floats] = {}
    numbers, first = np.unique(columns.name[rows], return_index=True)
    for number, kind in zip(numbers.tolist(), columns.kind[rows[first]].tolist(), strict=True):
        key = columns.names[number], LABELS[Kind(kind)]
        found[key] = found.get(key, 0.0) + np.stack([of_names[number] for of_names in sums])
    return found


def self_times(columns: TraceColumns) -> Floats:
    """Microseconds of each event without the calls inside it, thread by thread.

    What goes on after what it began in has ended holds nothing, as communication in the background and a step, of which
    `hvdkit launch --torch-profile` begins the next one within the optimizer's step().
    """
    own = columns.end - columns.start
    rows = np.flatnonzero(columns.are(Kind.OPERATOR, Kind.CALL, Kind.DATA, Kind.RANGE))
    thread = -1
    stack: list[tuple[int, float]] = []  # those that are open: row and end
    for row in rows.tolist():
        start, end = float(columns.start[row]), float(columns.end[row])
        if columns.thread[row] != thread:
            thread = int(columns.thread[row])
            stack.clear()
        while stack and stack[-1][1] <= start:
            stack.pop()
        if stack:
            around, until = stack[-1]
            if end > until + ROUNDING:
                continue
            end = min(end, until)
            own[around] -= end - start
        stack.append((row, end))
    return own


def _collectives(columns: TraceColumns) -> _Waits:
    """The collectives of one rank in its steps, which its peers have under the same key.

    What ends on all ranks together: kernels that communicate, else Gloo's and MPI's, else hvdkit's waits.
    """
    waits = np.array([name.startswith("hvdkit:") for name in columns.names], bool)[columns.name]
    meets = (columns.are(Kind.TRANSFER), columns.are(Kind.BACKGROUND), columns.are(Kind.CALL) & waits)
    rows = np.flatnonzero(next((kind for kind in meets if kind.any()), meets[-1]))
    windows = step_windows(columns)
    begins = np.array([start for _, start, _ in windows])
    counts: Counter[tuple[int, str]] = Counter()
    times: _Waits = {}
    for row in rows[np.argsort(columns.start[rows], kind="stable")].tolist():
        at = int(np.searchsorted(begins, columns.start[row] + 1e-3, side="right")) - 1
        if windows and at < 0:
            continue
        key = (windows[at][0] if windows else 0), columns.names[int(columns.name[row])]
        counts[key] += 1
        times[*key, counts[key]] = float(columns.end[row] - columns.start[row]) / 1e3
    return times


def _compared(found: Sequence[tuple[RankTrace, _Waits]]) -> tuple[list[RankTrace], str]:
    """The ranks with their wait for each other, or without and why it cannot be told.

    A collective ends on all ranks at about the same time, so a rank that spent less time in it came later: no clock is
    compared.
    """
    ranks = [rank for rank, _ in found]
    if len(found) < 2:
        return ranks, "one trace only: give those of all ranks"
    if any(rank.rank is None for rank in ranks):
        return ranks, "a trace does not say whose it is: name them trace-R-of-N.json"
    keys = sorted(set.intersection(*(set(waits) for _, waits in found)))
    if not keys:
        return ranks, "no collective that all traces have in the same step"
    table = np.array([[waits[key] for key in keys] for _, waits in found])  # (ranks, collectives)
    # Several collectives of a step can wait for one rank at the same time: the longest of these waits counts.
    begins = np.flatnonzero(np.diff([key[0] for key in keys], prepend=keys[0][0] - 1))
    costs = lateness.costs(np.maximum.reduceat(table.max(axis=0) - table, begins, axis=1)).tolist()
    waiting = np.maximum.reduceat(table - table.min(axis=0), begins, axis=1).mean(axis=1).tolist()
    pairs = zip(ranks, waiting, costs, strict=True)
    return [dataclasses.replace(rank, waiting=waits, cost=cost) for rank, waits, cost in pairs], ""
