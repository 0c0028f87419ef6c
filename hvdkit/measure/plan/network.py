"""What an allreduce of any size costs on any number of ranks, fitted to what ``hvdkit emulate`` measured.

The memory of a host and the network between hosts are two levels, each fitted for itself.

An allreduce is described as a ring: reduce-scatter and allgather around it, 2(n-1) messages one after the other and
2(n-1)/n times the vector through every link, the fewest bytes that an allreduce can do with. A library may move as many
bytes by 2 log2(n) messages (recursive halving and doubling): which of the two, the measurements have to say. In the
order of hosts a ring crosses each link once in each direction, whatever a host holds. The time is ``overhead + alpha *
messages + G(moved)`` (Hockney, Parallel Computing 20(3) (1994), 389-398, for alpha and beta; Patarasuk, Yuan, Journal
of Parallel and Distributed Computing 69(2) (2009), 117-124, for the ring).

G is a line through 0 with slope beta. Where the measurements clearly ask for it, it has up to three such pieces, of
which the later ones may begin with a step upwards: buffers, protocols and rate limits that let a burst pass change the
cost of a byte with the size, or cost a time once. (That the parameters depend on the size is the idea of parameterised
LogP: Kielmann, Bal, Verstoep, IPDPS workshops 2000, LNCS 1800.)

A time is an array: the value, and after it one for each resample of the measurements, shape (1 + DRAWS,).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.common.intervals import Estimate, estimate, resampled_medians
from hvdkit.common.units import bytes_text, duration_text, share_text
from hvdkit.errors import InvalidArgumentError, of_extra
from hvdkit.measure.emulate.results import RING, EmulateResults
from hvdkit.observe.lateness import Floats

DRAWS = 300
"""Resamples of the measurements, each of which is fitted."""
ALGORITHMS = (RING, "halving")
"""A ring; or recursive halving and doubling (Rabenseifner), which moves as many bytes by fewer messages."""
OVERHEAD, ALPHA, FIRST_SLOPE = range(3)
"""Columns of the coefficients. The slopes of all pieces are followed by the steps with which later pieces begin."""
Cells = Mapping[tuple[int, int], Floats]
"""Number of ranks and bytes of each one's vector to the measured seconds, each > 0."""
_NEAREST = 8
_ROUNDS = 12
_NOISE = 0.005
"""Relative error that is not worth a parameter."""
_CLEARLY = 6.0
"""What the Bayesian information criterion must gain before one more piece or a step is believed."""
_TOLD_APART = 0.05
"""Share of a column that must be its own before its coefficient is looked for."""
_KNOTS = 8
HOST, NETWORK = "host", "network"
_WHERE = {HOST: "on one host", NETWORK: "between hosts"}
MOST_RANKS = 1_000_000
_OFF = 0.5
"""Half of the measurements further off the formula than this: it does not describe them."""


def messages(n: int, algorithm: str = RING) -> float:
    """That n ranks send one after the other: around the ring, or to partners at distance 1, 2, 4 ... and back."""
    return 2.0 * (n - 1) if algorithm == RING else 2.0 * (n - 1).bit_length()


def moved(nbytes: float, n: int) -> float:
    """Bytes through each link of the ring, in one direction."""
    return 2.0 * (n - 1) / n * nbytes


def estimated(values: Floats) -> Estimate:
    """A value of at least 0, the first, with the interval of its draws, the others; without ends where all are alike.

    The percentiles of resamples need not lie around what the measurements themselves give (the longest wait of a
    resample is never longer than the longest that was measured): each side reaches at least half as far as the other.
    """
    best, draws = float(values[0]), values[1:]
    found = estimate(best, draws, alone=bool(np.ptp(draws) <= 1e-12 * abs(best)))
    if found.low is None or found.high is None:
        return found
    below, above = max(0.0, best - found.low), max(0.0, found.high - best)
    return Estimate(best, max(0.0, best - max(below, above / 2)), best + max(above, below / 2))


