"""The one set of causes: what the times of the steps say costs a job time, and what is saved if it were gone.

A cause is the seconds that some ranks, in some part of some steps, would not need without it. Its cost is what the job
saves then. The next cause is looked for in the job without it: of two slow ranks the second one costs nothing before
the first is mended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hvdkit.common.units import duration_text, share_text
from hvdkit.observe import lateness
from hvdkit.observe.lateness import Floats, When, doing, lower_median, named, to_blame
from hvdkit.observe.step_files import RankTimes
from hvdkit.read.causes import ADVICE, SENTENCES, Cause
from hvdkit.read.explain.sources import JobLaunch
from hvdkit.read.explain.step_table import LEAST, PARTS, StepTable, table

_LEAST = {
    "late": 0.04, "rare": 0.1, "input-everywhere": 0.1, "cores": 0.08, "stall": 0.05, "growth": 0.06, "first": 0.05,
    "event": 0.04, "exchange": 0.2,
}  # fmt: skip
"""Shares of a step from which on a cause is believed; what is below, jobs with nothing wrong reach by chance."""
NOTHING_FOUND = (
    f"No cause was found: a straggler counts from {share_text(_LEAST['late'])} of a step, input of all ranks from "
    f"{share_text(_LEAST['input-everywhere'])}, the allreduce from {share_text(_LEAST['exchange'])}."
)
"""What is said of steps without a cause."""
_MOST_CAUSES = 8
_OTHERS = 1 / 3
"""Part of a slow rank's wait for its input from which on the others' wait is no accident."""
_OWN_USE, _WHOLE_CORES = 0.6, 0.07
"""Part of the cores that the ranks use below which it is others who keep them from them, and how near a whole number of
cores their use is where they are bound to so many."""
_FIRST_STEP_S, _FIRST_STEP = 1.0, 0.1
"""Seconds, and share of what was recorded, from which on the first step is a cause: a graph is traced in less."""
_STALL = 0.5
"""Of a step: what is longer than the usual one by so much is a stall."""
_RECORDED = 2.0
"""How much more may be saved by what is only inferred."""
_PATTERN = 0.6
"""Part of the whole allreduce from which on its growth, or its stalls, are named in its place."""


class StepCauses(NamedTuple):
    """The steps, the causes in them, the one that saves most first, and what they do not say, full sentences."""

    job: StepTable
    causes: list[Cause]
    untold: list[str]


@dataclass
class _Candidate:
    """What may be a cause: ``less`` and ``exchange`` are what ``StepTable.without`` takes."""

    kind: str
    what: str
    evidence: str
    advice: str
    least: float
    less: dict[str, Floats] = field(default_factory=dict)
    exchange: Floats | float = 0.0
    ranks: tuple[int, ...] = ()
    once: bool = False
    recorded: bool = False
    """By its name: then it goes before what is inferred."""
    before: float = 0.0
    """Seconds that the steps of the warm-up do not need then."""

    def saves(self, job: StepTable) -> float:
        """Seconds in all of the steps."""
        return job.total_s - job.without(self.less, self.exchange).total_s + self.before


def look(times: Sequence[RankTimes], where: Path, launched: JobLaunch | None = None) -> StepCauses:
    """The causes in what ``step_files.read`` found.

    Args:
        times: of each rank, by rank.
        where: the directory, for the evidence.
        launched: how the job was started, None where that is not known.
    Raises:
        DataError: too few steps to tell anything.
    """
    job = table(times, where, None if launched is None else launched.ranks)
    untold = []
    if not job.ready and len(times) > 1:
        untold.append(
            "The ranks did not say when their gradients were there (hvdkit's distribute does), so that a rank that "
            "computes slower cannot be told from the exchange; record --timeline FILE --skew."
        )
    if len(times) < job.size:
        untold.append(f"{job.size - len(times)} of {job.size} ranks recorded no steps; of these nothing is known.")
    longest = max(job.recorded)
    if early := [row for row, steps in enumerate(job.recorded) if steps < longest - LEAST]:
        who, steps = named([job.numbers[row] for row in early], 0), max(job.recorded[row] for row in early)
        untold.append(f"{who} recorded {steps} of {longest} steps; what came later is not told.")
    if job.size == 1:
        untold.append("One rank alone waits for nobody, and exchanges nothing.")
    return StepCauses(job, [*_by_saving(job, launched), *_first_step(job)], untold)


def _by_saving(whole: StepTable, launched: JobLaunch | None) -> list[Cause]:
    """Causes, each the one that saves most in the job without those before it."""
    job, found = whole, list[Cause]()

    def worth(candidates: Iterable[_Candidate]) -> list[_Candidate]:
        return [one for one in candidates if one.saves(job) >= one.least * whole.total_s]

    while len(found) < _MOST_CAUSES and job.total_s > 0.05 * whole.total_s:
        told = {cause.what for cause in found}
        new = [one for one in worth(_candidates(job, launched)) if one.what not in told]
        candidates = new or worth(_joined(job)) or worth(_irregular(job))
        if not candidates:
            break
        best = max(candidates, key=lambda one: one.saves(job) * (_RECORDED if one.recorded else 1.0))
        if best.kind == "exchange":  # what is longer at times, or more and more, says more than the whole of it
            patterns = [one for one in candidates if not one.less and one is not best]
            best = next((one for one in patterns if one.saves(job) >= _PATTERN * best.saves(job)), best)
        saved, alone, per = best.saves(job), best.saves(whole), 1 if best.once else whole.steps
        found.append(
            Cause(
                best.kind, saved / per, saved / whole.total_s, best.what, f"{whole.where}: {best.evidence}.",
                best.advice, per_step=not best.once, ranks=best.ranks,
                alone_s=None if alone >= 0.7 * saved else max(0.0, alone) / per,
            )
        )  # fmt: skip
        job = job.without(best.less, best.exchange)
    return found


def _candidates(job: StepTable, launched: JobLaunch | None) -> Iterator[_Candidate]:
    yield from _events(job)
    yield from _slow(job)
    yield from _few_cores(job, launched)
    yield from _everywhere(job)
    if job.ready and len(job.numbers) > 1:
        share = job.exchange.sum() / job.total_s
        yield _Candidate(
            "exchange",
            f"The allreduce of gradients, and the update, come after the last {_recorded(job)}rank is ready.",
            f"{share_text(share)} of {_ms(job.step_s)} a step, on average",
            f"{SENTENCES['large-tensors'][1]} hvdkit launch --timeline FILE says what the time goes to.",
            _LEAST["exchange"], exchange=job.exchange,
        )  # fmt: skip


def _slow(job: StepTable) -> Iterator[_Candidate]:
    """Ranks that are apart from the others in a part of their steps, each blamed by its own excess."""
    for part in PARTS if len(job.numbers) > 1 else ():
        values = job.parts[part]
        rows = lateness.slow_ranks((values - lower_median(values)).mean(axis=1), 0.5 * _LEAST["late"] * job.step_s)
        if not rows or (part == "input" and _others_wait(values, rows)):
            continue
        others = np.delete(values, rows, axis=0)
        at = lateness.when(np.maximum(0.0, values[rows] - lower_median(others)).max(axis=0))
        steps = {"first": slice(at.steps), "last": slice(-at.steps, None)}.get(at.kind, slice(None))
        less = np.zeros(values.shape)
        less[rows, steps] = _beyond(values[rows, steps], others[:, steps])
        yield _late(job, part, rows, less, at)


def _beyond(slow: Floats, others: Floats) -> Floats:
    """By how much the steps of slow ranks are longer than those of the others: their shortest than the others', etc."""
    order = np.argsort(slow, axis=1)
    beyond = np.maximum(0.0, np.sort(slow, axis=1) - lower_median(np.sort(others, axis=1)))
    found = np.zeros(slow.shape)
    np.put_along_axis(found, order, beyond, axis=1)
    return found


