"""Facts in, settings out: what a build is told, what its key depends on, and each missing piece in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdkit.errors import InstallError, InvalidArgumentError
from hvdkit.prepare.install.facts import (
    BuildFacts,
    CompilerFacts,
    CudaFacts,
    FrameworkFacts,
    MpiFacts,
    NcclFacts,
    Options,
    PythonFacts,
    SystemFacts,
)
from hvdkit.prepare.install.plan import build_environ, make_plan, parse_frameworks, run_path
from hvdkit.prepare.install.record import MpiRecord

ENV = Path("/home/me/env")
SITE = ENV / "lib/python3.11/site-packages"
GCC = "GCC (Debian 12.2.0-14) 12.2.0 x86_64-linux-gnu"

TORCH = FrameworkFacts("torch", "2.13.0+cpu", SITE / "torch", build="abc")
CUDA_TORCH = FrameworkFacts("torch", "2.13.0+cu130", SITE / "torch", build="abc", cuda="13.0")
TENSORFLOW = FrameworkFacts("tensorflow", "2.21.0", SITE / "tensorflow", build="tensorflow_cpu")
WHEEL_MPI = MpiFacts("Open MPI", "5.0.11", ENV / "bin", ENV / "bin/mpicxx", wheel=True)
SITE_MPI = MpiFacts("Cray MPICH", "8.1.28", Path("/opt/cray/bin"), Path("/opt/cray/bin/mpicxx"))
CUDA = CudaFacts(Path("/opt/cuda-13.0"), "13.0.88", nvtx=True)
PIP_NCCL = NcclFacts(SITE / "nvidia/nccl/include", SITE / "nvidia/nccl/lib/libnccl.so.2", "2.29.7")

FACTS = BuildFacts(
    python=PythonFacts(
        version=(3, 11, 7),
        tag="cp311",
        executable=ENV / "bin/python",
        prefix=ENV,
        site_packages=SITE,
        scripts=ENV / "bin",
        headers=True,
        headers_directory=Path("/usr/include/python3.11"),
        pip=True,
        writable=True,
        externally_managed=False,
    ),
    system=SystemFacts("linux", "x86_64", "glibc 2.36", ("-mf16c", "-mavx", "-mfma")),
    frameworks=(TORCH, TENSORFLOW),
    mpi=WHEEL_MPI,
    cxx=CompilerFacts(("/usr/bin/c++",), "GCC 12.2.0", GCC),
    cc=CompilerFacts(("/usr/bin/cc",), "GCC 12.2.0", GCC),
    build_directory=Path("/tmp"),
    build_bytes_free=10 << 30,
    cache_directory=Path("/home/me/.cache/hvdkit"),
)


def with_python(**changes: Any) -> BuildFacts:
    return replace(FACTS, python=replace(FACTS.python, **changes))


def moved_to(prefix: Path, facts: BuildFacts = FACTS) -> BuildFacts:
    """The same environment at another place, with pip's CUDA and NCCL in it, if any."""

    def move(path: Path) -> Path:
        return prefix / path.relative_to(ENV)

    if facts.cuda and facts.nccl:
        nccl = replace(facts.nccl, include=move(facts.nccl.include), library=move(facts.nccl.library))
        facts = replace(facts, cuda=replace(facts.cuda, home=move(facts.cuda.home)), nccl=nccl)

    python = replace(
        FACTS.python, executable=prefix / "bin/python", prefix=prefix, site_packages=move(SITE), scripts=prefix / "bin"
    )
    frameworks = tuple(replace(framework, location=move(framework.location)) for framework in facts.frameworks)
    mpi = replace(WHEEL_MPI, bin=prefix / "bin", cxx=prefix / "bin/mpicxx")
    return replace(facts, python=python, frameworks=frameworks, mpi=mpi)


def test_everything_found_is_built_with_gloo_and_mpi() -> None:
    settings = make_plan(FACTS, Options()).settings
    assert {name: settings[name] for name in settings if name.startswith("HOROVOD_")} == {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_BUILD_ARCH_FLAGS": "-mf16c -mavx -mfma",
        "HOROVOD_WITHOUT_NVTX": "1",
    }
    assert settings["CMAKE_POLICY_VERSION_MINIMUM"] == "3.5"
    assert settings["CXX"] == "/usr/bin/c++"


