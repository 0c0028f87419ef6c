"""`load`: a data set by name, as arrays that every framework takes; bundled, made of random numbers, or from files.

A data set that comes as files is a row of `SOURCES`: what it looks like, which files hold it, where they are published.
The checksums are those of the published files; a server that sends anything else is refused.
"""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hvdkit.datasets import formats
from hvdkit.datasets.download import RemoteFile, fetch
from hvdkit.datasets.formats import Arrays, ImageFormat
from hvdkit.errors import CorruptDataError, DataError, DataNotFoundError, InvalidArgumentError, of_extra, whole


@dataclass(frozen=True)
class FolderLayout:
    """One way in which the files of a data set may lie in a folder.

    ``files`` has one entry per file, each with the spellings under which it is known, the published one first.
    """

    files: tuple[tuple[str, ...], ...]
    read: Callable[[Sequence[Path], ImageFormat], Arrays]


@dataclass(frozen=True)
class DataSource:
    """One data set.

    ``folders`` are tried below the data directory in this order, ``"."`` being the data directory itself;
    ``layouts`` are tried in each of them, the preferred one first. ``first_labels`` are those of the published
    training set: MNIST and Fashion-MNIST have the same file names, and this tells them apart.
    """

    name: str
    form: ImageFormat
    folders: tuple[str, ...]
    layouts: tuple[FolderLayout, ...]
    remote: tuple[RemoteFile, ...]
    first_labels: tuple[int, ...]


def _idx_names(stem: str, dimensions: int) -> tuple[str, ...]:
    """The spellings of an IDX file: some archives unpack to a dot where the published name has a dash."""
    plain = [f"{stem}{separator}idx{dimensions}-ubyte" for separator in ("-", ".")]
    return (plain[0], f"{plain[0]}.gz", plain[1], f"{plain[1]}.gz")


IDX_LAYOUT = FolderLayout(
    files=(
        _idx_names("train-images", 3),
        _idx_names("train-labels", 1),
        _idx_names("t10k-images", 3),
        _idx_names("t10k-labels", 1),
    ),
    read=formats.read_idx_set,
)


def _npz_layout(*names: str) -> FolderLayout:
    return FolderLayout(files=(names,), read=formats.read_npz_set)


def _remote(base: str, checksums: dict[str, str]) -> tuple[RemoteFile, ...]:
    return tuple(RemoteFile(name, sha256, base + name) for name, sha256 in checksums.items())


