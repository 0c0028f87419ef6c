"""Fetch published files once: one process downloads under a lock, the others wait and find the files.

A file appears under its name only when it is complete and its checksum is right.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import logging
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdkit.common.files import complete_or_absent
from hvdkit.common.units import printable
from hvdkit.datasets.formats import LONGEST_QUOTE
from hvdkit.errors import CorruptDataError, DataError

TIMEOUT_S = 30.0
CHUNK_BYTES = 1 << 20
NETWORK_ERRORS = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoteFile:
    """A published file: its name, its sha256 in hexadecimal, and the http(s) URL that serves it."""

    name: str
    sha256: str
    url: str


def fetch(files: Sequence[RemoteFile], folder: Path, login_node_command: str) -> None:
    """Make sure that every file is in a folder, downloading those that are not.

    May be called by every process of a job at once. A file that is already there is not looked at again.

    Args:
        files: what to download.
        folder: where to; created when missing, with a file ``.lock`` in it.
        login_node_command: what to run where there is a network, for the error message.
    Raises:
        CorruptDataError: a server sent something else; nothing is kept of it.
        DataError: no server could be reached, or the folder cannot be written or locked.
    """
    if all((folder / file.name).is_file() for file in files):
        return
    asked_ns = time.time_ns()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Words are written to it, which a symbolic link of another user must not lead to another file.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        with os.fdopen(os.open(folder / ".lock", flags, 0o666), "a+", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.seek(0)
            message = lock.read()
            # Without this, each of 64 ranks on a node without network would wait for its own time-out, in turn.
            if message and os.fstat(lock.fileno()).st_mtime_ns >= asked_ns:
                raise DataError(message)
            try:
                for file in files:
                    if not (folder / file.name).is_file():
                        _download(file, folder, login_node_command)
            except DataError as error:
                lock.truncate(0)
                lock.write(str(error))
                lock.flush()
                now_ns = time.time_ns()  # a file server's own clock may differ from that of the processes that compare
                os.utime(lock.fileno(), ns=(now_ns, now_ns))
                raise
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written or locked ({error.strerror or error}); name another directory or run "
            f"`{login_node_command}` where it can be"
        ) from error


def _download(file: RemoteFile, folder: Path, login_node_command: str) -> None:
    """Fetch one file into ``folder``; nothing else than what was published is kept."""
    logger.info("downloading %s", file.url)
    digest = hashlib.sha256()
    size = 0
    try:
        with complete_or_absent(folder / file.name) as target, _opener().open(file.url, timeout=TIMEOUT_S) as response:
            while chunk := response.read(CHUNK_BYTES):
                digest.update(chunk)
                size += target.write(chunk)
            if response.length:  # Python says nothing of a connection that ends before the announced length
                raise http.client.HTTPException(f"the connection ended {response.length} bytes too early")
            if digest.hexdigest() != file.sha256:
                raise CorruptDataError(
                    f"{file.url} does not have {file.name} as it was published: a corrupt file, {size} bytes, expected "
                    f"sha256 {file.sha256}, received {digest.hexdigest()}; nothing was kept, try again or copy it to "
                    f"{folder} yourself"
                )
    except NETWORK_ERRORS as error:
        # A URLError prints its reason in angle brackets; its subclass HTTPError prints the status code.
        text = str(error.reason if type(error) is urllib.error.URLError else error)
        raise DataError(
            f"{file.name} could not be downloaded from {file.url} "
            f"({printable(text[:LONGEST_QUOTE]) or type(error).__name__}); compute nodes often have no network, so run "
            f"`{login_node_command}` on the login node first"
        ) from error


def _opener() -> urllib.request.OpenerDirector:
    # Not urllib's default opener: that one also opens file: and ftp:, to which a server could redirect.
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    opener.addheaders = [("User-Agent", "hvdkit")]
    return opener
