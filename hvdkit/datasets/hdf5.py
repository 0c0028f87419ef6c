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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.common.files import complete_or_absent
from hvdkit.datasets.formats import one_line
from hvdkit.errors import CorruptDataError, DataError, DataNotFoundError, HvdkitError, InvalidArgumentError, of_extra
from hvdkit.steps.numbers import whole

Array = NDArray[Any]
Reader = Callable[[NDArray[np.int64]], Array]
"""Sample indices, in any order, to the samples, (m, ...), in memory of their own."""
_MOST_CHUNKS = 1 << 20
"""More are not listed: each process does that when it opens the file."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a file system without locks says."""


class HDF5Samples(list[Any]):
    """Samples that were read together.

    Attributes:
        arrays: one for each name, (m, ...), of which the samples are parts.
    """

    def __init__(self, samples: Iterable[Any], arrays: tuple[Array, ...]) -> None:
        super().__init__(samples)
        self.arrays = arrays


class HDF5Dataset:
    """Samples of one or more arrays of an HDF5 file, for PyTorch's ``DataLoader``, ``hvdkit.torch.shard``, or a loop.

    A sample is a tuple with one array for each name (the array alone where ``names`` is a string); sample i of the
    array ``x`` is ``x[i]``. PyTorch's loader asks for a whole batch at once (``__getitems__``). Every process opens the
    file for itself when it first reads: ranks, and workers of a ``DataLoader`` however they were started.

    Attributes:
        path, names, memory_map: as below.
        attributes: of the file (its ``attrs``), read when the data set was made.

    Args:
        path: of the file.
        names: of arrays in it, such as ("x", "y"), or "group/x"; one name as a string for samples that are arrays.
        memory_map: look at samples that lie in the file as they are in memory (not compressed or converted, and chunks,
            if any, of whole samples) without the HDF5 library; never at those of a virtual data set or of external
            storage. Switch it off where a file system is slow with memory maps.
    Raises:
        MissingFrameworkError: h5py is not installed.
        DataNotFoundError: there is no such file.
        CorruptDataError: it is no HDF5 file, or a damaged one.
        DataError: it cannot be read, an array or a source of a virtual one is missing, or arrays differ in their number
            of samples.
        InvalidArgumentError: no name at all.
    """

    def __init__(self, path: str | os.PathLike[str], names: str | Sequence[str], *, memory_map: bool = True) -> None:
        self.path = Path(path)
        self.names = (names,) if isinstance(names, str) else tuple(names)
        self.memory_map = memory_map
        self._alone = isinstance(names, str)
        self._file: Any = None
        self._readers: list[Reader] = []
        self._pid = -1
        if not self.names:
            raise InvalidArgumentError("names is empty; give the name of at least one array of the file.")
        with _in_one_sentence(self.path), _open(self.path) as file:
            self.attributes = {str(name): value for name, value in file.attrs.items()}
            arrays = []
            for name in self.names:
                with _in_one_sentence(self.path, name):
                    arrays.append(_array_in(file, name, self.path))
                    _require_sources(arrays[-1])
            self._length = _common_length(arrays, self.path)

    def __len__(self) -> int:
        """Number of samples."""
        return self._length

    def __getitem__(self, index: int) -> Any:
        """One sample.

        Raises:
            IndexError: there is no such sample.
        """
        arrays = self.batch([index])
        return arrays[0][0] if self._alone else tuple(array[0] for array in arrays)

    def __getitems__(self, indices: Sequence[int]) -> HDF5Samples:
        """Several samples, read together; what PyTorch's ``DataLoader`` calls."""
        arrays = self.batch(indices)
        return HDF5Samples(arrays[0] if self._alone else zip(*arrays, strict=True), arrays)

    def collate(self, samples: HDF5Samples) -> Any:
        """For ``DataLoader(..., collate_fn=dataset.collate)``: the batch as it was read, not copied once more.

        Args:
            samples: what ``__getitems__`` returned.
        Returns:
            What PyTorch's own function makes of them: a list of tensors, (m, ...), or one for a single name.
        Raises:
            InvalidArgumentError: other samples.
        """
        import torch

        if not isinstance(samples, HDF5Samples):
            raise InvalidArgumentError(
                f"collate joins the samples of this data set, got {type(samples).__name__}; where another data set is "
                "wrapped around it, leave collate_fn out."
            )
        tensors = [torch.from_numpy(array) for array in samples.arrays]
        return tensors[0] if self._alone else tensors

    def batch(self, indices: Sequence[int] | NDArray[np.integer[Any]]) -> tuple[Array, ...]:
        """Several samples as one array for each name, (m, ...), in the order of ``indices``.

        Args:
            indices: from 0, or negative from the end, in any order, repeated ones included.
        Raises:
            IndexError: there is no such sample.
            InvalidArgumentError: an index that is no whole number.
            CorruptDataError: the file is damaged, or cannot be read any more.
        """
        wanted = self._checked(indices)
        with _in_one_sentence(self.path):
            readers = self._open_here()
        found = []
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

    def _checked(self, indices: Any) -> NDArray[np.int64]:
        wanted = np.asarray(indices)
        if wanted.ndim != 1 or (wanted.dtype.kind not in "iu" and len(wanted)):
            raise InvalidArgumentError(f"indices are whole numbers, such as [0, 5, 2], got {indices!r}.")
        wanted = wanted.astype(np.int64)
        wanted = np.where(wanted < 0, wanted + self._length, wanted)
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < self._length):
            raise IndexError(f"there are samples 0 to {self._length - 1}, got {indices!r}")
        return wanted

    def _open_here(self) -> list[Reader]:
        """The readers of this process; a forked child does not use its parent's."""
        if self._pid != os.getpid():
            self.close()
            self._file = _open(self.path)
            arrays = [_array_in(self._file, name, self.path) for name in self.names]
            if _common_length(arrays, self.path) != self._length:
                raise DataError(f"{str(self.path)!r} has another number of samples than before; open it anew.")
            self._readers = [_reader_of(array, memory_map=self.memory_map) for array in arrays]
            self._pid = os.getpid()
        return self._readers


