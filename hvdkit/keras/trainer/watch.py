"""Ranks that go apart in the middle of an epoch of ``fit`` end together; an inside of ``hvdkit.keras``.

A rank that stops or fails leaves the others waiting for its gradients, in a call that does not return. So a second
thread of each rank tells the others once a second how far ``fit`` has come: all see the same table, draw the same
conclusion, and a rank that waits is freed by the end of Horovod. A step of the training pays one assignment for it.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np

from hvdkit.core.communicator import ALLGATHER, text_of, words_of
from hvdkit.errors import AgreementError, name_ranks
from hvdkit.keras.transport import Transport

_RUNS, _STOPPED, _LEFT, _DONE = range(4)
_PERIOD_S = 1.0
_QUIET = 4
"""Exchanges after which ranks that do not come on are taken to wait for one that has left."""
_TEXT_WORDS, _TEXTS = 60, 3

_watching = threading.Lock()


def begin(transport: Transport) -> Watch | None:
    """Watch a ``fit`` that all ranks have begun; None within another one, which is watched."""
    if not transport.has_background() or not _watching.acquire(blocking=False):
        return None
    return Watch(transport)


class Watch:
    """One rank's part; its methods are called where ``fit`` runs.

    Attributes:
        verdict: which rank stopped or failed, where and why; "" while the ranks are together.
        followed: whether this one only ends because of the others.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._gather = transport.background(ALLGATHER, "hvdkit.watch")
        self._mine = (_RUNS, -1, -1)
        self._text = self.verdict = ""
        self.followed = False
        self._told, self._answered = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvdkit watch", daemon=True)
        self._thread.start()

    def at(self, epoch: int, batch: int) -> None:
        """This rank begins a batch.

        Raises:
            AgreementError: another rank has stopped or failed.
        """
        self._mine = (_RUNS, epoch, batch)
        if self.verdict:
            raise AgreementError(self.verdict)

    def stopped(self, text: str) -> None:
        """This rank ends its epoch before the end; returns when all ranks do so after the same batch.

        Raises:
            AgreementError: they do not.
        """
        self._text = text
        self._mine = (_STOPPED, *self._mine[1:])
        self._told.set()
        while not self._answered.wait(_PERIOD_S) and self._thread.is_alive():
            pass
        self._answered.clear()
        if self.verdict:
            raise AgreementError(self.verdict)

    def left(self, text: str) -> None:
        """This rank fails; returns when it is known whether the others do, too."""
        self._text = text
        self._end(_LEFT)

    def done(self) -> None:
        """This rank has come to the end of ``fit``."""
        self._end(_DONE)

    def _end(self, state: int) -> None:
        self._mine = (state, *self._mine[1:])
        self._told.set()
        try:
            self._thread.join()
        finally:
            if _watching.locked():  # not after an interrupt of the first end
                _watching.release()

    def _run(self) -> None:
        """The second thread: tell the others where this rank is, until all have left or the ranks part."""
        before, quiet = None, 0
        try:
            while True:
                self._told.wait(_PERIOD_S if self._mine[0] == _RUNS else _PERIOD_S / 20)
                self._told.clear()
                table = self._exchange(self._mine)
                rows = [tuple(row) for row in table.tolist()]
                quiet = quiet + 1 if rows == before else 0
                before = rows
                if all(state in (_LEFT, _DONE) for state, *_ in rows):
                    return
                if len(set(rows)) == 1 and rows[0][0] == _STOPPED:
                    self._mine = (_RUNS, *self._mine[1:])
                    self._answered.set()
                elif _are_apart(rows, quiet):
                    self._part([state for state, *_ in rows])
                    return
        except Exception as error:
            if not self._transport.has_ended(error):  # the others would wait for what this rank shows next
                self.verdict = f"the watch over fit has failed on rank {self._transport.rank()}: {error!r}"
                sys.stderr.write(f"hvdkit: {self.verdict}; this is an error of hvdkit, and the job is ended.\n")
                self._transport.end(self.verdict)
        finally:
            self._answered.set()

    def _part(self, states: list[int]) -> None:
        texts = [text_of(row) for row in self._exchange(words_of(self._text, _TEXT_WORDS))]
        causes = [text for state, text in zip(states, texts, strict=True) if state in (_STOPPED, _LEFT)]
        shown = "; ".join(causes[:_TEXTS]) + ("; ..." if len(causes) > _TEXTS else "")
        others = [rank for rank, state in enumerate(states) if state == _RUNS]
        self.verdict = f"{shown}, while {name_ranks(others)} went on" if others else f"the ranks stopped apart: {shown}"
        self.followed = self._transport.rank() in others
        if self.followed:
            self._transport.end(self.verdict)

    def _exchange(self, words: Any) -> np.ndarray[Any, Any]:
        return self._gather(np.asarray(words, dtype=np.int64)[None])


def _are_apart(rows: list[tuple[int, ...]], quiet: int) -> bool:
    """Whether ranks that have stopped or failed keep others waiting; (state, epoch, batch) of each."""
    gone = [row for row in rows if row[0] in (_STOPPED, _LEFT)]
    if not gone:
        return False
    first = min(row[1:] for row in gone)
    stopped = {row[1:] for row in gone if row[0] == _STOPPED}
    went_on = any(row[0] == _RUNS and row[1:] > first for row in rows)
    return went_on or len(stopped) > 1 or (quiet >= _QUIET and any(row[0] == _LEFT for row in gone))
