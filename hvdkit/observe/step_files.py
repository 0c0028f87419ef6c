"""What the recorders of all ranks wrote of their steps (``step_times``): ``rank-R.jsonl`` of each in a directory."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdkit.errors import DataError
from hvdkit.observe.step_times import MARK, VERSION


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank; seconds since the epoch of Unix, on a clock that never goes back within a process.

    Attributes:
        asked: the batch was asked for; the step before had ended.
        given: the batch was there.
        ready: the gradients were there, and the rank began to wait for the others; None where nobody said so.
        ended: the step was complete.
        arrived: the gradients of all ranks were there: the one moment that all ranks share; None where nobody said so.
        used: seconds from ``asked`` to ``ready`` (to ``ended`` without it) in which the thread that trains ran, in
            which others had its core, and which all threads of the process ran; None where the kernel does not say it.
    """

    asked: float
    given: float
    ready: float | None
    ended: float
    arrived: float | None = None
    used: tuple[float, float, float] | None = None


@dataclass(frozen=True, slots=True)
class StepEvent:
    """Something of this process that took time within the steps.

    Attributes:
        name: "gc" (garbage collection), "fsync" (the disk has it), "saving" (a checkpoint) or "evaluation".
        at: when it began, on the clock of the steps.
        seconds: how long it took.
    """

    name: str
    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Cores:
    """What the thread that trains got of the processor, in so many steps.

    Attributes:
        steps: how many.
        ran: seconds that it ran.
        queued: seconds that it could have run, and others had the cores.
        of_all: seconds that all threads of the process ran.
    """

    steps: int
    ran: float
    queued: float
    of_all: float


@dataclass(frozen=True, slots=True)
class RankTimes:
    """What one rank wrote.

    Attributes:
        rank: its number.
        steps: in order.
        host: a number that ranks of one host share; None in older files.
        cores: of all steps; None where the kernel does not say it.
        cpus: cores to which the thread that trains is bound; None in older files.
        events: in order of time.
    """

    rank: int
    steps: tuple[Step, ...]
    host: int | None = None
    cores: Cores | None = None
    cpus: frozenset[int] | None = None
    events: tuple[StepEvent, ...] = ()


def read(directory: Path) -> list[RankTimes]:
    """What the ranks wrote to a directory, by rank; empty when none wrote anything.

    Raises:
        DataError: a file that is not what a rank writes.
    """
    return sorted((_read(path) for path in directory.glob("rank-*.jsonl")), key=lambda times: times.rank)


def _read(path: Path) -> RankTimes:
    """The file of one rank, as ``step_times.Recorder`` writes it; DataError where it is damaged."""
    try:
        text = path.read_text(encoding="utf-8")
        if "\n" in text:  # a rank that is killed as it writes leaves part of a line
            text = text[: text.rindex("\n")]
        header, *lines = [json.loads(line) for line in text.splitlines()]
        if header["hvdkit"] != MARK or header["version"] != VERSION:
            raise ValueError(f"the first line is {header!r}")
        host, cpus = header.get("host"), header.get("cpus")
        events = [line for line in lines if isinstance(line, dict) and "event" in line]
        cores = [line for line in lines if isinstance(line, dict) and "event" not in line]
        return RankTimes(
            int(header["rank"]),
            tuple(_step(line) for line in lines if not isinstance(line, dict)),
            None if host is None else int(host),
            _cores(cores[-1]) if cores else None,
            None if cpus is None else frozenset(map(int, cpus)),
            tuple(
                StepEvent(str(event["event"]), _seconds(event["at"]), _seconds(event["seconds"])) for event in events
            ),
        )
    except (OSError, ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise DataError(f"{path} is not a file of step times (version {VERSION}) or not complete: {error}.") from error


def _step(line: list[Any]) -> Step:
    asked, given, ready, ended, *more = line
    if len(more) not in (0, 4):
        raise ValueError(f"a step has {len(line)} values")
    arrived, *used = more or (None,)
    ran = tuple(map(_seconds, used)) if used and None not in used else None
    return Step(
        _seconds(asked), _seconds(given), _optional(ready), _seconds(ended), _optional(arrived),
        None if ran is None else (ran[0], ran[1], ran[2]),
    )  # fmt: skip


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"a time is {value!r}")
    return float(value)


def _cores(line: dict[str, Any]) -> Cores:
    steps = line["steps"]
    if type(steps) is not int or steps < 1:
        raise ValueError(f"a number of steps is {steps!r}")
    return Cores(steps, *(_seconds(line[name]) for name in ("ran", "queued", "of_all")))


def _optional(value: Any) -> float | None:
    return None if value is None else _seconds(value)
