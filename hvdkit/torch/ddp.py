"""``torch.distributed`` under any launcher, for scripts with PyTorch's own DDP; Horovod need not be started."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from hvdkit.errors import InvalidArgumentError, LauncherError
from hvdkit.steps import bootstrap, launchers, meeting, starting
from hvdkit.steps.launchers import Launched
from hvdkit.steps.topology import Topology
from hvdkit.torch import private
from hvdkit.torch.state import RANKS

_stores: list[Any] = []  # rank 0's serves the others as long as the process lives
_groups: list[Any] = []  # kept: freed by its last owner, a model in DDP, one can wait for a thread that needs the GIL


def init_process_group(backend: str | None = None, timeout: float = 60.0) -> Topology:
    """Start ``torch.distributed`` from whatever launcher's environment this is, and say who this process is.

    The address is that of rank 0's host and the port a free one that rank 0 tells the others: over the host list of the
    launcher, over Horovod where it was started before, or over mpi4py. Nothing has to be set by hand. Without a
    launcher: a job of one.

    Args:
        backend: of ``torch.distributed``; default: "nccl" where PyTorch sees a GPU, else "gloo". Ranks that share a
            GPU (HOROVOD_GPU_OPERATIONS=CPU) take "gloo", too: NCCL refuses them.
        timeout: seconds until all ranks must have met.
    Returns:
        The job, for ``pin_device``, ``scale_lr``, ``shard``, ...
    Raises:
        InvalidArgumentError: it was started already.
        LauncherError: the launcher's environment is incomplete, or the ranks do not find each other.
    """
    if dist.is_initialized():
        raise InvalidArgumentError("torch.distributed is started already; call init_process_group once.")
    shares_gpu = os.environ.get("HOROVOD_GPU_OPERATIONS") == "CPU"
    backend = backend or ("nccl" if torch.cuda.is_available() and not shares_gpu else "gloo")
    atexit.register(_end_workers)
    launched = launchers.detect(os.environ)
    if launched is None:
        starting.say_alone()
    if launched is None or launched.size == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        _groups.append(dist.group.WORLD)
        return Topology(0, 1, launcher=launched.launcher if launched else "none")
    met = _meet(launched, timeout)
    rank, size = launched.rank, len(met.hosts)
    if backend == "gloo" and "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = bootstrap.interface_of(met.own_address)
    wait = timedelta(seconds=timeout)
    store = _stores[0] if rank == 0 else TCPStore(met.address, met.told["port"], size, False, wait)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    _groups.append(dist.group.WORLD)
    return Topology(rank, size, *met.place(rank), launched.launcher)


def _end_workers() -> None:
    """Leave the process group, and wait until Gloo's worker threads rest, for at most 30 s.

    One that drops its last tensor while the interpreter ends needs the GIL, and the process is then aborted (PyTorch
    2.13, its pull request 179291). A model in DDP keeps the workers alive after ``destroy_process_group``.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    private.free_cycles()
    end, rested = time.monotonic() + 30, 0
    while rested < 2 and time.monotonic() < end:
        time.sleep(0.005)  # without the GIL: a worker that waits for it goes on
        rested = 0 if _busy_workers() else rested + 1


def _busy_workers() -> bool:
    """Whether the kernel says of a thread of Gloo's pool that it runs or could (Linux, proc(5); elsewhere False)."""
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # a thread that ended since
            named, _, rest = (task / "stat").read_text().rpartition(")")
            if "(pt_gloo" in named and rest.split()[0] != "S":
                return True
    return False


def _meet(launched: Launched, timeout: float) -> meeting.Meeting:
    """The ranks' hosts and where rank 0's store is, told over what this launcher, or the program before, has begun."""
    if bootstrap.can_meet(launched, os.environ):
        return bootstrap.meet(launched, os.environ, _serve, "ddp", timeout)
    if hvd.is_initialized():
        broadcast = functools.partial(RANKS.broadcast_object, name="hvdkit.process_group")
        return _meet_over(hvd.rank(), hvd.allgather_object, broadcast)
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise LauncherError(
            f"{launched.launcher}'s environment does not say where rank 0 is, and mpi4py, which would, cannot be "
            f"imported ({error}); run `pip install mpi4py` with the launcher's MPI loaded."
        ) from error
    comm = MPI.COMM_WORLD
    if comm.Get_rank() != launched.rank or launched.size not in (None, comm.Get_size()):
        raise LauncherError(
            f"{launched.launcher} started rank {launched.rank}, mpi4py sees rank {comm.Get_rank()} of "
            f"{comm.Get_size()}: it was built with another MPI; run `pip install --force-reinstall --no-binary "
            "mpi4py mpi4py`."
        )
    return _meet_over(launched.rank, comm.allgather, comm.bcast)


def _meet_over(rank: int, gather: Callable[[str], list[str]], broadcast: Callable[[Any], Any]) -> meeting.Meeting:
    by_rank = tuple(gather(socket.gethostname()))
    own = "127.0.0.1" if len(set(by_rank)) == 1 else bootstrap.own_address(*by_rank)
    address = broadcast(own)
    told = broadcast(_serve(address, by_rank) if rank == 0 else None)
    return meeting.Meeting(by_rank, address, own, told)


def _serve(address: str, by_rank: Sequence[str]) -> dict[str, Any]:
    listener = socket.create_server((address, 0), backlog=1024)  # TCPStore itself would listen on all interfaces
    port = listener.getsockname()[1]
    store = TCPStore(address, port, len(by_rank), True, wait_for_workers=False, master_listen_fd=listener.detach())
    _stores[:] = [store]
    return {"port": store.port}
