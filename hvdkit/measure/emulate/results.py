"""The file that keeps what was measured: every collective of every trial."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hvdkit.common import json_files
from hvdkit.common.json_files import Document, Part, Seconds, Whole
from hvdkit.measure.bench.subject import Environment, HowLaunched
from hvdkit.measure.emulate.plan import ReplayPlan
from hvdkit.measure.emulate.run_job import EmulateAsked


class WithLaunch(Environment, frozen=True):
    """Where it was measured.

    Attributes:
        launch: how the ranks were launched.
    """

    launch: HowLaunched


class Sample(Part, frozen=True, rename={"nbytes": "size"}):
    """One collective of one trial; times in seconds.

    Attributes:
        trial: from 0, the warm-up left out.
        index: position in ``plan.collectives``.
        nbytes: that each rank gives.
        skew_s: from the first rank's arrival to the last one's, >= 0.
        transfer_s: from the last rank's arrival until the last rank is done, >= 0.
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


class EmulateResults(Document, frozen=True, kw_only=True):
    """Every collective of every trial.

    Attributes:
        asked: what was to be measured.
        environment: where it was measured.
        notes: what a reader of the numbers should know, full sentences.
        plan: what was replayed, as "emulate-plan" without its head.
        samples: in the order of trials and of the plan.
        summary: what follows from them, as "emulate-summary" without its head; None where nothing was measured. Nobody
            reads it.
    """

    kind = "emulate-results"
    written_by = "hvdkit emulate"

    asked: EmulateAsked
    environment: WithLaunch
    notes: list[str]
    plan: ReplayPlan
    summary: Any
    samples: list[Sample]

    def __post_init__(self) -> None:
        collectives, ranks = self.plan.collectives, self.asked.ranks
        for place, sample in enumerate(self.samples):
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
        return np.array([getattr(one, name) for one in self.samples])

    def settings(self) -> dict[str, str]:
        """What was asked for and where it ran, as words.

        What is inside an entry is named after it: ``packages torch``. Lists are left out.
        """
        return {**_flat(json_files.plain(self.asked)), **_flat(json_files.plain(self.environment))}


def write(path: Path, results: EmulateResults, summary: Document | None = None) -> None:
    """Write the file; an older one stays whole until the new one is complete.

    Args:
        path: the file.
        results: what was measured.
        summary: what follows from it (``analysis.analyse(results)``), None where nothing was measured.
    Raises:
        DataError, InvalidArgumentError: it cannot be written.
    """
    json_files.write(path, msgspec.structs.replace(results, summary=summary), _in_lines)


def _in_lines(file: EmulateResults) -> str:
    """A line for each sample, so that a long file can be read and compared."""
    text = json_files.encode(msgspec.structs.replace(file, samples=[]), indent=1)
    lines = ",\n".join(f"  {msgspec.json.encode(one).decode()}" for one in file.samples)
    return text.replace('\n "samples": []', f'\n "samples": [\n{lines}\n ]')


def _flat(values: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found.update({f"{name} {inner}": text for inner, text in _flat(value).items()})
        elif not isinstance(value, list):
            found[name] = "none" if value is None else str(value)
    return found
