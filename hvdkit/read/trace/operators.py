"""Calls inside calls: which time, which kernels and which memory belong to which operator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvdkit.read.timeline.measures import Floats
from hvdkit.read.trace.columns import LABELS, Kind, Source, TraceColumns
from hvdkit.read.trace.results import Operator

ROUNDING = 1.0
"""Microseconds by which a call inside another may seem to end after it, where times are whole microseconds."""


@dataclass(frozen=True)
class EventCalls:
    """What belongs to each event of ``TraceColumns``, in its order; microseconds and bytes.

    Attributes:
        self_time: without the calls inside it.
        counted: whether no call of the same name is around it.
        gpu_self, gpu_total: kernels and copies that it started, alone and with the calls inside it.
        size: what it allocated itself less what it freed.
    """

    self_time: Floats
    counted: NDArray[np.bool_]
    gpu_self: Floats
    gpu_total: Floats
    size: Floats


def nest(columns: TraceColumns) -> EventCalls:
    """Find out what was called inside what, thread by thread.

    Communication in the background, and anything that goes on after what it began in has ended, holds nothing.
    """
    count = len(columns.start)
    calls = EventCalls(
        columns.end - columns.start, np.ones(count, bool), np.zeros(count), np.zeros(count), np.zeros(count)
    )
    _add_kernels(columns, calls)
    # A step holds nothing either: `hvdkit launch --torch-profile` begins the next one within the optimizer's step().
    on_cpu = np.isin(columns.source, (Source.CPU_OPERATOR, Source.CPU_RANGE)) & ~np.isin(
        columns.kind, (Kind.BACKGROUND, Kind.STEP)
    )
    rows = np.flatnonzero(on_cpu)
    memory = np.lexsort((columns.memory_time, columns.memory_thread))
    for thread in np.unique(columns.thread[rows]).tolist():
        mine = rows[columns.thread[rows] == thread]
        allocations = memory[columns.memory_thread[memory] == thread]
        _nest_thread(columns, calls, mine, allocations)
    return calls


def _add_kernels(columns: TraceColumns, calls: EventCalls) -> None:
    """Give each operator the time of the kernels that it started, by the number that both carry."""
    on_gpu = np.flatnonzero(columns.on_gpu & (columns.external > 0))
    if not len(on_gpu):
        return
    numbers, place = np.unique(columns.external[on_gpu], return_inverse=True)
    times = np.bincount(place, columns.end[on_gpu] - columns.start[on_gpu])
    operators = np.flatnonzero((columns.source == Source.CPU_OPERATOR) & (columns.external > 0))
    found, first = np.unique(columns.external[operators], return_index=True)
    shared, in_kernels, in_operators = np.intersect1d(numbers, found, return_indices=True)
    if len(shared):
        calls.gpu_self[operators[first[in_operators]]] = times[in_kernels]


def _nest_thread(
    columns: TraceColumns, calls: EventCalls, rows: NDArray[np.intp], allocations: NDArray[np.intp]
) -> None:
    """Share time, GPU time and memory out among the nested operators of one thread, in place in ``calls``."""
    starts, ends = columns.start[rows].tolist(), columns.end[rows].tolist()
    names, places = columns.name[rows].tolist(), rows.tolist()
    times = columns.memory_time[allocations].tolist()
    sizes = columns.memory_bytes[allocations].tolist()
    calls.gpu_total[rows] = calls.gpu_self[rows]
    stack: list[tuple[int, float, int]] = []  # place, end, name
    open_names: dict[int, int] = {}
    at = 0

    def leave(until: float) -> None:
        while stack and stack[-1][1] <= until:
            place, _, name = stack.pop()
            open_names[name] -= 1
            if stack:
                calls.gpu_total[stack[-1][0]] += calls.gpu_total[place]

    def allocate(until: float) -> None:
        nonlocal at
        while at < len(times) and times[at] < until:
            leave(times[at])
            if stack:
                calls.size[stack[-1][0]] += sizes[at]
            at += 1

    for start, end, name, place in zip(starts, ends, names, places, strict=True):
        allocate(start)
        leave(start)
        calls.counted[place] = not open_names.get(name)
        if stack:
            parent, limit, _ = stack[-1]
            if end > limit + ROUNDING:
                continue
            end = min(end, limit)
            calls.self_time[parent] -= end - start
        stack.append((place, end, name))
        open_names[name] = open_names.get(name, 0) + 1
    allocate(float("inf"))
    leave(float("inf"))


def table(columns: TraceColumns, calls: EventCalls, mask: NDArray[np.bool_]) -> tuple[Operator, ...]:
    """The events of the mask by name, the largest self time first, without steps and what a merged timeline added.

    Args:
        columns, calls: of a trace.
        mask: which events count.
    """
    rows = np.flatnonzero(
        mask & (columns.kind != Kind.STEP) & ~np.isin(columns.source, (Source.HOROVOD, Source.RUNTIME))
    )
    if not len(rows):
        return ()
    numbers, first, place = np.unique(columns.name[rows], return_index=True, return_inverse=True)

    def total(values: Floats) -> list[float]:
        return [float(value) for value in np.bincount(place, values[rows], len(numbers))]

    sums = (
        total(np.ones(len(columns.start))),
        total(calls.self_time),
        total(np.where(calls.counted, columns.end - columns.start, 0)),
        total(calls.gpu_self),
        total(np.where(calls.counted, calls.gpu_total, 0)),
        total(calls.size),
    )
    found = []
    for index, number in enumerate(numbers.tolist()):
        row = rows[first[index]]
        count, self_time, time, gpu_self, gpu_total, size = (column[index] for column in sums)
        found.append(
            Operator(
                name=columns.names[number],
                kind=label(int(columns.source[row]), int(columns.kind[row])),
                calls=int(count),
                self_ms=max(0.0, self_time) / 1e3,
                total_ms=time / 1e3,
                gpu_self_ms=gpu_self / 1e3,
                gpu_total_ms=gpu_total / 1e3,
                bytes=int(size),
            )
        )
    return tuple(sorted(found, key=lambda operator: (-operator.self_ms, operator.name)))


def label(source: int, kind: int) -> str:
    """What an event is called in tables."""
    if source == Source.KERNEL and kind == Kind.COMPUTATION:
        return "kernel"
    return LABELS[Kind(kind)]
