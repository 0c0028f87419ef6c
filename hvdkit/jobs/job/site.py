"""What a site wants said in its batch scripts (TOML files here, or one of the user's own), and what it gives a job."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import msgspec

from hvdkit.common.files import is_file, text
from hvdkit.errors import InvalidArgumentError
from hvdkit.jobs.job.model import FORMS, SYSTEM_NAMES, BatchJob, Queue, Site, seconds

SITES = Path(__file__).parent / "sites"
"""The files that come with hvdkit."""


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
