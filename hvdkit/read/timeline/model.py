"""What a timeline holds: operations (one collective of one tensor) with their phases, and marks of cycles."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec

from hvdkit.common.units import ITEM_SIZES

COLLECTIVE_PREFIXES = ("MPI_", "NCCL_", "GLOO_", "CCL_", "DDL_")
"""How the names of the phases start in which data is exchanged between ranks."""

GROUPS = ("negotiate", "wait for data", "queue", "set up", "memcpy in", "collective", "memcpy out", "other")
"""Into what the phases of all operations and of all libraries are sorted, in the order in which they happen."""

PACKED, OUTER, SHARED, NORMS = "packed gradients", "outer step", "shard_state", "sync_batch_norm"


def role_of(name: str, kind: str) -> str:
    """What hvdkit sends under a name: ``PACKED`` (see ``core.compression``), weights, statistics; "" for any other."""
    if "hvdkit.outer." in name:
        return OUTER
    if "hvdkit.shard_state." in name:
        return SHARED
    if "hvdkit.batch_norm." in name:
        return NORMS
    return PACKED if (kind, name.rpartition(".")[2]) in (("ALLTOALL", "parts"), ("ALLGATHER", "mean")) else ""


class TimelineArguments(msgspec.Struct, gc=False):
    """The ``args`` of an event."""

    name: str = ""
    dtype: str = ""
    shape: str = ""
    start_time_since_epoch_in_micros: int | None = None


class TimelineEvent(msgspec.Struct, gc=False):
    """One event of the file; ``ts`` in microseconds since the recording started."""

    ph: str = ""
    name: str = ""
    ts: float = -1.0
    pid: int = -1
    args: TimelineArguments | None = None


class Phase(NamedTuple):
    """One named part of an operation, such as MPI_ALLREDUCE; times as in Operation."""

    name: str
    start: float
    end: float


class CycleMark(NamedTuple):
    """The start of one cycle of Horovod's background thread (HOROVOD_TIMELINE_MARK_CYCLES=1)."""

    time: float


@dataclass(slots=True)
class Operation:
    """One collective of one tensor. All times in microseconds since the recording started.

    Attributes:
        tensor: the name of the tensor ("pid 7" where the file lost it).
        kind: "ALLREDUCE", "BROADCAST", "ALLGATHER", ...
        start: when all ranks were known to be ready and the work on the tensor started.
        end: when the work was done.
        negotiate_start: when the coordinator (rank 0) first heard of the tensor; None where the file does not say.
        negotiate_end: when all ranks had announced it; None where the file does not say.
        ticks: rank to the time at which the coordinator heard from it. Horovod writes it only where the tensor was
            not in its response cache, so that it is empty in most operations.
        phases: what happened between start and end, in the order in which it ended.
        dtype: the type's name ("" where the file does not say).
        shape: the shape of the result on the coordinator; None where the file does not say.
        bytes: its size; None where shape or type are unknown.
    """

    tensor: str
    kind: str
    start: float
    end: float
    negotiate_start: float | None
    negotiate_end: float | None
    ticks: dict[int, float]
    phases: list[Phase]
    dtype: str
    shape: tuple[int, ...] | None
    bytes: int | None

    @property
    def begin(self) -> float:
        """The first time known of this operation: of its negotiation, or of its work."""
        return self.start if self.negotiate_start is None else self.negotiate_start


def group_of(phase: str) -> str:
    """The entry of GROUPS to which a phase belongs.

    Args:
        phase: a name as Horovod writes it, e.g. "WAIT_FOR_OTHER_TENSOR_DATA" or "NEGOTIATE_ALLREDUCE".
    """
    if phase.startswith(COLLECTIVE_PREFIXES):
        return "collective"
    for prefix, group in _PREFIXES:
        if phase.startswith(prefix):
            return group
    return "other"


_PREFIXES = (
    ("NEGOTIATE_", "negotiate"),
    ("WAIT_FOR_", "wait for data"),
    ("QUEUE", "queue"),
    ("MEMCPY_IN_", "memcpy in"),
    ("MEMCPY_OUT_", "memcpy out"),
    ("INIT_", "set up"),
    ("ALLOCATE_", "set up"),
)


@functools.lru_cache(maxsize=10_000)
def shape_and_bytes(dtype: str, text: str) -> tuple[tuple[int, ...] | None, int | None]:
    """The shape that Horovod writes as "[3, 3, 1, 32]" ("[]" for a scalar), and the bytes of a tensor of it.

    None for any other text; as bytes also for an unknown type, or more than any memory holds.
    """
    try:
        shape = _SHAPE.decode(text)
    except msgspec.MsgspecError:
        return None, None
    size = ITEM_SIZES.get(dtype, 0) * math.prod(shape)
    return shape, size if dtype in ITEM_SIZES and size < 1 << 60 else None


_SHAPE = msgspec.json.Decoder(tuple[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)], ...])
