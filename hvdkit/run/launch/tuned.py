"""Horovod's settings for speed: as options, or in the file of ``hvdkit tune``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, structs

from hvdkit.common import json_files
from hvdkit.common.json_files import Document, Part, Positive, Seconds, Whole
from hvdkit.errors import InvalidArgumentError

MIB = 1024 * 1024
OF_OPTIONS = {
    "cycle_time_ms": "HOROVOD_CYCLE_TIME",
    "fusion_threshold_mb": "HOROVOD_FUSION_THRESHOLD",
    "cache_capacity": "HOROVOD_CACHE_CAPACITY",
    "hierarchical_allreduce": "HOROVOD_HIERARCHICAL_ALLREDUCE",
}
"""The options of ``hvdkit launch`` that win over a tuned file, and the variables that they set."""


class Tuned(Part, frozen=True, omit_defaults=True):
    """What is set for speed; what is left out stays as it is.

    Attributes:
        launcher: "mpirun" (MPI) or "horovodrun" (Gloo).
        threads: compute threads per rank.
        cycle_time_s: seconds between two looks of Horovod at what is ready (HOROVOD_CYCLE_TIME, there in ms).
        fusion_threshold_bytes: size of the fusion buffer, 0 for no fusion.
        cache_capacity: tensors whose negotiation is remembered, 0 for none.
        hierarchical_allreduce: within a host first, then between hosts.
    """

    launcher: Annotated[str, Meta(pattern="^(mpirun|horovodrun)$")] | None = None
    threads: Positive | None = None
    cycle_time_s: Seconds | None = None
    fusion_threshold_bytes: Whole | None = None
    cache_capacity: Whole | None = None
    hierarchical_allreduce: bool | None = None

    @property
    def cycle_time_ms(self) -> float | None:
        """The cycle time in the unit in which Horovod reads it."""
        return None if self.cycle_time_s is None else 1000 * self.cycle_time_s

    def variables(self) -> dict[str, str]:
        """The environment variables of Horovod that say the same, in the units that Horovod reads."""
        values = (self.cycle_time_ms, self.fusion_threshold_bytes, self.cache_capacity, self.hierarchical_allreduce)
        return {
            variable: f"{value:g}" if isinstance(value, float) else str(int(value))
            for variable, value in zip(OF_OPTIONS.values(), values, strict=True)
            if value is not None
        }


class TunedFile(Document, frozen=True):
    """What makes a job fast.

    Attributes:
        settings: for ``hvdkit launch --tuned``.
        measured: how they were found: see "tune". Nobody reads it.
    """

    kind = "tuned"
    written_by = "hvdkit tune"
    fix = "give a file of 'hvdkit tune'"

    settings: Tuned
    measured: Any = None


def choose(
    path: Path | None,
    *,
    cycle_time_ms: float | None,
    fusion_threshold_mb: float | None,
    cache_capacity: int | None,
    hierarchical_allreduce: bool | None,
) -> tuple[Tuned, dict[str, str]]:
    """The settings of a file with those of the options over them, and where each variable comes from.

    Args:
        path: a file of ``hvdkit tune``, None for no file.
        fusion_threshold_mb: MiB; the others: see ``Tuned``.
    Raises:
        InvalidArgumentError: the file cannot be read, or is something else.
    """
    found = Tuned() if path is None else json_files.read(path, TunedFile, InvalidArgumentError).settings
    options = Tuned(
        cycle_time_s=None if cycle_time_ms is None else cycle_time_ms / 1000,
        fusion_threshold_bytes=None if fusion_threshold_mb is None else round(fusion_threshold_mb * MIB),
        cache_capacity=cache_capacity,
        hierarchical_allreduce=hierarchical_allreduce,
    )
    sources = dict.fromkeys(found.variables(), f"--tuned {path}")
    flags = {variable: f"--{option.replace('_', '-')}" for option, variable in OF_OPTIONS.items()}
    sources.update({variable: flags[variable] for variable in options.variables()})
    given = {name: value for name, value in structs.asdict(options).items() if value is not None}
    return structs.replace(found, **given), sources