def write_hdf5(
    path: str | os.PathLike[str],
    arrays: Mapping[str, Array],
    *,
    chunks: int | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> None:
    """Write arrays to an HDF5 file that is complete or absent: one process of the job does this, the others wait.

    Args:
        path: of the file; one that is there is replaced when the new one is complete.
        arrays: by name, each (n, ...).
        chunks: samples in a chunk; None for an array in one piece, which reads fastest.
        attributes: small values to find again in the file's ``attrs``.
    Raises:
        MissingFrameworkError: h5py is not installed.
        InvalidArgumentError: chunks < 1, or a value that is no array.
        DataError: it cannot be written.
    """
    h5py = _h5py()
    for key, values in arrays.items():
        if not np.shape(values):
            raise InvalidArgumentError(f"{key!r} is a single value; give an array with a sample in each row.")
    rows = None if chunks is None else whole("chunks", chunks, 1)
    target = Path(path)
    try:
        with complete_or_absent(target) as place, h5py.File(place.name, "w") as file:
            for key, values in arrays.items():
                shape = np.shape(values)
                piece = (min(rows, shape[0]), *shape[1:]) if rows is not None and 0 not in shape else None
                file.create_dataset(key, data=values, chunks=piece)
            for key, value in (attributes or {}).items():
                file.attrs[key] = value
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
    if not h5py.is_hdf5(path):
        path.open("rb").close()  # one that may not be read is no damaged one
        raise CorruptDataError(f"{str(path)!r} is no HDF5 file, or a damaged one; write it again.")
    try:
        return h5py.File(path, "r")
    except BlockingIOError as error:
        raise DataError(
            f"{str(path)!r} is open for writing in another process; wait until that has closed it, or set "
            "HDF5_USE_FILE_LOCKING=FALSE if there is none."
        ) from error
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
    except PermissionError as error:
        raise DataError(f"{what} cannot be read ({one_line(error)}); check its permissions.") from error
    except (OSError, RuntimeError, LookupError, ValueError, TypeError, ArithmeticError, MemoryError) as error:
        raise CorruptDataError(f"{what} cannot be read ({one_line(error)}); check it, or write it again.") from error


def _array_in(file: Any, name: str, path: Path) -> Any:
    found = file.get(name)
    if not hasattr(found, "dtype") or not hasattr(found, "chunks"):
        names = ", ".join(_names(file)) or "none"
        what = "is a group" if found is not None else "is not there"
        raise DataError(f"{name!r} {what} in {str(path)!r}; its arrays are: {names}.")
    if found.shape is None or len(found.shape) == 0:
        raise DataError(f"{name!r} in {str(path)!r} is a single value; expected an array with a sample in each row.")
    return found


def _require_sources(array: Any, above: tuple[Any, ...] = ()) -> None:
    """Refuse an array whose samples are elsewhere and not there: HDF5 would give zeros or its fill value for them."""
    here = (array.file.filename, array.name)
    if here in above:
        raise DataError(f"{array.name!r} in {array.file.filename!r} takes samples from itself; write it again.")
    if array.external:
        _require_raw_files(array)
    for source in array.virtual_sources() if array.is_virtual else ():
        if "%b" in source.file_name + source.dset_name:
            continue  # blocks that come to be as they are written
        own = source.file_name == "."
        with contextlib.nullcontext(array.file) if own else _source_file(array, source.file_name) as file:
            found = None if file is None else file.get(source.dset_name)
            if not isinstance(found, _h5py().Dataset):
                raise DataError(
                    f"{array.name!r} takes samples from {source.dset_name!r} in {source.file_name!r}, which is not "
                    f"there; put it beside {array.file.filename!r}."
                )
            _require_sources(found, (*above, here))


def _source_file(array: Any, name: str) -> Any:
    """The file that HDF5 takes for a source: the first that it can open.

    Source: HDF5 1.14, src/H5Fint.c, H5F_prefix_open_file.
    """
    file = Path(array.file.filename)
    prefix = os.environ.get("HDF5_VDS_PREFIX", "")
    prefixes = [*prefix.split(":"), prefix.replace("${ORIGIN}", str(file.parent))]
    places = [*filter(None, prefixes), str(file.parent), "", str(file.resolve().parent)]
    tried = [Path(place) / (Path(name).name if Path(name).is_absolute() else name) for place in places]
    for path in [Path(name), *tried] if Path(name).is_absolute() else tried:
        with contextlib.suppress(OSError):
            if path.is_file():
                return _h5py().File(path, "r")
    return contextlib.nullcontext()


def _require_raw_files(array: Any) -> None:
    """Refuse external storage that is shorter than the array: HDF5 reads zeros behind its end."""
    wanted, held = array.size * array.dtype.itemsize, 0
    origin = str(Path(array.file.filename).parent)
    prefix = Path(os.environ.get("HDF5_EXTFILE_PREFIX", "").replace("${ORIGIN}", origin))
    for name, offset, size in array.external:
        with contextlib.suppress(OSError):
            held += max(0, min(size, (prefix / name).stat().st_size - offset))
    if held < wanted:
        names = ", ".join(repr(name) for name, _, _ in array.external)
        raise DataError(
            f"{array.name!r} in {array.file.filename!r} takes its {wanted} bytes from {names}, where {held} are; "
            "put the whole file there."
        )


def _names(file: Any, most: int = 20) -> list[str]:
    names: list[str] = []
    file.visititems(lambda name, found: names.append(name) if hasattr(found, "dtype") else None)
    return [*names[:most], *([f"and {len(names) - most} more"] if len(names) > most else [])]


def _common_length(arrays: Sequence[Any], path: Path) -> int:
    lengths = [int(array.shape[0]) for array in arrays]
    if len(set(lengths)) > 1:
        told = ", ".join(f"{array.name} {length}" for array, length in zip(arrays, lengths, strict=True))
        raise DataError(f"the arrays of {str(path)!r} differ in their number of samples ({told}); it must be the same.")
    return lengths[0]


def _reader_of(array: Any, *, memory_map: bool) -> Reader:
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
