"""The files in which image data sets are published: IDX, npz, and CIFAR-10's batches, binary or pickled.

Every way in which a file can be damaged is one sentence that names it. A pickle is a program: loading one calls
whatever it names, and CIFAR-10's "python version" is six of them. Here the three names that the published files use
become ``_Recorded`` notes of what was asked, and nothing is called; the array is then built from the notes. Any other
name is refused.

Sources: the file format section of http://yann.lecun.com/exdb/mnist/; https://www.cs.toronto.edu/~kriz/cifar.html,
"Dataset layout".
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdkit.common import files
from hvdkit.common.units import printable
from hvdkit.errors import CorruptDataError, DataError

IDX_UNSIGNED_BYTE = 0x08
MOST_BYTES = 1 << 30
"""Of a file, unpacked; the largest of the published ones has 180 million."""
LONGEST_QUOTE = 400
"""Characters of what a file or a server made us say."""
NPZ_KEYS = ("x_train", "y_train", "x_test", "y_test")
PICKLED_BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
BINARY_BATCHES = tuple(f"{name}.bin" for name in PICKLED_BATCHES)
ARRAY_NAMES = {("numpy.core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")}
"""All that the published pickles ask for."""


class ImageFormat(NamedTuple):
    """What the samples of a data set look like."""

    height: int
    width: int
    channels: int
    classes: int


class Arrays(NamedTuple):
    """A data set: images (n, height, width, channels), uint8 as files hold them or float32 in [0, 1]; labels (n,)."""

    x_train: NDArray[Any]
    y_train: NDArray[np.int64]
    x_test: NDArray[Any]
    y_test: NDArray[np.int64]


Pair = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Images and as many labels."""


def corrupt(where: Path | str, problem: str) -> CorruptDataError:
    """The error for a file that is there and is not what it should be."""
    return CorruptDataError(f"{where} is corrupt: {printable(problem[:LONGEST_QUOTE])}; delete it and get it again")


@contextmanager
def reading(where: Path | str) -> Iterator[None]:
    """Name the file in whatever goes wrong inside.

    Raises:
        DataError: the operating system refused to read it.
        CorruptDataError: anything else; damaged content makes gzip, zipfile, tarfile and pickle raise nearly
            every exception there is.
    """
    try:
        yield
    except DataError:
        raise
    except OSError as error:
        if error.errno is None:  # gzip.BadGzipFile is an OSError that no operating system raised
            raise corrupt(where, one_line(error)) from error
        raise DataError(f"{where} cannot be read ({error.strerror}); check the file and its permissions") from error
    except Exception as error:
        raise corrupt(where, one_line(error)) from error


