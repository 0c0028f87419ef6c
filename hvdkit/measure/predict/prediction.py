"""A row for each number of ranks: communication, what of it is exposed, stragglers, the step and its efficiency."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hvdkit.common.intervals import Estimate
from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.predict.fitting import Array, estimated
from hvdkit.measure.predict.model import CostModel
from hvdkit.measure.predict.overlap import Exchange, Fusion, Gradient, exchange
from hvdkit.measure.predict.stragglers import Delays

BACKWARD_SHARE = 2 / 3
"""Backward computes two products for each one of forward: with respect to the inputs and to the weights."""
_DRAWS = 200


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
    Raises:
        InvalidArgumentError: a value that cannot be right.
    """

    gradients: tuple[Gradient, ...]
    compute_s: float | None = None
    backward_share: float = BACKWARD_SHARE
    fusion: Fusion = field(default_factory=Fusion)
    accumulate: int = 1
    overlap: bool = True

    def __post_init__(self) -> None:
        if self.compute_s is not None and not 0 < self.compute_s < float("inf"):
            raise InvalidArgumentError(f"the computation of a step takes {self.compute_s!r} s; expected above 0.")
        if not 0 < self.backward_share <= 1:
            raise InvalidArgumentError(
                f"the share of backward is {self.backward_share!r}; expected above 0, at most 1."
            )
        if self.accumulate < 1:
            raise InvalidArgumentError(f"accumulate is {self.accumulate!r}; expected 1 or more.")

    @property
    def hiding_s(self) -> float:
        """Seconds of backward that communication can hide behind: those of the last pass alone."""
        return self.backward_share * self.compute_s if self.overlap and self.compute_s is not None else 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """One number of ranks. Seconds; a step is one update of the weights.

    Attributes:
        ranks, hosts: how many.
        buckets: allreduces in a step.
        communication: of all of them.
        exposed: what of it, and of waiting for it, is not hidden behind backward; None without a time of computation.
        straggler: the wait for the slowest rank.
        step: of computation, exposed communication and wait.
        efficiency: computation / step: what of n times the speed of one process is left.
        extrapolated: the slowest of so many ranks is expected beyond all delays that were measured.
    """

    ranks: int
    hosts: int
    buckets: int
    communication: Estimate
    exposed: Estimate | None
    straggler: Estimate
    step: Estimate | None
    efficiency: Estimate | None
    extrapolated: bool


def predict(
    model: CostModel, delays: Delays, work: Workload, ranks: Sequence[int], algorithm: str | None = None, seed: int = 0
) -> list[Row]:
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
) -> Row:
    best, draws = _exchanges(model, work, n, algorithm)
    wait, waits = delays.expected_s(n), delays.draws_s(n, _DRAWS, rng)
    busy = np.array([one.busy_s for one in draws])
    late = np.array([one.exposed_s for one in draws])
    row = Row(
        n, model.hosts(n), len(best.buckets), estimated(best.busy_s, busy), None, estimated(wait, waits), None, None,
        delays.extrapolates(n),
    )  # fmt: skip
    if work.compute_s is None:
        return row
    compute = work.accumulate * work.compute_s
    step, steps = compute + best.exposed_s + wait, compute + late + waits
    return Row(
        row.ranks, row.hosts, row.buckets, row.communication, estimated(best.exposed_s, late), row.straggler,
        estimated(step, steps), estimated(compute / step, compute / steps), row.extrapolated,
    )  # fmt: skip


def _exchanges(model: CostModel, work: Workload, n: int, algorithm: str | None) -> tuple[Exchange, list[Exchange]]:
    """What becomes of the gradients by the best parameters, and by each draw of them."""
    known: dict[float, tuple[float, Array]] = {}

    def costs(nbytes: float) -> tuple[float, Array]:
        if nbytes not in known:
            known[nbytes] = model.draws_s(nbytes, n, algorithm)
        return known[nbytes]

    def by_draw(number: int) -> Callable[[float], float]:
        return lambda nbytes: float(costs(nbytes)[1][number])

    if n == 1:
        nothing = Exchange((), 0.0, 0.0)
        return nothing, [nothing] * _DRAWS
    best = exchange(work.gradients, work.hiding_s, work.fusion, lambda nbytes: costs(nbytes)[0])
    if all(np.ptp(draws) == 0 for _, draws in known.values()):
        return best, [best] * _DRAWS
    return best, [exchange(work.gradients, work.hiding_s, work.fusion, by_draw(number)) for number in range(_DRAWS)]
