"""What this machine has for a job: cores that it may use, and what its Horovod was built with."""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import socket
from pathlib import Path

from hvdkit.common.ask import ask
from hvdkit.errors import LaunchError
from hvdkit.prepare.doctor.host import cpu_quota
from hvdkit.prepare.install.record import horovod_directory, mpi_bin, read_record
from hvdkit.run.launch.model import Horovod
from hvdkit.steps import meeting

CGROUPS = Path("/sys/fs/cgroup")
_FILES, _FILES_OF_A_RANK = 20, 8
"""Open MPI's mpirun starts 2 ranks with 32 open files, not with 28."""
CPUS = Path("/sys/devices/system/cpu")
# The first framework whose part of Horovod loads answers for all: they share one build of the controllers.
_PROBE = """
import importlib
reasons = []
for framework in ("torch", "tensorflow"):
    try:
        module = importlib.import_module("horovod." + framework)
        print(f"\\nhvdkit: built {bool(module.mpi_built())} {bool(module.gloo_built())}")
        break
    except Exception as error:
        reasons.append(f"horovod.{framework}: {error}".splitlines()[0])
else:
    raise SystemExit("\\nhvdkit: failed " + "; ".join(reasons))
"""
_ANSWER = re.compile(r"^hvdkit: (?:built (\w+) (\w+)|failed (.*))$", re.MULTILINE)


def installed_horovod(python: Path) -> Horovod | None:
    """What Horovod was built with: from the record of ``hvdkit install``, else by loading it in another process.

    Args:
        python: the interpreter to load it in.
    Returns:
        None when it is not installed.
    Raises:
        LaunchError: it is installed and cannot be loaded.
        InstallError: its build record cannot be read.
    """
    if horovod_directory() is None:
        return None
    if (recorded := recorded_horovod()) is not None:
        return recorded
    answer = ask([str(python), "-c", _PROBE])
    match = _ANSWER.search(answer.text)
    if match is None or match[3] is not None:
        reason = answer.problem if match is None else match[3]
        raise LaunchError(
            f"Horovod is installed but cannot be loaded ({reason}); run 'hvdkit doctor', or name a launcher for a "
            "command that does not use Horovod: --launcher mpirun."
        )
    return Horovod(match[1] == "True", match[2] == "True")


def recorded_horovod() -> Horovod | None:
    """The same from the record alone; None without one.

    Raises:
        InstallError: the build record cannot be read.
    """
    record = read_record()
    return None if record is None else Horovod(record.mpi is not None, record.gloo, mpi_bin(record))


def why_no_rank_starts(n: int) -> str:
    """What keeps any launcher from starting ``n`` ranks here, for the middle of a sentence; "" for nothing."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files < _FILES + _FILES_OF_A_RANK * n:
        return f": this process may have {files} files open, too few for {n} ranks (raise it: ulimit -n)"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
            return ""
    except OSError as error:
        return f": this machine has no loopback interface ({error.strerror}; 'ip link set lo up')"


def usable_cores() -> int:
    """Cores that this process may use, at least 1: physical cores in its affinity, at most its container's share."""
    cores = physical_cores(os.sched_getaffinity(0), CPUS)
    quota = cpu_quota(Path("/proc/self/cgroup").read_text(encoding="utf-8"), CGROUPS)
    return cores if quota is None else max(1, min(cores, int(quota)))


def free_port() -> int:
    """A port on which nothing listens here, and that the system gives to no outgoing connection.

    Raises:
        LaunchError: a hundred of them are taken.
    """
    for port in random.sample(meeting.PORTS, 100):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise LaunchError(f"the ports {meeting.PORTS[0]} to {meeting.PORTS[-1]} of this machine are taken.")


def physical_cores(cpus: set[int], directory: Path) -> int:
    """Number of physical cores behind the logical ``cpus``; hyperthreads of one core count once.

    Args:
        directory: the kernel's description of the CPUs, as in /sys/devices/system/cpu.
    """
    return len({_siblings(cpu, directory) for cpu in cpus})


def _siblings(cpu: int, directory: Path) -> str:
    try:
        return (directory / f"cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
    except OSError:
        return str(cpu)  # a virtual machine that does not tell: a core of its own
