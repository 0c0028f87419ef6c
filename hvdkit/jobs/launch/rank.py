"""One rank of a job: starts the command, sends its output and its end to ``hvdkit launch``, ends it when told to.

Every launcher starts it, on every host: ``python -I -S rank.py HOST:PORT RANK_VARIABLE GRACE_S ROOT COMMAND ...``. It
is run by path in an isolated interpreter, so that it starts in milliseconds and nothing in the user's directory or
environment can get in its way; of hvdkit it therefore imports what needs the standard library only.

``hvdkit launch`` listens at that address (see ``wire``). Where it cannot be reached from this host, or the launcher has
not handed the secret on, the command runs all the same, seen to by the launcher alone. The end of the connection
means the same as STOP, so that ranks end when ``hvdkit launch`` dies, however it dies, or the network between fails.

On another host horovodrun's ssh starts ``rank.py SHELL_COMMAND`` before that. It takes the environment from standard
input, as NUL-separated NAME=VALUE: on a command line, as horovodrun puts it there, every user of both hosts could read
it.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

if __name__ == "__main__":  # without site, nothing else of the environment is on it
    sys.path.append(str(Path(__file__).parents[3]))

from hvdkit.errors import LauncherError
from hvdkit.jobs.launch import processes, wire

LAUNCHER_GRACE_S = {"OMPI_COMM_WORLD_RANK": 0.6, "PMI_RANK": 0.6, "HOROVOD_RANK": 4.0}
"""Seconds from SIGTERM to SIGKILL when the launcher ends the command, by the variable in which it says the rank: mpirun
kills this process a second after its SIGTERM, horovodrun after five, and the command must be gone before. Batch systems
leave it the job's grace."""
WORKERS = "HVDKIT_WORKERS"
"""HOST:PORT of every rank in turn, of which TF_CONFIG is made (``--tf-config``)."""
STARTUP = Path(__file__).parents[2] / "observe" / "startup"
"""Of the ``sitecustomize`` that gets a rank's Pythons ready for what ``hvdkit launch`` asks."""
_OF_THE_USER = ("MASTER_ADDR", "GLOO_SOCKET_IFNAME")
"""Given by --env, they stay."""
_CHUNK_BYTES = 65536
_UNTIL_KILLED_S = 86400.0
_STACKS_SIGNAL = signal.SIGRTMAX - 2
"""Asks a process for its Python stacks: one that programs and batch systems leave alone."""


def main(arguments: list[str]) -> int:
    """Run one rank; the status to exit with is the command's own, or 128 + N when signal N killed it."""
    address, rank_variable, grace_s, root, *command = arguments
    try:
        rank = rank_of(rank_variable)
        settle_place(rank, root)
        connection = wire.connect(address)
    except ValueError as error:
        sys.stderr.write(f"hvdkit launch: {error}\n")
        return 1
    except OSError as error:  # a firewall, or a launcher that hands no environment on
        sys.stderr.write(f"hvdkit launch: {address} does not see to this rank, which runs all the same: {error}\n")
        try:
            os.execvp(command[0], command)  # noqa: S606
        except OSError as reason:
            said, status = _not_started(command, reason)
            sys.stderr.write(said)
            return status
    with connection:
        grace = LAUNCHER_GRACE_S.get(rank_variable, float(grace_s))
        return _Rank(connection, grace, under_slurm=rank_variable == "SLURM_PROCID").run(rank, command)


def _not_started(command: list[str], error: OSError) -> tuple[str, int]:
    """A sentence on a command that cannot be started, and the status that a shell gives then."""
    status = 126 if isinstance(error, PermissionError) else 127
    return f"hvdkit launch: {command[0]} cannot be started: {error.strerror}\n", status


def rank_of(variable: str) -> int:
    """This rank, from the variable of the launcher, or from whatever the launcher of a batch system sets.

    Raises:
        ValueError: nothing says it.
    """
    if variable:
        rank = os.environ.get(variable, "")
        if not rank.isdigit():
            raise ValueError(f"{variable} must be the rank, got {rank!r}: another launcher started this process.")
        return int(rank)
    from hvdkit.steps import launchers

    try:
        launched = launchers.detect(os.environ)
    except LauncherError as error:
        raise ValueError(str(error)) from error
    if launched is None:
        raise ValueError("the launcher says in no variable that is known here which rank this is.")
    return launched.rank


