"""Which hosts a job has, from what its batch system or launcher tells each process."""

from __future__ import annotations

import itertools
import re
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from hvdkit.errors import LauncherError

_BRACKETS = re.compile(r"\[([^\]]*)\]")
_PART = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
"""What is between two commas that are not inside brackets."""
_NODELISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_NODEFILES = ("PBS_NODEFILE", "COBALT_NODEFILE")


def expand(hostlist: str) -> list[str]:
    """The hosts of a Slurm host list, in its order: ``n[1-3,7],gpu-[01-02]``.

    Raises:
        LauncherError: brackets that do not match, or a range that is none.
    Source: Slurm, scontrol(1), "show hostnames".
    """
    if _PART.sub("", hostlist).strip(","):
        raise LauncherError(f"the host list {hostlist!r} has brackets that do not match.")
    hosts: list[str] = []
    for part in filter(None, map(str.strip, _PART.findall(hostlist))):
        texts = _BRACKETS.split(part)  # every second one stood between brackets
        choices = [_numbers(text, hostlist) if place % 2 else [text] for place, text in enumerate(texts)]
        hosts += map("".join, itertools.product(*choices))
    return hosts


def _numbers(ranges: str, hostlist: str) -> list[str]:
    names = []
    for piece in ranges.split(","):
        first, dash, last = piece.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or int(first) > int(last):
            raise LauncherError(f"the host list {hostlist!r} has {piece!r} where a number or a range is due.")
        names += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return names


def address(host: str) -> str:
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


def of_job(environ: Mapping[str, str]) -> list[str]:
    """The hosts that the batch system gave, each once, in its order; empty where nothing says so.

    They stand in Slurm's node lists, or in the file that PBS_NODEFILE, COBALT_NODEFILE or LSB_DJOB_RANKFILE names.

    Raises:
        LauncherError: a list or file that cannot be read.
    """
    for name in _NODELISTS:
        if environ.get(name):
            return expand(environ[name])
    for name in _NODEFILES:
        if environ.get(name):
            return list(dict.fromkeys(_lines(name, environ[name])))
    if environ.get("LSB_DJOB_RANKFILE"):
        slots = _lines("LSB_DJOB_RANKFILE", environ["LSB_DJOB_RANKFILE"])  # a line for each slot
        counts = Counter(slots)
        # With jsrun, the first line is the service node of the batch script: one slot before hosts of many.
        service_node = slots[0] if slots and counts[slots[0]] == 1 < max(counts.values()) else None
        return [host for host in counts if host != service_node]
    return []


def _lines(name: str, file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="utf-8").split()
    except OSError as error:
        raise LauncherError(f"{name} names {file}, which cannot be read: {error.strerror}.") from error
