"""Seconds per message and per byte from measured times: robust, never negative, with resamples.

The time of one allreduce is linear in what is looked for (see ``link``). G has several pieces only where the
measurements clearly ask for it: buffers, protocols and rate limits that let a burst pass change the cost of a byte with
the size, or cost a time once. (That the parameters depend on the size is the idea of parameterised LogP: Kielmann, Bal,
Verstoep, IPDPS workshops 2000, LNCS 1800.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hvdkit.common.intervals import resampled_medians
from hvdkit.errors import of_extra
from hvdkit.measure.plan import link
from hvdkit.measure.plan.link import ALPHA, DRAWS, OVERHEAD, Link, Misfit, features, slopes, steps
from hvdkit.observe.lateness import Floats

_ROUNDS = 12
_NOISE = 0.005
"""Relative error that is not worth a parameter."""
_CLEARLY = 6.0
"""What the Bayesian information criterion must gain before one more piece or a step is believed."""
_TOLD_APART = 0.05
"""Share of a column that must be its own before its coefficient is looked for."""
_KNOTS = 8


@dataclass(frozen=True, slots=True)
class Cell:
    """All measurements of one size on one number of ranks.

    Attributes:
        ranks: how many.
        nbytes: of each rank's vector.
        seconds: of each repeat, > 0.
    """

    ranks: int
    nbytes: int
    seconds: Floats


@dataclass(frozen=True, slots=True)
class _Candidate:
    algorithm: str
    knots: tuple[float, ...]
    extras: int
    matrix: Floats
    told: NDArray[np.bool_]
    best: Floats
    score: float


def fit(cells: Sequence[Cell], rng: np.random.Generator, algorithms: Sequence[str] = (link.RING,)) -> Link:
    """Fit the cells.

    Args:
        cells: two or more sizes.
        rng: draws the resamples.
        algorithms: of ``link.ALGORITHMS`` that may have been measured, the likeliest first.
    Raises:
        MissingFrameworkError: SciPy is not installed.
    Source: soft-L1 loss of relative errors by iteratively reweighted least squares (Holland, Welsch, Communications in
        Statistics A6(9) (1977)); Lawson, Hanson, Solving Least Squares Problems (1974), chapter 23, for non-negative;
        resamples: Davison, Hinkley, Bootstrap Methods and their Application (1997), sections 6.2 and 6.3.
    """
    medians = np.array([np.median(cell.seconds) for cell in cells])
    moved = np.array([link.moved(cell.nbytes, cell.ranks) for cell in cells])
    found = sorted(
        (_best_of(cells, medians, moved, algorithm) for algorithm in algorithms),
        key=lambda candidate: candidate.score,
    )
    drawn = np.column_stack([resampled_medians(cell.seconds, rng, DRAWS) for cell in cells])
    rival = None
    if len(found) > 1 and found[1].score < found[0].score + _CLEARLY:
        rival = _link_of(found[1], medians, moved, drawn, rng)
    return replace(_link_of(found[0], medians, moved, drawn, rng), rival=rival)


def _best_of(cells: Sequence[Cell], medians: Floats, moved: Floats, algorithm: str) -> _Candidate:
    """The best line, or pieces of one, by this algorithm's messages."""
    best: _Candidate | None = None
    for knots, stepped in _pieces(moved):
        matrix = np.array([features(cell.nbytes, cell.ranks, knots, algorithm) for cell in cells])
        told = _told(matrix / medians[:, None], knots, stepped)
        coefficients = np.zeros(matrix.shape[1])
        coefficients[told] = solve(matrix[:, told] / medians[:, None])
        errors = matrix @ coefficients / medians - 1
        scale = _scale(errors)
        loss = float(np.mean(2 * scale**2 * (np.sqrt(1 + (errors / scale) ** 2) - 1)))
        extras = len(knots) - 1 + int(stepped)
        parameters = int(told.sum()) + len(knots) - 1  # where a piece begins is a parameter, too
        score = float(len(cells) * np.log(loss + _NOISE**2) + parameters * np.log(len(cells)))
        if best is None or score < best.score - _CLEARLY * (extras - best.extras):
            best = _Candidate(algorithm, knots, extras, matrix, told, coefficients, score)
    if best is None:
        raise ValueError("there is nothing to fit")
    return best


