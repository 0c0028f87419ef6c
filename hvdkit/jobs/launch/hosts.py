"""Which hosts a job runs on and how many ranks each takes, by options, a host file or the batch job; who is silent."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from hvdkit.common import files
from hvdkit.common.commands import shortened
from hvdkit.errors import InvalidArgumentError
from hvdkit.jobs.launch.model import Host
from hvdkit.jobs.launch.options import Request
from hvdkit.steps.launchers import hosts_of_job

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_OPTION = re.compile(rf"({_NAME})(?::([1-9][0-9]*))?")
_LINE = re.compile(rf"({_NAME})(?:(?::|\s+slots\s*=\s*)([1-9][0-9]*))?")
_OPERATOR = ("OMPI_MCA_orte_default_hostfile", "I_MPI_HYDRA_HOST_FILE", "HYDRA_HOST_FILE")
"""Names the host file in the launcher pod of the Kubeflow MPI Operator, for Open MPI, Intel MPI and MPICH.

Source: kubeflow/mpi-operator, pkg/controller/mpi_job_controller.go, ``newLauncherPodTemplate``.
"""
_LOCAL = ("localhost", "127.0.0.1")
_MISSING = re.compile(rb"(/\S+/(?:python[\d.]*|prted|orted)): (?:command )?(?:not found|No such file)")
"""What the shell of another host says where this environment is not there."""
_PORT = 22
_WAIT_S = 2.0
"""How long a host may take to answer: TCP asks at 0, 1 and 3 s."""
_LOOK_UP_S = 5.0
"""The resolver's own time for one question to one name server."""
_AT_A_TIME = 64

Named = tuple[str, int | None]
"""A host and its slots, None where nothing says how many."""


def parse(text: str) -> list[Named]:
    """The hosts of ``--hosts``: ``h1:4,h2:4``, or names alone.

    Raises:
        InvalidArgumentError: an entry that is no HOST or HOST:SLOTS.
    """
    found = []
    for entry in text.split(","):
        match = _OPTION.fullmatch(entry.strip())
        if match is None:
            raise InvalidArgumentError(
                f"--hosts has {entry!r} where HOST or HOST:SLOTS (1 or more slots) is expected, as in h1:4,h2:4."
            )
        found.append((match[1], match[2]))
    return _merged(found, "--hosts")


def read(file: Path) -> list[Named]:
    """The hosts of a host file: a line ``HOST``, ``HOST:SLOTS`` or ``HOST slots=SLOTS`` each; # begins a comment.

    Lines that repeat a bare name add a slot each, as the files of PBS and LSF do.

    Raises:
        InvalidArgumentError: it cannot be read, has a bad line, or names no host.
    """
    try:
        lines = files.text(file).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InvalidArgumentError(f"--hostfile {file} cannot be read: {reason}.") from error
    found = []
    for number, line in enumerate(lines, start=1):
        entry = line.partition("#")[0].strip()
        match = _LINE.fullmatch(entry)
        if match is not None:
            found.append((match[1], match[2]))
        elif entry:
            raise InvalidArgumentError(
                f"--hostfile {file}, line {number}: {shortened(line.strip())} is no HOST, HOST:SLOTS or "
                "HOST slots=SLOTS."
            )
    if not found:
        raise InvalidArgumentError(f"--hostfile {file} names no host; write one HOST:SLOTS a line.")
    return _merged(found, f"--hostfile {file}")


def _merged(found: Sequence[tuple[str, str | None]], source: str) -> list[Named]:
    """Each host once; a bare name that comes several times has that many slots."""
    counts: dict[str, list[str | None]] = {}
    for name, count in found:
        counts.setdefault(name, []).append(count)
    hosts: list[Named] = []
    for name, slots in counts.items():
        if len(slots) > 1 and any(slots):
            raise InvalidArgumentError(f"{source} names host {name!r} twice; give it once, with all its slots.")
        bare = len(slots) if len(slots) > 1 else None
        hosts.append((name, int(slots[0]) if slots[0] else bare))
    return hosts


