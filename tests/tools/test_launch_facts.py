"""What there is to launch with: whose mpirun, which Horovod, which PATH."""

import os
import sys
from pathlib import Path

import pytest

from hvdkit.errors import InvalidArgumentError, LaunchError
from hvdkit.jobs.launch import facts
from hvdkit.jobs.launch.facts import resolve
from hvdkit.jobs.launch.model import Horovod
from hvdkit.jobs.launch.options import Request


@pytest.mark.parametrize(
    ("text", "implementation", "version"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/", "Open MPI", (5, 0, 11)),
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/", "Open MPI", (4, 1, 4)),
        ("mpirun (Open MPI) 5.1.0a1\n", "Open MPI", (5, 1, 0)),
        ("HYDRA build details:\n    Version:                                 4.1.2\n", "MPICH", (4, 1, 2)),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626", "Intel MPI", (2021, 18, 1)),
        ("HYDRA build details:\n  Version:  3.4a2\n", "MPICH", (3, 4)),
    ],
)
def test_mpirun_is_told_by_what_it_says(tmp_path, text, implementation, version):
    (tmp_path / "text").write_text(text)
    found = facts.identify(program(tmp_path / "mpirun", f"cat {tmp_path}/text"), os.environ)
    assert (found.implementation, found.version) == (implementation, version)


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_an_unknown_mpirun_is_one_sentence_with_what_it_said(tmp_path):
    with pytest.raises(LaunchError, match=r"'cluster starter 3'.*--launcher horovodrun"):
        facts.identify(program(tmp_path / "mpirun", "echo cluster starter 3"), os.environ)


def test_an_mpirun_may_say_it_on_standard_error(tmp_path):
    found = facts.identify(program(tmp_path / "mpirun", "echo 'mpirun (Open MPI) 5.0.3' >&2"), os.environ)
    assert (found.implementation, found.version) == ("Open MPI", (5, 0, 3))


def test_an_mpirun_that_does_not_run_is_an_error_of_ours(tmp_path):
    broken = tmp_path / "mpirun"
    broken.write_text("#!/nowhere/sh\n")
    broken.chmod(0o755)
    with pytest.raises(LaunchError, match="mpirun cannot be run"):
        facts.identify(broken, os.environ)


@pytest.fixture
def two_mpis(tmp_path, monkeypatch):
    """Open MPI first on PATH, MPICH elsewhere, and no Horovod unless a test puts one in place."""
    program(tmp_path / "open/mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    program(tmp_path / "mpich/mpiexec", "echo 'HYDRA build details:'; echo ' Version: 4.2'")
    monkeypatch.setattr(facts, "installed_horovod", lambda python: None)
    monkeypatch.setattr(facts, "recorded_horovod", lambda: None)
    return tmp_path


def gather(directory, launcher="auto"):
    python = Path(sys.executable).parent
    environ = {"PATH": f"{directory}/open:/usr/bin:/bin"}
    return facts.gather(Request(2, ("x",), launcher), environ), python


def test_the_mpirun_of_horovods_own_mpi_is_used_whatever_is_on_path(two_mpis, monkeypatch):
    built = Horovod(mpi=True, gloo=True, mpi_bin=two_mpis / "mpich")
    monkeypatch.setattr(facts, "installed_horovod", lambda python: built)
    found, _ = gather(two_mpis)
    assert found.mpi is not None
    assert (str(found.mpi), found.mpi.mpirun) == ("MPICH 4.2", two_mpis / "mpich/mpiexec")
    assert found.path.split(os.pathsep)[-1] == str(two_mpis / "mpich")


def test_without_horovod_the_first_mpirun_on_path_is_used(two_mpis, monkeypatch):
    monkeypatch.setattr(facts, "own_python", lambda: two_mpis / "venv/bin/python")
    found, _ = gather(two_mpis)
    assert found.mpi is not None and found.mpi.mpirun == two_mpis / "open/mpirun"
    assert found.path == f"{two_mpis}/venv/bin:{two_mpis}/open:/usr/bin:/bin"


def test_mpi_is_not_looked_for_when_horovod_has_none(two_mpis, monkeypatch):
    monkeypatch.setattr(facts, "installed_horovod", lambda python: Horovod(mpi=False, gloo=True))
    assert gather(two_mpis)[0].mpi is None
    assert gather(two_mpis, "horovodrun")[0].mpi is None


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/usr/bin:/bin", "{venv}:/usr/bin:/bin"),
        ("{other}:/usr/bin:{venv}", "{venv}:{other}:/usr/bin"),
        ("{venv}:/usr/bin", "{venv}:/usr/bin"),
        ("{empty}:{venv}:/usr/bin", "{empty}:{venv}:/usr/bin"),
    ],
)
def test_python_on_the_jobs_path_is_the_one_hvdkit_runs_in(tmp_path, path, expected):
    places = {name: tmp_path / name for name in ("venv", "other", "empty")}
    for name in ("venv", "other"):
        program(places[name] / "python", "")
    environ = {"PATH": path.format(**places)}
    assert facts.job_path(environ, places["venv"] / "python") == expected.format(**places)


