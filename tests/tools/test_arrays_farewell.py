"""When a rank counts as waiting for others, and that a forked process is no rank; the rest needs real ranks."""

import sys
import threading

import pytest
from array_ranks import Meeting, Ranks

from hvdkit.arrays import data, farewell, mpi, optimizer
from hvdkit.arrays.exchange import buffers


@pytest.mark.parametrize(("module", "waits"), [(optimizer, True), (buffers, True), (mpi, True), (data, False)])
def test_a_loader_that_reads_a_slow_disk_does_not_wait_for_other_ranks(module, waits):
    stands, inside = threading.Lock(), threading.Event()
    stands.acquire()
    code = compile("inside.set(); still()", module.__file__, "exec")  # still() has no frame of its own, as in MPI
    thread = threading.Thread(target=exec, args=(code, {"inside": inside, "still": stands.acquire}), daemon=True)
    thread.start()
    assert inside.wait(20)
    assert bool(farewell._waiting()) == waits
    stands.release()
    thread.join()


def test_a_forked_process_says_no_farewell_and_ends_no_job(monkeypatch, capsys):
    called = []

    class Comm(Ranks):
        def Ibarrier(self):  # noqa: N802
            called.append("farewell")
            return super().Ibarrier()

        def Abort(self, code):  # noqa: N802
            called.append("abort")

    comm = Comm(Meeting(1), 0)
    registered = []
    monkeypatch.setattr(farewell.atexit, "register", registered.append)
    monkeypatch.setattr("sys.excepthook", lambda *error: None)
    farewell.Farewell(comm, listens=False)
    mpi._end_the_job_with_the_process(comm)

    def end():
        registered[0]()
        sys.excepthook(ValueError, ValueError("x"), None)

    with monkeypatch.context() as child:
        child.setattr("os.getpid", lambda: -1)
        end()
    assert called == []
    end()
    assert called == ["farewell", "abort"]
