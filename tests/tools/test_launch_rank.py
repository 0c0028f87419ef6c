"""The process beside a rank: whom it obeys, what it does without ``hvdkit launch``, and the memory it counts."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hvdkit.jobs.launch import peer, processes, rank, wire
from hvdkit.jobs.launch.model import BESIDE_RANK
from hvdkit.steps import secret

EVENTS = "low 0\nhigh 12\nmax 7\noom {n}\noom_kill {n}\noom_group_kill 0\n"
TIMEOUT_S = 120


@pytest.mark.parametrize("path", ["/job_7/step_0", "/of/the/host"])
@pytest.mark.parametrize(
    ("limit", "cause"),
    [
        ("2000000000\n", " because memory ran out (the limit of its cgroup is 2.00 GB)"),
        ("max\n", " because memory ran out"),
    ],
)
def test_kills_of_the_kernel_are_counted_in_the_ranks_cgroup(tmp_path, path, limit, cause):
    inside = tmp_path / "cgroup" / "job_7" / "step_0"
    (tmp_path / "proc" / "11").mkdir(parents=True)
    (tmp_path / "proc" / "11" / "cgroup").write_text(f"0::{path}\n")
    inside.mkdir(parents=True)
    where = inside if path.startswith("/job") else tmp_path / "cgroup"  # in a container the path may be the host's
    (where / "memory.events").write_text(EVENTS.format(n=1))
    (where / "memory.max").write_text(limit)
    kills = processes.MemoryKills(tmp_path / "proc", tmp_path / "cgroup")
    kills.watch(11)
    kills.watch(12)  # it has just ended
    assert kills.found() == (False, 0)
    (where / "memory.events").write_text(EVENTS.format(n=2))
    killed, bytes_allowed = kills.found()
    assert peer.RankEnd(0, -9, out_of_memory=killed, limit=bytes_allowed).memory == cause


@pytest.fixture
def server():
    listening, address = peer.listener([], here=True)
    listening.setblocking(True)
    listening.settimeout(TIMEOUT_S)
    with listening:
        yield listening, address


@pytest.fixture
def begin():
    """Starts a rank; what it shares with ``hvdkit launch`` is in its environment alone."""
    started = []

    def start(address, *command, key, variable="PMI_RANK", beside=BESIDE_RANK):
        environment = {"PATH": os.environ["PATH"], variable: "1"}
        environment |= {} if key is None else {secret.VARIABLE: key}
        words = [*beside, address, variable, "0.5", "", *command]
        started.append(subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def shaken(listening, key):
    """The connection of a rank that has shown that it knows the key, None where it has not."""
    found = peer.Peer(listening.accept()[0])
    found.connection.settimeout(TIMEOUT_S)
    found.order(found.nonce)
    known = None
    while known is None:
        known = found.shake_hands(found.receive(), key)
    return found if known else None


def test_a_rank_says_who_it_is_and_ends_with_the_connection(server, begin):
    listening, address = server
    key = secret.new()
    rank = begin(address, "sleep", "600", key=key)
    found = shaken(listening, key)
    kind, payload = next(found.frames(found.receive()))
    size = wire.HELLO_PAYLOAD.size
    assert (kind, wire.HELLO_PAYLOAD.unpack_from(payload)) == (wire.HELLO, (1, rank.pid))
    assert payload[size:].decode() == socket.gethostname()
    found.connection.close()
    assert rank.wait(TIMEOUT_S) == 0, "as what was told to end"


def frames(found):
    """What a rank says, to the end of the connection: kinds and payloads."""
    said = []
    while data := found.receive():
        said += found.frames(data)
    return said


def ended(listening, key, rank, orders=b""):
    """The rank's status, whether it was told to end before, and what its process exits with."""
    found = shaken(listening, key)
    found.connection.sendall(orders)
    said = []
    while not said or said[-1][0] != wire.EXIT:
        said += found.frames(found.receive())
        if said and said[-1][0] == wire.STDOUT:
            rank.terminate()
    found.connection.sendall(wire.LEAVE)
    assert frames(found) == []
    found.connection.close()
    return (*wire.EXIT_PAYLOAD.unpack(said[-1][1])[:2], rank.wait(TIMEOUT_S))


