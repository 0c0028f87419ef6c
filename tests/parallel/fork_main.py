"""Ranks as forks of one process that has imported their framework, connected over Gloo as horovodrun connects them.

Importing TensorFlow takes longer than most of what the ranks of a test then do. Each rank is a process of its own that
imports hvdkit and its program itself, as one that ``rank_main.py`` runs.

Usage: python fork_main.py MODULE ...   then a job on each line of standard input, as JSON (see ``run``)
"""

import importlib
import json
import os
import random
import signal
import sys
import time
import traceback

import numpy as np
import rank_main
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer
from lean_imports import lean_imports

LEAVE_S = 20.0
"""Seconds that the other ranks have after one has failed."""


def main() -> None:
    with lean_imports():
        for module in sys.argv[1:]:
            importlib.import_module(module)
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)


def run(words: list[str], n: int, out: str, timeout: float) -> list[int]:
    """Start n ranks and wait for them.

    Args:
        words: what ``rank_main.py`` is given.
        out: where they run; what they print is in ``output`` there.
        timeout: seconds until all are killed.
    Returns:
        Their exit statuses by rank, minus the number of the signal that killed one.
    """
    server, port = start_rendezvous(n) if n > 1 else (0, 0)
    ranks = [os.fork() or be_rank(rank, n, port, words, out) for rank in range(n)]
    try:
        return wait_for(ranks, timeout)
    finally:
        if server:
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)


def start_rendezvous(n: int) -> tuple[int, int]:
    """Horovod's rendezvous server in a process of its own, so that no thread is there when the ranks are forked."""
    reading, writing = os.pipe()
    parent = os.getpid()
    process = os.fork()
    if process:
        os.close(writing)
        with os.fdopen(reading) as port:
            return process, int(port.read())
    server = RendezvousServer()
    port = server.start()
    server.init(get_host_assignments(parse_hosts(f"localhost:{n}"), n))
    os.write(writing, str(port).encode())
    os.close(writing)
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(0)


def be_rank(rank: int, n: int, port: int, words: list[str], out: str) -> int:
    """In the child: does not return, but ends as a program of its own does, with all that is registered for the end."""
    status = 1
    try:
        output = os.open(f"{out}/output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(out)
        random.seed()  # as in a process that has just begun
        np.random.seed()
        os.environ.update(variables(rank, n, port) if n > 1 else {})
        sys.argv = [rank_main.__file__, *words]
        rank_main.main()
        status = 0
    except Exception:
        traceback.print_exc()
    sys.exit(status)


def variables(rank: int, n: int, port: int) -> dict[str, str]:
    """What horovodrun sets for a rank of one host."""
    return {
        "HOROVOD_HOSTNAME": "localhost",
        **dict.fromkeys(("HOROVOD_RANK", "HOROVOD_LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE"), str(n)),
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
    }


def wait_for(ranks: list[int], timeout: float) -> list[int]:
    """The ranks' exit statuses; the rest is killed at the end of the time, or when it stays long after a failure."""
    ended: dict[int, int] = {}
    deadline, parent = time.monotonic() + timeout, os.getppid()
    while len(ended) < len(ranks):
        for process in ranks:
            found, status = (0, 0) if process in ended else os.waitpid(process, os.WNOHANG)
            if found:
                ended[process] = os.waitstatus_to_exitcode(status)
                if ended[process]:
                    deadline = min(deadline, time.monotonic() + LEAVE_S)
        if time.monotonic() > deadline or os.getppid() != parent:
            for process in set(ranks) - set(ended):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
    return [ended[process] for process in ranks]


if __name__ == "__main__":
    main()
