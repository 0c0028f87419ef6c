"""Runs a planned job: passes its output on, ends all of it when a part of it fails, says how it ended.

One process, in ``hvdkit launch``, for every launcher and any number of hosts. It listens; ``rank`` beside each rank
connects and says how the rank starts, what it writes and how it ends; back go the orders to end, and signals. The
launcher only starts processes, and is ended last.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sched
import selectors
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import IO, cast

from hvdkit.common.programs import signal_name
from hvdkit.errors import LaunchError, name_ranks
from hvdkit.jobs.launch import horovodrun, hosts, processes, wire
from hvdkit.jobs.launch.facts import why_no_rank_starts
from hvdkit.jobs.launch.lines import SESSIONS
from hvdkit.jobs.launch.model import LaunchPlan
from hvdkit.jobs.launch.output import HOLD_S, KNOCK_ON_HOLD_S, STDERR, STDOUT, JobOutput, Write
from hvdkit.jobs.launch.peer import (
    RECEIVE_BYTES,
    JobEnd,
    Peer,
    RankEnd,
    Signals,
    cause,
    first_failure,
    left_early,
    listener,
    watched_signals,
)
from hvdkit.jobs.launch.stall import DUMP_S, Stall, StallReports, write_stacks
from hvdkit.steps import secret
from hvdkit.steps.stalls import STALLED_STATUS

SETTLE_S = 2.0
"""Seconds from the first failure to ending the job: time for the rank that caused it to be gone too."""
KNOCK_ON_SETTLE_S = 5.0
"""The same as long as every rank that failed did so because it lost a peer: that peer is the one to name."""
END_S = KNOCK_ON_SETTLE_S + wire.STOP_GRACE_S
"""Seconds from the first failure to killing what is left, whatever it does."""
STOP_S = wire.STOP_GRACE_S + 1.0
"""Seconds from telling the ranks to end to killing them."""
LEAVE_S, FAR_LEAVE_S = 1.5, 5.0
"""Seconds that the launcher has to leave by itself after its last rank, and again after SIGTERM; on several hosts."""
PATIENCE_S = 15.0
"""Seconds without a rank after which hosts that do not answer are named; ssh itself gives up after two minutes."""
LOOK_S, ANSWER_S = 1.0, 3.0
"""Seconds from STOP to KILL where a host does not answer, and those that it has for an answer."""
LOST_DAEMON = (b"lost communication with a remote daemon", b"A daemon failed to report back")
"""What Open MPI's mpirun says of a host that it lost, before it ends with status 0 (seen with 5.0)."""
_SAID_BYTES = 1 << 16
"""The end of what the launcher writes, in which a host that it lost is looked for."""
_FILES = 100
"""Open files beside the connections to the ranks."""
AWAITED_S = 6.0
"""Seconds that a rank waits in ``init`` until those that live and have not come are named."""
_REPORT_S = 0.3
"""Seconds from the first line of one of Horovod's stall reports to judging it: the rest of it comes meanwhile."""


