"""What a site gives: the queue that fits a job, and one sentence where there is none."""

from __future__ import annotations

import re
from dataclasses import replace

from hvdkit.errors import InvalidArgumentError
from hvdkit.run.job.model import BatchJob, Queue, Site

WALLTIME = re.compile(r"([0-9]{1,3}):([0-5][0-9]):([0-5][0-9])")


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
            return replace(job, queue=name, qos=job.qos or queue.qos or None, directives=queue.directives)
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
    return not queue.max_walltime or seconds(job.walltime) <= seconds(queue.max_walltime)


def seconds(walltime: str) -> int:
    """Of a walltime."""
    hours, minutes, rest = map(int, walltime.split(":"))
    return (hours * 60 + minutes) * 60 + rest


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
    if gpus and job.ppn > gpus:
        whose = f"a host of {site.name} has" if job.gpus_per_node is None else "--gpus-per-node asks for"
        raise InvalidArgumentError(
            f"--ppn {job.ppn}: each rank takes a GPU of its own, and {whose} {gpus}; give --ppn {gpus} or less with "
            "more --nodes, or --gpus-per-node 0 to train on CPUs."
        )
    cpus, depth = site.cpus_per_node, job.depth
    if cpus is not None and job.ppn * (depth or 1) > cpus:
        each = f" --depth {depth}" if depth else ""
        raise InvalidArgumentError(
            f"--ppn {job.ppn}{each}: that is {job.ppn * (depth or 1)} cores, and a job has {cpus} on a host of "
            f"{site.name}; use fewer."
        )
    if depth is None and site.depth is not None:
        depth = site.depth if cpus is None else min(site.depth, cpus // job.ppn)
    return replace(job, depth=depth, gpus_per_node=gpus)
