"""MNIST-like sets from IDX files and npz archives: every layout, every place, every way to be damaged."""

import gzip
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hvdkit.datasets import formats, load
from hvdkit.datasets.formats import read_idx
from hvdkit.errors import CorruptDataError, DataError, DataNotFoundError

RNG = np.random.default_rng(0)
X_TRAIN = RNG.integers(0, 256, (7, 28, 28), dtype=np.uint8)
X_TRAIN[0, 0, :2] = (0, 255)
Y_TRAIN = np.array([3, 0, 9, 1, 1, 2, 8], dtype=np.uint8)
X_TEST = RNG.integers(0, 256, (3, 28, 28), dtype=np.uint8)
Y_TEST = np.array([5, 5, 0], dtype=np.uint8)
NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
CONTENT = dict(zip(NAMES, (X_TRAIN, Y_TRAIN, X_TEST, Y_TEST), strict=True))


def idx(array: NDArray[np.uint8]) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_set(
    folder: Path,
    rename: Callable[[str], str] = lambda name: name,
    pack: Callable[[bytes], bytes] = lambda content: content,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in CONTENT.items():
        (folder / rename(name)).write_bytes(pack(idx(array)))
    return folder


def write_npz(path: Path, **changed: Any) -> None:
    arrays = {"x_train": X_TRAIN, "y_train": Y_TRAIN, "x_test": X_TEST, "y_test": Y_TEST, **changed}
    np.savez(path, **{key: array for key, array in arrays.items() if array is not None})


def assert_is_the_set(directory: Path | None, name: str = "mnist") -> None:
    data = load(name, directory=directory)
    assert data.name == name
    assert data.classes == 10
    assert data.x_train.dtype == np.float32
    assert data.x_train.shape == (7, 28, 28, 1)
    assert data.x_train[0, 0, 0, 0] == 0.0
    assert data.x_train[0, 0, 1, 0] == 1.0
    assert np.array_equal(np.rint(data.x_train[..., 0] * 255), X_TRAIN)
    assert np.array_equal(np.rint(data.x_test[..., 0] * 255), X_TEST)
    assert data.y_train.dtype == np.int64
    assert data.y_train.tolist() == Y_TRAIN.tolist()
    assert data.y_test.tolist() == Y_TEST.tolist()


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("dotted", [False, True])
@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
def test_idx_under_every_name(tmp_path: Path, suffix: str, dotted: bool, packed: bool) -> None:
    """Packed or not, whatever the name says: browsers unpack a file and leave its name."""

    def rename(name: str) -> str:
        return (name.replace("-idx", ".idx") if dotted else name) + suffix

    write_set(tmp_path, rename, gzip.compress if packed else bytes)
    assert_is_the_set(tmp_path)


@pytest.mark.parametrize("packed", ["idx", "npz"])
def test_what_unpacks_to_more_than_any_data_set_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: str
) -> None:
    monkeypatch.setattr(formats, "MOST_BYTES", 1 << 20)
    if packed == "npz":
        np.savez_compressed(tmp_path / "mnist.npz", x_train=np.zeros(1 << 21, np.uint8))
    else:
        write_set(tmp_path, pack=lambda content: gzip.compress(content + bytes(1 << 21)))
    with pytest.raises(DataError, match=r"(holds more than 1 MiB|unpacks to 2097280 bytes)") as caught:
        load("mnist", directory=tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("mnist", "."),
        ("mnist", "mnist"),
        ("mnist", "MNIST/raw"),
        ("fashion_mnist", "."),
        ("fashion_mnist", "fashion_mnist"),
        ("fashion_mnist", "fashion-mnist"),
        ("fashion_mnist", "FashionMNIST/raw"),
    ],
)
def test_sub_folders(tmp_path: Path, name: str, folder: str) -> None:
    write_set(tmp_path / folder)
    assert_is_the_set(tmp_path, name)


