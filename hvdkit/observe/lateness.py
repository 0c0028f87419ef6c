"""Who keeps the others waiting, how regularly, and in which words that is said.

The monitor within a training and the tools that read its recordings afterwards name the same ranks by these rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdkit.errors import name_ranks

Floats = npt.NDArray[np.float64]

STEADY = 0.4
"""Part of the mean loss that half of the steps must reach, else the loss comes now and then."""
SIGMA = 1.4826
"""Standard deviation of a normal distribution, by its median absolute deviation."""
_MOST_SLOW = 0.75
"""Share of the ranks that may be slow together: the others are the reference."""
_GAP = 0.5
"""Part of the largest excess that must lie between the slow ranks and the others."""
_MOST = 0.7
"""Share of the time lost to late ranks that the ranks to blame cause."""
_ENDS_EARLY = 0.6
"""Share of the steps before which a loss must have ended to be one of the first steps only."""
_AT_REST = 0.1
"""Share of what a rank is behind: where all its threads ran less of it, they were blocked."""
DOING = {
    "input": ("waits for its input", "wait for their input"),
    "compute": ("computes longer", "compute longer"),
    "between": ("is busy between two steps", "are busy between two steps"),
    "cores": ("shares its cores with others", "share their cores with others"),
    "affinity": ("shares a core with other ranks by its binding", "share cores by their binding"),
    "blocked": ("is blocked", "are blocked"),
    "late": ("comes late, by its input or computation", "come late, by their input or computation"),
    "unread": ("waits for its input or its device", "wait for their input or their device"),
    "gc": ("collects garbage", "collect garbage"),
    "fsync": ("waits for its disk (fsync)", "wait for their disks (fsync)"),
    "saving": ("saves a checkpoint", "save a checkpoint"),
    "evaluation": ("evaluates", "evaluate"),
    "shard_state": ("gets the weights that others updated", "get the weights that others updated"),
}
"""What one rank does that the others wait for, and what several do."""


def lower_median(values: Floats) -> Any:
    """Over the ranks, which are the first axis: of two the faster one is the measure."""
    return np.sort(values, axis=0)[(len(values) - 1) // 2]


def slow_ranks(excess: Floats, least: float) -> list[int]:
    """Rows of the ranks that are apart from the others, at most three quarters of them; none where nobody is.

    Each rank is blamed by its own excess, not by how often it is the last one: of equally slow ranks all are named.

    Args:
        excess: (ranks,), how much longer than the typical rank each takes, on average.
        least: what separates the slow ranks from the others is at least this.
    """
    order = np.argsort(-excess, kind="stable")
    most = min(len(excess) - 1, max(1, int(_MOST_SLOW * len(excess))))
    gaps = -np.diff(excess[order])[:most]
    if not len(gaps):
        return []
    count = int(gaps.argmax()) + 1
    if gaps[count - 1] < max(least, _GAP * excess[order[count - 1]]):
        return []
    return sorted(order[:count].tolist())


def one_host(rows: Sequence[int], hosts: Sequence[Any]) -> Any:
    """The host whose ranks these are, all of them and several; None where they are others, or there is one host."""
    named = {hosts[row] for row in rows}
    there = [row for row, host in enumerate(hosts) if host in named]
    return named.pop() if len(named) == 1 and 1 < len(rows) == len(there) < len(hosts) else None


def costs(own: Floats) -> Floats:
    """How long each rank keeps the others waiting, per step, in the unit of ``own``.

    A step waits for its last rank, which costs what it is behind the typical one (the lower median). Ranks that are
    at least half as far behind share that: of equally slow ones each does its part.

    Args:
        own: (ranks, steps), when a rank is ready, counted from any moment that all ranks share in a step.
    Returns:
        (ranks,), the mean over the steps.
    """
    behind = np.maximum(0.0, own - lower_median(own))
    last = behind.max(axis=0)
    late = np.where(behind >= _GAP * last, behind, 0.0)
    shares = late / np.where(last > 0, late.sum(axis=0), 1.0)
    return np.asarray((shares * last).sum(axis=1) / max(1, own.shape[1]), np.float64)


def to_blame(costs: Mapping[int, float]) -> tuple[int, ...]:
    """The ranks that the others wait for, by what each rank costs them; empty where it is now this and now that one."""
    ranks, lost = sorted(costs), np.array([costs[rank] for rank in sorted(costs)])
    rows = slow_ranks(lost, 0.0)
    return tuple(ranks[row] for row in rows) if lost[rows].sum() >= _MOST * lost.sum() > 0 else ()


@dataclass(frozen=True, slots=True)
class When:
    """In which steps a loss occurs.

    Attributes:
        kind: "steady", "growing", "first" or "last" (so many ``steps``), "every" (every so many ``steps``) or "rare".
        steps: see ``kind``; of "rare" how many steps it is.
        of: steps in all.
        each: what one of these steps loses.
    """

    kind: str
    steps: int
    of: int
    each: float

    def words(self) -> str:
        """Such as " every 50 steps"; empty where it is steady."""
        return {
            "growing": ", more with every step",
            "first": f" in the first {self.steps} steps",
            "last": f" in the last {self.steps} steps",
            "every": f" every {self.steps} steps",
            "rare": f" in {self.steps} of {self.of} steps",
        }.get(self.kind, "")


def when(loss: Floats) -> When:
    """How a loss, (steps,), >= 0, is spread over the steps."""
    count = len(loss)
    if not loss.any():
        return When("steady", count, count, 0.0)
    mean = float(loss.mean())
    if first := _at_beginning(loss):
        return When("first", first, count, float(loss[:first].mean()))
    if _grows(loss):
        return When("growing", count, count, mean)
    if last := _at_beginning(loss[::-1]):
        return When("last", last, count, float(loss[-last:].mean()))
    if np.median(loss) >= STEADY * mean:
        return When("steady", count, count, mean)
    heavy = np.flatnonzero(loss > max(mean, 0.3 * float(loss.max())))
    each = float(loss[heavy].mean()) if len(heavy) else mean
    between = np.diff(heavy)
    if len(heavy) >= 3 and between.std() <= 0.25 * between.mean() and between.mean() > 1.5:
        return When("every", round(float(np.median(between))), count, each)
    return When("rare", max(1, len(heavy)), count, each)


def _at_beginning(loss: Floats) -> int:
    """In how many first steps nearly all of the loss lies, evenly; 0 where that are most steps, or a few."""
    until = int(np.searchsorted(np.cumsum(loss), 0.95 * loss.sum())) + 1
    early = loss[:until]
    if until > _ENDS_EARLY * len(loss) or until < 10 or np.median(early) < STEADY * early.mean():
        return 0
    until = max(until, int(np.flatnonzero(loss >= 0.5 * np.median(early)).max(initial=0)) + 1)
    return until if until <= _ENDS_EARLY * len(loss) else 0


def _grows(loss: Floats) -> bool:
    """Whether every tenth of the steps loses more than the one before it, nearly, and the last much more."""
    tenths = np.array([np.median(part) for part in np.array_split(loss, 10)]) if len(loss) >= 40 else np.zeros(10)
    rises = np.corrcoef(np.arange(10), tenths)[0, 1] if tenths.std() > 0 else 0.0
    return bool(rises >= 0.9 and tenths[0] <= 0.6 * tenths[-1])


def computes_itself(ran: Floats, of_all: Floats) -> bool:
    """Whether the thread that marks the steps computes, as PyTorch's does; TensorFlow has threads of its own."""
    return bool(lower_median(ran) > 0.5 * lower_median(of_all))


