"""Open MPI's mpirun, versions 4 and 5, on one machine and on several."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hvdkit.run.launch import remote
from hvdkit.run.launch.model import LauncherLine, LaunchFacts, Mpi, Request, Setting
from hvdkit.steps import secret

RANK_VARIABLE = "OMPI_COMM_WORLD_RANK"
SESSIONS = "PRTE_MCA_prte_tmpdir_base"
"""Where Open MPI 5 makes a directory for each job."""

_KEEPALIVE = {"time": "20", "intvl": "10", "probes": "4"}
"""Seconds without a word until a host is asked whether it lives, between two such questions, and how many."""

_TAKEN = re.compile(r":|--(map-?by|rank-?by|bind-?to|runtime-options|personality)(=.*)?", re.DOTALL)
"""Open MPI 5 spells these options anew, or refuses them as repeated, in the user's command, too.

Source: PRRTE, src/tools/prte/prte.c and src/mca/schizo/base/schizo_base_stubs.c.
"""

_UNTIED = Setting(
    "tied to one core, which is Open MPI's default, Horovod's background thread would fight the training thread",
    ("--bind-to", "none"),
)

_LIVELY = Setting(
    "a host that no longer answers ends the job after a minute, not after eight",
    variables={f"PRTE_MCA_oob_tcp_keepalive_{name}": value for name, value in _KEEPALIVE.items()},
)


def line(request: Request, facts: LaunchFacts, mpi: Mpi) -> LauncherLine:
    """The command line of mpirun up to the user's command.

    Local ranks inherit mpirun's whole environment, those on other hosts only what it is told to pass on.
    """
    if request.hosts:
        settings = _on_hosts(request, facts, mpi)
        if mpi.version >= (5,):
            settings.append(_LIVELY)
    else:
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
    pass_on = _pass_on if request.hosts else None
    return LauncherLine(mpi.mpirun, tuple(settings), RANK_VARIABLE, pass_on=pass_on, taken=_TAKEN)


def _pass_on(added: Mapping[str, str], environ: Mapping[str, str]) -> Setting:
    names = dict.fromkeys((*remote.names(environ, added), secret.VARIABLE))
    words = tuple(word for name in names for word in ("-x", name))
    return Setting("mpirun passes these on to other hosts, which have nothing of this environment otherwise", words)


def _on_hosts(request: Request, facts: LaunchFacts, mpi: Mpi) -> list[Setting]:
    hosts = ",".join(map(str, request.hosts))
    slots = {host.slots for host in request.hosts}
    where = f"ppr:{slots.pop()}:node" if len(slots) == 1 else "slot"
    settings = [
        Setting("one process per rank", ("-n", str(request.n))),
        Setting("hosts, and the ranks that each may take", ("--host", hosts)),
    ]
    if request.depth is not None or request.bind == "core":
        cores = request.depth or max(1, facts.cores // max(host.slots for host in request.hosts))
        why = f"each rank is tied to {cores} cores of its own"
        return [*settings, Setting(why, ("--map-by", f"{where}:PE={cores}", "--bind-to", "core"))]
    settings.append(Setting("so many ranks on each host", ("--map-by", where)))
    if request.bind in ("socket", "numa"):
        return [*settings, Setting(f"--bind {request.bind}", ("--bind-to", _place_name(request, mpi)))]
    return [*settings, _UNTIED]


def _place_name(request: Request, mpi: Mpi) -> str:
    return "package" if request.bind == "socket" and mpi.version >= (5,) else request.bind


def _placement(request: Request, facts: LaunchFacts, mpi: Mpi) -> list[Setting]:
    if request.depth is not None and request.bind in ("none", "core"):
        why = f"--depth {request.depth}: each rank is tied to so many cores"
        return [Setting(why, ("--map-by", f"slot:PE={request.depth}", "--bind-to", "core"))]
    if request.bind == "core":
        share = facts.cores // request.n
        why = f"--bind core: {facts.cores} cores for {request.n} ranks"
        return [Setting(why, ("--map-by", f"slot:PE={share}", "--bind-to", "core"))]
    if request.bind in ("socket", "numa"):
        where = _place_name(request, mpi)
        why = f"--bind {request.bind}: ranks are dealt out to them in turn and stay there"
        return [Setting(why, ("--map-by", where, "--bind-to", where))]
    settings = []
    if request.n > facts.cores:
        why = f"{request.n} ranks on {facts.cores} cores, which Open MPI refuses otherwise"
        settings.append(Setting(why, ("--map-by", ":OVERSUBSCRIBE")))
    return [*settings, _UNTIED]
