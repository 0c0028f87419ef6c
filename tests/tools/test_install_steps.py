"""The steps around the compiler: processes, progress, source, run paths, and the environment put back."""

from __future__ import annotations

import io
import os
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from install_machine import write_archive
from test_install_plan import moved_to

from hvdkit.errors import InstallError
from hvdkit.prepare.install import build
from hvdkit.prepare.install.cache import Cache
from hvdkit.prepare.install.facts import PythonFacts
from hvdkit.prepare.install.runner import InstallProgress, run, session_members

# --- runner ----------------------------------------------------------------------------------------------------------


def run_python(code: str, log: Path, **options: object) -> list[str]:
    return run(
        [sys.executable, "-c", code], what="The step", environ=dict(os.environ), cwd=log.parent, log=log, **options
    )  # type: ignore[arg-type]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "step.log"


def test_a_failing_step_shows_its_first_error_and_the_log(log: Path) -> None:
    code = "import sys; print('a.cc:1:2: error: no such thing'); print('b.cc:1:1: error: later'); sys.exit(3)"
    with pytest.raises(InstallError) as caught:
        run_python(code, log)
    assert str(caught.value) == f"The step failed: a.cc:1:2: error: no such thing; the full log is {log}"
    assert "later" in log.read_text()


def test_a_step_that_is_killed_names_want_of_memory(log: Path) -> None:
    with pytest.raises(InstallError, match=r"^The step failed: the process was killed \(usually for want of memory: "):
        run_python("import os; print('all is well', flush=True); os.kill(os.getpid(), 9)", log)


class Stop(BaseException):
    """Stands for Ctrl-C."""


def test_ctrl_c_ends_every_process_that_was_started(log: Path) -> None:
    # A grandchild in a process group of its own, as Ninja makes for its compilers.
    code = (
        "import subprocess, sys, time, os\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], process_group=0)\n"
        "print(os.getsid(0), flush=True)\ntime.sleep(600)\n"
    )
    sessions: list[int] = []

    def stop(line: str) -> None:
        sessions.append(int(line))
        assert len(session_members(sessions[0])) == 2
        raise Stop

    with pytest.raises(Stop):
        run_python(code, log, on_line=stop)
    assert session_members(sessions[0]) == []


# --- progress --------------------------------------------------------------------------------------------------------


def ninja(percent: int, file: str = "common.cc") -> str:
    return f"[{percent:3d}%] Building CXX object horovod/torch/CMakeFiles/pytorch.dir/__/common/{file}.o\n"


def test_a_line_is_shown_every_ten_percent() -> None:
    stream = io.StringIO()
    times = iter([0.0, *range(61, 99)])
    progress = InstallProgress(stream, clock=lambda: next(times))
    progress.compiling("-- Configuring done\n")
    progress.compiling("/src/a.cc:1:2: warning: [ 5%] Building\n")
    for percent in range(7, 100):
        progress.compiling(ninja(percent))
    progress.compiling("[100%] Linking CXX shared library /b/horovod/torch/mpi_lib_v2.so\n")
    lines = stream.getvalue().splitlines()
    assert [int(line.split()[1].rstrip("%")) for line in lines] == [7, *range(10, 101, 10)]
    assert lines[0] == "  compiling   7%  1:01  horovod/torch: common.cc" and lines[-1].endswith(
        "  linking mpi_lib_v2.so"
    )


# --- source ----------------------------------------------------------------------------------------------------------


def test_a_damaged_kept_source_is_fetched_again_and_a_wrong_one_refused(tmp_path: Path) -> None:
    sources, work = tmp_path / "sources", tmp_path / "work"
    sources.mkdir()
    work.mkdir()
    (sources / build.SOURCE).write_bytes(b"damaged")
    calls: list[list[str]] = []

    def pip(arguments: list[str]) -> None:
        calls.append(arguments)
        (work / build.SOURCE).write_bytes(b"wrong too")

    with pytest.raises(InstallError, match="not the released one"):
        build.fetch(sources, work, pip)
    (arguments,) = calls
    assert "--require-hashes" in arguments
    assert "92a43f5a94c4" in (work / "requirements.txt").read_text()


def test_an_archive_with_a_member_outside_is_refused(tmp_path: Path) -> None:
    write_archive(tmp_path / "bad.tar.gz", {"setup.py": "", "../../evil": "x"})
    (tmp_path / "into").mkdir()
    if not hasattr(tarfile, "data_filter"):
        pytest.skip("this Python cannot filter archives; there the archive's SHA-256 alone is checked")
    with pytest.raises(InstallError, match="cannot be unpacked"):
        build.unpack(tmp_path / "bad.tar.gz", tmp_path / "into")
    assert not (tmp_path / "evil").exists()


# --- run paths -------------------------------------------------------------------------------------------------------


