"""CIFAR-10 in every published layout, and pickles that would run something if they were loaded."""

import io
import os
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hvdkit.datasets import formats, load
from hvdkit.datasets.formats import ImageFormat, _pickled_batch
from hvdkit.errors import CorruptDataError, DataError

BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
RNG = np.random.default_rng(1)
ROWS = {name: RNG.integers(0, 256, (2, 3072), dtype=np.uint8) for name in BATCHES}
LABELS = {name: [index, 9 - index] for index, name in enumerate(BATCHES)}


def binary(name: str) -> bytes:
    return b"".join(bytes([label]) + row.tobytes() for label, row in zip(LABELS[name], ROWS[name], strict=True))


def python2(name: str, rows: NDArray[Any] | None = None, labels: list[int] | None = None) -> bytes:
    """A batch as cPickle of Python 2 wrote the published ones: protocol 2, byte strings, BINSTRING data."""
    array = ROWS[name] if rows is None else rows
    return b"".join(
        (
            b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03",
            b"U\x06labelsq\x04]q\x05(",
            *(b"J" + struct.pack("<i", label) for label in labels or LABELS[name]),
            b"eU\x04dataq\x06cnumpy.core.multiarray\n_reconstruct\nq\x07",
            b"cnumpy\nndarray\nq\x08K\x00\x85q\x09U\x01bq\x0a\x87q\x0bRq\x0c",
            b"(K\x01" + struct.pack("<BHBH", 0x4D, array.shape[0], 0x4D, array.shape[1]) + b"\x86q\x0d",
            b"cnumpy\ndtype\nq\x0eU\x02" + array.dtype.str[-2:].encode() + b"q\x0fK\x00K\x01\x87q\x10Rq\x11",
            b"(K\x03U\x01|q\x12NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
            b"\x89T" + struct.pack("<I", array.nbytes) + array.tobytes() + b"q\x13tb",
            b"U\x09filenamesq\x14]q\x15U\x05a.pngq\x16au.",
        )
    )


