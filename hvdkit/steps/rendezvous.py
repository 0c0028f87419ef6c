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
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler
from typing import Any

_servers: list[Any] = []  # kept alive as long as the process

SERVER: dict[str, Any] = {
    "daemon_threads": True,  # a connection that is kept open does not keep the process
    "request_queue_size": 1024,
    "server_bind": socketserver.TCPServer.server_bind,  # without asking the name server for this host's name
    "handle_error": lambda *_: None,  # nothing is said of a connection that breaks off
}
"""What is put in place in Horovod's class of servers."""


def new_token() -> str:
    """What only the ranks of one job know."""
    return secrets.token_hex(16)


def address_with(token: str, address: str, port: int) -> str:
    """What HOROVOD_GLOO_RENDEZVOUS_ADDR must be for Horovod to send the token.

    Source: Horovod 0.28.1, http_store.h, HTTPStore ("http://" + address + ":" + port + "/" + scope).
    """
    return f"{address}:{port}/{token}"


def only_with(token: str) -> Callable[[Any], bool]:
    """A method ``parse_request`` of handlers that refuses requests without the token, and takes it off the others."""

    def parse_request(self: Any) -> bool:
        if not BaseHTTPRequestHandler.parse_request(self):
            return False
        given, _, path = self.path[1:].partition("/")
        if not hmac.compare_digest(given.partition(":")[0].encode(), token.encode()):
            self.send_error(403)
            return False
        self.path = f"/{path}"
        return True

    return parse_request


def start(address: str, slots: Sequence[Any]) -> tuple[str, int]:
    """Start a server for the ranks of a job; what HOROVOD_GLOO_RENDEZVOUS_ADDR and _PORT must be on each.

    Args:
        address: of this host, as all ranks reach it.
        slots: Horovod's ``SlotInfo`` of each rank.
    """
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    token = new_token()
    handler = type("Handler", (RendezvousHandler,), {"parse_request": only_with(token)})
    server = type("Server", (RendezvousHTTPServer,), SERVER)((address, 0), handler, 0)
    server.init(slots)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    _servers.append(server)
    port = server.server_address[1]
    return address_with(token, address, port), port