def placed(
    request: Request,
    given: Sequence[Named] | None,
    environ: Mapping[str, str],
    *,
    anywhere: bool = False,
    hostname: str | None = None,
) -> Request:
    """The request with the hosts of its job, () for this machine alone, and the ranks on each as far as they are known.

    Args:
        request: its ``n`` and ``ppn`` count here; 0 for ``n``: ``ppn`` on each host.
        given: what the user named, None for the hosts of the batch job or the workers of the MPIJob, if there is one.
        environ: the environment, which names these.
        anywhere: the launcher takes any host of the batch job unless it is told, so that this machine, too, is named.
        hostname: the name of this machine.
    Raises:
        InvalidArgumentError: more ranks than slots, or a host that the batch job does not have.
        LauncherError: the batch job's list cannot be read.
    """
    n, ppn, own = request.n, request.ppn, hostname or socket.gethostname()
    allocation = hosts_of_job(environ)
    if given is not None and allocation:
        known = {name.split(".")[0] for name in allocation}
        for name, _ in given:
            if (own if name in _LOCAL else name).split(".")[0] not in known:
                raise InvalidArgumentError(
                    f"host {name!r} is not one of this batch job's hosts ({_listed(allocation)}); name one of these, "
                    "or leave --hosts and --hostfile out to use all of them."
                )
    workers = [environ[name] for name in _OPERATOR if environ.get(name)]
    if given is not None:
        named = list(given)
    elif allocation:
        named = [(name, None) for name in allocation]
    elif workers and environ.get("K_MPI_JOB_ROLE") == "launcher":
        named = read(Path(workers[0]))
    else:
        return replace(request, n=n or ppn or 1)
    share = ppn or -(-n // len(named))  # where nothing is said
    hosts = tuple(Host(name, min(slots or share, ppn or slots or share)) for name, slots in named)
    room = sum(host.slots for host in hosts)
    n = n or room
    if n > room:
        limit = "" if ppn is None else f" with --ppn {ppn}"
        raise InvalidArgumentError(
            f"{n} ranks are more than the {room} slots of {_listed([str(host) for host in hosts])}{limit}; ask for "
            "fewer ranks (-n), or for more hosts or slots."
        )
    if anywhere and given is not None:
        hosts = tuple(Host(own, host.slots) if host.name in _LOCAL else host for host in hosts)
    elif all(is_here(host.name, own) for host in hosts):
        hosts = ()
    slots = {host.slots for host in hosts}
    if ppn is None and given is not None and len(slots) == 1:
        ppn = slots.pop()
    return replace(request, n=n, hosts=hosts, hosts_chosen=given is not None, ppn=ppn)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:6])} and {len(names) - 6} more"


def is_here(name: str, hostname: str | None = None) -> bool:
    """Whether a host is this machine, by its name."""
    return name in _LOCAL or name.split(".")[0] == (hostname or socket.gethostname()).split(".")[0]


# Why no rank comes from them: they do not answer, nobody knows them, or they lack what is to run there


def unreached(hosts: Sequence[str], said: bytes) -> str | None:
    """Why no rank ran anywhere, as far as the launcher or the hosts tell; ``said``: by the launcher."""
    if (missing := _MISSING.search(said)) is not None:
        return (
            f"{missing[1].decode(errors='replace')} does not exist on another host: this environment and this "
            "directory must lie at the same path on every host; install it there, or on a file system that all share."
        )
    if unknown := [host for host in hosts if _addresses(host) == []]:
        are = "is" if len(unknown) == 1 else "are"
        why = "no name server has an address; correct --hosts or the host file, unless ssh has such an alias."
        return f"{named(unknown)} {are} unknown: {why}"
    return silent(hosts)


def silent(hosts: Sequence[str]) -> str | None:
    """A sentence that names the hosts where no ssh server answers now, None without any."""
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        answers = dict(zip(hosts, pool.map(_answers, hosts), strict=True))
    quiet = [host for host, answer in answers.items() if not answer]
    if not quiet:
        return None
    do = "does" if len(quiet) == 1 else "do"
    why = "a firewall is between, or the address is wrong; 'ssh HOST true' must work from here."
    return f"{named(quiet)} {do} not answer on port {_PORT}, that of ssh: {why}"


def named(hosts: Sequence[str]) -> str:
    """``host a``, or ``hosts a, b and c``."""
    return f"host {hosts[0]}" if len(hosts) == 1 else f"hosts {', '.join(hosts[:-1])} and {hosts[-1]}"


def _answers(host: str) -> bool:
    """Whether a host answers on the port of ssh; to refuse is an answer as well."""
    for address in (_addresses(host) or [])[:1]:
        with contextlib.suppress(OSError):
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection((address, _PORT), _WAIT_S).close()
            return True
    return False


def _addresses(host: str) -> list[str] | None:
    """Its addresses, none where there are none; None where no name server answers in time.

    The resolver itself may take minutes, and cannot be interrupted.
    """
    found: Future[list[str]] = Future()

    def look_up() -> None:
        try:
            places = socket.getaddrinfo(host, _PORT, type=socket.SOCK_STREAM)
            found.set_result([str(place[0]) for *_, place in places])
        except (OSError, UnicodeError):  # a label that is empty or too long
            found.set_result([])

    threading.Thread(target=look_up, daemon=True).start()
    try:
        return found.result(_LOOK_UP_S)
    except TimeoutError:
        return None
