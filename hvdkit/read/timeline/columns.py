"""The operations of a recording as NumPy columns, and the exchanges among them, of which a fused batch counts once."""

from __future__ import annotations

import struct
from array import array
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hvdkit.common.allreduce import SMALL_BYTES
from hvdkit.observe.lateness import Floats
from hvdkit.read.timeline.reader import GROUPS, CycleMark, Recording, group_of

PACKED, OUTER, SHARED, NORMS = "packed gradients", "outer step", "shard_state", "sync_batch_norm"
_ROLES = {"hvdkit.outer.": OUTER, "hvdkit.shard_state.": SHARED, "hvdkit.batch_norm.": NORMS}
_REDUCTIONS = ("ALLREDUCE", "ADASUM", "REDUCESCATTER")
_NOT_THERE = float("nan")
_ROW = struct.Struct(f"=6d{len(GROUPS)}f2i")
_COLLECTIVE = GROUPS.index("collective")
_MISSED, _FUSED = 1, 2


@dataclass(frozen=True)
class Tensor:
    """A tensor under one kind of collective; the shape is that of its last operation that had one."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...] | None

    @property
    def role(self) -> str:
        """What hvdkit sends under this name; ``PACKED``: see ``core.compression``. "" for any other."""
        for part, role in _ROLES.items():
            if part in self.name:
                return role
        packs = (self.kind, self.name.rpartition(".")[2]) in (("ALLTOALL", "parts"), ("ALLGATHER", "mean"))
        return PACKED if packs else ""

    @property
    def is_reduced(self) -> bool:
        """Whether it is one of those of which a training step consists."""
        return self.role == PACKED or (self.kind in _REDUCTIONS and self.role != OUTER)


@dataclass(frozen=True)
class TimelineColumns:
    """All operations of a recording; row i of every array is operation i. Times in microseconds.

    Attributes:
        tensors: what the numbers in ``tensor`` stand for.
        tensor: index into ``tensors``.
        bytes: size of the result; NaN where unknown.
        begin: of the negotiation where known, else of the work.
        start, end: of the work.
        exchange: (rows, 2) start and end of the collective itself; NaN without one.
        durations: (rows, len(GROUPS)) of each group of phases; NaN where the operation has none.
        fused: whether the tensor went through the fusion buffer.
        missed: whether it was not in the response cache.
        tick_row, tick_rank, tick_late: one entry per rank and missed operation: its row, the rank and how long after
            the first rank it was ready.
        cycles: when each marked cycle started.
        setup: (n, 2) start and end of INIT_NCCL, once for each tensor of its batch.
        dropped: reason to number of events that could not be used.
        events: of the whole file.
        origin: when the first operation or cycle of the file began; Horovod counts from its start or the machine's.
    """

    tensors: list[Tensor]
    tensor: NDArray[np.int32]
    bytes: Floats
    begin: Floats
    start: Floats
    end: Floats
    exchange: Floats
    durations: NDArray[np.float32]
    fused: NDArray[np.bool_]
    missed: NDArray[np.bool_]
    tick_row: NDArray[np.int32]
    tick_rank: NDArray[np.int32]
    tick_late: Floats
    cycles: Floats
    setup: Floats
    dropped: Counter[str]
    events: int
    origin: float

    @property
    def ranks(self) -> int | None:
        """Ranks of the job, by the highest that it names; None where it names none."""
        return int(self.tick_rank.max()) + 1 if len(self.tick_rank) else None

    def reduced_bytes(self) -> Floats:
        """As ``bytes``; of packed gradients their mean alone counts, not the parts from which it was made."""
        parts = [tensor.role == PACKED and tensor.kind == "ALLTOALL" for tensor in self.tensors]
        return np.where(np.array(parts, np.bool_)[self.tensor], 0.0, self.bytes)

    def rows_by_tensor(self) -> list[NDArray[np.intp]]:
        """The rows of each of ``tensors``, in order of time."""
        order = np.argsort(self.tensor, kind="stable")
        edges = np.searchsorted(self.tensor[order], np.arange(len(self.tensors) + 1))
        return [order[first:last] for first, last in pairwise(edges.tolist())]


def collect(recording: Recording) -> TimelineColumns:
    """Reads the recording once, into columns sorted by the time at which each operation began."""
    numbers: dict[tuple[str, str], int] = {}
    tensors: list[Tensor] = []
    groups: dict[str, int] = {}
    packed, tick_ids = bytearray(), array("i")
    lates, cycle_times, setups = array("d"), array("d"), array("d")
    for item in recording.items():
        if isinstance(item, CycleMark):
            cycle_times.append(item.time)
            continue
        number = numbers.setdefault((item.tensor, item.kind), len(tensors))
        if number == len(tensors):
            tensors.append(Tensor(item.tensor, item.kind, item.dtype, item.shape))
        elif item.shape is not None and item.shape != tensors[number].shape:
            tensors[number] = Tensor(item.tensor, item.kind, item.dtype, item.shape)
        durations = [_NOT_THERE] * len(GROUPS)
        first = last = _NOT_THERE
        flags = 0
        if item.negotiate_start is not None and item.negotiate_end is not None:
            durations[0] = item.negotiate_end - item.negotiate_start
        for name, start, end in item.phases:
            group = groups.get(name)
            if group is None:
                group = groups[name] = GROUPS.index(group_of(name))
            known = durations[group]
            durations[group] = end - start if known != known else known + end - start
            if group == _COLLECTIVE:
                first = start if first != first else min(first, start)
                last = end if last != last else max(last, end)
            elif name == "MEMCPY_IN_FUSION_BUFFER":
                flags = _FUSED
            elif name == "INIT_NCCL":
                setups.extend((start, end))
        if item.ticks:
            flags |= _MISSED
            earliest = min(item.ticks.values())
            for rank, time in item.ticks.items():
                tick_ids.extend((len(packed) // _ROW.size, rank))
                lates.append(time - earliest)
        size = _NOT_THERE if item.bytes is None else item.bytes
        packed += _ROW.pack(item.begin, item.start, item.end, first, last, size, *durations, number, flags)
    rows = np.frombuffer(packed, [("times", "f8", 6), ("durations", "f4", len(GROUPS)), ("ids", "i4", 2)])
    times, phases, ids = rows["times"], rows["durations"], rows["ids"]
    ticks = np.frombuffer(tick_ids, np.int32).reshape(-1, 2)
    order = np.argsort(times[:, 0], kind="stable")
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    for table in (times, ids, phases):
        for column in table.T:  # a column at a time: a second copy of the whole would double the memory
            column[:] = column[order]
    cycles = np.frombuffer(cycle_times, np.float64)
    return TimelineColumns(
        tensors=tensors,
        tensor=ids[:, 0],
        bytes=times[:, 5],
        begin=times[:, 0],
        start=times[:, 1],
        end=times[:, 2],
        exchange=times[:, 3:5],
        durations=phases,
        fused=(ids[:, 1] & _FUSED) > 0,
        missed=(ids[:, 1] & _MISSED) > 0,
        tick_row=place[ticks[:, 0]],
        tick_rank=ticks[:, 1],
        tick_late=np.frombuffer(lates, np.float64),
        cycles=cycles,
        setup=np.frombuffer(setups, np.float64).reshape(-1, 2),
        dropped=recording.dropped,
        events=recording.events,
        origin=min((float(one[0]) for one in (times[:, 0], np.sort(cycles)) if len(one)), default=0.0),
    )


@dataclass(frozen=True)
class Exchanges:
    """Exchanges, those through the fusion buffer first.

    Attributes:
        bytes: of all tensors of each; NaN where the file does not say it.
        times: microseconds of each.
        tensors: how many tensors went through the fusion buffer together, of each fused exchange.
    """

    bytes: Floats
    times: Floats
    tensors: NDArray[np.intp]

    @property
    def fused(self) -> int:
        """How many went through the fusion buffer."""
        return len(self.tensors)

    @property
    def little(self) -> NDArray[np.bool_]:
        """Whether each is of at most 64 KB."""
        return np.asarray(self.bytes <= SMALL_BYTES, np.bool_)


def exchanges(columns: TimelineColumns, rows: NDArray[np.bool_]) -> Exchanges:
    """The exchanges of the operations that ``rows`` names; those without a collective do not count."""
    rows = rows & ~np.isnan(columns.exchange[:, 0])
    fused, single = np.flatnonzero(rows & columns.fused), np.flatnonzero(rows & ~columns.fused)
    alone = Exchanges(columns.bytes[single], np.diff(columns.exchange[single])[:, 0], np.zeros(0, np.intp))
    if not len(fused):
        return alone
    fused = fused[np.argsort(columns.start[fused], kind="stable")]
    # Horovod's background thread writes the start of every operation of a batch before it starts the one collective of
    # the batch, and a later batch starts after that. On GPUs another thread writes the collectives, so that a batch may
    # start while the one before waits for its own; but its collective starts after that of the one before has ended.
    start, (begin, end) = columns.start[fused], columns.exchange[fused].T
    edges = np.concatenate(([0], 1 + np.flatnonzero((start[1:] > begin[:-1]) | (begin[1:] > end[:-1]))))
    times = np.maximum.reduceat(end, edges) - np.minimum.reduceat(begin, edges)
    return Exchanges(
        np.concatenate((np.add.reduceat(columns.bytes[fused], edges), alone.bytes)),
        np.concatenate((times, alone.times)),
        np.diff(edges, append=len(fused)),
    )