def _others_wait(waits: Floats, slow: list[int]) -> bool:
    """Whether the other ranks' batches come late, too: where all read ahead, one of them hides another for a while."""
    over = (waits - np.quantile(waits, 0.1, axis=1).min()).mean(axis=1)
    return bool(lower_median(np.delete(over, slow)) > _OTHERS * over[slow].mean())


def _late(job: StepTable, part: str, rows: list[int], less: Floats, at: When) -> _Candidate:
    """Slow ranks as a cause: who, what they do meanwhile, in which steps."""
    host = lateness.one_host(rows, job.hosts) is not None
    ranks = tuple(job.numbers[row] for row in rows)
    lost, usual = less[rows].max(axis=0), lower_median(np.delete(job.parts[part], rows, axis=0))
    why, seen = (part, "") if part != "work" else _why(job, rows, float(less[rows].mean()), host)
    who, words = named(ranks, len(job.numbers), host=host), doing(why, ranks[:1] if host else ranks)
    kind = {"between": "compute", "cores": "host", "unread": "late"}.get(why, why)
    advice = ADVICE["late" if why == "unread" else why]
    if host and why == "compute":
        kind, words, advice = "host", "computes slower", ADVICE["host"]
    periodic = at.kind == "every" and why in ("compute", "blocked", "unread", "late")
    if part == "work" and (periodic or (at.kind == "rare" and why == "compute")):
        words = ("is", "are")[len(ranks) > 1 and not host] + " late"
        kind = "pause" if periodic else "random-late"
    if part == "between" and at.kind in ("every", "rare"):
        kind = "pause"
    each = f", {_ms(at.each)} each" if at.kind in ("every", "rare") else ""
    evidence = (
        f"{_ms(job.parts[part][rows].mean())} a step there, the others {_ms(usual.mean())}; longer in "
        f"{share_text(float((lost > 0.5 * lost.mean()).mean()))} of {job.steps} steps{each}{seen}"
    )
    least = _LEAST["rare" if at.kind == "rare" and kind == "random-late" else "late"]
    steps, before = _from_start(job, at)
    return _Candidate(
        {"first": "first-steps", "growing": "growth"}.get(at.kind, kind), f"{who} {words}{steps}.", evidence,
        advice.format(who=named(ranks, 0).lower()), least, {part: less}, ranks=ranks, once=at.kind == "first",
        before=before,
    )  # fmt: skip


