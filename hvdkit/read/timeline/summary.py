"""Operations to numbers: what a recording says about tensors, steps, batches and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from hvdkit.common.allreduce import CYCLE_S
from hvdkit.errors import CorruptDataError
from hvdkit.observe import lateness
from hvdkit.observe.lateness import Floats
from hvdkit.read.causes import by_cost
from hvdkit.read.spans import Intervals, covered, length, union
from hvdkit.read.timeline.columns import TimelineColumns, collect, exchanges
from hvdkit.read.timeline.reader import GROUPS, Recording, read
from hvdkit.read.timeline.results import Batches, Steps, TensorSummary, TimelineSummary, causes, distribution


class FoundSteps(NamedTuple):
    """The training steps of a recording.

    Attributes:
        numbers: the step in which each operation began; -1 before the first one, and where there are none.
        rows: whether an operation is one of the reductions of which a step consists.
        begins: when each step started; empty where there are none.
    """

    numbers: NDArray[np.intp]
    rows: NDArray[np.bool_]
    begins: Floats


def summarize(source: str | Path | Recording, columns: TimelineColumns | None = None) -> TimelineSummary:
    """Says in numbers where the time of a recording went.

    The memory it takes is about 90 bytes per operation (a seventh of the file); all percentiles are exact.

    Args:
        source: a timeline file or a recording.
        columns: those of ``source``, where they have been collected before.
    Raises:
        DataError: the file cannot be read.
    """
    recording = source if isinstance(source, Recording) else read(source)
    columns = collect(recording) if columns is None else columns
    found = find_steps(columns)
    in_exchanges = union(*columns.exchange.T)
    cycle = distribution(np.diff(columns.cycles))
    usual_cycle = cycle.p50 if cycle else 1e6 * CYCLE_S
    tensors = [_tensor(columns, number, rows) for number, rows in enumerate(columns.rows_by_tensor())]
    summary = TimelineSummary(
        path=str(recording.path),
        start_time_since_epoch=recording.start_time_since_epoch,
        origin=columns.origin,
        duration=float(columns.end.max(initial=columns.origin)) - columns.origin,
        events=columns.events,
        operations=len(columns.begin),
        missed=int(columns.missed.sum()),
        ranks=columns.ranks,
        communication=length(in_exchanges),
        setup=length(union(*columns.setup.T)),
        steps=_steps(columns, found, in_exchanges, usual_cycle) if len(found.begins) else None,
        tensors=sorted(tensors, key=lambda tensor: -tensor.phases["whole"].total),
        batches=_batches(columns),
        cycle=cycle,
        costs=_costs(columns, found, usual_cycle),
        dropped={reason: count for reason, count in columns.dropped.items() if count},
    )
    return structs.replace(summary, causes=tuple(by_cost(causes(summary))))


def nothing_in(path: Path, summary: TimelineSummary) -> CorruptDataError:
    """The error for a file whose summary has no operation."""
    dropped = "; ".join(f"{count} x {reason}" for reason, count in summary.dropped.items()) or "nothing"
    return CorruptDataError(
        f"no operation of Horovod in {str(path)!r} ({summary.events} events read, dropped: {dropped}); expected a file "
        "that HOROVOD_TIMELINE named, of a job that reduced something."
    )


def find_steps(columns: TimelineColumns) -> FoundSteps:
    """The steps: of the tensors that are reduced equally often, most operations together; each starts when one of them
    comes again. Other operations belong to the step in which they began.
    """
    counts = np.bincount(columns.tensor, minlength=len(columns.tensors))
    group = repeating(
        [int(count) if tensor.is_reduced else 0 for count, tensor in zip(counts, columns.tensors, strict=True)]
    )
    rows = np.isin(columns.tensor, group)
    own = step_numbers(columns.tensor[rows])
    begins = np.unique(columns.begin[rows][np.unique(own, return_index=True)[1]])  # a coarse clock says one twice
    return FoundSteps(np.searchsorted(begins, columns.begin, side="right").astype(np.intp) - 1, rows, begins)


def repeating(counts: Sequence[int]) -> list[int]:
    """The largest group of tensors that appear equally often, three times or more: those of a training step.

    Returns:
        Indices into ``counts``; of several groups the one with the most operations. Counts may differ by two in a
        hundred or by one, because the file may end within a step.
    """
    best: list[int] = []
    for count in sorted({count for count in counts if count >= 3}, reverse=True):
        slack = max(1, count // 50)
        group = [index for index, other in enumerate(counts) if count - slack <= other <= count]
        if sum(counts[index] for index in group) > sum(counts[index] for index in best):
            best = group
    return best


def step_numbers(tensor: NDArray[np.int32]) -> NDArray[np.intp]:
    """The step of each operation, in order of time: one starts with the first tensor that the last one has already."""
    numbers = np.empty(len(tensor), np.intp)
    seen: set[int] = set()
    step = 0
    for index, value in enumerate(tensor.tolist()):
        if value in seen:
            step += 1
            seen = set()
        seen.add(value)
        numbers[index] = step
    return numbers


def _tensor(columns: TimelineColumns, number: int, rows: NDArray[np.intp]) -> TensorSummary:
    tensor = columns.tensors[number]
    phases = {group: distribution(columns.durations[rows, index]) for index, group in enumerate(GROUPS)}
    phases["whole"] = distribution(columns.end[rows] - columns.begin[rows])
    sizes = columns.bytes[rows]
    known = sizes[~np.isnan(sizes)]
    return TensorSummary(
        tensor=tensor.name,
        kind=tensor.kind,
        dtype=tensor.dtype,
        shape=tensor.shape,
        count=len(rows),
        bytes=int(known.max()) if len(known) else None,
        phases={group: found for group, found in phases.items() if found is not None},
        role=tensor.role,
    )


def _steps(columns: TimelineColumns, found: FoundSteps, in_exchanges: Intervals, cycle: float) -> Steps:
    """What the steps that were found took, of which there is at least one; ``cycle``: of Horovod, as usual."""
    begins, numbers = found.begins, found.numbers[found.rows]
    durations = np.diff(begins)
    sums = np.bincount(numbers, columns.reduced_bytes()[found.rows])
    usual = None if np.isnan(sums).all() else int(np.nanmedian(sums))
    later_rows = found.rows & (found.numbers >= 2)
    later = slice(1, None) if len(durations) > 1 else slice(None)
    communication = covered(in_exchanges, begins[:-1], begins[1:])
    waits = _group_medians(columns.durations[found.rows, 0], numbers, len(begins))[:-1][later]
    waits = waits[~np.isnan(waits)]
    apart = waits > 2 * cycle
    open_ = covered(union(columns.begin, columns.end), begins[:-1], begins[1:])
    return Steps(
        count=len(begins),
        tensors=int(np.median(np.bincount(numbers))),
        bytes=usual,
        duration=distribution(durations[later]),
        communication=distribution(communication[later]),
        idle=distribution((durations - open_)[later]),
        first=float(durations[0]) if len(durations) else None,
        missed=float(columns.missed[later_rows].mean()) if later_rows.any() else None,
        late=float(np.where(apart, waits - cycle, 0).mean()) if len(waits) else None,
        negotiation=float(np.where(apart, cycle, waits).mean()) if len(waits) else None,
        begins=begins,
    )


def _batches(columns: TimelineColumns) -> Batches | None:
    reduced = np.isin(columns.tensor, [i for i, tensor in enumerate(columns.tensors) if tensor.is_reduced])
    all_ = exchanges(columns, reduced)
    if not len(all_.bytes):
        return None
    times, little = all_.times, all_.little
    return Batches(
        fused=all_.fused,
        single=len(all_.bytes) - all_.fused,
        little=int(little.sum()),
        little_time=float(np.median(times[little]) * little.sum()) if little.any() else 0.0,
        large_share=float(times[~little].sum() / (times.sum() or 1.0)),
        tensors=distribution(all_.tensors.astype(np.float64)),
        bytes=distribution(all_.bytes[: all_.fused]),
    )


def _costs(columns: TimelineColumns, found: FoundSteps, cycle: float) -> dict[int, float] | None:
    """See ``TimelineSummary.costs``.

    Horovod writes when a rank was ready for operations that are not in the response cache. Of a step counts how late a
    rank is with half of its tensors; what is within two cycles is not its doing. The first step does not count.
    """
    rows, steps = columns.tick_row, max(0, len(found.begins) - 1)
    kept = found.rows[rows] & (found.numbers[rows] > 0)
    ranks, place = np.unique(columns.tick_rank[kept], return_inverse=True)
    groups = (found.numbers[rows[kept]] - 1) * len(ranks) + place
    late = _group_medians(columns.tick_late[kept], groups, steps * len(ranks))
    own = late.reshape(steps, len(ranks)).T
    own = own[:, ~np.isnan(own).any(axis=0)]
    if len(ranks) < 2 or own.shape[1] < max(3, steps // 2):
        return None
    own[:, own.max(axis=0) - own.min(axis=0) <= 2 * cycle] = 0
    return dict(zip(ranks.tolist(), lateness.costs(own).tolist(), strict=True))


def _group_medians(values: NDArray[Any], groups: NDArray[np.intp], count: int) -> Floats:
    """The (lower) median of each of ``count`` groups without its NaN values; NaN where there are no others."""
    known = ~np.isnan(values)
    values, groups = values[known], groups[known]
    values = values[np.lexsort((values, groups))]
    sizes = np.bincount(groups, minlength=count)
    middle = np.cumsum(sizes) - sizes + (sizes - 1) // 2
    found = np.full(count, np.nan)
    found[sizes > 0] = values[middle[sizes > 0]]
    return found
