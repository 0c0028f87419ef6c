"""Gets the released source of Horovod: by package name through pip, pinned by its SHA-256, unpacked safely."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable
from pathlib import Path

from hvdkit.errors import InstallError
from hvdkit.prepare.install.cache import sha256
from hvdkit.prepare.install.pins import HOROVOD_SHA256, HOROVOD_VERSION

FILE_NAME = f"horovod-{HOROVOD_VERSION}.tar.gz"


def is_released(tarball: Path) -> bool:
    """Whether a file is the released source distribution, byte for byte."""
    return tarball.is_file() and sha256(tarball) == HOROVOD_SHA256


def fetch(sources: Path, work: Path, pip: Callable[[list[str]], None]) -> Path:
    """The source distribution, from ``sources`` when it is there, else through pip.

    Args:
        sources: where it is kept between builds.
        work: an empty directory for the download.
        pip: runs pip with the given arguments.
    Raises:
        InstallError: it cannot be had, or is not the released one.
    """
    kept = sources / FILE_NAME
    if is_released(kept):
        return kept
    requirements = work / "requirements.txt"
    requirements.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{HOROVOD_SHA256}\n", encoding="utf-8")
    where = ["--dest", str(work), "--requirement", str(requirements)]
    pip(["download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--require-hashes", *where])
    fresh = work / FILE_NAME
    if not is_released(fresh):
        found = sha256(fresh) if fresh.is_file() else "no file"
        raise InstallError(f"The downloaded {FILE_NAME} is not the released one: {found}, expected {HOROVOD_SHA256}.")
    staged = sources / f".{FILE_NAME}-{os.getpid()}"
    staged.write_bytes(fresh.read_bytes())
    staged.replace(kept)
    return kept


def unpack(tarball: Path, into: Path) -> Path:
    """Unpack the source distribution below ``into`` and return its tree.

    Raises:
        InstallError: the archive is damaged, or has a member that would land elsewhere.
    """
    try:
        with tarfile.open(tarball) as archive:
            # Python 3.11.4 and later; before that the check of the archive's SHA-256 alone vouches for it.
            safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            archive.extractall(into, **safely)  # type: ignore[arg-type]  # noqa: S202
    except (tarfile.TarError, OSError, EOFError) as error:
        raise InstallError(f"{tarball} cannot be unpacked: {error}.") from error
    tree = into / f"horovod-{HOROVOD_VERSION}"
    if not (tree / "setup.py").is_file():
        raise InstallError(f"{tarball} has no horovod-{HOROVOD_VERSION}/setup.py, so it is not Horovod's source.")
    return tree
