"""The cost of an allreduce of any size on any number of ranks, fitted to what ``hvdkit emulate`` measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdkit.common.intervals import Estimate
from hvdkit.common.units import bytes_text, duration_text, share_text
from hvdkit.errors import DataError, InvalidArgumentError
from hvdkit.measure.plan import fitting
from hvdkit.measure.plan.fitting import Cell
from hvdkit.measure.plan.link import (
    DRAWS,
    FLAT,
    GAMMA,
    OVERHEAD,
    RING,
    Link,
    Terms,
    estimated,
    shared,
    untold,
)
from hvdkit.observe.lateness import Floats

if TYPE_CHECKING:
    from hvdkit.measure.emulate.results import EmulateResults

HOST, NETWORK = "host", "network"
_WHERE = {HOST: "on one host", NETWORK: "between hosts"}
LIBRARY = "library"
MOST_RANKS = 1_000_000
_LIKELY = ("ring", "rabenseifner", "recursive_doubling", "tree")
"""What a library's choice may be; where several fit, the first: libraries use it for large messages."""
_OFF = 0.5
"""Half of the measurements further off the formula than this: it does not describe them."""
_GIVE_NETWORK = "give the network's own with --alpha-us and --bandwidth-gbit"


@dataclass(frozen=True, slots=True)
class CostModel:
    """What an allreduce costs.

    Attributes:
        host: the memory of a host; None where it was not measured.
        network: between hosts; None where it is not known.
        ppn: ranks that a host holds, > 0.
        algorithm: what is predicted when nothing else is asked for.
        notes: full sentences: what a reader should know.
        reach: by level, the most ranks that were measured; a level that was told is not in it.
        packed: the most ranks that a measured host held; 0 where nothing was measured.
        cores: of that host; None where nothing was measured.
    """

    host: Link | None
    network: Link | None
    ppn: int
    algorithm: str
    notes: tuple[str, ...] = ()
    reach: Mapping[str, int] = field(default_factory=dict)
    packed: int = 0
    cores: int | None = None

    def allreduce_s(self, nbytes: int, ranks: int, algorithm: str | None = None) -> Estimate:
        """Seconds from the last rank's arrival until the last rank is done.

        Args:
            nbytes: of each rank's vector, >= 0.
            ranks: >= 1; one rank has nothing to send: 0.
            algorithm: of ``link.FLAT``, or "library"; by default what was measured.
        Returns:
            The median to be expected with the 95 % prediction interval of a median that is measured anew: it holds how
            sure the parameters are and how far measurements are off the formula. No ends where nothing was measured.
        Raises:
            InvalidArgumentError: too many ranks, an unknown algorithm, or a level that is not known.
        """
        best, draws = self.draws_s(nbytes, ranks, algorithm)
        return estimated(best, draws)

    def draws_s(self, nbytes: float, ranks: int, algorithm: str | None = None) -> tuple[float, Floats]:
        """As ``allreduce_s``: the best value, and one for each draw, shape (link.DRAWS,)."""
        if ranks > MOST_RANKS:
            raise InvalidArgumentError(f"the number of ranks is {ranks}; expected one from 1 to {MOST_RANKS}.")
        chosen = algorithm or self.algorithm
        if chosen not in (*FLAT, LIBRARY):
            expected = ", ".join((LIBRARY, *FLAT))
            raise InvalidArgumentError(f"the algorithm is {chosen!r}; expected one of {expected}.")
        if ranks == 1 or nbytes == 0:
            return 0.0, np.zeros(DRAWS)
        link = self._link(ranks)
        best, draws = link.seconds(self._terms(link, chosen, nbytes, ranks))
        if link is self.network and self.host is not None:
            # a flat algorithm goes at the pace of its slower level
            inside, more = self.host.seconds(self._terms(self.host, chosen, nbytes, ranks))
            best, draws = max(best, inside), np.maximum(draws, more)
        return best, draws

    def hosts(self, ranks: int) -> int:
        """How many hosts hold so many ranks."""
        return -(-ranks // self.ppn)

    def measured(self, ranks: int) -> int:
        """The most ranks that were measured on the level that so many need; 1 where none were: one needs no network."""
        return max(1, self.reach.get(self._level(ranks), 1))

    def why_not(self, ranks: int) -> str | None:
        """Why there is no number for so many ranks although their level is known; None where the model holds."""
        if ranks > MOST_RANKS:
            return f"The number of ranks is {ranks}; expected one from 1 to {MOST_RANKS}."
        crowd = min(ranks, self.ppn)
        if self.cores is not None and crowd > max(self.cores, self.packed):
            return (
                f"{crowd} ranks of a host wait for its {self.cores} cores, of which the model knows nothing, and at "
                f"most {self.packed} were measured on one; measure so many, or give a smaller --ppn."
            )
        levels = (HOST,) if self._level(ranks) == HOST else (HOST, NETWORK)
        for level, link in zip((HOST, NETWORK), (self.host, self.network), strict=True):
            if ranks > 1 and level in levels and link is not None and level in self.reach:
                off = float(np.median(np.abs(link.residuals)))
                if off > _OFF:
                    return (
                        f"Half of the times measured {_WHERE[level]} are more than {share_text(off)} off what the best "
                        "formula says, so that it does not describe them; measure on a machine that does nothing else."
                    )
        return None

    def _level(self, ranks: int) -> str:
        return HOST if ranks <= self.ppn and self.ppn > 1 else NETWORK

    def _terms(self, link: Link, algorithm: str, nbytes: float, ranks: int) -> Terms:
        """What a level has to carry. A ring takes as many steps within a host; the others go on between hosts."""
        chosen = link.algorithm if algorithm == LIBRARY else algorithm
        if link is self.host:
            return FLAT[chosen](nbytes, ranks if chosen == RING else min(ranks, self.ppn))
        return shared(chosen, nbytes, ranks, self.ppn)

    def _link(self, ranks: int) -> Link:
        level = self._level(ranks)
        link = self.host if level == HOST else self.network
        if link is not None:
            return link
        if level == NETWORK:
            raise InvalidArgumentError(
                f"{ranks} ranks need {self.hosts(ranks)} hosts of {self.ppn} each, and only the memory of one host was "
                f"measured, which says nothing about a network: measure between hosts with 'hvdkit emulate --hosts', "
                f"{_GIVE_NETWORK}, or say with --ppn that one host holds more."
            )
        raise InvalidArgumentError(
            f"{ranks} ranks fit on one host of {self.ppn}, and only a network is known: add a measurement on one host, "
            "or ask for more ranks, or for --ppn 1."
        )

    def with_network(self, alpha_s: float | None, bytes_per_s: float | None) -> CostModel:
        """The model with a network of which alpha or beta or both are told.

        Args:
            alpha_s: seconds of a message without content, >= 0.
            bytes_per_s: of one link in one direction, > 0.
        Raises:
            InvalidArgumentError: only one of them is told, and the other was not measured.
        """
        if alpha_s is None and bytes_per_s is None:
            return self
        network = self.network
        if network is None:
            if alpha_s is None or bytes_per_s is None:
                missing = "--bandwidth-gbit" if bytes_per_s is None else "--alpha-us"
                raise InvalidArgumentError(
                    f"no network was measured, and of its two numbers {missing} is missing: give both --alpha-us and "
                    "--bandwidth-gbit."
                )
            network = untold(self.host)
        if bytes_per_s is not None:
            network = network.with_bandwidth(bytes_per_s)
        if alpha_s is not None:
            network = network.with_alpha(alpha_s)
        return replace(self, network=network)

    def with_faster_links(self, times: float) -> CostModel:
        """The model with a network that carries ``times`` as many bytes in a second, > 0.

        Raises:
            InvalidArgumentError: no network is known.
        """
        if self.network is None:
            raise InvalidArgumentError(
                f"--faster-links is about the network, and only the memory of one host was measured: {_GIVE_NETWORK}, "
                "or measure between hosts."
            )
        return replace(self, network=self.network.faster(times))

    def as_json(self) -> dict[str, Any]:
        """For a program; seconds and bytes."""
        levels = {HOST: self.host, NETWORK: self.network}
        return {
            "algorithm": self.algorithm,
            "ppn": self.ppn,
            "levels": {name: None if link is None else link.as_json() for name, link in levels.items()},
        }


def given(alpha_s: float, bytes_per_s: float, ppn: int = 1) -> CostModel:
    """A model of a network that was not measured: no intervals."""
    return CostModel(None, None, ppn, RING).with_network(alpha_s, bytes_per_s)


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
    rng = np.random.default_rng(0)
    links = {level: _fit_level(level, found, rng) for level, found in cells.items() if found}
    measured = [cell.ppn for cell in cells[NETWORK]] + [cell.ranks for cell in cells[HOST]]
    holds = ppn or max(measured)
    labels = {one.asked.algorithm for one in results}
    notes = [note for level, link in links.items() for note in _notes(level, link, cells[level])]
    cores = min(one.environment.cores for one in results if one.asked.ranks > 1)
    if max(measured) > cores:
        notes.append(
            f"Measured with {max(measured)} ranks on {cores} cores: what they wait for a core is in every number of so "
            "many ranks on a host. Measure with no more ranks than cores."
        )
    return CostModel(
        host=links.get(HOST),
        network=links.get(NETWORK),
        ppn=holds,
        algorithm=RING if labels == {RING} else LIBRARY,
        notes=tuple(notes),
        reach={level: max(cell.ranks for cell in found) for level, found in cells.items() if found},
        packed=max(measured),
        cores=cores,
    )


def _cells(level: str, results: Sequence[EmulateResults]) -> list[Cell]:
    """Measured transfers of one level (host or network) in seconds, by ranks, bytes and algorithm."""
    found: dict[tuple[int, int, int, bool], list[float]] = {}
    engines: dict[bool, set[str]] = {True: set(), False: set()}
    for one in results:
        asked = one.asked
        if asked.collective != "allreduce":
            raise InvalidArgumentError(
                f"a measurement is of {asked.collective!r}; expected allreduce, which is what trainings wait for."
            )
        if asked.fusion:
            raise InvalidArgumentError(
                "a measurement was made with fusion, where several collectives run as one and none has a time of its "
                "own; measure with 'hvdkit emulate --fusion off'."
            )
        ranks, hosts = asked.ranks, asked.hosts
        if ranks == 1 or (hosts > 1) != (level == NETWORK):
            continue
        ring = asked.algorithm == RING
        engines[ring].add(asked.engine)
        ppn = asked.ppn or -(-ranks // hosts)
        for sample in one.samples:
            if not 0 <= sample.transfer_s < math.inf:
                raise DataError(f"a measured time is {sample.transfer_s!r}; expected seconds of at least 0.")
            if sample.nbytes > 0 and sample.transfer_s > 0:
                found.setdefault((ranks, ppn, sample.nbytes, ring), []).append(sample.transfer_s)
    for names in engines.values():
        if len(names) > 1:
            raise InvalidArgumentError(
                f"the measurements are of different engines, {' and '.join(sorted(names))}; fit those of one engine."
            )
    return [Cell(*key, seconds=np.array(times)) for key, times in sorted(found.items())]


def _fit_level(level: str, cells: Sequence[Cell], rng: np.random.Generator) -> Link:
    if len({cell.nbytes for cell in cells}) < 2:
        raise InvalidArgumentError(
            f"all allreduces measured {_WHERE[level]} have one size, {cells[0].nbytes} bytes, which cannot tell the "
            "start of a message from its bytes: measure two sizes or more, such as --sizes 65536,1048576,16777216."
        )

    def terms(cell: Cell, algorithm: str) -> Terms:
        ppn = 1 if level == HOST else cell.ppn
        return shared(RING if cell.ring else algorithm, cell.nbytes, cell.ranks, ppn)

    algorithms = (RING,) if all(cell.ring for cell in cells) else _LIKELY
    return fitting.fit(cells, algorithms, terms, rng)


def _notes(level: str, link: Link, cells: Sequence[Cell]) -> list[str]:
    """Sentences on a fitted link: what its measurements do not tell apart."""
    where = _WHERE[level]
    notes = []
    if not all(cell.ring for cell in cells):
        others = f"; {', '.join(link.rivals)} fit about as well, and predict otherwise" if link.rivals else ""
        notes.append(f"The library's allreduce {where} behaves like {link.algorithm}{others}.")
    if not link.told[OVERHEAD] and len({cell.ranks for cell in cells}) > 1:
        notes.append(
            f"The times measured {where} do not tell what a call costs from what each message costs, so all of it is "
            "taken to grow with the ranks; measure more often, on a machine that does nothing else."
        )
    elif not link.told[OVERHEAD]:
        notes.append(
            f"Measured {where} with one number of ranks: what a call costs cannot be told from what each message "
            "costs, so all of it grows with the ranks; measure with a second number of ranks."
        )
    if not link.told[GAMMA]:
        notes.append(
            f"The time of the sums {where} is part of the time of a byte: one algorithm does not tell them apart."
        )
    if len(link.knots) > 1:
        rates = [
            f"{f'{8e-9 / slope:.3g} Gbit/s' if slope else 'nothing measurable'} from {bytes_text(at)} on"
            + (f" and {duration_text(1e6 * step)} once" if step else "")
            for at, slope, step in link.pieces()
        ]
        notes.append(f"What moving a byte costs {where} changes with the size: {', '.join(rates)}.")
    if min(len(cell.seconds) for cell in cells) < 5:
        notes.append(f"Some sizes were measured {where} fewer than 5 times: the intervals hold less than they say.")
    return notes
