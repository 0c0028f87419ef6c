"""Which way an array's bytes take to the other ranks: pure functions; the inside of ``hvdkit.arrays``.

================  =====================================================================================
path              what happens
================  =====================================================================================
host              the array is in the host's memory: MPI reduces it there
nccl              it is on a GPU, CuPy has NCCL, and every rank has a GPU of its own: NCCL on the GPU
cuda-aware mpi    it is on a GPU, and this MPI reads the memory of GPUs
through the host  it is on a GPU: copied to the host's memory, reduced there by MPI, and copied back
================  =====================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdkit.errors import InvalidArgumentError

HOST, NCCL, CUDA_AWARE, STAGED = "host", "nccl", "cuda-aware mpi", "through the host"

_SETTINGS = {  # what turns the reading of GPU memory on, where the library cannot be asked
    "MPICH_GPU_SUPPORT_ENABLED": "1",  # HPE Cray MPI
    "MV2_USE_CUDA": "1",  # MVAPICH2
}


@dataclass(frozen=True, slots=True)
class Machine:
    """What this process can send an array from a GPU with.

    Attributes:
        nccl: CuPy is here, with NCCL.
        cuda_aware: this MPI reads the memory of GPUs.
        own_gpus: no two ranks compute on the same GPU; NCCL refuses those.
    """

    nccl: bool = False
    cuda_aware: bool = False
    own_gpus: bool = True


def path(device: str, machine: Machine) -> str:
    """The way for an array on "host", "cuda" or "other", see the table at the top.

    Raises:
        InvalidArgumentError: a device that neither NumPy nor CuPy reads.
    """
    if device == "host":
        return HOST
    if device != "cuda":
        raise InvalidArgumentError(
            "an array is on a device that is neither the host nor a CUDA GPU; give it as a host array (numpy.asarray)."
        )
    if machine.nccl and machine.own_gpus:
        return NCCL
    return CUDA_AWARE if machine.cuda_aware else STAGED


def is_cuda_aware(query: int | None, environ: Mapping[str, str]) -> bool:
    """Whether MPI reads the memory of GPUs.

    Args:
        query: what ``MPIX_Query_cuda_support`` answers; None where the library has no such function.
        environ: the process environment.
    Source: Open MPI 5, "CUDA"; HPE Cray MPI, intro_mpi(3); MVAPICH2 2.3 user guide, 6.7.
    """
    if query is not None:
        return query == 1
    return any(environ.get(name) == value for name, value in _SETTINGS.items())


def own_gpus(identities: Sequence[str]) -> bool:
    """Whether no two ranks have the same GPU.

    Args:
        identities: host and bus id of each rank's GPU, by rank.
    """
    return len(set(identities)) == len(identities)


def sent_as(dtype: np.dtype[Any], where: str) -> np.dtype[Any]:
    """The type in which a gradient travels and is added up.

    Half and lower precisions are added up in float32: their own sums lose what the ranks differ by, and MPI has none.

    Raises:
        InvalidArgumentError: integers, and whatever else has no mean.
    """
    if dtype.itemsize <= 2 and (dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))):
        return np.dtype(np.float32)
    if dtype.kind in "fc":
        return dtype.newbyteorder("=")
    raise InvalidArgumentError(
        f"{where} is of type {dtype}, which has no mean; leave it out, or put None in its place (gradients are real or "
        "complex numbers)."
    )


def groups(keys: Sequence[tuple[str, np.dtype[Any]]]) -> dict[tuple[str, np.dtype[Any]], list[int]]:
    """Which arrays share a buffer: the positions of those with the same path and the same type.

    Args:
        keys: path and type of each array.
    """
    found: dict[tuple[str, np.dtype[Any]], list[int]] = {}
    for position, key in enumerate(keys):
        found.setdefault(key, []).append(position)
    return found