def test_one_framework_and_gloo_alone() -> None:
    plan = make_plan(FACTS, Options(mpi=False, frameworks=("torch",)))
    assert plan.settings["HOROVOD_WITHOUT_TENSORFLOW"] == "1"
    assert plan.settings["HOROVOD_WITHOUT_MPI"] == "1"
    assert "MPI_HOME" not in plan.settings
    assert plan.record.mpi is None
    assert plan.record.tensorflow is None
    assert list(plan.run_paths) == ["torch"]


def test_run_paths_move_with_the_environment_and_places_outside_stay() -> None:
    assert run_path(SITE / "torch/lib", "torch", FACTS.python) == "$ORIGIN/../../torch/lib"
    assert run_path(ENV / "lib", "torch", FACTS.python) == "$ORIGIN/../../../.."
    assert run_path(Path("/opt/cray/lib"), "torch", FACTS.python) == "/opt/cray/lib"
    base_torch = replace(TORCH, location=Path("/opt/conda/lib/python3.11/site-packages/torch"))
    plan = make_plan(replace(FACTS, frameworks=(base_torch,)), Options())
    assert plan.run_paths["torch"] == ("/opt/conda/lib/python3.11/site-packages/torch/lib",)


# --- the key ---------------------------------------------------------------------------------------------------------


def test_the_key_is_the_same_for_the_same_environment_at_another_place() -> None:
    elsewhere = make_plan(moved_to(Path("/scratch/other")), Options())
    assert elsewhere.key == make_plan(FACTS, Options()).key
    assert elsewhere.record == make_plan(FACTS, Options()).record
    pips = replace(FACTS, frameworks=(CUDA_TORCH,), cuda=replace(CUDA, home=SITE / "nvidia/cu13"), nccl=PIP_NCCL)
    elsewhere = make_plan(moved_to(Path("/scratch/other"), pips), Options("nccl"))
    assert elsewhere.key == make_plan(pips, Options("nccl")).key


