"""What ends a job, and how long that can take in the time of a clock of the test's own; who may connect."""

import contextlib
import os
import resource
import sched
import selectors
import signal
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hvdkit.jobs.launch import supervise, wire
from hvdkit.jobs.launch.model import LaunchPlan
from hvdkit.jobs.launch.output import JobOutput
from hvdkit.jobs.launch.peer import Peer, RankEnd, Signals, cause, first_failure, left_early
from hvdkit.steps import secret

PLAN = LaunchPlan(3, "mpirun", (), (), {}, {}, "RANK", grace_s=60.0)


class Watched:
    """A job of three ranks; ``seen``: what was ordered, and which signals went where, with the time."""

    def __init__(self, monkeypatch, connection, server, **options):
        self.now, self.seen = 0.0, []
        self.signals = Signals(connection)
        plan = replace(PLAN, **options)
        shown = JobOutput(plan.launcher_name, tagged=True, verbose=False)
        self.job = job = supervise._Job(plan, self.signals, server, "", shown)
        job._timers = sched.scheduler(lambda: self.now, self.pass_time)
        job._launcher = SimpleNamespace(poll=lambda: None, pid=2**22 + 1, returncode=0)
        monkeypatch.setattr(os, "killpg", self.note)
        monkeypatch.setattr(os, "kill", self.note)
        monkeypatch.setattr(Peer, "order", lambda peer, order: self.note(peer.pid, order))
        self.ranks = [Peer(connection, known=True, pid=2**22 + 2 + rank, rank=rank) for rank in range(plan.n)]
        job._peers, job._ranks = list(self.ranks), list(self.ranks)

    def pass_time(self, seconds):
        self.now += seconds

    def note(self, whom, what):
        self.seen.append((whom, what, self.now))

    def at(self, what, whom=None):
        return [at for who, seen, at in self.seen if seen == what and whom in (None, who)]


@pytest.fixture
def watched(monkeypatch):
    with contextlib.ExitStack() as stack:
        ours, _ = map(stack.enter_context, socket.socketpair())
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        server.setblocking(False)

        def make(**options):
            made = Watched(monkeypatch, ours, server, **options)
            stack.enter_context(made.job._selector)
            return made

        yield make


@pytest.mark.parametrize("said", [b"ValueError: bad\n", b"HorovodInternalError: Horovod has been shut down\n"])
def test_ranks_and_launchers_that_do_not_end_are_killed_within_ten_seconds_of_a_failure(watched, said):
    it = watched()
    it.ranks[0].errors.feed(said)
    it.job._on_rank_end(it.ranks[0], 1, False, 2**22, False, 0)
    it.job._timers.run()
    asked, killed = it.at(wire.STOP), it.at(signal.SIGKILL)
    assert asked and killed and min(asked) < min(killed) <= 9.0


def test_a_rank_whose_worker_was_killed_is_the_cause_though_it_learns_that_from_horovod(watched):
    it = watched()
    it.ranks[1].killed_workers.append((2**22 + 9, signal.SIGKILL))
    for rank in it.ranks[:2]:
        rank.errors.feed(b"HorovodInternalError: Horovod has been shut down\n")
        it.job._on_rank_end(rank, 1, False, rank.pid, False, 0)
    failure = first_failure(it.job._ends)
    assert failure.rank == 1 and "had been killed by SIGKILL" in cause(failure, it.ranks[1].killed_workers)


def test_a_peer_that_has_not_said_who_it_is_is_hung_up_and_no_process_group_is_killed(watched):
    it = watched()
    stranger = Peer(socket.socket(), known=True)
    it.job._selector.register(stranger.connection, selectors.EVENT_READ)
    it.job._peers.append(stranger)
    it.job._kill_outright()
    assert it.at(signal.SIGKILL) and not it.at(signal.SIGKILL, whom=0)
    assert stranger.connection.fileno() == -1 and stranger not in it.job._peers


def test_a_rank_that_comes_when_all_are_killed_is_killed_too(watched, monkeypatch):
    it = watched()
    it.job._stop(wire.TERMINATE, 1.0)
    it.job._kill()
    late = Peer(socket.socket(), pid=1)
    monkeypatch.setattr(Peer, "receive", lambda _: b"proof")
    monkeypatch.setattr(Peer, "shake_hands", lambda *_: True)
    it.job._plan = replace(it.job._plan, environment={secret.VARIABLE: ""})
    it.job._strangers.append(late)
    it.job._on_peer(late)
    late.connection.close()
    assert it.at(wire.KILL, whom=1)