def settle_place(rank: int, root: str) -> None:
    """Add what torchrun gives a rank to this environment, under every launcher, and TF_CONFIG.

    Programs that start ``torch.distributed`` from the environment then train as one job.

    Args:
        root: the first hosts of the job, that of rank 0 before the others, by commas; "" where the batch system says
            them, or all are this one.
    """
    if workers := os.environ.get(WORKERS):
        task = {"type": "worker", "index": rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers.split(",")}, "task": task})
    if "WORLD_SIZE" not in os.environ:  # ranks come and go
        return
    if os.environ["WORLD_SIZE"] == os.environ.get("LOCAL_WORLD_SIZE"):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        return
    try:
        os.environ.update(place([name for name in root.split(",") if name]))
    except (LauncherError, OSError) as error:  # which only programs need that start torch.distributed by themselves
        sys.stderr.write(f"hvdkit launch: this rank gets no RANK and MASTER_ADDR: {error}\n")


def place(named: list[str]) -> dict[str, str]:
    """RANK, LOCAL_RANK, ... as far as the launcher says them, and where rank 0 is.

    Args:
        named: the first hosts of the job; empty where the batch system says them.
    Raises:
        LauncherError: the launcher's environment is incomplete, or a host list cannot be read.
        OSError: a host's name has no address.
    """
    from hvdkit.steps import bootstrap, launchers

    launched = launchers.detect(os.environ)
    if launched is None:
        return {}
    found = {"RANK": launched.rank, "LOCAL_RANK": launched.local_rank, "LOCAL_WORLD_SIZE": launched.local_size}
    variables = {name: str(value) for name, value in found.items() if value is not None}
    addresses = [bootstrap.address_of(name) for name in named or launchers.hosts_of_job(os.environ)[:2]]
    if os.environ["WORLD_SIZE"] == variables.get("LOCAL_WORLD_SIZE"):
        variables["MASTER_ADDR"] = "127.0.0.1"
    elif addresses:
        variables["MASTER_ADDR"] = addresses[0]
        variables["GLOO_SOCKET_IFNAME"] = bootstrap.interface_of(bootstrap.own_address(*addresses))
    port = os.environ.get("MASTER_PORT", "0")
    if launched.rank == 0:
        try:
            socket.create_server(("", int(port))).close()
        except OSError as error:
            sys.stderr.write(
                f"hvdkit launch: port {port} of {socket.gethostname()} is taken ({error.strerror}), so that "
                "torch.distributed cannot start from the environment; start the job again, which takes another port.\n"
            )
    return {**variables, **{name: os.environ[name] for name in _OF_THE_USER if name in os.environ}}


def with_startup(environ: Mapping[str, str]) -> str:
    """PYTHONPATH with the directory of our ``sitecustomize`` in front."""
    return os.pathsep.join([str(STARTUP), *filter(None, [environ.get("PYTHONPATH")])])


