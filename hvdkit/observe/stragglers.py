"""Which ranks hold a job up, and what is wrong with it: scores of what all ranks say of each window of steps.

A rank is compared with the median of all. What is slow in one window is noise; what is slow in three windows in a row
is reported, once until it is over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdkit.errors import name_ranks
from hvdkit.observe.lateness import DOING, SIGMA, STEADY, Floats, computes_itself, lower_median, named, why

LASTING = 3
"""Windows in a row after which something is taken to last."""
_HIDDEN = 0.1
"""Part of what ranks are behind, below which the job waits for a slower one meanwhile."""
_SHARE = 0.1
"""Of a step: a rank that is less behind the median is not called slow."""
_SPREADS = 4.0
"""Times the spread of the ranks: what is nearer to the median is their usual difference."""
_LOSS_APART, _LOSS_SPREADS = 0.5, 6.0
_MANY = 4
"""Ranks that are slow from the same window on beyond which one report names them all."""
_MEASURED = ("input", "compute", "ran", "queued", "of_all", "typical")


@dataclass(frozen=True, slots=True)
class Report:
    """One thing that is wrong in a lasting way.

    Attributes:
        step: when it was seen.
        about: "straggler" or "health".
        rank: whose; None where it is all ranks' or several ranks'.
        cause: "input", "compute", "blocked", "cores", "late" (by its input or computation, which of them is not known),
            "random-late", "nonfinite" or "loss".
        since: step after which it began.
        cost: seconds per step that it costs the job.
        text: one sentence.
    """

    step: int
    about: str
    rank: int | None
    cause: str
    since: int
    cost: float
    text: str


class Scores:
    """Takes what all ranks say of each window.

    Args:
        hosts: the name of each rank's host, by rank.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = tuple(hosts)
        size = len(self._hosts)
        self._windows = 0
        self._before = 0
        self._late = _Lasting(size)
        self._behind = {name: np.zeros(size) for name in (*_MEASURED, "cost", "stalls")}
        self._measured: frozenset[str] = frozenset()
        self._computes_itself = False
        self._apart = _Lasting(size)
        self._unhealthy: set[str] = set()

    def window(self, step: int, steps: int, ranks: Mapping[str, Floats]) -> list[Report]:
        """What is to be reported after a window.

        Args:
            step: the last one of the window.
            steps: of the window.
            ranks: "step", "input", "compute", "wait" (seconds per step), "loss", each (size,), NaN where it is not
                known; and where it was measured "ran", "queued", "of_all" (seconds per step of the
                processor), "typical" (seconds of a rank's own work in its median step) and "stalls" (steps in which it
                does much more, 0 where that is in all of them).
        """
        self._windows += 1
        first = step - steps if self._windows == 1 else self._before
        self._before = step
        if self._windows == 1:  # it holds what happens once: imports, compilation, connections
            return []
        return self._stragglers(step, first, ranks) + self._losses(step, first, ranks.get("loss"))

    def nonfinite(self, step: int, kind: str, seen: Floats, what: str) -> list[Report]:
        """What is to be reported of numbers that are not finite, once for each kind.

        Args:
            seen: first step where they were, (size,); NaN where all is well.
            what: such as "the gradient of dense.weight".
        """
        if kind in self._unhealthy or not np.isfinite(seen).any():
            return []
        self._unhealthy.add(kind)
        first = int(np.nanmin(seen))
        ranks = np.flatnonzero(seen == first).tolist()
        whose = "All ranks" if len(ranks) == len(self._hosts) > 1 else name_ranks(ranks).capitalize()
        text = f"{whose}: {what} is not finite in step {first}."
        return [Report(step, "health", ranks[0] if len(ranks) == 1 else None, "nonfinite", first, 0.0, text)]

    # Ranks that are slower than the others ---------------------------------------------------------------------------

    def _stragglers(self, step: int, first: int, ranks: Mapping[str, Floats]) -> list[Report]:
        """Reports of ranks that have been slow for three windows; ``ranks``: as ``window`` has them."""
        size = len(self._hosts)
        own = own_work(ranks)
        if size < 2 or not np.isfinite(own).all():
            return []
        behind = own - lower_median(own)
        # of the faster half, for the other one may be slow
        spread = SIGMA * float(np.median(np.abs(behind[behind <= 0]))) if size > 3 else 0.0
        slow = behind > max(_SHARE * lower_median(ranks["step"]), _SPREADS * spread)
        others = float(own[~slow].max()) if not slow.all() else lower_median(own)
        more = {name: ranks[name] - lower_median(ranks[name]) for name in _MEASURED if name in ranks}
        more |= {"cost": own - others, "stalls": ranks.get("stalls", np.zeros(size)) / (step - first or 1)}
        for name, gap in more.items():
            self._behind[name] = np.where(slow, self._behind[name] + gap, 0.0)
        self._measured = frozenset(more)
        if "ran" in ranks:
            self._computes_itself = computes_itself(ranks["ran"], ranks["of_all"])
        new = self._late.window(slow, first)
        return [self._straggler(step, group, of_host) for group, of_host in self._by_host(new, self._late.told)]

    def _by_host(self, new: list[int], told: npt.NDArray[np.bool_]) -> list[tuple[list[int], bool]]:
        """Ranks that are new among the slow ones: those of one host together where all of it is slow, and many."""
        groups: list[tuple[list[int], bool]] = []
        others: list[int] = []
        for host in dict.fromkeys(self._hosts[rank] for rank in new):
            here = [rank for rank, name in enumerate(self._hosts) if name == host]
            mine = [rank for rank in new if self._hosts[rank] == host]
            if 1 < len(here) < len(self._hosts) and all(told[rank] for rank in here):
                groups.append((mine, True))
            else:
                others += mine
        return groups + ([([rank], False) for rank in others] if len(others) <= _MANY else [(sorted(others), False)])

    def _straggler(self, step: int, ranks: list[int], of_host: bool) -> Report:
        """The report of these ranks, all of one host where ``of_host``."""
        windows = self._late.windows[ranks]
        means = {name: float((self._behind[name][ranks] / windows).mean()) for name in self._measured}
        gap = float(np.nan_to_num(means.get("input", np.nan)) + means["compute"])
        cause = self._cause(means, gap)
        since = int(self._late.since[ranks].min())
        behind = self._behind["cost"] / np.maximum(1, self._late.windows)
        # Without these ranks a step waits for the next slowest one.
        next_rank = int(np.argmax(np.where(np.isin(np.arange(len(behind)), ranks), -np.inf, behind)))
        cost = max(0.0, float(behind.max() - max(0.0, behind[next_rank])))
        if of_host:
            who, rank = f"Host {self._hosts[ranks[0]]} ({name_ranks(ranks)})", None
        elif len(ranks) > 1:
            who, rank = named(ranks, len(self._hosts)), None
        else:
            who, rank = f"Rank {ranks[0]} on {self._hosts[ranks[0]]}", ranks[0]
        several = rank is None and not of_host
        if cause == "random-late":
            every = max(1, round(1 / means["stalls"]))
            text = f"{who} {'are' if several else 'is'} late in about one step of {every}, {_ms(gap * every)} each"
        else:
            longer = means[cause] if cause in ("input", "compute") else gap
            text = f"{who} {DOING[cause][several]}: {_ms(longer)} a step more than the median rank"
        costs = f"it costs the job {_ms(cost)} a step"
        if cost < _HIDDEN * means["cost"]:
            costs = f"it costs nothing until rank {next_rank} is as fast as the others"
        return Report(step, "straggler", rank, cause, since, cost, f"{text} since step {since}; {costs}.")

    def _cause(self, means: Mapping[str, float], gap: float) -> str:
        """What slow ranks do, as far as it was measured; ``means``: by what they are behind, seconds a step."""
        read = means.get("input", np.nan)
        if read > means["compute"]:
            return "input"
        if means["stalls"] > 0 and means.get("typical", gap) < STEADY * gap:
            return "random-late"
        processor = (means.get(name, np.nan) for name in ("ran", "queued", "of_all"))
        cause = why(gap, *processor, itself=self._computes_itself, read=not np.isnan(read))
        return "late" if cause == "unread" else cause

    # Health ----------------------------------------------------------------------------------------------------------

    def _losses(self, step: int, first: int, loss: Floats | None) -> list[Report]:
        if loss is None or len(loss) < 2 or not np.isfinite(loss).all():
            return []
        gap = np.abs(loss - lower_median(loss))
        spread = SIGMA * float(np.median(gap)) if len(loss) > 3 else 0.0
        apart = gap > _LOSS_APART * abs(lower_median(loss)) + _LOSS_SPREADS * spread
        new = self._apart.window(apart, first)
        typical = f"the median of the ranks is {lower_median(loss):.4g}"
        return [
            Report(
                step, "health", rank, "loss", int(self._apart.since[rank]), 0.0,
                f"Rank {rank}'s loss is {loss[rank]:.4g} where {typical}, since step {int(self._apart.since[rank])}.",
            )
            for rank in new
        ]  # fmt: skip


