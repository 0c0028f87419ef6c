"""How the samples of an array in an HDF5 file are read: through a memory map, or in as few reads as there can be."""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.errors import CorruptDataError

Array = NDArray[Any]
Reader = Callable[[NDArray[np.int64]], Array]
"""Sample indices, in any order, to the samples, (m, ...), in memory of their own."""
_MOST_CHUNKS = 1 << 20
"""More are not listed: each process does that when it opens the file."""


def reader_of(array: Any, *, memory_map: bool) -> Reader:
    """The fastest way to the samples that the layout of the array allows."""
    found = (_in_one_piece(array) or _in_chunks(array)) if memory_map and _as_in_memory(array) else None
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
    changing = array.file.mode != "r"  # this process has it open for writing, too, and not everything is in it yet
    if elsewhere or changing or array.dtype.kind not in "biufc" or _filters(array):
        return False
    return bool(array.id.get_type() == h5t.py_create(array.dtype, logical=True))


def _filters(array: Any) -> int:
    return int(array.id.get_create_plist().get_nfilters())


def _in_one_piece(array: Any) -> Reader | None:
    """A look into the file, mapped into memory; None where the array lies in several pieces, or nowhere yet."""
    offset = array.id.get_offset()
    if array.chunks is not None or offset is None:
        return None
    end = offset + math.prod(array.shape) * array.dtype.itemsize
    mapped = _bytes_of(array, end)[offset:end].view(array.dtype).reshape(array.shape)
    native = mapped.dtype.newbyteorder("=")
    return lambda indices: mapped[indices].astype(native, copy=False)


def _in_chunks(array: Any) -> Reader | None:
    """The same where every chunk holds whole samples; None where samples are cut, or a chunk was never written."""
    starts = _chunk_starts(array)
    if starts is None:
        return None
    rows, shape, dtype = array.chunks[0], array.shape[1:], array.dtype
    size = math.prod(shape) * dtype.itemsize
    mapped = _bytes_of(array, int(starts.max()) + rows * size)

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
    starts: list[int] = []
    rows, rest = array.chunks[0], (0,) * (len(array.shape) - 1)
    size = math.prod(array.chunks) * array.dtype.itemsize

    sizes: set[int] = set()

    def note(chunk: Any) -> None:
        sizes.add(chunk.size)
        if chunk.chunk_offset == (len(starts) * rows, *rest):  # of a damaged list the library may find other chunks
            starts.append(chunk.byte_offset)

    array.id.chunk_iter(note)
    if sizes != {size}:
        raise CorruptDataError(
            f"{array.file.filename!r} has chunks of {array.name!r} that are not of {size} bytes; write it again."
        )
    return np.array(starts, np.int64) if len(starts) == count and min(starts) >= 0 else None


def _bytes_of(array: Any, wanted: int) -> NDArray[np.uint8]:
    """The file as the library has it open, whatever lies at its path by now, mapped into memory."""
    mapped = mmap.mmap(array.file.id.get_vfd_handle(), 0, access=mmap.ACCESS_READ)
    if len(mapped) < wanted:
        raise CorruptDataError(
            f"{array.file.filename!r} is shorter than its array {array.name!r} says; write it again."
        )
    return np.frombuffer(mapped, np.uint8)


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
