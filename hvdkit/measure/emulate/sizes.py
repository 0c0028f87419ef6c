"""From what a user wishes to a plan: the sizes of a list, of a CSV file, of a model or of a timeline."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from hvdkit.common import files, json_files
from hvdkit.common.commands import shortened
from hvdkit.errors import CorruptDataError, DataError, DataNotFoundError, InvalidArgumentError
from hvdkit.measure.emulate import plan as plans
from hvdkit.measure.emulate.plan import Collective, ReplayPlan, elements_of
from hvdkit.measure.model_factory import ask

LAYERS, REPLAY = "layers", "replay"
FRAMEWORKS = ("auto", "torch", "keras", "tensorflow")
PER = ("parameter", "layer")
COLUMNS = ("name", "bytes", "elements", "dtype", "gap_ms")
"""What a CSV file may say of each collective; it needs ``bytes`` or ``elements``."""
_COLUMNS = ", ".join(COLUMNS)
_DIGITS = 16
_SOURCES = {
    "sizes": "--sizes",
    "sweep": "--begin",
    "csv_file": "--csv",
    "model": "--model",
    "timeline": "--timeline",
    "plan_file": "--plan",
}


Wanted = Mapping[str, Any]
"""What is given of ``sizes_cli.PLAN_OPTIONS``, by name; and ``sweep``, the sizes of ``swept``."""


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


def plan_of(begin: int | None, end: int | None, factor: int | None, **options: Any) -> ReplayPlan:
    """The plan that options ask for.

    Args:
        begin, end, factor: see ``swept``.
        options: the others of ``sizes_cli.PLAN_OPTIONS``, by name; None where one is not given.
    Raises:
        InvalidArgumentError: options that do not go together, or a value that cannot be right.
        DataError: a file that cannot be used.
    """
    options["sweep"] = swept(begin, end, factor or 2)
    if factor is not None and options["sweep"] is None:
        raise InvalidArgumentError("--factor is given without --begin and --end, between which it is; give these, too.")
    wanted = {name: value for name, value in options.items() if value is not None}
    source = _source(wanted)
    _check_belongs(wanted, source)
    if source == "plan_file":
        plan = json_files.read(wanted["plan_file"], ReplayPlan)
    else:
        collectives, words = _collectives(wanted, source)
        plan = ReplayPlan(tuple(collectives), source=words)
    if "gap_ms" in wanted:
        gap_s = wanted["gap_ms"] / 1000
        plan = replace(plan, collectives=tuple(replace(one, gap_s=gap_s) for one in plan.collectives))
    return _with_trials(plan, wanted)


def _source(wanted: Wanted) -> str:
    found = [name for name in _SOURCES if name in wanted]
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
        if name in wanted and source not in sources:
            belongs = " or ".join(_SOURCES[one] for one in sources)
            raise InvalidArgumentError(
                f"{option} is given with {_SOURCES[source]}, which says that itself; {option} is for {belongs}."
            )


def _collectives(wanted: Wanted, source: str) -> tuple[list[Collective], str]:
    """The collectives that the options ask for, in the order of their replay, and their origin."""
    if source == "model":
        about = {name: wanted[name] for name in ("framework", "per", "input_shape") if name in wanted}
        return of_model(wanted["model"], **about)
    if source == "timeline":
        from hvdkit.measure.emulate.timeline_sizes import of_timeline

        return of_timeline(wanted["timeline"])
    if source == "csv_file":
        found, what = _of_csv(wanted["csv_file"], wanted.get("dtype")), wanted["csv_file"].name
    else:
        dtype, what = wanted.get("dtype", "float32"), "a list of sizes"
        named = [(f"layer{number}", size) for number, size in enumerate(wanted[source], start=1)]
        found = [Collective(name, elements_of(size, dtype, name), dtype) for name, size in named]
    if source == "sweep":
        return found, "sizes from the least to the greatest"
    if wanted.get("order", LAYERS) == LAYERS:
        return found[::-1], f"{what}, layers from the first to the last, replayed from the last to the first"
    return found, f"{what}, in the order of the list"


def of_model(
    factory: str, *, framework: str = "auto", per: str = "parameter", input_shape: Sequence[int] | None = None
) -> tuple[list[Collective], str]:
    """The gradients of a model, in the order in which they are ready, and in words how that order was found.

    The model is made in a process of its own, so that no framework is loaded here and whatever the user's module does
    stays there.

    Args:
        factory: ``MODULE:FACTORY`` or ``FILE.py:FACTORY``. FACTORY is called without arguments (a model is taken as it
            is) and returns a model, or ``(model, inputs)``, or ``(model, inputs, loss)``: inputs is one tensor, a tuple
            or list of them, or a dict of keyword arguments; loss a function of the model's output.
        framework: of ``FRAMEWORKS``; "auto" finds out.
        per: one collective per "parameter", or one per "layer" (the parameters of one module together).
        input_shape: of one input of float32 zeros, batch first, where FACTORY gives none.
    Returns:
        (collectives, source). With inputs the order is that of a real backward, but for Keras on JAX. Else it is the
        reverse of the order in which the model lists its parameters; source says which.
    Raises:
        InvalidArgumentError: FACTORY cannot be found, fails, or gives no model.
        DataError: the process that makes the model ended without an answer.
    """
    process = "hvdkit.measure.emulate.model_process"
    answer = ask(process, factory, framework=framework, per=per, input_shape=input_shape)
    name = factory.rpartition(":")[2]
    collectives = [Collective(one["name"], one["elements"], one["dtype"]) for one in answer["gradients"]]
    return collectives, f"model {name} ({answer['framework']}), per {per}, {answer['order']}"


def _with_trials(plan: ReplayPlan, wanted: Wanted) -> ReplayPlan:
    """The plan with the number of steps that ``--trials``, or ``--samples`` and what belongs to it, ask for."""
    counted = [name for name in ("samples", "batch_size", "epochs") if name in wanted]
    if "trials" in wanted:
        if counted:
            raise InvalidArgumentError(
                "--trials is given and --samples, --batch-size or --epochs too, which give the trials; choose one."
            )
        return replace(plan, trials=wanted["trials"], samples=None, batch_size=None, epochs=None, batch_count=None)
    if not counted:
        return plan
    if "samples" not in wanted or "batch_size" not in wanted:
        raise InvalidArgumentError("The trials follow from --samples and --batch-size (and --epochs); give both.")
    samples, batch_size, epochs = wanted["samples"], wanted["batch_size"], wanted.get("epochs", 1)
    count = plans.batches(samples, batch_size)
    about = {"samples": samples, "batch_size": batch_size, "epochs": epochs, "batch_count": count}
    return replace(plan, trials=count * epochs, **about)


def _of_csv(path: Path, dtype: str | None) -> list[Collective]:
    """The collectives of a CSV file, in its order; ``dtype``: where it has no types, default float32.

    The first line names the columns, of ``COLUMNS``; without such a line the file has one column, of bytes. Empty lines
    and lines that start with # are skipped.
    """
    lines = _lines(path)
    if not lines:
        raise CorruptDataError(f"{path} has no line; expected a size in bytes per line, or columns {_COLUMNS}.")
    header = [word.lower() for word in lines[0][1]]
    if header and not _is_number(header[0]) and not header[0][:1].isdigit():
        _check_header(path, header)
        lines = lines[1:]
    else:
        header = ["bytes"]
    if dtype is not None and "dtype" in header:
        raise InvalidArgumentError(f"--dtype is {dtype} and {path} has a column dtype; give one of the two.")
    if not lines:
        raise CorruptDataError(f"{path} names columns and has no line after that; expected one per collective.")
    return [
        _collective(f"line {number} of {path}", header, words, f"layer{index}", dtype or "float32")
        for index, (number, words) in enumerate(lines, start=1)
    ]


def _lines(path: Path) -> list[tuple[int, list[str]]]:
    """Number and words of each line that says something."""
    try:
        reader = csv.reader(io.StringIO(files.text(path, encoding="utf-8-sig"), newline=""))
        found = [(reader.line_num, [word.strip() for word in words]) for words in reader]
    except FileNotFoundError as error:
        raise DataNotFoundError(f"No file at {str(path)!r}; expected a CSV file with a size per line.") from error
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"Cannot read {str(path)!r} as CSV: {error}.") from error
    return [(number, words) for number, words in found if any(words) and not words[0].startswith("#")]


def _check_header(path: Path, header: list[str]) -> None:
    unknown = [name for name in header if name not in COLUMNS]
    if unknown or len(set(header)) < len(header):
        raise CorruptDataError(
            f"The columns of {path} are {shortened(', '.join(header))}; expected some of {_COLUMNS}."
        )
    if ("bytes" in header) == ("elements" in header):
        raise CorruptDataError(f"The columns of {path} are {', '.join(header)}; expected one of bytes and elements.")


def _collective(where: str, header: list[str], words: list[str], name: str, dtype: str) -> Collective:
    if len(words) != len(header):
        raise CorruptDataError(
            f"{where} has {len(words)} columns; expected {len(header)}: {', '.join(header)}. Without a first line that "
            f"names columns ({_COLUMNS}), a line is one size in bytes."
        )
    row = dict(zip(header, words, strict=True))
    name = row.get("name") or name
    own = row.get("dtype") or dtype
    try:
        if "elements" in row:
            return Collective(name, _whole(row["elements"], "elements"), own, _gap(row))
        return Collective(name, elements_of(_whole(row["bytes"], "bytes"), own, name), own, _gap(row))
    except ValueError as error:
        raise CorruptDataError(f"{where}: {error}") from error


def _whole(word: str, what: str) -> int:
    digits = word.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < _DIGITS):
        raise ValueError(f"{what} is {word!r}; expected a whole number without a unit or separators, such as 803840.")
    return int(word)


def _gap(row: Mapping[str, str]) -> float:
    text = row.get("gap_ms", "")
    if text and not _is_number(text):
        raise ValueError(f"gap_ms is {text!r}; expected milliseconds, such as 2.5.")
    return float(text) / 1000 if text else 0.0


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