def test_run_paths_are_made_to_move_with_the_environment(tmp_path: Path) -> None:
    python, work = moved_to(tmp_path / "env").python, tmp_path / "build"
    entries = [
        f"{tmp_path}/env/lib",
        f"{tmp_path}/env/lib/python3.11/site-packages/torch/lib",
        f"{work}/links",
        "/opt/openmpi/lib",
        "$ORIGIN/own",
    ]
    extra = ("$ORIGIN/../../torch/lib", "$ORIGIN/../../nvidia/nccl/lib")
    assert build.relocated(entries, "torch", python, work, extra) == [
        "$ORIGIN/../../../..",
        "$ORIGIN/../../torch/lib",
        "/opt/openmpi/lib",
        "$ORIGIN/own",
        "$ORIGIN/../../nvidia/nccl/lib",
    ]


def test_a_run_path_through_a_link_into_the_environment_moves_too(tmp_path: Path) -> None:
    real = tmp_path / "real"
    (real / "lib/python3.11/site-packages/horovod").mkdir(parents=True)
    (tmp_path / "env").symlink_to(real)
    assert build.relocated([f"{real}/lib"], "torch", moved_to(tmp_path / "env").python, tmp_path / "build") == [
        "$ORIGIN/../../../.."
    ]


# --- jobs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "gigabytes", "wanted", "expected"),
    [(2, 24, None, 2), (64, 24, None, 8), (4, 1, None, 1), (64, 24, "3", 3), (2, 24, "8", 8)],
)
def test_jobs_are_bounded_by_cores_and_memory_unless_asked_for(
    cores: int, gigabytes: int, wanted: str | None, expected: int
) -> None:
    assert build.job_count(cores, gigabytes << 30, wanted) == expected


@pytest.mark.parametrize("wanted", ["0", "-1", "two", "1.5"])
def test_max_jobs_must_be_a_number(wanted: str) -> None:
    with pytest.raises(InstallError, match="MAX_JOBS"):
        build.job_count(2, 1 << 33, wanted)


# --- the environment is put back -------------------------------------------------------------------------------------


def tree(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def installed(tmp_path: Path) -> PythonFacts:
    """An environment with an older Horovod, PyTorch and one of the run-time needs."""
    python = moved_to(tmp_path / "env").python
    for name in ("horovod/torch/x.so", "horovod-0.27.0.dist-info/RECORD", "torch/x.py", "psutil/x.py"):
        file = python.site_packages / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    python.scripts.mkdir(parents=True)
    (python.scripts / "horovodrun").write_text("old")
    return python


def half_an_install(python: PythonFacts) -> None:
    """What pip leaves when it is killed half-way."""
    site = python.site_packages
    (site / "horovod-0.27.0.dist-info").rename(site / "~orovod-0.27.0.dist-info")
    (site / "horovod/torch/x.so").write_text("new")
    (site / "horovod/torch/new.so").write_text("new")
    for name in ("horovod-0.28.1.dist-info/METADATA", "cloudpickle/x.py", "_cffi_backend.so", "yaml/x.py"):
        file = site / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("new")
    (python.scripts / "horovodrun").write_text("new")


@pytest.mark.parametrize("error", [InstallError("pip failed"), KeyboardInterrupt()])
def test_a_failed_install_leaves_the_environment_as_it_was(installed: PythonFacts, error: BaseException) -> None:
    before = tree(installed.prefix)
    with pytest.raises(type(error)), build.restored_on_failure(installed):
        half_an_install(installed)
        raise error
    assert tree(installed.prefix) == before


def test_pip_is_not_led_elsewhere_by_its_settings() -> None:
    environ = build.pip_environ({"PIP_TARGET": "/x", "PIP_USER": "1", "PIP_INDEX_URL": "i", "PATH": "/bin"})
    assert environ == {"PIP_INDEX_URL": "i", "PATH": "/bin", "PIP_USER": "0"}


def test_a_new_build_that_cannot_be_imported_is_taken_out_and_forgotten(
    installed: PythonFacts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*arguments: object) -> None:
        raise InstallError("it cannot be imported")

    kept = Cache(tmp_path / "cache")
    wheel_file = tmp_path / "horovod.whl"
    wheel_file.write_bytes(b"wheel")
    cached = kept.put("key", wheel_file, {})
    monkeypatch.setattr(build, "install", lambda *arguments: half_an_install(installed))
    monkeypatch.setattr(build, "check_import", fails)
    plan = SimpleNamespace(key="key", facts=SimpleNamespace(python=installed))
    before = tree(installed.prefix)
    with pytest.raises(InstallError, match="cannot be imported"):
        build.put_in_place(cached, plan, kept, True, InstallProgress(io.StringIO()), tmp_path / "log")  # type: ignore[arg-type]
    assert tree(installed.prefix) == before
    assert kept.get("key") is None
