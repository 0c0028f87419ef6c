"""The outcome of a search: as text, as JSON, and as the file that ``hvdkit launch --tuned`` takes."""

from __future__ import annotations

import math
import statistics
from dataclasses import astuple
from pathlib import Path

from msgspec import structs

from hvdkit.common import json_files
from hvdkit.common.json_files import Document, Part
from hvdkit.common.units import share_text
from hvdkit.jobs.launch.tuned import Tuned, TunedFile
from hvdkit.jobs.trials import DEFAULT, label
from hvdkit.jobs.tune.search import CLOSING_LINE, CONFIDENCE, Search, Speedup


class TunedJob(Part, frozen=True):
    """What was tuned.

    Attributes:
        ranks: number of ranks.
        command: what each rank runs.
        default: what the default settings are here, such as "mpirun, 1 thread".
        cores: usable cores of this machine.
        seed: of the order of the jobs.
        notes: what a reader of the numbers should know, full sentences.
    """

    ranks: int
    command: tuple[str, ...]
    default: str
    cores: int
    seed: int
    notes: tuple[str, ...] = ()


def verdict(search: Search, *, interrupted: bool = False) -> str:
    """What follows, in a few sentences."""
    leader = search.leader()
    if leader is None:
        so_far = "Nothing can be compared yet."
    elif leader[1] <= 1:
        so_far = f"Best so far are the defaults; next, unconfirmed: {label(leader[0])}, {leader[1]:.3f} times as fast."
    else:
        so_far = f"Best so far, unconfirmed: {label(leader[0])}, {leader[1]:.3f} times as fast as the default."
    if interrupted:
        return f"Interrupted: nothing is adopted and no file is written. {so_far}"
    best = search.best()
    if best is not None:
        found = search.confirmed()[best]
        return f"Adopted: {label(best)}, {found.ratio:.3f} times as fast as the default ({_interval(found)})."
    unsettled = [found for found in search.confirmed().values() if found.high > 1]
    if search.candidates and len(search.failures) == len(search.candidates):
        said = "Every setting but the default failed: the defaults stay."
    elif not search.finalists and not search.budget_ended:
        said = "Every setting was slower than the default beyond noise: the defaults stay."
    elif not search.confirmed() and search.budget_ended:
        said = f"Could not tell: the budget was up before any setting could be confirmed. The defaults stay. {so_far}"
    elif unsettled and (search.budget_ended or not all(math.isfinite(found.high) for found in unsettled)):
        pairs = min(found.pairs for found in unsettled)
        said = (
            f"Could not tell: {'one pair' if pairs == 1 else f'{pairs} pairs'} of fresh runs of "
            f"{search.effort.confirmations} leave open whether a setting is better. The defaults stay. {so_far}"
        )
    else:
        said = "No setting is better than the default beyond noise: the defaults stay."
    return f"{said} What costs a step time, hvdkit launch --explain-job says."


def text(search: Search, subject: TunedJob, *, interrupted: bool = False) -> str:
    """The outcome for a reader."""
    lines = [f"Verdict: {verdict(search, interrupted=interrupted)}", ""]
    measured = {"": "nothing was measured", CLOSING_LINE: "measured: 'Total time' of the closing line"}
    what = measured.get(search.measure, "measured: wall time of the whole job")
    lines.append(f"{subject.ranks} ranks of: {' '.join(subject.command)}")
    lines += [f"default: {subject.default}; {what}", *subject.notes, ""]
    width = max(len(label(setting)) for setting in (DEFAULT, *search.candidates))
    lines.append(f"{'setting':{width}}  runs  median s  speed-up in the runs that select")
    by_speedup = sorted(search.candidates, key=lambda setting: -(search.screening.ratio(setting) or 0.0))
    for setting in (DEFAULT, *by_speedup):
        seconds = [*search.screening.seconds(setting), *search.confirming.seconds(setting)]
        median = f"{statistics.median(seconds):.3f}" if seconds else "-"
        ratio = None if setting == DEFAULT else search.screening.ratio(setting)
        words = ["1"] if setting == DEFAULT else [] if ratio is None else [f"{ratio:.3f}"]
        words += ["finalist"] if setting in search.finalists else []
        words += ["failed"] if setting in search.failures else []
        lines.append(f"{label(setting):{width}}  {len(seconds):4}  {median:>8}  {', '.join(words)}".rstrip())
    confirmed = search.confirmed()
    if confirmed:
        how = f"default / setting, paired by round, {share_text(CONFIDENCE)} Student t of the log ratios"
        how += f" for the {len(search.finalists)} together, Bonferroni" if len(search.finalists) > 1 else ""
        lines += ["", f"Fresh runs of the finalists ({how}):"]
        lines += [
            f"{label(setting):{width}}  {found.ratio:.3f}  {_interval(found)}, {found.pairs} pairs"
            for setting, found in confirmed.items()
        ]
    for setting, reason in search.failures.items():
        lines += ["", f"Dropped: {label(setting)}, whose job {reason}"]
    return "\n".join(lines)


