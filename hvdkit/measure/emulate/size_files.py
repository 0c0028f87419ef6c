"""Sizes from a list and from a CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdkit.common import files
from hvdkit.common.commands import shortened
from hvdkit.errors import CorruptDataError, DataError, DataNotFoundError, InvalidArgumentError
from hvdkit.measure.emulate.plan import Collective, elements_of

COLUMNS = ("name", "bytes", "elements", "dtype", "gap_ms")
"""What a CSV file may say of each collective; it needs ``bytes`` or ``elements``."""
_COLUMNS = ", ".join(COLUMNS)
_DIGITS = 16


def of_list(sizes: Sequence[int], dtype: str) -> list[Collective]:
    """One collective per size, in the order of the list.

    Args:
        sizes: in bytes.
        dtype: the type of all.
    Raises:
        InvalidArgumentError: a size that is not a whole number of elements.
    """
    return [
        Collective(f"layer{number}", elements_of(size, dtype, f"layer{number}"), dtype)
        for number, size in enumerate(sizes, start=1)
    ]


def of_csv(path: Path, dtype: str | None) -> list[Collective]:
    """The collectives of a CSV file, in its order.

    The first line names the columns, of ``COLUMNS``; without such a line the file has one column, of bytes. Empty lines
    and lines that start with # are skipped.

    Args:
        path: of the file.
        dtype: the type where the file has none; default float32.
    Raises:
        DataNotFoundError: there is no such file.
        DataError: it cannot be read, or a line makes no sense.
        InvalidArgumentError: ``dtype`` is given and the file has types too.
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
