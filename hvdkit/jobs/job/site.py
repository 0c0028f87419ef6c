"""What a user asks a batch job for, and what a site wants said in its script (a TOML file) and gives it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from hvdkit.common.commands import AT_LEAST_0, AT_LEAST_1
from hvdkit.common.files import is_file, text
from hvdkit.common.json_files import Part, Positive
from hvdkit.errors import InvalidArgumentError
from hvdkit.jobs.launch.options import LAUNCHERS, options_of, typed

SITES = Path(__file__).parent / "sites"
"""The files that come with hvdkit."""

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


OPTIONS = options_of(BatchJob)
"""Its options by name, in the order of the help."""


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


def known() -> list[str]:
    """The names of the sites that come with hvdkit."""
    return sorted(file.stem for file in SITES.glob("*.toml"))


def find(system: str | None, site: str | None) -> Site:
    """The site of ``--system`` and ``--site``.

    Args:
        system: a name of ``SYSTEM_NAMES``, None for that of the site.
        site: a name of ``known()`` or the path of a TOML file; None for the plain form of the system.
    Raises:
        InvalidArgumentError: neither is given, they contradict each other, or the file is bad.
    """
    if site is None and system is None:
        raise InvalidArgumentError(
            f"Which batch system? Give --system ({', '.join(SYSTEM_NAMES)}) or --site ({', '.join(known())}, or a "
            "file)."
        )
    name = site or str(system)
    file = SITES / f"{name}.toml" if name in known() else Path(name)
    if not is_file(file):
        raise InvalidArgumentError(
            f"Site {name!r} is neither one of {', '.join(known())} nor a file; give one of them, or the path of a TOML "
            "file of your own."
        )
    found = read(file)
    if system is not None and found.system != system:
        raise InvalidArgumentError(f"Site {found.name} has {found.system}, and --system says {system}; leave one out.")
    return found


def read(file: Path) -> Site:
    """One site file.

    Raises:
        InvalidArgumentError: it cannot be read, or a key is unknown, missing or of the wrong kind.
    """
    try:
        values = tomllib.loads(text(file))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        nested = isinstance(error, RecursionError)
        reason = "it is nested too deeply" if nested else getattr(error, "strerror", None) or str(error)
        raise InvalidArgumentError(f"Site file {file} cannot be read: {reason}.") from error
    try:
        if "name" in values:
            raise msgspec.ValidationError("`name` is that of the file")
        return msgspec.structs.replace(msgspec.convert(values, Site), name=file.stem)
    except msgspec.ValidationError as error:
        said = str(error)
        for pattern, words in FORMS.items():
            said = said.replace(f"matching regex {pattern!r}", words)
        raise InvalidArgumentError(f"Site file {file}: {said}.") from error


def settle(job: BatchJob, site: Site) -> BatchJob:
    """The job with the queue, cores and GPUs that the site gives it.

    Raises:
        InvalidArgumentError: no queue of the site, or no host of it, gives what the job asks for.
    """
    job = _on_a_host(job, site)
    candidates = _candidates(job, site)
    if not candidates:
        return job if job.queue else replace(job, queue=site.queue or None)
    for queue in candidates:
        if _fits(job, queue):
            name = queue.name if queue.partition is None else queue.partition
            return replace(
                job, queue=name, qos=job.qos or queue.qos or None, directive=(*queue.directives, *job.directive)
            )
    given = "; ".join(f"{queue.name}: {_limits(queue)}" for queue in candidates)
    none = f"queue {job.queue} of site {site.name} does not give" if job.queue else f"site {site.name} has no queue for"
    others = dict.fromkeys(queue.name for queue in site.queues if queue not in candidates and _fits(job, queue))
    also = f", or with --queue of {', '.join(others)}" if others else ""
    raise InvalidArgumentError(
        f"--nodes {job.nodes} --walltime {job.walltime}: {none} that ({given}); ask for what is given there{also}."
    )


def notes(job: BatchJob, site: Site) -> list[str]:
    """What the user should know of a script that is written all the same, a sentence each."""
    found = []
    if site.retired:
        found.append(f"{site.name} is retired: {site.retired}; its site file serves as an example for systems like it.")
    if site.queues and not _candidates(job, site):
        what = f"queue {job.queue}" if job.queue else f"QOS {job.qos}"
        known = dict.fromkeys(queue.name for queue in site.queues)
        found.append(
            f"{what} is not among those of site {site.name} ({', '.join(known)}), so that nothing checks what it gives."
        )
    return found


def _candidates(job: BatchJob, site: Site) -> list[Queue]:
    """The queues that the user named, by queue or QOS, or else all that need not be named."""
    return [
        queue
        for queue in site.queues
        if (job.queue in (None, queue.name) and job.qos in (None, queue.qos))
        and (job.queue or job.qos or not queue.by_name)
    ]


def _fits(job: BatchJob, queue: Queue) -> bool:
    if not queue.min_nodes <= job.nodes <= (queue.max_nodes or job.nodes):
        return False
    return not queue.max_walltime or seconds(job.limit) <= seconds(queue.max_walltime)


def _limits(queue: Queue) -> str:
    if queue.max_nodes is None:
        nodes = f"from {queue.min_nodes} nodes"
    elif queue.min_nodes == queue.max_nodes:
        nodes = "1 node" if queue.max_nodes == 1 else f"{queue.max_nodes} nodes"
    else:
        nodes = f"{queue.min_nodes} to {queue.max_nodes} nodes"
    return f"{nodes}, {queue.max_walltime}" if queue.max_walltime else nodes


def _on_a_host(job: BatchJob, site: Site) -> BatchJob:
    """The job with the cores of a rank and the GPUs of a host, which a host must have."""
    gpus = site.gpus_per_node if job.gpus_per_node is None else job.gpus_per_node
    if gpus and site.gpus_per_node and gpus > site.gpus_per_node:
        raise InvalidArgumentError(
            f"--gpus-per-node {gpus}: a host of {site.name} has {site.gpus_per_node}; ask for so many or fewer."
        )
    ppn, depth = job.ppn or gpus or site.sockets_per_node, job.depth
    if ppn is None:
        known = "sockets" if gpus == 0 else "GPUs"
        raise InvalidArgumentError(
            f"--ppn is needed: how many {known} a host of {site.name} has, one for each rank, is not known here; say "
            "--ppn, or --gpus-per-node."
        )
    if gpus and ppn > gpus:
        whose = f"a host of {site.name} has" if job.gpus_per_node is None else "--gpus-per-node asks for"
        raise InvalidArgumentError(
            f"--ppn {ppn}: each rank takes a GPU of its own, and {whose} {gpus}; give --ppn {gpus} or less with "
            "more --nodes, or --gpus-per-node 0 to train on CPUs."
        )
    cpus = site.cpus_per_node
    if cpus is not None and ppn * (depth or 1) > cpus:
        each = f" --depth {depth}" if depth else ""
        raise InvalidArgumentError(
            f"--ppn {ppn}{each}: that is {ppn * (depth or 1)} cores, and a job has {cpus} on a host of "
            f"{site.name}; use fewer."
        )
    if depth is None and cpus is not None and job.ppn is None and not gpus:
        depth = cpus // ppn
    elif depth is None and site.depth is not None:
        depth = site.depth if cpus is None else min(site.depth, cpus // ppn)
    return replace(job, ppn=ppn, depth=depth, gpus_per_node=gpus)
