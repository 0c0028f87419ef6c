"""Is the data set the same on every rank? The lists, arrays and tables that it holds are compared; no sample is read.

Ranks with other samples behind the same indices (an unseeded shuffle or split, files in the order of each host's
directory) train on some samples twice and on others never. Reading samples would not tell: they may be augmented, and a
file that the main process opens is shared by the workers that it forks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import decimal
import dis
import enum
import os
import sys
import zlib
from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import PurePath
from types import FunctionType
from typing import Any, NoReturn

import numpy as np

from hvdkit.core.communicator import Communicator
from hvdkit.errors import AgreementError
from hvdkit.steps.agreement import digest
from hvdkit.steps.launchers import is_elastic
from hvdkit.steps.topology import Topology

MAKE_ALIKE = (
    "sort what is listed, sorted(os.listdir(path)), and seed alike what is drawn: random.Random(0).shuffle(files), "
    "np.random.default_rng(0), torch.manual_seed(0), random_state=0, generator=torch.Generator().manual_seed(0). Give "
    "every rank the whole data set, not this rank's part"
)
_ENTRIES, _FEW = 2**16, 2**8
"""Of a longer list or array so many entries are compared, evenly spaced; of a table, or of arrays on a device, few."""
_BYTES, _ENTRY_BYTES, _TEXT = 64 * 2**20, 2**20, 2**12
"""The most that is read of an array, of one entry of it, and of a text."""
_LEAST = 16
"""Entries of an array that are compared, however long they are."""
_CLOSE = 1e-4
"""Of the largest number: what was computed before may be rounded differently on two hosts."""
_DEEPEST = 6
_TEXTS = (str, bytes, PurePath)
_SCALARS = (bool, int, float, complex, enum.Enum, datetime.date, datetime.time, datetime.timedelta, decimal.Decimal)
_TABLES = {"pandas.DataFrame", "pandas.Series", "polars.DataFrame", "pyarrow.Table", "datasets.Dataset"}


class _OpaqueError(Exception):
    """An object that holds no plain values; nothing is compared where it stands."""


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """A list, array or table that a data set holds."""

    name: str  # where it is, such as "Images.files"
    kind: str  # its length, and of an array type and shape
    positions: list[int]  # of the entries that are compared, in order
    entry: Callable[[int], Any]  # from a position to the value there

    def digests(self) -> Any:
        """Of the entries at ``positions``, int64 (m,).

        Raises:
            _OpaqueError: they have no values, or not yet.
        """
        entries = [self.entry(position) for position in self.positions]
        if any(entry is None for entry in entries):
            raise _OpaqueError
        paths = [text for text in _texts_in(entries) if os.sep in text]
        # The directory that all are in may be each rank's own.
        common = os.path.commonprefix([min(paths), max(paths)]) if paths else ""  # noqa: RUF071
        common = common.rpartition(os.sep)[0]
        return np.array([zlib.crc32(_encoded(entry, common)) for entry in entries], dtype=np.int64)

    def numbers(self, first: int) -> Any:
        """Those of some entries from the ``first`` position on, float64; None where these are no floating numbers."""
        some = _evenly(len(self.positions) - first, _LEAST)
        rows = [_numpy(self.entry(self.positions[first + one])) for one in some]
        if any(row is None or row.dtype.kind != "f" for row in rows):
            return None
        return np.nan_to_num(np.stack([row.reshape(-1)[:_ENTRIES] for row in rows]).astype(np.float64))


def require_same_data(ranks: Communicator, world: Topology, dataset: Any, fix: str = MAKE_ALIKE) -> None:
    """Raise an AgreementError on every rank where the ranks' data sets hold different entries; a collective.

    Nothing is compared where other ranks may join later (Horovod Elastic), or where ``world`` is not that of all ranks.

    Args:
        dataset: a data set, a sampler, or a tuple of arrays.
        fix: how to make it the same.
    """
    if world.size == 1 or is_elastic() or ranks.size() != world.size:
        return
    columns: dict[int, Any] = ranks.together(lambda: {_checksum(one[0].name): one for one in _held(dataset)})
    mine = [(name, digest(digests)) for name, (_, digests) in columns.items()]
    tables = ranks.allgather(np.array(mine, dtype=np.int64).reshape(-1, 2), "hvdkit.shard")
    everyone = [dict(table.tolist()) for table in tables]
    for name in everyone[0]:  # in one order on all ranks; what only some of them hold is a note of theirs
        if all(name in one for one in everyone) and len({one[name] for one in everyone}) > 1:
            column, digests = columns[name]
            _compare(ranks, column, digests, fix)


def fingerprint(sample: Any) -> int:
    """A checksum of a sample, > 0; 0 where it holds something else than plain values and arrays."""
    try:
        return zlib.crc32(_encoded(sample, "")) or 1
    except _OpaqueError:
        return 0


def _compare(ranks: Communicator, column: Column, digests: Any, fix: str) -> None:
    """Raise for the first entry that differs, unless it is only rounded differently."""
    kinds = ranks.gather_texts(column.kind, "hvdkit.shard")
    if len(set(kinds)) > 1:
        _raise_different(column.name, kinds, fix)
    of_root = ranks.broadcast(digests, 0, "hvdkit.shard")
    differs = np.append(np.flatnonzero(digests != of_root), len(digests))  # the last one: on this rank none does
    first = int(ranks.allreduce(differs[:1], "hvdkit.shard", op="min")[0])
    numbers = column.numbers(first)
    if numbers is not None:
        sizes = ranks.allgather(np.abs(numbers).max(initial=0.0).reshape(1).view(np.int64), "hvdkit.shard")
        if ranks.largest_difference(numbers) <= _CLOSE * np.concatenate(sizes).view(np.float64).max():
            return
    position = column.positions[first]
    shown = ranks.gather_texts(_shown(column.entry(position)), "hvdkit.shard")
    if len(set(shown)) == 1:  # they differ behind what is shown
        shown = ranks.gather_texts(f"{shown[0]} (checksum {digests[first]})", "hvdkit.shard")
    _raise_different(f"{column.name}[{position}]", shown, fix)


def _raise_different(what: str, shown: list[str], fix: str) -> NoReturn:
    other = next(rank for rank, text in enumerate(shown) if text != shown[0])
    raise AgreementError(
        f"the ranks' data sets differ: {what} is {shown[0]} on rank 0 and {shown[other]} on rank {other}, so that some "
        f"samples would be seen twice and others by nobody; {fix}."
    )


def _shown(value: Any) -> str:
    array = _numpy(value)
    text = repr(value)
    if array is not None:
        text = np.array2string(array.reshape(-1)[:6] if array.ndim else array, precision=6, separator=", ")
    return text if len(text) <= 80 else f"{text[:77]}..."


# What a data set holds ------------------------------------------------------------------------------------------------


def _held(dataset: Any) -> Iterator[tuple[Column, Any]]:
    """What can be compared of a data set, with the digests of its entries and its kind."""
    name = type(dataset).__name__ if hasattr(dataset, "__dict__") else "data"
    samples = _length(dataset)
    for column in [Column(f"len({name})", str(samples), [], str), *_columns(name, dataset, samples or 0, set(), 0)]:
        with contextlib.suppress(_OpaqueError):
            digests = column.digests()
            yield column, np.append(digests, _checksum(column.kind))


def _checksum(text: str) -> int:
    return zlib.crc32(text.encode())


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except Exception:  # what any object of the user's raises that has no length, or none yet
        return None


def _columns(name: str, value: Any, samples: int, seen: set[int], depth: int) -> Iterator[Column]:
    """The lists, arrays and tables in a value, which is part of a data set of so many samples.

    Shorter ones may be anything (devices, times, means): of them, only texts are compared, such as names of files.
    """
    if id(value) in seen or depth > _DEEPEST or isinstance(value, (*_TEXTS, *_SCALARS, type)):
        return
    seen.add(id(value))
    length = _length(value)
    parts: dict[str, Any] = {}
    if _is_array(value):
        if length and length >= samples:
            yield _of_array(name, value)
    elif _is_table(value):
        yield _of_table(name, value)
    elif isinstance(value, (dict, UserDict)):
        if length == samples and 0 in value and samples - 1 in value:
            yield _of_entries(name, value)
        parts = {f"[{key!r}]": part for key, part in value.items() if _length(part) == samples}
    elif isinstance(value, (list, tuple)) and value:
        if isinstance(value[0], _TEXTS) or (
            len(value) >= samples and not (type(value) is tuple and _is_array(value[0]))
        ):
            yield _of_entries(name, value)
        else:
            parts = {f"[{number}]": part for number, part in enumerate(value[:_FEW])}
    elif hasattr(type(value), "__getitem__") or not depth:
        samples = samples if length is None else length
        inside = {**_variables_around(type(value)), **getattr(value, "__dict__", {})}
        parts = {f".{part}": inner for part, inner in inside.items()}
    for part, inner in parts.items():
        yield from _columns(f"{name}{part}", inner, samples, seen, depth + 1)


def _variables_around(kind: type) -> dict[str, Any]:
    """Lists, arrays and tables around a class of the user's own that it uses: ``files`` in ``load(files[index])``."""
    found: dict[str, Any] = {}
    bases = [base for base in kind.__mro__ if base.__module__.split(".")[0] not in ("builtins", "torch", "typing")]
    functions = [one for base in bases for one in vars(base).values() if isinstance(one, FunctionType)]
    for function in functions:  # becomes longer by the functions that they call
        used = {step.argval for step in dis.get_instructions(function) if step.opname == "LOAD_GLOBAL"}
        around = {name: function.__globals__[name] for name in used if name in function.__globals__}
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # nothing is in the cell yet
                around[name] = cell.cell_contents
        called = [one for one in around.values() if isinstance(one, FunctionType)]
        functions += [one for one in called if one.__module__ == kind.__module__ and one not in functions]
        found.update(around)
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, (list, tuple)) or _is_array(value) or _is_table(value)
    }


