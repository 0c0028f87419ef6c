"""Horovod's rendezvous server answers nobody but the ranks of its job."""

import contextlib
import http.client
import importlib.util
import socket
import subprocess
import sys
import threading
import time

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="needs horovod (`make test`)")

SERVER = """
import sys
from hvdkit.steps import bootstrap
where, port = bootstrap.start_rendezvous("127.0.0.1", ["h", "h"]).values()
print(where, port, flush=True)
sys.stdin.read()
"""


def dribble(connection):
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(b"x")
            time.sleep(0.2)


@pytest.fixture(scope="module")
def server():
    """Where a server listens, and its token. In the end it ends at once, whoever is still connected."""
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        where, port = process.stdout.readline().decode().split()
        address, _, token = where.partition("/")
        assert address == f"127.0.0.1:{port}" and len(token) == 32
        with socket.create_connection(("127.0.0.1", int(port))) as slow:
            threading.Thread(target=dribble, args=(slow,), daemon=True).start()
            yield int(port), token
            _, errors = process.communicate(timeout=20)
    assert process.returncode == 0 and errors == b""


def ask(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, body)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_the_ranks_read_and_write(server):
    port, token = server
    begin = f"/{token}:{port}/global_"  # what Horovod makes of both variables
    assert ask(port, "GET", f"{begin}/0")[0] == 404
    assert ask(port, "PUT", f"{begin}/0", b"here")[0] == 200
    assert ask(port, "GET", f"{begin}/0") == (200, b"here")
    assert ask(port, "DELETE", f"{begin}/0")[0] == 200


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "HEAD"])
@pytest.mark.parametrize("path", ["/global_/0", "/", "", "/{other}:1/global_/0", "/{short}:1/global_/0"])
def test_nobody_else_does(server, method, path):
    port, token = server
    path = path.format(other="0" * 32, short=token[:-1])
    assert ask(port, method, path, b"false" if method == "PUT" else None)[0] == 403


@pytest.mark.parametrize("junk", [b"5\n", bytes(100), b"GET\n", b"\x16\x03\x01\r\n\r\n", b"GET " + b"/" * 70_000])
def test_junk_changes_nothing(server, junk):
    port, token = server
    with socket.create_connection(("127.0.0.1", port), timeout=20) as stranger:
        stranger.sendall(junk)
    assert ask(port, "PUT", f"/{token}:{port}/global_/1", b"here")[0] == 200


def test_it_listens_on_one_address(server):
    port, _ = server
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
