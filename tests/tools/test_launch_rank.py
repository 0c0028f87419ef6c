"""The process beside a rank: whom it obeys, what it does without ``hvdkit launch``, and the memory it counts."""

import os
import socket
import subprocess
import sys

import pytest

from hvdkit.run.launch import peer
from hvdkit.run.launch import rank as wire
from hvdkit.run.launch.model import BESIDE_RANK
from hvdkit.run.launch.outcome import RankEnd
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
    kills = wire.MemoryKills(tmp_path / "proc", tmp_path / "cgroup")
    kills.watch(11)
    kills.watch(12)  # it has just ended
    assert kills.found() == (False, 0)
    (where / "memory.events").write_text(EVENTS.format(n=2))
    killed, bytes_allowed = kills.found()
    assert RankEnd(0, -9, out_of_memory=killed, limit=bytes_allowed).memory == cause


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

    def start(address, *command, key, **variables):
        environment = {"PATH": os.environ["PATH"], "PMI_RANK": "1", **variables}
        environment |= {} if key is None else {secret.VARIABLE: key}
        words = [*BESIDE_RANK, address, "PMI_RANK", *command]
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


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PMI_RANK": "3", "PMI_SIZE": "4"}, 3), ({"ALPS_APP_PE": "2"}, 2)],
)
def test_the_rank_of_launchers_whose_variables_differ_from_system_to_system(monkeypatch, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = list(sys.path)
    assert wire._rank("") == expected
    assert sys.path == before
    with pytest.raises(ValueError, match="NOWHERE must be the rank, got ''"):
        wire._rank("NOWHERE")
