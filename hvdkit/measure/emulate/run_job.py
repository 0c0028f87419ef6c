"""What every rank is told: a file in the folder that the ranks of a job share."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hvdkit.common.json_files import Part, Positive, Seconds, Whole
from hvdkit.errors import DataError
from hvdkit.measure.emulate.plan import ReplayPlan

_FILE = "job.json"
BUSY, SLEEP = COMPUTE = ("busy", "sleep")


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
        engine: "horovod", "mpi" or "torch".
        collective: one of ``check.COLLECTIVES``.
        algorithm: "library", or "ring" for hvdkit's own over MPI messages.
        ranks: how many.
        hosts: on how many the ranks ran.
        check: every element of every result was compared with what it must be.
        ppn: ranks on each host; None where hosts had different numbers.
        backend: of engine "torch", as it was asked for; None for what there is.
        fusion: Horovod was given all tensors of a step before the first was waited for.
        warmup_trials: steps that were not kept.
        straggler_s: seconds by which a rank came late, by rank.
        delay: random delays.
        seed: of the random delays.
        compute: what ranks did in gaps, "busy" or "sleep".
        settings: variables of Horovod that were set.
    """

    engine: str
    collective: str
    algorithm: str
    ranks: Positive
    hosts: Positive
    check: bool
    ppn: Positive | None = None
    backend: str | None = None
    fusion: bool = False
    warmup_trials: Whole = 0
    straggler_s: dict[int, Seconds] = msgspec.field(default_factory=dict)
    delay: Delay | None = None
    seed: Whole = 0
    compute: str = BUSY
    settings: dict[str, str] = msgspec.field(default_factory=dict)


class ReplayJob(Part, frozen=True):
    """What the ranks do.

    Attributes:
        folder: shared by all ranks; the job, what they write, and where they meet.
        plan: the collectives of a step, and how many steps.
        asked: how they are carried out; on which hosts is the launcher's to say.
        apart: the ranks may be on several machines, whose clocks have to be compared.
    """

    folder: Path
    plan: ReplayPlan
    asked: EmulateAsked
    apart: bool = False


def write(job: ReplayJob) -> None:
    """Leave the job in its folder for the ranks."""
    known = {**msgspec.structs.asdict(job), "folder": None}
    (job.folder / _FILE).write_bytes(msgspec.json.encode(known))


def read(folder: Path) -> ReplayJob:
    """The job of a folder.

    Raises:
        DataError: the folder is not to be seen from this host, or holds no job.
    """
    try:
        content = msgspec.json.decode((folder / _FILE).read_bytes())
        return msgspec.convert({**content, "folder": folder}, ReplayJob, str_keys=True)
    except FileNotFoundError as error:
        raise DataError(
            f"{folder} is not there on this host: start hvdkit emulate in a directory that all hosts share, or give "
            "--json a file in one."
        ) from error
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{folder} holds no job of hvdkit emulate: {error}.") from error