@pytest.mark.parametrize(
    ("name", "file"), [("mnist", "mnist.npz"), ("fashion_mnist", "fashion_mnist.npz"), ("mnist", "mnist/mnist.npz")]
)
def test_npz(tmp_path: Path, name: str, file: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    write_npz(tmp_path / file, y_train=Y_TRAIN.reshape(-1, 1), y_test=Y_TEST.astype(np.int32))
    assert_is_the_set(tmp_path, name)


def test_directory_argument_comes_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDKIT_DATA", str(tmp_path / "empty"))
    write_set(tmp_path / "chosen")
    assert_is_the_set(tmp_path / "chosen")
    with pytest.raises(DataNotFoundError):
        load("mnist")


def test_environment_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDKIT_DATA", "")
    monkeypatch.setenv("XDG_DATA_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write_set(tmp_path / "home" / ".local" / "share" / "hvdkit" / "mnist")
    assert_is_the_set(None)
    monkeypatch.setenv("XDG_DATA_HOME", "relative/is/ignored")
    assert_is_the_set(None)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    with pytest.raises(DataNotFoundError, match="xdg/hvdkit/mnist"):
        load("mnist")
    write_set(tmp_path / "xdg" / "hvdkit")
    assert_is_the_set(None)
    monkeypatch.setenv("HVDKIT_DATA", str(tmp_path / "data"))
    with pytest.raises(DataNotFoundError, match="data/mnist"):
        load("mnist")
    write_set(tmp_path / "data")
    assert_is_the_set(None)


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("mnist", [*NAMES, "mnist.npz"]),
        ("fashion_mnist", [*NAMES, "fashion_mnist.npz"]),
        ("cifar10", ["data_batch_1.bin", "cifar-10-binary.tar.gz", "data_batch_5", "cifar-10-python.tar.gz"]),
    ],
)
def test_nothing_found_says_what_where_and_how(tmp_path: Path, name: str, files: list[str]) -> None:
    with pytest.raises(DataNotFoundError) as caught:
        load(name, directory=tmp_path)
    message = str(caught.value)
    for part in (*files, f"{tmp_path}/{name}", "HVDKIT_DATA", "download=True", "https://"):
        assert part in message
    assert f"python -m hvdkit.datasets {name} --download --directory {tmp_path}" in message
    assert "\n" not in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("absent", NAMES)
def test_one_file_missing_is_named_alone(tmp_path: Path, absent: str) -> None:
    folder = write_set(tmp_path / "mnist")
    (folder / absent).unlink()
    with pytest.raises(DataNotFoundError, match=f"found no {absent} in {folder}, where the other files are"):
        load("mnist", directory=tmp_path)


def gzip_with_a_wrong_checksum(content: bytes) -> bytes:
    packed = bytearray(gzip.compress(content))
    packed[-8] ^= 1
    return bytes(packed)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda content: content[:-1], "and it holds only"),
        (lambda content: content + b"\0", "and it holds more"),
        (lambda content: b"\0\0\x0d" + content[3:], "it starts with bytes 00000d"),
        (lambda _: b"<!DOCTYPE html><html>not found</html>", "it starts with bytes 3c21444f"),
        (lambda content: gzip.compress(content)[:-9], "ended before the end-of-stream marker"),
        (gzip_with_a_wrong_checksum, "CRC"),
        (lambda content: content[:7], "it ends inside its header"),
        (lambda _: b"", "it starts with bytes none"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_damaged_idx_is_named_with_the_reason(
    tmp_path: Path, name: str, damage: Callable[[bytes], bytes], why: str
) -> None:
    write_set(tmp_path)
    (tmp_path / name).write_bytes(damage((tmp_path / name).read_bytes()))
    with pytest.raises(CorruptDataError) as caught:
        load("mnist", directory=tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / name} is corrupt: ")
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_header_that_announces_terabytes_allocates_nothing(tmp_path: Path) -> None:
    write_set(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(struct.pack(">I3I", 0x803, 2**32 - 1, 2**32 - 1, 2**32 - 1) + bytes(100))
    with pytest.raises(CorruptDataError, match="and it holds only 100"):
        load("mnist", directory=tmp_path)


@pytest.mark.parametrize(
    ("name", "array", "why"),
    [
        ("train-labels-idx1-ubyte", Y_TRAIN + 5, "label 2 is 14, expected 0 to 9"),
        ("train-labels-idx1-ubyte", Y_TRAIN[:-1], "7 images and 6 labels"),
        ("t10k-images-idx3-ubyte", X_TEST[:2], "2 images and 3 labels"),
        ("train-images-idx3-ubyte", X_TRAIN[:, :5], r"of shape \(7, 5, 28, 1\), expected uint8 of shape .*28, 28, 1"),
        ("train-images-idx3-ubyte", X_TRAIN[:0], r"shape \(0, 28, 28, 1\)"),
    ],
)
def test_idx_that_does_not_fit_is_named(tmp_path: Path, name: str, array: NDArray[np.uint8], why: str) -> None:
    write_set(tmp_path)
    (tmp_path / name).write_bytes(idx(array))
    with pytest.raises(CorruptDataError, match=why) as caught:
        load("mnist", directory=tmp_path)
    assert str(tmp_path / name) in str(caught.value)


def test_unreadable_file_is_not_called_corrupt(tmp_path: Path) -> None:
    write_set(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    (tmp_path / "t10k-labels-idx1-ubyte").symlink_to("/proc/self/mem")  # reading its first byte is an I/O error
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte cannot be read \(Input/output error\)") as caught:
        load("mnist", directory=tmp_path)
    assert not isinstance(caught.value, CorruptDataError)


@pytest.mark.parametrize(("name", "other"), [("mnist", "fashion_mnist"), ("fashion_mnist", "mnist")])
def test_the_other_set_under_the_same_file_names_is_noticed(tmp_path: Path, name: str, other: str) -> None:
    published = {"mnist": [5, 0, 4, 1, 9, 2, 1, 3, 1, 4], "fashion_mnist": [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]}
    write_set(tmp_path)
    (tmp_path / NAMES[0]).write_bytes(idx(RNG.integers(0, 256, (10, 28, 28), dtype=np.uint8)))
    (tmp_path / NAMES[1]).write_bytes(idx(np.array(published[other], dtype=np.uint8)))
    with pytest.raises(CorruptDataError, match=f"are those of {other}, expected {name}"):
        load(name, directory=tmp_path)
    assert load(other, directory=tmp_path).y_train.tolist() == published[other]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"y_train": None}, "lacks y_train"),
        ({"x_train": np.array([{}, 1], dtype=object)}, "Object arrays cannot be loaded"),
        ({"x_train": X_TRAIN / 255}, "float64 of shape"),
        ({"y_test": Y_TEST[:2]}, "3 images and 2 labels"),
        ({"y_train": Y_TRAIN.astype(np.int64) - 1}, "label 1 is -1, expected 0 to 9"),
        ({"y_train": np.eye(10, dtype=np.uint8)[Y_TRAIN]}, r"labels are uint8 of shape \(7, 10\)"),
        ({"y_train": Y_TRAIN.astype(np.float32)}, "labels are float32"),
    ],
)
def test_npz_that_is_not_the_set(tmp_path: Path, changed: dict[str, Any], why: str) -> None:
    path = tmp_path / "mnist.npz"
    write_npz(path, **changed)
    with pytest.raises(CorruptDataError, match=why) as caught:
        load("mnist", directory=tmp_path)
    assert str(caught.value).startswith(f"{path} is corrupt: ")


