"""The JSON that the tools write and read: one head, one way to check it, one sentence for what is wrong with it.

A kind of JSON is a class, from which docs/json.md is made.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

import hvdkit
from hvdkit.common import files
from hvdkit.common.units import printable
from hvdkit.errors import DataError, DataNotFoundError, HvdkitError

Seconds = Annotated[float, msgspec.Meta(ge=0)]
"""A time, or another number that is not negative; finite, as every number in JSON."""
Whole = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
_SHOWN = 60
"""Characters of a wrong value that are shown."""


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a document is made of; a field that it does not know is refused."""


class Document(Part, frozen=True):
    """One kind of JSON; the head is written before its fields.

    Attributes:
        kind: its name in the head.
        written_by: the command.
        schema: version of its fields: greater when a field is gone or means something else.
        fix: what to do about a file that is refused.
        times: names of fields, on every level, that hold times in another unit; ``_s`` is added to them.
        unit_s: seconds of that unit.

    The fields of a field ``found`` stand beside the others.
    """

    kind: ClassVar[str]
    written_by: ClassVar[str]
    schema: ClassVar[int] = 1
    fix: ClassVar[str] = "copy it again, or make it again"
    times: ClassVar[frozenset[str]] = frozenset()
    unit_s: ClassVar[float] = 1.0


T = TypeVar("T", bound=Document)


def head(kind: type[Document]) -> dict[str, Any]:
    """What every JSON object of hvdkit begins with."""
    return {"hvdkit": hvdkit.__version__, "kind": kind.kind, "schema": kind.schema}


def encode(document: Document, indent: int = 2) -> str:
    """The document as text, ending in a newline; what is no number (an endless time) is null."""
    names = zip(document.__struct_encode_fields__, document.__struct_fields__, strict=True)
    fields = in_seconds({written: getattr(document, name) for written, name in names}, document.times, document.unit_s)
    fields = {**fields.pop("found", {}), **fields}
    text = msgspec.json.encode({**head(type(document)), **fields}, enc_hook=_plain)
    return msgspec.json.format(text, indent=indent).decode() + "\n"


def in_seconds(value: Any, times: frozenset[str], unit_s: float, *, scaled: bool = False) -> Any:
    """Plain values without arrays, with times in seconds.

    Args:
        value: made of dataclasses, with the properties that they name in ``also``, dicts, lists and plain values.
        times: names of fields that are times; ``_s`` takes the place of a unit at their end, or is added.
        unit_s: seconds of their unit.
        scaled: ``value`` is such a time: all fractions in it are.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        value = {name: getattr(value, name) for name in (*names, *getattr(value, "also", ()))}
    if isinstance(value, Mapping):
        return {
            name_in_seconds(name) if name in times else name: in_seconds(
                float(inner) if name in times and isinstance(inner, int) else inner,
                times,
                unit_s,
                scaled=scaled or name in times,
            )
            for name, inner in value.items()
            if not getattr(inner, "ndim", 0)
        }
    if isinstance(value, list | tuple):
        return [in_seconds(one, times, unit_s, scaled=scaled) for one in value]
    return value * unit_s if scaled and isinstance(value, float) else value


def name_in_seconds(name: str) -> str:
    """``self_ms`` and ``duration`` become ``self_s`` and ``duration_s``."""
    return f"{name.removesuffix('_ms').removesuffix('_us')}_s"


def plain(part: Part) -> Any:
    """A part as the dicts, lists and other plain values that a JSON file would have."""
    return msgspec.json.decode(msgspec.json.encode(part, enc_hook=_plain))


def _plain(value: Any) -> Any:
    """What msgspec does not know: paths, and NumPy's numbers."""
    return str(value) if isinstance(value, Path) else value.item()


def write(path: Path, document: Document) -> None:
    """Write a file that ``read`` takes; an older one stays until the new one is complete.

    Raises:
        DataError, InvalidArgumentError: it cannot be written.
    """
    text = encode(document)
    decode(text, type(document), str(path))
    with files.replacing(path) as file:
        file.write(text.encode())


def read(path: Path, kind: type[T]) -> T:
    """Read a file of ``write``; DataError where it cannot be read, or is something else."""
    try:
        text = files.content(path)
    except FileNotFoundError as problem:
        raise DataNotFoundError(f"No file at {str(path)!r}; expected one that '{kind.written_by}' wrote.") from problem
    except OSError as problem:
        raise DataError(f"{path} cannot be read ({problem.strerror}); give a file of '{kind.written_by}'.") from problem
    return decode(text, kind, str(path))


def decode(text: str | bytes, kind: type[T], name: str, error: type[HvdkitError] = DataError) -> T:
    """The document of a text; ``error`` where it is something else, and ``name`` says where it is from."""

    def wrong(problem: str) -> HvdkitError:
        return error(
            f"{name} is not a file of '{kind.written_by}' ({kind.kind}, schema {kind.schema}): {printable(problem)}; "
            f"{kind.fix}."
        )

    content = None
    try:
        content = msgspec.json.decode(text)
        if not isinstance(content, dict):
            raise wrong("it is no JSON object")
        version, named, schema = (content.pop(name, None) for name in ("hvdkit", "kind", "schema"))
        if named != kind.kind:
            raise wrong("it does not say what it is" if named is None else f"it says that it is {named!r}")
        if type(schema) is not int or schema < 1:
            raise wrong(f"its schema is {schema!r}, expected a whole number of at least 1")
        if schema != kind.schema:
            other = f"hvdkit {version} wrote it with schema {schema}, which this version does not know; use that one"
            raise wrong(other)
        return msgspec.convert(content, kind, str_keys=True)
    except msgspec.ValidationError as problem:
        raise wrong(_sentence(str(problem), content)) from problem
    except RecursionError as problem:
        raise wrong("it is nested too deeply") from problem
    except ValueError as problem:  # malformed JSON, or bytes that are no UTF-8
        raise wrong(str(problem)) from problem


def _sentence(problem: str, content: Any) -> str:
    """What msgspec found, with the value that is at that place.

    ``Expected `float` >= 0.0 - at `$.jobs[0].wall_s` `` becomes ``jobs[0].wall_s is -1: expected `float` >= 0.0``.
    """
    what, _, place = problem.partition(" - at `$")
    what, place = what[0].lower() + what[1:], place.rstrip("`").removesuffix("[...]").lstrip(".")
    if "[...]" in place or content is None:
        return f"{place}: {what}" if place else what
    for name, index in re.findall(r"(\w+)|\[(\d+)\]", place):
        content = content[int(index)] if index else content[name]
    if isinstance(content, dict | list):
        return f"{place}: {what}" if place else what
    shown = msgspec.json.encode(content).decode()
    return f"{place} is {shown if len(shown) <= _SHOWN else f'{shown[:_SHOWN]}...'}: {what}"
