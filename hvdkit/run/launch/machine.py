"""The cores of this machine that a job may use."""

from __future__ import annotations

import os
from pathlib import Path

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


def cpu_quota(membership: str, directory: Path) -> float | None:
    """CPUs that the control groups of this process allow it, None without a limit.

    Args:
        membership: text of /proc/self/cgroup.
        directory: where the control groups are mounted.
    """
    quotas = []
    for entry in membership.splitlines():
        _, controllers, path = entry.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = directory / "cpu" if controllers else directory
        group = top / path.lstrip("/")
        for level in (group, *group.parents):
            if level.is_relative_to(top):
                quotas.append(_quota(level))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(group: Path) -> float | None:
    """One group's limit: version 2 has it in cpu.max, version 1 in two files."""
    try:
        limit, period = (group / "cpu.max").read_text(encoding="ascii").split()
    except OSError:
        try:
            limit = (group / "cpu.cfs_quota_us").read_text(encoding="ascii")
            period = (group / "cpu.cfs_period_us").read_text(encoding="ascii")
        except OSError:
            return None
    return None if limit == "max" or int(limit) < 0 else int(limit) / int(period)
