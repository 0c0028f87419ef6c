"""One host's part in staging: ``python -m mpi4py -m hvdkit.run.launch.stage.worker PREFIX STORE KEY HOSTS``.

The first rank packs the environment, if any host lacks it. Each piece goes from host to host in a chain, while the next
one is read and the last one unpacked.
"""

from __future__ import annotations

import hashlib
import os
import platform
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from hvdkit.common.units import bytes_text
from hvdkit.errors import DataError, HvdkitError
from hvdkit.run.launch.stage import copy
from hvdkit.run.launch.stage.copy import PIECE, Entry

_T = TypeVar("_T")
_SHOWN = 3
_HEAD, _FAILED = struct.Struct("<q"), -1
"""Before each piece: how long it is, 0 at the end, or that there is no more."""
_LAST = hashlib.sha256().digest_size
_IN_FLIGHT = 8
"""Pieces on their way to the next host."""


def main(argv: list[str]) -> None:
    """Stage the environment on this host, together with the others.

    Args:
        argv: where the environment is, the directory to stage it in, its key, the number of hosts.
    """
    prefix, store, key, hosts = Path(argv[0]), Path(argv[1]), argv[2], int(argv[3])
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.size != hosts:
        sys.exit(
            f"hvdkit launch: {hosts} hosts were to meet over MPI for --stage, and host {platform.node()} sees "
            f"{world.size}: mpi4py uses another MPI than the launcher; 'hvdkit doctor' says which."
        )
    began = time.monotonic()
    place = store / key

    def there() -> bool:
        copy.prepare(store)
        return copy.has(place)

    lacks = not together(world, there)
    lacking = sum(world.allgather(lacks))
    size = _copy(world, prefix, place, lacks=lacks) if lacking else 0
    if world.rank == 0:
        had = f"; {hosts - lacking} had it" if 0 < lacking < hosts else ""
        done = f"staged {bytes_text(size)} to {lacking} of {hosts} hosts in {time.monotonic() - began:.1f} s{had}"
        _say(f"{done if lacking else 'nothing to stage, every host has it'}: {place}")


def _copy(world: Any, prefix: Path, place: Path, *, lacks: bool) -> int:
    """Bring the environment to the hosts that lack it; its bytes."""
    is_root = world.rank == 0

    def look() -> list[Entry]:
        if lacks:
            copy.clean(place.parent)
        entries = copy.entries(prefix) if is_root else []
        if is_root and copy.key(entries, str(prefix)) != place.name:
            raise DataError(f"{prefix} was changed since this job began; end what installs there, and start again.")
        return entries

    entries = together(world, look)
    outer = world.bcast([tuple(entry) for entry in entries if entry.leaves])
    group = world.Split(0 if lacks or is_root else 1, world.rank)
    with ExitStack() as stack:
        part = together(world, lambda: stack.enter_context(copy.making(place, prefix)) if lacks else None)

        def through() -> None:
            if lacks or is_root:
                _stream(group, part, packed(prefix, entries) if is_root else None)
            if part is not None:
                copy.link_out((Entry(*entry) for entry in outer), part)

        together(world, through)
        together(world, stack.close)
    return int(world.bcast(sum(entry.size for entry in entries)))


def packed(prefix: Path, entries: Iterable[Entry]) -> Iterator[bytes]:
    """The pieces of an environment; the next one is packed on a thread while one is sent.

    Raises:
        OSError, DataError: see ``copy.pack``.
    """
    reader, writer = os.pipe()

    def pack() -> None:
        with os.fdopen(writer, "wb") as stream:
            copy.pack(prefix, entries, stream)

    with ThreadPoolExecutor(1) as pool, os.fdopen(reader, "rb") as stream:
        packing = pool.submit(pack)
        yield from iter(lambda: stream.read(PIECE), b"")
        packing.result()


def _stream(group: Any, part: Path | None, pieces: Iterator[bytes] | None) -> None:
    """Send and receive pieces, and unpack them on a thread.

    Args:
        group: the hosts that take part.
        part: the directory to unpack in, None on a host that has the environment.
        pieces: what to send, on the first rank.
    """
    if part is None:
        spread(group, pieces, lambda _: None)
        return
    reader, writer = os.pipe()

    def unpack() -> None:
        with os.fdopen(reader, "rb") as stream:
            try:
                copy.unpack(stream, part)
            finally:
                while stream.read(PIECE):  # who writes would wait forever
                    pass

    with ThreadPoolExecutor(1) as pool:
        unpacking = pool.submit(unpack)
        with os.fdopen(writer, "wb") as stream:
            whole = spread(group, pieces, stream.write)
        if whole:
            unpacking.result()


def spread(group: Any, pieces: Iterator[bytes] | None, keep: Callable[[bytes], object]) -> bool:
    """Send pieces from the first rank of a group along a chain of all others.

    ``MPI_Bcast`` of one piece after the other would do, and takes up to three times as long over four hosts.

    Args:
        group: a communicator of mpi4py.
        pieces: what to send, on the first rank.
        keep: takes each piece.
    Returns:
        Whether all of it came; otherwise the first rank raises why.
    Raises:
        DataError: what was received is not what was sent.
        HvdkitError, OSError: of the pieces, on the first rank.
    """
    buffer, digest = bytearray(_HEAD.size + PIECE), hashlib.sha256()
    wrong: Exception | None = None
    sending: deque[Any] = deque()
    length = 1
    while length > 0:
        if pieces is None:
            group.Recv(buffer, source=group.rank - 1)
            (length,) = _HEAD.unpack_from(buffer)
            message = bytes(buffer[: _HEAD.size + (length if length > 0 else _LAST)])
        else:
            piece = b""
            try:
                piece = next(pieces, b"")
            except (HvdkitError, OSError) as error:
                wrong = error
            digest.update(piece)
            length = len(piece) if wrong is None else _FAILED
            message = _HEAD.pack(length) + (piece or digest.digest())
        if group.rank + 1 < group.size:
            sending.append(group.Isend(message, dest=group.rank + 1))
        while len(sending) > (_IN_FLIGHT if length > 0 else 0):
            sending.popleft().Wait()
        if length > 0:
            keep(message[_HEAD.size :])
            if pieces is None:
                digest.update(message[_HEAD.size :])
    if wrong is not None:
        raise wrong
    if length == 0 and message[_HEAD.size :] != digest.digest():
        raise DataError("the archive that arrived is not the one that was sent; start again.")
    return bool(length == 0)


def together(world: Any, step: Callable[[], _T]) -> _T:
    """Take a step on every host; where it fails on one, all end, and the first one says on which and why.

    Args:
        world: a communicator of mpi4py.
        step: raises ``HvdkitError`` or ``OSError``.
    """
    result: list[_T] = []
    wrong = ""
    try:
        result.append(step())
    except HvdkitError as error:
        wrong = str(error)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        wrong = f"{error.strerror or error}{where}; give a larger local directory that can be written with --stage-dir."
    told = [text for text in world.allgather(wrong and f"host {platform.node()}: {wrong}") if text]
    if not told:
        return result[0]
    if world.rank == 0:
        for text in told[:_SHOWN]:
            _say(text)
        if len(told) > _SHOWN:
            _say(f"{len(told) - _SHOWN} more hosts failed.")
    sys.exit(1)


def _say(sentence: str) -> None:
    sys.stderr.write(f"hvdkit launch: {sentence}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
