"""The cores of this machine that a job may use."""

from __future__ import annotations

import os
from pathlib import Path

from hvdkit.prepare.doctor.host import cpu_quota

CGROUPS = Path("/sys/fs/cgroup")
CPUS = Path("/sys/devices/system/cpu")


def usable_cores() -> int:
    """Cores that this process may use, at least 1: physical cores in its affinity, at most its container's share."""
    cores = physical_cores(os.sched_getaffinity(0), CPUS)
    quota = cpu_quota(Path("/proc/self/cgroup").read_text(encoding="utf-8"), CGROUPS)
    return cores if quota is None else max(1, min(cores, int(quota)))


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