class _Lasting:
    """What is so in how many windows in a row, for each rank; told once until it was not so for as many windows."""

    def __init__(self, size: int) -> None:
        self.windows = np.zeros(size, dtype=np.int64)
        self.since = np.zeros(size, dtype=np.int64)
        self.told = np.zeros(size, dtype=bool)
        self._over = np.zeros(size, dtype=np.int64)

    def window(self, so: npt.NDArray[np.bool_], first: int) -> list[int]:
        """The ranks of which it is to be told after this window, which began after the step ``first``."""
        self.since[so & (self.windows == 0)] = first
        self.windows = np.where(so, self.windows + 1, 0)
        self._over = np.where(so, 0, self._over + 1)
        self.told &= self._over < LASTING
        new = (self.windows >= LASTING) & ~self.told
        self.told |= new
        return [int(rank) for rank in np.flatnonzero(new)]


def own_work(ranks: Mapping[str, Floats]) -> Floats:
    """Seconds per step that each rank does not wait for others; NaN where that is not known."""
    total: Floats = np.nan_to_num(ranks["input"]) + ranks["compute"]
    return total


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def summary(values: Mapping[str, Floats], most: int = 64, shown: int = 32) -> dict[str, Any]:
    """What a window's line says of its ranks: all of them, or the slowest ones with their numbers.

    Args:
        values: by name, each (size,); "step", "input" and "compute" are among them.
        most: so many ranks are all shown.
        shown: of more ranks, how many.
    """
    if len(values["step"]) <= most:
        return {name: _listed(one) for name, one in values.items()}
    own = own_work(values)
    slowest = np.sort(np.argsort(-np.where(np.isfinite(own), own, values["step"]), kind="stable")[:shown])
    return {"rank": slowest.tolist(), **{name: _listed(one[slowest]) for name, one in values.items()}}


def _listed(values: Floats) -> list[float | int | None]:
    return [None if not np.isfinite(one) else int(one) if one > 1e6 else float(one) for one in values.tolist()]
