"""HDF5 files as data sets: the same values however they lie in the file, in every process."""

import errno
import multiprocessing
import os
import random
import subprocess
import sys

import numpy as np
import pytest

from hvdkit.datasets import HDF5Dataset, write_hdf5
from hvdkit.errors import CorruptDataError, DataError, DataNotFoundError, InvalidArgumentError

h5py = pytest.importorskip("h5py", reason="pip install 'hvdkit[data]'")
X = np.arange(50 * 6, dtype=np.float32).reshape(50, 2, 3)
Y = np.arange(50, dtype=np.int64) * 7
LAYOUTS = {
    "one piece": {},
    "a sample in a chunk": {"chunks": (1, 2, 3)},
    "chunks of 7": {"chunks": (7, 2, 3), "maxshape": (None, 2, 3)},
    "chunks across samples": {"chunks": (16, 1, 2)},
    "compressed": {"chunks": (7, 2, 3), "compression": "gzip"},
    "shuffled": {"chunks": (7, 2, 3), "shuffle": True},
    "with checksums": {"chunks": (7, 2, 3), "fletcher32": True},
    "big-endian": {"dtype": ">f4"},
}
INDICES = [[3], [0, 1, 2, 3], [49, 0, 25, 25, 3, -1], list(range(50)), [8, 6, 7], []]


@pytest.fixture
def path(tmp_path):
    write_hdf5(tmp_path / "d.h5", {"x": X, "group/y": Y}, attributes={"made": "here"})
    return tmp_path / "d.h5"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_samples(tmp_path, layout):
    path = tmp_path / "d.h5"
    with h5py.File(path, "w", userblock_size=1024) as file:
        file.create_dataset("x", data=X, **LAYOUTS[layout])
        file["y"] = Y
    found = HDF5Dataset(path, ("x", "y"))
    assert len(found) == 50
    for indices in INDICES:
        x, y = found.batch(indices)
        assert np.array_equal(x, X[indices]) and np.array_equal(y, Y[np.array(indices, int)])
        assert x.dtype == np.float32 and x.dtype.isnative and x.flags.writeable
        samples = found.__getitems__(indices)
        assert len(samples) == len(indices)
        for index, (one, label) in zip(indices, samples, strict=True):
            assert np.array_equal(one, X[index]) and label == Y[index]
    assert np.array_equal(found[-2][0], X[48])


@pytest.mark.parametrize("chunks", [None, 1, 7, 50])
@pytest.mark.parametrize("dtype", ["<f4", ">i2", "?"])
def test_whole_samples_are_read_without_the_library(tmp_path, chunks, dtype, monkeypatch):
    """The library costs a read for each sample; of compressed chunks and cut samples it cannot be avoided."""
    values = (X % 5).astype(dtype)
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=None if chunks is None else (chunks, 2, 3))
    found = HDF5Dataset(tmp_path / "d.h5", "x")
    found[0]
    monkeypatch.setattr(h5py.Dataset, "__getitem__", None)
    for indices in INDICES:
        (x,) = found.batch(indices)
        assert x.dtype.isnative and x.flags.writeable and np.array_equal(x, values[np.array(indices, int)])


def test_chunks_that_were_never_written_hold_the_fill_value(tmp_path):
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file.create_dataset("x", shape=(20, 2), dtype="f4", chunks=(4, 2), fillvalue=3)[5] = 1
    assert HDF5Dataset(tmp_path / "d.h5", "x").batch([5, 6, 0, 19])[0][:, 1].tolist() == [1, 3, 3, 3]


def linked_outside(file):
    file["pad"] = np.zeros(5000)  # the place of x in the other file holds something else here
    file["x"] = h5py.ExternalLink("source.h5", "x")


def group_linked_outside(file):
    file["pad"] = np.zeros(5000)
    file["x"] = h5py.ExternalLink("source.h5", "/")


def linked_softly(file):
    file["group/y"] = X
    file["x"] = h5py.SoftLink("/group/y")


def linked_softly_outside(file):
    linked_outside(file)
    file["x"].file.close()
    file["y"], file["soft"] = X, h5py.SoftLink("x")


def virtual(file):
    layout = h5py.VirtualLayout(X.shape, X.dtype)
    layout[:20] = h5py.VirtualSource("source.h5", "x", X.shape)[:20]
    layout[20:] = h5py.VirtualSource(".", "own", X.shape)[20:]
    file["own"] = X
    file.create_virtual_dataset("x", layout, fillvalue=-1)


