"""When a rank counts as waiting for others, and that a forked process is no rank; the rest needs real ranks."""

import inspect
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import array_ranks
import numpy as np
import pytest
from array_ranks import Meeting, Ranks

from hvdkit.arrays import exit_watchdog, mpi
from hvdkit.arrays.optimizer import Reduce
from hvdkit.core import communicator
from hvdkit.core.communicator import end_the_job_with_the_process
from hvdkit.steps.gradients import GradientOptions


@pytest.fixture
def comm(monkeypatch):
    """A marked communicator; ``comm.seen`` are the marks that a second thread sees during each call that waits."""
    monkeypatch.setattr(mpi, "library", lambda: array_ranks.MPI)
    seen = []

    class Watched(Ranks):
        def Get_size(self):  # noqa: N802
            return 2

        def Allreduce(self, source, target, op=None):  # noqa: N802
            seen.append(dict(exit_watchdog._waits))
            assert source is array_ranks.MPI.IN_PLACE

        def Iallreduce(self, source, target):  # noqa: N802
            return SimpleNamespace(Test=lambda: False, Wait=lambda: seen.append(dict(exit_watchdog._waits)))

        def bcast(self, value, root=0):
            seen.append(dict(exit_watchdog._waits))
            return value

        def allgather(self, value):
            seen.append(dict(exit_watchdog._waits))
            return [value, value]

    comm = exit_watchdog.Marked(Watched(Meeting(1), 0))
    comm.seen = seen
    return comm


@pytest.mark.parametrize("way", ["short", "long", "start", "minimum", "root", "together"])
def test_who_waits_for_other_ranks_is_marked_and_each_wait_is_another(comm, way):
    values = np.zeros(4 if way == "short" else 2**16, np.float32)
    reduce = Reduce(values, GradientOptions(), comm, threaded=False)
    comm.seen.clear()
    busy = []  # the marks while the root writes, and while ranks do the same: neither waits
    ways = {
        "start": lambda: reduce.start(values).wait(),
        "minimum": lambda: mpi.ranks(comm).allreduce(np.zeros(2, np.int64), "name", op="min"),
        "root": lambda: mpi.ranks(comm).on_root(lambda: busy.append(dict(exit_watchdog._waits))),
        "together": lambda: mpi.ranks(comm).together(lambda: busy.append(dict(exit_watchdog._waits))),
    }
    for _ in range(2):
        ways.get(way, lambda: reduce(values))()
        assert not exit_watchdog._waits
    assert busy in ([], [{}, {}])
    assert [list(seen) for seen in comm.seen] == [[threading.get_ident()]] * len(comm.seen)
    numbers = [number for seen in comm.seen for number in seen.values()]
    assert len(set(numbers)) == len(numbers) >= 2


@pytest.mark.parametrize(("looks", "ends"), [([3, 3], True), ([3, 4], False), ([3, None], False)])
def test_the_job_ends_only_when_one_wait_lasts_over_two_looks(monkeypatch, capsys, looks, ends):
    aborted = []
    watch = exit_watchdog.ExitWatchdog.__new__(exit_watchdog.ExitWatchdog)
    watch._comm = SimpleNamespace(Get_rank=lambda: 0, Abort=aborted.append)
    watch._gone = lambda: 1
    marks = [{7: number} if number else {} for number in looks]

    def look(seconds):
        if not marks:
            return True
        exit_watchdog._waits.clear()
        exit_watchdog._waits.update(marks.pop(0))
        return False

    watch._ends = SimpleNamespace(wait=look)
    try:
        watch._listen()
    finally:
        exit_watchdog._waits.clear()
    assert aborted == [1] * ends
    assert ("rank 1 ended, and rank 0 waits for it" in capsys.readouterr().err) == ends


def test_a_mark_goes_when_the_wait_fails():
    def fail():
        raise ValueError

    with pytest.raises(ValueError):
        exit_watchdog.waits(fail)()
    assert not exit_watchdog._waits


def test_no_call_of_hvdkit_that_waits_is_without_a_mark():
    """The calls of communicators are marked by name; of requests hvdkit.arrays waits for none."""
    sources = [path.read_text() for path in Path(exit_watchdog.__file__).parent.rglob("*.py")]
    over_mpi = inspect.getsource(communicator.OverMpi)
    called = {name for text in (*sources, over_mpi) for name in re.findall(r"comm\.([A-Za-z_]+)", text)}
    called |= set(re.findall(r"_in_order\(\)\.([A-Za-z_]+)", over_mpi))
    called |= set(re.findall(r'"((?:All|Bcast|Reduce)[a-z_]*)"', over_mpi))
    quick = {"Abort", "Get_rank", "Get_size", "Ibarrier", "Iprobe", "Isend"}
    assert called - quick == exit_watchdog._WAIT
    assert not [text for text in sources if ".Wait" in text]


def test_a_forked_process_takes_no_leave_and_ends_no_job(monkeypatch, capsys):
    called = []

    class Comm(Ranks):
        def Ibarrier(self):  # noqa: N802
            called.append("leave")
            return super().Ibarrier()

        def Abort(self, code):  # noqa: N802
            called.append("abort")

    comm = Comm(Meeting(1), 0)
    registered = []
    monkeypatch.setattr(exit_watchdog.atexit, "register", registered.append)
    monkeypatch.setattr("sys.excepthook", lambda *error: None)
    exit_watchdog.ExitWatchdog(comm, listens=False)
    end_the_job_with_the_process(comm)

    def end():
        registered[0]()
        sys.excepthook(ValueError, ValueError("x"), None)

    with monkeypatch.context() as child:
        child.setattr("os.getpid", lambda: -1)
        end()
    assert called == []
    end()
    assert called == ["leave", "abort"]
