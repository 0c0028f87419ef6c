"""What every rank is told: a file in the folder that the ranks of a job share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from hvdkit.common.json_files import Part
from hvdkit.errors import DataError
from hvdkit.measure.emulate.plan import Plan

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


class Job(Part, frozen=True):
    """What the ranks do.

    Attributes:
        folder: shared by all ranks; the job, what they write, and where they meet.
        plan: the collectives of a step, and how many steps.
        ranks: how many.
        engine: a key of ``engines.ENGINES``.
        backend: of engine "torch": "gloo", "nccl", or "" for what there is.
        collective: one of ``check.COLLECTIVES``.
        algorithm: "library" or "ring".
        fusion: Horovod is given all tensors of a step before the first is waited for.
        check: every element of every result is checked.
        warmup_trials: steps before those that are kept, >= 0.
        stragglers: seconds by which a rank comes later to every collective, by rank.
        delay: random delays, None for none.
        seed: of the random delays.
        compute: what a rank does in a gap: "busy" (computes) or "sleep".
        apart: the ranks may be on several machines, whose clocks have to be compared.
    """

    folder: Path
    plan: Plan
    ranks: int
    engine: str
    backend: str = ""
    collective: str = "allreduce"
    algorithm: str = "library"
    fusion: bool = False
    check: bool = True
    warmup_trials: int = 0
    stragglers: Mapping[int, float] | None = None
    delay: Delay | None = None
    seed: int = 0
    compute: str = BUSY
    apart: bool = False


def write(job: Job) -> None:
    """Leave the job in its folder for the ranks."""
    known = {**msgspec.structs.asdict(job), "folder": None}
    (job.folder / _FILE).write_bytes(msgspec.json.encode(known))


def read(folder: Path) -> Job:
    """The job of a folder.

    Raises:
        DataError: the folder is not to be seen from this host, or holds no job.
    """
    try:
        content = msgspec.json.decode((folder / _FILE).read_bytes())
        return msgspec.convert({**content, "folder": folder}, Job, str_keys=True)
    except FileNotFoundError as error:
        raise DataError(
            f"{folder} is not there on this host: start hvdkit emulate in a directory that all hosts share, or give "
            "--json a file in one."
        ) from error
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{folder} holds no job of hvdkit emulate: {error}.") from error
