"""Which part of the communication backward hides: gradients, fusion buckets, and what ends after backward.

The model is that of Horovod's background thread (Sergeev, Del Balso 2018, arXiv:1802.05799, for the fusion): gradients
become ready along backward in the order of the plan. At the start of each cycle the thread takes all that are ready,
fills buckets up to the threshold in that order (a larger gradient is a bucket of its own), and reduces one bucket after
the other, while backward goes on undisturbed. A cycle starts one cycle time after the last one did, or when its buckets
are done, whichever is later. All buckets of a step take no less than one allreduce of all their bytes: a link that lets
a burst pass faster does so once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from hvdkit.measure.emulate.plan import ReplayPlan

_HALF = {"float32": 0.5, "float64": 0.25}
"""What a float16 has of the bytes of a type; the others are sent as they are."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """One gradient.

    Attributes:
        ready: share of backward after which it is ready, from 0 to 1.
        nbytes: that are sent.
    """

    ready: float
    nbytes: float


@dataclass(frozen=True, slots=True)
class Fusion:
    """Horovod's settings.

    Attributes:
        threshold: bytes of a bucket, 0 for no fusion (HOROVOD_FUSION_THRESHOLD).
        cycle_s: seconds between two looks at what is ready, >= 0 (HOROVOD_CYCLE_TIME).
    """

    threshold: float = 128 * 2**20
    cycle_s: float = 1e-3


@dataclass(frozen=True, slots=True)
class PredictedExchange:
    """What became of the gradients of a step.

    Attributes:
        buckets: bytes of each, in order.
        busy_s: seconds of all of them.
        exposed_s: seconds from the end of backward until the last one is done, >= 0.
    """

    buckets: tuple[float, ...]
    busy_s: float
    exposed_s: float


def gradients(plan: ReplayPlan, fp16: bool = False) -> tuple[Gradient, ...]:
    """The gradients of a plan, in its order.

    With gaps in the plan, a gradient is ready when the gaps up to its own have passed, of all gaps together. Without
    any, each takes the same share of backward.

    Args:
        plan: of ``hvdkit emulate sizes``.
        fp16: floating-point gradients are sent in half precision (``compression=fp16``).
    """
    gaps = [one.gap_s for one in plan.collectives]
    if not any(gaps):
        gaps = [1.0] * len(gaps)
    total = sum(gaps)
    return tuple(
        Gradient(min(1.0, passed / total), one.nbytes * (_HALF.get(one.dtype, 1.0) if fp16 else 1.0))
        for one, passed in zip(plan.collectives, accumulate(gaps), strict=True)
    )


def exchange(
    grads: Sequence[Gradient], backward_s: float, fusion: Fusion, seconds: Callable[[float], float]
) -> PredictedExchange:
    """Go through one backward.

    Args:
        grads: in the order in which they become ready.
        backward_s: seconds that backward takes; 0: all are ready at once and nothing is hidden.
        fusion: of Horovod.
        seconds: that an allreduce of so many bytes takes.
    """
    buckets: list[float] = []
    busy, free, tick, index, first = 0.0, 0.0, 0.0, 0, 0.0
    while index < len(grads):
        start = _cycle(max(tick, free), grads[index].ready * backward_s, fusion.cycle_s)
        last = index + 1
        while last < len(grads) and grads[last].ready * backward_s <= start + 1e-12:
            last += 1
        first = first if buckets else start
        free = start
        for size in _filled([one.nbytes for one in grads[index:last]], fusion.threshold):
            took = seconds(size)
            buckets.append(size)
            busy, free = busy + took, free + took
        tick, index = start + fusion.cycle_s, last
    whole = seconds(sum(buckets)) if buckets else 0.0
    return PredictedExchange(tuple(buckets), max(busy, whole), max(0.0, free - backward_s, first + whole - backward_s))


def _cycle(earliest: float, ready: float, cycle_s: float) -> float:
    """The start of the first cycle at which it is ready."""
    if ready <= earliest:
        return earliest
    if cycle_s <= 1e-9 * ready:
        return ready
    return earliest + math.ceil((ready - earliest) / cycle_s - 1e-9) * cycle_s


def _filled(sizes: Sequence[float], threshold: float) -> Iterator[float]:
    held = 0.0
    for size in sizes:
        if held and held + size > threshold:
            yield held
            held = 0.0
        held += size
    if held:
        yield held
