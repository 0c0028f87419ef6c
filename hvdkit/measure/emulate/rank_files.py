"""What the ranks of a job leave in the folder that they share: who they are, and the times of every trial.

The times are added trial by trial, so that a job that is ended keeps what was measured. From the times that all ranks
left follow the samples: see ``join``.
"""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from msgspec import structs

from hvdkit.common.files import complete_or_absent, text_if_there
from hvdkit.common.json_files import Part
from hvdkit.measure.emulate.check import BROADCAST
from hvdkit.measure.emulate.results import EmulateResults, Sample
from hvdkit.observe.lateness import Floats

_DIGITS = 9


class RankRecord(Part, frozen=True):
    """What a rank says of itself.

    Attributes:
        machine: names its clock, see ``machine``.
        host: on which it ran.
        notes: what a reader of the numbers should know, full sentences.
        error: why it ended the job, None when it did not.
        exit_code: of that error.
        wrong: the error is that a result was not what it must be.
    """

    machine: str
    host: str
    notes: tuple[str, ...] = ()
    error: str | None = None
    exit_code: int = 1
    wrong: bool = False


def machine() -> str:
    """What names the clock of this process: equal on two ranks, they read the same clock.

    Within one machine, network namespaces and containers included, CLOCK_MONOTONIC is one clock.
    """
    files = ("/proc/sys/kernel/random/boot_id", "/proc/self/timens_offsets")  # the second where the kernel has them
    texts = [" ".join(text_if_there(Path(file)).split()) for file in files]
    return "/".join(text for text in texts if text) or socket.gethostname()


class RankFiles:
    """Writes the files of one rank.

    Args:
        folder: of the job.
        rank: of this process.
        notes: see ``RankRecord``.
    """

    def __init__(self, folder: Path, rank: int, notes: Sequence[str] = ()) -> None:
        self._file = folder / f"rank-{rank}.json"
        self._times = _times_of(folder, rank).open("wb")
        self._write(RankRecord(machine(), socket.gethostname(), tuple(notes)))

    def trial(self, arrived: Sequence[float], done: Sequence[float]) -> None:
        """Add the times of a trial, seconds of this rank's clock, by place in the plan."""
        self._times.write(np.array([arrived, done]).tobytes())
        self._times.flush()

    def error(self, message: str, exit_code: int, *, wrong: bool) -> None:
        """Say why this rank ends the job; ``wrong``: a result was not what it must be."""
        self._write(structs.replace(self._record, error=message, exit_code=exit_code, wrong=wrong))

    def _write(self, record: RankRecord) -> None:
        self._record = record
        with complete_or_absent(self._file) as file:
            file.write(msgspec.json.encode(record))


def _times_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.times"


@dataclass
class Joined:
    """What a job left.

    Attributes:
        samples, compressed: of the trials that all ranks have finished.
        placed: how many ranks each host had; empty where not every rank said.
        notes: full sentences.
        failed: the rank that ended the job with an error, None without one; a wrong result before others.
    """

    samples: list[Sample] = field(default_factory=list)
    compressed: list[Sample] = field(default_factory=list)
    placed: tuple[int, ...] = ()
    notes: list[str] = field(default_factory=list)
    failed: RankRecord | None = None


def join(folder: Path, job: EmulateResults) -> Joined:
    """What the ranks of a job left, collective by collective.

    Clocks are read within one machine only. On several, each rank's own time tells the same: the longest is the delay,
    and the rank that came last waited for nobody, so that the shortest is the transfer and the rest skew. The root of a
    broadcast waits for nobody either, so that a broadcast between machines is all transfer.

    Args:
        folder: of the job.
        job: what was asked, and the plan.
    """
    asked, collectives = job.asked, job.plan.collectives
    ranks = []
    for rank in range(asked.ranks):
        with contextlib.suppress(FileNotFoundError):  # it did not come so far
            ranks.append(msgspec.json.decode((folder / f"rank-{rank}.json").read_bytes(), type=RankRecord))
    joined = Joined(notes=list(dict.fromkeys(note for record in ranks for note in record.notes)))
    failed = [record for record in ranks if record.error is not None]
    joined.failed = min(failed, key=lambda record: not record.wrong, default=None)
    if len(ranks) < asked.ranks:
        return joined
    joined.placed = tuple(Counter((record.machine, record.host) for record in ranks).values())
    one_clock = len({record.machine for record in ranks}) == 1
    if not one_clock:
        how = "transfer is the shortest of the ranks' own times, that of the last one, and skew the rest of the delay"
        if asked.collective == BROADCAST:
            how = "the whole delay of a broadcast counts as transfer"
        joined.notes.append(f"The clocks of several machines are not compared: {how}.")
    count = len(collectives)
    arrived, done = _times(folder, asked.ranks, count * (1 if asked.compression == "none" else 2))
    own = done - arrived
    if one_clock:
        skew = arrived.max(axis=0) - arrived.min(axis=0)
        transfer = np.maximum(0.0, done.max(axis=0) - arrived.max(axis=0))
    else:
        transfer = own.max(axis=0) if asked.collective == BROADCAST else own.min(axis=0)
        skew = own.max(axis=0) - transfer
    for trial, index in np.ndindex(skew.shape):
        ranks_s = tuple(np.round(own[:, trial, index], _DIGITS).tolist())
        sample = Sample(
            trial=trial,
            index=index % count,
            nbytes=collectives[index % count].nbytes,
            skew_s=round(float(skew[trial, index]), _DIGITS),
            transfer_s=round(float(transfer[trial, index]), _DIGITS),
            slowest_s=max(ranks_s),
            slowest_rank=ranks_s.index(max(ranks_s)),
            ranks_s=ranks_s,
        )
        (joined.samples if index < count else joined.compressed).append(sample)
    return joined


def _times(folder: Path, ranks: int, collectives: int) -> tuple[Floats, Floats]:
    """Arrivals and completions, each (ranks, trials, collectives), of the trials that all ranks have finished."""
    by_rank = []
    for rank in range(ranks):
        flat = np.fromfile(_times_of(folder, rank))
        whole = len(flat) // (2 * collectives)  # it may have been killed while it wrote
        by_rank.append(flat[: whole * 2 * collectives].reshape(whole, 2, collectives))
    trials = min(map(len, by_rank))
    times = np.stack([of_rank[:trials] for of_rank in by_rank])
    return times[:, :, 0], times[:, :, 1]