def _why(job: StepTable, rows: list[int], lost: float, host: bool) -> tuple[str, str]:
    """What slow ranks do between their batch and their gradients: a word of ``lateness.DOING``, further evidence."""
    read = bool(job.parts["input"].any())
    if job.used is None:
        return lateness.why(lost, np.nan, np.nan, np.nan, itself=True, read=read or host), ""
    ran, queued, of_all = (float((one[rows] - lower_median(np.delete(one, rows, axis=0))).mean()) for one in job.used)
    itself = lateness.computes_itself(job.used[0].mean(axis=1), job.used[2].mean(axis=1))
    why = lateness.why(lost, ran, queued, of_all, itself=itself, read=read)
    if why == "cores":
        shared, seen = _sharing(job, rows), f"; {_ms(queued)} more a step without a core"
        return (why, seen) if shared is None else ("affinity", f"{seen}; {shared}")
    return why, {
        "unread": "; the training thread there runs no longer",
        "blocked": "; the thread that trains neither runs nor waits for a core meanwhile",
    }.get(why, "")


def _sharing(job: StepTable, rows: Sequence[int]) -> str | None:
    """Whether these ranks are bound to fewer cores than there are ranks bound to them; None where they are not."""
    here = {row: job.cpus[row] for row in rows}
    known = {row: (job.hosts[row], cpus) for row, cpus in enumerate(job.cpus) if cpus is not None}
    every = set().union(*(cpus for _, cpus in known.values())) if known else set()
    for row, cpus in here.items():
        if cpus is None or len(cpus) == len(every) > 1:
            continue
        beside = [other for other, (host, of_other) in known.items() if host == job.hosts[row] and of_other <= cpus]
        if len(beside) > len(cpus):
            names = ", ".join(map(str, sorted(cpus)[:8]))
            return f"{len(beside)} ranks are bound to core{'s' * (len(cpus) > 1)} {names}"
    return None


def _joined(job: StepTable) -> Iterator[_Candidate]:
    """Ranks that hide one another: mending one of them saves nothing, mending all does."""
    late = list(_slow(job))
    if len(late) < 2:
        return
    ordered = sorted(late, key=lambda one: -sum(part.sum() for part in one.less.values()))
    less = {part: np.asarray(sum(one.less.get(part, 0.0) for one in ordered)) for part in PARTS}
    yield _Candidate(
        ordered[0].kind, " ".join(one.what for one in ordered), "; ".join(one.evidence for one in ordered),
        ordered[0].advice, _LEAST["late"], less, ranks=tuple(sorted({rank for one in late for rank in one.ranks})),
    )  # fmt: skip


