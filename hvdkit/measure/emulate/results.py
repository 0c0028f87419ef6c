"""The file that keeps what was asked for and what was measured: every collective of every trial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hvdkit.common import json_files
from hvdkit.common.json_files import Document, Part, Positive, Seconds, Whole
from hvdkit.measure.bench.subject import Environment
from hvdkit.measure.emulate.check import ALLREDUCE
from hvdkit.measure.emulate.plan import ReplayPlan

HOROVOD, MPI, RING = "horovod", "mpi", "ring"
ENGINES = (HOROVOD, MPI, RING, "torch", "gloo", "nccl")


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


def load(path: Path) -> EmulateResults:
    """Read a file of ``hvdkit emulate --json``.

    Raises:
        DataError: it cannot be read, is something else, or holds what cannot be.
    """
    return json_files.read(path, EmulateResults)