def one_line(error: Exception) -> str:
    """An exception of a library as part of a sentence."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def read_idx_set(paths: Sequence[Path], form: ImageFormat) -> Arrays:
    """Read the four IDX files of an MNIST-like set.

    Args:
        paths: training images, training labels, test images, test labels; plain or gzip, whatever their names say.
        form: what is expected.
    Raises:
        CorruptDataError: a file is damaged, or images and labels do not belong together.
    """
    train_images, train_labels, test_images, test_labels = paths
    train = _checked_pair(read_idx(train_images, 3), read_idx(train_labels, 1), form, train_images, train_labels)
    test = _checked_pair(read_idx(test_images, 3), read_idx(test_labels, 1), form, test_images, test_labels)
    return Arrays(*train, *test)


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read one IDX file of unsigned bytes, plain or gzip.

    Args:
        path: the file; compression is recognised by content, since browsers unpack and keep the name.
        dimensions: 3 for images, 1 for labels.
    Returns:
        The array, uint8, of the shape that the header states.
    Raises:
        CorruptDataError: not such a file, or shorter or longer than its header says.
    """
    with reading(path):
        content = files.content(path, most=MOST_BYTES, unzip=True)
    expected_magic = bytes([0, 0, IDX_UNSIGNED_BYTE, dimensions])
    magic = content[: len(expected_magic)]
    if magic != expected_magic:
        raise corrupt(path, f"it starts with bytes {magic.hex() or 'none'}, expected {expected_magic.hex()}")
    start = len(magic) + 4 * dimensions
    if len(content) < start:
        raise corrupt(path, "it ends inside its header")
    shape = struct.unpack_from(f">{dimensions}I", content, len(magic))
    size, held = math.prod(shape), len(content) - start
    if held != size:
        received = f"only {held}" if held < size else "more"
        raise corrupt(path, f"its header {shape} announces {size} bytes of data and it holds {received}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def read_npz_set(paths: Sequence[Path], form: ImageFormat) -> Arrays:
    """Read an npz archive with x_train, y_train, x_test and y_test, as Keras lays them out.

    Raises:
        CorruptDataError: not such an archive, a key is missing, or an array has another type or shape; arrays of
            Python objects are refused, since reading them would run code from the file.
    """
    (path,) = paths
    with reading(path), files.opened(path) as file:
        if not zipfile.is_zipfile(file):
            raise corrupt(path, "it is not an npz archive or is cut short")
        with zipfile.ZipFile(file) as packed:
            size = sum(member.file_size for member in packed.infolist())
        if size > MOST_BYTES:
            raise corrupt(path, f"it unpacks to {size} bytes, expected at most {MOST_BYTES}")
        file.seek(0)
        with np.load(file, allow_pickle=False) as archive:
            missing = [key for key in NPZ_KEYS if key not in archive.files]
            if missing:
                found = ", ".join(archive.files) or "nothing"
                raise corrupt(path, f"it holds {found} and lacks {', '.join(missing)}")
            content: dict[str, NDArray[Any]] = {key: archive[key] for key in NPZ_KEYS}
    x_train, y_train, x_test, y_test = content.values()
    return Arrays(*_checked_pair(x_train, y_train, form, path), *_checked_pair(x_test, y_test, form, path))


def _checked_pair(
    images: NDArray[Any],
    labels: NDArray[Any],
    form: ImageFormat,
    where: Path | str,
    labels_where: Path | str | None = None,
) -> Pair:
    """The images and their labels, which may come from another place, or a CorruptDataError."""
    images = _checked_images(images, form, where)
    labels = _checked_labels(labels, form, labels_where or where)
    if len(images) != len(labels):
        both = where if labels_where is None else f"{where} or {labels_where}"
        raise corrupt(both, f"{len(images)} images and {len(labels)} labels")
    return images, labels


def _checked_images(images: NDArray[Any], form: ImageFormat, where: Path | str) -> NDArray[np.uint8]:
    """The images as (n, height, width, channels), or a CorruptDataError that says what they are instead."""
    expected = form[:3]
    if form.channels == 1 and images.ndim == 3:
        images = images[..., np.newaxis]
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != expected or len(images) == 0:
        raise corrupt(
            where,
            f"its images are {images.dtype} of shape {images.shape}, expected uint8 of shape (n > 0, "
            f"{', '.join(map(str, expected))})",
        )
    return images


def _checked_labels(labels: NDArray[Any], form: ImageFormat, where: Path | str) -> NDArray[np.int64]:
    """The labels as int64 (n,), or a CorruptDataError that names the first that is out of range."""
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise corrupt(where, f"its labels are {labels.dtype} of shape {labels.shape}, expected integers of shape (n,)")
    wrong = np.flatnonzero((labels < 0) | (labels >= form.classes))
    if wrong.size:
        first = int(wrong[0])
        raise corrupt(where, f"label {first} is {labels[first]}, expected 0 to {form.classes - 1}")
    return labels.astype(np.int64)


def read_cifar_binary(paths: Sequence[Path], form: ImageFormat) -> Arrays:
    """Read data_batch_1.bin to data_batch_5.bin and test_batch.bin, or the cifar-10-binary.tar.gz with them inside.

    Raises:
        CorruptDataError: a file is not made of whole records, or has a label out of range.
    """
    return _join([_binary_batch(content, where, form) for where, content in _contents(paths, BINARY_BATCHES)])


def read_cifar_pickled(paths: Sequence[Path], form: ImageFormat) -> Arrays:
    """Read data_batch_1 to data_batch_5 and test_batch, or the cifar-10-python.tar.gz with them inside, without running
    what the pickles ask for.

    Raises:
        CorruptDataError: a file is damaged, or is a pickle of anything but arrays and labels.
    """
    return _join([_pickled_batch(content, where, form) for where, content in _contents(paths, PICKLED_BATCHES)])


def _contents(paths: Sequence[Path], names: Sequence[str]) -> list[tuple[str, bytes]]:
    """Where each batch is, for messages, and its bytes; nothing of an archive is unpacked to disk."""
    if len(paths) == 1:
        return [(f"{paths[0]}:{name}", content) for name, content in _members(paths[0], names)]
    found = []
    for path in paths:
        with reading(path):
            found.append((str(path), files.content(path, most=MOST_BYTES)))
    return found


def _members(archive: Path, names: Sequence[str]) -> list[tuple[str, bytes]]:
    found: dict[str, bytes] = {}
    with reading(archive):
        content = io.BytesIO(files.content(archive, most=MOST_BYTES, unzip=True))
    with reading(archive), tarfile.open(fileobj=content, mode="r:") as tar:
        for member in tar:
            name = PurePosixPath(member.name).name
            stream = tar.extractfile(member) if name in names and member.isreg() else None
            if member.size > MOST_BYTES:  # holes, which take no place in the archive
                raise corrupt(archive, f"{name} unpacks to {member.size} bytes, expected at most {MOST_BYTES}")
            if stream is not None:
                found[name] = stream.read()
    missing = [name for name in names if name not in found]
    if missing:
        raise corrupt(archive, f"it lacks {', '.join(missing)}")
    return [(name, found[name]) for name in names]


def _binary_batch(content: bytes, where: str, form: ImageFormat) -> Pair:
    record_bytes = 1 + form.height * form.width * form.channels
    if not content or len(content) % record_bytes:
        raise corrupt(where, f"{len(content)} bytes are not a whole number of {record_bytes}-byte records")
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, record_bytes)
    return _checked_pair(_images_from_planes(records[:, 1:], form, where), records[:, 0], form, where)


