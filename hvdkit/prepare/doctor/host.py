"""Facts that need no framework: cores, accelerators, environment variables, ``mpirun``."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdkit.common import masked
from hvdkit.common.files import text_if_there
from hvdkit.common.programs import identify_mpi, version
from hvdkit.core import listeners

_RELEVANT = (
    "HOROVOD_", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "OMP_NUM_THREADS",
    "MKL_NUM_THREADS", "KERAS_BACKEND", "TF_USE_LEGACY_KERAS",
)  # fmt: skip
"""Beginnings of the names of variables that change a training; a report shows no others."""
WRITING = ("HOROVOD_TIMELINE", "HOROVOD_AUTOTUNE", "HOROVOD_AUTOTUNE_LOG", listeners.MONITOR)
"""Variables that have a training write files, which the few steps of a trial must not replace."""


@dataclass(frozen=True)
class MpiLibrary:
    """An MPI library that a process had loaded.

    Attributes:
        path: real path of the shared library.
        implementation: "Open MPI", "MPICH", ..., or "" when unknown.
        version: "5.0.11", or "" when unknown.
    """

    path: str
    implementation: str
    version: str

    def __str__(self) -> str:
        return f"{self.implementation or 'an unknown MPI'} {self.version}".strip()


@dataclass(frozen=True)
class MpiLauncher(MpiLibrary):
    """An ``mpirun`` or ``mpiexec``.

    Attributes:
        path: as found, not resolved.
        first_on_path: what a user gets who types the bare name.
    """

    first_on_path: bool = False


@dataclass(frozen=True)
class DoctorHost:
    """The machine, without its name.

    Attributes:
        platform: system and processor.
        cores: CPUs of the machine.
        affinity: CPUs that this process may run on.
        cpu_quota: CPUs' worth of time that the control group allows, None without a limit.
        shm_bytes: free bytes of /dev/shm, None when it does not exist.
        gpus: accelerators that the kernel's drivers show, whatever the frameworks see.
    """

    platform: str
    cores: int
    affinity: int
    cpu_quota: float | None = None
    shm_bytes: int | None = None
    gpus: tuple[str, ...] = ()

    @property
    def usable_cores(self) -> int:
        """Whole cores that a process can use at the same time, at least 1."""
        quota = self.affinity if self.cpu_quota is None else int(self.cpu_quota)
        return max(1, min(self.affinity, quota))


def relevant(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that change a training, by name, with secrets masked; HOROVOD_HOSTNAME is left out."""
    names = sorted(name for name in environ if name.startswith(_RELEVANT) and name != "HOROVOD_HOSTNAME")
    return {name: masked.variable(name, environ[name]) for name in names}


def look() -> DoctorHost:
    """The machine as this process sees it."""
    shared = Path("/dev/shm")  # noqa: S108
    return DoctorHost(
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=os.cpu_count() or 1,
        affinity=len(os.sched_getaffinity(0)),
        cpu_quota=cpu_quota(text_if_there(Path("/proc/self/cgroup")), Path("/sys/fs/cgroup")),
        shm_bytes=shutil.disk_usage(shared).free if shared.is_dir() else None,
        gpus=gpus(Path("/")),
    )


def cpu_quota(membership: str, root: Path) -> float | None:
    """CPUs' worth of time that the control groups of this process allow: the smallest on the way up.

    Args:
        membership: the text of ``/proc/self/cgroup``.
        root: ``/sys/fs/cgroup``.
    Returns:
        None without a limit.
    Source: kernel documentation, cgroup-v2 ``cpu.max`` and cgroup-v1 ``cpu.cfs_quota_us``.
    """
    limits = []
    for line in membership.splitlines():
        hierarchy, controllers, group = line.split(":", 2)
        if hierarchy == "0":
            limits += [_limit(directory, "cpu.max") for directory in _upwards(root, group)]
        elif "cpu" in controllers.split(","):
            mounts = {root / controllers, root / "cpu"}
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            limits += [_limit(directory, *names) for mount in mounts for directory in _upwards(mount, group)]
    return min((limit for limit in limits if limit is not None), default=None)


def _upwards(mount: Path, group: str) -> list[Path]:
    """The group's directory and all above it, the mount point last."""
    below = Path(group.lstrip("/"))
    return [mount / below, *(mount / parent for parent in below.parents)]


def _limit(directory: Path, *names: str) -> float | None:
    """Quota by period, which stand in one file or in two; without a limit the quota is "max" or -1."""
    words = " ".join(text_if_there(directory / name) for name in names).split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and all(map(str.isdigit, words)) else None


def gpus(root: Path) -> tuple[str, ...]:
    """Accelerators that the NVIDIA and AMD drivers show, whether or not this process may use them."""
    nvidia = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    models = [re.search(r"^\s*Model\s*:[ \t]*(\S.*)$", text_if_there(file), re.MULTILINE) for file in nvidia]
    names = [model[1].strip() if model else "NVIDIA GPU" for model in models]
    amd = sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"))
    # CPUs are nodes without SIMDs
    names += ["AMD GPU" for file in amd if re.search(r"simd_count +[1-9]", text_if_there(file))]
    return tuple(names)


def mpi_launchers(environ: Mapping[str, str], directories: Sequence[Path]) -> tuple[MpiLauncher, ...]:
    """``mpirun`` and ``mpiexec`` as typed by a user, then those in ``directories``, each once."""
    names = ("mpirun", "mpiexec")
    typed = [shutil.which(name, path=environ.get("PATH")) for name in names]
    own = [shutil.which(name, path=str(directory)) for directory in directories for name in names]
    found: dict[str, bool] = {}
    for candidate in (*typed, *own):
        if candidate:
            found.setdefault(candidate, candidate in typed)
    return tuple(
        MpiLauncher(path, *identify_mpi(version(Path(path), environ).text), first) for path, first in found.items()
    )
