"""HDF5 files as map-style data sets, read a batch at a time; and how to write one that is complete or absent.

Why a reader of our own: ``file["x"][i]`` costs the HDF5 library tens of microseconds whatever the size, once for each
sample and each array. Here a batch is a look into a memory map where the samples lie in the file as they are in memory,
in one piece or in chunks of whole samples, and else one read for each chunk or run of neighbours.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.common.files import complete_or_absent
from hvdkit.common.units import printable
from hvdkit.datasets.formats import one_line
from hvdkit.errors import CorruptDataError, DataError, DataNotFoundError, HvdkitError, InvalidArgumentError, of_extra

Array = NDArray[Any]
Reader = Callable[[NDArray[np.int64]], Array]
"""Sample indices, in any order, to the samples, (m, ...), in memory of their own."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a file system without locks says."""
_MOST_NAMES = 20
_MOST_CHUNKS = 1 << 20
"""More are not listed: each process does that when it opens the file."""


class HDF5Dataset:
    """Samples of one or more arrays of an HDF5 file, for PyTorch's ``DataLoader``, ``hvdkit.torch.shard``, or a loop.

    A sample is a tuple with one array for each name (the array alone where ``names`` is a string); sample i of the
    array ``x`` is ``x[i]``. PyTorch's loader asks for a whole batch at once (``__getitems__``). Every process opens the
    file for itself when it first reads: ranks, and workers of a ``DataLoader`` however they were started.

    Attributes:
        path, names: as below.
        attributes: of the file (its ``attrs``), read when the data set was made.

    Args:
        path: of the file.
        names: of arrays in it, such as ("x", "y"), or "group/x"; one name as a string for samples that are arrays.
    Raises:
        MissingFrameworkError: h5py is not installed.
        DataNotFoundError: there is no such file.
        CorruptDataError: it is no HDF5 file, or a damaged one.
        DataError: it cannot be read, an array is missing or has its samples in other files, or arrays differ in their
            number of samples.
        InvalidArgumentError: no name at all.
    """

    def __init__(self, path: str | os.PathLike[str], names: str | Sequence[str]) -> None:
        self.path = Path(path)
        self.names = (names,) if isinstance(names, str) else tuple(names)
        self._alone = isinstance(names, str)
        self._file: Any = None
        self._readers: list[Reader] = []
        self._pid = -1
        if not self.names:
            raise InvalidArgumentError("names is empty; give the name of at least one array of the file.")
        with _in_one_sentence(self.path), _open(self.path) as file:
            self.attributes = {str(name): value for name, value in file.attrs.items()}
            self._length = _common_length([_array_in(file, name, self.path) for name in self.names], self.path)

    def __len__(self) -> int:
        """Number of samples."""
        return self._length

    def __getitem__(self, index: int) -> Any:
        """One sample.

        Raises:
            IndexError: there is no such sample.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Several samples, read together; what PyTorch's ``DataLoader`` calls."""
        arrays = self.batch(indices)
        return list(arrays[0]) if self._alone else list(zip(*arrays, strict=True))

    def batch(self, indices: Sequence[int] | NDArray[np.integer[Any]]) -> tuple[Array, ...]:
        """Several samples as one array for each name, (m, ...), in the order of ``indices``.

        Args:
            indices: from 0, or negative from the end, in any order, repeated ones included.
        Raises:
            IndexError: there is no such sample.
            InvalidArgumentError: an index that is no whole number.
            CorruptDataError: the file is damaged, or cannot be read any more.
        """
        wanted = np.asarray(indices)
        if wanted.ndim != 1 or (wanted.dtype.kind not in "iu" and len(wanted)):
            raise InvalidArgumentError(f"indices are whole numbers, such as [0, 5, 2], got {indices!r}.")
        wanted = wanted.astype(np.int64)
        wanted = np.where(wanted < 0, wanted + self._length, wanted)
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < self._length):
            raise IndexError(f"there are samples 0 to {self._length - 1}, got {indices!r}")
        found = []
        with _in_one_sentence(self.path):
            readers = self._open_here()
        for name, read in zip(self.names, readers, strict=True):
            with _in_one_sentence(self.path, name):
                found.append(read(wanted))
        return tuple(found)

    def close(self) -> None:
        """Close this process's handle; reading opens it again."""
        self._readers = []
        if self._file is not None:
            # In a forked child this closes the child's copy only; left open, the HDF5 library would hand it out again.
            with contextlib.suppress(Exception):
                self._file.close()
        self._file, self._pid = None, -1

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs: everything but the handle."""
        return {**self.__dict__, "_file": None, "_readers": [], "_pid": -1}

    def _open_here(self) -> list[Reader]:
        """The readers of this process; a forked child does not use its parent's."""
        if self._pid != os.getpid():
            self.close()
            self._file = _open(self.path)
            arrays = [_array_in(self._file, name, self.path) for name in self.names]
            if _common_length(arrays, self.path) != self._length:
                raise DataError(f"{str(self.path)!r} has another number of samples than before; open it anew.")
            self._readers = [_mapped(array) or _by_library(array) for array in arrays]
            self._pid = os.getpid()
        return self._readers


