"""Which jobs are run, in which order, and what follows from their times.

Every setting and the default run once in each of a few rounds, in random order; times are compared within rounds, so
that a machine that grows slower by the hour favours nobody. The best of several looks better than it is, by luck. These
runs therefore only select; the finalists are then run anew, and their intervals come from these runs alone, with
Bonferroni's correction for their number.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hvdkit.errors import InvalidArgumentError, LaunchError
from hvdkit.jobs.launch.tuned import Tuned
from hvdkit.jobs.trials import DEFAULT, Run, TrialJob, label

CLOSING_LINE = "closing line"
WALL_TIME = "wall time"
CONFIDENCE = 0.95
_PATIENCE = 10
"""A job that takes so many times as long as usual is ended ..."""
_LEAST_PATIENCE_S = 30.0
"""... but not before so many seconds."""


@dataclass(frozen=True, slots=True)
class Speedup:
    """Seconds of the default divided by those of a setting: above 1 the setting is faster.

    Attributes:
        ratio: geometric mean over the pairs.
        low, high: ends of the confidence interval of ``ratio``; 0 and infinity where one pair says nothing about them.
        confidence: of the interval, between 0 and 1.
        pairs: number of pairs, >= 1.
    """

    ratio: float
    low: float
    high: float
    confidence: float
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
        return Speedup(math.exp(mean), 0.0, math.inf, confidence, count)
    from scipy.special import stdtrit

    half = float(stdtrit(count - 1, (1 + confidence) / 2) * np.std(logs, ddof=1) / math.sqrt(count))
    return Speedup(math.exp(mean), _exp(mean - half), _exp(mean + half), confidence, count)


def each_of(count: int, together: float) -> float:
    """Confidence of each of ``count`` intervals so that all hold together with ``together`` (Bonferroni; Dunn 1961)."""
    return 1 - (1 - together) / count


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is run.

    Attributes:
        repeats: rounds that select, >= 1.
        confirmations: rounds of fresh runs for the finalists, >= 2.
        finalists: settings that these are for, >= 1.
        budget_s: seconds for all, None for no limit; no job is begun that would probably not end in time.
    """

    repeats: int = 4
    confirmations: int = 8
    finalists: int = 2
    budget_s: float | None = None

    def jobs(self, candidates: int) -> int:
        """The most jobs that are run: the first one, those that select and the fresh ones."""
        selecting = (1 + candidates) * self.repeats if candidates > self.finalists else 0
        return 1 + selecting + (1 + min(candidates, self.finalists)) * self.confirmations


class Rounds:
    """Seconds by round and setting; a round may be incomplete."""

    def __init__(self) -> None:
        self._rows: list[dict[Tuned, float]] = []

    def begin(self) -> dict[Tuned, float]:
        """A new round, to be filled."""
        self._rows.append({})
        return self._rows[-1]

    def pairs(self, setting: Tuned) -> list[tuple[float, float]]:
        """Seconds of the default and of a setting, in every round that has both."""
        return [(row[DEFAULT], row[setting]) for row in self._rows if DEFAULT in row and setting in row]

    def seconds(self, setting: Tuned) -> list[float]:
        """All that was measured with a setting."""
        return [row[setting] for row in self._rows if setting in row]

    def ratio(self, setting: Tuned) -> float | None:
        """The speed-up without an interval; None where nothing is there to compare."""
        pairs = self.pairs(setting)
        return speedup(pairs, CONFIDENCE).ratio if pairs else None


@dataclass
class Search:
    """Runs the jobs; what is measured stays here, also when ``go`` is interrupted.

    Attributes:
        candidates: the settings to try, without the default.
        run: runs one job.
        effort: how much is run.
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
    effort: Effort
    rng: np.random.Generator
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
        began, budget_s, count = self.clock(), self.effort.budget_s, self.effort.finalists
        # One job that is not counted: files get cached, and it shows what can be measured and how long it takes.
        job = self._job(DEFAULT, budget_s)
        self._check_default(job.failure)
        self.measure = WALL_TIME if job.closing_s is None else CLOSING_LINE
        jobs = self.effort.jobs(len(self.candidates))
        what = "wall time of the whole job" if job.closing_s is None else "'Total time' of its closing line"
        most = "" if budget_s is None else f", ended after {budget_s:g} s"
        minutes = math.ceil(jobs * job.wall_s / 60)
        self.say(f"measured is the {what}; {job.wall_s:.1f} s a job, at most {jobs} jobs, about {minutes} min{most}")
        if len(self.candidates) <= count:
            self.finalists = tuple(self.candidates)
        else:
            # The fresh runs keep the time that they need, at most half of the budget.
            fresh_s = (1 + count) * self.effort.confirmations * self._usual_s
            end = None if budget_s is None else began + budget_s - min(fresh_s, budget_s / 2)
            self._rounds(self.screening, "selecting", self.candidates, self.effort.repeats, end)
            best = self._ranked()[:count]
            pairs = self.screening.pairs
            self.finalists = tuple(setting for setting in best if speedup(pairs(setting), CONFIDENCE).high > 1)
            self.say(f"selected: {'; '.join(map(label, self.finalists)) or 'none'}")
        if self.finalists:
            end = None if budget_s is None else began + budget_s
            self._rounds(self.confirming, "fresh runs", self.finalists, self.effort.confirmations, end)

    def _ranked(self) -> list[Tuned]:
        """Best first; without those that failed or that nothing is known of."""
        ratios = {setting: self.screening.ratio(setting) for setting in self.candidates if setting not in self.failures}
        known = {setting: ratio for setting, ratio in ratios.items() if ratio is not None}
        return sorted(known, key=known.__getitem__, reverse=True)

    def _rounds(
        self, rounds: Rounds, stage: str, settings: Sequence[Tuned], count: int, deadline: float | None
    ) -> None:
        """Run ``count`` rounds of the settings and the default, as long as there is time."""
        for number in range(count):
            members = [DEFAULT, *(setting for setting in settings if setting not in self.failures)]
            if len(members) == 1:
                return
            self.say(f"{stage}, round {number + 1} of {count}")
            row = rounds.begin()
            for index in self.rng.permutation(len(members)):
                if deadline is not None and self.clock() + self._usual_s > deadline:
                    self.budget_ended = True
                    self.say(f"the time for this is up: {stage}")
                    return
                self._measure(members[index], row)

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
                found[setting] = speedup(pairs, each_of(len(self.finalists), CONFIDENCE))
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
