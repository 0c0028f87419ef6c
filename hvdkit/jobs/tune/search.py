"""Which jobs are run, in which order, and what follows from their times.

Every setting and the default run once in each of a few rounds, in random order; times are compared within rounds, so
that a machine that grows slower by the hour favours nobody. The best of several looks better than it is, by luck. These
runs therefore only select; the finalists are then run anew, and their intervals come from these runs alone, with
Bonferroni's correction for their number.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdkit.errors import InvalidArgumentError, LaunchError
from hvdkit.jobs.launch.tuned import MIB, Tuned
from hvdkit.jobs.trials import DEFAULT, Run, TrialJob

CYCLE_TIMES_MS = (0.1, 0.5, 5.0)
"""Around Horovod's own 1 ms: quicker answers for small models, fewer interruptions and more fusion for large ones."""
FUSION_THRESHOLDS_BYTES = (4 * MIB, 32 * MIB)
"""Below Horovod's own 128 MiB: less copying, and the first allreduce begins while gradients are still computed."""
CLOSING_LINE = "'Total time' of the closing line"
WALL_TIME = "wall time of the whole job"
CONFIDENCE = 0.95
FINALISTS = 2
_PATIENCE, _LEAST_PATIENCE_S = 10, 30.0
"""A job that takes so many times as long as usual is ended, but not before so many seconds."""


# Settings


def candidates(axes: dict[str, Sequence[Any]], limit: int, rng: np.random.Generator) -> list[Tuned]:
    """The settings to try: each change alone, then random combinations of several until there are ``limit``.

    Args:
        axes: values to try, by the names of ``Tuned``.
        limit: the most to return, >= 1; the default is not counted and not among them.
        rng: draws what does not fit all together.
    """
    values = {name: list(dict.fromkeys(some)) for name, some in axes.items()}
    alone = [Tuned(**{name: value}) for name, some in values.items() for value in some]
    if len(alone) > limit:
        return [alone[index] for index in sorted(rng.permutation(len(alone))[:limit])]
    every = itertools.product(*([None, *some] for some in values.values()))
    combined = [Tuned(**dict(zip(values, one, strict=True))) for one in every]
    combined = [setting for setting in combined if setting != DEFAULT and setting not in alone]
    return [*alone, *(combined[index] for index in rng.permutation(len(combined)))][:limit]