def _irregular(job: StepTable) -> Iterator[_Candidate]:
    """What is left of the wait for the last rank, when no rank is apart from the others in most steps."""
    if len(job.numbers) == 1:
        return
    own = job.own
    lost = own.max(axis=0) - lower_median(own)
    less = np.maximum(0.0, own - lower_median(own))
    parts = {name: less * part / np.maximum(own, 1e-12) for name, part in job.parts.items()}
    costs = lateness.costs(own)
    rows = [*to_blame(dict(enumerate(costs.tolist())))]
    ranks = tuple(job.numbers[row] for row in rows)
    who = named(ranks, 0) if ranks else ""
    if ranks:
        what, advice = f"{who} {'is' if len(ranks) == 1 else 'are'} late now and then.", (
            f"Look for what runs now and then on {who.lower()} alone: {'' if job.parts['input'].any() else 'input, '}"
            "saving, evaluation, logging, garbage collection, or another job on the host."
        )  # fmt: skip
    else:
        what, advice = SENTENCES["random-late"]
    by = f"{who.lower()} caused {share_text(float(costs[rows].sum() / costs.sum()))} of it" if ranks else ""
    in_steps = share_text(float((lost > 0.5 * lost.mean()).mean()))
    evidence = f"{by or 'no rank causes most of it in most steps'}; in {in_steps} of {job.steps} steps"
    yield _Candidate("random-late", what, evidence, advice, _LEAST["rare"], parts, ranks=ranks)


def _events(job: StepTable) -> Iterator[_Candidate]:
    """Garbage collection, the disk, a checkpoint, an evaluation: what was recorded by name."""
    kinds = {"gc": "gc", "fsync": "blocked", "saving": "pause", "evaluation": "pause", "shard_state": "shard_state"}
    for name, spent in job.events.items():
        if name not in kinds:
            continue
        means = np.asarray(sum(part.mean(axis=1) for part in spent.values()))
        rows = [row for row, seconds in enumerate(means) if seconds >= 0.2 * means.max() > 0]
        if not rows:
            continue
        ranks = tuple(job.numbers[row] for row in rows)
        everybody = len(rows) == len(job.numbers) > 1
        who = "Every rank" if everybody else named(ranks, len(job.numbers))
        at = lateness.when(np.asarray(sum(part.max(axis=0) for part in spent.values())))
        yield _Candidate(
            kinds[name], f"{who} {doing(name, ranks[:1] if everybody else ranks)}{at.words()}.",
            f"{_ms(means.max())} a step, {_ms(at.each)} at a time", ADVICE[name], _LEAST["event"],
            {part: spent[part] for part in PARTS}, spent["exchange"].max(axis=0) if "exchange" in spent else 0.0,
            ranks=() if everybody else ranks, recorded=True,
        )  # fmt: skip


def _everywhere(job: StepTable) -> Iterator[_Candidate]:
    """What all ranks lose together: their input, stalls, growth over time, the first steps."""
    yield from _input_everywhere(job)
    series: dict[str, Floats] = {name: lower_median(part) for name, part in job.parts.items()}
    series["exchange"] = job.exchange
    for part, seconds in series.items():
        trend = lateness.trend(seconds, _LEAST["first"] * job.step_s)
        if trend is not None:
            words, lost = trend
            yield _shared(job, part, words, lost)
            continue
        usual = float(np.median(seconds))
        spread = lateness.SIGMA * float(np.median(np.abs(seconds - usual)))
        heavy = np.where(seconds - usual > max(_STALL * job.step_s_usual, 6 * spread), seconds - usual, 0.0)
        if heavy.any():
            yield _shared(job, part, "first" if _goes_on_from_warmup(job, heavy) else "stall", heavy)


def _in_warmup(job: StepTable, each: float) -> float:
    """Seconds that the warm-up lost, at the most ``each`` in a step, as the steps behind it did."""
    return max(0.0, min(job.first[0] - job.warmup * job.step_s_usual, job.warmup * each))


