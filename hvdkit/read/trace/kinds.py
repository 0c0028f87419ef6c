"""What an event of a trace is, from its category and its name: a table of names, nothing else."""

from __future__ import annotations

import re
from enum import IntEnum

from hvdkit.read.timeline.model import COLLECTIVE_PREFIXES


class Source(IntEnum):
    """Where an event happened."""

    CPU_OPERATOR = 0
    CPU_RANGE = 1
    KERNEL = 2
    COPY = 3
    HOROVOD = 4
    RUNTIME = 5
    """Calls of the device's runtime that wait for the device; the others are not kept."""


class Kind(IntEnum):
    """What an event counts as."""

    COMPUTATION = 0
    COMMUNICATION = 1
    """A call that communicates, or the wait for one: its thread does nothing else meanwhile."""
    BACKGROUND = 2
    """Communication that other threads go on with: a range around it holds nothing of the training."""
    DATA = 3
    STEP = 4
    RANGE = 5
    """A named range of the script or of PyTorch, which holds other events."""
    COPY = 6
    OTHER = 7
    """Parts of Horovod's timeline in which nothing is exchanged."""


SOURCES = {
    "cpu_op": Source.CPU_OPERATOR,
    "operator": Source.CPU_OPERATOR,  # PyTorch 1.8 to 1.10
    "user_annotation": Source.CPU_RANGE,
    "kernel": Source.KERNEL,
    "cuda_runtime": Source.RUNTIME,
    "cuda_driver": Source.RUNTIME,
    "gpu_memcpy": Source.COPY,
    "memcpy": Source.COPY,
    "gpu_memset": Source.COPY,
    "memset": Source.COPY,
    "horovod": Source.HOROVOD,  # added by `hvdkit timeline merge`
}
"""Category of an event, in lower case, to where it happened; events of other categories do not count."""

LABELS = {
    Kind.COMPUTATION: "operator",
    Kind.COMMUNICATION: "communication",
    Kind.BACKGROUND: "communication",
    Kind.DATA: "data",
    Kind.RANGE: "range",
    Kind.COPY: "copy",
}
"""How the kinds are called in tables; a kernel that computes is called so."""

SYNCHRONISES = re.compile(
    r"aten::(item|_local_scalar_dense|is_nonzero|nonzero|equal)$|(cuda|hip)(Stream|Device|Event)Synchronize"
    r"|cudaMemcpy(_v\d+)?$|cu(Stream|Ctx|Event)Synchronize"
)
"""Names of what the host calls and in which it waits for the device."""
_STEP = re.compile(r"ProfilerStep[#*]\s*([0-9]{1,18})(?![0-9])")
_DATA = re.compile(r"enumerate\(|hvdkit:data")
_KERNEL = re.compile(r"(nccl|rccl|mscclpp|oneccl|ccl_)", re.IGNORECASE)
_BACKGROUND = re.compile(r"(gloo|nccl|mpi|ucc|xccl|hccl):")
_CALL = re.compile(r"(c10d|_c10d_functional|c10d_functional|_c10d_functional_autograd)::|record_param_comms|hvdkit:")
_COMPILED = re.compile(r"Torch-Compiled Region|## Call CompiledFxGraph|CompiledFunction")


def kind_of(source: Source, name: str) -> Kind:
    """What an event counts as.

    Args:
        source: where it happened.
        name: as PyTorch wrote it. Data loading is the range that PyTorch's ``DataLoader`` puts around each batch.
    """
    if source == Source.HOROVOD:
        return Kind.BACKGROUND if name.startswith(COLLECTIVE_PREFIXES) else Kind.OTHER
    if source == Source.COPY:
        return Kind.COPY
    if source == Source.RUNTIME:
        return Kind.OTHER
    if source == Source.KERNEL:
        return Kind.COMMUNICATION if _KERNEL.match(name) else Kind.COMPUTATION
    for pattern, kind in (
        (_STEP, Kind.STEP),
        (_DATA, Kind.DATA),
        (_BACKGROUND, Kind.BACKGROUND),
        (_CALL, Kind.COMMUNICATION),
        (_COMPILED, Kind.COMPUTATION),
    ):
        if pattern.match(name):
            return kind
    return Kind.COMPUTATION if source == Source.CPU_OPERATOR else Kind.RANGE


def step_number(name: str) -> int:
    """The number in the name of a step, as ``ProfilerStep#12``."""
    found = _STEP.match(name)
    return int(found[1]) if found else -1
