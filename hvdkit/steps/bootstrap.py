"""Connects Horovod over Gloo under any launcher, without MPI and without ssh.

Horovod's own launchers start a rendezvous server and set variables for each rank; here rank 0 starts that server, and
each rank sets its own, after a meeting at the first host that the launcher's environment names. It is what ``init``
does when a launcher started several ranks and MPI would leave each of them alone, or Horovod was built without MPI.
"""

from __future__ import annotations

import ctypes
import fcntl
import hmac
import os
import re
import secrets
import shutil
import socket
import socketserver
import struct
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from hvdkit.errors import LauncherError
from hvdkit.steps import meeting, secret
from hvdkit.steps.launchers import Launched, hosts_of_job

_KEYS: dict[str, tuple[str, ...]] = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"),
    "jsrun": ("LSB_JOBID", "PMIX_NAMESPACE"),
    "Open MPI": ("PMIX_NAMESPACE",),
    "PALS": ("PALS_APID",),
    "Flux": ("FLUX_JOB_ID",),
    "srun": ("SLURM_JOB_ID", "SLURM_STEP_ID"),
}
"""For each launcher the variables that together name one job step and no other."""
_MPI_MAX_LIBRARY_VERSION_STRING = 8192  # the larger of Open MPI's 256 and MPICH's 8192


def root_host(launched: Launched, environ: Mapping[str, str]) -> str | None:
    """The host of rank 0, None where nothing says it."""
    if launched.size is not None and launched.local_size == launched.size:
        return "127.0.0.1"
    if launched.launcher == "torchrun":
        return environ.get("MASTER_ADDR")
    listed = hosts_of_job(environ)
    return listed[0] if listed else None


def key(launched: Launched, environ: Mapping[str, str]) -> str | None:
    """What names this job step and no other, None where nothing does. It is no secret."""
    parts = [environ[name] for name in _KEYS.get(launched.launcher, ()) if environ.get(name)]
    return "/".join([launched.launcher, str(os.getuid()), *parts]) if parts else None


def loaded_mpi() -> str | None:
    """The version line of the MPI library loaded in this process ("Open MPI v5.0.11, ..."), None without one.

    Source: MPI 4.1, section 9.1.1, MPI_Get_library_version (may be called before MPI_Init).
    """
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    paths = {line.split(maxsplit=5)[5].strip() for line in maps.read_text().splitlines() if "/libmpi" in line}
    for path in sorted(paths):
        library = ctypes.CDLL(path, mode=getattr(ctypes, "RTLD_NOLOAD", 4))
        if hasattr(library, "MPI_Get_library_version"):
            text, length = ctypes.create_string_buffer(_MPI_MAX_LIBRARY_VERSION_STRING), ctypes.c_int()
            library.MPI_Get_library_version(text, ctypes.byref(length))
            return text.value.decode(errors="replace").strip().splitlines()[0].split(",")[0]
    return None


def finds_ranks(environ: Mapping[str, str]) -> bool:
    """Whether the loaded MPI library has what it needs to find the ranks that a launcher started.

    Open MPI 5 knows PMIx only; MPICH and its relatives know PMI and, newer ones, PMIx. Where neither is offered, each
    process becomes rank 0 of 1 ("singleton").

    Source: PMIx standard 4.1, section 3.1 (PMIX_RANK); MPICH, PMI_RANK and PMI_FD of the PMI-1 wire protocol.
    """
    offered = {family for family in ("PMIX_RANK", "PMI_RANK", "PMI_FD") if family in environ}
    if (loaded_mpi() or "").startswith("Open MPI"):
        return "PMIX_RANK" in offered
    return bool(offered)


def is_needed(horovod: Any, launched: Launched, environ: Mapping[str, str]) -> bool:
    """Whether this job must and can be connected over Gloo.

    It must, where MPI would not find the launcher's other ranks: Horovod has no MPI, or the launcher did not give what
    this MPI looks for (MPI itself can be asked only once: an MPI that has left a process alone cannot start again).
    """
    wanted = environ.get("HOROVOD_CONTROLLER", "").lower()
    over_mpi = wanted != "gloo" and bool(horovod.mpi_built()) and finds_ranks(environ)
    return (
        launched.launcher in _KEYS
        and launched.size != 1
        and wanted in ("", "gloo")
        and not over_mpi
        and bool(horovod.gloo_built())
        and can_meet(launched, environ)
    )


def can_meet(launched: Launched, environ: Mapping[str, str]) -> bool:
    """Whether the launcher's environment says enough for ``meet``."""
    known = (launched.size, root_host(launched, environ), key(launched, environ))
    return all(one is not None for one in known)


def meet(
    launched: Launched,
    environ: Mapping[str, str],
    tell: Callable[[str, Sequence[str]], dict[str, Any]],
    purpose: str,
    timeout: float,
) -> meeting.Meeting:
    """Meet the other ranks, where the environment says enough (``can_meet``); a collective.

    Args:
        tell: what rank 0 tells all ranks, from its address and their hosts.
        purpose: tells apart the meetings of one job.
        timeout: seconds until all ranks must be there.
    Raises:
        LauncherError: the ranks do not find each other, or have no secret.
    """
    place, job = root_host(launched, environ), key(launched, environ)
    if place is None or job is None or launched.size is None:
        raise LauncherError(f"{launched.launcher}'s environment does not say where rank 0 is; use `hvdkit launch`.")
    one_host = launched.local_size == launched.size
    address, listen_on = _door(place, environ, one_host=one_host)
    return meeting.meet(
        launched.rank,
        launched.size,
        address,
        secret.key(f"{job}/{purpose}", environ, one_host=one_host),
        tell,
        listen_on=listen_on,
        host=environ.get("SLURMD_NODENAME"),
        timeout=timeout,
    )


