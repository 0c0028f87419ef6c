"""A process that has imported a framework and forks ranks: importing TensorFlow takes longer than most of their tests.

Whoever wants a rank connects and sends what a process of its own would have: environment, directory, arguments and open
files (``rank_stub.py`` does so for a launcher, ``ranks.py`` itself for ranks over Gloo). The fork runs ``main`` of a
module beside this file; its exit status comes back when it ends, a signal's number that is sent later is sent on to
it, and where the connection ends first, the fork is killed. It is on the host of who wants it, where that is a
namespace of its own (``namespaces.py``). Nothing of hvdkit is imported here: each rank imports it itself.

Usage: python warm_main.py DESCRIPTOR MODULE ...   DESCRIPTOR: of a listening socket; ends with standard input
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import selectors
import signal
import socket
import struct
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
from lean_imports import lean_imports

LONGEST_REQUEST = 1 << 20


class Forks:
    """The forks that have not ended, by process id, each with the connection of who asked for it."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._connections: dict[int, socket.socket] = {}
        self._events = selectors.DefaultSelector()
        self._ended, self._noted = socket.socketpair()
        self._noted.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._noted.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        """Fork what is asked for, until standard input ends."""
        handlers = {sys.stdin.fileno(): None, self._listener: self._accept, self._ended: self._reap}
        for file, handler in handlers.items():
            self._events.register(file, selectors.EVENT_READ, handler)
        while True:
            for key, _ in self._events.select():
                if key.data is None:
                    for process in self._connections:
                        os.kill(process, signal.SIGKILL)
                    return
                if isinstance(key.data, int):
                    self._signal(key.data)
                else:
                    key.data()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        data, files, _, _ = socket.recv_fds(connection, LONGEST_REQUEST, 4)
        while data and not data.endswith(b"\n"):
            more = connection.recv(LONGEST_REQUEST)
            data = data + more if more else b""
        if not data:
            connection.close()
            return
        wants = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        process = os.fork()
        if not process:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._events.close()
            for one in (connection, self._listener, self._ended, self._noted, *self._connections.values()):
                one.close()
            be_rank(json.loads(data), files, wants)
        for file in files:
            os.close(file)
        self._connections[process] = connection
        self._events.register(connection, selectors.EVENT_READ, process)

    def _signal(self, process: int) -> None:
        """Who asked for it sends a signal, or is gone."""
        if process in self._connections:
            number = self._connections[process].recv(100)
            os.kill(process, int(number or signal.SIGKILL))
            if not number:
                self._events.unregister(self._connections[process])

    def _reap(self) -> None:
        self._ended.recv(4096)
        while self._connections:
            process, status = os.waitpid(-1, os.WNOHANG)
            if not process:
                return
            connection = self._connections.pop(process)
            with contextlib.suppress(KeyError):
                self._events.unregister(connection)
            with contextlib.suppress(OSError), connection:
                connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())


def enter_host(process: int) -> None:
    """Be where another process is: in its network, with its host's name and its disks."""
    for kind in ("net", "uts", "mnt"):  # the last one changes what is found under /proc
        theirs = Path(f"/proc/{process}/ns/{kind}")
        if theirs.readlink() != Path(f"/proc/self/ns/{kind}").readlink():
            with theirs.open() as opened:
                if ctypes.CDLL(None, use_errno=True).setns(opened.fileno(), 0):
                    raise OSError(ctypes.get_errno(), f"cannot enter {theirs}")


def be_rank(request: dict[str, Any], files: list[int], wants: int) -> None:
    """In the fork: does not return, but ends as a program of its own does, with all that is registered for the end."""
    status: Any = 1
    try:
        for number, file in enumerate(files[:3]):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(request["environment"])
        for file in files[3:]:  # its number is another one here
            _, _, rest = os.environ["HVDKIT_STACKS"].partition(":")
            os.environ["HVDKIT_STACKS"] = f"{file}:{rest}"
        enter_host(wants)
        os.chdir(request["directory"])
        gc.set_threshold(50_000, 20, 20)  # what is frozen does not count, so that the default searches all the time
        random.seed()  # as in a process that has just begun
        np.random.seed()
        module, *sys.argv[1:] = request["words"]
        status = importlib.import_module(module).main()
    except Exception:
        traceback.print_exc()
    sys.exit(status)


if __name__ == "__main__":
    with lean_imports():
        for name in sys.argv[2:]:
            importlib.import_module(name)
    Forks(socket.socket(fileno=int(sys.argv[1]))).serve()