@pytest.mark.parametrize("there", [1, 0])
def test_an_elastic_job_of_fewer_ranks_has_its_grace(watched, there):
    """Only where no rank has come there is nobody else to tell."""
    it = watched(elastic=True)
    del it.job._peers[there:]
    it.job._stop(wire.TERMINATE, 60.0)
    assert bool(it.at(signal.SIGTERM)) == (there == 0)


def test_a_signal_that_ends_the_job_leaves_the_grace_where_nobody_reads_the_output(watched):
    it = watched()
    it.signals.note(signal.SIGTERM, None)
    it.job._shown.on_unread()
    assert not it.at(wire.STOP)
    it.signals.interrupted = False
    it.job._shown.on_unread()
    assert it.at(wire.STOP)


def test_an_answer_that_nobody_waits_for_is_no_harm(watched):
    it = watched()
    it.job._on_frame(it.ranks[1], wire.UNHANDLED, wire.UNHANDLED_PAYLOAD.pack(signal.SIGUSR1))
    assert it.job._unhandled == {}


@pytest.mark.parametrize(("status", "exits"), [(-signal.SIGTERM, 143), (0, 143), (5, 5)])
def test_what_somebody_else_tells_a_rank_ends_the_job_with_its_grace_and_is_no_success(watched, capfd, status, exits):
    it = watched()
    first, second, third = it.ranks
    it.job._on_rank_end(first, status, True, 7, False, 0)
    assert it.at(wire.TERMINATE) and not it.at(wire.STOP)
    it.job._on_rank_end(second, 0, False, 8, False, 0)
    it.job._on_rank_end(third, 0, True, 9, False, 0)
    assert it.at(wire.STOP), "they leave together"
    assert it.job._conclude() == exits
    assert "rank 0 (pid 7) was told to end, and not by hvdkit launch; the job was ended." in capfd.readouterr().err


def test_a_connection_that_ends_without_a_word_is_not_called_killed(watched, capfd):
    it = watched()
    it.job._selector.register(it.ranks[1].connection, selectors.EVENT_READ)
    it.job._on_peer_gone(it.ranks[1])
    assert it.job._conclude() == 137
    assert "rank 1 was lost: the process beside it was killed, or the network failed" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("answering", "lost"),
    [([0], "host n2 answered when the job began"), ([0, 2], ""), ([], "hosts n1 and n2 answered")],
)
def test_a_host_of_which_no_rank_answers_ends_the_job_and_is_named(watched, capfd, answering, lost):
    it = watched(elsewhere=True)
    for rank, host in zip(it.ranks, ("n1", "n2", "n2"), strict=True):
        rank.host = host
    it.job._on_errors(it.ranks[0], b"Traceback (most recent call last):\nHorovodInternalError: it is gone\n")
    assert it.at(wire.ASK) == [0.0] * 3
    for rank in answering:
        it.job._on_frame(it.ranks[rank], wire.HERE, b"")
    it.pass_time(supervise.ANSWER_S)
    it.job._timers.run(blocking=False)
    assert it.at(wire.STOP) == ([supervise.ANSWER_S] * 3 if lost else [])
    it.job._launcher.returncode = 1
    assert it.job._conclude() == 1
    said = capfd.readouterr().err
    assert f"hvdkit launch: {lost}" in said if lost else "answered" not in said


def test_a_rank_that_hangs_up_is_on_a_host_that_is_there(watched):
    it = watched(elsewhere=True)
    theirs, ours = socket.socketpair()
    with ours:
        it.ranks[0].connection = ours
        it.ranks[0].silent = True
        theirs.close()
        assert it.ranks[0].receive() == b"" and it.job._lost_hosts() == []


