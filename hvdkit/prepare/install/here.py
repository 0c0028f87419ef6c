"""Gathers the facts of this machine; ``find_mpi`` and ``find_frameworks`` find what others ask for, too.

Nothing is written, downloaded or imported. Whether the C++ compiler is new enough is learnt by compiling something.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from hvdkit.common.ask import ask
from hvdkit.common.files import text_if_there
from hvdkit.errors import InstallError
from hvdkit.prepare.install import find_mpi
from hvdkit.prepare.install.facts import BuildFacts, CompilerFacts, CudaFacts, NcclFacts, PythonFacts, SystemFacts
from hvdkit.prepare.install.find_frameworks import find_frameworks

CXX_NAMES = ("c++", "g++", "clang++")
CC_NAMES = ("cc", "gcc", "clang")

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


def gather_facts(gpu: bool) -> BuildFacts:
    """What is here; CUDA and NCCL are looked for only when ``gpu`` is true.

    Raises:
        InstallError: there is no directory for the cache, because no home directory is known.
    """
    environ = dict(os.environ)
    python = _python()
    mpi, passed_over = find_mpi.find_mpi(environ, python.prefix)
    if gpu and mpi:
        mpi = replace(mpi, gpu_aware=find_mpi.ask_gpu_aware(mpi))
    packages = [Path(entry) for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    cuda = find_cuda(environ, packages) if gpu else None
    build_directory = Path(tempfile.gettempdir())
    cache = cache_directory()
    return BuildFacts(
        python=python,
        system=_system(),
        frameworks=find_frameworks(),
        mpi=mpi,
        mpi_passed_over=passed_over,
        cxx=find_cxx(environ),
        cc=find_cc(environ),
        cuda=cuda,
        nccl=find_nccl(environ, python.prefix, packages, cuda) if gpu else None,
        build_directory=build_directory,
        build_bytes_free=shutil.disk_usage(build_directory).free,
        # Linux alone has the flag, and the plan refuses any other system with a sentence of its own.
        no_exec=bool(os.statvfs(build_directory).f_flag & getattr(os, "ST_NOEXEC", 0)),
        cache_directory=cache,
        cache_problem=_unwritable(cache),
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
    home = Path()
    with contextlib.suppress(RuntimeError):  # no HOME, and the user has no entry, as in containers
        home = Path.home()
    if not home.is_absolute():
        raise InstallError(
            f"There is no home directory for the cache (HOME is {os.environ.get('HOME', 'not set')}): set "
            "XDG_CACHE_HOME to an absolute path."
        )
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


def _system() -> SystemFacts:
    return SystemFacts(
        os=sys.platform,
        machine=platform.machine(),
        libc=" ".join(platform.libc_ver()).strip(),
        arch_flags=arch_flags(text_if_there(Path("/proc/cpuinfo"))),
    )


def _unwritable(directory: Path) -> str:
    """Why files cannot be made below a directory that need not exist yet; "" when they can."""
    existing = next(parent for parent in (directory, *directory.parents) if parent.exists())
    if not existing.is_dir():
        return f"{existing} is not a directory"
    return "" if os.access(existing, os.W_OK | os.X_OK) else f"{existing} is not writable"


# Compilers ------------------------------------------------------------------------------------------------------------


def find_cxx(environ: Mapping[str, str]) -> CompilerFacts | None:
    """The C++ compiler: CXX when it is set, else the first of c++, g++, clang++ on PATH; None when not there."""
    command = compiler_command(environ, "CXX", CXX_NAMES)
    if command is None:
        return None
    test = ask([*command, "-std=c++20", "-x", "c++", "-fsyntax-only", "-"], stdin=CXX20_PROGRAM)
    return _describe(command, "" if test.ok else test.problem)


def find_cc(environ: Mapping[str, str]) -> CompilerFacts | None:
    """The C compiler, which Gloo's build asks for: CC when it is set, else the first of cc, gcc, clang."""
    command = compiler_command(environ, "CC", CC_NAMES)
    return None if command is None else _describe(command, "")