def fake_horovod(directory, torch, tensorflow="raise ImportError('no tensorflow')"):
    for framework, text in (("torch", torch), ("tensorflow", tensorflow)):
        package = directory / "horovod" / framework
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(text)
    (directory / "horovod/__init__.py").touch()


BUILT = "def mpi_built(): return {mpi}\ndef gloo_built(): return True\nprint('chatter')\n"


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
@pytest.mark.parametrize("with_mpi", [True, False])
def test_a_horovod_built_by_hand_is_asked_whatever_its_framework(tmp_path, monkeypatch, framework, with_mpi):
    texts = {"torch": "raise ImportError('not built')", "tensorflow": "raise ImportError('not built')"}
    texts[framework] = BUILT.format(mpi=with_mpi)
    fake_horovod(tmp_path, **texts)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(facts, "horovod_directory", lambda: tmp_path / "horovod")
    monkeypatch.setattr(facts, "read_record", lambda: None)
    fake_horovod(tmp_path / "checkout", "raise ImportError('Horovod is not built in its source tree')")
    monkeypatch.chdir(tmp_path / "checkout")  # Python's own habit is to look there first
    assert facts.installed_horovod(Path(sys.executable)) == Horovod(mpi=with_mpi, gloo=True)


def test_a_horovod_that_does_not_load_is_one_sentence_with_the_reason(tmp_path, monkeypatch):
    fake_horovod(tmp_path, "raise ImportError('undefined symbol')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(facts, "horovod_directory", lambda: tmp_path / "horovod")
    monkeypatch.setattr(facts, "read_record", lambda: None)
    with pytest.raises(LaunchError, match=r"undefined symbol.*hvdkit doctor") as caught:
        facts.installed_horovod(Path(sys.executable))
    assert "\n" not in str(caught.value)


def test_no_horovod_is_no_error(monkeypatch):
    monkeypatch.setattr(facts, "horovod_directory", lambda: None)
    assert facts.installed_horovod(Path(sys.executable)) is None


@pytest.mark.parametrize(
    ("siblings", "cpus", "cores"),
    [
        (("0,2\n", "1,3\n", "0,2\n", "1,3\n"), {0, 1, 2, 3}, 2),
        (("0,2\n", "1\n", "0,2\n"), {0, 2}, 1),
        ((), {0, 1, 5}, 3),
    ],
    ids=["hyperthreads count once", "those that may be used", "without a description each is a core"],
)
def test_cores_are_physical_ones(tmp_path, siblings, cpus, cores):
    for cpu, text in enumerate(siblings):
        (tmp_path / f"cpu{cpu}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}/topology/thread_siblings_list").write_text(text)
    assert facts.physical_cores(cpus, tmp_path) == cores
    assert 1 <= facts.usable_cores() <= len(os.sched_getaffinity(0))


# What each rank runs


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