def write_hdf5(
    path: str | os.PathLike[str], arrays: Mapping[str, Array], *, attributes: Mapping[str, Any] | None = None
) -> None:
    """Write arrays to an HDF5 file that is complete or absent: one process of the job does this, the others wait.

    Args:
        path: of the file; one that is there is replaced when the new one is complete.
        arrays: by name, each (n, ...); each lies in the file in one piece, which reads fastest.
        attributes: small values to find again in the file's ``attrs``.
    Raises:
        MissingFrameworkError: h5py is not installed.
        InvalidArgumentError: a value that is no array.
        DataError: it cannot be written.
    """
    h5py = _h5py()
    for key, values in arrays.items():
        if not np.shape(values):
            raise InvalidArgumentError(f"{key!r} is a single value; give an array with a sample in each row.")
    target = Path(path)
    try:
        with complete_or_absent(target) as place, h5py.File(place.name, "w") as file:
            for key, values in arrays.items():
                file.create_dataset(key, data=values)
            file.attrs.update(attributes or {})
    except OSError as error:
        raise DataError(f"cannot write {str(target)!r} ({one_line(error)}); give a path to write to.") from error


def _h5py() -> Any:
    with of_extra("data", "HDF5 files are read with h5py"):
        import h5py
    return h5py


def _open(path: Path) -> Any:
    h5py = _h5py()
    if not path.is_file():
        found = "a directory" if path.is_dir() else "nothing"
        raise DataNotFoundError(f"there is {found} at {str(path)!r}, expected an HDF5 file; check the path.")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return h5py.File(path, "r", locking=False)


@contextlib.contextmanager
def _in_one_sentence(path: Path, name: str = "") -> Iterator[None]:
    """Around whatever reads a file, or an array of it: h5py says of a damaged one nearly anything."""
    what = f"{name!r} in {str(path)!r}" if name else repr(str(path))
    try:
        yield
    except HvdkitError:
        raise
    except (BlockingIOError, PermissionError) as error:
        raise DataError(f"{what} cannot be read ({one_line(error)}); check its permissions and who has it open.") from (
            error
        )
    except (OSError, RuntimeError, LookupError, ValueError, TypeError, ArithmeticError, MemoryError) as error:
        raise CorruptDataError(f"{what} cannot be read ({one_line(error)}); check it, or write it again.") from error


def _array_in(file: Any, name: str, path: Path) -> Any:
    """The array of a name in an open file of this path, with its samples in its rows; a DataError where it has none."""
    with _in_one_sentence(path, name):
        found = file.get(name)
        if not hasattr(found, "dtype") or not hasattr(found, "chunks"):
            names: list[str] = []
            file.visititems(lambda name, item: names.append(name) if hasattr(item, "dtype") else None)
            what = "is a group" if found is not None else "is not there"
            listed = ", ".join(map(printable, names[:_MOST_NAMES])) or "none"
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            raise DataError(f"{name!r} {what} in {str(path)!r}; its arrays are: {listed}{more}.")
        if found.shape is None or len(found.shape) == 0:
            raise DataError(
                f"{name!r} in {str(path)!r} is a single value; expected an array with a sample in each row."
            )
        if found.is_virtual or found.external:
            raise DataError(
                f"{name!r} in {str(path)!r} takes its samples from other files, for which HDF5 gives fill values or "
                "zeros where they are missing; write them to one file, such as with write_hdf5."
            )
        return found


def _common_length(arrays: Sequence[Any], path: Path) -> int:
    lengths = [int(array.shape[0]) for array in arrays]
    if len(set(lengths)) > 1:
        told = ", ".join(f"{array.name} {length}" for array, length in zip(arrays, lengths, strict=True))
        raise DataError(f"the arrays of {str(path)!r} differ in their number of samples ({told}); it must be the same.")
    return lengths[0]


def _mapped(array: Any) -> Reader | None:
    """A look into the file, mapped into memory; None where the bytes in it are not those of a NumPy array."""
    from h5py import h5t  # an extra, which whoever opened the file has

    changing = array.file.mode != "r"  # this process has it open for writing, too, and not everything is in it yet
    filtered = array.id.get_create_plist().get_nfilters()
    if changing or filtered or 0 in array.shape or array.dtype.kind not in "biufc":
        return None
    if array.id.get_type() != h5t.py_create(array.dtype, logical=True):
        return None
    return _in_one_piece(array) if array.chunks is None else _in_chunks(array)


def _in_one_piece(array: Any) -> Reader | None:
    """A look into the file; None where the array lies nowhere yet."""
    offset = array.id.get_offset()
    if offset is None:
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


def _by_library(array: Any) -> Reader:
    """One read for each chunk that holds a sample, from the first sample in it to the last; or for each run."""
    filtered = array.id.get_create_plist().get_nfilters()
    # What is not filtered can be read a sample at a time; other chunks are read and decompressed as a whole anyway.
    whole_chunks = array.chunks and (filtered or array.chunks[1:] != array.shape[1:])
    chunk_rows = array.chunks[0] if whole_chunks else 1

    def read(wanted: NDArray[np.int64]) -> Array:
        order = np.argsort(wanted, kind="stable")
        ordered = wanted[order]
        apart = np.diff(ordered // chunk_rows) > 0 if chunk_rows > 1 else np.diff(ordered) > 1
        edges = [0, *(np.flatnonzero(apart) + 1).tolist(), len(ordered)]
        found = np.empty((len(wanted), *array.shape[1:]), array.dtype.newbyteorder("="))
        for start, end in itertools.pairwise(edges):
            if start < end:
                # Slices are h5py's short way: read_direct and lists of rows cost several times as much.
                first, last = int(ordered[start]), int(ordered[end - 1])
                found[order[start:end]] = array[first : last + 1][ordered[start:end] - first]
        return found

    return read
