"""What several tools take for granted about allreduces: Horovod's defaults, which sizes are small, bus bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

from hvdkit.errors import InvalidArgumentError

FUSION_BYTES = 128 << 20
"""HOROVOD_FUSION_THRESHOLD when nothing else is said (0.28.1), which is also the size of the fusion buffer."""
CYCLE_S = 1e-3
"""HOROVOD_CYCLE_TIME when nothing else is said (0.28.1), in seconds."""
CACHE_CAPACITY = 1024
"""HOROVOD_CACHE_CAPACITY when nothing else is said (0.28.1): tensors that the response cache holds."""
SMALL_BYTES = 64 * 1024
"""Up to here an allreduce mostly takes its latency, not its bytes."""
NUMBER_BYTES = 64
"""Up to here a tensor holds a number or a few, such as a loss or a metric, and is no layer."""


@dataclass(frozen=True, slots=True)
class Compression:
    """What compression makes of gradients."""

    number: float  # bytes of one that travels; one that has fewer keeps them
    packing_s: float  # seconds that each costs on a core of the host, from the gradient to the mean


COMPRESSIONS = {"bf16": Compression(2, 0.75e-9), "int8": Compression(260 / 256, 2e-9)}
"""By the words of ``distribute(compression=)``; "bf16" stands for "fp16", too. Measured on one core, 2**20 numbers at a
time, in Horovod as ``hvdkit install`` builds it (docs/slow_networks.md)."""


def bus_factor(collective: str, ranks: int) -> float:
    """busbw / algbw: how much each link carries per byte of the collective, so that busbw is the same for any n.

    Args:
        collective: "allreduce", "reduce_scatter_all_gather", "reduce_scatter", "allgather" (whose bytes are the part of
            one rank), "all_to_all", "broadcast" or "reduce".
        ranks: n, >= 1.
    Raises:
        InvalidArgumentError: another collective.
    Source: NVIDIA, nccl-tests, doc/PERFORMANCE.md.
    """
    others = ranks - 1
    factors = {
        "allreduce": 2 * others / ranks,
        "reduce_scatter_all_gather": 2 * others / ranks,
        "reduce_scatter": others / ranks,
        "allgather": others,
        "all_to_all": others / ranks,
        "broadcast": 1,
        "reduce": 1,
    }
    if collective not in factors:
        raise InvalidArgumentError(f"The collective is {collective!r}; expected one of {', '.join(factors)}.")
    return factors[collective]
