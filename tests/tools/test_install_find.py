"""What is on a machine is recognised from what its programs and files say; none of them is imported."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdkit.common import programs
from hvdkit.prepare.doctor import inside
from hvdkit.prepare.install import here
from hvdkit.prepare.install.facts import DISTRIBUTIONS
from hvdkit.prepare.install.here import find_tensorflow, find_torch


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def mpi_in(directory: Path, mpicc: str, **others: str) -> Path:
    """An MPI whose mpicc runs a shell script; further programs by name."""
    program(directory / "mpicxx", "exit 0")
    for name, script in others.items():
        program(directory / name, script)
    return program(directory / "mpicc", mpicc)


def answering(**answers: str) -> str:
    """A script that answers an option with a text, and fails for any other option."""
    cases = "".join(f"'{option}') cat <<'EOF'\n{text}\nEOF\n;;\n" for option, text in answers.items())
    return f"case \"$1\" in\n{cases}*) echo 'unknown option' >&2; exit 1;;\nesac"


OPEN_MPI = answering(**{"--showme:version": "mpicc: Open MPI 4.1.4 (Language: C)"})
SPECTRUM = answering(**{"--showme:version": "mpicc: IBM Spectrum MPI 10.4.0.03 (Language: C)"})
MPICH = answering(**{"-show": "gcc -I/usr/include", "-v": "mpicc for MPICH version 4.0.2\nUsing built-in specs."})
INTEL = answering(
    **{"-show": "gcc -I/opt", "-v": "mpigcc for the Intel(R) MPI Library 2021.10 for Linux*\nCopyright Intel"}
)
MVAPICH = answering(**{"-show": "gcc -I/opt", "-v": "mpicc for MVAPICH2 version 2.3.7"})
SILENT = answering(**{"-show": "gcc -I/opt"})


@pytest.mark.parametrize(
    ("mpicc", "others", "expected"),
    [
        (OPEN_MPI, {}, ("Open MPI", "4.1.4")),
        (SPECTRUM, {}, ("IBM Spectrum MPI", "10.4.0.03")),
        (MPICH, {}, ("MPICH", "4.0.2")),
        (INTEL, {}, ("Intel MPI", "2021.10")),
        (MVAPICH, {}, ("MVAPICH", "2.3.7")),
        (SILENT, {"mpichversion": "echo 'MPICH Version:      5.0.2'"}, ("MPICH", "5.0.2")),
        (SILENT, {"mpirun": "echo 'mpirun (Open MPI) 4.1.1'"}, ("Open MPI", "4.1.1")),
        (SILENT, {"mpirun": "echo 'HYDRA build details:'; echo '    Version:     3.4.3'"}, ("MPICH", "3.4.3")),
        (SILENT, {}, ("unknown MPI", "")),
        ("echo 'MPI? Version 7 of what?'", {}, ("unknown MPI", "")),
    ],
)
def test_an_mpi_is_named_by_what_its_wrapper_says(
    tmp_path: Path, mpicc: str, others: dict[str, str], expected: tuple[str, str]
) -> None:
    mpi_in(tmp_path / "bin", mpicc, **others)
    found = here.find_mpi({"PATH": f"{tmp_path}/bin"}, tmp_path / "env")
    assert (found.implementation, found.version) == expected
    assert found.bin == tmp_path / "bin"
    assert not found.wheel


def test_the_first_mpicc_on_path_is_taken(tmp_path: Path) -> None:
    mpi_in(tmp_path / "site/bin", MPICH)
    mpi_in(tmp_path / "env/bin", OPEN_MPI)
    found = here.find_mpi({"PATH": f"{tmp_path}/site/bin:/nowhere"}, tmp_path / "env")
    assert found.implementation == "MPICH"


def test_an_environment_under_another_name_on_path_is_the_environment(tmp_path: Path) -> None:
    mpi_in(tmp_path / "env/bin", OPEN_MPI)
    (tmp_path / "link").symlink_to(tmp_path / "env")
    found = here.find_mpi({"PATH": f"{tmp_path}/link/bin"}, tmp_path / "env")
    assert found.bin == tmp_path / "env/bin"


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    "mpicc", ["sleep 600 & echo $! > {note}; wait", "echo $$ > {note}; yes"], ids=["hangs", "babbles"]
)
def test_a_wrapper_that_does_not_end_is_passed_over_with_all_that_it_started(
    tmp_path: Path, mpicc: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "note"
    asked = []

    class Patience(threading.Thread):
        """Runs out when the wrapper hangs, however long it takes to come there."""

        def __init__(self, seconds: float, end: Callable[[], None]) -> None:
            super().__init__()
            self.end = end
            asked.append(seconds)

        def run(self) -> None:
            while not (note.exists() and note.read_text().endswith("\n")):
                time.sleep(0.01)
            self.end()

        def cancel(self) -> None:
            pass

    if "sleep" in mpicc:
        monkeypatch.setattr(programs.threading, "Timer", Patience)
    mpi_in(tmp_path / "broken", mpicc.format(note=note))
    found = here.find_mpi({"PATH": f"{tmp_path}/broken"}, tmp_path / "env")
    assert found is None
    while runs(int(note.read_text())):  # killed, and not gone yet
        time.sleep(0.01)
    if "sleep" in mpicc:
        assert len(asked) == 1, "each question would wait for as long"


def test_no_mpi_and_one_without_its_cxx_wrapper(tmp_path: Path) -> None:
    assert here.find_mpi({"PATH": "/nowhere"}, tmp_path) is None
    program(tmp_path / "bin/mpicc", OPEN_MPI)
    found = here.find_mpi({"PATH": f"{tmp_path}/bin"}, tmp_path / "env")
    assert found.cxx is None


# --- compilers -------------------------------------------------------------------------------------------------------


def compiler(path: Path, version: str, test: str = "exit 0") -> Path:
    return program(
        path,
        f"case \"$1\" in --version) echo '{version}'; echo 'Copyright Free Software Foundation';; "
        f"-dumpmachine) echo x86_64-linux-gnu;; *) {test};; esac",
    )


def test_the_compiler_is_the_first_of_the_usual_names_whatever_it_is_called(tmp_path: Path) -> None:
    compiler(tmp_path / "a/c++", "c++ (Debian 12.2.0-14) 12.2.0")
    compiler(tmp_path / "b/g++", "g++ (Debian 12.2.0-14) 12.2.0")
    first, second = (here.find_compiler({"PATH": f"{tmp_path}/{name}"}, "CXX") for name in "ab")
    assert (second.command, second.name, second.problem) == ((f"{tmp_path}/b/g++",), "GCC 12.2.0", "")
    assert first.identity == second.identity


def test_cxx_may_name_a_compiler_with_arguments(tmp_path: Path) -> None:
    compiler(tmp_path / "g++", "g++ 12.2.0")
    assert here.find_compiler({"PATH": str(tmp_path), "CXX": "g++ -m64"}, "CXX").command == (f"{tmp_path}/g++", "-m64")
    assert here.find_compiler({"PATH": str(tmp_path), "CXX": "not-there"}, "CXX") is None
    assert here.find_compiler({"PATH": str(tmp_path), "CXX": 'g++ "open'}, "CXX") is None


def test_a_compiler_that_cannot_do_cxx20_says_why(tmp_path: Path) -> None:
    refuses = "echo '<stdin>:1:10: fatal error: bit: No such file' >&2; exit 1"
    compiler(tmp_path / "c++", "c++ (GCC) 8.5.0", test=refuses)
    assert "fatal error: bit" in here.find_compiler({"PATH": str(tmp_path)}, "CXX").problem


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("processor : 0\nflags\t\t: fpu avx f16c avx2 fma\n", ("-mf16c", "-mavx", "-mfma")),
        ("processor : 0\nflags\t\t: fpu avx2 sse\n", ()),
        ("processor : 0\nFeatures\t: fp asimd\n", ()),
        ("", ()),
    ],
)
def test_vector_instructions_are_those_of_the_processor(cpuinfo: str, expected: tuple[str, ...]) -> None:
    assert here.arch_flags(cpuinfo) == expected


# --- frameworks ------------------------------------------------------------------------------------------------------


def test_frameworks_are_read_from_their_files_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "tensorflow"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('imported')\n")
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "torch/version.py").write_text(
        "from typing import Optional\n__version__ = '9.9.9+cu130'\ncuda: Optional[str] = '13.0'\n"
        "git_version = 'abc'\nhip: Optional[str] = None\n"
    )
    (tmp_path / "tensorflow/python/platform").mkdir(parents=True)
    (tmp_path / "tensorflow/python/platform/build_info.py").write_text(
        "import collections\n\nbuild_info = collections.OrderedDict([('is_cuda_build', True), "
        "('cuda_version', '12.5'), ('is_rocm_build', False)])\n"
    )
    (tmp_path / "tensorflow_cpu-8.8.8.dist-info").mkdir()
    (tmp_path / "tensorflow_cpu-8.8.8.dist-info/METADATA").write_text("Name: tensorflow-cpu\nVersion: 8.8.8\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    torch, tensorflow = find_torch(), find_tensorflow()
    assert (torch.version, torch.cuda, torch.location) == ("9.9.9+cu130", "13.0", tmp_path / "torch")
    assert torch.build.startswith("abc ")
    assert (tensorflow.version, tensorflow.cuda) == ("8.8.8", "12.5")


@pytest.mark.parametrize("distribution", ["tensorflow-cpu-aws", "tensorflow-intel", "tf-nightly"])
def test_install_and_doctor_know_the_same_builds_of_tensorflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distribution: str
) -> None:
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow/__init__.py").touch()
    metadata = tmp_path / f"elsewhere/{distribution.replace('-', '_')}-8.8.8.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Name: {distribution}\nVersion: 8.8.8\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "elsewhere")])
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    monkeypatch.setattr(inside, "DISTRIBUTIONS", DISTRIBUTIONS)
    assert inside._find("tensorflow")["distribution_version"] == "8.8.8"
    tensorflow = find_tensorflow()
    assert tensorflow is not None and tensorflow.version == "8.8.8"


# --- CUDA and NCCL ---------------------------------------------------------------------------------------------------


def cuda_in(home: Path, version: str = "13.0") -> Path:
    program(home / "bin/nvcc", f"echo 'Cuda compilation tools, release {version}, V{version}.88'")
    (home / "include").mkdir(exist_ok=True)
    (home / "include/cuda_runtime.h").write_text("")
    return home


def nccl_in(home: Path, library: str) -> Path:
    (home / "include").mkdir(parents=True, exist_ok=True)
    (home / "lib").mkdir(parents=True, exist_ok=True)
    (home / "include/nccl.h").write_text("#define NCCL_MAJOR 2\n#define NCCL_MINOR 29\n#define NCCL_PATCH 7\n")
    (home / "lib" / library).write_text("")
    return home


def test_the_toolkit_is_the_one_that_cuda_home_names(tmp_path: Path) -> None:
    named, on_path = cuda_in(tmp_path / "named", "12.4"), cuda_in(tmp_path / "path")
    found = here.find_cuda({"CUDA_HOME": str(named), "PATH": f"{on_path}/bin"}, [])
    assert (found.home, found.version, found.nvtx) == (named, "12.4.88", False)
    found = here.find_cuda({"CUDA_HOME": f"{tmp_path}/gone", "PATH": f"{on_path}/bin"}, [])
    assert found.home == on_path


def test_nccl_is_found_in_pips_package_and_named_ones_come_first(tmp_path: Path) -> None:
    pips = nccl_in(tmp_path / "site-packages/nvidia/nccl", "libnccl.so.2")
    found = here.find_nccl({}, tmp_path / "env", [tmp_path / "site-packages"], None)
    assert (found.library, found.version) == (pips / "lib/libnccl.so.2", "2.29.7")
    own = nccl_in(tmp_path / "own", "libnccl.so")
    found = here.find_nccl({"NCCL_HOME": str(own)}, tmp_path / "env", [tmp_path / "site-packages"], None)
    assert found.library == own / "lib/libnccl.so"
    (own / "lib/libnccl.so").unlink()  # the header alone
    found = here.find_nccl({"NCCL_HOME": str(own)}, tmp_path / "env", [tmp_path / "site-packages"], None)
    assert found.library == pips / "lib/libnccl.so.2"
