"""How long the end of a job can take, in the time of a clock of the test's own."""

import os
import sched
import signal
import socket
from types import SimpleNamespace

import pytest

from hvdkit.run.launch import rank as wire
from hvdkit.run.launch import supervise
from hvdkit.run.launch.model import LaunchPlan
from hvdkit.run.launch.peer import Peer, Signals


@pytest.mark.parametrize("said", [b"ValueError: bad\n", b"HorovodInternalError: Horovod has been shut down\n"])
def test_ranks_and_launchers_that_do_not_end_are_killed_within_ten_seconds_of_a_failure(monkeypatch, said):
    now, seen = [0.0], []
    plan = LaunchPlan(3, "mpirun", (), (), {}, {}, "RANK")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        job = supervise._Job(plan, Signals(ours), ours, "", tagged=True, verbose=False)
        job._timers = sched.scheduler(lambda: now[0], lambda s: now.__setitem__(0, now[0] + s))
        job._launcher = SimpleNamespace(poll=lambda: None, pid=2**22 + 1)
        monkeypatch.setattr(os, "killpg", lambda _, number: seen.append((number, now[0])))
        monkeypatch.setattr(os, "kill", lambda _, number: seen.append((number, now[0])))
        monkeypatch.setattr(Peer, "order", lambda _, order: seen.append((order, now[0])))
        job._peers = job._ranks = [Peer(ours, pid=2**22 + 2 + rank, rank=rank) for rank in range(plan.n)]
        job._peers[0].errors.feed(said)
        job._on_rank_end(job._peers[0], 1, False, 2**22, False, 0)
        job._timers.run()
    asked, killed = ([at for what, at in seen if what == word] for word in (wire.STOP, signal.SIGKILL))
    assert asked and killed and min(asked) < min(killed) <= 9.0