def raw_outside(file):
    X.tofile("raw.bin")
    file.create_dataset("x", X.shape, X.dtype, external=[("raw.bin", 0, X.nbytes)])


def of_twelve_bits(file):
    stored = h5py.h5t.STD_I16LE.copy()
    stored.set_precision(12)
    stored.set_offset(4)
    low = h5py.h5d.create(file.id, b"x", stored, h5py.h5s.create_simple(X.shape))
    low.write(h5py.h5s.ALL, h5py.h5s.ALL, X.astype("i2"))


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (linked_outside, "x"), (group_linked_outside, "x/x"), (linked_softly, "x"), (linked_softly, "/group/./y"),
        (linked_softly_outside, "soft"), (of_twelve_bits, "x"),
    ],
)  # fmt: skip
def test_samples_that_lie_elsewhere_or_otherwise_are_the_right_ones(tmp_path, write, name, monkeypatch):
    """A look at this file's own bytes at their place would give other values, and say nothing."""
    monkeypatch.chdir(tmp_path)
    with h5py.File("source.h5", "w") as file:
        file["x"] = X
    with h5py.File("d.h5", "w") as file:
        write(file)
    found = HDF5Dataset(tmp_path / "d.h5", name)
    for indices in INDICES:
        assert np.array_equal(found.batch(indices)[0], X[indices])


@pytest.mark.parametrize("write", [virtual, raw_outside])
def test_arrays_that_hdf5_fills_up_where_a_source_is_missing_are_refused(tmp_path, write, monkeypatch):
    """HDF5 gives the fill value, or zeros, for samples whose file is gone or cut off."""
    monkeypatch.chdir(tmp_path)
    with h5py.File("d.h5", "w") as file:
        write(file)
    refused(DataError, "'x' in 'd.h5' takes its samples from other files", "d.h5", "x")


@pytest.mark.parametrize("chunks", [None, (7, 2, 3)])
def test_what_this_process_is_writing_is_left_to_the_library(tmp_path, chunks):
    """What it has not written yet is not in the file."""
    with h5py.File(tmp_path / "d.h5", "w") as file:
        values = file.create_dataset("x", data=X, chunks=chunks)
        file.flush()
        found = HDF5Dataset(tmp_path / "d.h5", "x")
        assert np.array_equal(found[3], X[3])
        values[3] = -1
        assert np.all(found[3] == -1)


def test_what_another_process_is_writing_is_refused(path):
    code = f"import h5py; file = h5py.File({str(path)!r}, 'r+'); print(flush=True); input()"
    writer = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None and writer.stdout.readline() == "\n"
    try:
        refused(DataError, "d.h5' cannot be read .*unable to lock file", path, "x")
    finally:
        writer.communicate("\n")
    assert np.array_equal(HDF5Dataset(path, "x")[3], X[3])


def in_one_piece(file):
    file["x"] = X


def compressed(file):
    file.create_dataset("x", data=X, chunks=(16, 1, 2), compression="gzip")


MOST_COMPARED = 100


def mutated(content, chance):
    """The bytes with some changed, cut off, or two blocks exchanged."""
    content = bytearray(content)
    what = chance.choice(["bits", "bits", "bytes", "cut", "exchange"])
    for _ in range(chance.choice([1, 2, 8]) if what in ("bits", "bytes") else 0):
        place = chance.randrange(len(content))
        content[place] = content[place] ^ 1 << chance.randrange(8) if what == "bits" else chance.randrange(256)
    if what == "cut":
        del content[chance.randrange(len(content)) :]
    if what == "exchange":
        size = chance.choice([8, 64, 512])
        one, other = (chance.randrange(len(content) - size) for _ in range(2))
        content[one : one + size], content[other : other + size] = (
            content[other : other + size], content[one : one + size],
        )  # fmt: skip
    return bytes(content)


def by_the_library(path):
    """The number of samples and the first ones; None where it finds the file damaged."""
    try:
        with h5py.File(path) as file:
            count = len(file["x"])
            return count, [np.asarray(file["x"][index]) for index in range(min(count, MOST_COMPARED))]
    except Exception:
        return None


