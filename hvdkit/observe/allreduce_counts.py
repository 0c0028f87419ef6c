"""Ranks that have averaged gradients a different number of times, and now wait for one another forever.

One rank skips a step on what it alone sees (a loss that is not finite), leaves the loop by ``break``, or has fewer
micro-batches. Horovod pairs allreduces by name, so the rank's next one stands in for the one that it left out, and
nothing is seen until the loop has ended: then a rank waits in an allreduce that another will never make, while that one
waits in ``check_agreement``, saves, or has ended. Neither can go on where one rank alone calls what is a collective,
such as ``shard`` under ``if world.is_root``.

A second thread of each rank shows the others once a second how many allreduces of gradients this one has made, and
whether its first thread waits in Horovod, and where. All see the same table. Where every rank waits, none has moved for
some seconds, and their numbers differ, no rank can go on; nor where they have waited longer, in different lines. A rank
that computes, reads or saves is never called short.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from hvdkit.core.communicator import ALLGATHER, Communicator, Words, text_of, words_of
from hvdkit.errors import AgreementError, name_ranks
from hvdkit.steps.launchers import is_elastic

_PERIOD_S, _LEAVE_S = 1.0, 4.0
_QUIET, _LONG_QUIET = 3, 7
"""Tables without a change after which ranks that wait will wait forever: by their numbers, by their lines."""
_RUNS, _WAITS, _AVERAGES, _LEAVES = range(4)
"""What a rank's first thread does: anything else, waits in Horovod, waits there for gradients, leaves the watch."""
_PLACE_WORDS = 15
_SHOWN = 8
"""Ranks at the most in a sentence."""
_LIBRARIES = (str(Path(__file__).parents[1]), sys.prefix, sys.base_prefix, "<")
"""Files of Python, its libraries and hvdkit begin so."""
_FIX_CALLS = (
    "call what all ranks take part in (shard, broadcast_state, average_metrics, check_agreement, Horovod's own) on "
    "every rank, not under a condition that only some of them meet"
)
_FIX = (
    "skip a step, or leave the loop, on every rank or on none: decide by what all ranks see, such as the averaged "
    "gradients or average_metrics of the loss"
)


