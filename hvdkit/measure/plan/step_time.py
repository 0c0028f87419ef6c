"""What a step waits for: communication that backward does not hide, and the slowest rank; also in fewer bytes.

Overlap is that of Horovod's background thread (Sergeev, Del Balso 2018, arXiv:1802.05799, for the fusion): gradients
become ready along backward in the order of the plan. At the start of each cycle the thread takes all that are ready,
fills buckets up to the threshold in that order (a larger gradient is a bucket of its own), and reduces one bucket after
the other, while backward goes on undisturbed. A cycle starts one cycle time after the last one did, or when its buckets
are done, whichever is later. All buckets of a step take no less than one allreduce of all their bytes: a link that lets
a burst pass faster does so once.

The wait for the slowest of n ranks follows from the skew of r ranks that was measured: from the first one's arrival to
the last one's. Delays that are independent and exponential make it the largest of r - 1 of them (the first arrival
being the start of all others; Rényi, Acta Mathematica Hungarica 4 (1953)), so that its distribution F gives that of n
ranks as F^((n-1)/(r-1)), which is used here for any delays. The longest skew that was measured counts as the longest
that there is.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hvdkit.common.allreduce import COMPRESSIONS, CYCLE_S, FUSION_BYTES, Compression
from hvdkit.core.compression import AT_ONCE
from hvdkit.measure.emulate.plan import Collective, ReplayPlan
from hvdkit.measure.emulate.results import EmulateResults
from hvdkit.measure.plan.network import DRAWS, CostModel
from hvdkit.observe.lateness import Floats

_GRID = (np.arange(4000) + 0.5) / 4000
BACKWARD_SHARE = 2 / 3
"""Backward computes two products for each one of forward: with respect to the inputs and to the weights."""


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

    threshold: float = FUSION_BYTES
    cycle_s: float = CYCLE_S


@dataclass(frozen=True, slots=True)
class Workload:
    """What a rank does in a step.

    Attributes:
        gradients: in the order in which they become ready; see ``gradients``.
        compute_s: seconds of forward, backward and update in one process, > 0; None when they are not known.
        fusion: Horovod's settings.
        overlap: whether communication runs beside backward; else it begins when backward has ended.
    """

    gradients: tuple[Gradient, ...]
    compute_s: float | None = None
    fusion: Fusion = field(default_factory=Fusion)
    overlap: bool = True

    @property
    def hiding_s(self) -> float:
        """Seconds of backward that communication can hide behind."""
        return BACKWARD_SHARE * self.compute_s if self.overlap and self.compute_s is not None else 0.0


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


def gradients(plan: ReplayPlan, number: float = math.inf) -> tuple[Gradient, ...]:
    """The gradients of a plan, in its order.

    With gaps in the plan, a gradient is ready when the gaps up to its own have passed, of all gaps together. Without
    any, each takes the same share of backward. A floating-point number that has more bytes is sent in ``number``.
    """
    gaps = [one.gap_s for one in plan.collectives]
    if not any(gaps):
        gaps = [1.0] * len(gaps)
    total = sum(gaps)
    return tuple(
        Gradient(min(1.0, passed / total), min(one.nbytes, one.elements * number) if is_floating(one) else one.nbytes)
        for one, passed in zip(plan.collectives, itertools.accumulate(gaps), strict=True)
    )


def is_floating(one: Collective) -> bool:
    """Whether it is of numbers that compression sends in fewer bytes."""
    return "float" in one.dtype


def exchange(
    grads: Sequence[Gradient], backward_s: float, fusion: Fusion, seconds: Callable[[float], float]
) -> PredictedExchange:
    """Go through one backward.

    Args:
        grads: in the order in which they become ready.
        backward_s: seconds that backward takes; 0: all are ready at once and nothing is hidden.
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


@dataclass(frozen=True, slots=True)
class Delays:
    """What was measured.

    Attributes:
        ranks: whose arrivals were compared, >= 2; 0 when nothing was measured.
        skews: seconds, one for each step.
        injected: some of them were asked for (`hvdkit emulate --straggler`, `--delay`).
    """

    ranks: int
    skews: Floats
    injected: bool = False

    def power(self, n: int) -> float:
        """How many times as many delays n ranks have."""
        return (n - 1) / (self.ranks - 1)

    def extrapolates(self, n: int) -> bool:
        """Whether the largest of n ranks' delays is expected beyond all that was measured."""
        return self.ranks > 0 and self.power(n) > len(self.skews)

    def expected_s(self, n: int) -> float:
        """Seconds that the slowest of n ranks is behind the first, on average; 0 for n = 1."""
        return _largest(self.skews, self.power(n)) if self._known(n) else 0.0

    def draws_s(self, n: int, rng: np.random.Generator) -> Floats:
        """The same, and one for each resample of the skews, shape (1 + DRAWS,)."""
        if not self._known(n):
            return np.zeros(1 + DRAWS)
        chosen = rng.choice(self.skews, (DRAWS, len(self.skews)))
        return np.array([self.expected_s(n), *(_largest(skews, self.power(n)) for skews in chosen)])

    def _known(self, n: int) -> bool:
        return n > 1 and self.ranks > 1 and len(self.skews) > 0


