"""How the samples of an array in an HDF5 file are read: through a memory map, or in as few reads as there can be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.errors import CorruptDataError

Array = NDArray[Any]
Reader = Callable[[NDArray[np.int64]], Array]
"""Sample indices, in any order, to the samples, (m, ...), in memory of their own."""
_MOST_CHUNKS = 1 << 20
"""More are not listed: each process does that when it opens the file."""


def reader_of(array: Any, path: Path, *, memory_map: bool) -> Reader:
    """The fastest way to the samples that the layout of the array allows."""
    found = (_in_one_piece(array, path) or _in_chunks(array, path)) if memory_map and _as_in_memory(array) else None
    if found is not None:
        return found
    # What is not filtered can be read a sample at a time; other chunks are read and decompressed as a whole anyway.
    whole_chunks = array.chunks and (_filters(array) or array.chunks[1:] != array.shape[1:])
    rows = array.chunks[0] if whole_chunks else 1
    return lambda indices: _read_runs(array, indices, rows)


def _as_in_memory(array: Any) -> bool:
    """Whether the bytes in the file are those of a NumPy array: h5py's own type for it, with nothing to convert."""
    from h5py import h5t  # an extra, which whoever opened the file has

    elsewhere = array.is_virtual or array.external or 0 in array.shape
    if elsewhere or array.dtype.kind not in "biufc" or _filters(array):
        return False
    return bool(array.id.get_type() == h5t.py_create(array.dtype, logical=True))


def _filters(array: Any) -> int:
    return int(array.id.get_create_plist().get_nfilters())


def _in_one_piece(array: Any, path: Path) -> Reader | None:
    """A look into the file, mapped into memory; None where the array lies in several pieces, or nowhere yet."""
    offset = array.id.get_offset()
    if array.chunks is not None or offset is None:
        return None
    _require_bytes(path, offset + math.prod(array.shape) * array.dtype.itemsize, array)
    mapped = np.asarray(np.memmap(path, array.dtype, "r", offset, array.shape))
    native = mapped.dtype.newbyteorder("=")
    return lambda indices: mapped[indices].astype(native, copy=False)


def _in_chunks(array: Any, path: Path) -> Reader | None:
    """The same where every chunk holds whole samples; None where samples are cut, or a chunk was never written."""
    starts = _chunk_starts(array)
    if starts is None:
        return None
    rows, shape, dtype = array.chunks[0], array.shape[1:], array.dtype
    size = math.prod(shape) * dtype.itemsize
    _require_bytes(path, int(starts.max()) + rows * size, array)
    mapped = np.asarray(np.memmap(path, np.uint8, "r"))

    def read(indices: NDArray[np.int64]) -> Array:
        found = np.empty((len(indices), size), np.uint8)
        places = starts[indices // rows] + indices % rows * size
        for sample, place in zip(found, places.tolist(), strict=True):
            sample[:] = mapped[place : place + size]
        values = found.view(dtype).reshape(len(indices), *shape)
        native: Array = values.astype(dtype.newbyteorder("="), copy=False)
        return native

    return read


def _chunk_starts(array: Any) -> NDArray[np.int64] | None:
    """Where in the file each chunk begins, in bytes, by the samples in it; None where there is no such table."""
    # Versions of the HDF5 library differ in whether these places count a user block.
    if array.chunks is None or array.chunks[1:] != array.shape[1:] or array.file.userblock_size:
        return None
    count = -(-array.shape[0] // array.chunks[0])
    if count > _MOST_CHUNKS or not hasattr(array.id, "chunk_iter") or array.id.get_num_chunks() != count:
        return None
    starts = np.full(count, -1, np.int64)

    def note(chunk: Any) -> None:
        starts[chunk.chunk_offset[0] // array.chunks[0]] = chunk.byte_offset

    array.id.chunk_iter(note)
    return starts if starts.min() >= 0 else None


def _require_bytes(path: Path, wanted: int, array: Any) -> None:
    if path.stat().st_size < wanted:
        raise CorruptDataError(f"{str(path)!r} is shorter than its array {array.name} says; write it again.")


def _read_runs(array: Any, wanted: NDArray[np.int64], chunk_rows: int) -> Array:
    """One read for each chunk that holds a sample, from the first sample in it to the last; or for each run."""
    order = np.argsort(wanted, kind="stable")
    ordered = wanted[order]
    apart = np.diff(ordered // chunk_rows) > 0 if chunk_rows > 1 else np.diff(ordered) > 1
    edges = [0, *(np.flatnonzero(apart) + 1).tolist(), len(ordered)]
    found = np.empty((len(wanted), *array.shape[1:]), array.dtype.newbyteorder("="))
    for start, end in itertools.pairwise(edges):
        if start == end:
            continue
        first, last = int(ordered[start]), int(ordered[end - 1])
        # Numbers and slices are h5py's short way: read_direct and lists of rows cost several times as much.
        if end - start == 1:
            found[order[start]] = array[first]
        else:
            found[order[start:end]] = array[first : last + 1][ordered[start:end] - first]
    return found
