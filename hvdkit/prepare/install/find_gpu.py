"""Finds a CUDA toolkit and NCCL: from the environment variables, on PATH, in the system, or in pip's packages."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from hvdkit.common.ask import ask
from hvdkit.prepare.install.facts import CudaFacts, NcclFacts

CUDA_VARIABLES = ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")
NCCL_VARIABLES = ("HOROVOD_NCCL_HOME", "NCCL_HOME", "NCCL_ROOT")
LIBRARY_DIRECTORIES = ("lib", "lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu")
# The link name first; pip's NCCL has only the versioned name; a static one where nothing else is.
NCCL_LIBRARIES = ("libnccl.so", "libnccl.so.2", "libnccl_static.a")


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
    try:
        header = (include / "nccl.h").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    numbers = [re.search(rf"#define\s+NCCL_{part}\s+(\d+)", header) for part in ("MAJOR", "MINOR", "PATCH")]
    version = ".".join(number[1] for number in numbers if number is not None)
    for directory in libraries:
        for name in NCCL_LIBRARIES:
            if (directory / name).is_file():
                return NcclFacts(include, directory / name, version)
    return None
