"""The cost of an allreduce of any size on any number of ranks, fitted to what ``hvdkit emulate`` measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hvdkit.common.units import bytes_text, duration_text, share_text
from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.emulate.results import RING, EmulateResults
from hvdkit.measure.plan import link
from hvdkit.measure.plan.link import DRAWS, OVERHEAD, Cells, Link
from hvdkit.observe.lateness import Floats

HOST, NETWORK = "host", "network"
_WHERE = {HOST: "on one host", NETWORK: "between hosts"}
MOST_RANKS = 1_000_000
_OFF = 0.5
"""Half of the measurements further off the formula than this: it does not describe them."""


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
        """Of vectors of so many bytes: the median to be expected, and one for each draw, shape (1 + link.DRAWS,).

        The draws hold how sure the parameters are and how far measurements are off the formula (``link.estimated``
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
        """The model with a network that is given: see ``link.given``."""
        return replace(self, network=link.given(alpha_s, bytes_per_s, self.host))


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
            links[level] = link.fit(found, rng, (RING,) if engines == {RING} else link.ALGORITHMS)
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
