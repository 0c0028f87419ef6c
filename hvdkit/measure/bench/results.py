"""The file that keeps what was measured, from the first job on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hvdkit.common.files import replacing
from hvdkit.errors import DataError, InvalidArgumentError
from hvdkit.measure.bench import accounting, measurement, schema_check
from hvdkit.measure.bench.accounting import Accounting
from hvdkit.measure.bench.subject import Subject

_MARK = "bench scaling"
VERSION = 1
STEPS, CLOSING_LINE = "steps", "closing line"
_LEAST_S, _MOST_S = 1e-9, 1e9
"""Seconds that can be measured: what is printed beyond them is no time of a training."""
_MOST_RANKS = 10**9


def measurable(seconds: float | None) -> bool:
    """Whether ratios can be taken of so many seconds: neither 0, below any clock's resolution, nor endless."""
    return seconds is not None and _LEAST_S <= seconds <= _MOST_S


@dataclass(frozen=True, slots=True)
class Measured:
    """One job.

    Attributes:
        ranks: how many it had.
        repeat: which repeat, from 0.
        wall_s: seconds from its start to its end.
        closing_s: seconds that its closing line names; None without one.
        steps: None where its ranks recorded no steps.
        failure: why it does not count; None when it does.
    """

    ranks: int
    repeat: int
    wall_s: float
    closing_s: float | None = None
    steps: measurement.Steps | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Recorded:
    """One more job, with Horovod's timeline. Recording takes time, so that it is no repeat and enters no number.

    Attributes:
        ranks: how many it had.
        wall_s: seconds from its start to its end.
        accounting: where its steps went; None when it failed.
        failure: why it does not count; None when it does.
    """

    ranks: int
    wall_s: float
    accounting: Accounting | None = None
    failure: str | None = None


@dataclass
class Results:
    """What was measured so far.

    Attributes:
        subject: what is measured.
        jobs: in the order in which they ran.
        recordings: jobs with a timeline, at most one for each number of ranks.
    """

    subject: Subject
    jobs: list[Measured] = field(default_factory=list)
    recordings: list[Recorded] = field(default_factory=list)

    @property
    def mode(self) -> str:
        """The kind of scaling, "strong" or "weak"."""
        return str(self.subject.asked["mode"])

    @property
    def measure(self) -> str:
        """What is compared: the steps where every job that counts recorded them, else the closing line."""
        counted = self.counted()
        if counted and all(job.steps is not None for job in counted):
            return STEPS
        return CLOSING_LINE if any(job.closing_s is not None for job in counted) else ""

    def counted(self) -> list[Measured]:
        """The jobs that did not fail."""
        return [job for job in self.jobs if job.failure is None]

    def samples(self) -> dict[int, list[float]]:
        """By number of ranks: seconds of a step (weak scaling), or of all the work (strong scaling)."""
        found: dict[int, list[float]] = {}
        for job in self.counted():
            seconds = self._seconds(job)
            if seconds is not None and measurable(seconds):
                found.setdefault(job.ranks, []).append(seconds)
        return dict(sorted(found.items()))

    def _seconds(self, job: Measured) -> float | None:
        if self.measure != STEPS or job.steps is None:
            return job.closing_s
        return job.steps.step_s if self.mode == "weak" else job.steps.step_s * job.steps.count

    def as_json(self) -> dict[str, Any]:
        """For the file."""
        return {
            "hvdkit": _MARK,
            "version": VERSION,
            "asked": self.subject.asked,
            "environment": self.subject.environment,
            "launches": list(self.subject.launches),
            "notes": list(self.subject.notes),
            "jobs": [asdict(job) for job in self.jobs],
            "recordings": [asdict(recording) for recording in self.recordings],
        }


def write(path: Path, results: Results, summary: dict[str, Any] | None = None) -> None:
    """Write the file; an older one stays whole until the new one is complete.

    Raises:
        DataError, InvalidArgumentError: it cannot be written.
    """
    content = {**results.as_json(), "summary": summary}
    with replacing(path) as file:
        file.write((json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def read(path: Path) -> Results:
    """Read a file of ``write``.

    Raises:
        DataError: it cannot be read, or is something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
        if content["hvdkit"] != _MARK or content["version"] != VERSION:
            raise ValueError("it says that it is something else")
        schema_check.require({**content, "summary": None}, schema_check.schema())  # the summary is made anew
        subject = Subject(
            dict(content["asked"]), dict(content["environment"]), tuple(content["launches"]), tuple(content["notes"])
        )
        recordings = [_recording(one) for one in content.get("recordings", [])]
        jobs = [_job(job) for job in content["jobs"]]
        _require_asked(subject.asked, jobs)
        return Results(subject, jobs, recordings)
    except KeyError as error:
        raise DataError(
            f"{path} is not a file of 'hvdkit bench scaling' (version {VERSION}): {error} is missing."
        ) from error
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is not a file of 'hvdkit bench scaling' (version {VERSION}): {error}.") from error


def _require_asked(asked: dict[str, Any], jobs: Sequence[Measured]) -> None:
    """Refuse jobs that ``bench scaling`` would not have run: what is made of them would be no measurement."""
    ranks = asked["ranks"]
    if ranks != sorted(set(ranks)) or ranks[-1] > _MOST_RANKS:
        raise ValueError("asked.ranks is not ascending")
    seen = set()
    for index, job in enumerate(jobs):
        if job.ranks not in ranks or job.repeat >= asked["repeats"]:
            raise ValueError(f"jobs[{index}] was not asked for")
        if (job.ranks, job.repeat) in seen:
            raise ValueError(f"jobs[{index}] is there twice")
        seen.add((job.ranks, job.repeat))


def _job(value: dict[str, Any]) -> Measured:
    steps = value["steps"]
    return Measured(**{**value, "steps": None if steps is None else measurement.from_json(steps)})


def _recording(value: dict[str, Any]) -> Recorded:
    found = value["accounting"]
    return Recorded(**{**value, "accounting": None if found is None else accounting.from_json(found)})


def resume(path: Path, subject: Subject) -> Results:
    """What a file holds of this subject already; nothing when there is none, or when no job in it counts.

    Raises:
        DataError: the file is something else.
        InvalidArgumentError: it holds measurements of another subject.
    """
    if not path.exists():
        return Results(subject)
    found = read(path)
    if not found.counted():
        return Results(subject)
    for before, now in ((found.subject.asked, subject.asked), (found.subject.environment, subject.environment)):
        for name in now:
            if before.get(name) != now[name]:
                raise InvalidArgumentError(
                    f"{path} holds measurements with {name} {_word(before.get(name))}, and now it is "
                    f"{_word(now[name])}; they cannot be mixed: give another file, or remove this one."
                )
    return Results(subject, found.jobs, found.recordings)


def _word(value: object) -> str:
    return json.dumps(value)
