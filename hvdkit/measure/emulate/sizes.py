"""From what a user wishes to a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from msgspec.structs import replace

from hvdkit.common import json_files
from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.emulate import plan as plans
from hvdkit.measure.emulate.plan import Collective, Plan

LAYERS, REPLAY = "layers", "replay"
_SOURCES = {
    "sizes": "--sizes",
    "sweep": "--begin",
    "csv_file": "--csv",
    "model": "--model",
    "timeline": "--timeline",
    "plan_file": "--plan",
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the options say; one of the fields of ``_SOURCES`` is given.

    Attributes:
        sizes: bytes of each collective.
        sweep: the same, in the order of the replay; see ``swept``.
        csv_file: see ``size_files.of_csv``.
        model: ``MODULE:FACTORY``; ``framework``, ``per`` and ``input_shape`` are about it.
        timeline: a recording.
        plan_file: a saved plan.
        dtype: of a list or of a CSV file that has none; default float32.
        order: of a list or a CSV file: "layers" (first layer first; replayed from the last to the first) or "replay"
            (replayed as listed); default "layers".
        trials: steps; or ``samples``, ``batch_size`` and ``epochs``, which give them.
        gap_ms: milliseconds of computation before each collective; by default what the source says, else 0.
    """

    sizes: Sequence[int] | None = None
    sweep: Sequence[int] | None = None
    csv_file: Path | None = None
    model: str | None = None
    framework: str | None = None
    per: str | None = None
    input_shape: Sequence[int] | None = None
    timeline: Path | None = None
    plan_file: Path | None = None
    dtype: str | None = None
    order: str | None = None
    trials: int | None = None
    samples: int | None = None
    batch_size: int | None = None
    epochs: int | None = None
    gap_ms: float | None = None

    def given(self) -> set[str]:
        """Names of what is given."""
        return {field.name for field in fields(self) if getattr(self, field.name) is not None}


def swept(begin: int | None, end: int | None, factor: int) -> tuple[int, ...] | None:
    """Sizes from ``begin`` to at most ``end`` bytes, each ``factor`` times the one before; None without both.

    Raises:
        InvalidArgumentError: only one of them, or the end is before the begin.
    Source: nccl-tests, options -b, -e and -f.
    """
    if begin is None and end is None:
        return None
    if begin is None or end is None:
        given, missing = ("--end", "--begin") if begin is None else ("--begin", "--end")
        raise InvalidArgumentError(f"{given} is given without {missing}; give both, such as --begin 8 --end 128M.")
    if end < begin:
        raise InvalidArgumentError(f"--begin is {begin} bytes and --end {end}; expected an end that is no less.")
    found = [begin]
    while found[-1] * factor <= end:
        found.append(found[-1] * factor)
    return tuple(found)


def plan_of(wanted: Wanted) -> Plan:
    """The plan that the options ask for.

    Raises:
        InvalidArgumentError: options that do not go together, or a value that cannot be right.
        DataError: a file that cannot be used.
    """
    source = _source(wanted)
    _check_belongs(wanted, source)
    if wanted.plan_file is not None:
        plan = json_files.read(wanted.plan_file, Plan)
    else:
        collectives, words = _collectives(wanted)
        plan = Plan(tuple(collectives), source=words)
    if wanted.gap_ms is not None:
        plan = _with_gap(plan, wanted.gap_ms)
    return _with_trials(plan, wanted)


def _source(wanted: Wanted) -> str:
    found = [name for name in _SOURCES if name in wanted.given()]
    if len(found) != 1:
        what = "none is given" if not found else f"{' and '.join(_SOURCES[name] for name in found)} are given"
        raise InvalidArgumentError(
            f"The sizes come from one of {', '.join(_SOURCES.values())}; {what}. Give one, such as --sizes 4096,1024."
        )
    return found[0]


def _check_belongs(wanted: Wanted, source: str) -> None:
    """Options that would do nothing are refused."""
    about = {
        "framework": ("--framework", ("model",)),
        "per": ("--per", ("model",)),
        "input_shape": ("--input-shape", ("model",)),
        "dtype": ("--dtype", ("sizes", "sweep", "csv_file")),
        "order": ("--order", ("sizes", "csv_file")),
    }
    for name, (option, sources) in about.items():
        if name in wanted.given() and source not in sources:
            belongs = " or ".join(_SOURCES[one] for one in sources)
            raise InvalidArgumentError(
                f"{option} is given with {_SOURCES[source]}, which says that itself; {option} is for {belongs}."
            )


def _collectives(wanted: Wanted) -> tuple[list[Collective], str]:
    """The collectives that the options ask for, in the order of their replay, and their origin."""
    if wanted.model is not None:
        from hvdkit.measure.emulate.model_sizes import of_model

        return of_model(
            wanted.model,
            framework=wanted.framework or "auto",
            per=wanted.per or "parameter",
            input_shape=wanted.input_shape,
        )
    if wanted.timeline is not None:
        from hvdkit.measure.emulate.timeline_sizes import of_timeline

        return of_timeline(wanted.timeline)
    from hvdkit.measure.emulate import size_files

    if wanted.sweep is not None:
        return size_files.of_list(wanted.sweep, wanted.dtype or "float32"), "sizes from the least to the greatest"
    if wanted.csv_file is not None:
        found, what = size_files.of_csv(wanted.csv_file, wanted.dtype), wanted.csv_file.name
    else:
        found, what = size_files.of_list(wanted.sizes or (), wanted.dtype or "float32"), "a list of sizes"
    if (wanted.order or LAYERS) == LAYERS:
        return found[::-1], f"{what}, layers from the first to the last, replayed from the last to the first"
    return found, f"{what}, in the order of the list"


def _with_gap(plan: Plan, gap_ms: float) -> Plan:
    if not 0 <= gap_ms < math.inf:
        raise InvalidArgumentError(f"--gap-ms is {gap_ms}; expected milliseconds of at least 0.")
    return replace(plan, collectives=tuple(replace(one, gap_s=gap_ms / 1000) for one in plan.collectives))


def _with_trials(plan: Plan, wanted: Wanted) -> Plan:
    """The plan with the number of steps that ``--trials``, or ``--samples`` and what belongs to it, ask for."""
    counted = [name for name in ("samples", "batch_size", "epochs") if name in wanted.given()]
    if wanted.trials is not None:
        if counted:
            raise InvalidArgumentError(
                "--trials is given and --samples, --batch-size or --epochs too, which give the trials; choose one."
            )
        return replace(plan, trials=wanted.trials, samples=None, batch_size=None, epochs=None, batch_count=None)
    if not counted:
        return plan
    if wanted.samples is None or wanted.batch_size is None:
        raise InvalidArgumentError("The trials follow from --samples and --batch-size (and --epochs); give both.")
    epochs = 1 if wanted.epochs is None else wanted.epochs
    count = plans.batches(wanted.samples, wanted.batch_size)
    return replace(
        plan,
        trials=count * epochs,
        samples=wanted.samples,
        batch_size=wanted.batch_size,
        epochs=epochs,
        batch_count=count,
    )
