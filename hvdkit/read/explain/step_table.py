"""The steps of all ranks as arrays: what each rank did of its own from one exchange of gradients to the next.

All ranks leave an exchange together. So each rank's own clock counts from there, and clocks of different hosts are
compared nowhere. A step lasts as long as its slowest rank's own part, and the exchange after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from hvdkit.common.units import printable
from hvdkit.errors import DataError
from hvdkit.observe.lateness import Floats, lower_median
from hvdkit.observe.step_files import RankTimes, Step

WARMUP = 5
"""First steps that are left out, of long enough recordings."""
LEAST = 10
"""Steps that are enough to tell a cause."""
PARTS = ("between", "input", "work")
"""What a rank does from one exchange to the next: between two steps, waiting for its batch, computing."""


@dataclass(frozen=True)
class StepTable:
    """Seconds of the steps that count, without the warm-up.

    Attributes:
        numbers: of the ranks, by row.
        size: ranks of the job, those that recorded nothing, too.
        recorded: steps of each rank; those that the shortest one has are compared.
        hosts: a number for each rank's host; None in older files.
        parts: by name of ``PARTS``, (ranks, steps).
        exchange: (steps,), from the last rank's gradients until all have them; where the ranks do not say when they
            were ready, with the computation.
        ready: whether they say it.
        used: (3, ranks, steps): the thread that trains ran, others had its core, all threads ran; None where it is not
            known. Means of a step in older files.
        events: by name, seconds within each part, (ranks, steps), and of "exchange" where that holds the computation.
        cpus: of each rank, None in older files.
        where: for the evidence.
        waits: (steps, 3), when each began, when its last rank was ready and when it was complete, by the clock of the
            one host; None where there are several hosts, or it is not known.
        first: the seconds of the steps before, and of the very first one.
        validation: seconds of the steps in which nothing is trained.
    """

    numbers: list[int]
    size: int
    recorded: list[int]
    hosts: list[int | None]
    parts: dict[str, Floats]
    exchange: Floats
    ready: bool
    used: Floats | None
    events: dict[str, dict[str, Floats]]
    cpus: list[frozenset[int] | None]
    where: str
    waits: Floats | None
    first: tuple[float, float]
    validation: float

    @cached_property
    def own(self) -> Floats:
        """What each rank does of its own, (ranks, steps)."""
        return np.asarray(sum(self.parts.values()))

    @property
    def total_s(self) -> float:
        """Seconds of all these steps."""
        return float((self.own.max(axis=0) + self.exchange).sum())

    @property
    def steps(self) -> int:
        """How many there are."""
        return len(self.exchange)

    @property
    def warmup(self) -> int:
        """How many first steps are left out."""
        return min(self.recorded) - self.steps

    @property
    def step_s(self) -> float:
        """Mean seconds of one."""
        return self.total_s / self.steps

    @property
    def step_s_usual(self) -> float:
        """Median seconds of one."""
        return float(np.median(self.own.max(axis=0) + self.exchange))

    def without(self, less: dict[str, Floats], exchange: Floats | float = 0.0) -> StepTable:
        """The same job without a cause: what it saves is the difference of ``total_s``.

        Args:
            less: by part, seconds (ranks, steps) that each rank does not need then.
            exchange: (steps,) that the exchange does not need.
        """
        parts = {name: np.maximum(0.0, part - less.get(name, 0.0)) for name, part in self.parts.items()}
        return replace(self, parts=parts, exchange=np.maximum(0.0, self.exchange - exchange))

    def accounts(self) -> dict[str, float]:
        """Where the whole time went, from the first step to the last; seconds that add up to it."""
        after = "update" if self.size == 1 else "exchange and update"
        if not self.ready:
            after = "computation and update" if self.size == 1 else "computation and exchange"
        order = np.argsort(self.own, axis=0, kind="stable")
        middle = order[(len(self.numbers) - 1) // 2][None]
        found = {name: float(np.take_along_axis(part, middle, 0).sum()) for name, part in self.parts.items()}
        return {
            "computation": found["work"],
            "input": found["input"],
            "between steps": found["between"],
            "waiting for later ranks": float((self.own.max(axis=0) - lower_median(self.own)).sum()),
            after: float(self.exchange.sum()),
            "first steps": self.first[0],
            "steps without training": self.validation,
        }


def table(
    times: Sequence[RankTimes], where: Path, size: int | None = None, *, warmup: int | None = None, least: int = LEAST
) -> StepTable:
    """The steps of all ranks.

    Where most steps say when their gradients were there, those that do not are no training but a validation.

    Args:
        times: of each rank, by rank.
        where: the directory, for the evidence.
        size: ranks of the job, where it may have more than recorded their steps.
        warmup: first steps that are left out; None for ``WARMUP`` of long enough recordings, else one.
        least: steps of a rank that are enough.
    Raises:
        DataError: too few steps to tell anything, or steps that take no time.
    """
    ready, trained, validating = _trained(times)
    recorded = [len(steps) for steps in trained]
    count = min(recorded)
    first = (WARMUP if count >= 2 * WARMUP + LEAST else 1) if warmup is None else warmup
    if count < max(least, first + 1):
        raise DataError(
            f"{printable(str(where))} holds the times of {count} steps of a rank, too few to tell what is usual; "
            f"record at least {max(least, first + 1)}."
        )

    def of(value: Callable[[Step], float | None]) -> Floats:
        return np.array([[value(step) for step in steps[:count]] for steps in trained], np.float64)

    asked, given, ended = of(lambda one: one.asked), of(lambda one: one.given), of(lambda one: one.ended)
    left = _left(times, of(lambda one: one.arrived), ended, first)
    together = np.min([seconds[: count + 1] for seconds in validating], axis=0)  # a rank that does more is late by it
    begun = np.minimum(asked, np.concatenate([asked[:, :1], left[:, :-1] + together[1:count]], axis=1))
    done = of(lambda one: one.ready) if ready else given
    whole = np.median(left - begun, axis=0)
    if (ended - asked)[:, first:].max(axis=0).mean() <= 0:
        raise DataError(
            f"{printable(str(where))} holds steps that take no time; do the work of a step inside of the loop."
        )
    parts = {"between": asked - begun, "input": given - asked, "work": done - given}
    hosts = [rank.host for rank in times]
    events = {
        name: _of_events(
            times, name, (begun, asked, given, done) if ready else (begun, asked, given, done, left), first
        )
        for name in sorted({one.name for rank in times for one in rank.events})
    }
    waits = None
    if ready and None not in hosts and len(set(hosts)) == 1:
        waits = np.stack([begun.min(axis=0), done.max(axis=0), left.min(axis=0)], axis=1)[first:]
    return StepTable(
        numbers=[rank.rank for rank in times],
        size=size or len(times),
        recorded=recorded,
        hosts=hosts,
        parts={name: part[:, first:] for name, part in parts.items()},
        exchange=np.maximum(0.0, whole - (done - begun).max(axis=0))[first:],
        ready=ready,
        used=_used(times, of, first),
        events=events,
        cpus=[rank.cpus for rank in times],
        where=where.name or str(where),
        waits=waits,
        first=(float(whole[:first].sum()), float(whole[0])),
        validation=float(together.sum()),
    )


def _trained(times: Sequence[RankTimes]) -> tuple[bool, list[list[Step]], list[list[float]]]:
    """Whether ranks say when their gradients were there; of each rank the steps that train, and the seconds of
    validation before each of them and after the last one. Ranks with as many steps leave out the same ones.
    """
    said = [[step.ready is not None for step in rank.steps] for rank in times]
    least = min(map(len, said))
    ready = min(map(sum, said)) >= max(1, 0.5 * least)
    if ready and len({*map(len, said)}) == 1:
        said = [[all(of_step) for of_step in zip(*said, strict=True)]] * len(said)
    trained, validating = [], []
    for rank, counts in zip(times, said, strict=True):
        seconds = [0.0]
        for step, trains in zip(rank.steps, counts, strict=True):
            if trains or not ready:
                seconds.append(0.0)
            else:
                seconds[-1] += step.ended - step.asked
        trained.append([step for step, trains in zip(rank.steps, counts, strict=True) if trains or not ready])
        validating.append(seconds)
    return ready, trained, validating


def _left(times: Sequence[RankTimes], arrived: Floats, ended: Floats, first: int) -> Floats:
    """When each rank had the gradients of all ranks, by its own clock, (ranks, steps).

    Where nobody says so, that is when the first rank of its host ended the step: callbacks may follow the exchange.
    """
    if not np.isnan(arrived[:, first:]).any():
        return np.where(np.isnan(arrived), ended, arrived)
    left = ended.copy()
    for host in {rank.host for rank in times} - {None}:
        there = [row for row, rank in enumerate(times) if rank.host == host]
        left[there] = ended[there].min(axis=0)
    return left


def _used(times: Sequence[RankTimes], of: Callable[..., Floats], first: int) -> Floats | None:
    """See ``StepTable.used``; of a step where the ranks say it of each, else what they say of all."""
    if all(step.used is not None for rank in times for step in rank.steps):
        return np.array([of(lambda step, at=at: step.used[at])[:, first:] for at in range(3)])
    means = [rank.cores for rank in times if rank.cores is not None]
    if len(means) < len(times):
        return None
    steps = of(lambda step: step.asked).shape[1] - first
    return np.repeat(np.array(means).T[:, :, None], steps, axis=2)


def _of_events(times: Sequence[RankTimes], name: str, edges: tuple[Floats, ...], first: int) -> dict[str, Floats]:
    """Seconds of the events of a name within each part of each step; ``edges``: when the parts begin, and the end."""
    found = {}
    for part, begins, ends in zip((*PARTS, "exchange"), edges, edges[1:], strict=False):
        spent = np.zeros(begins.shape)
        for row, rank in enumerate(times):
            spans = np.array([(one.at, one.at + one.seconds) for one in rank.events if one.name == name])
            if len(spans):
                before = np.repeat(np.cumsum(spans[:, 1] - spans[:, 0]), 2)  # seconds until an event ends and begins
                moments, before = np.maximum.accumulate(spans.ravel()), np.concatenate([[0.0], before[:-1]])
                spent[row] = np.interp(ends[row], moments, before) - np.interp(begins[row], moments, before)
        found[part] = np.maximum(0.0, spent)[:, first:]
    return found
