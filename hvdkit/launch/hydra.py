"""Hydra, the mpirun of MPICH and of Intel MPI, on one machine."""

from __future__ import annotations

from hvdkit.launch.model import Facts, LauncherLine, Mpi, Request, Setting

RANK_VARIABLE = "PMI_RANK"


def line(request: Request, facts: Facts, mpi: Mpi) -> LauncherLine:
    """The command line of mpirun up to the user's command. Hydra starts any number of ranks and passes on the
    whole environment.
    """
    settings = [Setting("one process per rank", ("-n", str(request.n))), _placement(request, facts, mpi)]
    return LauncherLine(mpi.mpirun, tuple(settings), RANK_VARIABLE)


def _placement(request: Request, facts: Facts, mpi: Mpi) -> Setting:
    intel = mpi.implementation == "Intel MPI"
    if request.bind == "core":
        share = facts.cores // request.n
        return Setting(f"--bind core: {facts.cores} cores for {request.n} ranks", ("-bind-to", f"core:{share}"))
    if request.bind != "none":
        why = f"--bind {request.bind}: ranks are dealt out to them in turn and stay there"
        if intel:  # which ties to a core whatever -bind-to says
            return Setting(why, variables={"I_MPI_PIN_DOMAIN": request.bind})
        return Setting(why, ("-bind-to", request.bind))
    why = "tied to one core, Horovod's background thread would fight the training thread"
    return Setting(why, variables={"I_MPI_PIN": "0"}) if intel else Setting(why, ("-bind-to", "none"))
