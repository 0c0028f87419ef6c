"""What was asked for and measured, the file that keeps it, and what the ranks of a job leave for it."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from hvdkit.common.files import complete_or_absent, text_if_there
from hvdkit.common.json_files import Document, Part, Positive, Seconds, Whole
from hvdkit.measure.bench.results import Environment
from hvdkit.measure.emulate.check import ALLREDUCE, BROADCAST
from hvdkit.measure.emulate.plan import ReplayPlan
from hvdkit.observe.lateness import Floats

HOROVOD, MPI, RING = "horovod", "mpi", "ring"
ENGINES = (HOROVOD, MPI, RING, "torch", "gloo", "nccl")
JOB = "job.json"
"""In the folder of a job: its results, before there is any."""
_DIGITS = 9


class Delay(Part, frozen=True):
    """Random delays that are injected before collectives.

    Attributes:
        mean_s: their mean in seconds, > 0; they are exponentially distributed.
        rank: the rank that is delayed, None for every rank, each by delays of its own.
        probability: of a delay before a collective, above 0 and at most 1.
    """

    mean_s: float
    rank: int | None = None
    probability: float = 1.0


class EmulateAsked(Part, frozen=True):
    """What was to be measured; no names of hosts.

    Attributes:
        engine: one of ``ENGINES``.
        ranks: how many.
        hosts: on how many the ranks ran.
        collective: one of ``check.COLLECTIVES``.
        check: every element of every result was compared with what it must be.
        ppn: ranks on each host; None where hosts had different numbers.
        fusion: Horovod was given all tensors of a step before the first was waited for.
        warmup_trials: steps that were not kept.
        straggler_s: seconds by which a rank came late, by rank.
        delay: random delays.
        settings: variables of Horovod that were given with --env.
        compression: in which the allreduces of a step were done once more, after those with none; else "none".
    """

    engine: str
    ranks: Positive
    hosts: Positive
    collective: str = ALLREDUCE
    check: bool = True
    ppn: Positive | None = None
    fusion: bool = False
    warmup_trials: Whole = 0
    straggler_s: dict[int, Seconds] = msgspec.field(default_factory=dict)
    delay: Delay | None = None
    settings: dict[str, str] = msgspec.field(default_factory=dict)
    compression: str = "none"


class Sample(Part, frozen=True, rename={"nbytes": "size"}):
    """One collective of one trial; times in seconds.

    Attributes:
        trial: from 0, the warm-up left out.
        index: position in ``plan.collectives``.
        nbytes: that each rank gives.
        skew_s: from the first rank's arrival to the last one's.
        transfer_s: from the last rank's arrival until the last rank is done.
        slowest_s: the longest of the ranks' own durations, arrival to completion.
        slowest_rank: whose that is.
        ranks_s: every rank's own duration, by rank. The rank that came last has the shortest.
    """

    trial: Whole
    index: Whole
    nbytes: Whole
    skew_s: Seconds
    transfer_s: Seconds
    slowest_s: Seconds
    slowest_rank: Whole
    ranks_s: tuple[Seconds, ...]


class EmulateResults(Document, frozen=True):
    """Every collective of every trial.

    Attributes:
        asked: what was to be measured.
        environment: where it was measured.
        notes: what a reader of the numbers should know, full sentences.
        plan: what was replayed, as "emulate-plan" without its head.
        samples: in the order of trials and of the plan.
        compressed: the same collectives of the same trials with ``asked.compression``; empty without one.
    """

    kind = "emulate-results"
    schema = 2
    written_by = "hvdkit emulate"

    asked: EmulateAsked
    environment: Environment
    notes: list[str]
    plan: ReplayPlan
    samples: list[Sample]
    compressed: list[Sample] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        collectives, ranks = self.plan.collectives, self.asked.ranks
        if len(self.compressed) != len(self.samples) * (self.asked.compression != "none"):
            raise ValueError(f"compressed has {len(self.compressed)} samples, and samples {len(self.samples)}")
        for place, sample in enumerate((*self.samples, *self.compressed)):
            if (
                len(sample.ranks_s) != ranks
                or sample.slowest_rank >= ranks
                or sample.index >= len(collectives)
                or sample.nbytes != collectives[sample.index].nbytes
            ):
                raise ValueError(
                    f"samples[{place}] is {sample}, with {ranks} ranks and {len(collectives)} collectives a step"
                )

    def column(self, name: str) -> NDArray[Any]:
        """A field of every sample, in their order."""
        return np.array([getattr(sample, name) for sample in self.samples])


# What the ranks of a job leave ---------------------------------------------------------------------------------------


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

    The times are added trial by trial, so that a job that is ended keeps what was measured.
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


def join(folder: Path, job: EmulateResults) -> tuple[EmulateResults, RankRecord | None]:
    """The job with the trials that all ranks have finished; and the rank that ended it with an error, if one did.

    Clocks are read within one machine only. On several, each rank's own time tells the same: the longest is the delay,
    and the rank that came last waited for nobody, so that the shortest is the transfer and the rest skew. The root of a
    broadcast waits for nobody either, so that a broadcast between machines is all transfer.
    """
    asked, collectives = job.asked, job.plan.collectives
    ranks = []
    for rank in range(asked.ranks):
        with contextlib.suppress(FileNotFoundError):  # it did not come so far
            ranks.append(msgspec.json.decode((folder / f"rank-{rank}.json").read_bytes(), type=RankRecord))
    failed = [record for record in ranks if record.error is not None]
    why = min(failed, key=lambda record: not record.wrong, default=None)
    notes = list(dict.fromkeys(note for record in ranks for note in record.notes))
    if len(ranks) < asked.ranks:
        return structs.replace(job, notes=[*job.notes, *notes]), why
    placed = tuple(Counter((record.machine, record.host) for record in ranks).values())
    if len(placed) < asked.hosts:
        notes.insert(
            0,
            f"The launcher put all {asked.ranks} ranks on {len(placed)} of the {asked.hosts} hosts; give hosts as many "
            "slots as they are to run ranks, such as --hosts h1:1,h2:1, or --ppn.",
        )
    # where the ranks ran they say themselves: a launcher may fill one host
    asked = structs.replace(asked, hosts=len(placed), ppn=placed[0] if len(set(placed)) == 1 else None)
    one_clock = len({record.machine for record in ranks}) == 1
    if not one_clock:
        how = "transfer is the shortest of the ranks' own times, that of the last one, and skew the rest of the delay"
        if asked.collective == BROADCAST:
            how = "the whole delay of a broadcast counts as transfer"
        notes.append(f"The clocks of several machines are not compared: {how}.")
    count = len(collectives)
    arrived, done = _times(folder, asked.ranks, count * (1 if asked.compression == "none" else 2))
    own = done - arrived
    if one_clock:
        skew = arrived.max(axis=0) - arrived.min(axis=0)
        transfer = np.maximum(0.0, done.max(axis=0) - arrived.max(axis=0))
    else:
        transfer = own.max(axis=0) if asked.collective == BROADCAST else own.min(axis=0)
        skew = own.max(axis=0) - transfer
    samples, compressed = list[Sample](), list[Sample]()
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
        (samples if index < count else compressed).append(sample)
    return EmulateResults(asked, job.environment, [*job.notes, *notes], job.plan, samples, compressed), why


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
