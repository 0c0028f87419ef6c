"""A batch script from what the user asks for and what the site wants said. Nothing here touches the machine."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hvdkit.errors import InvalidArgumentError
from hvdkit.jobs.job.model import WALLTIME, BatchJob, Site, seconds
from hvdkit.jobs.job.site import settle
from hvdkit.jobs.launch.options import as_words, options_of, who_says

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,62}")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@+-]{0,127}")
_NAMED = "a name of letters, digits and . _ - that begins with a letter"
_FORMS = {
    "name": (_NAME, _NAMED),
    **dict.fromkeys(("queue", "account", "qos"), (_WORD, f"{_NAMED} or digit")),
    "mem": (re.compile(r"[1-9][0-9]{0,5}[MGT]"), "a number with M, G or T, such as 64G"),
    "constraint": (re.compile(r"[A-Za-z0-9_.&|*()\[\]-]{1,128}"), "features of hosts, such as gpu or gpu&hbm80g"),
    "log": (re.compile(r"[A-Za-z0-9_./%^+@~-]{1,512}"), "a file name without spaces"),
    "signal": (
        re.compile(r"(SIG)?(USR1|USR2|TERM|INT|HUP)@[1-9][0-9]{0,4}"),
        "SIGNAL@SECONDS, such as USR1@120 (USR1, USR2, TERM, INT or HUP)",
    ),
}
"""What the options of these attributes must look like: each becomes a line that a batch system reads."""

# The batch systems: how each wants to be told what a job needs


@dataclass(frozen=True, slots=True)
class System:
    """A batch system.

    Attributes:
        prefix: begins each line that it reads.
        directives: makes those lines, without the prefix.
        enter: a shell line that goes to the directory from which the job was submitted.
        submit: the command that takes the script, up to its name.
        option: what one of its directives looks like.
        example: of such a directive.
        lacks: attributes of a job that it has no directive for, each with what the user does instead.
    """

    prefix: str
    directives: Callable[[BatchJob, Site], list[str]]
    enter: str
    submit: str
    option: re.Pattern[str]
    example: str
    lacks: Mapping[str, str] = field(default_factory=dict)


def _optional(option: str, value: str | None) -> list[str]:
    return [option + value] if value else []


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
        *_optional("-o ", job.log),
        *_optional("-q ", job.queue),
        *_optional("-A ", job.account),
    ]


def _slurm(job: BatchJob, site: Site) -> list[str]:
    """Source: sbatch(1). The log is NAME.NUMBER.log."""
    return [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.ranks_per_node}",
        *([] if job.depth is None else [f"--cpus-per-task={job.depth}"]),
        *([f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        *_optional("--mem=", job.mem),
        *(["--exclusive"] if job.exclusive else []),
        f"--time={job.limit}",
        f"--output={job.log or '%x.%j.log'}",
        "--open-mode=append",  # a job that is queued again would else lose what it printed
        *_optional("--signal=B:", job.signal),  # to hvdkit launch, which passes it on whatever starts the ranks
        *(["--requeue"] if job.requeue else []),
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
    return [
        f"-J {job.name}",
        *room,
        *gpus,
        *(["-x"] if job.exclusive else []),
        f"-W {total // 60:02}:{total % 60:02}",
        *([f"-wa {name.removeprefix('SIG')} -wt {-(-int(before) // 60)}"] if name else []),
        *(["-r"] if job.requeue else []),
        f"-o {job.log or f'{job.name}.%J.log'}",
        *_optional("-q ", job.queue),
        *_optional("-P ", job.account),
    ]


_OF_SLURM = "that is Slurm's; name a queue with --queue"
SYSTEMS: dict[str, System] = {
    "pbs": System(
        "#PBS",
        _pbs,
        'cd "$PBS_O_WORKDIR" || exit 1',
        "qsub",
        re.compile(r"-[A-Za-z]( ?\S.*)?"),
        "-W group_list=me",
        {
            "qos": _OF_SLURM,
            "constraint": "say it in the key 'select' of a site file of your own",
            "signal": "it sends SIGTERM at the end of the walltime, and SIGKILL when the site says; leave --signal out",
        },
    ),
    "slurm": System(
        "#SBATCH",
        _slurm,
        'cd "$SLURM_SUBMIT_DIR" || exit 1',
        "sbatch",
        re.compile(r"(--[a-z][a-z0-9-]*|-[A-Za-z])([ =]\S.*)?"),
        "--reservation=course",
    ),
    "lsf": System(
        "#BSUB",
        _lsf,
        'cd "$LS_SUBCWD" || exit 1',
        "bsub <",
        re.compile(r"-[A-Za-z_]+( \S.*)?"),
        "-app gpu",
        {
            "qos": _OF_SLURM,
            "constraint": "say it in the key 'directives' of a site file of your own",
            "mem": "what LSF counts it for depends on the site; say it in 'directives' of a site file of your own",
        },
    ),
}
"""Every batch system that can be asked for by name."""


# The script


def check(job: BatchJob) -> None:
    """Refuse what cannot be written into a script safely.

    Raises:
        InvalidArgumentError: a walltime, name, queue, account or command that cannot be right.
    """
    if job.walltime is not None and (re.match(WALLTIME, job.walltime) is None or seconds(job.walltime) == 0):
        raise InvalidArgumentError(f"--walltime must be HH:MM:SS and above zero, got {job.walltime!r}.")
    for attribute, (pattern, expected) in _FORMS.items():
        value = getattr(job, attribute)
        if value is not None and pattern.fullmatch(value) is None:
            raise InvalidArgumentError(f"{options_of(BatchJob)[attribute].flags[0]} must be {expected}, got {value!r}.")
    if not job.command:
        raise InvalidArgumentError("No command to run was given; write it last: hvdkit job ... -- python train.py")
    for word in job.command:
        # A new line would begin a line of the script, which a batch system may read as a directive.
        if any(ord(character) < ord(" ") or character == "\x7f" for character in word):
            raise InvalidArgumentError(
                f"The command has a line break or another control character in {word!r}; put it into a script."
            )


def write(job: BatchJob, site: Site, bin_directory: str) -> str:
    """The text of the batch script.

    Args:
        job: what the user asks for.
        site: what the site wants said.
        bin_directory: where the hvdkit lies that is to start the job.
    Raises:
        InvalidArgumentError: see ``check`` and ``site.settle``; the site needs what the user did not give; its
            batch system has no word for what he did.
    """
    check(job)
    if site.account_required and job.account is None:
        raise InvalidArgumentError(f"Site {site.name} charges every job to an account; give it with --account.")
    system = SYSTEMS[site.system]
    for attribute, instead in system.lacks.items():
        if getattr(job, attribute):
            raise InvalidArgumentError(
                f"{options_of(BatchJob)[attribute].flags[0]} cannot be asked of {site.system}: {instead}."
            )
    if job.signal and int(job.signal.partition("@")[2]) >= seconds(job.limit):
        raise InvalidArgumentError(f"--signal {job.signal}: that is no later than the start of --walltime {job.limit}.")
    for directive in job.directive:
        if system.option.fullmatch(directive) is None or not directive.isprintable():
            raise InvalidArgumentError(
                f"--directive must be one option of {site.system} without {system.prefix}, such as {system.example!r}, "
                f"got {directive!r}."
            )
    given = settle(job, site)
    directives = dict.fromkeys((*system.directives(given, site), *site.directives, *given.directive))
    ppn = given.ranks_per_node
    options = {"n": job.nodes * ppn, "ppn": ppn, "depth": given.depth, "launcher": site.launcher}
    if site.cpu_bind and job.depth is None and given.gpus_per_node:
        options["cpu_bind"] = site.cpu_bind
    if given.gpus_per_node and site.launcher in who_says("gpus_per_node"):
        options["gpus_per_node"] = given.gpus_per_node
    # Without exec the shell would keep a batch system's signals to itself.
    words = ["exec", "hvdkit", "launch", *as_words(options), *(["--stage"] if job.stage else []), "--", *job.command]
    lines = [
        site.shell,
        *(f"{system.prefix} {directive}" for directive in directives),
        "",
        *site.setup,
        f'export PATH={shlex.quote(bin_directory)}:"$PATH"  # the hvdkit that wrote this script',
        "",
        system.enter,
        shlex.join(words),
    ]
    return "\n".join(lines) + "\n"