class AllreduceCounts:
    """This process's part; one for all of its optimizers and tapes."""

    def __init__(self) -> None:
        self._made, self._averaging, self._in_first_thread = 0, 0, True
        self._horovod: Any = None
        self._libraries: tuple[str, ...] = ()
        self._in_graphs: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._thread: threading.Thread | None = None

    def begin(self, horovod: Any, ranks: Communicator) -> None:
        """Watch from now on, with all ranks; not in an elastic job, which goes on without a rank that is lost.

        Nor where a timeline is recorded, in which it would wait longest.

        Args:
            horovod: Horovod's module for the framework, which has been started.
            ranks: all.
        """
        elsewhere = is_elastic() or os.environ.get("HOROVOD_TIMELINE")
        if horovod.size() < 2 or elsewhere or self._is_watching():
            return
        self._horovod = horovod
        self._libraries = (str(Path(sys.modules["horovod"].__path__[0])),)
        if not hasattr(horovod.join, "hvdkit_watched"):
            self._replace(horovod)
            atexit.register(self.leave)  # before Horovod's own, which ends it for all ranks
        self.start(ranks)

    def _replace(self, horovod: Any) -> None:
        """``join`` leaves the watch, and ``init`` does nothing where Horovod runs."""
        plain_join, plain_init = horovod.join, horovod.init

        def join(*arguments: Any, **options: Any) -> Any:
            self.leave(to_the_end=True)  # Horovod ends where others begin an allgather without a rank that has joined
            return plain_join(*arguments, **options)

        def init(*arguments: Any, **options: Any) -> Any:
            if arguments or options or not horovod.is_initialized():
                return plain_init(*arguments, **options)
            return None  # PyTorch's would forget what the second thread waits for

        join.hvdkit_watched = True  # type: ignore[attr-defined]
        horovod.join, horovod.init = join, init

    def start(self, ranks: Communicator) -> None:
        """Watch from now on, between these ranks."""
        self._ranks, self._rank, self._made, self._leaves = ranks, ranks.rank(), 0, False
        self._gather = ranks.background(ALLGATHER, "hvdkit.allreduce_counts")
        self._process, self._told = os.getpid(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hvdkit allreduce counts", daemon=True)
        self._thread.start()

    def in_graphs(self, counts: Callable[[], tuple[int, int]]) -> None:
        """Have allreduces counted that a graph begins and ends, where Python does not run."""
        self._in_graphs = counts

    @contextmanager
    def allreduce(self, process_sets: Iterable[Any]) -> Iterator[None]:
        """In here the first thread averages gradients over Horovod's process sets; only that of all ranks counts."""
        counts = any(one.process_set_id == 0 for one in process_sets)
        self._in_first_thread &= threading.current_thread() is threading.main_thread()
        self._made += counts
        self._averaging += counts
        try:
            yield
        finally:
            self._averaging -= counts

    def leave(self, *, to_the_end: bool = False) -> None:
        """Show the others a last time how far this rank has come, and watch no more, on all ranks."""
        if self._thread is not None and self._is_watching():
            self._leaves = True
            self._told.set()
            self._thread.join(None if to_the_end else _LEAVE_S)

    def _is_watching(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and self._process == os.getpid()

    def _watch(self) -> None:
        """The second thread. Where it fails, the job ends: the others would wait for what this rank shows next."""
        try:
            self._look_on()
        except Exception as error:
            if not self._ranks.has_ended(error):
                what = f"the watch over allreduces has failed on rank {self._rank}: {type(error).__name__}: {error}"
                sys.stderr.write(f"hvdkit: {what}; this is an error of hvdkit, and the job is ended.\n")
                self.end(what)

    def _look_on(self) -> None:
        """Show the others where this rank is, until one leaves or none can go on."""
        before, quiet = None, 0
        while True:
            self._told.wait(_PERIOD_S)
            self._told.clear()
            table = self._gather(self._row()[None])
            rows = [_Row(rank, row) for rank, row in enumerate(table)]
            quiet = quiet + 1 if before is not None and np.array_equal(table, before) else 0
            before = table
            states = {row.state for row in rows}
            if _LEAVES in states:
                self._explain(rows)
                if self._horovod and self._leaves and states != {_LEAVES}:
                    time.sleep(_PERIOD_S)  # until the others know it, too: this one's end is Horovod's
                return
            apart = len({row.made for row in rows}) > 1 and quiet >= _QUIET
            elsewhere = len({row.place for row in rows}) > 1 and quiet >= _LONG_QUIET
            if _RUNS not in states and (apart or elsewhere) and self.all_meet():
                self._explain(rows)
                time.sleep(_PERIOD_S)  # until the others know it, too: a rank that waits fails at once
                self.end(_sentence(rows))
                return

    def _row(self) -> Words:
        """What this rank shows: its allreduces, what its first thread does, and where."""
        begun, ended = self._in_graphs()
        made = self._made + begun
        if self._leaves:
            return np.array([made, _LEAVES, *words_of("", _PLACE_WORDS)])
        state = _AVERAGES if self._averaging or begun > ended else _WAITS if self.waits() else _RUNS
        place, frame = "", sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None and not place:
            file = frame.f_code.co_filename
            if file.startswith(self._libraries):
                state = max(state, _WAITS)
            elif file == threading.__file__ and frame.f_code.co_name == "_shutdown" and self._in_first_thread:
                state, place = max(state, _WAITS), "threading, its program has ended and a thread of it has not"
            elif "site-packages" not in file and not file.startswith(_LIBRARIES):
                place = f"{Path(file).name}, line {frame.f_lineno}"
            frame = frame.f_back
        return np.array([made, state, *words_of(place if state else "", _PLACE_WORDS)])

    def waits(self) -> bool:
        """Whether the first thread waits for other ranks, where its frames do not show that."""
        return False

    def all_meet(self) -> bool:
        """Ranks of several process sets may rightly differ, and wait in collectives that others have no part in."""
        from horovod.common import process_sets

        return len(process_sets._basics._get_process_set_ids_and_ranks()) == 1

    def end(self, sentence: str) -> None:  # noqa: ARG002 - the error of the call that fails now has it
        """End what the ranks wait in."""
        getattr(self._horovod.shutdown, "hvdkit_plain", self._horovod.shutdown)()

    def _explain(self, rows: list[_Row]) -> None:
        """Have an error that ends this process, and that is of Horovod's end, say why that ended."""
        from horovod.common.exceptions import HorovodInternalError

        plain = sys.excepthook

        def explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            left = [row for row in rows if row.state == _LEAVES]
            if issubclass(kind, Exception) and not left:  # of whatever class: all waited in Horovod, which was ended
                error = AgreementError(_sentence(rows))
            elif issubclass(kind, Exception) and "Horovod has been shut down" in str(error):
                made = self._made + self._in_graphs()[0]
                short = [row for row in left if row.made < made]
                if short:  # the launcher takes this class for a consequence: that rank may have failed
                    error = HorovodInternalError(_sentence([*short, _Row(self._rank, np.array([made, _AVERAGES]))]))
            plain(type(error), error, trace)

        sys.excepthook = explain


class _Row:
    """What one rank shows."""

    def __init__(self, rank: int, words: Words) -> None:
        self.rank, self.made, self.state = rank, int(words[0]), int(words[1])
        self.place = text_of(words[2:])

    @property
    def doing(self) -> str:
        if self.state == _LEAVES:
            return "has ended"
        what = "waits for gradients" if self.state == _AVERAGES else "waits"
        return f"{what} in {self.place}" if self.place else what


def _sentence(rows: list[_Row]) -> str:
    fewest, most = min(row.made for row in rows), max(row.made for row in rows)
    if fewest == most:
        doing = ", ".join(f"rank {row.rank} {row.doing}" for row in rows[:_SHOWN])
        return f"the ranks wait for one another in different calls: {doing}; {_FIX_CALLS}."
    short = [row for row in rows if row.made == fewest]
    others = [row for row in rows if row.made == most]
    number = "one allreduce" if most - fewest == 1 else f"{most - fewest} allreduces"
    who, than = (name_ranks([row.rank for row in some]) for some in (short, others))
    return (
        f"{who} made {number} of gradients fewer than {than}, {fewest} and not {most}: rank {short[0].rank} "
        f"{short[0].doing}, while rank {others[0].rank} {others[0].doing}; {_FIX}."
    )


COUNTS = AllreduceCounts()