@dataclass(frozen=True, slots=True)
class Link:
    """What a level costs.

    Coefficients are: overhead s, alpha s, the slopes of the pieces s/byte, the steps between them s.

    Attributes:
        knots: where the pieces begin, in bytes, the first at 0.
        coefficients: from the measurements, then from their resamples, shape (1 + DRAWS, 1 + 2 pieces).
        told: which coefficients the measurements tell, shape (1 + 2 pieces,); the others are 0.
        algorithm: of ``ALGORITHMS``, whose messages fit best.
        ranks: the most that were measured; 0 where nothing was.
        moved: bytes that each measured cell moves, shape (cells,).
        residuals: measured / fitted - 1, by number of ranks and size, shape (cells,); empty where nothing was measured.
        rival: the fit of the other algorithm where the measurements do not tell them apart; the draws hold both then.
    """

    knots: tuple[float, ...]
    coefficients: Floats
    told: tuple[bool, ...]
    algorithm: str = RING
    ranks: int = 0
    moved: Floats = field(default_factory=lambda: np.empty(0))
    residuals: Floats = field(default_factory=lambda: np.empty(0))
    rival: Link | None = None

    def seconds(self, nbytes: float, n: int) -> Floats:
        """The time of an allreduce of so many bytes > 0 on n > 1 ranks.

        Each draw is multiplied with a quantile of how far the nearest cells are off the formula, for what is small is
        noisier than what is large. What is off in one direction may be off in the other next time, so that both count.
        """
        found = np.asarray(self.coefficients @ _features(nbytes, n, self.knots, self.algorithm))
        if len(self.residuals):
            nearest = np.argsort(np.abs(np.log(self.moved / moved(nbytes, n))), kind="stable")[:_NEAREST]
            used_up = len(self.residuals) / max(1, len(self.residuals) - sum(self.told))
            off = np.log1p(np.clip(self.residuals[nearest], -0.9, None)) * np.sqrt(used_up)
            found[1:] *= np.exp(np.quantile(np.concatenate((off, -off)), (np.arange(DRAWS) + 0.5) / DRAWS))
        if self.rival is not None:
            found[2::2] = self.rival.seconds(nbytes, n)[2::2]
        return found

    def parameters(self) -> dict[str, Estimate]:
        """Overhead and alpha in s, beta of the largest messages in s/byte; only those that are known."""
        columns = {"overhead_s": OVERHEAD, "alpha_s": ALPHA, "beta_s_per_byte": ALPHA + len(self.knots)}
        return {name: estimated(self.coefficients[:, at]) for name, at in columns.items() if self.told[at]}

    def pieces(self) -> Iterator[tuple[float, float, float]]:
        """Of each piece where it begins, in bytes, its slope in s/byte, and the step in s with which it begins."""
        first_step = FIRST_SLOPE + len(self.knots)
        best = self.coefficients[0].tolist()
        yield from zip(self.knots, best[FIRST_SLOPE:first_step], [0.0, *best[first_step:]], strict=True)

    def as_json(self) -> dict[str, Any]:
        """For a program; seconds and bytes."""
        pieces = [{"from_bytes": knot, "s_per_byte": slope, "s_once": step} for knot, slope, step in self.pieces()]
        return {
            "algorithm": self.algorithm,
            "parameters": self.parameters(),
            "pieces": pieces,
            "residuals": self.residuals.tolist(),
        }


def given_link(alpha_s: float, bytes_per_s: float, host: Link | None) -> Link:
    """A network that was not measured; the overhead of a call is that of the host's memory, if known.

    Args:
        alpha_s: seconds of a message without content, >= 0.
        bytes_per_s: of one link in one direction, > 0.
    """
    coefficients = np.tile([0.0, alpha_s, 1 / bytes_per_s], (1 + DRAWS, 1))
    if host is not None:
        coefficients[:, OVERHEAD] = host.coefficients[:, OVERHEAD]
    return Link((0.0,), coefficients, (host is not None and host.told[OVERHEAD], True, True))


def _features(nbytes: float, n: int, knots: Sequence[float], algorithm: str) -> Floats:
    """What is multiplied with the coefficients, shape (1 + 2 pieces,), for n > 1."""
    through = moved(nbytes, n)
    pieces = [max(0.0, min(through, end) - start) for start, end in itertools.pairwise((*knots, np.inf))]
    steps = [float(through > knot) for knot in knots[1:]]
    return np.array([1.0, messages(n, algorithm), *pieces, *steps])


