"""What an allreduce does on n ranks, and what the messages and bytes of a level (host memory or network) cost.

A formula counts for the rank that has the most to do: messages one after the other, bytes through a link, bytes summed
up. The time is ``alpha * messages + beta * moved + gamma * reduced`` (Hockney, Parallel Computing 20(3) (1994),
389-398, for alpha and beta; Thakur, Rabenseifner, Gropp, International Journal of High Performance Computing
Applications 19(1) (2005), 49-66, for gamma and the formulas but the ring's).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvdkit.common.intervals import Estimate, estimate
from hvdkit.observe.lateness import Floats

RING = "ring"


@dataclass(frozen=True, slots=True)
class Terms:
    """What a time is made of.

    Attributes:
        messages: one after the other.
        moved: bytes through the link that has the most to carry, in one direction.
        reduced: bytes of operands that one rank adds to its own.
    """

    messages: float = 0.0
    moved: float = 0.0
    reduced: float = 0.0


def ring(nbytes: float, n: int) -> Terms:
    """Reduce-scatter and allgather around a ring, any n: the fewest bytes that an allreduce can do with.

    Source: Patarasuk, Yuan, Journal of Parallel and Distributed Computing 69(2) (2009), 117-124.
    """
    return Terms(2.0 * (n - 1), 2.0 * (n - 1) / n * nbytes, (n - 1) / n * nbytes)


def recursive_doubling(nbytes: float, n: int) -> Terms:
    """The whole vector between partners at distance 1, 2, 4 ...; n that is no power of two is folded.

    Folded: with 2^k the largest power of two below n, n - 2^k ranks first give their vector to a partner and get the
    result at the end: two messages, twice the vector and one sum more. A larger n can thus cost less.
    """
    rounds = n.bit_length() - 1
    return _folded(Terms(rounds, rounds * nbytes, rounds * nbytes), nbytes, n)


def rabenseifner(nbytes: float, n: int) -> Terms:
    """Reduce-scatter by recursive halving, allgather by recursive doubling; folded as ``recursive_doubling`` is."""
    rounds = n.bit_length() - 1
    share = 1 - 1 / 2**rounds
    return _folded(Terms(2 * rounds, 2 * share * nbytes, share * nbytes), nbytes, n)


def tree(nbytes: float, n: int) -> Terms:
    """Reduce to one rank and broadcast from it, both by a binomial tree; of ceil(log2 n) rounds, any n."""
    rounds = (n - 1).bit_length()
    return Terms(2.0 * rounds, 2.0 * rounds * nbytes, float(rounds * nbytes))


def _folded(even: Terms, nbytes: float, n: int) -> Terms:
    if n & (n - 1) == 0:
        return even
    return Terms(even.messages + 2, even.moved + 2 * nbytes, even.reduced + nbytes)


FLAT: dict[str, Callable[[float, int], Terms]] = {
    RING: ring,
    "recursive_doubling": recursive_doubling,
    "rabenseifner": rabenseifner,
    "tree": tree,
}


def shared(algorithm: str, nbytes: float, n: int, ppn: int) -> Terms:
    """An algorithm of ``FLAT`` over a network, where the ``ppn`` ranks of a host share its link.

    A ring in the order of hosts crosses each link once in each direction. In the others all ranks of a host talk to
    other hosts at the same time, so that the link carries what each of them moves: an upper bound, since their rounds
    at a distance below ppn stay within the host.
    """
    terms = FLAT[algorithm](nbytes, n)
    if algorithm == RING:
        return terms
    return Terms(terms.messages, terms.moved * min(ppn, n), terms.reduced)


DRAWS = 500
"""Resamples of the measurements, each of which is fitted."""
_NEAREST = 8
OVERHEAD, ALPHA, GAMMA, FIRST_SLOPE = range(4)
"""Columns of the coefficients. The slopes of all pieces are followed by the steps with which later pieces begin."""


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

    def factors(self, moved: float) -> Floats:
        """What to multiply the draws with at so many bytes, > 0: the quantiles of the nearest cells' spread.

        What is off in one direction may be off in the other next time, so that both count and the estimate lies in the
        middle.
        """
        nearest = np.argsort(np.abs(self.moved - np.log(moved)), kind="stable")[:_NEAREST]
        off = self.spread[nearest]
        return np.asarray(np.exp(np.quantile(np.concatenate((off, -off)), self.luck)))


def features(terms: Terms, knots: Sequence[float]) -> Floats:
    """What is multiplied with the coefficients, shape (2 + 2 pieces,)."""
    ends = (*knots[1:], np.inf)
    pieces = [max(0.0, min(terms.moved, end) - start) for start, end in zip(knots, ends, strict=True)]
    steps = [float(terms.moved > knot) for knot in knots[1:]]
    return np.array([float(terms.messages > 0), terms.messages, terms.reduced, *pieces, *steps])


def slopes(knots: Sequence[float]) -> slice:
    """The columns of the pieces' slopes, in s/byte."""
    return slice(FIRST_SLOPE, FIRST_SLOPE + len(knots))


