"""Operations to numbers: what a recording says about tensors, steps, batches and ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from hvdkit.common.allreduce import CYCLE_S
from hvdkit.errors import CorruptDataError
from hvdkit.observe import lateness
from hvdkit.observe.lateness import Floats
from hvdkit.read.causes import by_cost
from hvdkit.read.timeline import measures
from hvdkit.read.timeline.causes import causes
from hvdkit.read.timeline.columns import TimelineColumns, collect, exchanges
from hvdkit.read.timeline.measures import distribution
from hvdkit.read.timeline.model import GROUPS
from hvdkit.read.timeline.reader import Recording, read
from hvdkit.read.timeline.results import Batches, Steps, TensorSummary, TimelineSummary


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
    numbers, in_steps = find_steps(columns)
    in_exchanges = measures.union(*columns.exchange.T)
    cycle = distribution(np.diff(columns.cycles))
    usual_cycle = cycle.p50 if cycle else 1e6 * CYCLE_S
    steps = _steps(columns, numbers, in_steps, in_exchanges, usual_cycle)
    tensors = [_tensor(columns, number, rows) for number, rows in enumerate(columns.rows_by_tensor())]
    found = TimelineSummary(
        path=str(recording.path),
        start_time_since_epoch=recording.start_time_since_epoch,
        origin=columns.origin,
        duration=float(columns.end.max(initial=columns.origin)) - columns.origin,
        events=columns.events,
        operations=len(columns.begin),
        missed=int(columns.missed.sum()),
        ranks=columns.ranks,
        communication=measures.length(in_exchanges),
        setup=measures.length(measures.union(*columns.setup.T)),
        steps=steps,
        tensors=sorted(tensors, key=lambda tensor: -tensor.phases["whole"].total),
        batches=_batches(columns),
        cycle=cycle,
        costs=_costs(columns, numbers, in_steps, usual_cycle),
        dropped={reason: count for reason, count in columns.dropped.items() if count},
    )
    return structs.replace(found, causes=tuple(by_cost(causes(found))))


def nothing_in(path: Path, summary: TimelineSummary) -> CorruptDataError:
    """The error for a file whose summary has no operation."""
    dropped = "; ".join(f"{count} x {reason}" for reason, count in summary.dropped.items()) or "nothing"
    return CorruptDataError(
        f"no operation of Horovod in {str(path)!r} ({summary.events} events read, dropped: {dropped}); expected a file "
        "that HOROVOD_TIMELINE named, of a job that reduced something."
    )


def find_steps(columns: TimelineColumns) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """The step of each operation, and which operations are the reductions that a step consists of.

    Those are the tensors that are reduced equally often, most operations together; a step starts when one of them comes
    again. Other operations belong to the step in which they began, before the first step to step -1.
    """
    counts = np.bincount(columns.tensor, minlength=len(columns.tensors))
    group = measures.repeating(
        [int(count) if tensor.is_reduced else 0 for count, tensor in zip(counts, columns.tensors, strict=True)]
    )
    if not group:
        return np.full(len(columns.tensor), -1, np.intp), np.zeros(len(columns.tensor), np.bool_)
    in_steps = np.isin(columns.tensor, group)
    own = measures.step_numbers(columns.tensor[in_steps])
    begins = columns.begin[in_steps][np.unique(own, return_index=True)[1]]
    return np.searchsorted(begins, columns.begin, side="right").astype(np.intp) - 1, in_steps


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


def _steps(
    columns: TimelineColumns,
    numbers: NDArray[np.intp],
    in_steps: NDArray[np.bool_],
    in_exchanges: tuple[Floats, Floats],
    cycle: float,
) -> Steps | None:
    """The steps from the rows that belong to them; None where there are none."""
    if not in_steps.any():
        return None
    own, first, per_step = np.unique(numbers[in_steps], return_index=True, return_counts=True)
    begins = columns.begin[in_steps][first]
    durations = np.diff(begins)
    sums = np.bincount(numbers[in_steps], columns.reduced_bytes()[in_steps])[own]
    usual = np.nanmedian(sums) if not np.isnan(sums).all() else None
    later_rows = in_steps & (numbers >= 2)
    later = slice(1, None) if len(durations) > 1 else slice(None)
    communication = measures.covered(in_exchanges, begins[:-1], begins[1:])
    waits = measures.group_medians(columns.durations[in_steps, 0], np.searchsorted(own, numbers[in_steps]), len(own))
    waits = waits[:-1][later]
    waits = waits[~np.isnan(waits)]
    apart = waits > 2 * cycle
    open_ = measures.covered(measures.union(columns.begin, columns.end), begins[:-1], begins[1:])
    return Steps(
        count=len(begins),
        tensors=int(np.median(per_step)),
        bytes=None if usual is None else int(usual),
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


def _costs(
    columns: TimelineColumns, numbers: NDArray[np.intp], in_steps: NDArray[np.bool_], cycle: float
) -> dict[int, float] | None:
    """See ``TimelineSummary.costs``.

    Horovod writes when a rank was ready for operations that are not in the response cache. Of a step counts how late a
    rank is with half of its tensors; what is within two cycles is not its doing.
    """
    first, *later = np.unique(numbers[in_steps]).tolist() or [0]
    steps, rows = np.array(later), columns.tick_row
    kept = in_steps[rows] & (numbers[rows] > first)
    ranks, place = np.unique(columns.tick_rank[kept], return_inverse=True)
    groups = np.searchsorted(steps, numbers[rows[kept]]) * len(ranks) + place
    late = measures.group_medians(columns.tick_late[kept], groups, len(steps) * len(ranks))
    own = late.reshape(len(steps), len(ranks)).T
    own = own[:, ~np.isnan(own).any(axis=0)]
    if len(ranks) < 2 or own.shape[1] < max(3, len(steps) // 2):
        return None
    own[:, own.max(axis=0) - own.min(axis=0) <= 2 * cycle] = 0
    return dict(zip(ranks.tolist(), lateness.costs(own).tolist(), strict=True))