def test_a_worker_that_fails_and_may_leave_has_its_own_status_also_where_a_launcher_told_it_to_end(server, begin):
    """An elastic job's: horovodrun takes status 0 for a worker that is done, and replaces no such one."""
    listening, address = server
    key = secret.new()
    assert ended(listening, key, begin(address, "sh", "-c", "exit 3", key=key)) == (3, False, 3)
    assert ended(listening, key, begin(address, "sh", "-c", "echo; sleep 600", key=key)) == (-15, True, 143)
    killed = ended(listening, key, begin(address, "sleep", "600", key=key), wire.KILL)
    assert killed[2] == 0, "as what was told to end by hvdkit launch"


@pytest.mark.parametrize("variable", ["SLURM_PROCID", "PALS_RANKID"])
def test_a_batch_system_that_ends_a_rank_leaves_it_the_grace_of_the_job(server, begin, variable):
    listening, address = server
    key = secret.new()
    stays = begin(address, "sh", "-c", "trap '' TERM; echo; sleep 600", key=key, variable=variable)
    assert ended(listening, key, stays)[:2] == (-signal.SIGKILL, True)


@pytest.mark.slow
def test_what_a_rank_has_written_arrives_though_an_order_comes_late_and_the_reader_is_behind(server, begin):
    listening, address = server
    key = secret.new()
    writes = "import os, sys; sys.stdout.write('x' * 1_000_000)"
    rank = begin(address, sys.executable, "-c", writes, key=key)
    found = shaken(listening, key)
    with contextlib.suppress(subprocess.TimeoutExpired):
        rank.wait(2.0)  # it must not have gone
    found.connection.sendall(wire.PASS_ON[signal.SIGUSR1])
    said = frames(found)
    found.connection.close()
    assert sum(len(payload) for kind, payload in said if kind == wire.STDOUT) == 1_000_000
    assert said[-1][0] == wire.EXIT and rank.wait(TIMEOUT_S) == 0


