"""``hvdkit.run``: a function on N ranks, from Python; and what runs it on each rank.

The function goes to the ranks over a connection of their own to this process, and their results come back over it.
Both sides show first that they know the job's secret, which stands on no command line (``launch.wire.proof``): what is
unpickled comes from the job itself. ``hvdkit launch`` does the rest.
"""

from __future__ import annotations

import os
import pickle
import socket
import socketserver
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import BufferedIOBase
from typing import TYPE_CHECKING, Any, Self

from hvdkit.errors import InvalidArgumentError, LaunchError, MissingFrameworkError
from hvdkit.jobs.launch import wire
from hvdkit.steps import launchers, secret

if TYPE_CHECKING:
    from hvdkit.jobs.launch.options import Request

_LENGTH = struct.Struct("!Q")
_POLL_S = 0.02
"""``shutdown`` waits until the server looks up, by default twice a second."""
_RETURNED, _RAISED, _KEPT = b"returned", b"raised", b"kept"


def run(
    function: Callable[..., Any],
    n: int | None = None,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    hosts: str | None = None,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> list[Any]:
    """Call a function on every rank of a new job, as ``hvdkit launch`` starts it, and wait for all results. ::

        def train(rate):
            world = hk.init()
            ...
            return loss

        losses = hvdkit.run(train, n=4, args=(0.1,))

    Output comes as the ranks write it, each line with its rank. The first rank that fails ends the job.

    Args:
        function: also a lambda, or one of a notebook; sent by cloudpickle, as are arguments and results.
        n: ranks, >= 1; None where ``ppn`` says how many each host takes.
        args, kwargs: of the function, the same on every rank.
        hosts: as ``--hosts``: "h1:4,h2:4"; None for the batch job's, or this machine.
        env: variables of every rank.
        options: any other option of ``hvdkit launch`` by its name with underscores, such as ``threads=2``,
            ``timeline="trace.json"``, ``stall_timeout=60`` or ``restarts=1``.
    Returns:
        What the function returned, by rank.
    Raises:
        InvalidArgumentError: an argument is wrong, it or a result cannot be pickled, or this is not the main thread,
            which alone gets signals.
        MissingFrameworkError: cloudpickle is not installed.
        LaunchError: the job failed otherwise than by an exception of the function.
        KeyboardInterrupt: it was interrupted; every rank has been ended.
        Exception: what the function raised on the rank that failed first.
    """
    from hvdkit.jobs.launch import cli, peer
    from hvdkit.jobs.launch.options import OPTIONS, as_words

    if not callable(function):
        raise InvalidArgumentError(f"run takes a function, got {type(function).__name__}.")
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise InvalidArgumentError(
            f"args must be a tuple or a list, got {args!r}; of one argument it is args=({args!r},)."
        )
    if threading.current_thread() is not threading.main_thread():
        raise InvalidArgumentError("run was called in another than the main thread, which alone gets signals.")
    given = {**options, "n": n, "hosts": hosts, "variables": dict(env or {})}
    known = [name for name in OPTIONS if name not in ("module", "dry_run")]
    if unknown := [name for name in given if name not in known]:
        raise InvalidArgumentError(f"run has no option {unknown[0]!r}; its options are {', '.join(known)}.")
    request = request_of(as_words(given), "hvdkit.jobs.function")
    call = _pickled(
        (function, tuple(args), dict(kwargs or {})), "the function or an argument", "make it in the function"
    )
    work = _pickled((list(sys.path), call))
    listener, address = peer.listener([host.name for host in request.hosts], here=not request.hosts)
    with _Server(listener, work) as server, _known_secret(server):
        ended = cli.start(replace(request, command=(*request.command, address)), _writer())
    if ended.interrupted:
        raise KeyboardInterrupt if ended.status == 130 else SystemExit(ended.status)
    if ended.status:
        failed = ended.failure
        if failed is not None and failed.rank in server.errors:
            raise _error(failed.rank, server.errors[failed.rank])
        raise LaunchError(f"{failed or f'the job ended with status {ended.status}'}; the lines above say more.")
    for rank in range(request.n):
        if rank not in server.results:
            raise LaunchError(f"rank {rank} ended before the function returned, by sys.exit or os._exit.")
    return [pickle.loads(server.results[rank]) for rank in range(request.n)]  # noqa: S301  # of this job: it knew the secret


def request_of(words: Sequence[str], module: str) -> Request:
    """What ``hvdkit launch`` is asked for that has a module run on every rank.

    Args:
        words: options, as on the command line.
        module: of hvdkit, given the address of a ``RankServer``.
    Raises:
        InvalidArgumentError: an option is wrong.
    """
    import click

    from hvdkit.jobs.launch import cli, facts

    try:
        typed = dict(cli.launch.make_context("run", list(words)).params)
    except click.ClickException as error:
        raise InvalidArgumentError(error.format_message()) from error
    typed["command"] = (str(facts.own_python()), "-m", module)
    return facts.settle(environ=os.environ, **typed)


def _pickled(value: Any, what: str = "it", instead: str = "leave it out") -> bytes:
    try:
        import cloudpickle  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingFrameworkError("hvdkit.run needs cloudpickle: `pip install cloudpickle`.") from error
    try:
        made: bytes = cloudpickle.dumps(value)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise InvalidArgumentError(f"{what} cannot be sent to another process ({error}); {instead}.") from error
    return made


def _writer() -> Callable[[int, bytes], None] | None:
    """Where output goes that is not to go to this process's descriptors: a notebook's cell, a test's capture."""
    streams = {1: sys.stdout, 2: sys.stderr}
    try:
        if all(stream.fileno() == fd for fd, stream in streams.items()):
            return None
    except (AttributeError, OSError, ValueError):  # no file behind it
        pass

    def write(fd: int, data: bytes) -> None:
        streams[fd].write(data.decode(errors="replace"))
        streams[fd].flush()

    return write


@contextmanager
def _known_secret(server: _Server) -> Iterator[None]:
    """Have the job's secret in the environment, from which ``hvdkit launch`` takes it."""
    before = os.environ.get(secret.VARIABLE)
    server.secret = os.environ[secret.VARIABLE] = secret.checked(before) if before else secret.new()
    try:
        yield
    finally:
        if before is None:
            del os.environ[secret.VARIABLE]


class RankServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A thread for each rank that connects and shows that it knows the job's secret."""

    daemon_threads = True

    def __init__(self, listener: Any) -> None:
        super().__init__(listener.getsockname(), _Rank, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.secret = ""
        self._thread = threading.Thread(target=self.serve_forever, args=(_POLL_S,), name="hvdkit.run", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def serve(self, received: BufferedIOBase, sent: BufferedIOBase) -> None:
        """Talk with one rank; the connection ends with it."""
        raise NotImplementedError

    def handle_error(self, *_: object) -> None:
        """A rank that has ended meanwhile; ``hvdkit launch`` says how."""


class _Rank(socketserver.StreamRequestHandler):
    server: RankServer

    def handle(self) -> None:
        """Serve one rank."""
        from hvdkit.jobs.launch.peer import Peer  # here alone: ranks load this file, too

        stranger = Peer(self.connection)
        stranger.order(stranger.nonce)
        known = None
        while known is None and (data := stranger.receive()):
            known = stranger.shake_hands(data, self.server.secret)
        if known:
            self.server.serve(self.rfile, self.wfile)


class _Server(RankServer):
    """Gives every rank the function, and keeps what each returns or raises."""

    def __init__(self, listener: Any, work: bytes) -> None:
        super().__init__(listener)
        self.work = work
        self.results: dict[int, bytes] = {}
        self.errors: dict[int, bytes] = {}

    def serve(self, received: BufferedIOBase, sent: BufferedIOBase) -> None:
        send(sent, self.work)
        rank = int(receive(received))
        for left in (self.results, self.errors):  # of an attempt before this one
            left.pop(rank, None)
        how, value = receive(received), receive(received)
        (self.results if how == _RETURNED else self.errors)[rank] = value
        send(sent, _KEPT)


def _error(rank: int, value: bytes) -> BaseException:
    """What a rank raised, with where; where it cannot be made again, its text."""
    pickled, text = pickle.loads(value)  # noqa: S301  # of this job: it knew the secret
    try:
        error: BaseException = pickle.loads(pickled)  # noqa: S301
    except Exception:  # a class whose __init__ takes other arguments than it keeps
        error = LaunchError(text.strip().splitlines()[-1])
    error.add_note(f"On rank {rank}:\n{text}")
    return error


def send(stream: BufferedIOBase, data: bytes) -> None:
    """Write a message: its length in 8 bytes, then the bytes."""
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def receive(stream: BufferedIOBase) -> bytes:
    """Read a message.

    Raises:
        ConnectionResetError: the stream ended before.
    """
    header = stream.read(_LENGTH.size)
    data = stream.read(_LENGTH.unpack(header)[0]) if len(header) == _LENGTH.size else b""
    if len(header) < _LENGTH.size or len(data) < _LENGTH.unpack(header)[0]:
        raise ConnectionResetError("the other side hung up")
    return data


def connect(address: str) -> tuple[int, socket.socket]:
    """On a rank: which one it is, and its connection to the ``RankServer`` at an address."""
    launched = launchers.detect(os.environ)
    if launched is None:
        raise SystemExit("hvdkit.run: the launcher says in no variable that is known here which rank this is.")
    try:
        connection = wire.connect(address)
    except (OSError, ValueError) as error:
        raise SystemExit(f"hvdkit.run: rank {launched.rank} cannot reach {address}: {error}") from error
    connection.settimeout(None)
    return launched.rank, connection


def main(address: str) -> None:
    """One rank: call the function, and give back what it returns or raises."""
    rank, connection = connect(address)
    with connection, connection.makefile("rb") as received, connection.makefile("wb") as sent:
        path, work = pickle.loads(receive(received))  # noqa: S301  # of this job: it knew the secret
        sys.path += [entry for entry in path if entry not in sys.path]
        send(sent, str(rank).encode())
        try:
            function, args, kwargs = pickle.loads(work)  # noqa: S301
            value = _pickled(function(*args, **kwargs), "what the function returned", "return arrays, numbers or lists")
        except Exception as error:
            send(sent, _RAISED)
            send(sent, _pickled((_as_pickled(error), traceback.format_exc())))
            receive(received)  # who ends at once may be gone before all of it has been read
            raise
        send(sent, _RETURNED)
        send(sent, value)
        receive(received)


def _as_pickled(error: Exception) -> bytes:
    try:
        return _pickled(error)
    except Exception:  # it holds what cannot travel
        return b""


if __name__ == "__main__":
    main(sys.argv[1])
