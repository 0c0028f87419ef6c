"""Hydra, the mpirun of MPICH and of Intel MPI, on one machine and on several."""

from __future__ import annotations

from hvdkit.errors import InvalidArgumentError
from hvdkit.run.launch.model import LauncherLine, LaunchFacts, Mpi, Request, Setting

RANK_VARIABLE = "PMI_RANK"


def line(request: Request, facts: LaunchFacts, mpi: Mpi) -> LauncherLine:
    """The command line of mpirun up to the user's command. Hydra starts any number of ranks and passes on the
    whole environment.

    Raises:
        InvalidArgumentError: hosts with unequal slots under Intel MPI.
    """
    settings = [Setting("one process per rank", ("-n", str(request.n))), *_hosts(request, mpi)]
    settings.append(_placement(request, facts, mpi))
    return LauncherLine(mpi.mpirun, tuple(settings), RANK_VARIABLE)


def _hosts(request: Request, mpi: Mpi) -> list[Setting]:
    if not request.hosts:
        return []
    why = "hosts, and the ranks that each may take"
    if mpi.implementation != "Intel MPI":
        return [Setting(why, ("-hosts", ",".join(map(str, request.hosts))))]
    slots = {host.slots for host in request.hosts}
    if len(slots) > 1:
        raise InvalidArgumentError(
            f"Intel MPI starts as many ranks on every host, got {', '.join(map(str, request.hosts))}; give all hosts "
            "the same number of slots."
        )
    names = ",".join(host.name for host in request.hosts)
    return [Setting(why, ("-hosts", names, "-ppn", str(slots.pop())))]


def _placement(request: Request, facts: LaunchFacts, mpi: Mpi) -> Setting:
    intel = mpi.implementation == "Intel MPI"
    if request.depth is not None and request.bind in ("none", "core"):
        why = f"--depth {request.depth}: each rank is tied to so many cores"
        return Setting(why, ("-bind-to", f"core:{request.depth}"))
    if request.bind == "core":
        share = max(1, facts.cores // max((host.slots for host in request.hosts), default=request.n))
        return Setting(f"--bind core: {facts.cores} cores for {request.n} ranks", ("-bind-to", f"core:{share}"))
    if request.bind != "none":
        why = f"--bind {request.bind}: ranks are dealt out to them in turn and stay there"
        if intel:  # which ties to a core whatever -bind-to says
            return Setting(why, variables={"I_MPI_PIN_DOMAIN": request.bind})
        return Setting(why, ("-bind-to", request.bind))
    why = "tied to one core, Horovod's background thread would fight the training thread"
    return Setting(why, variables={"I_MPI_PIN": "0"}) if intel else Setting(why, ("-bind-to", "none"))
