"""Starting Horovod, and confirming that it sees the job that the launcher started (step 1)."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from hvdkit.errors import LauncherError, TopologyMismatchError
from hvdkit.steps import bootstrap, launchers, stalls
from hvdkit.steps.bootstrap import loaded_mpi
from hvdkit.steps.topology import Topology

_RANK_PROCESS = "HVDKIT_RANK_PROCESS"
_LOG = logging.getLogger("hvdkit")


def start(horovod: Any, environ: Mapping[str, str]) -> Topology:
    """Start Horovod and say who this process is, confirmed against the launcher; a job of one without a launcher.

    Where a launcher started several ranks and MPI would leave each of them alone (srun without a PMI that this MPI
    understands), or Horovod was built without MPI, the ranks are connected over Gloo, unless HOROVOD_CONTROLLER=mpi.

    Args:
        horovod: Horovod's module for a framework (``horovod.torch``, ``horovod.tensorflow``), or ``Mpi4py``.
    Raises:
        LauncherError: the launcher's environment is incomplete, or this is a worker that a rank started.
        TopologyMismatchError: the launcher and Horovod disagree about rank or size.
    """
    _require_no_worker(environ)
    launched = launchers.detect(environ)
    stalls.hand_in_stacks_when_asked()
    with stalls.reported_init():
        if launched is not None and bootstrap.is_needed(horovod, launched, environ):
            os.environ.update(bootstrap.connect(launched, environ))
        elif environ.get("HOROVOD_CONTROLLER", "").lower() == "gloo":
            # Else collectives go through an MPI that this Horovod has not started, and that ends the process.
            os.environ.setdefault("HOROVOD_CPU_OPERATIONS", "gloo")
        if not horovod.is_initialized():  # once more, PyTorch's would forget what a thread of hvdkit waits for
            horovod.init()
    os.environ[_RANK_PROCESS] = str(os.getpid())  # for workers that this process starts
    world = of(horovod, launched.launcher if launched else "none")
    if launched is None:
        if world.size == 1:
            say_alone()
        return world
    if launchers.is_elastic(environ):  # the ranks may have changed since this process was started
        return world
    library = (loaded_mpi() or "MPI") if horovod.mpi_enabled() else "Gloo"
    return _confirm(world, launched.rank, launched.size, launched.launcher, library)


class Mpi4py:
    """What ``start`` asks of Horovod, answered by mpi4py; ``library`` gives its MPI, which the first call starts."""

    mpi_built = mpi_enabled = staticmethod(lambda: True)
    gloo_built = is_initialized = staticmethod(lambda: False)

    def __init__(self, library: Callable[[], Any]) -> None:
        self._library = library

    def init(self) -> None:
        """Start MPI, and find the ranks that share this host, and those of this place on all hosts."""
        mpi = self._library()
        everyone = mpi.COMM_WORLD
        host = everyone.Split_type(mpi.COMM_TYPE_SHARED)
        across = everyone.Split(host.Get_rank(), everyone.Get_rank())
        self.rank, self.size = everyone.Get_rank, everyone.Get_size
        self.local_rank, self.local_size = host.Get_rank, host.Get_size
        self.cross_rank, self.cross_size = across.Get_rank, across.Get_size


def _require_no_worker(environ: Mapping[str, str]) -> None:
    """Raise LauncherError in a process that imports a rank's script again, as multiprocessing's spawn has it.

    With the rank's environment it would be that rank to MPI a second time, which ends the first by a crash.
    """
    imported_again = getattr(sys.modules.get("__mp_main__"), "__name__", "") == "__mp_main__"
    rank = environ.get(_RANK_PROCESS)
    if imported_again and rank is not None:
        raise LauncherError(
            f"init() ran in a worker (process {os.getpid()}) of a rank (process {rank}): a worker that multiprocessing "
            'spawns imports the script again. Put init() and what follows below `if __name__ == "__main__":`, or '
            'start workers by fork (DataLoader: multiprocessing_context="fork").'
        )


def say_alone() -> None:
    """Log that this process trains alone, which several processes would each do if their launcher is not known."""
    _LOG.warning(
        "hvdkit: no launcher started this process (known: %s); it trains alone, as rank 0 of 1.",
        ", ".join(launchers.KNOWN),
    )


def of(horovod: Any, launcher: str) -> Topology:
    """The place of this process as Horovod, which has been started, says."""
    return Topology(
        rank=horovod.rank(),
        size=horovod.size(),
        local_rank=horovod.local_rank(),
        local_size=horovod.local_size(),
        cross_rank=horovod.cross_rank(),
        cross_size=horovod.cross_size(),
        launcher=launcher,
    )


def _confirm(horovod: Topology, rank: int, size: int | None, launcher: str, library: str) -> Topology:
    """Horovod's topology, over ``library``, unless the launcher said another rank, or size where it says one."""
    if horovod.rank == rank and size in (None, horovod.size):
        return horovod
    started = f"rank {rank}" if size is None else f"rank {rank} of {size}"
    seen = f"{launcher} started {started}, but Horovod (over {library}) sees rank {horovod.rank} of {horovod.size}"
    if horovod.size == 1:
        raise TopologyMismatchError(
            f"{seen}: every process would train alone. {launcher} does not belong to the {library} that Horovod "
            "was built with; start the job with `hvdkit launch` or that library's own mpirun, or rebuild with "
            "`hvdkit install --force` after loading the launcher's MPI (`hvdkit doctor` shows both)."
        )
    raise TopologyMismatchError(
        f"{seen}. Two launchers are nested or variables of an outer job were inherited; unset them or start the job "
        "with `hvdkit launch`."
    )
