"""`load`: a data set by name, as arrays that every framework takes."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvdkit.datasets import generated, locate
from hvdkit.datasets.download import fetch
from hvdkit.datasets.readers import Arrays
from hvdkit.datasets.sources import SOURCES, DataSource
from hvdkit.errors import CorruptDataError, InvalidArgumentError
from hvdkit.steps.numbers import whole

NAMES = ("digits", *SOURCES, "synthetic")
LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images and labels, the held-out ones apart.

    ``x_train`` and ``x_test``: float32 in [0, 1], shape (n, height, width, channels).
    ``y_train`` and ``y_test``: int64, shape (n,), 0 to ``classes`` - 1.
    """

    name: str
    x_train: NDArray[np.float32]
    y_train: NDArray[np.int64]
    x_test: NDArray[np.float32]
    y_test: NDArray[np.int64]
    classes: int


def load(
    name: str = "digits",
    *,
    directory: str | os.PathLike[str] | None = None,
    download: bool = False,
    seed: int = 0,
    n: int | None = None,
    shape: Sequence[int] | None = None,
    classes: int | None = None,
) -> Dataset:
    """Load a data set; every rank may call this at once.

    Args:
        name: "digits" (bundled with scikit-learn), "mnist", "fashion_mnist", "cifar10" (from files) or "synthetic".
        directory: where the files are, themselves or in a sub-folder such as mnist/; None means HVDKIT_DATA, else
            XDG_DATA_HOME/hvdkit, else ~/.local/share/hvdkit. Not used by digits and synthetic.
        download: fetch the files when they are not there, to directory/name: one process downloads, the others
            wait for it. Compute nodes often have no network: do this on the login node first.
        seed: of the split of digits and the samples of synthetic, 0 to 2**32 - 1; the others have a fixed split.
        n: synthetic only: training samples (1000); the test set has a quarter as many.
        shape: synthetic only: height, width, channels (8, 8, 1).
        classes: synthetic only: number of classes, at least 2 (10).
    Raises:
        InvalidArgumentError: an unknown name or a number that cannot be right.
        MissingFrameworkError: digits without scikit-learn.
        DataNotFoundError: files are missing; says which, where they were looked for and how to get them.
        CorruptDataError: a file is damaged or a server sent another one; says which and why.
        DataError: a file cannot be read, or no server could be reached.
    """
    _check_name(name)
    seed = whole("seed", seed, 0)
    if seed > LARGEST_SEED:
        raise InvalidArgumentError(f"seed must be at most {LARGEST_SEED}, got {seed}.")
    if name == "synthetic":
        return _synthetic(n, shape, classes, seed)
    for option, value in (("n", n), ("shape", shape), ("classes", classes)):
        if value is not None:
            raise InvalidArgumentError(
                f"{option}={value!r} is for the data set synthetic; {name} has its own, leave it out"
            )
    if name == "digits":
        return Dataset(name, *generated.digits(seed), classes=10)
    return _load_files(SOURCES[name], directory, download)


def _load_files(source: DataSource, directory: str | os.PathLike[str] | None, download: bool) -> Dataset:
    base = locate.data_directory(directory)
    found = locate.find(source, base)
    if found is None and download:
        fetch(source.remote, base / source.name, locate.download_command(source.name, directory))
        found = locate.find(source, base)
    if found is None:
        raise locate.not_found(source, base, directory)
    arrays = found.layout.read(found.paths, source.form)
    _refuse_another_set(source, arrays, found)
    scaled = arrays._replace(x_train=_scaled(arrays.x_train), x_test=_scaled(arrays.x_test))
    return Dataset(source.name, *scaled, classes=source.form.classes)


def _refuse_another_set(source: DataSource, arrays: Arrays, found: locate.FoundFiles) -> None:
    for other in SOURCES.values():
        known = len(other.first_labels)
        if other is not source and tuple(arrays.y_train[:known].tolist()) == other.first_labels:
            folder = found.paths[0].parent
            raise CorruptDataError(
                f"the files in {folder} are those of {other.name}, expected {source.name}; "
                f"keep each data set in a folder of its own name"
            )


def _scaled(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.divide(images, np.float32(255), dtype=np.float32, order="C")


def _synthetic(n: int | None, shape: Sequence[int] | None, classes: int | None, seed: int) -> Dataset:
    n = whole("n", 1000 if n is None else n, 1)
    classes = whole("classes", 10 if classes is None else classes, 2)
    shape = (8, 8, 1) if shape is None else shape
    if not isinstance(shape, list | tuple) or len(shape) != 3:
        raise InvalidArgumentError(f"shape is {shape!r}, expected height, width and channels, as in (8, 8, 1)")
    height, width, channels = (whole("shape", extent, 1) for extent in shape)
    try:
        samples = generated.synthetic(n, (height, width, channels), classes, seed)
    except (MemoryError, OverflowError, ValueError) as error:  # too large for this machine, for a size, for NumPy
        raise InvalidArgumentError(
            f"n={n} samples of {height} x {width} x {channels} in {classes} classes do not fit into memory ({error}); "
            "give a smaller n, shape or number of classes"
        ) from error
    return Dataset("synthetic", *samples, classes=classes)


def _check_name(name: str) -> None:
    if name in NAMES:
        return
    nearest = difflib.get_close_matches(str(name), NAMES, n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    raise InvalidArgumentError(f"unknown data set {name!r}, expected one of {', '.join(NAMES)}{hint}")
