"""Step 2: one accelerator for each process, or its share of the CPU cores."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from hvdkit.errors import InvalidArgumentError, LauncherError

_GPU = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")
"""An index, or the beginning of a UUID, of a part of a card (MIG) too. Slurm writes NoDevFiles where a job has none."""


def require_wish(kind: str, threads: int | None) -> None:
    """Raise InvalidArgumentError for what no framework binding's ``pin_device`` can do."""
    if kind not in ("auto", "gpu", "cpu"):
        raise InvalidArgumentError(f"kind must be auto, gpu or cpu, got {kind!r}.")
    if threads is not None and threads < 1:
        raise InvalidArgumentError(f"threads must be at least 1, got {threads}.")


def require_gpu(kind: str, visible: int, who: str, look: str = "hvdkit doctor") -> None:
    """Raise InvalidArgumentError for kind "gpu" where there is none.

    Args:
        visible: GPUs that this process can see.
        who: sees none, such as "PyTorch".
        look: the command that says why.
    """
    if kind == "gpu" and visible == 0:
        raise InvalidArgumentError(
            f"a GPU was asked for, but {who} sees none; use kind='cpu', or check CUDA_VISIBLE_DEVICES and `{look}`."
        )


def device_index(local_rank: int, visible: int) -> int:
    """Index of the accelerator that this process uses, among those it can see.

    Args:
        local_rank: rank among the processes of this host.
        visible: number of accelerators that this process can see, > 0. A launcher that binds one accelerator to
            each process (``srun --gpus-per-task=1``, PALS ``--gpu-bind``) makes exactly one visible: index 0.
    Raises:
        InvalidArgumentError: a negative local rank, or no visible device.
        LauncherError: more processes on this host than devices.
    """
    if local_rank < 0:
        raise InvalidArgumentError(f"local_rank must be >= 0, got {local_rank}.")
    if visible < 1:
        raise InvalidArgumentError(f"visible must be at least 1 device, got {visible}; without one, train on the CPU.")
    if visible == 1:
        return 0
    if local_rank >= visible:
        raise LauncherError(
            f"local rank {local_rank} has no accelerator of its own: this host shows {visible}; start at "
            f"most {visible} processes per host (--ppn), or bind one device to each process (CUDA_VISIBLE_DEVICES)."
        )
    return local_rank


def visible_gpus(environ: Mapping[str, str], driver: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """The NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; ``driver`` lists all of the host.

    Source: CUDA C++ programming guide, environment variables: the list ends before the first invalid entry.
    """
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(number) for number in range(len(list(driver.glob("*"))))]
    names = [name.strip() for name in named.split(",")]
    end = next((number for number, name in enumerate(names) if not _GPU.fullmatch(name)), len(names))
    return names[:end]


def threads_asked(environ: Mapping[str, str]) -> int | None:
    """The compute threads that OMP_NUM_THREADS asks for; None where it is not set, or to no positive number.

    Source: OpenMP API specification, OMP_NUM_THREADS: a list has a number for each level of nesting, the first counts.
    """
    first = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def cpu_threads(local_size: int, usable: int, installed: int) -> int:
    """Compute threads for one process, so that the processes of a host share its cores: at least 1.

    Args:
        local_size: processes on this host, > 0.
        usable: cores that this process may run on (its CPU affinity).
        installed: cores of the host. A launcher that binds each process has divided them already: fewer are usable
            than installed, and each process takes all that it was given.
    Raises:
        InvalidArgumentError: a number below 1.
    """
    if min(local_size, usable, installed) < 1:
        raise InvalidArgumentError(
            f"local_size, usable and installed must be at least 1, got {local_size}, {usable} and {installed}."
        )
    return usable if usable < installed else max(1, usable // local_size)


def cpu_threads_here(local_size: int) -> int:
    """``cpu_threads`` for this process, from its CPU affinity and the cores of this host."""
    usable = len(os.sched_getaffinity(0))
    return cpu_threads(local_size, usable, os.cpu_count() or usable)
