"""What the times of the steps say: which rank the others wait for, and whether in its input or in its computation.

The ranks end a step together, when they have exchanged gradients. So a step is as long as its slowest rank makes it,
and what it loses is what that rank took longer than the middle one. Clocks are compared within a host only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hvdkit.common.causes import WORTH_SAYING, Cause, to_blame
from hvdkit.common.units import duration_text, share_text
from hvdkit.errors import DataError
from hvdkit.read.explain.results import JobLaunch
from hvdkit.steps.ranks import name_ranks
from hvdkit.steps.step_files import RankTimes, Step
from hvdkit.steps.stragglers import lower_median

WARMUP = 5
"""First steps that are left out, of long enough recordings."""
LEAST = 10
"""Steps that are enough to tell a cause."""
STEADY = 0.4
"""Part of the mean loss by a rank that half of its steps must reach, else it is late now and then."""
OTHERS = 1 / 3
"""Part of a slow rank's wait for its input from which on the others' wait is no accident."""
LEAST_LATE, LEAST_RANDOM, LEAST_CORES, LEAST_INPUT = 0.04, 0.1, 0.08, 0.1
"""Shares of a step from which on a cause is believed; what is below, jobs with nothing wrong reach by chance."""
OWN_USE = 0.6
"""Part of the cores that the ranks use, below which it is others who keep them from them."""
FIRST_STEP_S, FIRST_STEP = 1.0, 0.1
"""Seconds, and share of what was recorded, from which on the first step is a cause: a graph is traced in less."""
EXCHANGE = 0.2
"""Share of a step after the last rank was ready from which on it is said that this recording does not explain it."""
_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StepCauses:
    """What the times of the steps say.

    Attributes:
        ranks, steps: how many; those steps that count.
        step_s: mean seconds of one.
        causes: in no order.
        untold: what these times do not say, full sentences.
        exchange: share of a step after its last rank was ready; None where that is not known.
        waits: (steps, 3), when each began, when its last rank was ready and when it was complete, by the clock of the
            one host; None where there are several hosts, or it is not known.
    """

    ranks: int
    steps: int
    step_s: float
    causes: list[Cause]
    untold: list[str]
    exchange: float | None
    waits: _Floats | None = None


@dataclass(frozen=True)
class _Table:
    """Seconds, (ranks, steps) each, without the warm-up; ``own`` is until the gradients were there."""

    numbers: list[int]
    whole: _Floats
    input: _Floats
    own: _Floats | None
    where: str
    waits: _Floats | None

    @property
    def step_s(self) -> float:
        return float(self.whole.max(axis=0).mean())


def look(times: Sequence[RankTimes], where: Path, launched: JobLaunch | None = None) -> StepCauses:
    """The causes in what ``step_files.read`` found.

    Args:
        times: of each rank, by rank.
        where: the directory, for the evidence.
        launched: how the job was started, None where that is not known.
    Raises:
        DataError: too few steps to tell anything.
    """
    count = min(len(rank.steps) for rank in times)
    if count < LEAST:
        raise DataError(
            f"{where} holds the times of {count} steps of a rank, too few to tell what is usual; record at "
            f"least {LEAST}."
        )
    table = _table(times, count, where)
    causes, untold = _late(table, times)
    causes += _few_cores(table, times, launched)
    if any(
        cause.kind in ("few-cores", "host") and not cause.ranks for cause in causes
    ):  # who gets no core is late, now this rank, now that one
        causes = [cause for cause in causes if cause.kind != "random-late"]
    causes += _first_step(times, table)
    exchange = None
    if table.own is not None:
        exchange = float((table.whole.max(axis=0) - table.own.max(axis=0)).mean()) / table.step_s
    expected = len(times) if launched is None else launched.ranks
    if len(times) < expected:
        untold.append(f"{expected - len(times)} of {expected} ranks recorded no steps; of these nothing is known.")
    if len(times) == 1:
        untold.append("One rank alone waits for nobody, and exchanges nothing.")
    return StepCauses(expected, table.whole.shape[1], table.step_s, causes, untold, exchange, table.waits)


def _table(times: Sequence[RankTimes], count: int, where: Path) -> _Table:
    """Where most steps say when their gradients were there, those that do not are no training but a validation."""
    first = WARMUP if count >= 2 * WARMUP + LEAST else 1

    said = [all(rank.steps[at].ready is not None for rank in times) for at in range(first, count)]
    training = [at for at, one in enumerate(said, start=first) if one or sum(said) < 0.5 * len(said)]

    def of(value: Callable[[Step], float]) -> _Floats:
        return np.array([[value(rank.steps[at]) for at in training] for rank in times])

    own = of(lambda step: np.nan if step.ready is None else step.ready - step.asked)
    waits = None
    if None not in (hosts := {rank.host for rank in times}) and len(hosts) == 1:  # one clock: what ranks do between
        asked = of(lambda step: step.asked)  # the exchange and the next batch (writing, callbacks) makes them late, too
        own = own + asked - asked.min(axis=0)
        if not np.isnan(own).any():
            ended = of(lambda step: step.ended)
            waits = np.stack([asked.min(axis=0), (own + asked.min(axis=0)).max(axis=0), ended[0]], axis=1)
    table = _Table(
        [rank.rank for rank in times],
        of(lambda step: step.ended - step.asked),
        of(lambda step: step.given - step.asked),
        None if np.isnan(own).any() else own,
        where.name or str(where),
        waits,
    )
    if table.step_s <= 0:
        raise DataError(f"{where} holds steps that take no time; do the work of a step inside of the loop.")
    return table


def _late(table: _Table, times: Sequence[RankTimes]) -> tuple[list[Cause], list[str]]:
    """Ranks for which the others wait."""
    if len(table.numbers) == 1:
        return _input_everywhere(table, 0.0), []
    own = table.input if table.own is None else table.own
    untold = []
    if table.own is None:
        untold.append(
            "The ranks did not say when their gradients were there (hvdkit's distribute does), so that a rank that "
            "computes slower cannot be told from the exchange; record --timeline FILE --skew."
        )
    last = own.argmax(axis=0)
    lost = own.max(axis=0) - lower_median(own)
    at_last = np.take_along_axis(table.input, last[None], 0)[0]
    by_input = np.clip(at_last - lower_median(table.input), 0.0, lost)
    return [*_late_by_input(table, by_input, last), *_late_by_work(table, times, lost - by_input, last, own)], untold


def _to_blame(lost: _Floats, last: NDArray[np.intp], ranks: int) -> list[int]:
    """Rows of the ranks that cost the steps that, few or none."""
    return list(to_blame(dict(enumerate(np.bincount(last, lost, minlength=ranks).tolist())), one_in=2))


def _seen(slow: list[int], lost: _Floats, part: _Floats) -> str:
    usual = np.median(np.delete(part, slow, axis=0), axis=0).mean()
    longer = share_text((lost > 0.5 * lost.mean()).mean())
    return f"{_ms(part[slow].mean())} a step there, the others {_ms(usual)}; longer in {longer} of {len(lost)} steps"


def _late_by_input(table: _Table, lost: _Floats, last: NDArray[np.intp]) -> list[Cause]:
    """What the steps lost by batches that came late, on some ranks or everywhere."""
    cost = float(lost.mean())
    share = cost / table.step_s
    slow = _to_blame(lost, last, len(table.input))
    if not slow or _others_wait(table.input, slow):
        return _input_everywhere(table, cost)
    found = _input_everywhere(table, 0.0)
    if share < LEAST_LATE:
        return found
    ranks = tuple(table.numbers[row] for row in slow)
    who, verb = name_ranks(ranks), "s" if len(ranks) == 1 else ""
    one = Cause(
        "input", cost, share, f"{who.capitalize()} wait{verb} for {'its' if verb else 'their'} input.",
        f"{table.where}: {_seen(slow, lost, table.input)}.",
        f"Look at how {who} read{verb}: file system, size of the shard, number of workers, prefetching. "
        "Reading ahead can hide that other ranks are as slow.",
        ranks=ranks,
    )  # fmt: skip
    return [one, *found]


def _others_wait(waits: _Floats, slow: list[int]) -> bool:
    """Whether the other ranks' batches come late, too: where all read ahead, one of them hides another for a while."""
    over = (waits - np.quantile(waits, 0.1, axis=1).min()).mean(axis=1)
    return bool(np.median(np.delete(over, slow)) > OTHERS * over[slow].mean())