def _pickled_batch(content: bytes, where: str, form: ImageFormat) -> Pair:
    with reading(where):
        entries = _RecordingUnpickler(content, where).load()
    if not isinstance(entries, dict):
        raise corrupt(where, "it holds no dictionary of arrays")
    missing = [key for key in ("data", "labels") if key.encode() not in entries]
    if missing:
        raise corrupt(where, f"it lacks {' and '.join(missing)}")
    labels = entries[b"labels"]
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise corrupt(where, "its labels are not whole numbers")
    images = _images_from_planes(_recorded_array(entries[b"data"], where), form, where)
    with reading(where):
        numbers = np.array(labels, dtype=np.int64)
    return _checked_pair(images, numbers, form, where)


def _images_from_planes(rows: NDArray[np.uint8], form: ImageFormat, where: str) -> NDArray[np.uint8]:
    """Rows of one colour plane after the other, (n, channels * height * width), as (n, height, width, channels)."""
    expected = form.channels * form.height * form.width
    if rows.ndim != 2 or rows.shape[1] != expected:
        raise corrupt(where, f"its images are of shape {rows.shape}, expected (n, {expected})")
    planes = rows.reshape(-1, form.channels, form.height, form.width)
    return planes.transpose(0, 2, 3, 1)


def _join(batches: Sequence[Pair]) -> Arrays:
    *train, (x_test, y_test) = batches
    return Arrays(
        np.concatenate([images for images, _ in train]), np.concatenate([labels for _, labels in train]), x_test, y_test
    )


class _Recorded:
    """What a pickle names, calls or builds, written down instead of done."""

    def __init__(self, name: str, arguments: tuple[Any, ...] = ()) -> None:
        self.name = name
        self.arguments = arguments
        self.state: Any = None

    def __call__(self, *arguments: Any) -> _Recorded:
        return _Recorded(self.name, arguments)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _RecordingUnpickler(pickle._Unpickler):
    """The one in Python: that in C allocates its memo up to any number that a damaged byte names."""

    def __init__(self, content: bytes, where: str) -> None:
        super().__init__(io.BytesIO(content), fix_imports=False, encoding="bytes")
        self.where = where

    def find_class(self, module_name: str, global_name: str, /) -> _Recorded:
        if (module_name, global_name) not in ARRAY_NAMES:
            raise corrupt(self.where, f"it asks for {module_name}.{global_name}, which no array needs and was not run")
        return _Recorded(global_name)


def _recorded_array(value: Any, where: str) -> NDArray[np.uint8]:
    """The array of bytes that a pickle describes, in C order, or a CorruptDataError."""
    match value:
        case _Recorded(name="_reconstruct", state=(_, tuple() as shape, _Recorded(name="dtype") as dtype, False, data)):
            pass
        case _:
            raise corrupt(where, "its data is not an array")
    if dtype.arguments[:1] not in ((b"u1",), (b"|u1",)):
        raise corrupt(where, "its data is not an array of uint8")
    if not isinstance(data, bytes) or not all(type(extent) is int and extent >= 0 for extent in shape):
        raise corrupt(where, "its array has no shape or no data")
    if len(data) != math.prod(shape):
        raise corrupt(where, f"its array of shape {shape} comes with {len(data)} bytes")
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)
