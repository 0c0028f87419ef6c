"""Read CIFAR-10: binary or pickled batches, from a folder or from the archive they are published in.

Source: https://www.cs.toronto.edu/~kriz/cifar.html, "Dataset layout".
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.common import files
from hvdkit.datasets.pickled import read_dictionary, uint8_array
from hvdkit.datasets.readers import MOST_BYTES, Arrays, ImageFormat, checked_images, checked_labels, corrupt, reading

PICKLED_BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
BINARY_BATCHES = tuple(f"{name}.bin" for name in PICKLED_BATCHES)

Batch = tuple[NDArray[np.uint8], NDArray[np.int64]]


def read_binary_batches(paths: Sequence[Path], form: ImageFormat) -> Arrays:
    """Read data_batch_1.bin to data_batch_5.bin and test_batch.bin.

    Raises:
        CorruptDataError: a file is not made of whole records, or has a label out of range.
    """
    return _join([_binary_batch(_content(path), str(path), form) for path in paths])


def read_binary_archive(paths: Sequence[Path], form: ImageFormat) -> Arrays:
    """Read the six binary batches inside cifar-10-binary.tar.gz; nothing is unpacked to disk."""
    (archive,) = paths
    members = _members(archive, BINARY_BATCHES)
    return _join([_binary_batch(content, f"{archive}:{name}", form) for name, content in members])


def read_pickled_batches(paths: Sequence[Path], form: ImageFormat) -> Arrays:
    """Read data_batch_1 to data_batch_5 and test_batch, without running what the pickles ask for.

    Raises:
        CorruptDataError: a file is damaged, or is a pickle of anything but arrays and labels.
    """
    return _join([_pickled_batch(_content(path), str(path), form) for path in paths])


def read_pickled_archive(paths: Sequence[Path], form: ImageFormat) -> Arrays:
    """Read the six pickled batches inside cifar-10-python.tar.gz; nothing is unpacked to disk."""
    (archive,) = paths
    members = _members(archive, PICKLED_BATCHES)
    return _join([_pickled_batch(content, f"{archive}:{name}", form) for name, content in members])


def _content(path: Path) -> bytes:
    with reading(path):
        return files.content(path, most=MOST_BYTES)


def _unpacked(archive: Path) -> io.BytesIO:
    return io.BytesIO(files.content(archive, most=MOST_BYTES, unzip=True))


def _members(archive: Path, names: Sequence[str]) -> list[tuple[str, bytes]]:
    found: dict[str, bytes] = {}
    with reading(archive), tarfile.open(fileobj=_unpacked(archive), mode="r:") as tar:
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


def _binary_batch(content: bytes, where: str, form: ImageFormat) -> Batch:
    record_bytes = 1 + form.height * form.width * form.channels
    if not content or len(content) % record_bytes:
        raise corrupt(where, f"{len(content)} bytes are not a whole number of {record_bytes}-byte records")
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, record_bytes)
    return _images_from_planes(records[:, 1:], form, where), checked_labels(records[:, 0], form, where)


def _pickled_batch(content: bytes, where: str, form: ImageFormat) -> Batch:
    entries = read_dictionary(content, where)
    missing = [key for key in ("data", "labels") if key not in entries]
    if missing:
        raise corrupt(where, f"it lacks {' and '.join(missing)}")
    images = _images_from_planes(uint8_array(entries["data"], where), form, where)
    labels = checked_labels(_label_array(entries["labels"], where), form, where)
    if len(images) != len(labels):
        raise corrupt(where, f"{len(images)} images and {len(labels)} labels")
    return images, labels


def _label_array(labels: Any, where: str) -> NDArray[Any]:
    if not isinstance(labels, list):
        return uint8_array(labels, where)
    if not all(type(label) is int for label in labels):
        raise corrupt(where, "its labels are not whole numbers")
    with reading(where):
        return np.array(labels, dtype=np.int64)


def _images_from_planes(rows: NDArray[np.uint8], form: ImageFormat, where: str) -> NDArray[np.uint8]:
    """Rows of one colour plane after the other, (n, channels * height * width), as (n, height, width, channels)."""
    if rows.ndim != 2 or rows.shape[1] != form.channels * form.height * form.width:
        expected = form.channels * form.height * form.width
        raise corrupt(where, f"its images are of shape {rows.shape}, expected (n, {expected})")
    planes = rows.reshape(-1, form.channels, form.height, form.width)
    return checked_images(planes.transpose(0, 2, 3, 1), form, where)


def _join(batches: Sequence[Batch]) -> Arrays:
    *train, (x_test, y_test) = batches
    return Arrays(
        np.concatenate([images for images, _ in train]), np.concatenate([labels for _, labels in train]), x_test, y_test
    )
