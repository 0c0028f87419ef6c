"""Which hosts a job runs on and how many ranks each takes: from the options, a host file, or the batch job."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdkit.common import files
from hvdkit.common.commands import shortened
from hvdkit.errors import InvalidArgumentError
from hvdkit.run.launch.model import Host
from hvdkit.steps import hosts as job_hosts

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_OPTION = re.compile(rf"({_NAME})(?::([1-9][0-9]*))?")
_LINE = re.compile(rf"({_NAME})(?:(?::|\s+slots\s*=\s*)([1-9][0-9]*))?")
_OPERATOR = ("OMPI_MCA_orte_default_hostfile", "I_MPI_HYDRA_HOST_FILE", "HYDRA_HOST_FILE")
"""Names the host file in the launcher pod of the Kubeflow MPI Operator, for Open MPI, Intel MPI and MPICH."""
_LOCAL = ("localhost", "127.0.0.1")

Named = tuple[str, int | None]
"""A host and its slots, None where nothing says how many."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The hosts of a job.

    Attributes:
        hosts: with the ranks that each may take; () when there is none but this machine.
        chosen: the user named them.
    """

    hosts: tuple[Host, ...] = ()
    chosen: bool = False

    @property
    def ppn(self) -> int | None:
        """The ranks on each host where the user named several with the same number of slots."""
        slots = {host.slots for host in self.hosts}
        return slots.pop() if self.chosen and len(slots) == 1 else None


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
        found.append((match[1], int(match[2]) if match[2] else None))
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
    found: list[Named] = []
    for number, line in enumerate(lines, start=1):
        entry = line.partition("#")[0].strip()
        match = _LINE.fullmatch(entry)
        if match is not None:
            found.append((match[1], int(match[2]) if match[2] else None))
        elif entry:
            raise InvalidArgumentError(
                f"--hostfile {file}, line {number}: {shortened(line.strip())} is no HOST, HOST:SLOTS or "
                "HOST slots=SLOTS."
            )
    if not found:
        raise InvalidArgumentError(f"--hostfile {file} names no host; write one HOST:SLOTS a line.")
    return _merged(found, f"--hostfile {file}")


def of_operator(environ: Mapping[str, str]) -> list[Named] | None:
    """The workers of a Kubernetes ``MPIJob``, seen from its launcher pod; None anywhere else.

    Raises:
        InvalidArgumentError: see ``read``.
    Source: kubeflow/mpi-operator, pkg/controller/mpi_job_controller.go, ``newLauncherPodTemplate``.
    """
    files = [environ[name] for name in _OPERATOR if environ.get(name)]
    return read(Path(files[0])) if files and environ.get("K_MPI_JOB_ROLE") == "launcher" else None


def _merged(found: Sequence[Named], source: str) -> list[Named]:
    """Each host once; a bare name that comes several times has that many slots."""
    slots: dict[str, int | None] = {}
    for name, count in found:
        if name not in slots:
            slots[name] = count
        elif count is None and all(other is None for same, other in found if same == name):
            slots[name] = (slots[name] or 1) + 1
        else:
            raise InvalidArgumentError(f"{source} names host {name!r} twice; give it once, with all its slots.")
    return list(slots.items())


def asked(
    n: int, ppn: int | None, hosts: str | None, hostfile: Path | None, environ: Mapping[str, str], *, anywhere: bool
) -> Placement:
    """``place`` on this machine for what ``--hosts`` or ``--hostfile`` says.

    Raises:
        InvalidArgumentError: hosts are named twice, or do not fit.
        LauncherError: the batch job's list cannot be read.
    """
    if hosts is not None and hostfile is not None:
        raise InvalidArgumentError("--hosts and --hostfile say the same; give one of them.")
    given = None if hosts is None else parse(hosts)
    if hostfile is not None:
        given = read(hostfile)
    return place(n, ppn, given, environ, socket.gethostname(), anywhere=anywhere)


def place(
    n: int,
    ppn: int | None,
    given: Sequence[Named] | None,
    environ: Mapping[str, str],
    hostname: str,
    *,
    anywhere: bool = False,
) -> Placement:
    """The hosts of a job of ``n`` ranks.

    Args:
        n: number of ranks.
        ppn: ranks on each host, None where nothing limits them but the slots.
        given: what the user named, None for the hosts of the batch job or the workers of the MPIJob, if there is one.
        environ: the environment, which names these.
        hostname: the name of this machine.
        anywhere: the launcher takes any host of the batch job unless it is told, so that this machine, too, is named.
    Raises:
        InvalidArgumentError: more ranks than slots, or a host that the batch job does not have.
        LauncherError: the batch job's list cannot be read.
    """
    allocation = job_hosts.of_job(environ)
    if given is not None and allocation:
        _check_allocated(given, allocation, hostname)
    named = [(name, None) for name in allocation] or of_operator(environ) or [] if given is None else list(given)
    if not named:
        return Placement()
    hosts = _filled(n, ppn, named)
    room = sum(host.slots for host in hosts)
    if n > room:
        limit = "" if ppn is None else f" with --ppn {ppn}"
        raise InvalidArgumentError(
            f"{n} ranks are more than the {room} slots of {_listed([str(host) for host in hosts])}{limit}; ask for "
            "fewer ranks (-n), or for more hosts or slots."
        )
    if anywhere and given is not None:
        hosts = tuple(Host(hostname, host.slots) if host.name in _LOCAL else host for host in hosts)
    elif all(is_here(host.name, hostname) for host in hosts):
        hosts = ()
    return Placement(hosts, chosen=given is not None)


def _filled(n: int, ppn: int | None, named: Sequence[Named]) -> tuple[Host, ...]:
    """Slots for every host: what is said, at most ``ppn``; where nothing is said an even share."""
    share = ppn or -(-n // len(named))
    return tuple(Host(name, min(slots or share, ppn or slots or share)) for name, slots in named)


def _check_allocated(given: Sequence[Named], allocation: Sequence[str], hostname: str) -> None:
    known = {name.split(".")[0] for name in allocation}
    for name, _ in given:
        own = hostname if name in _LOCAL else name
        if own.split(".")[0] not in known:
            raise InvalidArgumentError(
                f"host {name!r} is not one of this batch job's hosts ({_listed(allocation)}); name one of these, or "
                "leave --hosts and --hostfile out to use all of them."
            )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:6])} and {len(names) - 6} more"


def is_here(name: str, hostname: str) -> bool:
    """Whether a host is this machine, by its name."""
    return name in _LOCAL or name.split(".")[0] == hostname.split(".")[0]
