"""``hvdkit install`` from the source to the environment, with a stand-in for Horovod: at once, killed, refused."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from install_machine import StandIn, ended, write_source
from test_install_find import runs

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    yield StandIn(tmp_path_factory.mktemp("machine"))


@pytest.fixture
def fresh(machine: StandIn) -> Iterator[StandIn]:
    """The environment without Horovod and with an empty cache."""
    yield machine
    clear(machine)


@pytest.fixture
def installed(machine: StandIn) -> Iterator[StandIn]:
    """The environment with Horovod, whose wheel is in the cache; it is built once."""
    kept = machine.prefix.parent / "kept"
    if not kept.exists():
        machine.install()
        kept.mkdir()
        subprocess.run(["cp", "-a", machine.cache, *machine.site.glob("horovod*"), kept], check=True)
    else:
        subprocess.run(["cp", "-a", kept / "cache", machine.prefix.parent], check=True)
        subprocess.run(["cp", "-a", *kept.glob("horovod*"), machine.site], check=True)
    machine.log.unlink(missing_ok=True)
    yield machine
    clear(machine)


def clear(machine: StandIn) -> None:
    while machine.started:
        process = machine.started.pop()
        if process.poll() is None:  # of a test that failed
            process.kill()
            process.communicate()
    subprocess.run(["rm", "-rf", machine.cache, machine.log, *machine.site.glob("horovod*")], check=True)


def until(process: subprocess.Popen[str], words: str) -> str:
    """What a process writes up to the line with these words, which it must write before it compiles on."""
    assert process.stdout is not None
    lines = ""
    for line in process.stdout:
        lines += line
        if words in line:
            return lines
        if "compiling" in line:
            break
    raise AssertionError(f"it went on without {words!r}:\n{lines}")


def holds(machine: StandIn) -> None:
    """The environment has all of Horovod, as its record and pip know it."""
    found = machine.files()
    assert len(found["horovod/torch/mpi_lib_v2.so"]) == 256 * 1200
    assert json.loads(found["horovod/hvdkit-build.json"])["horovod"] == "0.28.1"
    assert "horovod-0.28.1.dist-info/METADATA" in found
    assert not list(machine.cache.glob("hvdkit/wheels/.new-*"))


def test_three_at_once_build_one_wheel_in_a_directory_of_any_name(fresh: StandIn, tmp_path: Path) -> None:
    other = StandIn(fresh.prefix.parent, "other")
    other.started = fresh.started
    gate, temporary = tmp_path / "gate", tmp_path / """it's a "place" $HOME %s #1"""
    temporary.mkdir()
    environ = {"STANDIN_GATE": str(gate), "TMPDIR": str(temporary)}
    first = fresh.start_install(**environ)
    until(first, "compiling  10%")
    elsewhere, here = other.start_install(**environ), fresh.start_install(**environ)
    told = until(elsewhere, "Waiting for"), until(here, "Waiting for")
    assert f"process {first.pid} on " in told[0] and "which builds the same wheel" in told[0]
    assert f"process {first.pid} on " in told[1] and "which installs into this environment" in told[1]
    gate.touch()
    assert ", compiled, in" in ended(first)
    assert ", from the cache, in" in ended(elsewhere)
    assert "is already installed" in ended(here)
    assert fresh.compiled() == 1 and fresh.files() == other.files()
    holds(fresh)
    assert list(temporary.iterdir()) == []