def test_names_from_a_file_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "mnist.npz"
    np.savez(path, **{"\x1b[2J\nhvdkit: all is well": Y_TRAIN, "long" * 1000: Y_TRAIN})
    with pytest.raises(CorruptDataError, match=r"it holds \\x1b\[2J\\nhvdkit: all is well") as caught:
        load("mnist", directory=tmp_path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x93NUMPY\x01\x00", b"cos\nsystem\n(S'true'\ntR."])
def test_file_that_is_no_npz(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "mnist.npz").write_bytes(content)
    with pytest.raises(CorruptDataError, match=r"mnist\.npz is corrupt: it is not an npz archive"):
        load("mnist", directory=tmp_path)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("property")


def written(workplace: Path, form: str) -> tuple[Path, Callable[[], Any]]:
    """A good file of a form, and what reads it."""
    path = workplace / ("mnist.npz" if form == "npz" else "images")
    if form == "npz":
        write_npz(path)
        return path, lambda: load("mnist", directory=workplace)
    content = idx(X_TEST[:, :4, :4])
    path.write_bytes(gzip.compress(content) if form == "packed" else content)
    return path, lambda: read_idx(path, 3)


FORMS = st.sampled_from(["plain", "packed", "npz"])


@given(cut=st.floats(0, 1, exclude_max=True), form=FORMS)
@settings(max_examples=400)
def test_a_file_cut_anywhere_is_corrupt(workplace: Path, cut: float, form: str) -> None:
    path, read = written(workplace, form)
    read()
    whole = path.read_bytes()
    path.write_bytes(whole[: int(cut * len(whole))])
    with pytest.raises(CorruptDataError):
        read()


@given(data=st.data(), form=FORMS)
@settings(max_examples=500)
def test_a_file_with_changed_bytes_raises_nothing_else(workplace: Path, data: st.DataObject, form: str) -> None:
    path, read = written(workplace, form)
    content = bytearray(path.read_bytes())
    headers = [content.find(b"\x93NUMPY", start) for start in range(0, len(content), 1000)]
    for _ in range(data.draw(st.integers(1, 4)) if form == "npz" else 1):
        near_a_header = data.draw(st.sampled_from(headers)) + data.draw(st.integers(-60, 130))
        place = near_a_header if form == "npz" else data.draw(st.integers(0, len(content) - 1))
        content[place % len(content)] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        found = read()
    except CorruptDataError as error:
        assert str(path) in str(error)
    else:
        assert form == "npz" or found.size == X_TEST[:, :4, :4].size