@dataclass(frozen=True, slots=True)
class CostModel:
    """What an allreduce costs: seconds from the last rank's arrival until the last rank is done.

    Attributes:
        host: the memory of a host; None where it was not measured.
        network: between hosts; None where it is not known.
        ppn: ranks that a host holds, > 0.
        notes: full sentences: what a reader should know.
        packed: the most ranks that a measured host held; 0 where nothing was measured.
        cores: of that host; None where nothing was measured.
    """

    host: Link | None = None
    network: Link | None = None
    ppn: int = 1
    notes: tuple[str, ...] = ()
    packed: int = 0
    cores: int | None = None

    def draws_s(self, nbytes: float, ranks: int) -> Floats:
        """Of vectors of so many bytes: the median to be expected, and one for each draw, shape (1 + DRAWS,).

        The draws hold how sure the parameters are and how far measurements are off the formula (``estimated``
        makes the 95 % prediction interval of them). They are alike where nothing was measured, 0 for one rank. Of a
        number of ranks for which ``why_not`` gives a reason nothing can be asked.
        """
        if ranks == 1 or nbytes == 0:
            return np.zeros(1 + DRAWS)
        # a ring goes at the pace of its slower level
        found: Floats = np.stack([known.seconds(nbytes, ranks) for known in self._links(ranks).values()]).max(axis=0)
        return found

    def hosts(self, ranks: int) -> int:
        """How many hosts hold so many ranks."""
        return -(-ranks // self.ppn)

    def measured(self, ranks: int) -> int:
        """The most ranks that were measured on the level that so many need; 1 where none were: one needs no network."""
        known = self._links(ranks).get(self._level(ranks))
        return max(1, 0 if known is None else known.ranks)

    def why_not(self, ranks: int) -> str | None:
        """Why there is no number for so many ranks; None where there is one."""
        crowd = min(ranks, self.ppn)
        if self.cores is not None and crowd > max(self.cores, self.packed):
            return (
                f"{crowd} ranks of a host wait for its {self.cores} cores, of which the model knows nothing, and at "
                f"most {self.packed} were measured on one; measure so many, or give a smaller --ppn."
            )
        for level, known in self._links(ranks).items() if ranks > 1 else ():
            off = float(np.median(np.abs(known.residuals))) if known.ranks else 0.0
            if off > _OFF:
                return (
                    f"Half of the times measured {_WHERE[level]} are more than {share_text(off)} off what the best "
                    "formula says, so that it does not describe them; measure on a machine that does nothing else."
                )
        if ranks > MOST_RANKS:
            return f"the number of ranks is {ranks}; expected one from 1 to {MOST_RANKS}."
        if ranks > 1 and self._level(ranks) == HOST and self.host is None:
            return (
                f"{ranks} ranks fit on one host of {self.ppn}, and only a network is known: add a measurement on "
                "one host, or ask for more ranks, or for --ppn 1."
            )
        if ranks > 1 and self._level(ranks) == NETWORK and self.network is None:
            return (
                f"{ranks} ranks need {self.hosts(ranks)} hosts of {self.ppn} each, and only the memory of one host was "
                f"measured, which says nothing about a network: measure between hosts with 'hvdkit emulate --hosts', "
                "give the network's own with --alpha-us and --bandwidth-gbit, or say with --ppn that one host holds "
                "more."
            )
        return None

    def _level(self, ranks: int) -> str:
        return HOST if ranks <= self.ppn and self.ppn > 1 else NETWORK

    def _links(self, ranks: int) -> dict[str, Link]:
        """What is known of the levels that a ring of so many ranks goes through."""
        levels = {HOST: self.host} if self._level(ranks) == HOST else {HOST: self.host, NETWORK: self.network}
        return {name: known for name, known in levels.items() if known is not None}

    def with_network(self, alpha_s: float, bytes_per_s: float) -> CostModel:
        """The model with a network that is given: see ``given_link``."""
        return replace(self, network=given_link(alpha_s, bytes_per_s, self.host))


# Fitting --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A formula with its coefficients; ``relative``: its features by measured seconds, shape (cells, coefficients)."""

    algorithm: str
    knots: tuple[float, ...]
    extras: int
    relative: Floats
    told: NDArray[np.bool_]
    best: Floats
    score: float


def fit_link(cells: Cells, rng: np.random.Generator, algorithms: Sequence[str] = (RING,)) -> Link:
    """Fit the cells.

    Args:
        cells: two or more sizes.
        rng: draws the resamples.
        algorithms: of ``ALGORITHMS`` that may have been measured, the likeliest first.
    Raises:
        MissingFrameworkError: SciPy is not installed.
    Source: soft-L1 loss of relative errors by iteratively reweighted least squares (Holland, Welsch, Communications in
        Statistics A6(9) (1977)); Lawson, Hanson, Solving Least Squares Problems (1974), chapter 23, for non-negative;
        resamples: Davison, Hinkley, Bootstrap Methods and their Application (1997), sections 6.2 and 6.3.
    """
    medians = np.array([np.median(seconds) for seconds in cells.values()])
    through = np.array([moved(nbytes, ranks) for ranks, nbytes in cells])
    candidates = (_best_of(cells, medians, through, algorithm) for algorithm in algorithms)
    found = sorted(candidates, key=lambda candidate: candidate.score)
    slower = medians / np.column_stack([resampled_medians(seconds, rng, DRAWS) for seconds in cells.values()])
    links = [
        Link(
            knots=one.knots,
            coefficients=np.array([one.best, *(_resampled(one, factors, rng) for factors in slower)]),
            told=tuple(one.told.tolist()),
            algorithm=one.algorithm,
            ranks=max(ranks for ranks, _ in cells),
            moved=through,
            residuals=1 / (one.relative @ one.best) - 1,
        )
        for one in found
        if one.score < found[0].score + _CLEARLY
    ]
    return replace(links[0], rival=links[1] if len(links) > 1 else None)


def _best_of(cells: Cells, medians: Floats, through: Floats, algorithm: str) -> _Candidate:
    """The best line, or pieces of one, by this algorithm's messages."""
    best: _Candidate | None = None
    for knots, stepped in _pieces(through):
        features = np.array([_features(nbytes, ranks, knots, algorithm) for ranks, nbytes in cells])
        relative = features / medians[:, None]
        told = _told(relative, len(knots), stepped)
        coefficients = np.zeros(len(told))
        coefficients[told] = solve(relative[:, told])
        errors = relative @ coefficients - 1
        scale = _scale(errors)
        loss = float(np.mean(2 * scale**2 * (np.sqrt(1 + (errors / scale) ** 2) - 1)))
        extras = len(knots) - 1 + int(stepped)
        parameters = int(told.sum()) + len(knots) - 1  # where a piece begins is a parameter, too
        score = float(len(cells) * np.log(loss + _NOISE**2) + parameters * np.log(len(cells)))
        if best is None or score < best.score - _CLEARLY * (extras - best.extras):
            best = _Candidate(algorithm, knots, extras, relative, told, coefficients, score)
    if best is None:
        raise ValueError("there is nothing to fit")
    return best


def _pieces(through: Floats) -> Iterator[tuple[tuple[float, ...], bool]]:
    """Where pieces may begin, and whether with a step: each holds three measurements of two sizes or more."""
    yield (0.0,), False
    values = np.unique(through)
    if len(values) < 4:
        return
    inside = np.geomspace(values[0], values[-1], _KNOTS + 2)[1:-1]
    for count in (1, 2):
        for chosen in itertools.combinations(inside, count):
            edges = (0.0, *map(float, chosen), np.inf)
            held = [through[(through > low) & (through <= high)] for low, high in itertools.pairwise(edges)]
            if all(len(piece) >= 3 and len(np.unique(piece)) >= 2 for piece in held):
                yield edges[:-1], False
                yield edges[:-1], True


def _told(relative: Floats, pieces: int, stepped: bool) -> NDArray[np.bool_]:
    """Which columns the measurements tell apart: slopes and steps first, then alpha, then the overhead."""
    told = np.zeros(relative.shape[1], dtype=bool)
    last = relative.shape[1] if stepped else FIRST_SLOPE + pieces
    for column in (*range(FIRST_SLOPE, last), ALPHA, OVERHEAD):
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
    ``relative`` has the features divided by the measured seconds, shape (cells, coefficients).
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


def _resampled(best: _Candidate, slower: Floats, rng: np.random.Generator) -> Floats:
    """Coefficients of resampled medians; cells are drawn with replacement, too, so that their errors go with them.

    ``slower`` is the median of each cell by the resampled one, shape (cells,).
    """
    relative = (best.relative * slower[:, None])[:, best.told]
    drawn = relative[rng.integers(len(relative), size=len(relative))]
    enough = np.linalg.matrix_rank(drawn / (np.linalg.norm(drawn, axis=0) + 1e-300)) == int(best.told.sum())
    whole = np.zeros(len(best.told))
    whole[best.told] = solve(drawn if enough else relative, rounds=4)
    return whole


def fit(results: Sequence[EmulateResults], *, ppn: int | None = None) -> CostModel:
    """Fit a model to measurements of allreduces.

    Args:
        results: of ``hvdkit emulate``: one host, several hosts, or both; two sizes at least on each level, and two
            numbers of ranks for the overhead to be told from alpha.
        ppn: ranks that a host holds; by default as many as were measured on one.
    Raises:
        InvalidArgumentError: measurements that cannot be one model, or too few of them.
        MissingFrameworkError: SciPy is not installed.
    """
    cells = {level: _cells(level, results) for level in (HOST, NETWORK)}
    if not any(cells.values()):
        raise InvalidArgumentError(
            "there is no allreduce on two ranks or more in the measurements; run "
            "'hvdkit emulate --sizes 65536,1048576,16777216 -n 2 --json two.json' and the same with -n 3."
        )
    engines = {one.asked.engine for one in results if one.asked.ranks > 1}
    if len(engines) > 1:
        raise InvalidArgumentError(
            f"the measurements are of different engines, {' and '.join(sorted(engines))}; fit those of one engine."
        )
    rng = np.random.default_rng(0)
    links = {}
    for level, found in cells.items():
        sizes = {nbytes for _, nbytes in found}
        if len(sizes) == 1:
            raise InvalidArgumentError(
                f"all allreduces measured {_WHERE[level]} have one size, {sizes.pop()} bytes, which cannot tell "
                "the start of a message from its bytes: measure two sizes or more, such as --sizes "
                "65536,1048576,16777216."
            )
        if found:
            links[level] = fit_link(found, rng, (RING,) if engines == {RING} else ALGORITHMS)
    several = [one for one in results if one.asked.ranks > 1]
    packed = max(one.asked.ppn or -(-one.asked.ranks // one.asked.hosts) for one in several)
    notes = [note for level, known in links.items() for note in _notes(level, known, cells[level])]
    cores = min(one.environment.cores for one in several)
    if packed > cores:
        notes.append(
            f"Measured with {packed} ranks on {cores} cores: what they wait for a core is in every number of so "
            "many ranks on a host. Measure with no more ranks than cores."
        )
    return CostModel(
        host=links.get(HOST),
        network=links.get(NETWORK),
        ppn=ppn or packed,
        notes=tuple(notes),
        packed=packed,
        cores=cores,
    )


def _cells(level: str, results: Sequence[EmulateResults]) -> Cells:
    """Measured transfers of one level (host or network)."""
    found: dict[tuple[int, int], list[float]] = {}
    for one in results:
        asked = one.asked
        if asked.collective != "allreduce":
            raise InvalidArgumentError(
                f"a measurement is of {asked.collective!r}; expected allreduce, which is what trainings wait for."
            )
        if asked.fusion:
            raise InvalidArgumentError(
                "a measurement was made with fusion, where several allreduces run as one and none has a time of its "
                "own; measure with 'hvdkit emulate --fusion off'."
            )
        if asked.ranks == 1 or (asked.hosts > 1) != (level == NETWORK):
            continue
        for sample in one.samples:
            if sample.transfer_s > 0:
                found.setdefault((asked.ranks, sample.nbytes), []).append(sample.transfer_s)
    return {key: np.array(times) for key, times in sorted(found.items())}


def _notes(level: str, known: Link, cells: Cells) -> list[str]:
    """Sentences on a fitted link: what its measurements do not tell apart."""
    where = _WHERE[level]
    notes = []
    if known.rival is not None:
        notes.append(
            f"The library's allreduce {where} may be {known.algorithm} or {known.rival.algorithm}, whose messages grow "
            "otherwise with the ranks: the intervals hold both. More numbers of ranks tell them apart."
        )
    if not known.told[OVERHEAD] and len({ranks for ranks, _ in cells}) > 1:
        notes.append(
            f"The times measured {where} do not tell what a call costs from what each message costs, so all of it is "
            "taken to grow with the ranks; measure more often, on a machine that does nothing else."
        )
    elif not known.told[OVERHEAD]:
        notes.append(
            f"Measured {where} with one number of ranks: what a call costs cannot be told from what each message "
            "costs, so all of it grows with the ranks; measure with a second number of ranks."
        )
    if len(known.knots) > 1:
        rates = [
            f"{f'{8e-9 / slope:.3g} Gbit/s' if slope else 'nothing measurable'} from {bytes_text(at)} on"
            + (f" and {duration_text(1e6 * step)} once" if step else "")
            for at, slope, step in known.pieces()
        ]
        notes.append(f"What moving a byte costs {where} changes with the size: {', '.join(rates)}.")
    if min(map(len, cells.values())) < 5:
        notes.append(f"Some sizes were measured {where} fewer than 5 times: the intervals hold less than they say.")
    return notes
