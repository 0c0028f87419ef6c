"""The laws of scaling, fitted to medians by least squares of the relative errors.

Each law is linear in coefficients that cannot be negative, so that the best fit is found exactly (non-negative least
squares) and needs no starting point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvdkit.common.intervals import Estimate, estimate, resampled_medians

_FITS = 1000
"""Resamples that are fitted."""
STRONG, WEAK = "strong", "weak"
_Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Law:
    """A law of scaling.

    Attributes:
        name: as in the literature.
        mode: "strong" or "weak": which kind of scaling it is about.
        formula: the seconds of n ranks, for a reader.
        source: where it comes from.
        least: numbers of ranks that it needs.
        rows: of ranks and seconds: matrix A and right side b of A x = b, in relative errors.
        seconds: of coefficients x and ranks: the seconds.
        parameters: of coefficients x: the law's own parameters.
    """

    name: str
    mode: str
    formula: str
    source: str
    least: int
    rows: Callable[[_Array, _Array], tuple[_Array, _Array]]
    seconds: Callable[[_Array, _Array], _Array]
    parameters: Callable[[_Array], dict[str, float]]


@dataclass(frozen=True, slots=True)
class Fit:
    """A law fitted.

    Attributes:
        name, formula, source: of the law.
        parameters: by name.
        residuals: by number of ranks, measured / fitted - 1.
        exact: as many parameters as points: the residuals are 0 whatever the truth is.
    """

    name: str
    formula: str
    source: str
    parameters: dict[str, Estimate]
    residuals: dict[int, float]
    exact: bool


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else float("nan")


def _usl_parameters(x: _Array) -> dict[str, float]:
    return {"t1": float(x[0]), "sigma": _share(x[1], x[0]), "kappa": _share(x[2], x[0])}


def _usl_matrix(n: _Array) -> _Array:
    return np.column_stack([np.ones_like(n), n - 1, n * (n - 1)])


_USL_SOURCE = "Gunther, Guerrilla Capacity Planning (2007), chapter 4"

LAWS = (
    Law(
        name="Amdahl",
        mode=STRONG,
        formula="t1 * (serial + (1 - serial) / n)",
        source="Amdahl, AFIPS Spring Joint Computer Conference 30 (1967), 483-485",
        least=2,
        rows=lambda n, t: (np.column_stack([1 / t, 1 / (n * t)]), np.ones_like(t)),
        seconds=lambda x, n: x[0] + x[1] / n,
        parameters=lambda x: {"t1": float(x.sum()), "serial": _share(x[0], x.sum())},
    ),
    Law(
        name="USL",
        mode=STRONG,
        formula="t1 * (1 + sigma * (n - 1) + kappa * n * (n - 1)) / n",
        source=_USL_SOURCE,
        least=3,
        rows=lambda n, t: (_usl_matrix(n) / (n * t)[:, None], np.ones_like(t)),
        seconds=lambda x, n: (_usl_matrix(n) @ x) / n,
        parameters=_usl_parameters,
    ),
    Law(
        name="Gustafson",
        mode=WEAK,
        formula="t1 * n / (serial + (1 - serial) * n)",
        source="Gustafson, Communications of the ACM 31(5) (1988), 532-533",
        least=2,
        rows=lambda n, t: (np.column_stack([t, t / n]), np.ones_like(t)),
        seconds=lambda x, n: 1 / (x[0] + x[1] / n),
        parameters=lambda x: {"t1": _share(1.0, float(x.sum())), "serial": _share(x[1], x.sum())},
    ),
    Law(
        name="USL",
        mode=WEAK,
        formula="t1 * (1 + sigma * (n - 1) + kappa * n * (n - 1))",
        source=_USL_SOURCE,
        least=3,
        rows=lambda n, t: (_usl_matrix(n) / t[:, None], np.ones_like(t)),
        seconds=lambda x, n: _usl_matrix(n) @ x,
        parameters=_usl_parameters,
    ),
)


def fit(law: Law, samples: Mapping[int, Sequence[float]], rng: np.random.Generator) -> Fit | None:
    """Fit a law to seconds by number of ranks; None where it needs more numbers of ranks than there are.

    Args:
        law: which.
        samples: number of ranks to the seconds of its repeats, at least one each.
        rng: draws the resamples.
    """
    if len(samples) < law.least:
        return None
    from scipy.optimize import nnls

    ranks = np.array(sorted(samples), dtype=float)
    medians = np.array([np.median(samples[n]) for n in sorted(samples)])

    def solved(seconds: _Array) -> _Array:
        return np.asarray(nnls(*law.rows(ranks, seconds))[0])

    best = solved(medians)
    draws = np.column_stack([resampled_medians(samples[n], rng, _FITS) for n in sorted(samples)])
    resampled = [law.parameters(solved(draw)) for draw in draws]
    alone = min(map(len, samples.values())) < 2
    parameters = {
        name: estimate(value, np.array([draw[name] for draw in resampled]), alone=alone)
        for name, value in law.parameters(best).items()
        if math.isfinite(value)
    }
    residuals = medians / law.seconds(best, ranks) - 1
    return Fit(
        law.name,
        law.formula,
        law.source,
        parameters,
        {int(n): float(residual) for n, residual in zip(ranks, residuals, strict=True)},
        exact=len(ranks) == len(best) and bool(np.abs(residuals).max() < 1e-6),  # else a coefficient would be negative
    )


def fits(mode: str, samples: Mapping[int, Sequence[float]], rng: np.random.Generator) -> list[Fit]:
    """The laws about a kind of scaling, "strong" or "weak", that can be fitted."""
    found = [fit(law, samples, rng) for law in LAWS if law.mode == mode]
    return [law for law in found if law is not None]
