"""What stands at the place of an output stays whole, or is refused."""

import os

import pytest

from hvdkit.common.files import replacing
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


def test_what_is_no_ordinary_file_is_not_replaced_by_one(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(InvalidArgumentError, match=r"'.*pipe' is no ordinary file"), replacing(path):
        pytest.fail("it was opened")
    assert path.is_fifo()
