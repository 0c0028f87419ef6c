"""The outcome of a search: as text, and as the file that ``hvdkit launch --tuned`` takes."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from hvdkit.common import json_files
from hvdkit.common.units import share_text
from hvdkit.jobs.launch.tuned import Tuned, TunedFile
from hvdkit.jobs.trials import DEFAULT
from hvdkit.jobs.tune.search import CONFIDENCE, Search, Speedup, label


@dataclass(frozen=True)
class TunedJob:
    """What was tuned.

    Attributes:
        ranks: number of ranks.
        command: what each rank runs.
        default: what the default settings are here, such as "mpirun, OMP_NUM_THREADS=1".
        notes: what a reader of the numbers should know, full sentences.
    """

    ranks: int
    command: tuple[str, ...]
    default: str
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
    confirmed, best = search.confirmed(), search.best()
    if best is not None:
        found = confirmed[best]
        return f"Adopted: {label(best)}, {found.ratio:.3f} times as fast as the default ({_interval(found)})."
    unsettled = [found for found in confirmed.values() if found.high > 1]
    if search.candidates and len(search.failures) == len(search.candidates):
        said = "Every setting but the default failed: the defaults stay."
    elif not search.finalists and not search.budget_ended:
        said = "Every setting was slower than the default beyond noise: the defaults stay."
    elif not confirmed and search.budget_ended:
        said = f"Could not tell: the budget was up before any setting could be confirmed. The defaults stay. {so_far}"
    elif unsettled and (search.budget_ended or not all(math.isfinite(found.high) for found in unsettled)):
        pairs = min(found.pairs for found in unsettled)
        said = (
            f"Could not tell: {'one pair' if pairs == 1 else f'{pairs} pairs'} of fresh runs of {search.confirmations} "
            f"leave open whether a setting is better. The defaults stay. {so_far}"
        )
    else:
        said = "No setting is better than the default beyond noise: the defaults stay."
    return f"{said} What costs a step time, hvdkit launch --explain-job says."


def text(search: Search, subject: TunedJob, *, interrupted: bool = False) -> str:
    """The outcome for a reader."""
    measured = f"measured: {search.measure}" if search.measure else "nothing was measured"
    lines = [
        f"Verdict: {verdict(search, interrupted=interrupted)}",
        "",
        f"{subject.ranks} ranks of: {' '.join(subject.command)}",
        f"default: {subject.default}; {measured}",
        *subject.notes,
        "",
    ]
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
    if confirmed := search.confirmed():
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


def save(path: Path, search: Search, subject: TunedJob, launcher: str | None = None) -> None:
    """Write what was adopted, or the defaults, for ``hvdkit launch --tuned``, with the text of the outcome.

    Args:
        launcher: "mpirun" or "horovodrun" when every job was told to use it, else None.
    Raises:
        HvdkitError: it cannot be written.
    """
    best = search.best()
    if best is not None and launcher is not None:
        best = structs.replace(best, launcher=launcher)
    json_files.write(path, TunedFile(best or Tuned(), text(search, subject).splitlines()))


def _interval(found: Speedup) -> str:
    return f"interval {found.low:.3f} to {found.high:.3f}"