def _door(place: str, environ: Mapping[str, str], *, one_host: bool) -> tuple[str, str]:
    """Where this process finds rank 0, and the address of the interface that rank 0 listens on, "" for all.

    Where the first host knows its own name as 127.0.1.1, it is ``own_address``.
    """
    address = address_of(place)
    try:
        found = socket.gethostbyname(address)
    except OSError:
        return address, ""
    if one_host or not found.startswith("127."):
        return address, found
    for other in hosts_of_job(environ)[1:2]:
        own = own_address(address_of(other))
        return own, own
    return address, ""


def connect(launched: Launched, environ: Mapping[str, str]) -> dict[str, str]:
    """Meet the other ranks and start the rendezvous; a collective, as ``meet``.

    Returns:
        The variables that Horovod's ``init`` needs, to be set in ``os.environ``.
    """
    met = meet(launched, environ, start_rendezvous, "horovod", timeout=60.0)
    local_rank, local_size, cross_rank, cross_size = met.place(launched.rank)
    return {
        "HOROVOD_HOSTNAME": met.hosts[launched.rank],
        "HOROVOD_RANK": str(launched.rank),
        "HOROVOD_SIZE": str(len(met.hosts)),
        "HOROVOD_LOCAL_RANK": str(local_rank),
        "HOROVOD_LOCAL_SIZE": str(local_size),
        "HOROVOD_CROSS_RANK": str(cross_rank),
        "HOROVOD_CROSS_SIZE": str(cross_size),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": environ.get("HOROVOD_CPU_OPERATIONS", "gloo"),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": met.told["rendezvous"],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(met.told["port"]),
        "HOROVOD_GLOO_IFACE": environ.get("HOROVOD_GLOO_IFACE") or interface_of(met.own_address),
    }


def address_of(host: str) -> str:
    """A name or address by which a host can be reached: its own name, or what Slurm calls its address.

    Some clusters give their nodes names that no name server knows.

    Source: Slurm, scontrol(1), "show node", NodeAddr.
    """
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        scontrol = shutil.which("scontrol")
        if scontrol is None:
            return host
        done = subprocess.run([scontrol, "show", "node", host], capture_output=True, text=True, timeout=30, check=False)
        found = re.search(r"\bNodeAddr=(\S+)", done.stdout)
        return found[1] if found else host
    return host


def own_address(*others: str) -> str:
    """The address with which this host goes to the first of these that is not known as 127.0.0.1 or the like.

    A host may know its own name as 127.0.1.1 (Debian), which the others do not reach. Without another: 127.0.0.1.
    """
    found = [address for address in map(socket.gethostbyname, others) if not address.startswith("127.")]
    if not found:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((found[0], 9))  # sends nothing; the kernel chooses the way
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The name of this host's network interface with an IPv4 address, "lo" for 127.0.0.1.

    Raises:
        LauncherError: no interface has it.
    """
    wanted = socket.inet_aton(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for path in sorted(Path("/sys/class/net").iterdir()):
            request = struct.pack("256s", path.name[:15].encode())
            try:
                answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:
                continue  # an interface without an IPv4 address
            if answer[20:24] == wanted:
                return path.name
    if wanted[:1] == b"\x7f":
        return "lo"
    raise LauncherError(f"no network interface of this host has the address {address}; set HOROVOD_GLOO_IFACE.")


# Horovod's rendezvous server, closed to everyone but the ranks of this job --------------------------------------------
#
# Horovod's own listens on all interfaces and lets anyone read and write the addresses by which the ranks find one
# another. This one listens on one address, and answers only where the path begins with a token. Horovod puts that
# before each of its paths by itself, since it takes the variable of the server's address for the beginning of a URL.

_SERVERS: list[Any] = []  # kept alive as long as the process
SERVER: dict[str, Any] = {
    "daemon_threads": True,  # a connection that is kept open does not keep the process
    "request_queue_size": 1024,
    "server_bind": socketserver.TCPServer.server_bind,  # without asking the name server for this host's name
    "handle_error": lambda *_: None,  # nothing is said of a connection that breaks off
}
"""What is put in place in Horovod's class of servers."""


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


def start_rendezvous(address: str, by_rank: Sequence[str]) -> dict[str, Any]:
    """Start a server for the ranks of a job; what HOROVOD_GLOO_RENDEZVOUS_ADDR and _PORT must be on each.

    It listens on this host's ``address``, as all ranks reach it; ``by_rank`` are the hosts of the ranks.
    """
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    token = secrets.token_hex(16)
    handler = type("Handler", (RendezvousHandler,), {"parse_request": only_with(token)})
    server = type("Server", (RendezvousHTTPServer,), SERVER)((address, 0), handler, 0)
    met = meeting.Meeting(tuple(by_rank), address, address, {})
    slots = []
    for rank, host in enumerate(by_rank):
        local_rank, local_size, cross_rank, cross_size = met.place(rank)
        slots.append(SlotInfo(host, rank, local_rank, cross_rank, len(by_rank), local_size, cross_size))
    server.init(slots)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    _SERVERS.append(server)
    port = server.server_address[1]
    return {"rendezvous": address_with(token, address, port), "port": port}
