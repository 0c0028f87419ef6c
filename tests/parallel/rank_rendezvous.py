"""Horovod's rendezvous server for ranks over Gloo, in a process of its own. Prints its port; ends when it is killed.

Usage: rank_rendezvous N   n: how many ranks of this host meet
"""

import sys
import time

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer


def main() -> None:
    n = int(sys.argv[1])
    server = RendezvousServer()
    port = server.start()
    server.init(get_host_assignments(parse_hosts(f"localhost:{n}"), n))
    print(port, flush=True)
    while True:
        time.sleep(3600)