def _from_start(job: StepTable, at: When) -> tuple[str, float]:
    """In which steps of the job something is, and what the warm-up's steps lost by it."""
    if at.kind != "first":
        return at.words(), 0.0
    return f" in the first {job.warmup + at.steps} steps", _in_warmup(job, at.each)


def _goes_on_from_warmup(job: StepTable, lost: Floats) -> bool:
    """Whether steps of the warm-up and the first ones behind it are longer, and no other."""
    long = np.flatnonzero(lost)
    begins = long[-1] == len(long) - 1
    each = float(lost[long].mean())
    return bool(begins) and _in_warmup(job, each) >= 0.5 * job.warmup * each


def _shared(job: StepTable, part: str, words: str, lost: Floats) -> _Candidate:
    """A pattern of all ranks, or most, in a part of their steps as a cause."""
    exchange: Floats | float = 0.0
    if part == "exchange":
        who, less, exchange = "", {}, lost
    else:
        who = _whose(job.parts[part], lost, job)
        less = {part: np.repeat(lost[None], len(job.numbers), 0)}
    several = len(job.numbers) > 1
    s = "" if several else "s"
    at = lateness.when(lost)
    until = job.warmup + int(np.flatnonzero(lost).max()) + 1
    rarely = f"{at.words()} for {_ms(at.each)}" if words == "stall" else ""
    verb = {
        "between": f"{who} pause{s} between two steps{rarely}",
        "input": f"{who} wait{s} for {'their' if several else 'its'} input{rarely}",
        "work": f"{who} stop{s}{rarely}" if words == "stall" else f"{who} compute{s} longer",
        "exchange": f"{_after_ready(job)} longer{rarely}",
    }[part]
    kind = {"stall": "stall", "growth": "growth", "first": "first-steps", "last": "growth"}[words]
    if words == "stall" and (part != "exchange" or (job.ready and several)):
        kind = {"between": "pause", "input": "input-everywhere", "exchange": "exchange"}.get(part, kind)
    if words == "stall":
        together = f", {who.lower()} in the same ones" if who and several else ""
        evidence = f"in {int((lost > 0).sum())} of {job.steps} steps{together}"
    elif kind == "growth":
        steps = job.own.max(axis=0) + job.exchange
        first, last = (float(np.median(tenth)) for tenth in np.array_split(steps, 10)[::9])
        evidence = f"a step took {_ms(first)} at first and {_ms(last)} at the end"
    else:
        evidence = f"{_ms(lost[lost > 0].mean())} longer in the first {until} of {job.warmup + job.steps} steps"
    tail = {
        "growth": ", more with every step", "first": f" in the first {until} steps",
        "last": f" in the last {np.count_nonzero(lost)} steps",
    }.get(words, "")  # fmt: skip
    advice = SENTENCES[kind][1] if kind == "input-everywhere" else ADVICE[kind]
    if kind == "growth" and part == "exchange":
        advice = "Look for what is sent more of with every step (metrics, lists, rows of a table), and at the network."
    return _Candidate(
        kind,
        f"{verb}{tail}.",
        evidence,
        advice,
        _LEAST["growth" if words == "last" else words],
        less,
        exchange,
        once=kind == "first-steps",
        before=_in_warmup(job, float(lost[lost > 0].mean())) if kind == "first-steps" else 0.0,
    )


def _whose(values: Floats, lost: Floats, job: StepTable) -> str:
    """Whose loss it is that the middle rank has: of all ranks where each takes longer in the steps that lose most."""
    if job.size == 1:
        return "The one rank"
    if len(job.numbers) == 1:
        return named(job.numbers, 0)
    varies = lost - lost.mean()
    follows = (values - values.mean(axis=1, keepdims=True)) @ varies >= 0.5 * varies @ varies
    return "All ranks" if follows.all() else "Most ranks"


def _after_ready(job: StepTable) -> str:
    """What a step has after its last rank is ready, or after its batch where no rank says when it was."""
    if job.size == 1:
        return "The update takes" if job.ready else "Computation or update takes"
    if not job.ready:
        return "Computation or allreduce takes"
    return f"The allreduce{', or the wait for a rank that was not recorded,' * bool(_recorded(job))} takes"


def _recorded(job: StepTable) -> str:
    return "recorded " if len(job.numbers) < job.size else ""


