"""Cells of a notebook that run on the ranks of a job, which live on between them. ::

    %load_ext hvdkit.notebook

    %%ranks 4
    import hvdkit.torch as hk
    world = hk.init()

The extension starts ``hvdkit launch`` with ``jobs.rank_shell`` on every rank, which takes the cells over a connection
of its own (``jobs.function.RankServer``: both sides show that they know the job's secret). What the ranks print comes
through ``hvdkit launch``, with the rank before each line; figures and tables come from the root, over the connection.
All of it is JSON: nothing is unpickled.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, BinaryIO

from hvdkit.common.programs import handled
from hvdkit.errors import HvdkitError, InvalidArgumentError, LaunchError
from hvdkit.jobs import function
from hvdkit.jobs.launch import peer
from hvdkit.jobs.rank_shell import END
from hvdkit.steps import secret

INTERRUPT_S = 1.0
"""Seconds in which the other ranks have to end a cell that failed on one, and then, or where the user interrupts it, to
end it by KeyboardInterrupt. A rank that waits for others in C++ does not hear of that, and is ended."""
STOP_S = 3.0
"""Seconds in which ranks that are no longer wanted have to end by themselves."""
_ENDED = re.compile(rf"(?s)(.*?)(?:\[\d+\] )?{END}(\d+)\n")


class RanksError(LaunchError):
    """A cell that failed on a rank or was interrupted, or ranks that are gone. A notebook shows the sentence alone."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class LivingRanks(function.RankServer):
    """Ranks that wait for cells; they are there at the first cell at the latest.

    Args:
        n: how many, >= 1.
        options: others of ``hvdkit launch``, as on its command line.
    Raises:
        InvalidArgumentError: an option is wrong.
    """

    def __init__(self, n: int, options: tuple[str, ...] = ()) -> None:
        self.n, self.options = n, options
        words = ["-n", str(n), *options]
        request = function.request_of(words, "hvdkit.jobs.rank_shell")
        if request.n != n:
            raise InvalidArgumentError(f"got {n} ranks and -n {request.n}; the number stands first, without -n.")
        listener, address = peer.listener([host.name for host in request.hosts], here=not request.hosts)
        super().__init__(listener)
        self.secret = secret.new()
        self.wanted = True
        self.known: dict[int, dict[str, Any]] = {}
        self._sent: dict[int, Any] = {}
        self._events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._number = 0
        self.__enter__()
        self._job = subprocess.Popen(
            [sys.executable, "-m", "hvdkit", "launch", *words, "--", *request.command, address],
            env={**os.environ, secret.VARIABLE: self.secret},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a notebook interrupts all processes of its group
        )
        for name in ("stdout", "stderr"):
            threading.Thread(target=self._read, args=(name, getattr(self._job, name)), daemon=True).start()

    def _read(self, name: str, stream: BinaryIO) -> None:
        for line in stream:
            self._events.put((name, line.decode(errors="replace")))
        self._events.put(("end", name))

    def serve(self, received: Any, sent: Any) -> None:
        """Take what one rank says, to its end."""
        rank = int(function.receive(received))
        self._sent[rank] = sent
        while True:
            message = json.loads(function.receive(received))
            self._events.put((message["kind"], (rank, message)))

    def __str__(self) -> str:
        where = "; ".join(f"rank {rank}: pid {at['pid']} on {at['host']}" for rank, at in sorted(self.known.items()))
        return where if len(self.known) == self.n else f"{self.n} ranks start"

    @property
    def alive(self) -> bool:
        """Whether they can run a cell, now or when they have started."""
        return self.wanted and self._job.poll() is None

    def run(self, source: str) -> None:
        """Run a cell on every rank, and wait until all have ended it.

        Raises:
            RanksError: it failed on a rank, it was interrupted, or a rank is gone.
        """
        cell = _Cell(self.n)
        with handled((signal.SIGINT,), lambda *_: self._events.put(("interrupt", None))):
            self._follow(cell, source)
        if cell.left:
            self.stop()
        cell.raise_if_failed()

    def _follow(self, cell: _Cell, source: str) -> None:
        """Give the ranks the cell once all are there, and take what comes until it is over, or they hang in it."""
        while not cell.over:
            if len(self.known) == self.n and not cell.number:
                self._number += 1
                cell.number = self._number
                self._tell({"kind": "run", "cell": cell.number, "source": source})
            with contextlib.suppress(queue.Empty):
                kind, what = self._events.get(timeout=0.1)
                if kind == "ready":
                    self.known[what[0]] = what[1]
                elif kind == "interrupt":
                    cell.interrupted, cell.deadline = True, 0.0
                elif kind == "end":
                    self._raise_ended(cell)
                else:
                    cell.take(kind, what)
            if time.monotonic() > cell.deadline and not cell.asked:
                cell.asked, cell.deadline = True, time.monotonic() + INTERRUPT_S
                self._tell({"kind": "interrupt"})
            elif time.monotonic() > cell.deadline:
                break

    def _raise_ended(self, cell: _Cell) -> None:
        """Show what ``hvdkit launch`` still says of its end, and raise."""
        status = self._job.wait()
        streams = {"stdout", "stderr"}
        with contextlib.suppress(queue.Empty):  # a process that the ranks left behind may hold the other one open
            while streams:
                kind, what = self._events.get(timeout=1)
                if kind == "end":
                    streams.clear()
                elif kind in streams:
                    cell.take(kind, what)
        self.wanted = False
        raise RanksError(f"The ranks are gone (status {status}), and with them their variables; see above why.")

    def _tell(self, message: Mapping[str, Any]) -> None:
        for sent in self._sent.values():
            with contextlib.suppress(OSError):  # it has just ended; hvdkit launch says how
                function.send(sent, json.dumps(message).encode())

    def stop(self) -> None:
        """End every rank."""
        self.wanted = False
        self._tell({"kind": "stop"})
        self.__exit__()
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        try:
            self._job.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._job.terminate()
            self._job.wait()


