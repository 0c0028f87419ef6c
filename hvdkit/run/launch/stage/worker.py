"""One host's part in staging: ``python -m mpi4py -m hvdkit.run.launch.stage.worker PREFIX STORE KEY HOSTS``.

The first rank packs the environment, if any host lacks it. Each piece goes to those that do, from host to host in a
chain, or in a binary tree where that is sooner, while the next one is read and the last one unpacked: three threads
with a queue between them.
"""

from __future__ import annotations

import hashlib
import platform
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from hvdkit.common.units import bytes_text
from hvdkit.errors import DataError, HvdkitError
from hvdkit.run.launch.stage import archive, environment, store
from hvdkit.run.launch.stage.archive import PIECE, Pieces

_T = TypeVar("_T")
_SHOWN = 3
_HEAD, _FAILED = struct.Struct("<q"), -1
"""Before each piece: how long it is, 0 at the end, or that there is no more."""
_LAST = hashlib.sha256().digest_size
_IN_FLIGHT = 8
"""Pieces on their way to each of those that one sends to."""


def main(argv: list[str]) -> None:
    """Stage the environment on this host, together with the others.

    Args:
        argv: where the environment is, the directory to stage it in, its key, the number of hosts.
    """
    prefix, directory, key, hosts = Path(argv[0]), Path(argv[1]), argv[2], int(argv[3])
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.size != hosts:
        sys.exit(
            f"hvdkit launch: {hosts} hosts were to meet over MPI for --stage, and host {platform.node()} sees "
            f"{world.size}: mpi4py uses another MPI than the launcher; 'hvdkit doctor' says which."
        )
    began = time.monotonic()
    place = directory / key

    def there() -> bool:
        store.prepare(directory)
        return store.has(place)

    lacks = not together(world, there)
    lacking = sum(world.allgather(lacks))
    size = _copy(world, prefix, place, lacks=lacks) if lacking else 0
    if world.rank == 0:
        had = f"; {hosts - lacking} had it" if 0 < lacking < hosts else ""
        seconds = time.monotonic() - began
        done = f"staged {bytes_text(size)} to {lacking} of {hosts} hosts in {seconds:.1f} s{had}"
        _say(f"{done if lacking else 'nothing to stage, every host has it'}: {place}")


def _copy(world: Any, prefix: Path, place: Path, *, lacks: bool) -> int:
    """Bring the environment to the hosts that lack it; its bytes."""
    is_root = world.rank == 0

    def found() -> list[environment.Entry]:
        entries = environment.entries(prefix) if is_root else []
        if is_root and environment.key(entries, str(prefix)) != place.name:
            raise DataError(f"{prefix} was changed since this job began; end what installs there, and start again.")
        return entries

    entries = together(world, found)
    outer = world.bcast([tuple(entry) for entry in entries if entry.leaves])
    size, files = world.bcast((store.need(entries), len(entries)))

    def room() -> None:
        if lacks:
            store.clean(place.parent)
            store.check_room(place.parent, size, files)

    together(world, room)
    group = world.Split(0 if lacks or is_root else 1, world.rank)
    with ExitStack() as stack:
        part = together(world, lambda: stack.enter_context(store.making(place, prefix)) if lacks else None)

        def through() -> None:
            if lacks or is_root:
                _stream(group, part, (prefix, entries) if is_root else None, size)
            if part is not None:
                archive.link_out((environment.Entry(*entry) for entry in outer), part)

        together(world, through)
        together(world, stack.close)
    return int(size)


def _stream(group: Any, part: Path | None, packed: tuple[Path, list[environment.Entry]] | None, size: int) -> None:
    """Pack, send and unpack at the same time.

    Args:
        group: the hosts that take part.
        part: the directory to unpack in, None on a host that has the environment.
        packed: what to pack, on the first rank.
        size: of the environment, bytes.
    """
    fan_out = 1 if size > group.size * PIECE else 2  # in a chain the last waits for one piece a host, else all for two
    with ThreadPoolExecutor(2) as pool:
        source = None if packed is None else Pieces()
        if packed is not None and source is not None:
            pool.submit(_pack, *packed, source)
        sink = None if part is None else Pieces()
        unpacked = None if part is None or sink is None else pool.submit(_unpack, sink, part)
        whole = spread(group, source, sink, fan_out)
        if unpacked is not None and whole:
            unpacked.result()


def _pack(prefix: Path, entries: list[environment.Entry], source: Pieces) -> None:
    try:
        archive.pack(prefix, entries, source)
    except Exception as error:  # raised where the stream is read
        source.finish(error)
    else:
        source.finish()


def _unpack(sink: Pieces, part: Path) -> None:
    try:
        archive.unpack(sink, part)
    finally:
        sink.drain()  # who writes would wait forever


def spread(group: Any, source: Pieces | None, sink: Pieces | None, fan_out: int) -> bool:
    """Send a stream from the first rank of a group to all others, each of which sends pieces on as they come.

    ``MPI_Bcast`` of one piece after the other would do, and takes up to three times as long over four hosts.

    Args:
        group: a communicator of mpi4py.
        source: what to read, on the first rank.
        sink: what to write to, None where nothing is to be kept.
        fan_out: to how many ranks each sends, > 0.
    Returns:
        Whether all of it came; otherwise the first rank raises why.
    Raises:
        DataError: what was received is not what was sent.
        HvdkitError, OSError: of the source, on the first rank.
    """
    first = group.rank * fan_out + 1
    children = range(first, min(first + fan_out, group.size))
    buffer, digest = bytearray(_HEAD.size + PIECE), hashlib.sha256()
    wrong: Exception | None = None
    sending: deque[Any] = deque()
    while True:
        if source is not None:
            message, wrong = _next_message(source, digest)
        else:
            group.Recv(buffer, source=(group.rank - 1) // fan_out)
            (length,) = _HEAD.unpack_from(buffer)
            message = bytes(buffer[: _HEAD.size + (length if length > 0 else _LAST)])
        sending.extend(group.Isend(message, dest=child) for child in children)
        while len(sending) > _IN_FLIGHT * fan_out:
            sending.popleft().Wait()
        (length,) = _HEAD.unpack_from(message)
        if length <= 0:
            break
        if source is None:
            digest.update(message[_HEAD.size :])
        if sink is not None:
            sink.write(message[_HEAD.size :])
    while sending:
        sending.popleft().Wait()
    if sink is not None:
        sink.finish()
    if wrong is not None:
        raise wrong
    if length == 0 and message[_HEAD.size :] != digest.digest():
        raise DataError("the archive that arrived is not the one that was sent; start again.")
    return bool(length == 0)


def _next_message(source: Pieces, digest: Any) -> tuple[bytes, Exception | None]:
    """A message with the next piece, the digest of all behind the last one, or that there is an error; and that."""
    try:
        piece = source.read()
    except (HvdkitError, OSError) as error:
        return _HEAD.pack(_FAILED) + bytes(_LAST), error
    digest.update(piece)
    return _HEAD.pack(len(piece)) + (piece or digest.digest()), None


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
        wrong = f"{error.strerror or error}{where}; give a local directory that can be written with --stage-dir."
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