def thread_choices(share: int | None, current: int | None) -> tuple[int, ...]:
    """Thread counts worth trying: the whole share of a rank, one less (for Horovod's own thread) and the half.

    Args:
        share: cores of a rank, None where they are not known.
        current: threads that a rank has by default, None where that is not known.
    """
    if share is None:
        return ()
    return tuple(sorted({threads for threads in (share, share - 1, share // 2) if threads >= 1} - {current}))


def label(setting: Tuned) -> str:
    """The setting for a reader: ``horovodrun, cycle 5 ms``."""
    words = [] if setting.launcher is None else [setting.launcher]
    if setting.threads is not None:
        words.append(f"{setting.threads} thread{'s' if setting.threads > 1 else ''}")
    if setting.cycle_time_ms is not None:
        words.append(f"cycle {setting.cycle_time_ms:g} ms")
    if setting.fusion_threshold_bytes is not None:
        words.append(f"fusion {setting.fusion_threshold_bytes / MIB:g} MiB")
    return ", ".join(words) or "default"


# Times


@dataclass(frozen=True, slots=True)
class Speedup:
    """Seconds of the default divided by those of a setting: above 1 the setting is faster.

    Attributes:
        ratio: geometric mean over the pairs.
        low, high: ends of the confidence interval of ``ratio``; 0 and infinity where one pair says nothing about them.
        pairs: number of pairs, >= 1.
    """

    ratio: float
    low: float
    high: float
    pairs: int


def speedup(pairs: Sequence[tuple[float, float]], confidence: float) -> Speedup:
    """The speed-up with its confidence interval: Student's t on the logarithms of the paired ratios.

    Args:
        pairs: seconds of the default and of the setting, run one soon after the other; at least one pair, all > 0.
        confidence: between 0 and 1.
    Raises:
        InvalidArgumentError: no pair, or a time that is not positive.
    Source: W. S. Gosset ("Student"), The probable error of a mean, Biometrika 6 (1908); the geometric mean as the mean
        of ratios: Fleming and Wallace, How not to lie with statistics, Communications of the ACM 29(3) (1986).
    """
    if not pairs or any(not (0 < seconds < math.inf) for pair in pairs for seconds in pair):
        raise InvalidArgumentError(f"A speed-up needs pairs of seconds above 0, got {list(pairs)}.")
    logs = np.log([default / other for default, other in pairs])
    mean, count = float(np.mean(logs)), len(pairs)
    if count == 1:
        return Speedup(math.exp(mean), 0.0, math.inf, count)
    from scipy.special import stdtrit

    half = float(stdtrit(count - 1, (1 + confidence) / 2) * np.std(logs, ddof=1) / math.sqrt(count))
    high = math.exp(mean + half) if mean + half < 700 else math.inf
    return Speedup(math.exp(mean), math.exp(mean - half), high, count)


class Rounds(list[dict[Tuned, float]]):
    """Seconds by round and setting; a round may be incomplete."""

    def pairs(self, setting: Tuned) -> list[tuple[float, float]]:
        """Seconds of the default and of a setting, in every round that has both."""
        return [(row[DEFAULT], row[setting]) for row in self if DEFAULT in row and setting in row]

    def seconds(self, setting: Tuned) -> list[float]:
        """All that was measured with a setting."""
        return [row[setting] for row in self if setting in row]

    def ratio(self, setting: Tuned) -> float | None:
        """The speed-up without an interval; None where nothing is there to compare."""
        pairs = self.pairs(setting)
        return speedup(pairs, CONFIDENCE).ratio if pairs else None


# The search


@dataclass
class Search:
    """Runs the jobs; what is measured stays here, also when ``go`` is interrupted.

    Attributes:
        candidates: the settings to try, without the default.
        run: runs one job.
        repeats: rounds that select, >= 1.
        confirmations: rounds of fresh runs for the finalists, >= 2.
        budget_s: seconds for all, None for no limit; no job is begun that would probably not end in time.
        rng: draws the order within a round.
        clock: seconds now.
        say: is told what happens, in sentences.
        screening, confirming: what was measured to select, and afresh for the finalists.
        finalists: the settings that were selected; () before.
        failures: settings that were dropped, and why.
        measure: ``CLOSING_LINE`` or ``WALL_TIME``; "" before the first job has ended.
        budget_ended: the budget was up before all was run.
    """

    candidates: Sequence[Tuned]
    run: Run
    repeats: int = 4
    confirmations: int = 8
    budget_s: float | None = None
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    clock: Callable[[], float] = time.monotonic
    say: Callable[[str], object] = str
    screening: Rounds = field(default_factory=Rounds, init=False)
    confirming: Rounds = field(default_factory=Rounds, init=False)
    finalists: tuple[Tuned, ...] = field(default=(), init=False)
    failures: dict[Tuned, str] = field(default_factory=dict, init=False)
    measure: str = field(default="", init=False)
    budget_ended: bool = field(default=False, init=False)
    _walls_s: list[float] = field(default_factory=list, init=False)

    def go(self) -> None:
        """Run all of it.

        Raises:
            LaunchError: the job fails with the default settings.
            KeyboardInterrupt: by Ctrl-C; what is measured stays.
        """
        end = math.inf if self.budget_s is None else self.clock() + self.budget_s
        # One job that is not counted: files get cached, and it shows what can be measured and how long it takes.
        job = self._job(DEFAULT, self.budget_s)
        self._check_default(job.failure)
        self.measure = WALL_TIME if job.closing_s is None else CLOSING_LINE
        most = "" if self.budget_s is None else f", ended after {self.budget_s:g} s"
        minutes = math.ceil(self.jobs * job.wall_s / 60)
        self.say(f"measured: {self.measure}; {job.wall_s:.1f} s a job, at most {self.jobs} jobs, {minutes} min{most}")
        if len(self.candidates) <= FINALISTS:
            self.finalists = tuple(self.candidates)
        else:
            # The fresh runs keep the time that they need, at most half of the budget.
            fresh_s = (1 + FINALISTS) * self.confirmations * self._usual_s
            kept_s = 0.0 if self.budget_s is None else min(fresh_s, self.budget_s / 2)
            self._rounds(self.screening, "selecting", self.candidates, self.repeats, end - kept_s)
            pairs = self.screening.pairs
            best = self._ranked()[:FINALISTS]
            self.finalists = tuple(setting for setting in best if speedup(pairs(setting), CONFIDENCE).high > 1)
            self.say(f"selected: {'; '.join(map(label, self.finalists)) or 'none'}")
        if self.finalists:
            self._rounds(self.confirming, "fresh runs", self.finalists, self.confirmations, end)

    @property
    def jobs(self) -> int:
        """The most jobs that are run: the first one, those that select and the fresh ones."""
        count = len(self.candidates)
        selecting = (1 + count) * self.repeats if count > FINALISTS else 0
        return 1 + selecting + (1 + min(count, FINALISTS)) * self.confirmations

    def _ranked(self) -> list[Tuned]:
        """Best first; without those that failed or that nothing is known of."""
        ratios = {setting: self.screening.ratio(setting) for setting in self.candidates if setting not in self.failures}
        known = {setting: ratio for setting, ratio in ratios.items() if ratio is not None}
        return sorted(known, key=known.__getitem__, reverse=True)

    def _rounds(self, rounds: Rounds, stage: str, settings: Sequence[Tuned], count: int, deadline: float) -> None:
        """Run ``count`` rounds of the settings and the default, as long as there is time."""
        for number in range(count):
            members = [DEFAULT, *(setting for setting in settings if setting not in self.failures)]
            if len(members) == 1:
                return
            self.say(f"{stage}, round {number + 1} of {count}")
            rounds.append({})
            for index in self.rng.permutation(len(members)):
                if self.clock() + self._usual_s > deadline:
                    self.budget_ended = True
                    self.say(f"the time for this is up: {stage}")
                    return
                self._measure(members[index], rounds[-1])

    def _measure(self, setting: Tuned, row: dict[Tuned, float]) -> None:
        job = self._job(setting, max(_LEAST_PATIENCE_S, _PATIENCE * self._usual_s))
        seconds = job.closing_s if self.measure == CLOSING_LINE else job.wall_s
        failure = job.failure
        if failure is None and (seconds is None or seconds <= 0):
            failure = "printed no closing line with a time above 0, unlike the first run"
        if setting == DEFAULT:
            self._check_default(failure)
        if failure is not None:
            self.failures[setting] = failure
            self.say(f"dropped: {label(setting)}, whose job {failure}")
        elif seconds is not None:
            row[setting] = seconds

    def _job(self, setting: Tuned, timeout_s: float | None) -> TrialJob:
        job = self.run(setting, timeout_s)
        self._walls_s.append(job.wall_s)
        return job

    @property
    def _usual_s(self) -> float:
        """Seconds that a job takes; the first one, which finds cold files, counts only while there is no other."""
        return statistics.median(self._walls_s[1:] or self._walls_s)

    @staticmethod
    def _check_default(failure: str | None) -> None:
        if failure is not None:
            raise LaunchError(f"With the default settings the job fails, so nothing can be compared: it {failure}")

    # What follows

    def confirmed(self) -> dict[Tuned, Speedup]:
        """The finalists, best first, by their fresh runs; all intervals together hold with ``CONFIDENCE``."""
        found = {}
        for setting in self.finalists:
            pairs = self.confirming.pairs(setting)
            if pairs and setting not in self.failures:
                each = 1 - (1 - CONFIDENCE) / len(self.finalists)  # Bonferroni; Dunn 1961
                found[setting] = speedup(pairs, each)
        return dict(sorted(found.items(), key=lambda item: item[1].ratio, reverse=True))

    def best(self) -> Tuned | None:
        """The best finalist whose whole interval lies above 1; None where no setting is better beyond noise."""
        return next((setting for setting, found in self.confirmed().items() if found.low > 1), None)

    def leader(self) -> tuple[Tuned, float] | None:
        """The best so far with its speed-up, whatever it is worth; None before anything can be compared."""
        for setting, found in self.confirmed().items():
            return setting, found.ratio
        for setting in self._ranked():
            return setting, self.screening.ratio(setting) or 0.0
        return None
