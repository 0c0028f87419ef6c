"""What stands at the place of an output stays whole, or is refused."""

import gzip
import os
import stat
from pathlib import Path

import pytest

from hvdkit.common.files import complete_or_absent, content, exists, is_directory, is_file, opened, replacing, text
from hvdkit.errors import InvalidArgumentError


def test_the_old_file_stays_until_the_new_one_is_complete(tmp_path):
    path = tmp_path / "out.json"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), replacing(path) as file:
        file.write(b"new")
        raise ZeroDivisionError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with replacing(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_nobody_else_sees_or_redirects_what_is_being_written(tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "out").symlink_to("victim")
    names = set()
    for _ in range(3):
        with complete_or_absent(tmp_path / "out") as file:
            file.write(b"new")
            names.add(file.name)
            assert stat.S_IMODE(os.stat(file.name).st_mode) == 0o600  # noqa: PTH116
    assert len(names) == 3 and all(os.path.dirname(name) == str(tmp_path) for name in names)  # noqa: PTH120
    assert (tmp_path / "out").read_text() == "new" and not (tmp_path / "out").is_symlink()
    assert (tmp_path / "victim").read_text() == "precious" and len(list(tmp_path.iterdir())) == 2


def test_only_ordinary_files_of_some_size_are_read(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert content(path, most=5) == b"12345" and text(path) == "12345"
    with pytest.raises(OSError, match="it holds more than"):
        content(path, most=4)
    packed = gzip.compress(bytes(4096))
    path.write_bytes(packed * 2)
    assert content(path, unzip=True) == bytes(8192) and content(path) == packed * 2
    with pytest.raises(OSError, match="it holds more than"):
        content(path, most=8191, unzip=True)
    path.write_bytes(packed[:-9])
    with pytest.raises(EOFError):
        content(path, unzip=True)
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path / "pipe", "/dev/zero", "/dev/null"):
        with pytest.raises(OSError, match="a device, a pipe or a socket"):
            opened(Path(other))
    with pytest.raises(IsADirectoryError):
        opened(tmp_path)


def test_what_is_no_ordinary_file_is_not_replaced_by_one(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(InvalidArgumentError, match=r"'.*pipe' is no ordinary file"), replacing(path):
        pytest.fail("it was opened")
    assert path.is_fifo()


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "missing", "file/below", "circle"])
def test_nothing_is_where_nothing_can_be(tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to("circle")
    path = tmp_path / name
    assert not exists(path) and not is_file(path) and not is_directory(path)
    assert is_file(tmp_path / "file") and is_directory(tmp_path) and exists(tmp_path) and not is_file(tmp_path)
