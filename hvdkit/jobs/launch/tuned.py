"""Horovod's settings for speed: as options, in the file of ``hvdkit tune``, or in the log of Horovod's autotuner."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from hvdkit.common import files, json_files
from hvdkit.common.json_files import Document, Part, Positive, Seconds, Whole
from hvdkit.errors import InvalidArgumentError

MIB = 1024 * 1024
_NOT_TAKEN = ("hierarchical_allgather", "torus_allreduce")
"""What Horovod's autotuner tries, too, and no option says."""


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
        values = {
            "HOROVOD_CYCLE_TIME": self.cycle_time_ms,
            "HOROVOD_FUSION_THRESHOLD": self.fusion_threshold_bytes,
            "HOROVOD_CACHE_CAPACITY": self.cache_capacity,
            "HOROVOD_HIERARCHICAL_ALLREDUCE": self.hierarchical_allreduce,
        }
        return {
            variable: f"{value:g}" if isinstance(value, float) else str(int(value))
            for variable, value in values.items()
            if value is not None
        }


class TunedFile(Document, frozen=True):
    """What makes a job fast.

    Attributes:
        settings: for ``hvdkit launch --tuned``.
        measured: how they were found, lines of text. Nobody reads it.
    """

    kind = "tuned"
    written_by = "hvdkit tune"
    fix = "give a file of 'hvdkit tune', or a log of HOROVOD_AUTOTUNE_LOG"

    settings: Tuned
    measured: Any = None


def read(path: Path) -> tuple[Tuned, str, tuple[str, ...]]:
    """The settings of a file of ``hvdkit tune``, or the best row of a log of Horovod's autotuner; their source; and the
    variables for what that row has on besides.

    Args:
        path: JSON, or the CSV of HOROVOD_AUTOTUNE_LOG, whose fusion threshold is in MiB.
    Raises:
        InvalidArgumentError: it cannot be read, is neither, or holds no usable row.
    """
    try:
        text = files.text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{path} cannot be read as tuned settings: {error}.") from error
    if text.lstrip().startswith("{"):
        return json_files.decode(text, TunedFile, str(path), InvalidArgumentError).settings, str(path), ()
    lines = text.splitlines()
    names = [name.strip() for name in lines[0].split(",")] if lines else []
    if not {"cycle_time_ms", "tensor_fusion_threshold", "score"} <= set(names):
        raise InvalidArgumentError(
            f"{path} is neither a file of 'hvdkit tune' nor a log of HOROVOD_AUTOTUNE_LOG, whose first line names "
            "cycle_time_ms, tensor_fusion_threshold and score."
        )
    rows = []
    for number, words in enumerate(csv.reader(lines[1:]), start=2):
        try:
            row = dict(zip(names, map(float, words), strict=True))
        except ValueError:  # no numbers, or not as many
            row = {}
        if row and all(0 <= value < math.inf for value in row.values()):
            rows.append((row["score"], -number, row))
        elif number < len(lines) or text.endswith("\n"):  # else the job was ended while it wrote its last line
            raise InvalidArgumentError(
                f"{path}, line {number}: expected {len(names)} numbers, got {lines[number - 1]!r}."
            )
    score, line, best = max(rows, default=(0.0, 0, {}))
    if score <= 0:
        raise InvalidArgumentError(
            f"{path} has no row with a score above 0: its autotuner saw no allreduce, or the job ended before it had "
            "tried anything; train longer."
        )
    hierarchical = best.get("hierarchical_allreduce")
    found = Tuned(
        cycle_time_s=best["cycle_time_ms"] / 1000,
        fusion_threshold_bytes=round(best["tensor_fusion_threshold"] * MIB),
        cache_capacity=0 if best.get("cache_enabled") == 0 else None,
        hierarchical_allreduce=None if hierarchical is None else hierarchical != 0,
    )
    left = tuple(f"HOROVOD_{name.upper()}" for name in _NOT_TAKEN if best.get(name))
    return found, f"line {-line} of {path}, the best of {len(rows)} (its fusion threshold is in MiB)", left