@pytest.mark.parametrize(
    ("elsewhere", "ended", "came", "survives", "said"),
    [
        (True, 3, 3, "", "every process was ended."),
        (True, 2, 3, "", "the job was ended; rank 2 did not say how."),
        (True, 2, 2, "", "the job was ended."),
        (False, 2, 3, "", "every process was ended; rank 2 did not say how."),
        (True, 3, 3, "pid 7 (D (disk sleep))\npid 9", "it could not end all processes."),
        (False, 3, 3, "pid 7 (D (disk sleep))", "every process was ended."),
    ],
    ids=["all", "silent", "never came", "looked at here", "survivor", "survivor that has ended since"],
)
def test_every_process_was_ended_where_that_is_known(watched, capfd, elsewhere, ended, came, survives, said):
    """On this machine ``hvdkit launch`` looks itself, on others the ranks say it."""
    it = watched(elsewhere=elsewhere)
    del it.job._ranks[came:]
    it.job._signal = signal.SIGTERM
    for rank in it.ranks[:ended]:
        rank.host = "node3"
        if survives and rank is it.ranks[0]:
            it.job._on_frame(rank, wire.SURVIVORS, survives.encode())
        it.job._on_rank_end(rank, 0, True, rank.pid, False, 0)
    assert it.job._conclude() == 128 + signal.SIGTERM
    named = ["hvdkit launch: could not be ended: pid 7 (D (disk sleep)), pid 9 on host node3."]
    last = f"hvdkit launch: interrupted by SIGTERM; {said}"
    assert capfd.readouterr().err.splitlines() == [*(named if elsewhere and survives else []), last]


def test_of_many_who_show_nothing_the_oldest_goes(watched):
    it, first = watched(), None
    with contextlib.ExitStack() as stack:
        address = it.job._listener.getsockname()
        for _ in range(PLAN.n + supervise._FILES // 2 + 1):
            stack.enter_context(socket.create_connection(address))
            it.job._on_connections()
            first = it.job._strangers[0] if first is None else first
        left = list(it.job._strangers)
        assert len(left) == PLAN.n + supervise._FILES // 2 and first not in left
        it.job._on_peer(first)  # what it sent was seen at the same time
        for peer in left:
            it.job._drop_stranger(peer)


def test_too_many_open_files_keep_the_loop_waiting_and_let_the_next_one_in(watched):
    it = watched()
    it.job._listen()
    address = it.job._listener.getsockname()
    with contextlib.ExitStack() as stack:
        stack.enter_context(socket.create_connection(address))
        it.job._on_connections()
        oldest = it.job._strangers[0]
        stack.enter_context(socket.create_connection(address))
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, allowed[1]))
        try:
            it.job._on_connections()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
        assert it.job._selector.select(0) == [], "it does not spin"
        assert oldest.connection.fileno() == -1
        it.job._timers.run()
        (key, _), *_ = it.job._selector.select(5.0)
        key.data()
        (newest,) = it.job._strangers
        it.job._drop_stranger(newest)


# Which rank's end decides how a job ended


WELL = RankEnd(0, 0)
LOST_A_PEER = RankEnd(0, 1, knock_on=True)
EXITED = RankEnd(1, 3)
KILLED = RankEnd(1, -signal.SIGKILL)
ENDED_BY_US = RankEnd(2, -signal.SIGTERM, told=True)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([], None),
        ([WELL, ENDED_BY_US], None),
        ([WELL, EXITED, ENDED_BY_US], EXITED),
        ([EXITED, KILLED], EXITED),
        ([KILLED, EXITED], KILLED),
        ([LOST_A_PEER, EXITED], EXITED),
        ([LOST_A_PEER, RankEnd(2, 1, knock_on=True)], LOST_A_PEER),
        ([LOST_A_PEER, ENDED_BY_US], LOST_A_PEER),
    ],
)
def test_the_first_failure_of_its_own_decides(ends, expected):
    assert first_failure(ends) is expected


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([], None),
        ([WELL, RankEnd(1, 0)], None),
        ([RankEnd(1, 0), LOST_A_PEER], RankEnd(1, 0)),
        ([LOST_A_PEER, RankEnd(1, 0), RankEnd(2, 0)], RankEnd(1, 0)),
        ([RankEnd(1, 0), ENDED_BY_US], RankEnd(1, 0)),
        ([ENDED_BY_US, RankEnd(1, 0)], None),
        ([RankEnd(1, 0, told=True), LOST_A_PEER], None),
        ([WELL, EXITED, ENDED_BY_US], None),
        ([WELL, LOST_A_PEER, KILLED], None),
        ([LOST_A_PEER, ENDED_BY_US], None),
    ],
)
def test_a_rank_that_ends_well_too_early_is_what_the_others_lost(ends, expected):
    assert left_early(ends) == expected


def test_an_end_in_words_and_as_an_exit_status():
    assert (str(EXITED), EXITED.exit_status) == ("rank 1 exited with status 3", 3)
    assert (str(KILLED), KILLED.exit_status) == ("rank 1 was killed by SIGKILL", 137)
    assert str(RankEnd(1, 3, pid=4711)) == "rank 1 (pid 4711) exited with status 3"
    assert str(RankEnd(4, -60)) == "rank 4 was killed by signal 60"