def run(plan: LaunchPlan, *, tagged: bool = True, verbose: bool = False, write: Write | None = None) -> JobEnd:
    """Run a job to its end.

    Args:
        plan: what to start.
        tagged: put ``[rank] `` before each line of output.
        verbose: show TensorFlow's start-up lines, too.
        write: takes what is shown; None for this process's standard output and error.
    Raises:
        LaunchError: the launcher cannot be started.
    """
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # as many open files as there are ranks, if it may be
    if allowed != resource.RLIM_INFINITY and plan.n > allowed - _FILES > 0:
        wanted = plan.n + _FILES if most == resource.RLIM_INFINITY else min(plan.n + _FILES, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    variables = {secret.VARIABLE: secret.checked(plan.environment.get(secret.VARIABLE) or secret.new())}
    server, address = listener([host.name for host in plan.hosts], here=not plan.elsewhere)
    with watched_signals() as signals, contextlib.closing(server), contextlib.ExitStack() as stack:
        if not plan.elsewhere:  # other hosts lack it
            # Open MPI names what it makes there by its process id alone: what an mpirun that was killed has left keeps
            # another one, to which its id falls, from starting.
            with contextlib.suppress(OSError):  # then as without hvdkit
                above = plan.environment.get(SESSIONS)
                own = tempfile.TemporaryDirectory(prefix="hvdkit-job-", dir=above, ignore_cleanup_errors=True)
                variables[SESSIONS] = stack.enter_context(own)
        plan = replace(plan, environment={**plan.environment, **variables})
        shown = JobOutput(plan.launcher_name, tagged=tagged, verbose=verbose, write=write)
        return _Job(plan, signals, server, address, shown).run()


def start(argv: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a launcher, which ends with this process: ranks that do not reach it have no other end.

    The terminal's Ctrl-C does not reach the launcher: this process then ends the job in order.

    Args:
        argv: the launcher, its options and the command.
        environment: all its variables.
    Raises:
        LaunchError: it cannot be started.
    """
    words = horovodrun.guarded(list(argv))
    at_our_end = signal.SIGTERM if words == list(argv) else signal.SIGKILL  # horovodrun
    try:
        return subprocess.Popen(
            words,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=processes.dying_with_parent(at_our_end),
        )
    except OSError as error:
        raise LaunchError(f"{argv[0]} cannot be started: {error.strerror}.") from error


class JobPhase(Enum):
    """How far a job is; it never goes back."""

    RUNNING = "nothing failed yet"
    SETTLING = "a rank failed, and the one that caused it has time to end too"
    STOPPING = "every rank was told to end"


class _Job:
    """A job from its start to the sentence on its end: first what happens to it, then what is done about it."""

    def __init__(
        self, plan: LaunchPlan, signals: Signals, listener: socket.socket, address: str, shown: JobOutput
    ) -> None:
        self._plan = plan
        self._signals = signals
        self._listener, self._address = listener, address
        self._hosts = [host.name for host in plan.hosts]
        self._suspected = False
        self._shown = shown
        shown.give_up = lambda: signals.interrupted
        shown.on_unread = lambda: None if signals.interrupted else self._stop()
        self._selector = selectors.DefaultSelector()
        self._timers = sched.scheduler(time.monotonic)
        self._phase = JobPhase.RUNNING
        self._strangers: list[Peer] = []  # that are connected and have not shown that they are ranks
        self._peers: list[Peer] = []  # that have
        self._ranks: list[Peer] = []  # all that said hello, gone or not
        self._ends: list[RankEnd] = []
        self._lost: list[RankEnd] = []
        self._signal: int | None = None
        self._end_order = wire.STOP
        # horovodrun loads every framework to see what was built, unless a record says it; TensorFlow reports at length.
        self._noisy_start = plan.launcher_name == "horovodrun" and not plan.elsewhere and not plan.elastic
        self._unhandled: dict[int, set[int]] = {}  # signal to ranks
        self._survivors: dict[str, dict[str, None]] = {}  # host to processes that SIGKILL did not end, in order
        self._stall: Stall | None = None
        self._named_awaited = False
        self._said = b""

    def run(self) -> JobEnd:
        """Start it, and see to it until the launcher and all ranks are gone."""
        before = processes.descendants()
        processes.adopt_orphans(True)
        plan = self._plan
        wrapper = (*plan.beside_rank, self._address, plan.rank_variable, str(plan.grace_s), plan.root)
        self._launcher = start((*plan.launcher, *wrapper, *plan.command), plan.environment)
        self._report_fd = cast(IO[bytes], self._launcher.stdout).fileno()
        os.set_blocking(self._report_fd, False)
        self._selector.register(self._report_fd, selectors.EVENT_READ, self._on_report)
        self._listen()
        self._selector.register(self._signals.wakeup, selectors.EVENT_READ, self._on_signals)
        if self._plan.hosts and self._plan.launcher_name != "srun":
            self._after(PATIENCE_S, self._look_for_silent)
        while self._launcher.returncode is None or self._peers:
            for key, _ in self._selector.select(self._timers.run(blocking=False)):
                key.data()
        while self._on_report():
            pass
        processes.adopt_orphans(False)
        if left := processes.kill_descendants(spared=before):
            self._note_survivors(socket.gethostname(), map(processes.with_state, left))
        status = self._conclude()
        interrupted = self._signal is not None or self._shown.unread
        return JobEnd(status, interrupted=interrupted, failure=first_failure(self._ends))

    @property
    def _all_started(self) -> bool:
        if self._plan.elastic:  # as many as there are hosts for
            return bool(self._peers)
        return len({peer.rank for peer in self._ranks}) == self._plan.n

    # What happens: ranks come, write and go

    def _listen(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, self._on_connections)

    def _on_connections(self) -> None:
        try:
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                wire.keep_alive(connection)
                peer = Peer(connection)
                self._selector.register(connection, selectors.EVENT_READ, partial(self._on_peer, peer))
                self._strangers.append(peer)
                peer.order(peer.nonce)
                if len(self._strangers) > self._plan.n + _FILES // 2:
                    self._drop_stranger(self._strangers[0])
        except BlockingIOError:  # none is left
            pass
        except OSError:  # there are too many
            self._selector.unregister(self._listener)
            self._after(LOOK_S, self._listen)
            for peer in self._strangers[:1]:
                self._drop_stranger(peer)

    def _drop_stranger(self, peer: Peer) -> None:
        if peer in self._strangers:
            self._strangers.remove(peer)
            self._hang_up(peer)

    def _hang_up(self, peer: Peer) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()

    def _on_peer(self, peer: Peer) -> None:
        data = peer.receive()
        if not peer.known:
            known = peer.shake_hands(data, self._plan.environment[secret.VARIABLE]) if data else False
            if known is False:
                self._drop_stranger(peer)
            if not known:
                return
            self._strangers.remove(peer)
            self._peers.append(peer)
            if self._phase is JobPhase.STOPPING:
                peer.order(self._end_order)
            data = b""
        elif not data:
            self._on_peer_gone(peer)
            return
        for kind, payload in peer.frames(data):
            self._on_frame(peer, kind, payload)

    def _on_frame(self, peer: Peer, kind: bytes, payload: bytes) -> None:
        """Take what a rank says of itself, or what it writes."""
        if kind == wire.HELLO:
            peer.rank, peer.pid = wire.HELLO_PAYLOAD.unpack_from(payload)
            peer.host = payload[wire.HELLO_PAYLOAD.size :].decode(errors="replace") if self._plan.elsewhere else ""
            self._ranks.append(peer)
            if self._noisy_start and self._all_started:
                self._shown.held.clear()
            if self._plan.stall_timeout is not None:
                peer.reports = StallReports(self._plan.stall_timeout)
        elif kind == wire.STDOUT:
            self._shown.show(peer.rank, STDOUT, payload)
        elif kind == wire.STDERR:
            self._on_errors(peer, payload)
        elif kind == wire.REPORT:
            was_in_init = peer.in_init
            peer.report(payload)
            if peer.in_init and not was_in_init and not self._plan.elastic:
                self._after(SETTLE_S, self._look_for_awaited, peer, SETTLE_S)
                if self._plan.stall_timeout is not None:
                    self._after(self._plan.stall_timeout, self._end_if_awaited_in_init, peer)
        elif kind == wire.UNHANDLED and peer.rank is not None:
            # Nobody waits for it where the signal came to the rank itself, or was passed on long ago.
            self._unhandled.get(wire.UNHANDLED_PAYLOAD.unpack(payload)[0], set()).add(peer.rank)
        elif kind == wire.SURVIVORS and self._plan.elsewhere:  # here it is looked once more at the end
            self._note_survivors(peer.host, payload.decode().splitlines())
        elif kind == wire.HERE:
            peer.answered()
        elif kind == wire.EXIT:
            peer.answered()
            self._on_rank_end(peer, *wire.EXIT_PAYLOAD.unpack(payload))

    def _note_survivors(self, host: str, pids: Iterable[str]) -> None:
        self._survivors.setdefault(host, {}).update(dict.fromkeys(pids))

    def _on_errors(self, peer: Peer, data: bytes) -> None:
        """Show what a rank writes to standard error; a traceback only when the rank does not end by it."""
        was_holding = peer.errors.holding
        self._shown.errors(peer.rank, peer.errors.feed(data))
        if peer.errors.holding and not was_holding:
            self._after(HOLD_S, self._release, peer)
        if self._plan.elsewhere and not self._suspected and peer.errors.knock_on:
            self._suspect()
        if peer.reports is not None and peer.reports.feed(data):
            self._after(_REPORT_S, self._end_if_stalled)

    def _release(self, peer: Peer) -> None:
        """Show a traceback by which the rank did not end."""
        if self._phase is not JobPhase.RUNNING:
            return
        failing = any(other.errors.holding and other.errors.knock_on for other in self._peers)
        if failing and peer.errors.held_s < KNOCK_ON_HOLD_S:
            self._after(HOLD_S, self._release, peer)
        else:
            self._shown.show(peer.rank, STDERR, peer.errors.release())

    def _on_rank_end(self, peer: Peer, status: int, told: bool, pid: int, killed: bool, limit: int) -> None:
        """Note how a rank ended, see ``wire.EXIT_PAYLOAD``, and end the job where that ends it."""
        if peer.rank is None:
            return
        self._shown.errors(peer.rank, peer.errors.close())
        # Whose worker was killed may find that only in an allreduce, which the others have given up by then.
        knock_on = peer.errors.knock_on and not peer.killed_workers
        end = RankEnd(peer.rank, status, told, knock_on, pid, peer.host)
        peer.end = replace(end, out_of_memory=killed, limit=limit)
        self._ends.append(peer.end)
        if status == 0 or self._plan.elastic:
            self._shown.show(peer.rank, STDERR, peer.errors.release())
        self._shown.end_of(peer.rank)
        if self._plan.elastic and self._phase is JobPhase.RUNNING:  # what follows from it is for horovodrun to say
            peer.order(wire.LEAVE)
            return
        if told and self._phase is not JobPhase.STOPPING:  # by a batch system that ends them all, or by anybody
            how = "was told to end, and not by hvdkit launch"
            self._lost.append(replace(peer.end, status=status or -signal.SIGTERM, told=False, how=how))
            self._stop(wire.TERMINATE, self._plan.grace_s)
        if first_failure(self._ends) is not None:
            self._stop_soon()
        self._release_ended()

    def _on_peer_gone(self, peer: Peer) -> None:
        if peer.end is None and peer.rank is not None and not self._plan.elastic:
            # By Hydra, which so ends a job that called MPI_Abort, or by the user.
            how = "was lost: the process beside it was killed, or the network failed"
            self._lost.append(RankEnd(peer.rank, -signal.SIGKILL, host=peer.host, how=how))
            self._stop_soon()
        self._hang_up(peer)
        self._peers.remove(peer)
        self._release_ended()
        if self._phase is JobPhase.STOPPING and not self._peers:
            self._leave_launcher()

    def _release_ended(self) -> None:
        """Let ranks that were told to end leave together: at the first one the launcher kills those that still save."""
        if self._end_order == wire.TERMINATE and all(peer.end for peer in self._peers):
            self._order(wire.STOP)

    # What happens: the launcher writes, signals come

    def _on_report(self) -> bool:
        """Take what the launcher itself writes, to be shown later; False when there is nothing now or no more."""
        try:
            data = os.read(self._report_fd, RECEIVE_BYTES)
        except BlockingIOError:
            return False
        if not data:
            if self._report_fd in self._selector.get_map():
                self._selector.unregister(self._report_fd)
            return False
        self._said = (self._said + data)[-_SAID_BYTES:]
        if any(words in self._said for words in LOST_DAEMON):
            self._suspect()
        self._shown.held += data
        self._after(0.0 if self._plan.elastic else SETTLE_S, self._release_report)
        return True

    def _release_report(self) -> None:
        if self._phase is JobPhase.RUNNING and (self._all_started or not self._noisy_start):
            self._shown.release_launcher()

    def _on_signals(self) -> None:
        self._signals.wakeup.recv(64)
        while self._signals.received:
            number = self._signals.received.popleft()
            if number == signal.SIGCHLD:
                if self._launcher.poll() is not None and self._peers:
                    self._stop()
            elif number in wire.PASS_ON:
                self._pass_on(number)
            elif self._signal is None:
                self._signal = number
                self._stop(wire.TERMINATE, self._plan.grace_s)
            else:
                self._kill()

    def _pass_on(self, number: int) -> None:
        """Send a signal to the ranks; those that are not there yet, or do not handle it, are named."""
        if number not in self._unhandled:
            self._after(_REPORT_S, self._report_unhandled, number)
        self._unhandled[number] = set(range(self._plan.n)).difference(peer.rank for peer in self._ranks)
        self._order(wire.PASS_ON[signal.Signals(number)])

    def _report_unhandled(self, number: int) -> None:
        if ranks := self._unhandled.pop(number):
            why = "no handler for it, or not yet"
            self._shown.say(f"{signal_name(number)} was not passed on to {name_ranks(sorted(ranks))}: {why}.")

    def _suspect(self) -> None:
        """Ask the ranks of several hosts whether they are there, since one has failed or lost another."""
        if self._suspected or not self._plan.elsewhere:
            return
        self._suspected = True
        for peer in self._peers:
            peer.silent = True
            peer.order(wire.ASK)
        self._after(ANSWER_S, self._end_if_a_host_is_lost)

    def _end_if_a_host_is_lost(self) -> None:
        """End the job when a host does not answer: the ranks there will say nothing more."""
        self._suspected = bool(self._lost_hosts())
        if self._suspected and self._phase is not JobPhase.STOPPING and not self._plan.elastic:
            self._stop(kill_after_s=LOOK_S)

    def _lost_hosts(self) -> list[str]:
        """The hosts of which none of the ranks that were asked has answered, in the order of their first ranks."""
        answered = {peer.host for peer in self._ranks if peer.silent is False}
        return list(dict.fromkeys(peer.host for peer in self._ranks if peer.silent and peer.host not in answered))

    def _look_for_silent(self, asked: Future[str | None] | None = None) -> None:
        """Name the hosts that do not answer, where no rank has come for a while."""
        if self._ranks or self._phase is not JobPhase.RUNNING:
            return
        if asked is None or not asked.done():
            asked = asked or ThreadPoolExecutor(1).submit(hosts.silent, self._hosts)
            self._after(LOOK_S, self._look_for_silent, asked)
        elif silent := asked.result():
            self._shown.say(f"no rank has started yet: {silent}")

    # What is done: the job is ended

    def _end_if_stalled(self) -> None:
        """End the job when a collective has waited longer than the limit, after the ranks have said where they are."""
        overdue: dict[int, tuple[str, ...]] = {}
        for peer in self._peers:
            if peer.reports is not None:
                overdue.update(peer.reports.overdue())
        self._end_stalled(overdue)

    def _awaited_in_init(self) -> list[int]:
        """The ranks that have not come to ``init``."""
        came = {peer.rank for peer in self._ranks if peer.in_init is not None}
        return [rank for rank in range(self._plan.n) if rank not in came]

    def _look_for_awaited(self, peer: Peer, waited_s: float) -> None:
        """End the job when a rank waits in ``init`` for one that has ended; say once for whom it waits otherwise."""
        awaited = self._awaited_in_init()
        if not peer.in_init or not awaited or self._phase is not JobPhase.RUNNING:
            return
        if any(end.rank in awaited for end in self._ends):
            self._stop()
            return
        self._after(SETTLE_S, self._look_for_awaited, peer, waited_s + SETTLE_S)
        if waited_s >= AWAITED_S and not self._named_awaited:
            self._named_awaited = True
            has = "has" if len(awaited) == 1 else "have"
            self._shown.say(
                f"{name_ranks(awaited)} {has} not called init yet, where rank {peer.rank} waits; the job goes on. "
                "(--stall-timeout S ends it after S seconds.)"
            )

    def _end_if_awaited_in_init(self, peer: Peer) -> None:
        """End the job when a rank has waited in ``init`` for others that did not come."""
        if peer.in_init:
            self._end_stalled(dict.fromkeys(self._awaited_in_init(), ("init",)))

    def _end_stalled(self, missing: Mapping[int, tuple[str, ...]]) -> None:
        if missing and self._phase is JobPhase.RUNNING and self._stall is None:
            self._stall = Stall(missing)
            self._order(wire.DUMP)
            self._after(DUMP_S, self._stop)

    def _stop_soon(self) -> None:
        """End the job when the rank that caused a failure has had the time to end too."""
        if len(self._ends) == self._plan.n:
            self._stop()
        if self._phase is JobPhase.STOPPING:
            return
        self._suspect()
        if self._phase is JobPhase.RUNNING:
            self._after(END_S, self._kill)
        failure = first_failure((*self._ends, *self._lost))
        if failure is not None and (not failure.knock_on or left_early(self._ends) is not None):
            self._after(SETTLE_S, self._stop)
        elif self._phase is JobPhase.RUNNING:
            self._after(KNOCK_ON_SETTLE_S, self._stop)
        self._phase = JobPhase.SETTLING

    def _stop(self, order: bytes = wire.STOP, kill_after_s: float = STOP_S) -> None:
        """Tell every rank to end, and see to it that they do."""
        if self._phase is JobPhase.STOPPING:
            return
        self._phase, self._end_order = JobPhase.STOPPING, order
        self._suspect()
        self._order(order)
        self._after(kill_after_s, self._kill)
        if not self._all_started:
            self._signal_launcher(signal.SIGTERM)
        if not self._peers:
            self._leave_launcher()

    def _leave_launcher(self) -> None:
        leave_s = FAR_LEAVE_S if self._plan.elsewhere or self._plan.elastic else LEAVE_S
        self._after(leave_s, self._signal_launcher, signal.SIGTERM)
        self._after(2 * leave_s, self._signal_launcher, signal.SIGKILL)

    def _kill(self) -> None:
        self._end_order = wire.KILL
        self._order(wire.KILL)
        self._after(1.0, self._kill_outright)

    def _kill_outright(self) -> None:
        for peer in list(self._peers):
            # Its host no longer answers, or it has not said who it is; without the connection it ends by itself.
            if self._plan.elsewhere or not peer.pid:
                self._on_peer_gone(peer)
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(peer.pid, signal.SIGKILL)
        self._signal_launcher(signal.SIGTERM if self._plan.elsewhere else signal.SIGKILL)

    def _order(self, order: bytes) -> None:
        for peer in self._peers:
            peer.order(order)

    def _signal_launcher(self, number: int) -> None:
        if self._launcher.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._launcher.pid, number)

    def _after(self, seconds: float, action: Callable[..., None], *arguments: object) -> None:
        self._timers.enter(seconds, 0, action, arguments)

    # What is said at the end

    def _conclude(self) -> int:
        """The exit status, and the sentence that explains it; before it, what could not be ended."""
        for host, pids in self._survivors.items():
            self._shown.say(f"could not be ended: {', '.join(pids)} on host {host}.")
        errors = {peer.rank: peer.errors for peer in self._ranks if peer.rank is not None}
        if self._signal is not None:
            self._shown.tracebacks(errors, None)
            killed = sorted(end.rank for end in self._ends if end.told and end.status == -signal.SIGKILL)
            more = f"--grace allows more than {self._plan.grace_s:g} s"
            late = f", {name_ranks(killed)} by SIGKILL ({more})" if killed else ""
            if silent := sorted({peer.rank for peer in self._ranks if peer.rank is not None and peer.end is None}):
                late += f"; {name_ranks(silent)} did not say how"
            # of a rank on another host that has not said how it ended, nothing is known
            known = not self._plan.elsewhere or len({end.rank for end in self._ends}) == self._plan.n
            what = "every process was ended" if known else "the job was ended"
            what = "it could not end all processes" if self._survivors else what
            self._shown.say(f"interrupted by {signal_name(self._signal)}; {what}{late}.")
            return 128 + self._signal
        if self._shown.unread:
            return 128 + signal.SIGPIPE
        status = self._launcher.returncode
        as_shell = status if status >= 0 else 128 - status
        ends = [] if self._plan.elastic else self._ends
        failure = first_failure([*ends, *(self._lost if status == 0 else [])])
        early = left_early(ends)
        culprit = early or failure
        self._shown.tracebacks(errors, None if culprit is None else culprit.rank)
        if self._stall is not None:
            stacks = {peer.rank: bytes(peer.stacks) for peer in self._ranks if peer.rank is not None}
            where = write_stacks(self._plan.stall_dir or Path.cwd(), self._stall, stacks)
            waited = f"a collective waited longer than {self._plan.stall_timeout:g} s"
            self._shown.say(f"{waited}: {self._stall}; {where}; the job was ended.")
            return STALLED_STATUS
        lost_daemon = any(words in self._said for words in LOST_DAEMON)
        if (status or failure or lost_daemon) and (lost := self._lost_hosts()):
            self._shown.launcher_at_end()
            does, itself = ("does", "the host itself") if len(lost) == 1 else ("do", "these hosts")
            self._shown.say(
                f"{hosts.named(lost)} answered when the job began and no longer {does}: the network between, or "
                f"{itself}, failed, and the ranks there are lost."
            )
            own = first_failure(ends)  # the launcher may have killed what was beside the others
            if own is not None:
                return own.exit_status
            return 1 if self._phase is JobPhase.STOPPING else as_shell or 1
        if early is not None:
            waits = next((peer.rank for peer in self._ranks if peer.in_init), None)
            missed = "before the others were done"
            if waits is not None and early.rank in self._awaited_in_init():
                missed = f"before it called init, where rank {waits} waited for it"
            self._shown.say(f"{early} {missed}; the job was ended.")
            return 1
        if failure is not None:
            workers = [one for peer in self._ranks if peer.rank == failure.rank for one in peer.killed_workers]
            self._shown.say(f"{failure}{cause(failure, workers)}; the job was ended.")
            return failure.exit_status
        if status == 0 and not lost_daemon:
            if not self._ranks:  # nobody sees to them, and the launcher passes their output on
                self._shown.launcher_at_end()
            apart = sum(peer.trained for peer in self._ranks)
            if apart > 1 and not any(peer.joined for peer in self._ranks):
                self._shown.say(
                    f"{apart} processes trained apart, each a model of its own: none called init (hvdkit's or "
                    "Horovod's) or joined a process group."
                )
            return 0
        self._shown.launcher_at_end()
        if not self._ranks and (unreached := hosts.unreached(self._hosts, self._said)):
            self._shown.say(unreached)
            return as_shell
        when = ("" if self._ranks else " before any rank started") + why_no_rank_starts(self._plan.n)
        how = f"exited with status {status}" if status > 0 else f"was killed by {signal_name(-status)}"
        how = how if status else "lost contact with a host"
        self._shown.say(f"{self._plan.launcher_name} {how}{when}; the job was ended.")
        return as_shell or 1