def measured(results: Sequence[EmulateResults]) -> Delays:
    """The skews of the measurement with the most ranks; of each step the largest."""
    known = [one for one in results if one.samples and one.asked.ranks > 1]
    if not known:
        return Delays(0, np.array([]))
    most = max(one.asked.ranks for one in known)
    steps: dict[tuple[int, int], float] = {}
    injected = False
    for number, one in enumerate(known):
        if one.asked.ranks == most:
            injected = injected or bool(one.asked.straggler_s or one.asked.delay)
            for sample in one.samples:
                key = (number, sample.trial)
                steps[key] = max(steps.get(key, 0.0), sample.skew_s)
    return Delays(most, np.array(list(steps.values())), injected)


def _largest(skews: Floats, power: float) -> float:
    """The mean of the largest of ``power`` draws: the mean over v of Q(v^(1/power)), Q being the quantiles."""
    ordered = np.sort(skews)
    above = -np.expm1(np.log(_GRID) / power)  # 1 - v^(1/power), exact also near 0
    places = np.ceil((1 - above) * len(ordered)).astype(int) - 1
    return float(ordered[np.clip(places, 0, len(ordered) - 1)].mean())


# In fewer bytes ------------------------------------------------------------------------------------------------------

EVERY = "every"
WAYS = {"none": Compression(math.inf, 0.0), **COMPRESSIONS}


@dataclass(frozen=True, slots=True)
class CompressedRow:
    """One number of ranks. Seconds, by the words of ``distribute(compression=)`` ("bf16": "fp16" as well) and "every".

    Attributes:
        ranks: how many.
        every: steps between two averages of the weights.
        steps: of computation, exposed communication, packing and wait, as in ``PredictionRow.step``.
        packing: of it on a core of the host; of "every" none.
        efficiency: computation / step.
        shortest: the shortest of those that average the gradients of each step.
        faster: how many steps of it are taken in the time of one of "none".
    """

    ranks: int
    every: int
    steps: dict[str, float]
    packing: dict[str, float]
    efficiency: dict[str, float]
    shortest: str
    faster: float


def compared(
    model: CostModel, delays: Delays, plan: ReplayPlan, work: Workload, n: int, every: int, growth: float
) -> CompressedRow:
    """What each way gives on ``n`` > 1 ranks of several hosts; one number each, without intervals.

    Packed gradients (int8) travel as an alltoall and an allgather, which cross each link with as many messages and
    bytes as the ring of their allreduce would, at most ``AT_ONCE`` numbers at a time. Packing keeps a core of the host
    busy, and nothing is taken to hide it.

    Args:
        work: with a time of computation; ``plan`` has the gradients as they are.
        every: >= 1, steps between two averages of the weights, behind which nothing is computed.
        growth: of a step that has so many ranks.
    """
    cost = functools.cache(lambda nbytes: float(model.draws_s(nbytes, n)[0]))
    compute = work.compute_s or 0.0
    numbers = sum(one.elements for one in plan.collectives if is_floating(one))
    packing = {name: numbers * how.packing_s for name, how in WAYS.items()}
    exposed = {EVERY: exchange(gradients(plan), 0.0, work.fusion, cost).exposed_s / every}
    for name, how in WAYS.items():
        sent, fusion = gradients(plan, how.number), work.fusion
        if name == "int8":
            fusion, parts = replace(fusion, threshold=AT_ONCE * how.number), list[Gradient]()
            for one in sent:
                count = max(1, math.ceil(one.nbytes / fusion.threshold))
                parts += [replace(one, nbytes=one.nbytes / count)] * count
            sent = tuple(parts)
        exposed[name] = exchange(sent, work.hiding_s, fusion, cost).exposed_s + packing[name]
    steps = {name: growth * (compute + exposed[name] + delays.expected_s(n)) for name in (*WAYS, EVERY)}
    shortest = min(WAYS, key=lambda name: steps[name])
    efficiency = {name: compute / step for name, step in steps.items()}
    return CompressedRow(n, every, steps, packing, efficiency, shortest, steps["none"] / steps[shortest])