def write_batches(folder: Path, encode: Callable[[str], bytes], suffix: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in BATCHES:
        (folder / f"{name}{suffix}").write_bytes(encode(name))


def write_archive(path: Path, top: str, files: dict[str, bytes], mode: str = "w:gz") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        folder = tarfile.TarInfo(top)
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, content in files.items():
            member = tarfile.TarInfo(f"{top}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def assert_is_the_set(directory: Path) -> None:
    data = load("cifar10", directory=directory)
    assert data.x_train.shape == (10, 32, 32, 3)
    assert data.x_train.dtype == np.float32
    assert data.x_train.flags.c_contiguous
    assert data.x_test.shape == (2, 32, 32, 3)
    assert data.y_train.tolist() == [label for name in BATCHES[:5] for label in LABELS[name]]
    assert data.y_test.tolist() == LABELS["test_batch"]
    # Row 1 of the third batch is image 5: red, green, blue planes of 32 rows of 32 pixels.
    for channel, row, column in ((0, 0, 0), (1, 2, 31), (2, 31, 7)):
        expected = ROWS["data_batch_3"][1, channel * 1024 + row * 32 + column]
        assert round(float(data.x_train[5, row, column, channel]) * 255) == expected


@pytest.mark.parametrize("folder", [".", "cifar10", "cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"])
def test_binary_batches(tmp_path: Path, folder: str) -> None:
    write_batches(tmp_path / folder, binary, ".bin")
    assert_is_the_set(tmp_path)


@pytest.mark.parametrize("folder", [".", "cifar10", "cifar-10-batches-py", "cifar10/cifar-10-batches-py"])
def test_pickled_batches_of_python_2(tmp_path: Path, folder: str) -> None:
    write_batches(tmp_path / folder, python2)
    assert_is_the_set(tmp_path)


@pytest.mark.parametrize("mode", ["w:gz", "w"])
@pytest.mark.parametrize(
    ("archive", "top", "encode", "suffix"),
    [
        ("cifar-10-binary.tar.gz", "cifar-10-batches-bin", binary, ".bin"),
        ("cifar-10-python.tar.gz", "cifar-10-batches-py", python2, ""),
    ],
)
def test_archives_are_read_where_they_are(
    tmp_path: Path, mode: str, archive: str, top: str, encode: Callable[[str], bytes], suffix: str
) -> None:
    files = {f"{name}{suffix}": encode(name) for name in reversed(BATCHES)} | {"readme.html": b"<html>"}
    write_archive(tmp_path / "cifar10" / archive, top, files, mode)
    assert_is_the_set(tmp_path)
    assert [path.name for path in (tmp_path / "cifar10").iterdir()] == [archive]


def test_npz(tmp_path: Path) -> None:
    def images(names: tuple[str, ...]) -> NDArray[np.uint8]:
        return np.concatenate([ROWS[name] for name in names]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)

    def labels(names: tuple[str, ...]) -> NDArray[np.int64]:
        return np.array([[label] for name in names for label in LABELS[name]])

    np.savez(
        tmp_path / "cifar10.npz",
        x_train=images(BATCHES[:5]),
        y_train=labels(BATCHES[:5]),
        x_test=images(BATCHES[5:]),
        y_test=labels(BATCHES[5:]),
    )
    assert_is_the_set(tmp_path)


def test_binary_is_preferred_to_pickles(tmp_path: Path) -> None:
    write_batches(tmp_path, lambda _: b"not even a pickle")
    write_batches(tmp_path, binary, ".bin")
    assert_is_the_set(tmp_path)


def changed_batch(tmp_path: Path, content: bytes, name: str = "data_batch_2") -> Path:
    write_batches(tmp_path, python2)
    (tmp_path / name).write_bytes(content)
    return tmp_path / name


class Payload:
    """What a hostile pickle does when it is loaded."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.reduced


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("place", ["top", "data", "labels", "key", "unused entry"])
def test_payload_is_refused_and_not_run(tmp_path: Path, protocol: int, place: str) -> None:
    target = tmp_path / "was-run"
    payload = Payload(os.mkdir, str(target))
    batch: Any = {"data": 1, "labels": LABELS["data_batch_2"]}
    if place == "top":
        batch = payload
    elif place == "key":
        batch[payload] = 1
    else:
        batch[place] = payload
    content = pickle.dumps(batch, protocol)
    path = changed_batch(tmp_path, content)
    with pytest.raises(CorruptDataError, match=r"asks for posix\.mkdir") as caught:
        load("cifar10", directory=tmp_path)
    assert str(path) in str(caught.value)
    assert not target.exists()
    pickle.loads(content)  # noqa: S301 proves that the payload is one
    assert target.exists()


@pytest.mark.parametrize(
    ("content", "asked"),
    [
        (b"cbuiltins\neval\n(S'1'\ntR.", "builtins.eval"),
        (b"c__builtin__\neval\n(S'1'\ntR.", "__builtin__.eval"),
        (b"(S'true'\nios\nsystem\n.", "os.system"),
        (b"cnumpy\nload\n(S'x'\ntR.", "numpy.load"),
        (b"cnumpy.core.multiarray\n_reconstruct.__globals__\n.", "numpy.core.multiarray._reconstruct.__globals__"),
        (b"\x80\x04\x8c\x05numpy\x8c\x12ndarray.__class__x\x93.", "numpy.ndarray.__class__x"),
        (b"c_codecs\ndecode\n(S'x'\nS'rot13'\ntR.", "_codecs.decode"),
    ],
)
def test_every_other_name_is_refused(tmp_path: Path, content: bytes, asked: str) -> None:
    path = changed_batch(tmp_path, content)
    with pytest.raises(CorruptDataError) as caught:
        load("cifar10", directory=tmp_path)
    assert str(caught.value).startswith(f"{path} is corrupt: it asks for {asked}, ")


def test_payload_inside_an_archive_is_named_with_its_member(tmp_path: Path) -> None:
    files = {name: python2(name) for name in BATCHES} | {"test_batch": b"cos\nsystem\n(S'true'\ntR."}
    archive = tmp_path / "cifar-10-python.tar.gz"
    write_archive(archive, "cifar-10-batches-py", files)
    with pytest.raises(
        CorruptDataError, match=r"cifar-10-python\.tar\.gz:test_batch is corrupt: it asks for os\.system"
    ):
        load("cifar10", directory=tmp_path)


def test_wild_memo_number_allocates_nothing(tmp_path: Path) -> None:
    """It would be 64 GB."""
    changed_batch(tmp_path, b"\x80\x02}r\xff\xff\xff\xff.")
    with pytest.raises(CorruptDataError, match="lacks data and labels"):
        load("cifar10", directory=tmp_path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (pickle.dumps([1, 2], 3), "no dictionary"),
        (pickle.dumps({b"labels": [1, 2]}, 3), "lacks data"),
        (pickle.dumps({}, 3), "lacks data and labels"),
        (pickle.dumps({b"data": b"text", b"labels": [1, 2]}, 3), "its data is not an array"),
        (pickle.dumps({b"data": b"text", b"labels": [1, "2"]}, 3), "not whole numbers"),
        (pickle.dumps({b"data": b"text", b"labels": None}, 3), "not whole numbers"),
        (python2("test_batch", ROWS["test_batch"].astype(np.int16)), "not an array of uint8"),
        (python2("test_batch", ROWS["test_batch"][:, :9]), r"of shape \(2, 9\), expected \(n, 3072\)"),
        (python2("test_batch", labels=[1, 10]), "label 1 is 10, expected 0 to 9"),
        (python2("test_batch", labels=[1, -1]), "label 1 is -1, expected 0 to 9"),
        (python2("test_batch", labels=[1]), "2 images and 1 labels"),
        (python2("test_batch")[:-1], "EOFError"),
    ],
)
def test_pickle_of_something_else(tmp_path: Path, content: bytes, why: str) -> None:
    path = changed_batch(tmp_path, content)
    with pytest.raises(CorruptDataError, match=why) as caught:
        load("cifar10", directory=tmp_path)
    assert str(caught.value).startswith(f"{path} is corrupt: ")


def test_pickle_whose_data_does_not_fill_its_shape(tmp_path: Path) -> None:
    content = python2("data_batch_2").replace(struct.pack("<BH", 0x4D, 2), struct.pack("<BH", 0x4D, 3), 1)
    changed_batch(tmp_path, content)
    with pytest.raises(CorruptDataError, match=r"array of shape \(3, 3072\) comes with 6144 bytes"):
        load("cifar10", directory=tmp_path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (binary("test_batch")[:-1], "6145 bytes are not a whole number of 3073-byte records"),
        (b"", "0 bytes are not a whole number"),
        (b"\x0a" + binary("test_batch")[1:], "label 0 is 10, expected 0 to 9"),
    ],
)
def test_damaged_binary_batch(tmp_path: Path, content: bytes, why: str) -> None:
    write_batches(tmp_path, binary, ".bin")
    path = tmp_path / "data_batch_4.bin"
    path.write_bytes(content)
    with pytest.raises(CorruptDataError, match=why) as caught:
        load("cifar10", directory=tmp_path)
    assert str(path) in str(caught.value)


def test_archive_without_a_batch(tmp_path: Path) -> None:
    files = {f"{name}.bin": binary(name) for name in BATCHES if name != "data_batch_3"}
    archive = tmp_path / "cifar-10-binary.tar.gz"
    write_archive(archive, "cifar-10-batches-bin", files)
    with pytest.raises(CorruptDataError, match=r"cifar-10-binary\.tar\.gz is corrupt: it lacks data_batch_3\.bin"):
        load("cifar10", directory=tmp_path)


def test_link_in_an_archive_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(binary("test_batch"))
    archive = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in BATCHES:
            member = tarfile.TarInfo(f"{name}.bin")
            member.type = tarfile.SYMTYPE
            member.linkname = str(tmp_path / "secret")
            tar.addfile(member)
    with pytest.raises(CorruptDataError, match=r"it lacks data_batch_1\.bin"):
        load("cifar10", directory=tmp_path)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("property")


@given(cut=st.floats(0, 1, exclude_max=True))
@settings(max_examples=100)
def test_archive_cut_anywhere_is_corrupt(workplace: Path, cut: float) -> None:
    archive = workplace / "cifar-10-binary.tar.gz"
    write_archive(archive, "cifar-10-batches-bin", {f"{name}.bin": binary(name) for name in BATCHES})
    whole = archive.read_bytes()
    archive.write_bytes(whole[: int(cut * len(whole) * 0.99)])  # the end of a tar archive is padding
    with pytest.raises(CorruptDataError, match=r"cifar-10-binary\.tar\.gz"):
        load("cifar10", directory=workplace)


@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")
@given(data=st.data())
@settings(max_examples=600)
def test_pickle_with_changed_bytes_raises_nothing_else(data: st.DataObject) -> None:
    changed = bytearray(python2("test_batch", ROWS["test_batch"][:, :3]))
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        images, labels = _pickled_batch(bytes(changed), "f", ImageFormat(1, 3, 1, classes=10))
    except CorruptDataError as error:
        assert str(error).isprintable()
    else:
        assert images.dtype == np.uint8 and len(images) == len(labels)


@pytest.mark.parametrize("holes", [True, False])
def test_an_archive_that_unpacks_to_more_than_any_data_set_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holes: bool
) -> None:
    monkeypatch.setattr(formats, "MOST_BYTES", 1 << 20)
    member = tarfile.TarInfo("data_batch_1.bin")
    member.size = 1 << 21 if not holes else 0
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz", format=tarfile.GNU_FORMAT) as archive:
        if holes:  # a sparse member: no data, and a length
            member.type = tarfile.GNUTYPE_SPARSE
            header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
            header[386:482] = bytes(96)
            header[483:495] = b"%011o\0" % (1 << 32)
            header[148:156] = b" " * 8
            header[148:156] = b"%06o\0 " % sum(header)
            archive.fileobj.write(header)
            archive.offset += len(header)
        else:
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    with pytest.raises(DataError, match=r"(holds more than 1 MiB|unpacks to 4294967296 bytes)") as caught:
        load("cifar10", directory=tmp_path)
    assert "\n" not in str(caught.value)
