"""What an allreduce does on n ranks, and what the messages and bytes of a level (host memory or network) cost.

An allreduce is described as a ring: reduce-scatter and allgather around it, 2(n-1) messages one after the other and
2(n-1)/n times the vector through every link, the fewest bytes that an allreduce can do with. A library may move as many
bytes by 2 log2(n) messages (recursive halving and doubling): which of the two, the measurements have to say. In the
order of hosts a ring crosses each link once in each direction, whatever a host holds. The time is ``overhead + alpha *
messages + G(moved)`` (Hockney, Parallel Computing 20(3) (1994), 389-398, for alpha and beta; Patarasuk, Yuan, Journal
of Parallel and Distributed Computing 69(2) (2009), 117-124, for the ring).

G is a line through 0 with slope beta, or has up to three such pieces, of which the later ones may begin with a step
upwards; see ``fitting``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdkit.common.intervals import Estimate, estimate
from hvdkit.observe.lateness import Floats

DRAWS = 500
"""Resamples of the measurements, each of which is fitted."""
_NEAREST = 8
OVERHEAD, ALPHA, FIRST_SLOPE = range(3)
"""Columns of the coefficients. The slopes of all pieces are followed by the steps with which later pieces begin."""


RING, HALVING = ALGORITHMS = ("ring", "halving")
"""A ring; or recursive halving and doubling (Rabenseifner), which moves as many bytes by fewer messages."""


def messages(n: int, algorithm: str = RING) -> float:
    """That n ranks send one after the other: around the ring, or to partners at distance 1, 2, 4 ... and back."""
    return 2.0 * (n - 1) if algorithm == RING else 2.0 * (n - 1).bit_length()


def moved(nbytes: float, n: int) -> float:
    """Bytes through each link of the ring, in one direction."""
    return 2.0 * (n - 1) / n * nbytes


@dataclass(frozen=True, slots=True)
class Misfit:
    """How far measurements are off the formula, by how much they move: what is small is noisier than what is large.

    Attributes:
        moved: logarithm of the bytes of each cell, shape (cells,).
        spread: logarithm of measured / fitted, larger by what the fit has used up of it, shape (cells,).
        luck: where in the spread each draw is, from 0 to 1, shape (DRAWS,).
    """

    moved: Floats
    spread: Floats
    luck: Floats

    def factors(self, through: float) -> Floats:
        """What to multiply the draws with at so many bytes, > 0: the quantiles of the nearest cells' spread.

        What is off in one direction may be off in the other next time, so that both count and the estimate lies in the
        middle.
        """
        nearest = np.argsort(np.abs(self.moved - np.log(through)), kind="stable")[:_NEAREST]
        off = self.spread[nearest]
        return np.asarray(np.exp(np.quantile(np.concatenate((off, -off)), self.luck)))


def features(nbytes: float, n: int, knots: Sequence[float], algorithm: str = RING) -> Floats:
    """What is multiplied with the coefficients, shape (1 + 2 pieces,), for n > 1."""
    through = moved(nbytes, n)
    ends = (*knots[1:], np.inf)
    pieces = [max(0.0, min(through, end) - start) for start, end in zip(knots, ends, strict=True)]
    steps = [float(through > knot) for knot in knots[1:]]
    return np.array([1.0, messages(n, algorithm), *pieces, *steps])


def slopes(knots: Sequence[float]) -> slice:
    """The columns of the pieces' slopes, in s/byte."""
    return slice(FIRST_SLOPE, FIRST_SLOPE + len(knots))


def steps(knots: Sequence[float]) -> slice:
    """The columns of the steps, in s."""
    return slice(FIRST_SLOPE + len(knots), None)


