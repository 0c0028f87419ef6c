"""The batch systems: how each wants to be told what a job needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hvdkit.run.job.model import Job, Site


@dataclass(frozen=True, slots=True)
class System:
    """A batch system.

    Attributes:
        prefix: begins each line that it reads.
        directives: makes those lines, without the prefix.
        enter: shell lines that go to the directory from which the job was submitted.
        submit: the command that takes the script, up to its name.
    """

    prefix: str
    directives: Callable[[Job, Site], list[str]]
    enter: tuple[str, ...]
    submit: str


def _optional(option: str, value: str | None) -> list[str]:
    return [option + value] if value else []


def _pbs(job: Job, site: Site) -> list[str]:
    """Source: PBS Professional, qsub(1B). The log is NAME.oNUMBER."""
    chunk = site.select
    if not chunk:
        chunk = f"ncpus={job.ppn * (job.depth or site.depth or 1)}:mpiprocs={job.ppn}"
        chunk += f":ngpus={job.gpus_per_node}" if job.gpus_per_node is not None else ""
    return [
        f"-N {job.name}",
        f"-l select={job.nodes}:{chunk}",
        "-l place=scatter",
        f"-l walltime={job.walltime}",
        "-j oe",
        *_optional("-q ", job.queue or site.queue),
        *_optional("-A ", job.account),
    ]


def _slurm(job: Job, site: Site) -> list[str]:
    """Source: sbatch(1). The log is NAME.NUMBER.log."""
    depth = job.depth or site.depth
    return [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.ppn}",
        *([] if depth is None else [f"--cpus-per-task={depth}"]),
        *([] if job.gpus_per_node is None else [f"--gpus-per-node={job.gpus_per_node}"]),
        f"--time={job.walltime}",
        "--output=%x.%j.log",
        *_optional("--partition=", job.queue or site.queue),
        *_optional("--account=", job.account),
    ]


def _lsf(job: Job, site: Site) -> list[str]:
    """Source: bsub(1), which counts time in minutes. The log is NAME.NUMBER.log."""
    hours, minutes, seconds = map(int, job.walltime.split(":"))
    total = hours * 60 + minutes + (seconds > 0)
    room = [f"-nnodes {job.nodes}"] if site.whole_nodes else [
        f"-n {job.nodes * job.ppn}", f'-R "span[ptile={job.ppn}]"',
    ]  # fmt: skip
    gpus = [] if job.gpus_per_node is None or site.whole_nodes else [f'-gpu "num={job.gpus_per_node}"']
    return [
        f"-J {job.name}",
        *room,
        *gpus,
        f"-W {total // 60:02}:{total % 60:02}",
        f"-o {job.name}.%J.log",
        *_optional("-q ", job.queue or site.queue),
        *_optional("-P ", job.account),
    ]


def _cobalt(job: Job, site: Site) -> list[str]:
    """Source: ALCF, "Running Jobs" on Theta. The logs are NAME.output, NAME.error and NAME.cobaltlog."""
    return [
        f"--jobname {job.name}",
        f"-n {job.nodes}",
        f"-t {job.walltime}",
        f"-O {job.name}",
        *_optional("-q ", job.queue or site.queue),
        *_optional("-A ", job.account),
    ]


SYSTEMS: dict[str, System] = {
    "pbs": System("#PBS", _pbs, ('cd "$PBS_O_WORKDIR" || exit 1',), "qsub"),
    "slurm": System("#SBATCH", _slurm, ('cd "$SLURM_SUBMIT_DIR" || exit 1',), "sbatch"),
    "lsf": System("#BSUB", _lsf, ('cd "$LS_SUBCWD" || exit 1',), "bsub"),
    "cobalt": System(
        "#COBALT", _cobalt, ("# Cobalt starts a script in the directory from which it was submitted.",), "qsub"
    ),
}
"""Every batch system that can be asked for by name."""
