"""The batch systems: how each wants to be told what a job needs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hvdkit.run.job.model import BatchJob, Site


@dataclass(frozen=True, slots=True)
class System:
    """A batch system.

    Attributes:
        prefix: begins each line that it reads.
        directives: makes those lines, without the prefix.
        enter: shell lines that go to the directory from which the job was submitted.
        submit: the command that takes the script, up to its name.
        option: what one of its directives looks like.
        example: of such a directive.
        lacks: attributes of a job that it has no directive for, each with what the user does instead.
    """

    prefix: str
    directives: Callable[[BatchJob, Site], list[str]]
    enter: tuple[str, ...]
    submit: str
    option: re.Pattern[str]
    example: str
    lacks: Mapping[str, str] = field(default_factory=dict)


def seconds(walltime: str) -> int:
    """Of a walltime, HH:MM:SS."""
    hours, minutes, rest = map(int, walltime.split(":"))
    return (hours * 60 + minutes) * 60 + rest


def _optional(option: str, value: str | None) -> list[str]:
    return [option + value] if value else []


def _mail(job: BatchJob, words: Mapping[str, str], before: str, between: str = "") -> list[str]:
    """The directive for ``--mail-type``, of the words that a batch system has for its events."""
    asked = (job.mail_type or "").replace("ALL", ",".join(words)).split(",")
    found = dict.fromkeys(word for event, word in words.items() if event in asked)
    return [before + between.join(found)] if found else []


def _pbs(job: BatchJob, site: Site) -> list[str]:
    """Source: PBS Professional, qsub(1B). The log is NAME.oNUMBER."""
    chunk = site.select
    if not chunk:
        chunk = f"ncpus={job.ranks_per_node * (job.depth or 1)}:mpiprocs={job.ranks_per_node}"
        chunk += f":ngpus={job.gpus_per_node}" if job.gpus_per_node else ""
    if job.mem is not None:
        chunk += f":mem={job.mem.lower()}b"
    return [
        f"-N {job.name}",
        f"-l select={job.nodes}:{chunk}",
        "-l place=scatter" + (":excl" if job.exclusive else ""),
        f"-l walltime={job.limit}",
        "-j oe",
        *(["-r y"] if job.requeue else []),
        *_mail(job, {"BEGIN": "b", "END": "e", "FAIL": "a"}, "-m "),
        *_optional("-o ", job.log),
        *_optional("-J ", job.array),
        *_optional("-q ", job.queue),
        *_optional("-A ", job.account),
    ]


def _slurm(job: BatchJob, site: Site) -> list[str]:
    """Source: sbatch(1). The log is NAME.NUMBER.log, in an array NAME.NUMBER_INDEX.log."""
    return [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.ranks_per_node}",
        *([] if job.depth is None else [f"--cpus-per-task={job.depth}"]),
        *([f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        *_optional("--mem=", job.mem),
        *(["--exclusive"] if job.exclusive else []),
        f"--time={job.limit}",
        f"--output={job.log or ('%x.%A_%a.log' if job.array else '%x.%j.log')}",
        "--open-mode=append",  # a job that is queued again would else lose what it printed
        *_optional("--array=", job.array),
        *_optional("--signal=B:", job.signal),  # to hvdkit launch, which passes it on whatever starts the ranks
        *(["--requeue"] if job.requeue else []),
        *_optional("--mail-type=", job.mail_type),
        *_optional("--partition=", job.queue),
        *_optional("--qos=", job.qos),
        *_optional("--constraint=", job.constraint or site.constraint),
        *_optional("--account=", job.account),
    ]


def _lsf(job: BatchJob, site: Site) -> list[str]:
    """Source: bsub(1), which counts time in minutes. The log is NAME.NUMBER.log."""
    total = -(-seconds(job.limit) // 60)
    name, _, before = (job.signal or "").partition("@")
    room = [f"-nnodes {job.nodes}"] if site.whole_nodes else [
        f"-n {job.nodes * job.ranks_per_node}", f'-R "span[ptile={job.ranks_per_node}]"',
    ]  # fmt: skip
    gpus = [f'-gpu "num={job.gpus_per_node}"'] if job.gpus_per_node and not site.whole_nodes else []
    indices, _, at_once = (job.array or "").partition("%")
    array = f'"{job.name}[{indices}]{at_once and "%" + at_once}"'
    return [
        f"-J {array if job.array else job.name}",
        *room,
        *gpus,
        *(["-x"] if job.exclusive else []),
        f"-W {total // 60:02}:{total % 60:02}",
        *([f"-wa {name.removeprefix('SIG')} -wt {-(-int(before) // 60)}"] if name else []),
        *(["-r"] if job.requeue else []),
        *_mail(job, {"BEGIN": "-B", "END": "-N", "FAIL": "-N"}, "", " "),
        f"-o {job.log or job.name + ('.%J.%I.log' if job.array else '.%J.log')}",
        *_optional("-q ", job.queue),
        *_optional("-P ", job.account),
    ]


def _cobalt(job: BatchJob, _site: Site) -> list[str]:
    """Source: ALCF, "Running Jobs" on Theta. The logs are NAME.output, NAME.error and NAME.cobaltlog."""
    return [
        f"--jobname {job.name}",
        f"-n {job.nodes}",
        f"-t {job.limit}",
        f"-O {job.name}",
        *_optional("-o ", job.log),
        *_optional("-q ", job.queue),
        *_optional("-A ", job.account),
    ]


_SHORT, _LONG = r"-[A-Za-z]( ?\S.*)?", r"(--[a-z][a-z0-9-]*|-[A-Za-z])([ =]\S.*)?"
_AT_THE_END = "it sends SIGTERM at the end of the walltime, and SIGKILL when the site says; leave --signal out"
_OF_SLURM = "that is Slurm's; name a queue with --queue"
SYSTEMS: dict[str, System] = {
    "pbs": System(
        "#PBS",
        _pbs,
        ('cd "$PBS_O_WORKDIR" || exit 1',),
        "qsub",
        re.compile(_SHORT),
        "-W group_list=me",
        {
            "qos": _OF_SLURM,
            "constraint": "say it in the key 'select' of a site file of your own",
            "signal": _AT_THE_END,
        },
    ),
    "slurm": System(
        "#SBATCH", _slurm, ('cd "$SLURM_SUBMIT_DIR" || exit 1',), "sbatch", re.compile(_LONG), "--reservation=course"
    ),
    "lsf": System(
        "#BSUB",
        _lsf,
        ('cd "$LS_SUBCWD" || exit 1',),
        "bsub",
        re.compile(r"-[A-Za-z_]+( \S.*)?"),
        "-app gpu",
        {
            "qos": _OF_SLURM,
            "constraint": "say it in the key 'directives' of a site file of your own",
            "mem": "what LSF counts it for depends on the site; say it in 'directives' of a site file of your own",
        },
    ),
    "cobalt": System(
        "#COBALT",
        _cobalt,
        ("# Cobalt starts a script in the directory from which it was submitted.",),
        "qsub",
        re.compile(_LONG),
        "--attrs filesystems=home",
        {
            "qos": _OF_SLURM,
            "signal": _AT_THE_END,
            "requeue": "submit the script again",
            "mail_type": "say where to: --directive '-M me@site'",
            "constraint": "say it in the key 'directives' of a site file of your own",
            "mem": "it gives whole hosts",
            "exclusive": "it gives whole hosts",
            "array": "submit the script several times",
        },
    ),
}
"""Every batch system that can be asked for by name."""
