"""What a batch script is made from: values without behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from hvdkit.common.commands import AT_LEAST_0, AT_LEAST_1
from hvdkit.common.json_files import Part, Positive
from hvdkit.errors import InvalidArgumentError
from hvdkit.jobs.launch.options import LAUNCHERS, typed

SINGLE_LINE, SHELL, WALLTIME = r"\A[^\r\n]*\Z", r"\A#![^\r\n]*bash[^\r\n]*\Z", r"\A[0-9]{1,3}(:[0-5][0-9]){2}\Z"
SYSTEM_NAMES = ("pbs", "slurm", "lsf", "cobalt")
SYSTEM, LAUNCHER = (rf"\A({'|'.join(names)})\Z" for names in (SYSTEM_NAMES, ("auto", *LAUNCHERS)))
FORMS = {
    SINGLE_LINE: "that is a single line",
    SHELL: "that begins with #! and ends in bash, such as '#!/bin/bash -l'",
    WALLTIME: "as HH:MM:SS",
    SYSTEM: f"that is one of {', '.join(SYSTEM_NAMES)}",
    LAUNCHER: f"that is one of auto, {', '.join(LAUNCHERS)}",
}
"""What text in a site file must look like, in words."""
Line = Annotated[str, Meta(pattern=SINGLE_LINE)]


def seconds(walltime: str) -> int:
    """Of a walltime, HH:MM:SS."""
    hours, minutes, rest = map(int, walltime.split(":"))
    return (hours * 60 + minutes) * 60 + rest


@dataclass(frozen=True, slots=True)
class BatchJob:
    """What the user asks for. What an option means stands in its help.

    Attributes:
        command: what each rank runs, at least one word.
        directive: without their prefix; once a site has settled the job, those of the queue before the user's own.
    """

    nodes: int = typed(type=AT_LEAST_1, required=True, metavar="N", help="Number of hosts.")
    ppn: int | None = typed(
        type=AT_LEAST_1, metavar="P", help="Ranks on each host  [default: one a GPU, else one a socket]"
    )
    walltime: str | None = typed(metavar="HH:MM:SS", help="Time limit of the job; only Kubernetes can do without.")
    command: tuple[str, ...] = ()
    name: str = typed(default="hvdkit", help="Name of the job and of its logs.")
    queue: str | None = typed(metavar="Q", help="Queue or partition  [default: the first of the site's that fits]")
    account: str | None = typed(metavar="A", help="Account or project to charge.")
    depth: int | None = typed(type=AT_LEAST_1, metavar="D", help="Cores of each rank  [default: the site's]")
    gpus_per_node: int | None = typed(
        type=AT_LEAST_0, metavar="G", help="GPUs on each host, 0 to train on its CPUs  [default: the site's]"
    )
    qos: str | None = typed(metavar="Q", help="Slurm: quality of service.")
    constraint: str | None = typed(metavar="C", help="Slurm: features that the hosts must have  [default: the site's]")
    mem: str | None = typed(metavar="M", help="Memory of each host, such as 64G.")
    exclusive: bool = typed(is_flag=True, settled=False, help="Request whole hosts.")
    array: str | None = typed(metavar="A-B[:S][%M]", help="Submit a job array, with at most M jobs running.")
    log: str | None = typed("--output", metavar="LOG", help="File for the job's output, in the batch system's pattern.")
    stage: bool = typed(is_flag=True, settled=False, help="Copy the environment to the hosts' local disks first.")
    signal: str | None = typed(
        metavar="SIGNAL@SECONDS",
        help="Have it sent so long before the time limit, such as USR1@120, to save in.",
    )
    requeue: bool = typed(is_flag=True, settled=False, help="Queue the job again when it is preempted or loses a host.")
    mail_type: str | None = typed(metavar="EVENTS", help="Have mail sent: ALL, or some of BEGIN,END,FAIL,REQUEUE.")
    directive: tuple[str, ...] = typed(
        multiple=True, settled=(), metavar="TEXT", help="A further directive, without its prefix; repeatable."
    )

    @property
    def ranks_per_node(self) -> int:
        """``ppn`` of a job that a site has settled."""
        if self.ppn is None:
            raise InvalidArgumentError("--ppn is needed: how many ranks on each host?")
        return self.ppn

    @property
    def limit(self) -> str:
        """``walltime`` of a job that has one."""
        if self.walltime is None:
            raise InvalidArgumentError("--walltime HH:MM:SS is needed: batch systems give a job a time limit.")
        return self.walltime


class Queue(Part, frozen=True):
    """What a site gives in one queue; a queue whose limits depend on the number of hosts has several.

    Attributes:
        name: for ``--queue``.
        min_nodes, max_nodes: hosts of a job, > 0, None for no limit that the site says.
        max_walltime: HH:MM:SS, "" for no limit that the site says.
        partition: what the batch system calls it, where that is another name; "" for nothing.
        qos: Slurm's quality of service that goes with it.
        directives: further ones, without their prefix.
        by_name: never chosen unless the user names it: by request only, jobs there may be ended, or slow to start.
    """

    name: Line
    min_nodes: Positive = 1
    max_nodes: Positive | None = None
    max_walltime: Annotated[str, Meta(pattern=WALLTIME)] = ""
    partition: Line | None = None
    qos: Line = ""
    directives: tuple[Line, ...] = ()
    by_name: bool = False


class Site(Part, frozen=True):
    """What a site wants said; one TOML file each, with keys of the same names.

    Attributes:
        system: a name of ``SYSTEM_NAMES``.
        name: of its file.
        source: where the numbers come from and when that was read.
        retired: when and how the machine ended, "" for one that runs.
        launcher: for ``hvdkit launch --launcher``.
        shell: the first line of the script.
        directives: further ones, without their prefix.
        setup: shell lines for modules and environment, taken as they are.
        queue: where the user names none and the site lists none; "" for the system's default.
        queues: what each one gives; the first that fits is taken where the user names none.
        constraint: Slurm's, where the user says none.
        depth: cores of each rank where the user says nothing, None for no claim.
        cpus_per_node: what ``depth`` is counted in that a job may use on a host, None where it is not known.
        sockets_per_node: CPUs of a host, for the ranks of a job without GPUs; None where it is not known.
        gpus_per_node: GPUs that a framework counts on a host, None where it is not known.
        cpu_bind: for ``hvdkit launch --cpu-bind``: cores near GPU 0, near GPU 1 and so on.
        select: PBS: what a chunk of ``-l select=`` asks for, in place of ncpus, mpiprocs and ngpus.
        whole_nodes: LSF: ask for hosts (``-nnodes``) in place of slots.
        account_required: no job without an account.
    """

    system: Annotated[str, Meta(pattern=SYSTEM)]
    name: str = ""
    source: tuple[Line, ...] = ()
    retired: Line = ""
    launcher: Annotated[str, Meta(pattern=LAUNCHER)] = "auto"
    shell: Annotated[str, Meta(pattern=SHELL)] = "#!/bin/bash"
    directives: tuple[Line, ...] = ()
    setup: tuple[Line, ...] = ()
    queue: Line = ""
    queues: tuple[Queue, ...] = ()
    constraint: Line = ""
    depth: Positive | None = None
    cpus_per_node: Positive | None = None
    sockets_per_node: Positive | None = None
    gpus_per_node: Positive | None = None
    cpu_bind: Line = ""
    select: Line = ""
    whole_nodes: bool = False
    account_required: bool = False
