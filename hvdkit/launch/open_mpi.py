"""Open MPI's mpirun, versions 4 and 5, on one machine."""

from __future__ import annotations

from hvdkit.launch.model import Facts, LauncherLine, Mpi, Request, Setting

RANK_VARIABLE = "OMPI_COMM_WORLD_RANK"


def line(request: Request, facts: Facts, mpi: Mpi) -> LauncherLine:
    """The command line of mpirun up to the user's command. Local ranks inherit mpirun's whole environment."""
    settings = [Setting("one process per rank", ("-np", str(request.n))), *_placement(request, facts, mpi)]
    settings.append(
        Setting(
            "a rank that waits in MPI offers its core to others, to its own training thread first",
            ("--mca", "mpi_yield_when_idle", "1"),
        )
    )
    if facts.root:
        allow = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        settings.append(Setting("you are root, whom Open MPI refuses without both variables", variables=allow))
    return LauncherLine(mpi.mpirun, tuple(settings), RANK_VARIABLE)


def _placement(request: Request, facts: Facts, mpi: Mpi) -> list[Setting]:
    if request.bind == "core":
        share = facts.cores // request.n
        why = f"--bind core: {facts.cores} cores for {request.n} ranks"
        return [Setting(why, ("--map-by", f"slot:PE={share}", "--bind-to", "core"))]
    if request.bind in ("socket", "numa"):
        where = "package" if request.bind == "socket" and mpi.version >= (5,) else request.bind
        why = f"--bind {request.bind}: ranks are dealt out to them in turn and stay there"
        return [Setting(why, ("--map-by", where, "--bind-to", where))]
    settings = []
    if request.n > facts.cores:
        why = f"{request.n} ranks on {facts.cores} cores, which Open MPI refuses otherwise"
        settings.append(Setting(why, ("--map-by", ":OVERSUBSCRIBE")))
    why = "tied to one core, which is Open MPI's default, Horovod's background thread would fight the training thread"
    return [*settings, Setting(why, ("--bind-to", "none"))]