def _late_by_work(
    table: _Table, times: Sequence[RankTimes], lost: _Floats, last: NDArray[np.intp], own: _Floats
) -> list[Cause]:
    """What the steps lost by computation, and by what ranks do between two steps."""
    part = own - table.input
    cost = float(lost.mean())
    share = cost / table.step_s
    if share < LEAST_LATE:
        return []
    slow = _to_blame(lost, last, len(part))
    if not slow:
        return _late_anywhere(table, lost)
    ranks = tuple(table.numbers[row] for row in slow)
    who, verb, seen = name_ranks(ranks), "s" if len(ranks) == 1 else "", _seen(slow, lost, part)
    excess = part[slow].mean(axis=0) - lower_median(part)
    if float(np.median(excess)) < STEADY * float(excess.mean()):
        if share < LEAST_RANDOM:
            return []
        return [
            Cause(
                "random-late", cost, share, f"{who.capitalize()} {'is' if verb else 'are'} late now and then.",
                f"{table.where}: {seen}.",
                f"Look for what runs now and then on {who} alone: {'' if table.input.any() else 'reading its input, '}"
                "logging, saving, evaluation, garbage collection, or another job on the host.",
                ranks=ranks,
            )
        ]  # fmt: skip
    return [_slow(table, times, slow, cost, share, seen)]


