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
from hvdkit.datasets.readers import MOST_BYTES, Arrays, ImageFormat, Pair, checked_pair, corrupt, reading

PICKLED_BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
BINARY_BATCHES = tuple(f"{name}.bin" for name in PICKLED_BATCHES)


def read_binary(paths: Sequence[Path], form: ImageFormat) -> Arrays:
    """Read data_batch_1.bin to data_batch_5.bin and test_batch.bin, or the cifar-10-binary.tar.gz with them inside.

    Raises:
        CorruptDataError: a file is not made of whole records, or has a label out of range.
    """
    return _join([_binary_batch(content, where, form) for where, content in _contents(paths, BINARY_BATCHES)])


def read_pickled(paths: Sequence[Path], form: ImageFormat) -> Arrays:
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
    return checked_pair(_images_from_planes(records[:, 1:], form, where), records[:, 0], form, where)


def _pickled_batch(content: bytes, where: str, form: ImageFormat) -> Pair:
    entries = read_dictionary(content, where)
    missing = [key for key in ("data", "labels") if key not in entries]
    if missing:
        raise corrupt(where, f"it lacks {' and '.join(missing)}")
    images = _images_from_planes(uint8_array(entries["data"], where), form, where)
    return checked_pair(images, _label_array(entries["labels"], where), form, where)


def _label_array(labels: Any, where: str) -> NDArray[Any]:
    if not isinstance(labels, list):
        return uint8_array(labels, where)
    if not all(type(label) is int for label in labels):
        raise corrupt(where, "its labels are not whole numbers")
    with reading(where):
        return np.array(labels, dtype=np.int64)


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