def _of_entries(name: str, value: Any) -> Column:
    long = any(map(_is_array, value[0] if isinstance(value[0], (list, tuple)) else [value[0]]))
    return Column(name, f"{len(value)} entries", _evenly(len(value), _FEW if long else _ENTRIES), value.__getitem__)


def _of_array(name: str, value: Any) -> Column:
    on_host = isinstance(value, np.ndarray) or str(getattr(value, "device", "")) == "cpu"
    rows = _numpy(value) if on_host and value.dtype != object else value
    row_bytes = int(np.prod(tuple(value.shape)[1:])) * getattr(value.dtype, "itemsize", 8)
    most = min(_ENTRIES if on_host else _FEW, max(_LEAST, _BYTES // max(1, min(row_bytes, _ENTRY_BYTES))))
    kind = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return Column(name, kind, _evenly(len(value), most), lambda position: rows[position])


def _of_table(name: str, value: Any) -> Column:
    """Of HuggingFace's ``Dataset``: as it lies in Arrow, before anything that is done to each sample."""
    table = value.with_format("arrow") if hasattr(value, "with_format") else value

    def row(position: int) -> Any:
        if hasattr(table, "iloc"):
            cells = np.asarray(table.iloc[position], dtype=object).reshape(-1).tolist()
            return [str(cell) if type(cell).__module__.startswith("pandas") else cell for cell in cells]
        one = table[position : position + 1]
        return (one.rows() if hasattr(one, "rows") else one.to_pylist())[0]

    return Column(name, f"{len(value)} rows", _evenly(len(value), _FEW), row)


def _evenly(length: int, most: int) -> list[int]:
    return [] if length < 1 else sorted({int(one) for one in np.linspace(0, length - 1, min(length, most))})


def _is_table(value: Any) -> bool:
    return not _TABLES.isdisjoint(f"{one.__module__.split('.')[0]}.{one.__name__}" for one in type(value).__mro__)


def _is_array(value: Any) -> bool:
    """Of NumPy, PyTorch, TensorFlow or JAX, and dense."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        odd = value.is_nested or value.is_quantized or value.is_meta or value.layout is not torch.strided
        return type(value) in (torch.Tensor, torch.nn.Parameter) and not odd
    module = type(value).__module__.split(".")[0]
    return isinstance(value, np.ndarray) or (module in ("jaxlib", "tensorflow") and hasattr(value, "__array__"))


def _numpy(value: Any) -> Any:
    """An array or a number of one as NumPy's; None of anything else."""
    if isinstance(value, np.generic) or not _is_array(value):
        return np.asarray(value) if isinstance(value, np.generic) else None
    if isinstance(value, np.ndarray) or not hasattr(value, "detach"):
        return None if value.dtype == object else np.asarray(value)
    torch, tensor = sys.modules["torch"], value.detach().cpu().resolve_conj().resolve_neg()
    if tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32, torch.float64):
        tensor = tensor.view(torch.int16 if tensor.itemsize == 2 else torch.uint8)  # NumPy has no bfloat16
    return tensor.numpy()


def _texts_in(entries: Any) -> Iterator[str]:
    for entry in entries:
        if isinstance(entry, (str, PurePath)):
            yield os.fspath(entry)
        elif isinstance(entry, (list, tuple, dict)):
            yield from _texts_in(entry.values() if isinstance(entry, dict) else entry)


def _encoded(value: Any, common: str, depth: int = 0) -> bytes:
    """A value as bytes, the same on every rank where it is the same.

    Args:
        common: the directory that is left out of paths.
    Raises:
        _OpaqueError: an object that is none of the plain ones.
    """
    array = _numpy(value)
    if array is not None:
        row = np.ascontiguousarray(array).reshape(-1)
        return f"{array.dtype.str}{array.shape}".encode() + row[: max(1, _ENTRY_BYTES // array.itemsize)].tobytes()
    if isinstance(value, _TEXTS):
        text = value if isinstance(value, bytes) else os.fspath(value).removeprefix(common).encode(errors="replace")
        return text[:_TEXT]
    if value is None or isinstance(value, _SCALARS):
        return repr(value).encode()
    if isinstance(value, (dict, UserDict)):
        value = sorted(value.items(), key=str)
    elif isinstance(value, (set, frozenset)):
        value = sorted(value, key=str)
    elif not isinstance(value, (list, tuple)):
        value = sorted(getattr(value, "__dict__", {}).items()) or None
    if value is None or callable(value) or depth > _DEEPEST:
        raise _OpaqueError
    return b"\0".join([b"%d" % len(value), *(_encoded(part, common, depth + 1) for part in value)])