class _Rank:
    """From the start of the command to its end: first what it writes, then what it and this process are told."""

    def __init__(self, connection: socket.socket, launcher_grace_s: float, *, under_slurm: bool) -> None:
        self._channel = wire.Channel(connection)
        self._launcher_grace_s = launcher_grace_s
        # Without control groups Slurm sends its SIGTERM to every process of a rank.
        groups = Path("/proc/self/cgroup")
        self._all_are_signalled = under_slurm and groups.exists() and "/step_" not in groups.read_text()
        self._memory = processes.MemoryKills()
        self._ending = processes.Ending()
        self._selector = selectors.DefaultSelector()
        self._process: subprocess.Popen[bytes] | None = None
        self._outputs: dict[int, bytes] = {}
        self._alone = False

    def run(self, rank: int, command: list[str]) -> int:
        self._watch_signals()
        processes.adopt_orphans(True)
        self._selector.register(self._channel.connection, selectors.EVENT_READ, self._on_order)
        self._memory.watch(os.getpid())
        self._channel.send(wire.HELLO, wire.HELLO_PAYLOAD.pack(rank, os.getpid()) + socket.gethostname().encode())
        try:
            process = self._start(command)
        except OSError as error:
            said, status = _not_started(command, error)
            self._channel.send(wire.STDERR, said.encode())
            return self._leave(status)
        while process.poll() is None:
            self._wait()
        return self._leave(process.returncode)

    def _start(self, command: list[str]) -> "subprocess.Popen[bytes]":
        """Start the command in a process group of its own, what it writes and what its Pythons say in pipes."""
        reader, writer = os.pipe()  # for what Python says of itself
        os.set_inheritable(writer, True)
        os.environ["HVDKIT_STACKS"] = f"{writer}:{os.fstat(writer).st_ino}:{int(_STACKS_SIGNAL)}"
        os.environ["PYTHONPATH"] = with_startup(os.environ)
        self._process = process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Hydra hands its ranks an open socket (PMI_FD), which has to reach the command.
            close_fds=False,
            process_group=0,
            preexec_fn=processes.dying_with_parent(signal.SIGKILL),
        )
        os.close(writer)
        for stream, kind in ((process.stdout, wire.STDOUT), (process.stderr, wire.STDERR), (reader, wire.REPORT)):
            if stream is not None:
                self._read(stream if isinstance(stream, int) else stream.fileno(), kind)
        return process

    def _read(self, fd: int, kind: bytes) -> None:
        os.set_blocking(fd, False)
        self._outputs[fd] = kind
        self._selector.register(fd, selectors.EVENT_READ, lambda: self._on_output(fd))

    def _leave(self, status: int) -> int:
        """Report the end. A rank that failed, or is told to end, stays until ``hvdkit launch`` has seen the others.

        Left at once, the launcher would kill the others at the first exit: those that still save, too, and which of
        several ranks is seen to fail first would be decided by chance.
        """
        if status == 0 or self._ending.told:
            self._end_what_is_left()
        if survivors := processes.kill_descendants():
            self._channel.send(wire.SURVIVORS, "\n".join(map(processes.with_state, survivors)).encode())
        self._ending.kill_at = None
        for fd in list(self._outputs):
            while self._on_output(fd):
                pass
        pid = 0 if self._process is None else self._process.pid
        ended = wire.EXIT_PAYLOAD.pack(status, self._ending.told, pid, *self._memory.found())
        self._channel.send(wire.EXIT, ended)
        while (status != 0 or self._ending.told) and not self._ending.may_leave:
            self._wait()
        with contextlib.suppress(OSError):  # closed with an order unread, it would take what was sent along
            self._channel.connection.shutdown(socket.SHUT_WR)
        while self._channel.receive():
            pass
        if self._ending.by_order:  # after another status launchers kill the others, which may still save
            return 0
        return status if status >= 0 else 128 - status

    def _end_what_is_left(self) -> None:
        """See the end of what the command started and did not wait for: as long as a rank has, where it is not told."""
        if not self._ending.told:
            self._ending.ask()
            self._ending.kill_at = time.monotonic() + wire.STOP_GRACE_S
        while self._ending.kill_at is not None and processes.descendants():
            if self._ending.told:
                self._ending.kill_unasked()
            self._wait()

    def _wait(self) -> None:
        if self._channel.lost and not self._alone:
            self._on_lost()
        kill_at = self._ending.kill_at
        timeout = wire.LOOK_S if kill_at is None else max(0.0, min(wire.LOOK_S, kill_at - time.monotonic()))
        for key, _ in self._selector.select(timeout):
            key.data()
        if not self._channel.lost:
            self._channel.look()
        self._ending.kill_if_due()

    def _on_output(self, fd: int) -> bool:
        """Pass on what the pipe holds; False when it holds nothing now or is at its end."""
        try:
            data = os.read(fd, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if data:
            self._channel.send(self._outputs[fd], data)
            return True
        self._selector.unregister(fd)
        del self._outputs[fd]
        return False

    # What this process is told

    def _watch_signals(self) -> None:
        self._wakeup, wakeup_end = socket.socketpair()
        wakeup_end.setblocking(False)
        signal.set_wakeup_fd(wakeup_end.detach(), warn_on_full_buffer=False)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._on_signals)
        for number in (signal.SIGCHLD, *wire.ENDING, *wire.PASS_ON):
            signal.signal(number, lambda *_: None)

    def _on_signals(self) -> None:
        for number in self._wakeup.recv(64):
            if number in wire.ENDING:
                if self._all_are_signalled and not self._ending.asked:
                    self._ending.asked.update(processes.descendants())
                self._ending.tell(
                    0.0 if self._channel.lost else self._launcher_grace_s, by_order=False, may_leave=False
                )
            elif number in wire.PASS_ON:
                if not self._all_are_signalled:
                    self._pass_on(number)
            else:
                self._reap_orphans()

    def _on_order(self) -> None:
        orders = self._channel.receive()
        self._ending.may_leave |= wire.LEAVE in orders
        if wire.ASK in orders:
            self._channel.send(wire.HERE, b"")
        if wire.DUMP in orders:
            self._ask_for_stacks()
        if wire.KILL in orders:
            self._ending.tell(0.0)
        elif wire.STOP in orders:
            self._ending.tell(wire.STOP_GRACE_S)
        elif wire.TERMINATE in orders:
            self._ending.tell(_UNTIL_KILLED_S, may_leave=False)
        for number, order in wire.PASS_ON.items():
            if order in orders:
                self._pass_on(number)

    def _on_lost(self) -> None:
        self._alone = True
        self._selector.unregister(self._channel.connection)
        # Where the launcher ends the ranks, too, hvdkit launch was killed: the launcher soon kills this process, and
        # nobody would be left to end what the command started.
        by_launcher = self._ending.told and not self._ending.by_order
        self._ending.tell(0.0 if by_launcher else wire.STOP_GRACE_S)

    def _ask_for_stacks(self) -> None:
        """Have every process of the command that is ready for it write its stacks; others would die of the signal."""
        ready = [pid for pid in processes.descendants() if processes.handles(pid, _STACKS_SIGNAL)]
        for pid in ready:
            processes.send_signal(pid, _STACKS_SIGNAL)
        if not ready:
            said = b"It has no Python process that hands in its stacks (python -I and -S prevent it).\n"
            self._channel.send(wire.REPORT, said)

    def _pass_on(self, number: int) -> None:
        """Send a signal to who handles it; whoever does not would die of it: a shell, or a rank that only starts."""
        handling, _ = processes.first_that_handle(number)
        for pid in handling:
            processes.send_signal(pid, number)
        if not handling:
            self._channel.send(wire.UNHANDLED, wire.UNHANDLED_PAYLOAD.pack(number))

    def _reap_orphans(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if self._process is None or found.si_pid == self._process.pid:
                    return
                os.waitpid(found.si_pid, 0)


def receive(command: str) -> None:
    """Become a shell command, with the environment from standard input, which then has nothing more."""
    from hvdkit.steps import bootstrap

    words = sys.stdin.buffer.read().split(b"\0")
    if len(words) < 2:
        sys.exit("hvdkit launch: the job's environment did not come: what is used as ssh must pass standard input on.")
    for name, _, value in (word.partition(b"=") for word in words if word):
        os.environb[name] = value
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    root = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"].partition(":")[0]
    interface = bootstrap.interface_of(bootstrap.own_address(root))  # it may have another name on each host
    os.environ.update(HOROVOD_GLOO_IFACE=interface, NCCL_SOCKET_IFNAME=interface)
    os.execv("/bin/sh", ["sh", "-c", command])  # noqa: S606


if __name__ == "__main__":
    if len(sys.argv) == 2:
        receive(sys.argv[1])
    sys.exit(main(sys.argv[1:]))
