"""``hvdkit install`` as a user meets it, as far as nothing is compiled: usage, what is missing, --explain."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from install_machine import COMPILER, ROOT

from hvdkit.prepare.install.adjust import patches


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory with a cache to be, and a PyTorch that says it is one; importing it would raise."""
    torch = tmp_path / "packages/torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (torch / "version.py").write_text("__version__ = '9.9.9+cpu'\ncuda = None\nhip = None\ngit_version = 'abc'\n")
    (tmp_path / "empty").mkdir()
    return tmp_path


def install(home: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command where no compiler and no MPI is on PATH, unless ``environ`` says otherwise."""
    base = {name: value for name, value in os.environ.items() if name not in ("CXX", "CC", "CRAY_MPICH_DIR")}
    hidden = {
        "PATH": str(home / "empty"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "PYTHONPATH": f"{home / 'packages'}{os.pathsep}{ROOT}",
    }
    command = [sys.executable, "-m", "hvdkit.cli", "install", *arguments]
    return subprocess.run(command, env={**base, **hidden, **environ}, capture_output=True, text=True, cwd=home)


def one_sentence(done: subprocess.CompletedProcess[str], status: int) -> str:
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("hvdkit: ")
    return done.stderr


def test_with_the_compiler_hidden_it_is_one_sentence_and_nothing_is_written(home: Path) -> None:
    message = one_sentence(install(home), 1)
    assert "No C++ compiler was found on PATH" in message
    assert "apt-get install g++" in message
    assert not (home / "cache").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--frameworks", "jax"], ["'jax'", "torch, tensorflow"]),
        (["--frameworks", ""], ["no name"]),
        (["--gpu", "rocm"], ["rocm"]),
        (["--gpu", "mpi", "--without-mpi"], ["--gpu mpi needs MPI"]),
        (["--no-such-option"], ["--no-such-option"]),
        (["extra"], ["extra"]),
    ],
)
def test_bad_usage_is_one_sentence_and_exit_2(home: Path, arguments: list[str], words: list[str]) -> None:
    message = one_sentence(install(home, *arguments), 2)
    for word in words:
        assert word in message
    assert not (home / "cache").exists()


def fake_compilers(directory: Path) -> None:
    for name in ("c++", "cc"):
        (directory / name).write_text(COMPILER)
        (directory / name).chmod(0o755)


def test_a_framework_that_cannot_be_imported_is_found_before_anything_is_fetched(home: Path) -> None:
    fake_compilers(home / "empty")
    done = install(home, "--frameworks", "torch", "--without-mpi")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("hvdkit: Importing PyTorch 9.9.9+cpu failed: RuntimeError: imported")
    assert "pip install --force-reinstall torch" in last
    assert "Fetching" not in done.stderr
    assert not (home / "cache/hvdkit/wheels").exists()


def test_a_cache_that_cannot_be_made_is_one_sentence(home: Path) -> None:
    fake_compilers(home / "empty")
    (home / "cache").write_text("a file")
    message = one_sentence(install(home, "--frameworks", "torch", "--without-mpi"), 1)
    assert "could not be read or written" in message and "XDG_CACHE_HOME" in message


def test_explain_shows_the_plan_and_does_nothing(home: Path) -> None:
    fake_compilers(home / "empty")
    done = install(home, "--explain", "--frameworks", "torch", "--without-mpi")
    assert done.returncode == 0, done.stderr
    plan = done.stdout.partition("Plan:")[2]
    assert "PyTorch 9.9.9+cpu" in plan
    assert "GCC 12.2.0" in plan
    assert "HOROVOD_WITHOUT_MPI=1" in plan
    assert "to be installed" in plan
    assert all(patch.name in done.stdout and patch.why in done.stdout for patch in patches())
    assert not (home / "cache").exists()