def why(lost: float, ran: float, queued: float, of_all: float, *, itself: bool, read: bool) -> str:
    """What slow ranks do in the part of a step that is no seen input: a word of ``DOING``.

    Args:
        lost: seconds by which they are behind the others.
        ran, queued, of_all: by how much more their thread ran, had no core, and all their threads ran; NaN where that
            is not known.
        itself: whether that thread computes.
        read: whether input was seen apart.
    """
    if queued >= 0.5 * lost:
        return "cores"
    if np.isnan(ran):
        return "compute" if read else "late"
    if (ran if itself else max(ran, of_all)) >= 0.5 * lost:
        return "compute"
    if not read:
        return "unread"
    if itself and ran + queued >= 0.5 * lost:
        return "compute" if ran > queued else "cores"
    # Threads of the framework that have no core are not counted: one that runs a little may wait for one.
    return "blocked" if itself or of_all < _AT_REST * lost else "late"


def named(ranks: Sequence[int], size: int, *, host: bool = False) -> str:
    """The ranks of a sentence, in increasing order, at its beginning; ``host``: they are all ranks of one host."""
    who = name_ranks(ranks)
    if host:
        return f"The host of {who}"
    if len(ranks) > 3 and 2 * len(ranks) == size:
        return f"Half of the ranks ({who.partition(' ')[2]})"
    return who.capitalize()


def doing(kind: str, ranks: Sequence[int]) -> str:
    """What these ranks do that the others wait for; see ``DOING``."""
    return DOING[kind][len(ranks) > 1]


def trend(seconds: Floats, least: float) -> tuple[str, Floats] | None:
    """What a series loses by growing, or by its first or its last steps: "growth", "first" or "last"; by step."""
    count = len(seconds)
    if count < 40:
        return None
    tenths = np.array([np.median(part) for part in np.array_split(seconds, 10)])
    if np.ptp(tenths) < least:
        return None
    if np.corrcoef(np.arange(10), tenths)[0, 1] >= 0.9 and np.diff(tenths).max() < 0.5 * np.ptp(tenths):
        slope, _ = np.polyfit(np.arange(count), seconds, 1)
        begin = float(tenths[0] - 0.05 * count * slope)
        return "growth", np.maximum(0.0, seconds - max(0.0, begin))
    if (first := _first(seconds, tenths)) is not None:
        return "first", first
    if (last := _first(seconds[::-1], tenths[::-1])) is not None:
        return "last", last[::-1]
    return None


def _first(seconds: Floats, tenths: Floats) -> Floats | None:
    """What the first steps take longer than the later ones, where the first tenths are apart from these; by step."""
    for at in range(1, 7):
        low = float(np.median(tenths[at:]))
        if tenths[:at].min() - tenths[at:].max() >= 0.5 * (tenths[:at].max() - low) > 0:
            middle = (float(np.median(tenths[:at])) + low) / 2
            long = np.flatnonzero(seconds > middle)
            until = int(long[long < (at + 1) * len(seconds) // 10].max()) + 1
            return np.where(np.arange(len(seconds)) < until, np.maximum(0.0, seconds - low), 0.0)
    return None