class _Cell:
    """A cell while the ranks run it, seen from the notebook."""

    def __init__(self, n: int) -> None:
        self.number = 0  # until the ranks have been given it
        # On time.monotonic: when ``asked`` follows, and after that, when ranks are waited for no more.
        self.deadline = float("inf")
        self.asked = False  # whether the ranks were asked to end it by KeyboardInterrupt
        self.interrupted = False
        self._n = n
        self._errors: dict[int, str] = {}  # "" of a rank that has ended it well
        self._stacks: dict[int, str] = {}
        self._ended = {"stdout": 0, "stderr": 0}  # ranks whose output has come, to its end

    @property
    def left(self) -> list[int]:
        """The ranks that are still in it."""
        return [rank for rank in range(self._n) if rank not in self._errors] if self.number else []

    @property
    def over(self) -> bool:
        return bool(self.number) and not self.left and all(ended == self._n for ended in self._ended.values())

    def take(self, kind: str, what: Any) -> None:
        """Show what came from ``hvdkit launch`` or from a rank, or note it."""
        if kind in self._ended:
            if match := _ENDED.fullmatch(what):
                self._ended[kind] += int(match[2]) == self.number
                what = f"{match[1]}\n" if match[1] else ""
            getattr(sys, kind).write(what)
            return
        rank, message = what
        if kind == "display":
            from IPython import get_ipython

            shown = {name: message[name] for name in ("data", "metadata", "transient", "update")}
            get_ipython().display_pub.publish(**shown)
        elif kind == "stacks":
            self._stacks[rank] = message["text"]
        elif message["cell"] == self.number:
            self._errors[rank] = message["error"]
            if message["error"]:
                self.deadline = min(self.deadline, time.monotonic() + INTERRUPT_S)

    def raise_if_failed(self) -> None:
        """Say what went wrong, if anything did, with where the ranks were that are still in it."""
        for rank in self.left:
            print(f"rank {rank} was here:\n{self._stacks.get(rank, '')}", end="", file=sys.stderr)  # noqa: T201
        said = ["interrupted"] if self.interrupted else []
        errors = {rank: error for rank, error in self._errors.items() if error}
        if errors and not said:
            by_itself = [rank for rank, error in errors.items() if error != "KeyboardInterrupt"]
            said = [f"rank {rank}: {errors[rank]}" for rank in (by_itself or list(errors))[:1]]
        if self.left:
            ranks = " and ".join(map(str, self.left))
            said.append(f"rank {ranks} could not be interrupted, so every rank was ended, and their variables are gone")
        if said:
            raise RanksError("; ".join(said))


class Notebook:
    """The magics, and the ranks of this notebook."""

    def __init__(self) -> None:
        self.ranks: LivingRanks | None = None  # until some are asked for

    def magic(self, line: str, cell: str | None = None) -> None:
        """Cells that run on the ranks of a job. ::

            %%ranks 4 --threads 2    run this cell on 4 ranks, which are started where none are there
            %%ranks                  run this cell on the ranks that are there
            %ranks                   say which are there
            %ranks 4                 start them, or others in their place
            %ranks stop              end them

        What follows the number are options of ``hvdkit launch``. Variables live on from cell to cell. Each line that a
        rank prints has its number before it; figures and tables are the root's.
        """
        try:
            self._run(shlex.split(line), cell)
        except RanksError:
            gone = self.ranks
            if gone is not None and not gone.alive:
                self.stop()
                self.ranks = LivingRanks(gone.n, gone.options) if gone.known else None
            raise
        except (HvdkitError, ValueError) as error:  # ValueError: of shlex, a quotation that does not end
            from IPython.core.error import UsageError

            raise UsageError(f"%ranks: {error}") from error

    def _run(self, words: list[str], cell: str | None) -> None:
        """Do what the words of the magic say, and run the cell, if there is one."""
        here = self.ranks
        if words == ["stop"]:
            self.stop()
            return
        if words and not words[0].isdecimal():
            raise InvalidArgumentError(
                f"got {words[0]!r}; a number of ranks comes first, as in `%%ranks 4 --threads 2`."
            )
        n, options = (int(words[0]), tuple(words[1:])) if words else (0, ())
        if words and not (here and here.alive and here.n == n and options in ((), here.options)):
            self.stop()
            self.ranks = LivingRanks(n, options)
        if self.ranks is None:
            raise InvalidArgumentError("there are no ranks yet; `%%ranks 2` starts two.")
        if cell is not None:
            self.ranks.run(cell)
        else:
            print(self.ranks)  # noqa: T201

    def stop(self) -> None:
        """End the ranks, if there are any."""
        if self.ranks is not None:
            self.ranks.stop()
            self.ranks = None


_notebook = Notebook()


def load_ipython_extension(ipython: Any) -> None:
    """Called by ``%load_ext hvdkit.notebook``."""
    ipython.register_magic_function(_notebook.magic, "line_cell", "ranks")
    atexit.register(_notebook.stop)