COMPILES_ON = """
import os, pathlib, subprocess, sys
compiler = "print('[ 10%] Building CXX object a/CMakeFiles/b.cc.o', flush=True); import time; time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", compiler], process_group=0)  # as Ninja starts them
pathlib.Path(os.environ["STANDIN_LOG"]).write_text(f"{os.getpid()} {child.pid}")
child.wait()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_no_compiler_outlives_an_install_that_is_stopped(
    fresh: StandIn, tmp_path: Path, number: signal.Signals
) -> None:
    source, temporary = tmp_path / fresh.source.name, tmp_path / "temporary"
    write_source(source, COMPILES_ON)
    temporary.mkdir()
    released = {"PIP_FIND_LINKS": str(tmp_path), "STANDIN_SUM": hashlib.sha256(source.read_bytes()).hexdigest()}
    stopped = fresh.start_install(TMPDIR=str(temporary), **released)
    until(stopped, "compiling  10%")
    stopped.send_signal(number)
    output = ended(stopped, 128 + number)
    assert not any(runs(int(pid)) for pid in fresh.log.read_text().split())
    assert ("Stopped; the environment is as it was before." in output) == (number == signal.SIGINT)
    assert fresh.files() == {} and fresh.wheels() == [] and list(temporary.iterdir()) == []


def test_a_killed_build_leaves_nothing_that_is_used(fresh: StandIn, tmp_path: Path) -> None:
    first = fresh.start_install(STANDIN_GATE=str(tmp_path / "gate"), TMPDIR=str(tmp_path))
    until(first, "compiling  10%")
    first.send_signal(signal.SIGKILL)
    ended(first, -signal.SIGKILL)
    assert fresh.files() == {} and fresh.wheels() == []
    output = fresh.install(TMPDIR=str(tmp_path))
    assert ", compiled, in" in output and "Waiting" not in output
    assert fresh.compiled() == 2
    holds(fresh)


def test_a_kill_in_the_middle_of_the_copy_into_the_cache_leaves_nothing_that_is_used(fresh: StandIn) -> None:
    fresh.install(status=-signal.SIGKILL, STANDIN_DIE="copy")
    (half,) = fresh.wheels()
    assert half.stat().st_size == 1000 and fresh.files() == {}
    assert ", compiled, in" in fresh.install()
    holds(fresh)
    assert len(fresh.wheels()) == 1


def test_a_kill_in_the_middle_of_the_installing_is_mended_by_the_next_from_the_cache(installed: StandIn) -> None:
    good = installed.files()
    (installed.site / "horovod/torch/mpi_lib_v2.so").unlink()
    installed.install(status=-signal.SIGKILL, STANDIN_DIE="install")
    assert installed.files() != good
    assert ", from the cache, in" in installed.install()
    assert installed.files() == good and installed.compiled() == 0


def test_a_source_of_another_sum_is_neither_kept_nor_run(fresh: StandIn, tmp_path: Path) -> None:
    wrong = tmp_path / fresh.source.name
    write_source(wrong, f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    kept = fresh.cache / "hvdkit/sources" / wrong.name
    kept.parent.mkdir(parents=True)
    kept.write_bytes(wrong.read_bytes())
    output = fresh.install(status=1, PIP_FIND_LINKS=str(tmp_path))
    assert output.splitlines()[-1].startswith(
        "hvdkit: pip download failed: ERROR: THESE PACKAGES DO NOT MATCH THE HASHES"
    )
    assert fresh.compiled() == 0 and fresh.wheels() == [] and fresh.files() == {} and not (tmp_path / "ran").exists()
    assert ", compiled, in" in fresh.install()
    assert kept.read_bytes() == fresh.source.read_bytes()


def test_when_nothing_can_be_fetched_the_damaged_cache_is_said_and_the_environment_untouched(
    installed: StandIn,
) -> None:
    (installed.site / "horovod/torch/mpi_lib_v2.so").write_bytes(b"half")
    before = installed.files()
    (wheel,) = installed.wheels()
    wheel.write_bytes(wheel.read_bytes()[:-1])
    output = installed.install(status=1, STANDIN_TOOLS="no-such-tools")
    assert "has SHA-256" in output and "It is made again." in output
    assert output.splitlines()[-1].startswith("hvdkit: pip install failed: ERROR: ")
    assert installed.files() == before and installed.wheels() == []


def test_a_wheel_that_others_can_replace_is_one_sentence_and_the_environment_stays(installed: StandIn) -> None:
    (installed.site / "horovod/torch/mpi_lib_v2.so").write_bytes(b"half")
    before = installed.files()
    (wheel,) = installed.wheels()
    wheel.parent.chmod(0o777)
    output = installed.install(status=1)
    assert output.count("\n") == 1 and f"hvdkit: {wheel.parent} belongs to " in output and "chmod -R go-w" in output
    assert installed.files() == before and wheel.exists() and installed.compiled() == 0


def in_mounts(machine: StandIn, script: str, *words: str | Path) -> str:
    """Runs a script as root with mounts of its own; "$@" is the install, which ends with status 1."""
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True)
    if os.geteuid() != 0 or tried.returncode != 0:
        pytest.skip("mounts something, which root alone can do")
    shell = ["unshare", "--mount", "sh", "-c", script, *words, *machine.command()]
    return ended(machine.start(*shell, **machine.environ()))


@pytest.mark.root
def test_an_environment_that_cannot_be_written_is_one_sentence_before_any_work(fresh: StandIn) -> None:
    script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && "$@"; test $? = 1'
    output = in_mounts(fresh, script, fresh.site)
    assert output.count("\n") == 1 and f"hvdkit: {fresh.site} cannot be written: make an environment" in output
    assert fresh.compiled() == 0 and not fresh.cache.exists()


@pytest.mark.root
def test_a_full_disk_is_one_sentence_and_the_next_install_goes_on(fresh: StandIn) -> None:
    fresh.cache.mkdir()
    script = 'mount -t tmpfs -o size=200k cache "$0" && "$@"; test $? = 1 && ls -A "$0"/hvdkit/wheels && echo SPACE && '
    script += 'mount -o remount,size=9m "$0" && "$@" && "$@"'
    full, _, wide = in_mounts(fresh, script, fresh.cache).partition("SPACE\n")
    last = full.splitlines()[-1]
    assert last.startswith("hvdkit: ") and "No space left on device" in last and "XDG_CACHE_HOME" in last
    assert ", compiled, in" in wide and "is already installed" in wide
    holds(fresh)


def test_a_wheel_for_others_is_installed_where_there_is_no_compiler(installed: StandIn, tmp_path: Path) -> None:
    shelf, good = tmp_path / "sw", installed.files()
    before = installed.files()
    kept = installed.install("--wheel", str(shelf))
    (wheel,) = shelf.glob("*/*.whl")
    assert str(wheel) in kept and installed.files() == before  # nothing is installed by it
    told = json.loads((wheel.parent / "manifest.json").read_text())["key"]
    assert told["frameworks"]["torch"][0] == "9.9.9" and told["python"].startswith("cp3")
    subprocess.run(["rm", "-rf", *installed.site.glob("horovod*"), installed.cache], check=True)

    for word in ("--force", "--explain"):
        assert "--from compiles nothing" in installed.install("--from", str(shelf), word, status=2)
    output = installed.install("--from", str(shelf), CXX="/no/compiler", CC="/no/compiler")

    assert f"from {wheel.parent}" in output and installed.files() == good and installed.compiled() == 0
    assert "is already installed" in installed.install("--from", str(shelf), CXX="/no/compiler")


def test_a_wheel_that_does_not_fit_or_is_not_whole_is_one_sentence(installed: StandIn, tmp_path: Path) -> None:
    shelf, before = tmp_path / "sw", installed.files()
    installed.install("--wheel", str(shelf))
    (manifest,) = shelf.glob("*/manifest.json")
    text = manifest.read_text()
    for wrong, why in (
        (
            text.replace("9.9.9", "9.9.8"),
            'is for frameworks {"torch": ["9.9.8", "a cxx11abi=unknown", null, null]}, here {"torch": ["9.9.9"',
        ),
        (
            text.replace('"settings": {', '"settings": {"HOROVOD_GPU_OPERATIONS": "NCCL",'),
            "--gpu nccl, here --gpu none",
        ),
        ("[" * 100000, "cannot be read"),
        ('{"key": 3}', "cannot be read"),
    ):
        manifest.write_text(wrong)
        output = installed.install("--from", str(shelf), status=1)
        assert output.count("\n") == 1 and why in output, output
    manifest.write_text(text.replace('"sha256": "', '"sha256": "0'))
    assert "has SHA-256" in installed.install("--from", str(shelf), status=1)
    manifest.write_text(text)
    manifest.parent.chmod(0o777)
    assert "chmod -R go-w" in installed.install("--from", str(shelf), status=1)
    assert "it has no wheel" in installed.install("--from", str(tmp_path), status=1)
    assert installed.files() == before