@pytest.mark.parametrize("damage", ["size", "order"])
def test_a_damaged_list_of_chunks(tmp_path, damage):
    """Of the entries of the B-tree, two are exchanged, or one says that its chunk has no bytes."""
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file.create_dataset("x", data=X, chunks=(7, 2, 3))
    content = bytearray((tmp_path / "d.h5").read_bytes())
    start, step = content.index(b"TREE\x01") + 24, 4 + 4 + 8 * 4 + 8  # size, filters, offsets, address
    one, other = (slice(start + number * step, start + (number + 1) * step) for number in (2, 3))
    if damage == "size":
        content[one.start : one.start + 4] = bytes(4)
    else:
        content[one], content[other] = content[other], content[one]
    (tmp_path / "d.h5").write_bytes(content)
    if damage == "size":
        with pytest.raises(CorruptDataError, match="chunks of '/x' that are not of 168 bytes"):
            HDF5Dataset(tmp_path / "d.h5", "x")[0]
        return
    theirs = by_the_library(tmp_path / "d.h5")[1]
    assert not np.array_equal(theirs, X)
    assert np.array_equal(HDF5Dataset(tmp_path / "d.h5", "x").batch(range(50))[0], theirs)


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("write", [in_one_piece, compressed, linked_outside, linked_softly])
def test_a_damaged_file_is_one_sentence_or_the_librarys_samples(tmp_path, monkeypatch, write, libver):
    """h5py raises nearly anything."""
    monkeypatch.chdir(tmp_path)
    with h5py.File("source.h5", "w") as file:
        file["x"] = X
    with h5py.File("whole.h5", "w", libver=libver) as file:
        file.attrs["made"] = 3.0  # no text: for a damaged one the HDF5 library itself can loop forever
        write(file)
    whole = {name: (tmp_path / name).read_bytes() for name in ("whole.h5", "source.h5")}
    chance = random.Random(f"{write.__name__} {libver}")  # noqa: S311
    errors = 0
    for number in range(24):
        name = chance.choice(["whole.h5", "whole.h5", "source.h5"])
        folder = tmp_path / str(number)  # a new one each: HDF5 keeps what it could not close
        folder.mkdir()
        monkeypatch.chdir(folder)
        for other, content in whole.items():
            (folder / other).write_bytes(mutated(content, chance) if other == name else content)
        theirs = by_the_library("whole.h5")
        try:
            data = HDF5Dataset("whole.h5", "x")
            found = data.batch(range(min(len(data), MOST_COMPARED)))[0]
        except DataError as error:
            assert "\n" not in str(error) and ".h5'" in str(error)
            errors += 1
            continue
        assert theirs is not None and theirs[0] == len(data)
        for one, other in zip(found, theirs[1], strict=True):
            assert np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    assert errors > 3


@pytest.mark.parametrize("chunks", [None, (7, 2, 3)])
def test_a_file_that_became_shorter_is_refused(tmp_path, chunks):
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file.create_dataset("x", data=X, chunks=chunks)
    found = HDF5Dataset(tmp_path / "d.h5", "x")
    (tmp_path / "d.h5").write_bytes((tmp_path / "d.h5").read_bytes()[:-600])
    with pytest.raises(DataError):
        found[49]


def test_one_name_and_names_in_groups(path):
    alone = HDF5Dataset(path, "x")
    assert np.array_equal(alone[4], X[4]) and np.array_equal(alone.__getitems__([4, 2])[1], X[2])
    assert HDF5Dataset(path, ["group/y"])[5] == (35,)
    assert alone.attributes == {"made": "here"}


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ([50], IndexError), ([-51], IndexError),
        ([0.5], InvalidArgumentError), ([[1, 2]], InvalidArgumentError), (["a"], InvalidArgumentError),
    ],
)  # fmt: skip
def test_samples_that_are_not_there(path, wrong, error):
    with pytest.raises(error):
        HDF5Dataset(path, "x").batch(wrong)
    assert len(list(HDF5Dataset(path, "x"))) == 50  # an IndexError ends a loop over the samples


def test_a_forked_and_a_spawned_process_open_the_file_for_themselves(path):
    data = HDF5Dataset(path, ("x", "group/y"))
    data[0]
    handle = data._file
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            for index, (x, y) in enumerate(pool.map(data.__getitem__, range(20))):
                assert np.array_equal(x, X[index]) and y == Y[index]
    assert data._file is handle and handle
    if (child := os.fork()) == 0:
        data[1]
        os._exit(0 if data._file is not handle and not handle else 1)
    assert os.waitpid(child, 0)[1] == 0, "the child did not open the file anew"
    assert np.array_equal(data[1][0], X[1]), "what the child closed was its own"


