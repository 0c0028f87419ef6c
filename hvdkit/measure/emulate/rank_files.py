"""What the ranks of a job are told and what they leave, in a folder that they share.

Every rank writes line by line, so that a job that is ended keeps what was measured. From the times that all ranks left
follow the samples: see ``join``.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from hvdkit.common.json_files import Part
from hvdkit.errors import DataError
from hvdkit.measure.emulate.check import BROADCAST
from hvdkit.measure.emulate.plan import ReplayPlan
from hvdkit.measure.emulate.results import EmulateAsked, Sample

_FILE = "job.json"
_MARK = "emulate rank"
_DIGITS = 9


class ReplayJob(Part, frozen=True):
    """What the ranks do.

    Attributes:
        asked: how the collectives are carried out; on which hosts is the launcher's to say.
        plan: the collectives of a step, and how many steps.
    """

    asked: EmulateAsked
    plan: ReplayPlan


def write_job(folder: Path, job: ReplayJob) -> None:
    """Leave the job in its folder for the ranks."""
    (folder / _FILE).write_bytes(msgspec.json.encode(job))


def read_job(folder: Path) -> ReplayJob:
    """The job of a folder.

    Raises:
        DataError: the folder is not to be seen from this host, or holds no job.
    """
    try:
        return msgspec.convert(msgspec.json.decode((folder / _FILE).read_bytes()), ReplayJob, str_keys=True)
    except FileNotFoundError as error:
        raise DataError(
            f"{folder} is not there on this host: start hvdkit emulate in a directory that all hosts share, or give "
            "--json a file in one."
        ) from error
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{folder} holds no job of hvdkit emulate: {error}.") from error


def machine() -> str:
    """What names the clock of this process: equal on two ranks, they read the same clock.

    Within one machine, network namespaces and containers included, CLOCK_MONOTONIC is one clock.
    """
    texts = []
    for file in ("/proc/sys/kernel/random/boot_id", "/proc/self/timens_offsets"):
        with contextlib.suppress(OSError):  # not Linux, or a kernel without time namespaces
            texts.append(" ".join(Path(file).read_text(encoding="utf-8").split()))
    return "/".join(texts) or socket.gethostname()


def file_of(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / f"rank-{rank}.jsonl"


class Writer:
    """Writes the lines of one rank.

    Args:
        folder: of the job.
        rank: of this process.
        notes: what a reader of the numbers should know, full sentences.
    """

    def __init__(self, folder: Path, rank: int, notes: Sequence[str] = ()) -> None:
        self._file = file_of(folder, rank).open("w", encoding="utf-8")
        where = {"machine": machine(), "host": socket.gethostname()}
        self._say({"hvdkit": _MARK, "rank": rank, **where, "notes": list(notes)})

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def trial(self, number: int, arrived: Sequence[float], done: Sequence[float]) -> None:
        """Add the times of a trial, seconds of this rank's clock, by place in the plan."""
        self._say([number, [round(at, _DIGITS) for at in arrived], [round(at, _DIGITS) for at in done]])

    def error(self, message: str, exit_code: int, *, wrong: bool) -> None:
        """Add why this rank ends the job; ``wrong``: a result was not what it must be."""
        self._say({"error": message, "exit_code": exit_code, "wrong": wrong})

    def _say(self, value: Any) -> None:
        self._file.write(json.dumps(value) + "\n")
        self._file.flush()


@dataclass
class RankRecord:
    """What a rank left.

    Attributes:
        rank: which.
        machine: names its clock, see ``machine``.
        host: on which it ran.
        notes: of the rank, full sentences.
        trials: number to (arrived, done).
        error: why it ended the job, None when it did not; ``exit_code`` and ``wrong`` say more.
    """

    rank: int
    machine: str
    host: str
    notes: list[str]
    trials: dict[int, tuple[list[float], list[float]]] = field(default_factory=dict)
    error: str | None = None
    exit_code: int = 1
    wrong: bool = False


def read(file: Path) -> RankRecord | None:
    """What a rank wrote; a last line that is not complete is left out. None where it wrote nothing.

    Raises:
        DataError: the file holds something else.
    """
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
    if not lines:
        return None
    try:
        head = json.loads(lines[0])
        if head.pop("hvdkit") != _MARK:
            raise ValueError("its first line is another one")
        found = RankRecord(**head)
        for line in lines[1:]:
            value = json.loads(line)
            if isinstance(value, list):
                number, arrived, done = value
                found.trials[number] = (arrived, done)
            else:
                found.error, found.exit_code, found.wrong = value["error"], value["exit_code"], value["wrong"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{file.name} was not written by a rank of hvdkit emulate: {error}.") from error
    return found


@dataclass
class Joined:
    """What a job left.

    Attributes:
        samples: of the trials that all ranks have finished.
        trials: how many these are.
        placed: how many ranks each host had; empty where not every rank said.
        notes: full sentences.
        failed: the rank that ended the job with an error, None without one; a wrong result before others.
    """

    samples: list[Sample] = field(default_factory=list)
    trials: int = 0
    placed: tuple[int, ...] = ()
    notes: list[str] = field(default_factory=list)
    failed: RankRecord | None = None


def join(folder: Path, job: ReplayJob) -> Joined:
    """What the ranks of a job wrote, collective by collective.

    Clocks are read within one machine only. On several, each rank's own time tells the same: the longest is the delay,
    and the rank that came last waited for nobody, so that the shortest is the transfer and the rest skew. The root of a
    broadcast waits for nobody either, so that a broadcast between machines is all transfer.

    Raises:
        DataError: a file in the folder is something else.
    """
    ranks = [record for rank in range(job.asked.ranks) if (record := read(file_of(folder, rank))) is not None]
    joined = Joined(notes=list(dict.fromkeys(note for record in ranks for note in record.notes)))
    failed = [record for record in ranks if record.error is not None]
    joined.failed = min(failed, key=lambda record: (not record.wrong, record.rank), default=None)
    if len(ranks) < job.asked.ranks:
        return joined
    joined.placed = tuple(Counter((record.machine, record.host) for record in ranks).values())
    one_clock = len({record.machine for record in ranks}) == 1
    if not one_clock:
        how = "transfer is the shortest of the ranks' own times, that of the last one, and skew the rest of the delay"
        if job.asked.collective == BROADCAST:
            how = "the whole delay of a broadcast counts as transfer"
        joined.notes.append(f"The clocks of several machines are not compared: {how}.")
    common = set.intersection(*(set(record.trials) for record in ranks))
    joined.trials = len(common)
    for trial in sorted(common):
        for index, collective in enumerate(job.plan.collectives):
            arrivals = [record.trials[trial][0][index] for record in ranks]
            ends = [record.trials[trial][1][index] for record in ranks]
            own = [round(end - arrival, _DIGITS) for arrival, end in zip(arrivals, ends, strict=True)]
            if one_clock:
                skew, transfer = max(arrivals) - min(arrivals), max(0.0, max(ends) - max(arrivals))
            else:
                transfer = max(own) if job.asked.collective == BROADCAST else min(own)
                skew = max(own) - transfer
            slowest = max(range(len(own)), key=own.__getitem__)
            sample = Sample(
                trial=trial,
                index=index,
                nbytes=collective.nbytes,
                skew_s=round(skew, _DIGITS),
                transfer_s=round(transfer, _DIGITS),
                slowest_s=own[slowest],
                slowest_rank=slowest,
                ranks_s=tuple(own),
            )
            joined.samples.append(sample)
    return joined
