"""What the messages and bytes of one level cost: the memory of a host, or the network between hosts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvdkit.common.intervals import Estimate
from hvdkit.measure.predict import fitting, formulas
from hvdkit.measure.predict.fitting import Array, Fitted, estimated
from hvdkit.measure.predict.formulas import Terms


@dataclass(frozen=True, slots=True)
class Link(Fitted):
    """What a level costs: the memory of a host, or the network between hosts."""

    def seconds(self, terms: Terms) -> tuple[float, Array]:
        """The time of an allreduce with these terms: the best one, and by draw, shape (fitting.DRAWS,)."""
        row = fitting.features(terms, self.knots)
        factors = 1.0 if self.misfit is None else self.misfit.factors(terms.moved)
        return float(self.best @ row), np.asarray(self.draws @ row * factors)

    def parameters(self) -> dict[str, Estimate]:
        """Overhead and alpha in s, beta of the largest messages and gamma in s/byte; only those that are known."""
        largest = range(len(self.best))[fitting.slopes(self.knots)][-1]
        columns = {
            "overhead_s": fitting.OVERHEAD,
            "alpha_s": fitting.ALPHA,
            "beta_s_per_byte": largest,
            "gamma_s_per_byte": fitting.GAMMA,
        }
        return {
            name: estimated(float(self.best[column]), self.draws[:, column])
            for name, column in columns.items()
            if self.told[column]
        }

    def least_s_per_byte(self) -> float:
        """The slope of the fastest piece."""
        return float(self.best[fitting.slopes(self.knots)].min())

    def faster(self, times: float) -> Link:
        """The level with links that carry ``times`` as many bytes in a second; messages and steps stay as they are."""
        scale = np.ones(len(self.best))
        scale[fitting.slopes(self.knots)] = 1 / times
        return replace(self, best=self.best * scale, draws=self.draws * scale)

    def pieces(self) -> Iterator[tuple[float, float, float]]:
        """Of each piece where it begins, in bytes, its slope in s/byte, and the step in s with which it begins."""
        steps = [0.0, *self.best[fitting.steps(self.knots)]]
        for knot, slope, step in zip(self.knots, self.best[fitting.slopes(self.knots)], steps, strict=True):
            yield knot, float(slope), float(step)

    def with_alpha(self, alpha_s: float) -> Link:
        """The level with messages that cost ``alpha_s`` each."""
        best, draws = self.best.copy(), self.draws.copy()
        best[fitting.ALPHA] = draws[:, fitting.ALPHA] = alpha_s
        told = (self.told[fitting.OVERHEAD], True, *self.told[fitting.GAMMA :])
        return replace(self, best=best, draws=draws, told=told)

    def with_bandwidth(self, bytes_per_s: float) -> Link:
        """The level with one rate for all sizes in place of its pieces."""
        others = slice(0, fitting.FIRST_SLOPE)
        return replace(
            self,
            knots=(0.0,),
            best=np.array([*self.best[others], 1 / bytes_per_s]),
            draws=np.column_stack([self.draws[:, others], np.full(len(self.draws), 1 / bytes_per_s)]),
            told=(*self.told[others], True),
        )

    def as_json(self) -> dict[str, Any]:
        """For a program; seconds and bytes."""
        return {
            "algorithm": self.algorithm,
            "rivals": list(self.rivals),
            "parameters": {
                name: {"value": one.value, "low": one.low, "high": one.high} for name, one in self.parameters().items()
            },
            "pieces": [
                {"from_bytes": knot, "s_per_byte": slope, "s_once": step} for knot, slope, step in self.pieces()
            ],
            "residuals": list(self.residuals),
        }


def untold(host: Link | None) -> Link:
    """A network without alpha and beta; the overhead of a call and the time of sums are the host's, if known."""
    best, draws, told = np.zeros(4), np.zeros((fitting.DRAWS, 4)), [False] * 4
    if host is not None:
        for column in (fitting.OVERHEAD, fitting.GAMMA):
            best[column], draws[:, column], told[column] = host.best[column], host.draws[:, column], host.told[column]
    return Link(formulas.RING if host is None else host.algorithm, (0.0,), best, draws, None, tuple(told))
