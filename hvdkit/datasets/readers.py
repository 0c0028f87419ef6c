"""Read IDX files and npz archives; turn every way a file can be damaged into one sentence that names it."""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
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
    Source: the file format section of http://yann.lecun.com/exdb/mnist/
    """
    train_images, train_labels, test_images, test_labels = paths
    train = checked_pair(read_idx(train_images, 3), read_idx(train_labels, 1), form, train_images, train_labels)
    test = checked_pair(read_idx(test_images, 3), read_idx(test_labels, 1), form, test_images, test_labels)
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
        return _parse_idx(files.content(path, most=MOST_BYTES, unzip=True), dimensions, path)


def _parse_idx(content: bytes, dimensions: int, path: Path) -> NDArray[np.uint8]:
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
    return Arrays(*checked_pair(x_train, y_train, form, path), *checked_pair(x_test, y_test, form, path))


def checked_pair(
    images: NDArray[Any],
    labels: NDArray[Any],
    form: ImageFormat,
    where: Path | str,
    labels_where: Path | str | None = None,
) -> Pair:
    """The images and their labels, which may come from another place, or a CorruptDataError."""
    images = checked_images(images, form, where)
    labels = checked_labels(labels, form, labels_where or where)
    if len(images) != len(labels):
        both = where if labels_where is None else f"{where} or {labels_where}"
        raise corrupt(both, f"{len(images)} images and {len(labels)} labels")
    return images, labels


def checked_images(images: NDArray[Any], form: ImageFormat, where: Path | str) -> NDArray[np.uint8]:
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


def checked_labels(labels: NDArray[Any], form: ImageFormat, where: Path | str) -> NDArray[np.int64]:
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
