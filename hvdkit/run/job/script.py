"""A batch script from what the user asks for and what the site wants said. Nothing here touches the machine."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdkit.errors import InvalidArgumentError
from hvdkit.run.job.model import WALLTIME, BatchJob, Site, seconds
from hvdkit.run.job.site import settle
from hvdkit.run.launch.options import as_words, who_says

_NAMED = "a name of letters, digits and . _ - that begins with a letter"
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@+-]{0,127}")
_FORMS = {
    "name": (re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,62}"), _NAMED),
    "queue": (_WORD, f"{_NAMED} or digit"),
    "account": (_WORD, f"{_NAMED} or digit"),
}
"""What the options of these attributes must look like: each becomes a line that a batch system reads."""
_WHOSE = "the hvdkit that wrote this script"
_LOOKS_WRONG = {
    "SC1003": re.compile(r"\\"),
    "SC1010": re.compile(r"^(do|done|elif|else|esac|fi|then)$"),
    "SC1110": re.compile("[\u201c\u201d]"),
    "SC1112": re.compile("[\u2018\u2019]"),
    "SC2016": re.compile(r"[$`]"),
    "SC2088": re.compile(r"^~"),
}
"""What shellcheck takes for a mistake inside single quotes, where it means itself."""


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
    """

    prefix: str
    directives: Callable[[BatchJob, Site], list[str]]
    enter: str
    submit: str
    option: re.Pattern[str]
    example: str


def _optional(option: str, value: str | None) -> list[str]:
    return [option + value] if value else []


def _pbs(job: BatchJob, site: Site) -> list[str]:
    """Source: PBS Professional, qsub(1B). The log is NAME.oNUMBER."""
    chunk = site.select
    if not chunk:
        chunk = f"ncpus={job.ranks_per_node * (job.depth or 1)}:mpiprocs={job.ranks_per_node}"
        chunk += f":ngpus={job.gpus_per_node}" if job.gpus_per_node else ""
    return [
        f"-N {job.name}",
        f"-l select={job.nodes}:{chunk}",
        "-l place=scatter",
        f"-l walltime={job.walltime}",
        "-j oe",
        *_optional("-q ", job.queue),
        *_optional("-A ", job.account),
    ]


def _slurm(job: BatchJob, _site: Site) -> list[str]:
    """Source: sbatch(1). The log is NAME.NUMBER.log."""
    return [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.ranks_per_node}",
        *([] if job.depth is None else [f"--cpus-per-task={job.depth}"]),
        *([f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        f"--time={job.walltime}",
        "--output=%x.%j.log",
        "--open-mode=append",  # a job that is queued again would else lose what it printed
        *_optional("--partition=", job.queue),
        *_optional("--qos=", job.qos),
        *_optional("--account=", job.account),
    ]


def _lsf(job: BatchJob, site: Site) -> list[str]:
    """Source: bsub(1), which counts time in minutes. The log is NAME.NUMBER.log."""
    total = -(-seconds(job.walltime) // 60)
    if site.whole_nodes:
        room = [f"-nnodes {job.nodes}"]
    else:
        room = [f"-n {job.nodes * job.ranks_per_node}", f'-R "span[ptile={job.ranks_per_node}]"']
        room += [f'-gpu "num={job.gpus_per_node}"'] if job.gpus_per_node else []
    return [
        f"-J {job.name}",
        *room,
        f"-W {total // 60:02}:{total % 60:02}",
        f"-o {job.name}.%J.log",
        *_optional("-q ", job.queue),
        *_optional("-P ", job.account),
    ]


SYSTEMS: dict[str, System] = {
    "pbs": System(
        "#PBS",
        _pbs,
        'cd "$PBS_O_WORKDIR" || exit 1',
        "qsub",
        re.compile(r"-[A-Za-z]( ?\S.*)?"),
        "-W group_list=me",
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
    ),
}
"""Every batch system that can be asked for by name."""


# The script


def write(job: BatchJob, site: Site, bin_directory: str) -> str:
    """The text of the batch script.

    Args:
        job: what the user asks for.
        site: what the site wants said.
        bin_directory: where the hvdkit lies that is to start the job.
    Raises:
        InvalidArgumentError: a walltime, name, queue, account, directive or command that cannot be written safely; see
            ``site.settle``; the site needs what the user did not give.
    """
    system = SYSTEMS[site.system]
    _check(job, site, system)
    given = settle(job, site)
    directives = dict.fromkeys((*system.directives(given, site), *site.directives, *given.directives))
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
        *_as_typed([bin_directory], f'export PATH={shlex.quote(bin_directory)}:"$PATH"  # {_WHOSE}'),
        "",
        system.enter,
        *_as_typed(job.command, shlex.join(words)),
    ]
    return "\n".join(lines) + "\n"


def _check(job: BatchJob, site: Site, system: System) -> None:
    """Refuse what cannot be written into a script safely."""
    if re.match(WALLTIME, job.walltime) is None or seconds(job.walltime) == 0:
        raise InvalidArgumentError(f"--walltime must be HH:MM:SS and above zero, got {job.walltime!r}.")
    for attribute, (pattern, expected) in _FORMS.items():
        value = getattr(job, attribute)
        if value is not None and pattern.fullmatch(value) is None:
            raise InvalidArgumentError(f"--{attribute} must be {expected}, got {value!r}.")
    if not job.command:
        raise InvalidArgumentError("No command to run was given; write it last: hvdkit job ... -- python train.py")
    for word in job.command:
        # A new line would begin a line of the script, which a batch system may read as a directive.
        if any(ord(character) < ord(" ") or character == "\x7f" for character in word):
            raise InvalidArgumentError(
                f"The command has a line break or another control character in {word!r}; put it into a script."
            )
    if site.account_required and job.account is None:
        raise InvalidArgumentError(f"Site {site.name} charges every job to an account; give it with --account.")
    for directive in job.directives:
        if system.option.fullmatch(directive) is None or not directive.isprintable():
            raise InvalidArgumentError(
                f"--directive must be one option of {site.system} without {system.prefix}, such as {system.example!r}, "
                f"got {directive!r}."
            )


def _as_typed(words: Sequence[str], line: str) -> list[str]:
    """The line, and before it what keeps shellcheck from doubting the quoted words in it."""
    codes = [code for code, pattern in _LOOKS_WRONG.items() if any(map(pattern.search, words))]
    if not codes:
        return [line]
    return [f"# shellcheck disable={','.join(codes)}  # nothing in these words is for this shell to expand", line]
