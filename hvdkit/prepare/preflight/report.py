"""What one rank says of itself."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from hvdkit.common.ask import ask
from hvdkit.errors import LauncherError
from hvdkit.prepare.install.find_frameworks import distribution
from hvdkit.steps import launchers
from hvdkit.steps.device import cpu_threads_here

PACKAGES = ("hvdkit", "horovod", "torch", "tensorflow", "tensorflow-cpu", "keras", "jax", "mpi4py", "numpy")
_NVIDIA_SECONDS = 20


@dataclass(frozen=True)
class Place:
    """A rank and the number of ranks, as one of the parties sees them.

    Attributes:
        rank, size: None where it could not be asked.
        error: why; "" where it could.
    """

    rank: int | None = None
    size: int | None = None
    error: str = ""


@dataclass(frozen=True)
class RankReport:
    """One rank of a job.

    Attributes:
        host: name of its host.
        pid: its process.
        launcher: what started it, "none" without a launcher.
        launched, horovod, mpi: its place by the launcher's environment, by Horovod and by mpi4py.
        local_rank: its rank among those of its host, by the launcher or Horovod; None where neither says.
        library: what Horovod communicates through.
        cores: the cores that it may run on.
        threads: compute threads that it would use.
        devices: identities of the accelerators that it sees, in their order.
        versions: of Python and the packages that it would import.
        free_bytes: by directory, the space left for it.
        clock: seconds since 1970, taken when all ranks had met.
    """

    host: str
    pid: int
    launcher: str
    launched: Place
    horovod: Place = Place()
    mpi: Place = Place()
    local_rank: int | None = None
    library: str = ""
    cores: tuple[int, ...] = ()
    threads: int = 1
    devices: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    free_bytes: Mapping[str, int] = field(default_factory=dict)
    clock: float = 0.0

    also: ClassVar[tuple[str, ...]] = ("rank", "device")
    """Properties that JSON has, too."""

    @property
    def rank(self) -> int:
        """The rank that it was started as."""
        return next((place.rank for place in (self.launched, self.horovod) if place.rank is not None), 0)

    @property
    def size(self) -> int:
        """The number of ranks that were started."""
        return next((place.size for place in (self.launched, self.horovod) if place.size is not None), 1)

    @property
    def device(self) -> str | None:
        """The accelerator that step 2 gives it; None without one, or when there are too few."""
        if len(self.devices) == 1:
            return self.devices[0]
        if self.local_rank is None or self.local_rank >= len(self.devices):
            return None
        return self.devices[self.local_rank]


def look(environ: Mapping[str, str]) -> RankReport:
    """This process before it has met the others."""
    found, launched = None, Place()
    try:
        if found := launchers.detect(environ):
            launched = Place(found.rank, found.size)
    except LauncherError as error:
        launched = Place(error=str(error))
    given = environ.get("OMP_NUM_THREADS", "")
    local_size = found.local_size if found else None
    return RankReport(
        host=socket.gethostname(),
        pid=os.getpid(),
        launcher=found.launcher if found else "none",
        launched=launched,
        local_rank=found.local_rank if found else None,
        cores=tuple(sorted(os.sched_getaffinity(0))),
        threads=int(given) if given.isdecimal() and int(given) else cpu_threads_here(local_size or 1),
        devices=_devices(environ),
        versions=_versions(),
        free_bytes={path: shutil.disk_usage(path).free for path in (str(Path.cwd()), tempfile.gettempdir())},
    )


def _versions() -> dict[str, str]:
    found = {name: package.version for name in PACKAGES if (package := distribution(name))}
    return {"Python": platform.python_version(), "executable": sys.executable, **found}


def _devices(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Identities of the NVIDIA GPUs that CUDA would show this process.

    Source: CUDA C++ programming guide, CUDA_VISIBLE_DEVICES: what follows the first entry that names none is ignored.
    """
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return ()
    answer = ask([program, "--query-gpu=uuid", "--format=csv,noheader"], seconds=_NVIDIA_SECONDS)
    listed = [word for word in answer.text.split() if word.startswith("GPU-")] if answer.ok else []
    return visible(listed, environ.get("CUDA_VISIBLE_DEVICES"))


def visible(listed: list[str], chosen: str | None) -> tuple[str, ...]:
    """The devices among ``listed`` that CUDA_VISIBLE_DEVICES leaves, in its order."""
    if chosen is None:
        return tuple(listed)
    devices = []
    for entry in (part.strip() for part in chosen.split(",")):
        matches = [listed[int(entry)]] if entry.isdecimal() and int(entry) < len(listed) else []
        matches += [uuid for uuid in listed if entry and not entry.isdecimal() and uuid.startswith(entry)]
        if len(matches) != 1:
            break
        devices += matches
    return tuple(devices)
