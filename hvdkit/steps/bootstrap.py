"""Connects Horovod over Gloo under any launcher, without MPI and without ssh.

Horovod's own launchers start a rendezvous server and set variables for each rank; here rank 0 starts that server, and
each rank sets its own, after a meeting at the first host that the launcher's environment names. It is what ``init``
does when a launcher started several ranks and MPI would leave each of them alone, or Horovod was built without MPI.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdkit.errors import LauncherError
from hvdkit.steps import hosts, meeting, rendezvous, secret
from hvdkit.steps.launchers import Launched

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
    listed = hosts.of_job(environ)
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

    Args:
        environ: the process environment.
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
        and launched.size is not None
        and launched.size > 1
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
    """Meet the other ranks; a collective.

    Args:
        launched: this process by its launcher; ``can_meet``.
        environ: the process environment.
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

    A host may know its own name as 127.0.1.1 (Debian), which the others do not reach: then it is the address with which
    it goes to another host of the job.
    """
    address = hosts.address(place)
    try:
        found = socket.gethostbyname(address)
    except OSError:
        return address, ""
    if one_host or not found.startswith("127."):
        return address, found
    for other in hosts.of_job(environ)[1:2]:
        own = hosts.own_address(hosts.address(other))
        return own, own
    return address, ""


def connect(launched: Launched, environ: Mapping[str, str], timeout: float = 60.0) -> dict[str, str]:
    """Meet the other ranks and start the rendezvous; a collective.

    Args:
        launched: this process by its launcher; ``is_needed``.
        environ: the process environment.
        timeout: seconds until all ranks must be there.
    Returns:
        The variables that Horovod's ``init`` needs, to be set in ``os.environ``.
    Raises:
        LauncherError: the ranks do not find each other.
    """
    met = meet(launched, environ, _start_rendezvous, "horovod", timeout)
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


def _start_rendezvous(address: str, by_rank: Sequence[str]) -> dict[str, Any]:
    from horovod.runner.common.util.hosts import SlotInfo

    met = meeting.Meeting(tuple(by_rank), address, address, {})
    slots = []
    for rank, host in enumerate(by_rank):
        local_rank, local_size, cross_rank, cross_size = met.place(rank)
        slots.append(SlotInfo(host, rank, local_rank, cross_rank, len(by_rank), local_size, cross_size))
    return dict(zip(("rendezvous", "port"), rendezvous.start(address, slots), strict=True))


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
