"""What a rank leaves in the folder of its job, line by line, so that a job that is ended keeps what was measured."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdkit.errors import DataError
from hvdkit.measure.emulate.clock import Reading

_MARK = "emulate rank"
_WAIT_S = 60.0
_PAUSE_S = 0.02


def file_of(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / f"rank-{rank}.jsonl"


class Writer:
    """Writes the lines of one rank.

    Args:
        folder: of the job.
        rank: of this process.
        head: what the other ranks and the reader should know of this one: machine, notes, ...
    """

    def __init__(self, folder: Path, rank: int, head: dict[str, Any]) -> None:
        self._file = file_of(folder, rank).open("w", encoding="utf-8")
        self._say({"hvdkit": _MARK, "rank": rank, **head})

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def trial(self, number: int, arrived: Sequence[float], done: Sequence[float]) -> None:
        """Add the times of a trial, seconds of this rank's clock, by place in the plan."""
        self._say([number, [round(at, 9) for at in arrived], [round(at, 9) for at in done]])

    def clock(self, reading: Reading) -> None:
        """Add a comparison with the clock of rank 0."""
        self._say({"clock": [reading.at, reading.offset, reading.bound]})

    def error(self, message: str, exit_code: int, *, wrong: bool) -> None:
        """Add why this rank ends the job; ``wrong``: a result was not what it must be."""
        self._say({"error": message, "exit_code": exit_code, "wrong": wrong})

    def _say(self, value: Any) -> None:
        self._file.write(json.dumps(value) + "\n")
        self._file.flush()


@dataclass
class Written:
    """What a rank wrote.

    Attributes:
        rank: which.
        head: what it said of itself.
        trials: number to (arrived, done).
        readings: of its clock against that of rank 0.
        error: why it ended the job, None when it did not; ``exit_code`` and ``wrong`` say more.
    """

    rank: int
    head: dict[str, Any]
    trials: dict[int, tuple[list[float], list[float]]] = field(default_factory=dict)
    readings: list[Reading] = field(default_factory=list)
    error: str | None = None
    exit_code: int = 1
    wrong: bool = False


def read(file: Path) -> Written | None:
    """What a rank wrote; a last line that is not complete is left out. None where it wrote nothing.

    Raises:
        DataError: the file holds something else.
    """
    if not file.exists():
        return None
    lines = file.read_text(encoding="utf-8").split("\n")[:-1]
    if not lines:
        return None
    try:
        head = json.loads(lines[0])
        if head.pop("hvdkit") != _MARK:
            raise ValueError("its first line is another one")
        written = Written(head.pop("rank"), head)
        for line in lines[1:]:
            _add(written, json.loads(line))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{file.name} was not written by a rank of hvdkit emulate: {error}.") from error
    return written


def _add(written: Written, value: Any) -> None:
    if isinstance(value, list):
        number, arrived, done = value
        written.trials[number] = (arrived, done)
    elif "clock" in value:
        written.readings.append(Reading(*value["clock"]))
    else:
        written.error, written.exit_code, written.wrong = value["error"], value["exit_code"], value["wrong"]


def head_of(folder: Path, rank: int, wait_s: float = _WAIT_S) -> dict[str, Any]:
    """What another rank says of itself, as soon as this host sees it.

    Raises:
        DataError: it is not to be seen in time.
    """
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        written = read(file_of(folder, rank))
        if written is not None:
            return written.head
        time.sleep(_PAUSE_S)
    raise DataError(
        f"What rank {rank} wrote is not to be seen on this host after {wait_s:g} s; start hvdkit emulate in a "
        "directory that all hosts share, or give --json a file in one."
    )
