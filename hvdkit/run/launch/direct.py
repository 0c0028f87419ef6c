"""Runs a launcher by itself: elastic jobs, and ranks on other hosts.

Elastic ranks are watched by horovodrun, which must replace those that fail; ranks on other hosts cannot reach the
socket of ``supervise``. Their output comes as the launcher passes it on, and it is the launcher that ends them. The
process beside each rank (``rank``) says in that output how the rank ended. When such a job fails, the first rank that
failed is named, and the hosts that were lost, or that nothing knows.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import IO, Any, cast

from hvdkit.common.signals import handled, signal_name
from hvdkit.run.launch import placement
from hvdkit.run.launch import rank as wire
from hvdkit.run.launch.model import LaunchPlan
from hvdkit.run.launch.outcome import JobEnd, RankEnd, first_failure, killed_after_grace
from hvdkit.run.launch.output import LineBuffer
from hvdkit.run.launch.peer import ENDING
from hvdkit.run.launch.start import start
from hvdkit.run.launch.tracebacks import LOST_PEER
from hvdkit.steps.ranks import name_ranks

_LOST_DAEMON = (b"lost communication with a remote daemon", b"A daemon failed to report back")
"""What Open MPI's mpirun says of a host that it lost, before it ends with status 0 (seen with 5.0)."""
_LOST_PEER = (*_LOST_DAEMON, *LOST_PEER)
_ENDED = re.compile(rb"\x1ehvdkit (\d+) (-?\d+) ([01]) (\d+) (\S+)\x1e")
"""``rank.ENDED``"""
_MISSING = re.compile(rb"(/\S+/(?:python[\d.]*|prted|orted)): (?:command )?(?:not found|No such file)")
"""What the shell of another host says where this environment is not there."""
_STARTED = re.compile(rb"\x1ehvdkit started (\d*\.\d*)\x1e")
"""``rank.STARTED``"""
_SSH = tuple(f"-o{word}" for word in ("PasswordAuthentication=no", "StrictHostKeyChecking=no", "ConnectTimeout=5"))
"""As horovodrun calls it; a host that is lost does not keep it."""
_LOOK_S = 0.2
_PATIENCE_S = 15.0
"""Seconds without a rank after which hosts that do not answer are named; ssh itself gives up after two minutes."""
_LEAVE_S = 2.0
"""Seconds that the ranks' hosts may be behind with what they say of an end."""
_KILL_S = 6.0
"""Seconds that a launcher has to kill its ranks; horovodrun takes 5."""
_DRAIN_S = 2.0
"""Seconds for what the launcher's own children still write when it has ended."""
_PORT = 22
_WAIT_S, _AGAIN_S = 2.0, 0.5
"""How long a host may take to answer: TCP asks at 0, 1 and 3 s; and one that has just been silent for so long."""
_LOOK_UP_S = 5.0
"""The resolver's own time for one question to one name server."""
_AT_A_TIME = 64


def run(plan: LaunchPlan, *, tagged: bool = True) -> JobEnd:
    """Run a launcher to its end, passing signals on; how the job ended.

    Args:
        plan: what to start; where it names no variable of the rank, the launcher alone sees to the ranks. The hosts
            that are lost are named on standard error.
        tagged: put ``[rank] `` before each line of output.
    Returns:
        The status of the rank that failed first, as far as ranks say how they end; else the launcher's, or 1 where it
        gives 0 although it lost a host.
    Raises:
        LaunchError: it cannot be started.
    """
    job = _Job(plan, tagged)
    with handled((*ENDING, *wire.PASS_ON), job.on_signal):
        return job.run()


