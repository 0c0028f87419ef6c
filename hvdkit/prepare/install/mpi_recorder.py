"""Compiles the interposer with an MPI's own ``mpicc``, once, and keeps it beside the wheels of ``hvdkit install``.

::

    <XDG cache>/hvdkit/mpi_profile/<key>/libhvdkit-mpi-profile.so, and manifest.json with its SHA-256

What is preloaded is checked each time as a wheel is: by its sum, and that only this user and root can have written it.
The key is made of the interposer's source, the MPI (implementation, version, path of its mpicc) and the processor: a
library compiled for one MPI is no use under another.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import hvdkit
from hvdkit.common.programs import ask
from hvdkit.errors import LaunchError
from hvdkit.prepare.install.cache import Cache, DamagedError
from hvdkit.prepare.install.here import find_mpi, identify

NAME = "libhvdkit-mpi-profile.so"
_KIND = "mpi_profile"
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
    mpi = find_mpi(environ, Path(sys.prefix))
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
    library = Cache(cache, _KIND).entry(hashlib.sha256(text.encode()).hexdigest()[:16]) / NAME
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
        InstallError: the cache has no locks, or others can write to it.
    """
    kept = Cache(cache, _KIND)
    key = path_of(mpicc, environ, cache).parent.name
    with contextlib.suppress(DamagedError):  # without the lock, so that a cache of root's that is only read will do
        if found := kept.get(key):
            return found
    try:
        with kept.locked(f"mpi-profile-{key}", lambda holder: say(f"waiting for {holder}, which compiles the same")):
            if found := kept.whole(key, say):
                return found
            say(f"compiling the recorder of MPI calls with {mpicc}, once for this MPI")
            return _compile(mpicc, environ, kept, key)
    except OSError as error:
        raise LaunchError(
            f"The recorder of MPI calls cannot be kept in {kept.entry(key)}: {error.strerror}; set XDG_CACHE_HOME to a "
            "directory that can be written, which all hosts of the job see."
        ) from error


def sources() -> list[Path]:
    """The interposer's C files and their headers, in the order of their names."""
    return sorted(path for path in _SOURCES.iterdir() if path.suffix in (".c", ".h"))


def _compile(mpicc: Path, environ: Mapping[str, str], cache: Cache, key: str) -> Path:
    """Compile beside where it will lie, since programs may not be started in TMPDIR, and keep it if it loads."""
    work = cache.room(cache.kind) / f".build-{key}"
    shutil.rmtree(work, ignore_errors=True)  # of one that was killed: the lock of the key is held
    try:
        work.mkdir(0o700)
        new = work / NAME
        words = [str(path) for path in sources() if path.suffix == ".c"]
        _run([str(mpicc), *_OPTIONS, "-o", str(new), *words, *_LIBRARIES], environ, "compiled")
        load = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
        _run([sys.executable, "-I", "-c", load, str(new)], environ, "loaded")
        return cache.put(key, new, {"mpicc": str(mpicc)})
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run(argv: list[str], environ: Mapping[str, str], what: str) -> None:
    own = str(Path(argv[0]).parent)  # the wrapper of a wheel looks for its parts on PATH
    path = os.pathsep.join([environ.get("PATH", os.defpath), own])
    answer = ask(argv, environ={**environ, "PATH": path})
    if not answer.ok:
        raise LaunchError(
            f"The recorder of MPI calls cannot be {what} with {argv[0]} ({answer.problem[:300]}); install a C compiler "
            "and the development files of this MPI, or leave --mpi-profile out."
        )