def compiler_command(environ: Mapping[str, str], variable: str, names: tuple[str, ...]) -> tuple[str, ...] | None:
    """Command line of a compiler with the full path of its program, None when it is not on PATH.

    The variable may hold arguments too, as in ``CXX="ccache g++"``.
    """
    path = environ.get("PATH", "")
    wanted = _words(environ.get(variable, ""))
    for words in [wanted] if wanted else [[name] for name in names]:
        program = shutil.which(words[0], path=path)
        if program is not None:
            return (str(Path(program).absolute()), *words[1:])
    return None


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return [text]


def arch_flags(cpuinfo: str) -> tuple[str, ...]:
    """Compiler flags for the vector instructions that Horovod uses and a processor has.

    Args:
        cpuinfo: the text of ``/proc/cpuinfo``.
    """
    line = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    present = set(line.group(1).split()) if line else set()
    return tuple(flag for name, flag in ARCH_FLAGS.items() if name in present)


def _describe(command: tuple[str, ...], problem: str) -> CompilerFacts:
    answer = ask([*command, "--version"])
    family = next((name for mark, name in _FAMILIES if mark.lower() in answer.text.lower()), "")
    # The first word is the name it was called by: c++ and g++ are one compiler.
    banner = answer.first_line.partition(" ")[2]
    version = re.search(r"\d+\.\d+(?:\.\d+)*", re.sub(r"\([^)]*\)", "", banner))
    name = f"{family} {version[0]}" if family and version else answer.first_line
    target = ask([*command, "-dumpmachine"]).first_line
    return CompilerFacts(command, name, " ".join([family, banner, target, *command[1:]]), problem)


# CUDA and NCCL --------------------------------------------------------------------------------------------------------


def find_cuda(environ: Mapping[str, str], site_packages: Iterable[Path]) -> CudaFacts | None:
    """The first CUDA toolkit with a compiler that runs and its headers; None when there is none."""
    for home in _cuda_homes(environ, site_packages):
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
    include, library = environ.get("HOROVOD_NCCL_INCLUDE"), environ.get("HOROVOD_NCCL_LIB")
    if include and library:
        found = _nccl(Path(include), [Path(library)])
        if found is not None:
            return found
    homes = [Path(environ[name]) for name in NCCL_VARIABLES if environ.get(name)]
    homes += [directory / "nvidia" / "nccl" for directory in site_packages]
    homes.append(prefix)
    if cuda is not None:
        homes.append(cuda.home)
    homes += [Path("/usr"), Path("/usr/local")]
    for home in homes:
        found = _nccl(home / "include", [home / name for name in LIBRARY_DIRECTORIES])
        if found is not None:
            return found
    return None


def _cuda_homes(environ: Mapping[str, str], site_packages: Iterable[Path]) -> Iterator[Path]:
    for name in CUDA_VARIABLES:
        if environ.get(name):
            yield Path(environ[name])
    nvcc = shutil.which("nvcc", path=environ.get("PATH", ""))
    if nvcc is not None:
        yield Path(nvcc).resolve().parent.parent
    yield Path("/usr/local/cuda")
    for directory in site_packages:
        yield from sorted((directory / "nvidia").glob("cu[0-9]*"), reverse=True)


def _nccl(include: Path, libraries: Iterable[Path]) -> NcclFacts | None:
    header = text_if_there(include / "nccl.h")
    numbers = [re.search(rf"#define\s+NCCL_{part}\s+(\d+)", header) for part in ("MAJOR", "MINOR", "PATCH")]
    version = ".".join(number[1] for number in numbers if number is not None)
    for directory in libraries if header else ():
        for name in NCCL_LIBRARIES:
            if (directory / name).is_file():
                return NcclFacts(include, directory / name, version)
    return None
