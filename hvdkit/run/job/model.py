"""What a batch script is made from: values without behaviour."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """What the user asks for.

    Attributes:
        nodes, ppn: number of hosts, and of ranks on each; > 0.
        walltime: HH:MM:SS.
        command: what each rank runs, at least one word.
        name: of the job, also in the names of its logs.
        queue, account: None for the site's own.
        depth: cores of each rank, > 0, None for the site's own.
        gpus_per_node: > 0, None for what the site gives.
    """

    nodes: int
    ppn: int
    walltime: str
    command: tuple[str, ...]
    name: str = "hvdkit"
    queue: str | None = None
    account: str | None = None
    depth: int | None = None
    gpus_per_node: int | None = None


@dataclass(frozen=True, slots=True)
class Site:
    """What a site wants said; one TOML file each, with keys of the same names.

    Attributes:
        name: of its file.
        system: a name of ``systems.SYSTEMS``.
        launcher: for ``hvdkit launch --launcher``.
        shell: the first line of the script.
        directives: further ones, without their prefix.
        setup: shell lines for modules and environment, taken as they are.
        queue: where the user names none; "" for the system's default.
        depth: cores of each rank where the user says nothing, None for no claim.
        select: PBS: what a chunk of ``-l select=`` asks for, in place of ncpus, mpiprocs and ngpus.
        whole_nodes: LSF: ask for hosts (``-nnodes``) in place of slots.
        account_required: no job without an account.
    """

    name: str
    system: str
    launcher: str = "auto"
    shell: str = "#!/bin/bash"
    directives: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    queue: str = ""
    depth: int | None = None
    select: str = ""
    whole_nodes: bool = False
    account_required: bool = False