class _Job:
    def __init__(self, plan: LaunchPlan, tagged: bool) -> None:
        self._plan, self._tagged = plan, tagged
        self._reach = Reach([host.name for host in plan.hosts])
        self._address = f"-{secrets.token_hex(8)}"
        self._process: subprocess.Popen[bytes] | None = None
        self._copies: list[_Copy] = []
        self._signals: list[int] = []
        self._kill_at = math.inf

    def on_signal(self, number: int, _frame: object = None) -> None:
        """Pass it on; what a second one that ends the job does is to kill."""
        if number not in wire.PASS_ON:
            self._signals.append(number)
        if self._process is None:
            return  # the launcher is told as soon as it runs
        if number in wire.PASS_ON:
            self._to_ranks(number)
        elif len(self._signals) > 1:
            self._kill_at = 0.0
        elif self._plan.rank_variable:
            self._kill_at = time.monotonic() + self._plan.grace_s + _LEAVE_S
            self._to_ranks(signal.SIGALRM)
        else:
            self._to_launcher(number)

    def run(self) -> JobEnd:
        """Start it, and see to it until it is gone."""
        launcher, *options = self._plan.launcher
        beside = (*self._plan.beside_rank, self._address, self._plan.rank_variable, str(self._plan.grace_s))
        tag = self._plan.tag if self._tagged else ()
        command = (*(beside if self._plan.rank_variable else ()), *self._plan.command)
        self._process = process = start([launcher, *tag, *options, *command], self._plan.environment)
        if self._signals:
            self._to_launcher(self._signals[0])
        pattern = self._plan.tagged if tag or not self._plan.tag else None
        for fd, stream in enumerate((process.stdout, process.stderr), start=1):
            self._copies.append(_Copy(cast(IO[bytes], stream), fd, pattern, self._tagged, self._reach.suspect))
        self._wait(process)
        for copy in self._copies:
            copy.join(_DRAIN_S)
            while copy.is_alive() and copy.writing:  # whoever reads takes its time
                copy.join(_DRAIN_S)
        return self._conclude(process.returncode)

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the launcher, and end it: when all ranks have ended within the grace, or when that is over."""
        waits_until = time.monotonic() + _PATIENCE_S
        while not _is_over(process, _LOOK_S):
            if time.monotonic() > waits_until and self._plan.rank_variable and self._plan.launcher_name != "srun":
                waits_until = math.inf
                if not any(copy.started for copy in self._copies) and (silent := self._reach.silent()):
                    _say(f"no rank has started yet: {silent}")
            ends = [end for copy in self._copies for end in copy.ends]
            if self._signals and len(ends) == self._plan.n:
                self._kill_at = 0.0
            elif self._plan.launcher_name == "horovodrun" and self._kill_at == math.inf and first_failure(ends):
                self._kill_at = time.monotonic() + _LEAVE_S  # it ends its ssh, and leaves what runs on other hosts
            if time.monotonic() < self._kill_at:
                continue
            if self._plan.launcher_name == "horovodrun":
                self._to_ranks(signal.SIGTERM)
            self._to_launcher(signal.SIGTERM)  # srun and mpirun kill what runs on other hosts
            if not _is_over(process, _KILL_S):
                self._to_launcher(signal.SIGKILL)

    def _to_launcher(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.killpg(self._process.pid, number)

    def _to_ranks(self, number: int) -> None:
        """Send a signal to the process beside each rank, in the way of the launcher."""
        steps = [copy.started for copy in self._copies if len(copy.started) > 1]
        if not self._plan.rank_variable:  # elastic ranks are of this host, or out of reach
            for pid in wire.first_that_handle(number)[0]:
                os.kill(pid, number)
        elif self._plan.launcher_name == "horovodrun":
            here, words = socket.gethostname(), [*self._plan.beside_rank, "signal", str(int(number)), self._address]
            for host in self._plan.hosts:
                self._helper((() if placement.is_here(host.name, here) else ("ssh", *_SSH, host.name)) + tuple(words))
        elif self._plan.launcher_name == "srun" and number == signal.SIGALRM and steps:
            self._helper(("scancel", "--signal=TERM", *steps))  # srun itself would kill
        elif self._plan.launcher_name == "srun" and number == signal.SIGALRM:
            self._to_launcher(signal.SIGTERM)
        else:
            self._to_launcher(number)

    def _helper(self, words: Sequence[str]) -> None:
        program = shutil.which(words[0], path=self._plan.environment.get("PATH")) or words[0]
        try:
            subprocess.Popen((program, *words[1:]), env=self._plan.environment, stdin=subprocess.DEVNULL)
        except OSError as error:
            _say(f"{words[0]} cannot be started ({error.strerror}): the ranks are not told of the signal.")

    def _conclude(self, status: int) -> JobEnd:
        """How the job ended, and the sentence that explains it; ``status``: the launcher's."""
        ends = [end for copy in self._copies for end in copy.ends]
        if self._signals:
            said = f"interrupted by {signal_name(self._signals[0])}; the job was ended"
            silent = (
                {*range(self._plan.n)} - {end.rank for end in ends}
                if any(copy.started for copy in self._copies)
                else set()
            )
            said += killed_after_grace(ends, self._plan.grace_s)
            if silent:
                said += f"; {name_ranks(sorted(silent))} did not say how"
            _say(f"{said}.")
            return JobEnd(128 + self._signals[0], interrupted=True)
        lost = {rank for copy in self._copies for rank in copy.lost_peers}
        failure = first_failure(replace(end, knock_on=end.rank in lost) for end in ends)
        if failure is None:
            failure = next((end for end in ends if end.told), None)
        if any(copy.lost_daemon for copy in self._copies):
            status = status or 1
        sentence = self._reach.lost() if status or failure else None
        if failure is not None:
            status = failure.exit_status or 128 + signal.SIGTERM
            sentence = sentence or f"{failure}; the job was ended."
        elif status and not ends:
            missing = next((copy.missing for copy in self._copies if copy.missing), "")
            if missing:
                sentence = (
                    f"{missing} does not exist on another host: this environment and this directory must lie at the "
                    "same path on every host; install it there, or on a file system that all share."
                )
            sentence = sentence or self._reach.unknown() or self._reach.silent()
        if sentence:
            _say(sentence)
        return JobEnd(status if status >= 0 else 128 - status, interrupted=False)