def _late_anywhere(table: _Table, lost: _Floats) -> list[Cause]:
    cost = float(lost.mean())
    share = cost / table.step_s
    if share < LEAST_RANDOM:
        return []
    in_steps = share_text((lost > 0.5 * cost).mean())
    return [
        Cause(
            "random-late", cost, share, "A different rank is late in each step.",
            f"{table.where}: no rank causes most of it; in {in_steps} of {len(lost)} steps.",
            "Give the same work to all ranks in a step (samples of one length together), and keep other programs off "
            "their cores (hvdkit preflight, --bind core).",
        )
    ]  # fmt: skip


def _slow(table: _Table, times: Sequence[RankTimes], slow: list[int], cost: float, share: float, seen: str) -> Cause:
    """One rank, or some, compute longer in most steps: by themselves, or by where they run."""
    ranks = tuple(table.numbers[row] for row in slow)
    who, verb = name_ranks(ranks), "s" if len(ranks) == 1 else ""
    queued = [_queued(rank) for rank in times]
    known = [one for one in queued if one is not None]
    extra = min((queued[row] or 0.0) for row in slow) - float(np.median(known)) if len(known) == len(times) > 0 else 0.0
    if len(times) == 2 and len(known) == 2:
        extra = max(known) - min(known) if queued[slow[0]] == max(known) else 0.0
    if extra >= 0.5 * cost:
        return Cause(
            "host", cost, share, f"{who.capitalize()} share{verb} {'its' if verb else 'their'} cores with others.",
            f"{table.where}: {seen}; {_ms(extra)} more a step without a core.",
            "See what else runs on that host and on those cores: another job, more threads than cores, two ranks bound "
            "to one core (hvdkit preflight; --bind core, --threads).",
            ranks=ranks,
        )  # fmt: skip
    hosts = {rank.host for rank, row in zip(times, range(len(times)), strict=True) if row in slow}
    there = [row for row, rank in enumerate(times) if rank.host in hosts]
    if len(hosts) == 1 and None not in hosts and len(slow) > 1 and len(there) == len(slow) < len(times):
        return Cause(
            "host", cost, share, f"The host of {who} computes slower.", f"{table.where}: {seen}.",
            "Compare that host with another one (hvdkit preflight there): clock rate, memory, devices, other jobs.",
            ranks=ranks,
        )  # fmt: skip
    if not table.input.any() and (unseen := _input_unseen(table, times, slow, cost, seen)) is not None:
        return unseen
    return Cause(
        "compute", cost, share, f"{who.capitalize()} compute{verb} longer.", f"{table.where}: {seen}.",
        f"See whether {who} ha{'s' if verb else 've'} more to compute (size of the batch, length of "
        "the samples, work that it alone does) or a slower core or device (hvdkit preflight).",
        ranks=ranks,
    )  # fmt: skip


