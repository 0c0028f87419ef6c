"""The file that keeps what was measured, from the first job on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from hvdkit.common import json_files
from hvdkit.common.json_files import Document, Part, Positive, Seconds, Whole
from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.bench.measurement import JobSteps
from hvdkit.measure.bench.subject import Environment, HowLaunched, ScalingAsked, Subject

STEPS, CLOSING_LINE = "steps", "closing line"
_LEAST_S, _MOST_S = 1e-9, 1e9
"""Seconds that can be measured: what is printed beyond them is no time of a training."""


def measurable(seconds: float | None) -> bool:
    """Whether ratios can be taken of so many seconds: neither 0, below any clock's resolution, nor endless."""
    return seconds is not None and _LEAST_S <= seconds <= _MOST_S


class MeasuredJob(Part, frozen=True):
    """One job.

    Attributes:
        ranks: how many it had.
        repeat: which repeat, from 0.
        wall_s: seconds from its start to its end.
        closing_s: seconds that its closing line names; None without one.
        steps: None where its ranks recorded no steps.
        failure: why it does not count; None when it does.
    """

    ranks: Positive
    repeat: Whole
    wall_s: Seconds
    closing_s: Seconds | None = None
    steps: JobSteps | None = None
    failure: str | None = None


class ScalingResults(Document, frozen=True):
    """What was measured, from the first job on.

    Attributes:
        asked: what was to be measured.
        environment: where it was measured.
        launches: for each number of ranks.
        notes: what a reader of the numbers should know, full sentences.
        jobs: in the order in which they ran.
        summary: what follows from the jobs, as "bench-summary" without its head; None while one runs.
            ``hvdkit explain`` reads its causes.
    """

    kind = "bench-scaling"
    schema = 4
    written_by = "hvdkit bench scaling"

    asked: ScalingAsked
    environment: Environment
    launches: tuple[HowLaunched, ...]
    notes: tuple[str, ...]
    jobs: list[MeasuredJob]
    summary: Any = None

    def __post_init__(self) -> None:
        """Refuse jobs that ``bench scaling`` would not have run: what is made of them would be no measurement."""
        seen = set()
        for index, job in enumerate(self.jobs):
            if job.ranks not in self.asked.ranks or job.repeat >= self.asked.repeats:
                raise ValueError(f"jobs[{index}] was not asked for: {job.ranks} ranks, repeat {job.repeat}")
            if (job.ranks, job.repeat) in seen:
                raise ValueError(f"jobs[{index}] is there twice: {job.ranks} ranks, repeat {job.repeat}")
            seen.add((job.ranks, job.repeat))

    @property
    def measure(self) -> str:
        """What is compared: the steps where every job that counts recorded them, else the closing line."""
        counted = self.counted()
        if counted and all(job.steps is not None for job in counted):
            return STEPS
        return CLOSING_LINE if any(job.closing_s is not None for job in counted) else ""

    def counted(self) -> list[MeasuredJob]:
        """The jobs that did not fail."""
        return [job for job in self.jobs if job.failure is None]

    def samples(self) -> dict[int, list[float]]:
        """By number of ranks: seconds of a step (weak scaling), or of all the work (strong scaling)."""
        found: dict[int, list[float]] = {}
        for job in self.counted():
            seconds = job.closing_s
            if self.measure == STEPS and job.steps is not None:
                seconds = job.steps.step_s * (1 if self.asked.mode == "weak" else job.steps.count)
            if seconds is not None and measurable(seconds):
                found.setdefault(job.ranks, []).append(seconds)
        return dict(sorted(found.items()))


def load(path: Path) -> ScalingResults:
    """Read a file of ``hvdkit bench scaling``.

    Raises:
        DataError: it cannot be read, is something else, or holds what cannot be.
    """
    return json_files.read(path, ScalingResults)


def write(path: Path, results: ScalingResults, summary: Document | None = None) -> None:
    """Write the file, which ``load`` takes; an older one stays whole until the new one is complete.

    Raises:
        DataError, InvalidArgumentError: it cannot be written.
    """
    json_files.write(path, msgspec.structs.replace(results, summary=summary))


def resume(path: Path, subject: Subject) -> ScalingResults:
    """What a file holds of this subject already; nothing when there is none, or when no job in it counts.

    Raises:
        DataError: the file is something else.
        InvalidArgumentError: it holds measurements of another subject.
    """
    new = ScalingResults(*subject, [])
    found = load(path) if path.exists() else new
    if not found.counted():
        return new
    for name, before, now in differences(found, new):
        raise InvalidArgumentError(
            f"{path} holds measurements with {name} {json.dumps(before)}, and now it is {json.dumps(now)}; they cannot "
            "be mixed: give another file, or remove this one."
        )
    return msgspec.structs.replace(new, jobs=found.jobs)


def differences(first: ScalingResults, second: ScalingResults) -> Iterator[tuple[str, Any, Any]]:
    """Name and both values, as JSON, of what is different in what was asked for, and where it was measured."""
    for one, other in ((first.asked, second.asked), (first.environment, second.environment)):
        values = json_files.plain(other)
        yield from (
            (name, value, values[name]) for name, value in json_files.plain(one).items() if value != values[name]
        )
