"""The laws of scaling, fitted to medians by least squares of the relative errors.

Each law is linear in coefficients that cannot be negative, so that the best fit is found exactly (non-negative least
squares) and needs no starting point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hvdkit.common.intervals import Estimate, estimate, resampled_medians
from hvdkit.observe.lateness import Floats

_FITS = 1000
"""Resamples that are fitted."""
STRONG, WEAK = "strong", "weak"


@dataclass(frozen=True, slots=True)
class Law:
    """A law of scaling.

    Attributes:
        name: as in the literature.
        mode: "strong" or "weak": which kind of scaling it is about.
        formula: the seconds of n ranks, for a reader.
        source: where it comes from.
        matrix: of ranks: A, so that A x are the seconds for coefficients x.
        parameters: of coefficients x: the law's own parameters.
        inverse: A x are not the seconds but 1 / seconds.
    """

    name: str
    mode: str
    formula: str
    source: str
    matrix: Callable[[Floats], Floats]
    parameters: Callable[[Floats], dict[str, float]]
    inverse: bool = False


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


def _usl_parameters(x: Floats) -> dict[str, float]:
    return {"t1": float(x[0]), "sigma": _share(x[1], x[0]), "kappa": _share(x[2], x[0])}


def _usl_matrix(n: Floats) -> Floats:
    return np.column_stack([np.ones_like(n), n - 1, n * (n - 1)])


def _serial_matrix(n: Floats) -> Floats:
    return np.column_stack([np.ones_like(n), 1 / n])


_USL_SOURCE = "Gunther, Guerrilla Capacity Planning (2007), chapter 4"

LAWS = (
    Law(
        name="Amdahl",
        mode=STRONG,
        formula="t1 * (serial + (1 - serial) / n)",
        source="Amdahl, AFIPS Spring Joint Computer Conference 30 (1967), 483-485",
        matrix=_serial_matrix,
        parameters=lambda x: {"t1": float(x.sum()), "serial": _share(x[0], x.sum())},
    ),
    Law(
        name="USL",
        mode=STRONG,
        formula="t1 * (1 + sigma * (n - 1) + kappa * n * (n - 1)) / n",
        source=_USL_SOURCE,
        matrix=lambda n: _usl_matrix(n) / n[:, None],
        parameters=_usl_parameters,
    ),
    Law(
        name="Gustafson",
        mode=WEAK,
        formula="t1 * n / (serial + (1 - serial) * n)",
        source="Gustafson, Communications of the ACM 31(5) (1988), 532-533",
        matrix=_serial_matrix,
        parameters=lambda x: {"t1": _share(1.0, float(x.sum())), "serial": _share(x[1], x.sum())},
        inverse=True,
    ),
    Law(
        name="USL",
        mode=WEAK,
        formula="t1 * (1 + sigma * (n - 1) + kappa * n * (n - 1))",
        source=_USL_SOURCE,
        matrix=_usl_matrix,
        parameters=_usl_parameters,
    ),
)


def fit(law: Law, samples: Mapping[int, Sequence[float]], rng: np.random.Generator) -> Fit | None:
    """Fit a law to seconds by number of ranks; None where it has more coefficients than there are numbers of ranks.

    Args:
        law: which.
        samples: number of ranks to the seconds of its repeats, at least one each.
        rng: draws the resamples.
    """
    ranks = sorted(samples)
    matrix = law.matrix(np.array(ranks, dtype=float))
    if len(ranks) < matrix.shape[1]:
        return None
    from scipy.optimize import nnls

    medians = np.array([np.median(samples[n]) for n in ranks])

    def solved(seconds: Floats) -> Floats:
        """The coefficients with the least relative errors, A x / b - 1."""
        relative = matrix * seconds[:, None] if law.inverse else matrix / seconds[:, None]
        return np.asarray(nnls(relative, np.ones_like(seconds))[0])

    best = solved(medians)
    draws = np.column_stack([resampled_medians(samples[n], rng, _FITS) for n in ranks])
    resampled = [law.parameters(solved(draw)) for draw in draws]
    alone = min(map(len, samples.values())) < 2
    parameters = {
        name: estimate(value, np.array([draw[name] for draw in resampled]), alone=alone)
        for name, value in law.parameters(best).items()
        if math.isfinite(value)
    }
    residuals = medians * (matrix @ best) - 1 if law.inverse else medians / (matrix @ best) - 1
    return Fit(
        law.name,
        law.formula,
        law.source,
        parameters,
        dict(zip(ranks, residuals.tolist(), strict=True)),
        exact=len(ranks) == len(best) and bool(np.abs(residuals).max() < 1e-6),  # else a coefficient would be negative
    )


def fits(mode: str, samples: Mapping[int, Sequence[float]], rng: np.random.Generator) -> list[Fit]:
    """The laws about a kind of scaling, "strong" or "weak", that can be fitted."""
    found = [fit(law, samples, rng) for law in LAWS if law.mode == mode]
    return [law for law in found if law is not None]
