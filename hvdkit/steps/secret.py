"""The secret by which the ranks of a job know one another: from the launcher, or a file that only the user reads."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hvdkit.errors import LauncherError

VARIABLE = "HVDKIT_SECRET"
"""Holds the secret where something gave one to all ranks, as ``hvdkit launch`` does."""
_LEAST, _MOST = 32, 4096
_FIX = f"Give all ranks the same one: export {VARIABLE}=$(openssl rand -hex 32) before they are started."


@dataclass(frozen=True, slots=True)
class Key:
    """What the ranks of one job step share and nobody else has, 32 bytes.

    ``source`` says where its secret came from, with some digits of its digest, which must agree on all ranks.
    """

    value: bytes = field(repr=False)
    source: str


def new() -> str:
    """A random secret of 256 bits."""
    return secrets.token_hex(32)


def checked(given: str) -> str:
    """What HVDKIT_SECRET holds; LauncherError where it is too short."""
    if len(given) < _LEAST:
        raise LauncherError(f"{VARIABLE} must have at least {_LEAST} characters, got {len(given)}. {_FIX}")
    return given


def key(job: str, environ: Mapping[str, str], *, one_host: bool) -> Key:
    """The key of a job step, the same on all its ranks.

    Its secret is that of HVDKIT_SECRET, else that of the user's file, which the first rank to look for it writes.

    Args:
        job: names this step and no other; no secret.
        one_host: whether all ranks share a host, so that a temporary directory will do where there is no home.
    Raises:
        LauncherError: there is no secret, or others could have read or written it.
    """
    given = environ.get(VARIABLE)
    if given is None:
        given, where = _of_file(_directories(environ, one_host=one_host))
    else:
        given, where = checked(given), VARIABLE
    print_ = hashlib.sha256(b"fingerprint" + given.encode()).hexdigest()[:8]
    return Key(hmac.digest(given.encode(), job.encode(), "sha256"), f"{where}, fingerprint {print_}")


def _directories(environ: Mapping[str, str], *, one_host: bool) -> list[Path]:
    found = []
    with contextlib.suppress(RuntimeError):  # a user whom nothing knows has no home
        found.append(Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "hvdkit")
    if one_host:
        found.append(Path(tempfile.gettempdir()) / f"hvdkit-{os.getuid()}")
    return [directory for directory in found if directory.is_absolute()]


def _of_file(directories: list[Path]) -> tuple[str, str]:
    """The secret of the first directory that has or takes one, and its path."""
    reasons = []
    for directory in directories:
        path = directory / "secret"
        try:
            if not path.exists():
                _write(path)
            return _read(path), str(path)
        except OSError as error:
            reasons.append(f"{path}: {error.strerror}")
    raise LauncherError(f"there is no place for the secret of this job ({'; '.join(reasons)}). {_FIX}")


def _write(path: Path) -> None:
    """Write a new secret, complete or not at all; that of another rank, which was faster, stays."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:  # mode 0600
        file.write(new())
        file.flush()
        os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(file.name, path)


def _read(path: Path) -> str:
    """A secret that nobody else can have read or written."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), errors="replace") as file:
        of_file, of_directory = os.fstat(file.fileno()), path.parent.stat()
        for what, found, others in ((path, of_file, 0o077), (path.parent, of_directory, 0o022)):
            if found.st_uid != os.geteuid() or found.st_mode & others or not stat.S_ISREG(of_file.st_mode):
                raise LauncherError(
                    f"{path} must be a file of yours that only you can read, in a directory that only you can change; "
                    f"{what} has mode {stat.S_IMODE(found.st_mode):04o} and is of user {found.st_uid}. Remove it, and "
                    "a new one is written."
                )
        text = file.read(_MOST).strip()
    if len(text) < _LEAST:
        raise LauncherError(f"{path} must hold at least {_LEAST} characters, got {len(text)}; remove it.")
    return text