def _input_unseen(table: _Table, times: Sequence[RankTimes], slow: list[int], cost: float, seen: str) -> Cause | None:
    """A late rank whose batches come from no loader that is seen; None where its thread ran so much longer."""
    known = [rank.cores.ran / rank.cores.steps for rank in times if rank.cores is not None]
    told = len(known) == len(times)
    if told and min(known[row] for row in slow) - float(lower_median(np.array(known))) >= 0.5 * cost:
        return None
    ranks = tuple(table.numbers[row] for row in slow)
    who, verb, its = name_ranks(ranks), "s" if len(ranks) == 1 else "", "its" if len(ranks) == 1 else "their"
    what, ran = f"come{verb} late, by {its} input or computation", ""
    if told:
        what, ran = f"wait{verb} for {its} input or {its} device", "; the training thread there runs no longer"
    return Cause(
        "late", cost, cost / table.step_s, f"{who.capitalize()} {what}.", f"{table.where}: {seen}{ran}.",
        f"Look at how {who} read{verb}, and at {its} device. Batches that come from no DataLoader are not seen: "
        "put record_steps (hvdkit.torch) around them, and it is told.",
        ranks=ranks,
    )  # fmt: skip


def _queued(rank: RankTimes) -> float | None:
    """Seconds a step that the thread that trains waited for a core."""
    return None if rank.cores is None else rank.cores.queued / rank.cores.steps


def _input_everywhere(table: _Table, scattered: float) -> list[Cause]:
    """What the middle rank waits for its batches, and ``scattered``: seconds that a different one waits longer."""
    middle = float(lower_median(table.input).mean())
    cost = middle + scattered
    share = cost / table.step_s
    if share < LEAST_INPUT:
        return []
    what, seen = "The one rank waits for its input.", "it waits"
    if len(table.numbers) > 1:
        what, seen = "Every rank waits for its input.", "the middle rank waits"
    if scattered > 0:
        seen += f" {_ms(middle)}, the last one"
    if scattered > middle:
        what = "A different rank waits for its input in each step."
    return [
        Cause(
            "input-everywhere", cost, share, what,
            f"{table.where}: {seen} {_ms(cost)} for each batch of {_ms(table.step_s)} a step.",
            "Load ahead of the computation: more workers, prefetching, a cache, files nearer to the ranks.",
        )
    ]  # fmt: skip


def _few_cores(table: _Table, times: Sequence[RankTimes], launched: JobLaunch | None) -> list[Cause]:
    """Cores that the middle rank's thread waits for: the job's own threads have them, or others."""
    queued = [_queued(rank) for rank in times]
    known = [one for one in queued if one is not None]
    if len(known) < len(times):
        return []
    cost = float(lower_median(np.array(known)))
    share = cost / table.step_s
    if share < LEAST_CORES:
        return []
    seen = f"{table.where}: the thread that trains waits {_ms(cost)} a step for a core on the middle rank"
    if launched is not None and launched.ranks_on_a_host == launched.ranks == len(times):
        used = sum(rank.cores.of_all / rank.cores.steps for rank in times if rank.cores is not None) / table.step_s
        seen += f"; all ranks together use {used:.2g} of {launched.cores} cores"
        if used < OWN_USE * launched.cores:
            return [
                Cause(
                    "host", cost, share, "Other programs take the cores of the ranks.", f"{seen}.",
                    "See what else runs there (top, hvdkit preflight), and have the batch system give whole nodes.",
                )
            ]  # fmt: skip
    return [
        Cause(
            "few-cores", cost, share, "There are too few cores for the ranks' threads.",
            f"{seen}.",
            "Use fewer threads (--threads, fewer loader workers) or fewer ranks, and leave Horovod's own thread room; "
            "see that nothing else runs there.",
        )
    ]  # fmt: skip


def _first_step(times: Sequence[RankTimes], table: _Table) -> list[Cause]:
    first = max(rank.steps[0].ended - rank.steps[0].asked for rank in times)
    lost = first - float(np.median(table.whole.max(axis=0)))
    recorded = max(rank.steps[-1].ended - rank.steps[0].asked for rank in times)
    if lost < FIRST_STEP_S or lost < max(FIRST_STEP, WORTH_SAYING) * recorded:
        return []
    return [
        Cause(
            "first-step", lost, lost / recorded, "The first step takes longer than the others.",
            f"{table.where}: it took {_ms(first)}.",
            "Compilation, allocation and the first read: it weighs less the longer the job; keep shapes the same, and "
            "a cache of what is compiled.",
            per_step=False,
        )
    ]  # fmt: skip


def _ms(seconds: float) -> str:
    return duration_text(1e6 * float(seconds))