def _link_of(best: _Candidate, medians: Floats, moved: Floats, drawn: Floats, rng: np.random.Generator) -> Link:
    """A candidate with its resamples: ``drawn``, medians of each cell, shape (DRAWS, cells)."""
    draws = np.array([_resampled(draw, best, rng) for draw in drawn])
    residuals = medians / (best.matrix @ best.best) - 1
    freedom = max(1, len(medians) - int(best.told.sum()))
    spread = np.log1p(np.clip(residuals, -0.9, None)) * np.sqrt(len(medians) / freedom)
    luck = rng.permutation((np.arange(DRAWS) + 0.5) / DRAWS)
    return Link(
        knots=best.knots,
        best=best.best,
        draws=draws,
        misfit=Misfit(np.log(moved), spread, luck),
        told=tuple(map(bool, best.told)),
        residuals=tuple(map(float, residuals)),
        algorithm=best.algorithm,
    )


def _pieces(moved: Floats) -> Iterator[tuple[tuple[float, ...], bool]]:
    """Where pieces may begin, and whether with a step: each holds three measurements of two sizes or more."""
    yield (0.0,), False
    values = np.unique(moved)
    if len(values) < 4:
        return
    inside = np.geomspace(values[0], values[-1], _KNOTS + 2)[1:-1]
    for count in (1, 2):
        for chosen in itertools.combinations(inside, count):
            edges = (0.0, *map(float, chosen), np.inf)
            held = [moved[(moved > low) & (moved <= high)] for low, high in itertools.pairwise(edges)]
            if all(len(piece) >= 3 and len(np.unique(piece)) >= 2 for piece in held):
                yield edges[:-1], False
                yield edges[:-1], True


def _told(relative: Floats, knots: tuple[float, ...], stepped: bool) -> NDArray[np.bool_]:
    """Which columns the measurements tell apart: slopes and steps first, then alpha, then the overhead."""
    columns = range(relative.shape[1])
    told = np.zeros(len(columns), dtype=bool)
    for column in (*columns[slopes(knots)], *(columns[steps(knots)] if stepped else ()), ALPHA, OVERHEAD):
        wanted = relative[:, column]
        size = float(np.linalg.norm(wanted))
        if size == 0 or int(told.sum()) >= len(relative):
            continue
        others = relative[:, told]
        left = wanted - others @ np.linalg.lstsq(others, wanted, rcond=None)[0] if told.any() else wanted
        told[column] = float(np.linalg.norm(left)) > _TOLD_APART * size
    return told


def _scale(errors: Floats) -> float:
    """From which error on soft-L1 grows no faster than the error: the spread of most of them."""
    ordered = np.sort(np.abs(errors))
    median = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2  # np.median takes ten times as long
    return max(4 * _NOISE, 1.4826 * float(median))


def solve(relative: Floats, rounds: int = _ROUNDS) -> Floats:
    """Coefficients that are not negative and bring ``relative @ x`` near to 1 in soft-L1.

    It is what ``scipy.optimize.least_squares`` finds with this loss and these bounds, in a tenth of the time.

    Args:
        relative: features divided by the measured seconds, shape (cells, coefficients).
        rounds: of reweighting.
    """
    with of_extra("analysis", "hvdkit plan scale fits its model with SciPy"):
        from scipy.optimize import nnls
    sizes = np.linalg.norm(relative, axis=0)
    sizes[sizes == 0] = 1.0
    scaled = relative / sizes
    weights = np.ones(len(relative))
    for _ in range(rounds):
        solution = np.asarray(nnls(scaled * weights[:, None], weights)[0])
        errors = scaled @ solution - 1
        weights = (1 + (errors / _scale(errors)) ** 2) ** -0.25  # the square root of soft-L1's weight
    return np.asarray(solution / sizes)


def _resampled(medians: Floats, best: _Candidate, rng: np.random.Generator) -> Floats:
    """Coefficients from cells that are drawn with replacement, too; the cells' errors go with the cells."""
    rows = rng.integers(len(medians), size=len(medians))
    relative = best.matrix[rows][:, best.told] / medians[rows, None]
    if np.linalg.matrix_rank(relative / (np.linalg.norm(relative, axis=0) + 1e-300)) < int(best.told.sum()):
        rows = np.arange(len(medians))
    whole = np.zeros(best.matrix.shape[1])
    whole[best.told] = solve(best.matrix[rows][:, best.told] / medians[rows, None], rounds=4)
    return whole