def steps(knots: Sequence[float]) -> slice:
    """The columns of the steps, in s."""
    return slice(FIRST_SLOPE + len(knots), None)


@dataclass(frozen=True, slots=True)
class Link:
    """What a level costs: the memory of a host, or the network between hosts.

    Coefficients are: overhead s, alpha s, gamma s/byte, the slopes of the pieces s/byte, the steps between them s.

    Attributes:
        algorithm: what the library's choice behaves like; "ring" where nothing but rings was measured.
        knots: where the pieces begin, in bytes, the first at 0.
        best: from the measurements, shape (2 + 2 pieces,).
        draws: from their resamples, shape (DRAWS, 2 + 2 pieces).
        misfit: how far measurements are off the formula; None where nothing was measured.
        told: which coefficients the measurements tell, shape (2 + 2 pieces,); the others are 0.
        residuals: measured / fitted - 1, by number of ranks and size; empty where nothing was measured.
        rivals: algorithms that fit about as well.
    """

    algorithm: str
    knots: tuple[float, ...]
    best: Floats
    draws: Floats
    misfit: Misfit | None
    told: tuple[bool, ...]
    residuals: tuple[float, ...] = ()
    rivals: tuple[str, ...] = ()

    def seconds(self, terms: Terms) -> tuple[float, Floats]:
        """The time of an allreduce with these terms: the best one, and by draw, shape (DRAWS,)."""
        row = features(terms, self.knots)
        factors = 1.0 if self.misfit is None else self.misfit.factors(terms.moved)
        return float(self.best @ row), np.asarray(self.draws @ row * factors)

    def parameters(self) -> dict[str, Estimate]:
        """Overhead and alpha in s, beta of the largest messages and gamma in s/byte; only those that are known."""
        largest = range(len(self.best))[slopes(self.knots)][-1]
        columns = {
            "overhead_s": OVERHEAD,
            "alpha_s": ALPHA,
            "beta_s_per_byte": largest,
            "gamma_s_per_byte": GAMMA,
        }
        return {
            name: estimated(float(self.best[column]), self.draws[:, column])
            for name, column in columns.items()
            if self.told[column]
        }

    def faster(self, times: float) -> Link:
        """The level with links that carry ``times`` as many bytes in a second; messages and steps stay as they are."""
        scale = np.ones(len(self.best))
        scale[slopes(self.knots)] = 1 / times
        return replace(self, best=self.best * scale, draws=self.draws * scale)

    def pieces(self) -> Iterator[tuple[float, float, float]]:
        """Of each piece where it begins, in bytes, its slope in s/byte, and the step in s with which it begins."""
        once = [0.0, *self.best[steps(self.knots)]]
        for knot, slope, step in zip(self.knots, self.best[slopes(self.knots)], once, strict=True):
            yield knot, float(slope), float(step)

    def with_alpha(self, alpha_s: float) -> Link:
        """The level with messages that cost ``alpha_s`` each."""
        best, draws = self.best.copy(), self.draws.copy()
        best[ALPHA] = draws[:, ALPHA] = alpha_s
        told = (self.told[OVERHEAD], True, *self.told[GAMMA:])
        return replace(self, best=best, draws=draws, told=told)

    def with_bandwidth(self, bytes_per_s: float) -> Link:
        """The level with one rate for all sizes in place of its pieces."""
        others = slice(0, FIRST_SLOPE)
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
            "rivals": self.rivals,
            "parameters": self.parameters(),
            "pieces": [
                {"from_bytes": knot, "s_per_byte": slope, "s_once": step} for knot, slope, step in self.pieces()
            ],
            "residuals": self.residuals,
        }


def untold(host: Link | None) -> Link:
    """A network without alpha and beta; the overhead of a call and the time of sums are the host's, if known."""
    best, draws, told = np.zeros(4), np.zeros((DRAWS, 4)), [False] * 4
    if host is not None:
        for column in (OVERHEAD, GAMMA):
            best[column], draws[:, column], told[column] = host.best[column], host.draws[:, column], host.told[column]
    return Link(RING if host is None else host.algorithm, (0.0,), best, draws, None, tuple(told))


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
