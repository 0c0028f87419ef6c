"""What each rank runs is found, or refused, before anything is started."""

import os
from pathlib import Path

import pytest

from hvdkit.errors import InvalidArgumentError
from hvdkit.jobs.launch.facts import resolve

PYTHON = Path("/own/bin/python3.11")


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A search path with one ``python`` and one ``tool``, and a working directory with ``train.py``."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("python", "tool"):
        (programs / name).touch(mode=0o755)
    (tmp_path / "train.py").write_text("pass\n")
    (tmp_path / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    return str(programs)


@pytest.mark.parametrize(
    ("words", "expected", "script"),
    [
        (["train.py", "-n", "7"], [str(PYTHON), "train.py", "-n", "7"], 1),
        (["./train.py"], [str(PYTHON), "./train.py"], 1),
        (["python", "train.py", "--epochs", "3"], ["{bin}/python", "train.py", "--epochs", "3"], 1),
        (["python3.11", "train.py"], [str(PYTHON), "train.py"], 1),
        (["python", "-u", "-W", "ignore", "-Xdev", "-X", "utf8", "-OO", "train.py"], None, 8),
        (["python", "-Wignore", "train.py"], None, 2),
        (["python", "-m", "nosuch.module", "nosuch.py"], None, None),
        (["python", "-um", "nosuch.module"], None, None),
        (["python", "-c", "print(1)", "nosuch.py"], None, None),
        (["python", "-", "nosuch.py"], None, None),
        (["python", "--version"], None, None),
        (["python"], None, None),
        (["tool", "nosuch.py"], ["{bin}/tool", "nosuch.py"], None),
        (["bin/tool"], ["{bin}/tool"], None),
    ],
)
def test_commands_that_exist(path, words, expected, script):
    command = resolve(words, path, PYTHON)
    expected = expected or ["{bin}/python", *words[1:]]
    assert list(command.words) == [word.format(bin=path) for word in expected]
    assert command.script == script


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "No command"),
        (["nosuch.py"], "Script 'nosuch.py' does not exist in "),
        (["python", "nosuch.py"], "Script 'nosuch.py' does not exist in "),
        (["python", "-u", "-X", "dev", "nosuch.py", "train.py"], "Script 'nosuch.py'"),
        (["nosuch"], "Command 'nosuch' was not found on PATH"),
        (["./nosuch"], "Command './nosuch' does not exist"),
        (["bin/python3", "train.py"], "Command 'bin/python3' does not exist"),
        (["./notes.txt"], "Command './notes.txt' is not an executable file"),
    ],
)
def test_commands_that_do_not_exist(path, words, message):
    with pytest.raises(InvalidArgumentError) as caught:
        resolve(words, path, PYTHON)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_link_to_an_interpreter_is_not_followed(path, tmp_path):
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv/python").symlink_to(Path(path) / "python")
    command = resolve(["python", "train.py"], os.pathsep.join([str(tmp_path / "venv"), path]), PYTHON)
    assert command.words[0] == str(tmp_path / "venv/python")