class Confirmed(Part, frozen=True):
    """A finalist in fresh runs.

    Attributes:
        settings: which.
        speedup: seconds of the default divided by its own.
        low, high: interval of that; ``high`` is None where there is no end to it.
        confidence: of the interval.
        pairs: of runs.
    """

    settings: Tuned
    speedup: float
    low: float
    high: float | None
    confidence: float
    pairs: int


class Tried(Part, frozen=True):
    """One setting.

    Attributes:
        settings: which; empty for the defaults.
        speedup_in_selection: in the runs that select; None where it cannot be told.
        selection_seconds, confirmation_seconds: of each run.
        failure: why it was dropped.
    """

    settings: Tuned
    speedup_in_selection: float | None
    selection_seconds: tuple[float, ...]
    confirmation_seconds: tuple[float, ...]
    failure: str | None


class Leader(Part, frozen=True):
    """The setting that is the fastest so far.

    Attributes:
        settings: which.
        speedup: in the runs that select.
    """

    settings: Tuned
    speedup: float


class TuneOutcome(Document, TunedJob, frozen=True, kw_only=True):
    """The outcome of a search.

    Attributes:
        measure: what was compared.
        verdict: what follows, in a sentence or two.
        confirmed: the finalists.
        interrupted: nothing is adopted.
        budget_ended: the time was up before everything was tried.
        adopted: settings; None for the defaults.
        leader: None where nothing can be compared.
        settings: all that were tried, the defaults first.
    """

    kind = "tune"
    written_by = "hvdkit tune --json"

    measure: str
    verdict: str
    confirmed: tuple[Confirmed, ...]
    interrupted: bool
    budget_ended: bool
    adopted: Tuned | None
    leader: Leader | None
    settings: tuple[Tried, ...]


def outcome(search: Search, subject: TunedJob, *, interrupted: bool = False) -> TuneOutcome:
    """The outcome for a program."""
    best, leader = None if interrupted else search.best(), search.leader()
    return TuneOutcome(
        **structs.asdict(subject),
        measure=search.measure,
        verdict=verdict(search, interrupted=interrupted),
        # an endless interval is null in JSON
        confirmed=tuple(Confirmed(setting, *astuple(found)) for setting, found in search.confirmed().items()),
        interrupted=interrupted,
        budget_ended=search.budget_ended,
        adopted=best,
        leader=None if leader is None else Leader(*leader),
        settings=tuple(
            Tried(
                setting,
                search.screening.ratio(setting),
                tuple(search.screening.seconds(setting)),
                tuple(search.confirming.seconds(setting)),
                search.failures.get(setting),
            )
            for setting in (DEFAULT, *search.candidates)
        ),
    )


def save(path: Path, search: Search, subject: TunedJob, launcher: str | None = None) -> Tuned:
    """Write what was adopted, or the defaults, for ``hvdkit launch --tuned``; returns what was written.

    Args:
        launcher: "mpirun" or "horovodrun" when every job was told to use it, else None.
    Raises:
        OSError: it cannot be written.
    """
    best = search.best()
    settings = DEFAULT if best is None else best
    if best is not None and launcher is not None:
        settings = structs.replace(best, launcher=launcher)
    json_files.write(path, TunedFile(settings, json_files.plain(outcome(search, subject))))
    return settings


def _interval(found: Speedup) -> str:
    return f"interval {found.low:.3f} to {found.high:.3f}"
