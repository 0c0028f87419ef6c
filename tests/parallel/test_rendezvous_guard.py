"""Strangers at horovodrun's rendezvous, as ``hvdkit launch`` starts it. That ranks meet there: test_launch.py."""

import base64
import importlib.util
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from hvdkit.prepare.install.record import read_record

MISSING = [name for name in ("torch", "horovod") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (`make test` installs all)"),
]

RANK = """
import base64, contextlib, glob, http.client, json, os, socket, sys
port, found = int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]), {}
bomb = base64.b64decode(sys.argv[2])
def ask(method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, body)
    return connection.getresponse().status
found["stranger"] = [ask("GET", "/global_/0"), ask("HEAD", "/setup.cfg"), ask("PUT", "/global_/0", b"x"),
                     ask("PUT", "/worker_addresses/localhost:0", bomb)]
_, _, path = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"].partition("/")
found["rank"] = ask("GET", f"/{path}:{port}/none/0")
secrets = [one.encode() for one in (path, os.environ["HVDKIT_SECRET"], os.environ["API_KEY"])]
lines = []
for file in glob.glob("/proc/[0-9]*/cmdline"):
    with contextlib.suppress(OSError), open(file, "rb") as line:
        lines.append(line.read())
found["seen"] = [line.decode() for line in lines if any(secret in line for secret in secrets)]
try:
    socket.create_connection(("127.0.0.2", port), timeout=5)
    found["elsewhere"] = "open"
except ConnectionRefusedError:
    found["elsewhere"] = "closed"
with open(f"{sys.argv[1]}/rank-{os.environ['HOROVOD_RANK']}.json", "w") as file:
    json.dump(found, file)
"""


class Bomb:
    """What runs a command where it is unpickled."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("kind", ["fixed", "elastic"])
def test_only_ranks_read_and_write_where_ranks_are_and_no_command_line_says_how(ranks_command, tmp_path, kind):
    _, environment = ranks_command(1, "gloo")
    environment["API_KEY"] = "known to the user alone"
    script, hosts = tmp_path / "rank.py", tmp_path / "hosts.sh"
    script.write_text(RANK)
    hosts.write_text("#!/bin/sh\necho localhost:2\n")
    hosts.chmod(0o755)
    bomb = base64.b64encode(base64.b64encode(pickle.dumps(Bomb(f"touch {tmp_path}/exploded")))).decode()
    options = ["--launcher", "horovodrun"] if kind == "fixed" else ["--host-discovery-script", str(hosts)]
    command = [sys.executable, str(script), str(tmp_path), bomb]
    launch = [sys.executable, "-m", "hvdkit.cli", "launch", "-n", "2", *options, "--", *command]
    done = subprocess.run(
        launch, env=environment, capture_output=True, text=True, timeout=240, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert not (tmp_path / "exploded").exists()
    for rank in range(2):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert found == {"stranger": [403] * 4, "rank": 404, "elsewhere": "closed", "seen": []}


def test_horovodrun_loads_no_framework_to_ask_what_horovod_was_built_with(ranks_command, tmp_path):
    """That takes seconds; hvdkit's build record says it."""
    if read_record() is None:
        pytest.skip("Horovod was not built by `hvdkit install`")
    _, environment = ranks_command(1, "gloo")
    for name in ("torch", "tensorflow", "mxnet"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'loaded')!r}, 'a').write('{name}')\n")
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"
    launch = [sys.executable, "-m", "hvdkit.cli", "launch", "-n", "2", "--launcher", "horovodrun", "--", "true"]
    done = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "loaded").exists()