@pytest.mark.parametrize("workers", [0, 2])
def test_pytorch_loads_whole_batches(path, workers, monkeypatch):
    torch = pytest.importorskip("torch")
    data = HDF5Dataset(path, ("x", "group/y"))
    if workers == 0:
        monkeypatch.delattr(HDF5Dataset, "__getitem__")  # a batch is one read, not one for each sample
    data.batch([0])  # the workers are forked from a process with an open file
    seen = list(torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, num_workers=workers))
    assert all(type(batch) is list and len(batch) == 2 for batch in seen)
    order = torch.cat([y for _, y in seen])
    assert sorted(order.tolist()) == Y.tolist()
    assert torch.equal(torch.cat([x for x, _ in seen]), torch.from_numpy(X)[order // 7])


def refused(error, message, *arguments):
    with pytest.raises(error, match=message) as raised:
        HDF5Dataset(*arguments)
    assert "\n" not in str(raised.value)


def test_mistakes_are_one_sentence(tmp_path, path):
    refused(DataNotFoundError, "there is nothing at .*none.h5", tmp_path / "none.h5", "x")
    refused(DataNotFoundError, "a directory", tmp_path, "x")
    refused(DataError, "'z' is not there in .*its arrays are: group/y, x", path, ("x", "z"))
    refused(DataError, "'group' is a group", path, "group")
    refused(InvalidArgumentError, "names is empty", path, ())
    (tmp_path / "text.h5").write_text("x" * 5000)
    refused(CorruptDataError, "cannot be read", tmp_path / "text.h5", "x")
    (tmp_path / "cut.h5").write_bytes(path.read_bytes()[:-200])
    refused(CorruptDataError, "cut.h5", tmp_path / "cut.h5", "x")
    with h5py.File(tmp_path / "u.h5", "w") as file:
        file["x"], file["y"], file["one"] = X, Y[:40], 3.0
    refused(DataError, "/x 50, /y 40", tmp_path / "u.h5", ("x", "y"))
    refused(DataError, "single value", tmp_path / "u.h5", "one")


def test_a_file_system_without_locks_is_no_damage(path, monkeypatch):
    whole = h5py.File

    def without_locks(name, mode, locking=None):
        if locking is None:
            raise OSError(errno.ENOLCK, "unable to lock file")
        return whole(name, mode, locking=locking)

    monkeypatch.setattr(h5py, "File", without_locks)
    assert np.array_equal(HDF5Dataset(path, "x")[3], X[3])


def test_of_many_arrays_some_are_named(tmp_path):
    write_hdf5(tmp_path / "d.h5", {f"a{number:02}": X[:1] for number in range(30)})
    refused(DataError, "a19 and 10 more", tmp_path / "d.h5", "x")


def test_a_damaged_array_is_named(tmp_path):
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["x"] = X
        place = (
            file.create_dataset("g/y", data=X, chunks=(50, 2, 3), compression="gzip").id.get_chunk_info(0).byte_offset
        )
    content = bytearray((tmp_path / "d.h5").read_bytes())
    content[place : place + 9] = bytes(9)
    (tmp_path / "d.h5").write_bytes(content)
    data = HDF5Dataset(tmp_path / "d.h5", ("x", "g/y"))
    with pytest.raises(CorruptDataError, match=r"^'g/y' in '.*d.h5' cannot be read"):
        data[0]


def test_a_file_that_changed_meanwhile_is_refused(path):
    data = HDF5Dataset(path, "x")
    write_hdf5(path, {"x": X[:10]})
    with pytest.raises(DataError, match="another number of samples"):
        data[20]


def test_writing_is_all_or_nothing(path, tmp_path):
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_hdf5(path, {"x": X, "y": np.array([object()])})
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["d.h5"]
    with pytest.raises(DataError, match="cannot write"):
        write_hdf5(tmp_path / "none" / "d.h5", {"x": X})
    with pytest.raises(InvalidArgumentError, match="'x' is a single value"):
        write_hdf5(path, {"x": np.float64(3)})
    write_hdf5(path, {"x": X[:0], "y": [1, 2, 3]})
    assert len(HDF5Dataset(path, "x")) == 0 and HDF5Dataset(path, "y").batch([2, 0])[0].tolist() == [3, 1]


def test_without_h5py_the_extra_is_named(path):
    code = (
        f"import sys; sys.modules['h5py'] = None\nfrom hvdkit import datasets, MissingFrameworkError\n"
        f"try: datasets.HDF5Dataset({str(path)!r}, 'x')\nexcept MissingFrameworkError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'hvdkit[data]'" in done.stdout