def _is_over(process: subprocess.Popen[bytes], seconds: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode is not None


def _say(sentence: str) -> None:
    sys.stderr.write(f"hvdkit launch: {sentence}\n")


class _Copy(threading.Thread):
    """Passes a stream of the launcher on by lines, and looks in it for how ranks end, and whether a host was lost."""

    def __init__(
        self,
        stream: IO[bytes],
        to: int,
        tagged: re.Pattern[bytes] | None,
        tag: bool,
        on_lost_peer: Callable[[], None],
    ) -> None:
        super().__init__(daemon=True)
        self._stream = stream
        self._to = to
        self._tagged, self._tag = tagged, tag
        self._on_lost_peer = on_lost_peer
        self.lost_daemon = False
        self.missing = ""
        self.lost_peers: set[int] = set()
        self.ends: list[RankEnd] = []
        self.started = ""
        self.writing = False
        self.start()

    def run(self) -> None:
        lines = LineBuffer()
        with self._stream, contextlib.suppress(OSError):  # nobody reads it any more: the launcher is to notice, too
            while data := os.read(self._stream.fileno(), 1 << 16):
                self._pass_on(lines.feed(data))
            self._pass_on(lines.close())

    def _pass_on(self, lines: Sequence[bytes]) -> None:
        data = b"".join(shown for line in lines for shown in self._shown(line))
        self.writing = True
        while data:
            data = data[os.write(self._to, data) :]
        self.writing = False

    def _shown(self, line: bytes) -> Iterator[bytes]:
        """A line as it is to be seen, nothing where it only says how a rank ended; several where mpirun glued them."""
        tags = [] if self._tagged is None else list(self._tagged.finditer(line))
        bounds = [0, *(match.start() for match in tags if match.start()), len(line)]
        for piece in (line[begin:end] for begin, end in itertools.pairwise(bounds)):
            piece += b"" if piece.endswith((b"\n", b"\r")) else b"\n"
            match = None if self._tagged is None else self._tagged.match(piece)
            rank = None if match is None else int(match[1])
            text = piece if match is None else piece[match.end() :]
            self._look(rank, text)
            rest = _STARTED.sub(self._note_start, _ENDED.sub(self._note_end, text))
            if rest.strip() or rest == text:
                yield rest if rank is None or not self._tag else b"[%d] " % rank + rest

    def _look(self, rank: int | None, text: bytes) -> None:
        if rank is None and (found := _MISSING.search(text)):
            self.missing = found[1].decode(errors="replace")
        self.lost_daemon |= any(mark in text for mark in _LOST_DAEMON)
        if any(mark in text for mark in _LOST_PEER):
            self._on_lost_peer()
            self.lost_peers |= set() if rank is None else {rank}

    def _note_start(self, found: re.Match[bytes]) -> bytes:
        self.started = found[1].decode()
        return b""

    def _note_end(self, found: re.Match[bytes]) -> bytes:
        rank, status, told, pid = map(int, found.groups()[:4])
        self.ends.append(RankEnd(rank, status, bool(told), pid=pid, host=found[5].decode(errors="replace")))
        return b""


class Reach:
    """Remembers which hosts answer now; who answers never, behind a firewall, is not asked again.

    Args:
        hosts: names or addresses, each once; they are asked in the background.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._asking = ThreadPoolExecutor(1)
        self._answered = self._asking.submit(lambda: _answering({host: host for host in hosts}))
        self._suspected: Future[dict[str, str]] | None = None
        self._mutex = threading.Lock()

    def suspect(self) -> None:
        """Ask all hosts, once and in the background, since a rank has lost another: ``lost`` then waits less."""
        with self._mutex:
            if self._suspected is None:
                self._suspected = self._asking.submit(lambda: _answering(self._answered.result()))

    def lost(self) -> str | None:
        """A sentence that names the hosts that answered when the job began and no longer do, None without any."""
        answered = self._answered.result()
        silent_before = () if self._suspected is None else answered.keys() - self._suspected.result()
        answer_now = _answering(answered, silent_before)
        silent = [host for host in answered if host not in answer_now]
        if not silent:
            return None
        names = silent[0] if len(silent) == 1 else f"{', '.join(silent[:-1])} and {silent[-1]}"
        who, verb, what = ("host", "does", "the host itself") if len(silent) == 1 else ("hosts", "do", "these hosts")
        return (
            f"{who} {names} answered when the job began and no longer {verb}: the network between, or {what}, failed, "
            "and the ranks there are lost."
        )

    def unknown(self) -> str | None:
        """A sentence that names the hosts whose names have no address here, None without any."""
        answered = self._answered.result()
        names = [host for host in self._hosts if host not in answered and _looked_up(host) == []]
        if not names:
            return None
        who = f"host {names[0]} is unknown" if len(names) == 1 else f"hosts {', '.join(names)} are unknown"
        return f"{who}: no name server has an address; correct --hosts or the host file, unless ssh has such an alias."

    def silent(self) -> str | None:
        """A sentence that names the hosts where no ssh server answers now, None without any."""
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            answers = dict(zip(self._hosts, pool.map(_answers_ssh, self._hosts), strict=True))
        names = [host for host, answer in answers.items() if not answer]
        if not names:
            return None
        who = f"host {names[0]} does" if len(names) == 1 else f"hosts {', '.join(names)} do"
        return (
            f"{who} not answer on port {_PORT}, that of ssh: a firewall is between, or the address is wrong; 'ssh HOST "
            "true' must work from here."
        )


def _answers_ssh(host: str) -> bool:
    """Whether a host says on port 22 that it is an ssh server; also where it refuses, and may have another port."""
    try:
        with socket.create_connection((host, _PORT), _WAIT_S) as connection:
            return connection.recv(1) != b""
    except ConnectionError:
        return True
    except OSError:
        return False


def _looked_up(host: str) -> list[Any] | None:
    """Its addresses, none where there are none; None where no name server answers in time.

    The resolver itself may take minutes, and cannot be interrupted.
    """
    found: Future[list[Any]] = Future()

    def look_up() -> None:
        try:
            found.set_result(socket.getaddrinfo(host, _PORT, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError):  # a label that is empty or too long
            found.set_result([])

    threading.Thread(target=look_up, daemon=True).start()
    try:
        return found.result(_LOOK_UP_S)
    except TimeoutError:
        return None


def _answering(addresses: dict[str, str], silent_before: Collection[str] = ()) -> dict[str, str]:
    """The hosts of these that answer, with the address of each: names cannot be looked up without a network."""
    if not addresses:
        return {}
    waits = [_AGAIN_S if host in silent_before else _WAIT_S for host in addresses]
    with ThreadPoolExecutor(min(_AT_A_TIME, len(addresses))) as pool:
        found = dict(zip(addresses, pool.map(_ask, addresses.values(), waits), strict=True))
    return {host: address for host, address in found.items() if address is not None}


def _ask(host: str, wait_s: float) -> str | None:
    addresses = _looked_up(host)
    if not addresses:
        return None
    family, kind, protocol, _, place = addresses[0]
    try:
        with socket.socket(family, kind, protocol) as connection:
            connection.settimeout(wait_s)
            with contextlib.suppress(ConnectionRefusedError):  # an answer as well
                connection.connect(place)
    except OSError:
        return None
    return str(place[0])
