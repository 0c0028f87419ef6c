"""A row for each number of ranks: communication, what of it is exposed, stragglers, the step and its efficiency."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hvdkit.common.intervals import Estimate
from hvdkit.measure.predict.link import Array, estimated
from hvdkit.measure.predict.model import CostModel
from hvdkit.measure.predict.overlap import Fusion, Gradient, PredictedExchange, exchange
from hvdkit.measure.predict.stragglers import Delays

BACKWARD_SHARE = 2 / 3
"""Backward computes two products for each one of forward: with respect to the inputs and to the weights."""
_DRAWS = 200
OPTIMISM = 1.28
"""Beyond what was measured, steps took up to so many times as long as predicted. Source: the nine published
efficiencies of docs/predict.md, of which the predictions are 5 to 19 points too high."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What a rank does in a step.

    Attributes:
        gradients: in the order in which they become ready; see ``overlap.gradients``.
        compute_s: seconds of forward, backward and update in one process, > 0; None when they are not known.
        backward_share: of ``compute_s``, above 0 and at most 1.
        fusion: Horovod's settings.
        accumulate: backward passes before each exchange, >= 1 (backward_passes_per_step).
        overlap: whether communication runs beside backward; else it begins when backward has ended.
    """

    gradients: tuple[Gradient, ...]
    compute_s: float | None = None
    backward_share: float = BACKWARD_SHARE
    fusion: Fusion = field(default_factory=Fusion)
    accumulate: int = 1
    overlap: bool = True

    @property
    def hiding_s(self) -> float:
        """Seconds of backward that communication can hide behind: those of the last pass alone."""
        return self.backward_share * self.compute_s if self.overlap and self.compute_s is not None else 0.0


@dataclass(frozen=True, slots=True)
class PredictionRow:
    """One number of ranks. Seconds; a step is one update of the weights.

    Attributes:
        ranks, hosts: how many.
        buckets: allreduces in a step.
        communication: of all of them; as straggler, step and efficiency None where the model does not hold.
        exposed: what of it, and of waiting for it, is not hidden behind backward; None without a time of computation.
        straggler: the wait for the slowest rank.
        step: of computation, exposed communication and wait.
        efficiency: computation / step: what of n times the speed of one process is left. Its interval and that of
            step hold ``OPTIMISM`` where so many ranks were not measured.
        extrapolated: the slowest of so many ranks is expected beyond all delays that were measured.
        refused: why there is no number; None where there is one.
    """

    ranks: int
    hosts: int
    buckets: int = 0
    communication: Estimate | None = None
    exposed: Estimate | None = None
    straggler: Estimate | None = None
    step: Estimate | None = None
    efficiency: Estimate | None = None
    extrapolated: bool = False
    refused: str | None = None


def predict(
    model: CostModel, delays: Delays, work: Workload, ranks: Sequence[int], algorithm: str | None = None, seed: int = 0
) -> list[PredictionRow]:
    """A row for each number of ranks.

    Args:
        model: what an allreduce costs.
        delays: how far apart ranks arrive.
        work: what a rank does.
        ranks: each >= 1.
        algorithm: as in ``CostModel.allreduce_s``.
        seed: of the resamples.
    Raises:
        InvalidArgumentError: as ``CostModel.allreduce_s``.
    """
    return [_row(model, delays, work, n, algorithm, np.random.default_rng([seed, n])) for n in ranks]


def _row(
    model: CostModel, delays: Delays, work: Workload, n: int, algorithm: str | None, rng: np.random.Generator
) -> PredictionRow:
    """The prediction for ``n`` ranks with its interval; without numbers where the model refuses so many."""
    refused = model.why_not(n)
    if refused is not None:
        return PredictionRow(n, model.hosts(n), refused=refused)
    best, draws = _exchanges(model, work, n, algorithm)
    wait, waits = delays.expected_s(n), delays.draws_s(n, _DRAWS, rng)
    busy = np.array([one.busy_s for one in draws])
    late = np.array([one.exposed_s for one in draws])
    row = PredictionRow(
        n,
        model.hosts(n),
        len(best.buckets),
        communication=estimated(best.busy_s, busy),
        straggler=estimated(wait, waits),
        extrapolated=delays.extrapolates(n),
    )
    if work.compute_s is None:
        return row
    compute = work.accumulate * work.compute_s
    taken, steps = compute + best.exposed_s + wait, compute + late + waits
    step, efficiency = estimated(taken, steps), estimated(compute / taken, compute / steps)
    if not model.measured(n):
        step, efficiency = _widened(step, 1.0, OPTIMISM), _widened(efficiency, 1 / OPTIMISM, 1.0)
    return replace(row, exposed=estimated(best.exposed_s, late), step=step, efficiency=efficiency)


def _widened(found: Estimate, low: float, high: float) -> Estimate:
    """With these factors of the ends of its interval."""
    ends = (found.value if end is None else end for end in (found.low, found.high))
    return Estimate(found.value, *(end * factor for end, factor in zip(ends, (low, high), strict=True)))


def _exchanges(
    model: CostModel, work: Workload, n: int, algorithm: str | None
) -> tuple[PredictedExchange, list[PredictedExchange]]:
    """What becomes of the gradients by the best parameters, and by each draw of them."""
    known: dict[float, tuple[float, Array]] = {}

    def costs(nbytes: float) -> tuple[float, Array]:
        if nbytes not in known:
            known[nbytes] = model.draws_s(nbytes, n, algorithm)
        return known[nbytes]

    def by_draw(number: int) -> Callable[[float], float]:
        return lambda nbytes: float(costs(nbytes)[1][number])

    if n == 1:
        nothing = PredictedExchange((), 0.0, 0.0)
        return nothing, [nothing] * _DRAWS
    best = exchange(work.gradients, work.hiding_s, work.fusion, lambda nbytes: costs(nbytes)[0])
    if all(np.ptp(draws) == 0 for _, draws in known.values()):
        return best, [best] * _DRAWS
    return best, [exchange(work.gradients, work.hiding_s, work.fusion, by_draw(number)) for number in range(_DRAWS)]
