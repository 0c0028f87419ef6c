"""What all ranks wrote, as one sample for each collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvdkit.measure.emulate import worker_files
from hvdkit.measure.emulate.clock import offset_at
from hvdkit.measure.emulate.plan import ReplayPlan
from hvdkit.measure.emulate.results import Sample
from hvdkit.measure.emulate.worker_files import Written

_DIGITS = 9


@dataclass
class Joined:
    """What a job left.

    Attributes:
        samples: of the trials that all ranks have finished.
        trials: how many these are.
        machines: how many machines the ranks were on, by their clocks.
        placed: how many ranks each host had; empty where not every rank said.
        overlapped: whether all collectives of a step were under way at once; None where no rank said.
        notes: full sentences.
        failed: the rank that ended the job with an error, None without one; a wrong result before others.
    """

    samples: list[Sample] = field(default_factory=list)
    trials: int = 0
    machines: int = 1
    placed: tuple[int, ...] = ()
    overlapped: bool | None = None
    notes: list[str] = field(default_factory=list)
    failed: Written | None = None


def join(folder: Path, plan: ReplayPlan, ranks: int) -> Joined:
    """Read what the ranks of a job wrote.

    Raises:
        DataError: a file in the folder is something else.
    """
    found = [worker_files.read(worker_files.file_of(folder, rank)) for rank in range(ranks)]
    there = [written for written in found if written is not None]
    joined = Joined(notes=[note for note in dict.fromkeys(note for one in there for note in one.head["notes"])])
    joined.machines = max(1, len({written.head["machine"] for written in there}))
    errors = [written for written in there if written.error is not None]
    joined.failed = min(errors, key=lambda one: (not one.wrong, one.rank), default=None)
    said = [written.head["overlaps"] for written in there if "overlaps" in written.head]
    joined.overlapped = all(said) if said else None
    if len(there) < ranks:
        return joined
    if all("host" in written.head for written in there):
        joined.placed = tuple(Counter((one.head["machine"], one.head["host"]) for one in there).values())
    common = set.intersection(*(set(written.trials) for written in there))
    joined.trials = len(common)
    for trial in sorted(common):
        joined.samples += _samples(trial, plan, there)
    joined.notes += _clock_notes(there)
    return joined


def _samples(trial: int, plan: ReplayPlan, ranks: Sequence[Written]) -> list[Sample]:
    """The collectives of one trial, on the clock of rank 0."""
    samples = []
    for index, collective in enumerate(plan.collectives):
        own, arrivals, ends = [], [], []
        for written in ranks:
            arrived, done = (times[index] for times in written.trials[trial])
            own.append(round(done - arrived, _DIGITS))
            arrivals.append(arrived + offset_at(arrived, written.readings))
            ends.append(done + offset_at(done, written.readings))
        slowest = max(range(len(own)), key=own.__getitem__)
        transfer = max(0.0, max(ends) - max(arrivals))  # clocks of two machines may be wrong by more than it takes
        samples.append(
            Sample(
                trial=trial,
                index=index,
                nbytes=collective.nbytes,
                skew_s=round(max(arrivals) - min(arrivals), _DIGITS),
                transfer_s=round(transfer, _DIGITS),
                slowest_s=own[slowest],
                slowest_rank=slowest,
                ranks_s=tuple(own),
            )
        )
    return samples


def _clock_notes(ranks: Sequence[Written]) -> list[str]:
    compared = [written for written in ranks if written.readings]
    if not compared:
        return []
    bound = max(reading.bound for written in compared for reading in written.readings)
    when = "before and after" if all(len(written.readings) > 1 for written in compared) else "before, not after,"
    machines = len({written.head["machine"] for written in ranks})
    return [
        f"The clocks of {machines} machines were compared with that of rank 0 {when} the measurement, each time right "
        f"within {1e6 * bound:.0f} us: skew and transfer may be wrong by that, a rank's own times are not."
    ]
