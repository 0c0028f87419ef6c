"""Compiles the interposer with an MPI's own ``mpicc``, once, and keeps it beside the wheels of ``hvdkit install``.

::

    <XDG cache>/hvdkit/read/mpi_profile/<key>/libhvdkit-mpi-profile.so

The key is made of the interposer's source, the MPI (implementation, version, path of its mpicc) and the processor: a
library compiled for one MPI is no use under another.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import hvdkit
from hvdkit.errors import LaunchError
from hvdkit.prepare.install.ask import ask
from hvdkit.prepare.install.cache import Cache
from hvdkit.prepare.install.find_mpi import find_mpi, identify

NAME = "libhvdkit-mpi-profile.so"
_SOURCES = Path(__file__).parent / "interposer"
_OPTIONS = ("-std=gnu11", "-O2", "-Wall", "-fPIC", "-shared", f'-DHVDKIT_VERSION="{hvdkit.__version__}"')
_LIBRARIES = ("-ldl", "-lpthread")


def find_mpicc(mpi_bin: Path | None, environ: Mapping[str, str]) -> Path | None:
    """The compiler of the MPI whose programs are in ``mpi_bin``; where that is not known, the first one there is.

    Args:
        environ: for PATH.
    Returns:
        Its absolute path, None when there is none.
    """
    if mpi_bin is not None:
        found = shutil.which("mpicc", path=str(mpi_bin))
        return None if found is None else Path(found).absolute()
    mpi, _ = find_mpi(environ, Path(sys.prefix))
    return None if mpi is None else mpi.bin / "mpicc"


def path_of(mpicc: Path, environ: Mapping[str, str], cache: Path) -> Path:
    """Where the library of an MPI lies, or will lie.

    Raises:
        LaunchError: mpicc does not run, or the path cannot be preloaded.
    """
    mpi = identify(mpicc, environ)
    if mpi is None:
        raise LaunchError(
            f"{mpicc} does not run, so that the recorder of MPI calls cannot be compiled; install a C compiler and the "
            "development files of this MPI, or leave --mpi-profile out."
        )
    text = "\0".join([*mpi, str(mpicc), platform.machine(), *_OPTIONS])
    for source in sources():
        text += source.read_text(encoding="utf-8")
    library = cache / "mpi_profile" / hashlib.sha256(text.encode()).hexdigest()[:16] / NAME
    if any(char in str(library) for char in " :\t\n"):
        raise LaunchError(
            f"The cache {cache} has a blank or a colon in its path, at which the loader splits LD_PRELOAD; set "
            "XDG_CACHE_HOME to another directory."
        )
    return library


def ensure(mpicc: Path, environ: Mapping[str, str], cache: Path, say: Callable[[str], None]) -> Path:
    """The library of an MPI, compiled now if it is not there yet.

    Args:
        cache: directory of hvdkit's cache.
        say: told in a sentence that it is compiled, and who else does so.
    Returns:
        Its path.
    Raises:
        LaunchError: it cannot be compiled or loaded.
        InstallError: the cache has no locks.
    """
    library = path_of(mpicc, environ, cache)
    if library.is_file():
        return library
    try:
        with Cache(cache).locked(
            f"mpi-profile-{library.parent.name}", lambda holder: say(f"waiting for {holder}, which compiles the same")
        ):
            if not library.is_file():
                say(f"compiling the recorder of MPI calls with {mpicc}, once for this MPI")
                library.parent.mkdir(parents=True, exist_ok=True)
                _compile(mpicc, environ, library)
    except OSError as error:
        raise LaunchError(
            f"The recorder of MPI calls cannot be kept in {library.parent}: {error.strerror}; set XDG_CACHE_HOME to a "
            "directory that can be written, which all hosts of the job see."
        ) from error
    return library


def sources() -> list[Path]:
    """The interposer's C files and their headers, in the order of their names."""
    return sorted(path for path in _SOURCES.iterdir() if path.suffix in (".c", ".h"))


def _compile(mpicc: Path, environ: Mapping[str, str], library: Path) -> None:
    """Compile into a temporary file, try whether it loads, and put it in place whole."""
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".new-") as directory:
        new = Path(directory) / NAME
        words = [str(path) for path in sources() if path.suffix == ".c"]
        _run([str(mpicc), *_OPTIONS, "-o", str(new), *words, *_LIBRARIES], environ, "compiled")
        load = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
        _run([sys.executable, "-I", "-c", load, str(new)], environ, "loaded")
        new.replace(library)


def _run(argv: list[str], environ: Mapping[str, str], what: str) -> None:
    own = str(Path(argv[0]).parent)  # the wrapper of a wheel looks for its parts on PATH
    path = os.pathsep.join([environ.get("PATH", os.defpath), own])
    answer = ask(argv, environ={**environ, "PATH": path})
    if not answer.ok:
        raise LaunchError(
            f"The recorder of MPI calls cannot be {what} with {argv[0]} ({answer.problem[:300]}); install a C compiler "
            "and the development files of this MPI, or leave --mpi-profile out."
        )
