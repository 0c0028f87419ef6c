"""benchmarks/delayed_link.py: no packet is early, none is changed, and what waits too long is lost."""

import importlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import namespaces
import pytest

pytestmark = pytest.mark.parallel

ADDRESSES = ["10.79.0.1", "10.79.0.2"]
MBIT, DELAY_MS, BYTES = 50, 15, 1_000_000
ANSWERS = f"""
import hashlib, socket
server = socket.create_server(("{ADDRESSES[1]}", 7))
print("listens", flush=True)
peer, _ = server.accept()
peer.send(peer.recv(1))
got = b""
while len(got) < {BYTES}:
    got += peer.recv(65536)
peer.send(hashlib.sha256(got).digest())
"""
ASKS = f"""
import hashlib, json, random, socket, time
peer = socket.create_connection(("{ADDRESSES[1]}", 7))
start = time.perf_counter()
peer.send(b"1"), peer.recv(1)
trip = time.perf_counter() - start
sent = random.randbytes({BYTES})
start = time.perf_counter()
peer.sendall(sent)
same = peer.recv(32) == hashlib.sha256(sent).digest()
print(json.dumps([trip, time.perf_counter() - start, same]))
"""


@pytest.fixture
def delayed_link(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("delayed_link")


def test_a_packet_takes_the_delay_and_many_take_the_rate(delayed_link):
    if lacking := namespaces.missing() + [name for name in ("/dev/net/tun",) if not Path(name).exists()]:
        pytest.skip(f"needs {', '.join(lacking)}")
    names = [f"hvdlink{os.getpid()}n{number}" for number in range(2)]
    inside = [["ip", "netns", "exec", name, sys.executable, "-c"] for name in names]
    for name in names:
        subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        with (
            delayed_link.between(names, ADDRESSES, MBIT, DELAY_MS),
            subprocess.Popen([*inside[1], ANSWERS], stdout=subprocess.PIPE) as answers,
        ):
            answers.stdout.readline()
            asked = subprocess.run([*inside[0], ASKS], capture_output=True, text=True, timeout=60, check=True)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name])
    trip_s, transfer_s, same = json.loads(asked.stdout)
    assert trip_s >= 2 * DELAY_MS / 1e3
    assert transfer_s >= BYTES * 8 / (MBIT * 1e6) + 2 * DELAY_MS / 1e3
    assert same


def test_a_packet_that_would_wait_too_long_is_lost(delayed_link):
    (here, source), (target, there) = (socket.socketpair(type=socket.SOCK_DGRAM) for _ in range(2))
    with here, source, target, there:
        source.setblocking(False)
        way = delayed_link.Way(source.fileno(), target.fileno(), bytes_per_s=1, delay_s=5)
        for _ in range(2):
            here.send(bytes(delayed_link.HEADER + 500))
        way.take()
        way.give()
        ((due, _),) = way.waiting
        assert 490 < due - time.monotonic() <= 505
