"""A batch script from what the user asks for and what the site wants said. Nothing here touches the machine."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hvdkit.errors import InvalidArgumentError
from hvdkit.jobs.job.site import OPTIONS, WALLTIME, BatchJob, Site, seconds, settle
from hvdkit.jobs.launch.lines import CAN_GIVE_GPUS
from hvdkit.jobs.launch.options import as_words

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,62}")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@+-]{0,127}")
_NAMED = "a name of letters, digits and . _ - that begins with a letter"
_FORMS = {
    "name": (_NAME, _NAMED),
    **dict.fromkeys(("queue", "account", "qos"), (_WORD, f"{_NAMED} or digit")),
    "mem": (re.compile(r"[1-9][0-9]{0,5}[MGT]"), "a number with M, G or T, such as 64G"),
    "array": (
        re.compile(r"[0-9]{1,6}-[0-9]{1,6}(:[1-9][0-9]{0,5})?(%[1-9][0-9]{0,5})?"),
        "FIRST-LAST, FIRST-LAST:STEP, and %MOST for how many at a time, such as 0-9%2",
    ),
    "constraint": (re.compile(r"[A-Za-z0-9_.&|*()\[\]-]{1,128}"), "features of hosts, such as gpu or gpu&hbm80g"),
    "log": (re.compile(r"[A-Za-z0-9_./%^+@~-]{1,512}"), "a file name without spaces"),
    "signal": (
        re.compile(r"(SIG)?(USR1|USR2|TERM|INT|HUP)@[1-9][0-9]{0,4}"),
        "SIGNAL@SECONDS, such as USR1@120 (USR1, USR2, TERM, INT or HUP)",
    ),
    "mail_type": (
        re.compile(r"ALL|(BEGIN|END|FAIL|REQUEUE)(,(BEGIN|END|FAIL|REQUEUE))*"),
        "ALL, or some of BEGIN,END,FAIL,REQUEUE",
    ),
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
        'cd "$PBS_O_WORKDIR" || exit 1',
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
        "#SBATCH", _slurm, 'cd "$SLURM_SUBMIT_DIR" || exit 1', "sbatch", re.compile(_LONG), "--reservation=course"
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
    "cobalt": System(
        "#COBALT",
        _cobalt,
        "# Cobalt starts a script in the directory from which it was submitted.",
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
            raise InvalidArgumentError(f"{OPTIONS[attribute].flags[0]} must be {expected}, got {value!r}.")
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
            raise InvalidArgumentError(f"{OPTIONS[attribute].flags[0]} cannot be asked of {site.system}: {instead}.")
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
    if given.gpus_per_node and site.launcher in CAN_GIVE_GPUS:
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


def _as_typed(words: Sequence[str], line: str) -> list[str]:
    """The line, and before it what keeps shellcheck from doubting the quoted words in it."""
    codes = [code for code, pattern in _LOOKS_WRONG.items() if any(map(pattern.search, words))]
    if not codes:
        return [line]
    return [f"# shellcheck disable={','.join(codes)}  # nothing in these words is for this shell to expand", line]
