"""Results of ``hvdkit bench scaling`` and ``hvdkit emulate`` as times that can be compared.

Of their files only what is compared is read here: the rooms that write them stand above this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from hvdkit.common import files
from hvdkit.common.json_files import Positive, Seconds, Whole
from hvdkit.common.units import bytes_text, printable, ranks_text
from hvdkit.errors import CorruptDataError, DataError
from hvdkit.read.diff.sides import Side, Timings

_LEFT_OUT = ("ranks", "repeats", "seed")
"""Of what was asked of a bench: they change how sure its result is, not what was measured."""
_Measured = Annotated[float, msgspec.Meta(ge=1e-9, le=1e9)]
_Head = Annotated[int, msgspec.Meta(ge=1, le=1)]
T = TypeVar("T")


class _Steps(msgspec.Struct):
    count: Positive
    step_s: _Measured
    parts: dict[str, Seconds | None]


class _Job(msgspec.Struct):
    ranks: Positive
    closing_s: Seconds | None = None
    steps: _Steps | None = None
    failure: str | None = None


class _Bench(msgspec.Struct):
    schema: Annotated[int, msgspec.Meta(ge=1, le=2)]
    asked: dict[str, Any]
    environment: dict[str, Any]
    jobs: list[_Job]


def of_bench(path: Path) -> Side:
    """Seconds of a step (weak scaling) or of all the work (strong scaling), at each number of ranks.

    Raises:
        DataError: it is no file of ``hvdkit bench scaling``, or no job in it counts.
    """
    found = _read(path, _Bench, "hvdkit bench scaling")
    jobs = [job for job in found.jobs if job.failure is None]
    stepped = bool(jobs) and all(job.steps is not None for job in jobs)
    weak = found.asked.get("mode") == "weak"
    name = f"{'step' if weak else 'work'}{'' if stepped else ' (closing line)'} on"

    def seconds(job: _Job) -> float | None:
        if not stepped or job.steps is None:
            return job.closing_s
        return job.steps.step_s * (1 if weak else job.steps.count)

    samples: dict[int, list[float]] = {}
    for job in jobs:
        if taken := seconds(job):
            samples.setdefault(job.ranks, []).append(taken)
    if not samples:
        raise DataError(f"{printable(str(path))} holds no job that counts; measure it again.")
    parts: dict[str, Timings] = {}
    if stepped:
        largest = [job.steps for job in jobs if job.ranks == max(samples) and job.steps is not None]
        for part in largest[0].parts:
            values = [steps.parts.get(part) for steps in largest]
            if None not in values:
                counts = [1 if weak else steps.count for steps in largest]
                parts[part] = Timings(np.array(values, float) * counts)
    asked = found.asked.get("ranks", [])
    return Side(
        path,
        f"{sum(map(len, samples.values()))} jobs on {', '.join(map(str, sorted(samples)))} ranks",
        {f"{name} {ranks_text(n)}": Timings(np.array(one)) for n, one in sorted(samples.items())},
        parts,
        settings=dict(_flat({key: value for key, value in found.asked.items() if key not in _LEFT_OUT}))
        | dict(_flat(found.environment)),
        missing=tuple(f"{name} {ranks_text(n)}" for n in asked if isinstance(n, int) and n not in samples),
    )


class _Collective(msgspec.Struct):
    bytes: Whole
    dtype: str
    gap_s: Seconds = 0.0


class _Plan(msgspec.Struct):
    collectives: list[_Collective]


class _Sample(msgspec.Struct):
    trial: Whole
    index: Whole
    size: Whole
    skew_s: Seconds
    transfer_s: Seconds
    slowest_s: Seconds


class _Emulated(msgspec.Struct):
    schema: _Head
    asked: dict[str, Any]
    environment: dict[str, Any]
    plan: _Plan
    samples: list[_Sample]


def of_emulation(path: Path) -> Side:
    """The delay of the slowest rank, size by size, and of whole steps with the wait for the last rank apart.

    Raises:
        DataError: it is no file of ``hvdkit emulate``, or holds no sample.
    """
    found = _read(path, _Emulated, "hvdkit emulate")
    if not found.samples:
        raise DataError(f"{printable(str(path))} holds no sample; measure it again.")
    planned = [one.bytes for one in found.plan.collectives]
    kind = str(found.asked.get("collective", "collective"))
    whole = {}
    for size in sorted({one.size for one in found.samples}):
        taken = np.array([one.slowest_s for one in found.samples if one.size == size])
        whole[f"{kind} of {size} bytes"] = Timings(taken, float(planned.count(size)), float(planned.count(size)))
    _, trial, counts = np.unique([one.trial for one in found.samples], return_inverse=True, return_counts=True)
    complete = counts == len(planned)
    # with fusion all collectives of a step are under way at the same time: the longest counts
    gather = np.maximum if found.asked.get("fusion") else np.add
    parts = {}
    for name, values in (
        ("", [one.slowest_s for one in found.samples]),
        ("wait for the last rank", [one.skew_s for one in found.samples]),
        ("transfer", [one.transfer_s for one in found.samples]),
    ):
        sums = np.zeros(len(counts))
        gather.at(sums, trial, values)
        if complete.any():
            parts[name] = Timings(sums[complete])
    if (steps := parts.pop("", None)) is not None:
        whole[f"step of {len(planned)} {kind}s, {bytes_text(sum(planned))}"] = steps
    gaps = sum(one.gap_s for one in found.plan.collectives)
    types = ", ".join(sorted({one.dtype for one in found.plan.collectives}))
    return Side(
        path,
        f"{len(found.samples)} collectives in {len(counts)} trials",
        whole,
        parts,
        settings=dict(_flat(found.asked)) | dict(_flat(found.environment)) | {"types": types, "gaps": f"{gaps:g} s"},
        notes=("The intervals hold the noise within each run, not what changes from run to run.",),
    )


def _read(path: Path, shape: type[T], written_by: str) -> T:
    try:
        return msgspec.json.decode(files.content(path), type=shape)
    except OSError as error:
        raise DataError(f"{printable(str(path))} cannot be read ({error.strerror}).") from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptDataError(
            f"{printable(str(path))} is not a file of '{written_by}' that this version knows: "
            f"{printable(str(error))}; copy it again, or make it again."
        ) from error


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values in words; what is inside an entry is named after it: ``packages torch``. Lists are joined."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name} {inner}", text) for inner, text in _flat(value))
        elif isinstance(value, list):
            yield name, " ".join(map(str, value))
        else:
            yield name, "none" if value is None else str(value)