MNIST = DataSource(
    name="mnist",
    form=ImageFormat(28, 28, 1, classes=10),
    folders=("mnist", "MNIST/raw", "."),
    layouts=(IDX_LAYOUT, _npz_layout("mnist.npz")),
    remote=_remote(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        {
            "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        },
    ),
    first_labels=(5, 0, 4, 1, 9, 2, 1, 3, 1, 4),
)

FASHION_MNIST = DataSource(
    name="fashion_mnist",
    form=ImageFormat(28, 28, 1, classes=10),
    folders=("fashion_mnist", "fashion-mnist", "FashionMNIST/raw", "."),
    layouts=(IDX_LAYOUT, _npz_layout("fashion_mnist.npz", "fashion-mnist.npz")),
    remote=_remote(
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        {
            "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        },
    ),
    first_labels=(9, 0, 0, 3, 0, 2, 7, 2, 5, 5),
)

CIFAR10 = DataSource(
    name="cifar10",
    form=ImageFormat(32, 32, 3, classes=10),
    folders=(
        "cifar10/cifar-10-batches-bin",
        "cifar-10-batches-bin",
        "cifar10",
        ".",
        "cifar10/cifar-10-batches-py",
        "cifar-10-batches-py",
    ),
    layouts=(
        FolderLayout(files=tuple((name,) for name in formats.BINARY_BATCHES), read=formats.read_cifar_binary),
        FolderLayout(files=(("cifar-10-binary.tar.gz",),), read=formats.read_cifar_binary),
        _npz_layout("cifar10.npz", "cifar-10.npz"),
        FolderLayout(files=tuple((name,) for name in formats.PICKLED_BATCHES), read=formats.read_cifar_pickled),
        FolderLayout(files=(("cifar-10-python.tar.gz",),), read=formats.read_cifar_pickled),
    ),
    # The binary version: the same images as the python version, and no pickle.
    remote=_remote(
        "https://storage.googleapis.com/mirror.tensorflow.org/www.cs.toronto.edu/~kriz/",
        {"cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
    ),
    first_labels=(6, 9, 9, 4, 1, 1, 2, 7, 8, 3),
)

SOURCES = {source.name: source for source in (MNIST, FASHION_MNIST, CIFAR10)}
NAMES = ("digits", *SOURCES, "synthetic")
LARGEST_SEED = 2**32 - 1
DIGITS_TEST_FRACTION = 0.2
DIGITS_BRIGHTEST = 16.0
SYNTHETIC_NOISE = 0.25


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
    if name not in NAMES:
        nearest = difflib.get_close_matches(str(name), NAMES, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise InvalidArgumentError(f"unknown data set {name!r}, expected one of {', '.join(NAMES)}{hint}")
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
        return Dataset(name, *_digits(seed), classes=10)
    return _load_files(SOURCES[name], directory, download)


def _load_files(source: DataSource, directory: str | os.PathLike[str] | None, download: bool) -> Dataset:
    """A data set of ``SOURCES`` from the first folder that has it, or from a server; see ``load``."""
    base = _data_directory(directory)
    command = ["python", "-m", "hvdkit.datasets", source.name, "--download"]
    if directory is not None:
        command += ["--directory", str(directory)]
    found = _find(source, base)
    if found is None and download:
        fetch(source.remote, base / source.name, shlex.join(command))
        found = _find(source, base)
    if found is None:
        raise DataNotFoundError(
            f"{source.name}: found {_what_is_missing(source, base)}; looked in "
            f"{', '.join(str(base / folder) for folder in source.folders)}; "
            f"put the files there, name their directory (directory argument or HVDKIT_DATA), or download them from "
            f"{source.remote[0].url.rpartition('/')[0]}/ with `{shlex.join(command)}` (in Python: download=True)"
        )
    layout, paths = found
    arrays = layout.read(paths, source.form)
    for other in SOURCES.values():
        known = len(other.first_labels)
        if other is not source and tuple(arrays.y_train[:known].tolist()) == other.first_labels:
            raise CorruptDataError(
                f"the files in {paths[0].parent} are those of {other.name}, expected {source.name}; "
                f"keep each data set in a folder of its own name"
            )
    scaled = arrays._replace(x_train=_scaled(arrays.x_train), x_test=_scaled(arrays.x_test))
    return Dataset(source.name, *scaled, classes=source.form.classes)


def _data_directory(directory: str | os.PathLike[str] | None) -> Path:
    """The directory below which data sets lie: the caller's choice, else as ``load`` says; an empty variable is unset.

    Raises:
        DataError: none of them is set and there is no home directory.
    Source: XDG Base Directory Specification 0.8 (a relative XDG_DATA_HOME is to be ignored).
    """
    try:
        if directory is not None:
            return Path(directory).expanduser()
        if chosen := os.environ.get("HVDKIT_DATA"):
            return Path(chosen).expanduser()
        shared = Path(os.environ.get("XDG_DATA_HOME", ""))
        return (shared if shared.is_absolute() else Path.home() / ".local" / "share") / "hvdkit"
    except RuntimeError as error:
        raise DataError("there is no home directory to look for data in; set HVDKIT_DATA to a directory") from error


def _find(source: DataSource, base: Path) -> tuple[FolderLayout, list[Path]] | None:
    """The first layout that a folder holds as a whole, and its files in the order of its reader; None without one."""
    for folder in source.folders:
        for layout in source.layouts:
            paths = [path for names in layout.files if (path := _existing(base / folder, names))]
            if len(paths) == len(layout.files):
                return layout, paths
    return None


def _what_is_missing(source: DataSource, base: Path) -> str:
    for folder in source.folders:
        for layout in source.layouts:
            missing = [names[0] for names in layout.files if not _existing(base / folder, names)]
            if len(missing) < len(layout.files):
                return f"no {', '.join(missing)} in {base / folder}, where the other files are"
    return "no " + " and no ".join(", ".join(names[0] for names in layout.files) for layout in source.layouts)


def _existing(folder: Path, names: Sequence[str]) -> Path | None:
    return next((path for name in names if (path := folder / name).is_file()), None)


def _scaled(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.divide(images, np.float32(255), dtype=np.float32, order="C")


def _digits(seed: int) -> Arrays:
    """1797 handwritten digits of 8 x 8 pixels; 80 % to train, 20 % held out, each digit in proportion.

    Source: Alpaydin and Kaynak 1998, Optical Recognition of Handwritten Digits, UCI repository.
    """
    with of_extra("examples", "digits comes with scikit-learn", ", or use the data set synthetic, which needs nothing"):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    bundled = load_digits()
    images = (bundled.images / DIGITS_BRIGHTEST).astype(np.float32)[..., np.newaxis]
    labels = bundled.target.astype(np.int64)
    x_train, x_test, y_train, y_test = train_test_split(
        images, labels, test_size=DIGITS_TEST_FRACTION, stratify=labels, random_state=seed
    )
    return Arrays(x_train, y_train, x_test, y_test)


def _synthetic(n: int | None, shape: Sequence[int] | None, classes: int | None, seed: int) -> Dataset:
    """A pattern per class plus noise: a network learns it. Classes are as even as n allows."""
    n = whole("n", 1000 if n is None else n, 1)
    classes = whole("classes", 10 if classes is None else classes, 2)
    shape = (8, 8, 1) if shape is None else shape
    if not isinstance(shape, list | tuple) or len(shape) != 3:
        raise InvalidArgumentError(f"shape is {shape!r}, expected height, width and channels, as in (8, 8, 1)")
    height, width, channels = (whole("shape", extent, 1) for extent in shape)
    rng = np.random.default_rng(seed)
    try:
        patterns = rng.random((classes, height, width, channels), dtype=np.float32)
        samples = (*_noisy(rng, patterns, n), *_noisy(rng, patterns, -(-n // 4)))
    except (MemoryError, OverflowError, ValueError) as error:  # too large for this machine, for a size, for NumPy
        raise InvalidArgumentError(
            f"n={n} samples of {height} x {width} x {channels} in {classes} classes do not fit into memory ({error}); "
            "give a smaller n, shape or number of classes"
        ) from error
    return Dataset("synthetic", *samples, classes=classes)


def _noisy(
    rng: np.random.Generator, patterns: NDArray[np.float32], n: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    labels = rng.permutation(np.arange(n, dtype=np.int64) % len(patterns))
    images = rng.standard_normal((n, *patterns.shape[1:]), dtype=np.float32)
    images *= SYNTHETIC_NOISE
    images += patterns[labels]
    np.clip(images, 0.0, 1.0, out=images)
    return images, labels