def _input_everywhere(job: StepTable) -> Iterator[_Candidate]:
    """What the middle rank waits for its batches, and what another rank waits in each step."""
    values = job.parts["input"]
    middle = lower_median(values)
    rows = lateness.slow_ranks((values - middle).mean(axis=1), 0.5 * _LEAST["late"] * job.step_s)
    apart = bool(rows) and not _others_wait(values, rows)
    less = np.minimum(values, middle) if apart else values
    seen, scattered = float(middle.mean()), 0.0 if apart else float((values.max(axis=0) - middle).mean())
    if len(values) == 1:
        who = f"{_whose(values, middle, job)} waits for its input."
    elif scattered > seen:
        who = "Now one rank waits for its input, now another."
    else:
        who = SENTENCES["input-everywhere"][0]
    if seen + scattered < 0.5 * _LEAST["input-everywhere"] * job.step_s:
        return
    at = lateness.when(less.max(axis=0))
    kind = {"first": "first-steps", "growing": "growth"}.get(at.kind, "input-everywhere")
    on = f" on the middle rank, {_ms(seen + scattered)} on the last one" if len(values) > 1 else ""
    steps, before = _from_start(job, at)
    yield _Candidate(
        kind, f"{who[:-1]}{steps}.",
        f"{_ms(seen)} for each batch{on}, of {_ms(job.step_s)} a step",
        SENTENCES["input-everywhere"][1],
        _LEAST["input-everywhere"], {"input": less}, once=at.kind == "first", before=before,
    )  # fmt: skip


def _few_cores(job: StepTable, launched: JobLaunch | None) -> Iterator[_Candidate]:
    """Cores that the middle rank's thread waits for: the job's own threads have them, or others."""
    if job.used is None:
        return
    queued = job.used[1]
    middle = lower_median(queued.mean(axis=1))
    if middle < 0.5 * _LEAST["cores"] * job.step_s:
        return
    less = np.minimum(queued, job.parts["work"])
    seen = f"the thread that trains waits {_ms(middle)} a step for a core on the middle rank"
    kind, what, advice = "few-cores", "There are too few cores for the ranks' threads.", (
        "Use fewer threads (--threads, fewer loader workers) or fewer ranks, and leave Horovod's own thread room; see "
        "that nothing else runs there."
    )  # fmt: skip
    if launched is None:
        what = "The ranks' threads wait for cores: there are too few, or other programs have them."
    shared = _sharing(job, range(len(job.numbers)))
    if launched is not None and all(cpus is not None and len(cpus) >= launched.cores for cpus in job.cpus):
        shared = None  # bound to all that there are
    if launched is not None and launched.ranks_on_a_host == launched.ranks == len(job.numbers):
        used = float(job.used[2].mean(axis=1).sum()) / job.step_s
        seen += f"; all ranks together use {used:.2g} of {launched.cores} cores"
        bound = round(used)
        if shared is None and 1 <= bound < min(launched.ranks, _OWN_USE * launched.cores):
            # who could have more cores and uses whole ones is held to these
            shared = "as many as they seem bound to" if abs(used - bound) <= _WHOLE_CORES * bound else None
        if shared is None and used < _OWN_USE * launched.cores:
            kind, what = "host", "Other programs take the cores of the ranks."
            advice = "See what else runs there (top, hvdkit doctor --job), and have the batch system give whole nodes."
    if shared is not None:
        kind, what, advice = "affinity", "The ranks share cores by their binding.", ADVICE["affinity"]
        seen += f"; {shared}"
    yield _Candidate(kind, what, seen, advice, _LEAST["cores"], {"work": less})


def _first_step(job: StepTable) -> list[Cause]:
    first = job.first[1]
    lost = first - float(np.median(job.own.max(axis=0) + job.exchange))
    recorded = job.total_s + job.first[0]
    if lost < _FIRST_STEP_S or lost < _FIRST_STEP * recorded:
        return []
    return [
        Cause(
            "first-step", lost, lost / recorded, SENTENCES["first-step"][0],
            f"{job.where}: it took {_ms(first)}.",
            SENTENCES["first-step"][1],
            per_step=False,
        )
    ]  # fmt: skip


def _ms(seconds: float) -> str:
    return duration_text(1e6 * float(seconds))
