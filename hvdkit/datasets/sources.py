"""The data sets that come as files: what they look like, which files hold them, where they are published.

A data set is a row of `SOURCES`. The checksums are those of the published files; a server that sends anything else is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdkit.datasets import formats
from hvdkit.datasets.download import RemoteFile
from hvdkit.datasets.formats import Arrays, ImageFormat


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
        {
            "cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        },
    ),
    first_labels=(6, 9, 9, 4, 1, 1, 2, 7, 8, 3),
)

SOURCES = {source.name: source for source in (MNIST, FASHION_MNIST, CIFAR10)}