WITHOUT_NETWORK = """
import os, subprocess, sys, time
from hvdkit.jobs.launch import peer, wire
from hvdkit.steps import secret

def link(state):
    subprocess.run(["ip", "link", "set", "lo", state], check=True)

link("up")
server, address = peer.listener([], here=True)
server.setblocking(True)
reader, writer = os.pipe()
key = secret.new()
impatient = "import socket, sys; sys.path.append(sys.argv[1]); from hvdkit.jobs.launch import rank, wire; "
impatient += "wire.RETRANSMITTED = 3; wire.LOOK_S = 0.5; "
impatient += "wire.KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 2)); "
impatient += "sys.exit(rank.main(sys.argv[2:]))"
words = [sys.executable, "-I", "-S", "-c", impatient, os.environ["PYTHONPATH"], address, "PMI_RANK", "3.0", ""]
environment = {"PATH": os.environ["PATH"], "PMI_RANK": "1", secret.VARIABLE: key}
process = subprocess.Popen([*words, "sh", "-c", sys.argv[1]], env=environment, pass_fds=[writer])
os.close(writer)
found = peer.Peer(server.accept()[0])
found.order(found.nonce)
while not found.shake_hands(found.receive(), key):
    pass
found.receive()
time.sleep(0.5)  # what it has said is acknowledged late
link("down")
print(process.wait(30), os.read(reader, 1))
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["sleep 600 & wait", "sleep 600 & while sleep 0.2; do echo; done"])
def test_a_rank_ends_when_the_network_fails_without_a_word(command):
    """Where nothing is to be sent keep-alive tells, else that nothing is acknowledged."""
    inside = ["unshare", "--user", "--map-root-user", "--net", sys.executable]
    if shutil.which("ip") is None or subprocess.run([*inside, "-c", ""], capture_output=True).returncode:
        pytest.skip("needs ip, and network namespaces")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    words = [*inside, "-c", WITHOUT_NETWORK, command]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.stdout == "0 b''\n", done.stderr


def test_a_rank_with_another_secret_is_refused_and_ends(server, begin):
    listening, address = server
    begin(address, "sleep", "600", key=secret.new())
    assert shaken(listening, secret.new()) is None


def test_a_rank_does_not_obey_who_does_not_know_the_secret(server, begin):
    listening, address = server
    rank = begin(address, "sleep", "600", key=secret.new())
    with listening.accept()[0] as connection:
        connection.sendall(bytes(wire.NONCE_BYTES) + bytes(wire.PROOF_BYTES) + wire.KILL)
        said = rank.communicate(timeout=TIMEOUT_S)[1].decode()
    assert rank.returncode == 1 and "does not know its secret" in said


def test_a_rank_that_comes_late_starts_nothing(server, begin):
    listening, address = server
    listening.close()
    rank = begin(address, "echo", "started", key=secret.new())
    out, error = rank.communicate(timeout=TIMEOUT_S)
    assert (rank.returncode, out) == (1, b"") and b"has ended, and this rank with it" in error


@pytest.mark.parametrize(("key", "why"), [(None, "did not hand HVDKIT_SECRET on"), ("k" * 32, "")])
def test_a_rank_that_cannot_reach_it_runs_all_the_same_and_says_so(begin, key, why):
    rank = begin("no-such-host.invalid:1", "echo", "started", key=key)
    out, error = rank.communicate(timeout=TIMEOUT_S)
    assert (rank.returncode, out) == (0, b"started\n")
    assert "does not see to this rank, which runs all the same: " in error.decode() and why in error.decode()


def test_a_rank_names_what_sigkill_did_not_end_before_its_own_end(monkeypatch):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        beside = rank._Rank(ours, 1.0, under_slurm=False)
        beside._ending.may_leave = True
        monkeypatch.setattr(processes, "kill_descendants", lambda: [os.getpid(), 2**22 + 1])
        theirs.shutdown(socket.SHUT_WR)
        assert beside._leave(1) == 1
        said = frames(peer.Peer(theirs))
    assert [kind for kind, _ in said] == [wire.SURVIVORS, wire.EXIT]
    assert said[0][1].decode().splitlines() == [f"pid {os.getpid()} (R (running))", f"pid {2**22 + 1}"]


def test_another_host_takes_the_environment_from_standard_input_not_from_a_command_line():
    environment = f"A=b c\0PATH={os.environ['PATH']}\0HOROVOD_GLOO_RENDEZVOUS_ADDR=127.0.0.1:token".encode()
    words = [*BESIDE_RANK, 'echo "$A" $HOROVOD_GLOO_IFACE $NCCL_SOCKET_IFNAME; cat']
    done = subprocess.run(words, input=environment, env={}, capture_output=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout) == (0, b"b c lo lo\n"), done.stderr.decode()
    done = subprocess.run(words, input=b"", env={}, capture_output=True, timeout=TIMEOUT_S)
    assert done.returncode == 1 and b"the job's environment did not come" in done.stderr


def test_a_missing_program_is_one_sentence_also_where_nobody_sees_to_the_rank(begin):
    rank = begin("no-such-host.invalid:1", "/no/such/program", key=secret.new())
    error = rank.communicate(timeout=TIMEOUT_S)[1].decode().splitlines()
    assert rank.returncode == 127 and len(error) == 2
    assert error[1] == "hvdkit launch: /no/such/program cannot be started: No such file or directory"


def test_the_address_that_is_offered_is_listened_on_and_a_name_that_is_none_is_no_error():
    listening, address = peer.listener(["h..x", "no-such-host.invalid"], here=False)
    name, _, port = address.rpartition(":")
    with listening:
        socket.create_connection((name, int(port)), TIMEOUT_S).close()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PMI_RANK": "3", "PMI_SIZE": "4"}, 3), ({"ALPS_APP_PE": "2"}, 2)],
)
def test_the_rank_of_launchers_whose_variables_differ_from_system_to_system(monkeypatch, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = list(sys.path)
    assert rank.rank_of("") == expected
    assert sys.path == before
    with pytest.raises(ValueError, match="NOWHERE must be the rank, got ''"):
        rank.rank_of("NOWHERE")


HERE = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
THERE = {"WORLD_SIZE": "4", "MASTER_PORT": "0", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4",
         "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}  # fmt: skip
PLACE = {"RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (HERE, {"RANK": "3", "LOCAL_RANK": "3"}),
        (THERE, {**PLACE, "GLOO_SOCKET_IFNAME": "lo"}),
        ({**THERE, "MASTER_ADDR": "10.0.0.9"}, {**PLACE, "MASTER_ADDR": "10.0.0.9"}),
        ({}, {}),
        ({"HVDKIT_WORKERS": "a:1,b:2"}, {"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:2"]}, "task": '
                                         '{"type": "worker", "index": 3}}'}),
    ],
    ids=["one machine", "several hosts", "an address of the user's", "ranks that come and go", "TF_CONFIG"],
)  # fmt: skip
def test_a_rank_gets_the_place_that_torchrun_would_give_it(monkeypatch, environ, expected):
    monkeypatch.setattr(os, "environ", dict(environ))
    rank.settle_place(3, "127.0.0.1,localhost")
    assert expected.items() <= os.environ.items()
    assert os.environ.keys() <= {*environ, *expected, "GLOO_SOCKET_IFNAME"}