CHANGES: dict[str, Callable[[BuildFacts], BuildFacts]] = {
    "python": lambda facts: replace(facts, python=replace(facts.python, version=(3, 12, 1), tag="cp312")),
    "machine": lambda facts: replace(facts, system=replace(facts.system, machine="aarch64")),
    "C library": lambda facts: replace(facts, system=replace(facts.system, libc="glibc 2.28")),
    "vector instructions": lambda facts: replace(facts, system=replace(facts.system, arch_flags=())),
    "torch version": lambda facts: replace(facts, frameworks=(replace(TORCH, version="2.14.0"), TENSORFLOW)),
    "torch build": lambda facts: replace(facts, frameworks=(replace(TORCH, build="def"), TENSORFLOW)),
    "torch elsewhere": lambda facts: replace(facts, frameworks=(replace(TORCH, location=Path("/x/torch")), TENSORFLOW)),
    "tensorflow version": lambda facts: replace(facts, frameworks=(TORCH, replace(TENSORFLOW, version="2.20.0"))),
    "no tensorflow": lambda facts: replace(facts, frameworks=(TORCH,)),
    "MPI": lambda facts: replace(facts, mpi=replace(WHEEL_MPI, implementation="MPICH")),
    "MPI version": lambda facts: replace(facts, mpi=replace(WHEEL_MPI, version="5.0.10")),
    "MPI elsewhere": lambda facts: replace(facts, mpi=replace(WHEEL_MPI, bin=Path("/opt/openmpi/bin"))),
    "compiler": lambda facts: replace(facts, cxx=CompilerFacts(("/usr/bin/c++",), "GCC 13.1.0", "GCC 13.1.0")),
    "compiler flags": lambda facts: replace(facts, environ={"CXXFLAGS": "-O1"}),
    "compiler of the user's own": lambda facts: replace(facts, environ={"CXX": "/home/me/bin/c++"}),
    "linker flags": lambda facts: replace(facts, environ={"LDFLAGS": "-L/x"}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_the_key_changes_with_everything_that_changes_the_binary(what: str) -> None:
    assert make_plan(CHANGES[what](FACTS), Options()).key != make_plan(FACTS, Options()).key


def test_the_key_changes_with_the_options_and_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = replace(FACTS, frameworks=(CUDA_TORCH,), cuda=CUDA, nccl=PIP_NCCL)
    keys = {make_plan(facts, options).key for options in map(Options, ("none", "nccl", "mpi"))}
    assert len(keys) == 3
    monkeypatch.setattr("hvdkit.prepare.install.adjust.patches", tuple)
    assert make_plan(facts, Options()).key not in keys


def test_build_variables_of_the_user_are_dropped_and_said_to_be() -> None:
    stray = {"HOROVOD_WITH_MXNET": "1", "HOROVOD_CPU_OPERATIONS": "CCL", "CMAKE_PREFIX_PATH": "/x", "CCL_ROOT": "/x"}
    plan = make_plan(replace(FACTS, environ={**stray, "HOROVOD_TIMELINE": "/t.json"}), Options())
    assert plan.key == make_plan(FACTS, Options()).key
    environ = build_environ(plan, {**stray, "HOME": "/home/me", "PATH": "/usr/bin", "CXXFLAGS": "-O1"})
    assert not set(stray) & set(environ)
    assert environ["HOME"] == "/home/me" and environ["PATH"] == f"{ENV}/bin:/usr/bin"
    assert environ["CXXFLAGS"] == "-O1"
    (note,) = plan.notes
    assert "HOROVOD_WITH_MXNET" in note
    assert "HOROVOD_TIMELINE" not in note


def test_the_record_says_what_was_built() -> None:
    record = make_plan(FACTS, Options()).record
    assert (record.python, record.torch, record.tensorflow) == ("cp311", "2.13.0+cpu", "2.21.0")
    assert record.mpi == MpiRecord("Open MPI", "5.0.11", "bin", wheel=True)
    assert "gloo-stall-inspector" in record.adjustments
    system = make_plan(replace(FACTS, mpi=SITE_MPI), Options()).record.mpi
    assert system == MpiRecord("Cray MPICH", "8.1.28", "/opt/cray/bin", wheel=False)


# --- GPU -------------------------------------------------------------------------------------------------------------

GPU_FACTS = replace(FACTS, frameworks=(CUDA_TORCH,), cuda=CUDA, nccl=PIP_NCCL)


def test_nccl_from_pip_is_linked_by_a_name_that_the_linker_knows() -> None:
    plan = make_plan(GPU_FACTS, Options("nccl"))
    assert plan.settings["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert plan.settings["HOROVOD_CUDA_HOME"] == "/opt/cuda-13.0"
    assert plan.settings["HOROVOD_NCCL_INCLUDE"] == str(SITE / "nvidia/nccl/include")
    assert plan.settings["HOROVOD_NCCL_LINK"] == "SHARED"
    assert plan.nccl_link == PIP_NCCL.library
    assert build_environ(plan, {"PATH": "/usr/bin"})["PATH"] == f"{ENV}/bin:/opt/cuda-13.0/bin:/usr/bin"
    assert plan.run_paths["torch"] == ("$ORIGIN/../../torch/lib", "$ORIGIN/../../nvidia/nccl/lib")
    assert plan.settings["HOROVOD_WITH_NVTX"] == "1"


@pytest.mark.parametrize(("file", "link"), [("libnccl.so", "SHARED"), ("libnccl_static.a", "STATIC")])
def test_nccl_of_the_system_is_linked_as_it_is(file: str, link: str) -> None:
    nccl = NcclFacts(Path("/usr/include"), Path("/usr/lib64") / file, "2.20.5")
    plan = make_plan(replace(GPU_FACTS, nccl=nccl), Options("nccl"))
    assert plan.settings["HOROVOD_NCCL_LIB"] == "/usr/lib64"
    assert plan.settings["HOROVOD_NCCL_LINK"] == link
    assert plan.nccl_link is None
    assert ("/usr/lib64" in plan.run_paths["torch"]) == (link == "SHARED")


def test_gpu_operations_over_mpi_need_no_nccl() -> None:
    plan = make_plan(replace(GPU_FACTS, nccl=None), Options("mpi"))
    assert plan.settings["HOROVOD_GPU_OPERATIONS"] == "MPI"
    assert "HOROVOD_NCCL_LINK" not in plan.settings
    assert any("takes GPU memory" in note for note in plan.notes)


def test_without_gpu_the_toolkit_is_kept_out_although_it_is_there() -> None:
    plan = make_plan(GPU_FACTS, Options())
    assert not {"HOROVOD_GPU_OPERATIONS", "HOROVOD_CUDA_HOME", "CUDA_HOME"} & set(plan.settings)
    assert "no-cuda-torch" in plan.record.adjustments
    assert make_plan(replace(GPU_FACTS, cuda=None, nccl=None), Options()).key == plan.key
    assert any("--gpu nccl" in note for note in plan.notes)
    assert "CUDA_HOME" not in build_environ(plan, {"CUDA_HOME": "/opt/cuda-13.0", "PATH": "/usr/bin"})


def test_the_compute_capabilities_that_the_user_wants_are_part_of_the_key() -> None:
    chosen = replace(GPU_FACTS, environ={"HOROVOD_BUILD_CUDA_CC_LIST": "90"})
    plan = make_plan(chosen, Options("nccl"))
    assert plan.settings["HOROVOD_BUILD_CUDA_CC_LIST"] == "90"
    assert plan.key != make_plan(GPU_FACTS, Options("nccl")).key


# --- what is missing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "options", "words"),
    [
        (replace(FACTS, cxx=None), Options(), ["No C++ compiler", "apt-get install g++"]),
        (replace(FACTS, cc=None), Options(), ["No C compiler", "apt-get install gcc"]),
        (replace(FACTS, cxx=None, environ={"CXX": "icpx"}), Options(), ["'icpx'", "unset CXX"]),
        (
            replace(FACTS, cxx=CompilerFacts(("/usr/bin/c++",), "GCC 8.5.0", "GCC 8.5.0", "bit: No such file")),
            Options(),
            ["GCC 8.5.0", "C++20", "CXX="],
        ),
        (replace(FACTS, frameworks=()), Options(), ["Neither PyTorch nor TensorFlow", "pip install torch"]),
        (
            replace(FACTS, frameworks=(TORCH,)),
            Options(frameworks=("tensorflow",)),
            ["TensorFlow was asked for", "pip install tensorflow", "--frameworks torch"],
        ),
        (
            replace(FACTS, frameworks=(replace(TORCH, version=""),)),
            Options(),
            ["does not say which version", "pip install --force-reinstall torch"],
        ),
        (replace(FACTS, mpi=None), Options(), ["No MPI", "pip install openmpi", "--without-mpi"]),
        (
            replace(FACTS, mpi=replace(WHEEL_MPI, cxx=None)),
            Options(),
            ["no C++ wrapper", "apt-get install libopenmpi-dev"],
        ),
        (with_python(version=(3, 14, 0), tag="cp314"), Options(), ["Python 3.14.0", "python3.13 -m venv"]),
        (with_python(version=(3, 13, 0), tag="cp313t"), Options(), ["cp313t", "standard CPython"]),
        (with_python(version=(3, 11, 0), tag="pp311"), Options(), ["pp311"]),
        (with_python(pip=False), Options(), ["no pip", "-m ensurepip"]),
        (with_python(headers=False), Options(), ["no Python.h", "python3.11-dev"]),
        (with_python(writable=False), Options(), ["cannot be written", "-m venv"]),
        (with_python(externally_managed=True), Options(), ["operating system", "-m venv"]),
        (replace(FACTS, system=replace(FACTS.system, os="darwin")), Options(), ["Linux only", "'darwin'"]),
        (replace(FACTS, build_bytes_free=100 << 20), Options(), ["100 MiB free", "TMPDIR"]),
        (replace(FACTS, cuda=CUDA), Options("nccl"), ["--gpu nccl", "build without", "PyTorch 2.13.0+cpu"]),
        (replace(GPU_FACTS, cuda=None), Options("nccl"), ["CUDA toolkit", "CUDA_HOME"]),
        (replace(GPU_FACTS, nccl=None), Options("nccl"), ["NCCL", "pip install nvidia-nccl-cu13"]),
        (
            replace(GPU_FACTS, cuda=replace(CUDA, version="12.4")),
            Options("nccl"),
            ["13.0", "12.4", "same major version"],
        ),
    ],
)
def test_what_is_missing_is_one_sentence_with_the_fix(facts: BuildFacts, options: Options, words: list[str]) -> None:
    with pytest.raises(InstallError) as caught:
        make_plan(facts, options)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    for word in words:
        assert word in message


# --- usage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", ",", "jax", "torch,mxnet", "PyTorch"])
def test_unknown_or_no_frameworks_are_bad_usage(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="expected one or both of torch, tensorflow"):
        parse_frameworks(text)