@dataclass(frozen=True, slots=True)
class Link:
    """What a level costs: the memory of a host, or the network between hosts.

    Coefficients are: overhead s, alpha s, the slopes of the pieces s/byte, the steps between them s.

    Attributes:
        knots: where the pieces begin, in bytes, the first at 0.
        best: from the measurements, shape (1 + 2 pieces,).
        draws: from their resamples, shape (DRAWS, 1 + 2 pieces).
        misfit: how far measurements are off the formula; None where nothing was measured.
        told: which coefficients the measurements tell, shape (1 + 2 pieces,); the others are 0.
        residuals: measured / fitted - 1, by number of ranks and size; empty where nothing was measured.
        algorithm: of ``ALGORITHMS``, whose messages fit best.
        rival: the fit of the other one where the measurements do not tell them apart; the draws hold both then.
    """

    knots: tuple[float, ...]
    best: Floats
    draws: Floats
    misfit: Misfit | None
    told: tuple[bool, ...]
    residuals: tuple[float, ...] = ()
    algorithm: str = RING
    rival: Link | None = None

    def seconds(self, nbytes: float, n: int) -> tuple[float, Floats]:
        """The time of an allreduce on n > 1 ranks: the best one, and by draw, shape (DRAWS,)."""
        row = features(nbytes, n, self.knots, self.algorithm)
        factors = 1.0 if self.misfit is None else self.misfit.factors(moved(nbytes, n))
        draws = np.asarray(self.draws @ row * factors)
        if self.rival is not None:
            draws = np.where(np.arange(DRAWS) % 2 == 0, draws, self.rival.seconds(nbytes, n)[1])
        return float(self.best @ row), draws

    def parameters(self) -> dict[str, Estimate]:
        """Overhead and alpha in s, beta of the largest messages in s/byte; only those that are known."""
        largest = range(len(self.best))[slopes(self.knots)][-1]
        columns = {"overhead_s": OVERHEAD, "alpha_s": ALPHA, "beta_s_per_byte": largest}
        return {
            name: estimated(float(self.best[column]), self.draws[:, column])
            for name, column in columns.items()
            if self.told[column]
        }

    def pieces(self) -> Iterator[tuple[float, float, float]]:
        """Of each piece where it begins, in bytes, its slope in s/byte, and the step in s with which it begins."""
        once = [0.0, *self.best[steps(self.knots)]]
        for knot, slope, step in zip(self.knots, self.best[slopes(self.knots)], once, strict=True):
            yield knot, float(slope), float(step)

    def as_json(self) -> dict[str, Any]:
        """For a program; seconds and bytes."""
        return {
            "algorithm": self.algorithm,
            "parameters": self.parameters(),
            "pieces": [
                {"from_bytes": knot, "s_per_byte": slope, "s_once": step} for knot, slope, step in self.pieces()
            ],
            "residuals": self.residuals,
        }


def given(alpha_s: float, bytes_per_s: float, host: Link | None) -> Link:
    """A network that was not measured; the overhead of a call is the host's, if known.

    Args:
        alpha_s: seconds of a message without content, >= 0.
        bytes_per_s: of one link in one direction, > 0.
        host: the memory of a host, as it was measured.
    """
    best, draws = np.array([0.0, alpha_s, 1 / bytes_per_s]), np.tile([0.0, alpha_s, 1 / bytes_per_s], (DRAWS, 1))
    if host is not None:
        best[OVERHEAD], draws[:, OVERHEAD] = host.best[OVERHEAD], host.draws[:, OVERHEAD]
    return Link((0.0,), best, draws, None, (host is not None and host.told[OVERHEAD], True, True))


def estimated(best: float, draws: Floats) -> Estimate:
    """A value of at least 0 with the interval of its draws, around the value; without ends where all draws are alike.

    The percentiles of resamples need not lie around what the measurements themselves give (the longest wait of a
    resample is never longer than the longest that was measured): each side reaches at least half as far as the other.
    """
    found = estimate(best, draws, alone=bool(np.ptp(draws) <= 1e-12 * abs(best)))
    if found.low is None or found.high is None:
        return found
    below, above = max(0.0, best - found.low), max(0.0, found.high - best)
    return Estimate(best, max(0.0, best - max(below, above / 2)), best + max(above, below / 2))
