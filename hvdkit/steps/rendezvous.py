"""Horovod's rendezvous server over Gloo, closed to everyone but the ranks of this job.

Horovod's own listens on all interfaces and lets anyone read and write the addresses by which the ranks find one
another. This one listens on one address, and answers only where the path begins with a token. Horovod puts that before
each of its paths by itself, since it takes the variable of the server's address for the beginning of a URL.
"""

from __future__ import annotations

import hmac
import secrets
import socketserver
import threading
from collections.abc import Sequence
from typing import Any

_servers: list[Any] = []  # kept alive as long as the process


def start(address: str, slots: Sequence[Any]) -> tuple[str, int]:
    """Start a server for the ranks of a job; what HOROVOD_GLOO_RENDEZVOUS_ADDR and _PORT must be on each.

    Args:
        address: of this host, as all ranks reach it.
        slots: Horovod's ``SlotInfo`` of each rank.
    Source: Horovod 0.28.1, http_store.h, HTTPStore ("http://" + address + ":" + port + "/" + scope).
    """
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    token = secrets.token_hex(16).encode()

    class Handler(RendezvousHandler):  # type: ignore[misc]
        def parse_request(self) -> bool:
            if not super().parse_request():
                return False
            given, _, path = str(self.path)[1:].partition("/")
            if not hmac.compare_digest(given.partition(":")[0].encode(), token):
                self.send_error(403)
                return False
            self.path: str = f"/{path}"
            return True

    class Server(RendezvousHTTPServer):  # type: ignore[misc]
        daemon_threads = True  # a connection that is kept open does not keep the process
        request_queue_size = 1024

        def server_bind(self) -> None:
            socketserver.TCPServer.server_bind(self)  # HTTPServer would ask the name server for this host's name
            self.server_name, self.server_port = self.server_address[:2]

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Say nothing of a connection that breaks off."""

    server = Server((address, 0), Handler, 0)
    server.init(slots)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    _servers.append(server)
    return f"{address}:{server.server_port}/{token.decode()}", server.server_port
