"""A batch script from what the user asks for and what the site wants said. Nothing here touches the machine."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from hvdkit.errors import InvalidArgumentError
from hvdkit.run.job.model import WALLTIME, BatchJob, Site
from hvdkit.run.job.site import settle
from hvdkit.run.job.systems import SYSTEMS, seconds
from hvdkit.run.launch.options import as_words, who_says

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
            raise InvalidArgumentError(f"{_option(attribute)} must be {expected}, got {value!r}.")
    if not job.command:
        raise InvalidArgumentError("No command to run was given; write it last: hvdkit job ... -- python train.py")
    for word in job.command:
        # A new line would begin a line of the script, which a batch system may read as a directive.
        if any(ord(character) < ord(" ") or character == "\x7f" for character in word):
            raise InvalidArgumentError(
                f"The command has a line break or another control character in {word!r}; put it into a script."
            )


def _option(attribute: str) -> str:
    return "--output" if attribute == "log" else f"--{attribute.replace('_', '-')}"


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
            raise InvalidArgumentError(f"{_option(attribute)} cannot be asked of {site.system}: {instead}.")
    if job.signal and int(job.signal.partition("@")[2]) >= seconds(job.limit):
        raise InvalidArgumentError(f"--signal {job.signal}: that is no later than the start of --walltime {job.limit}.")
    for directive in job.directive:
        if system.option.fullmatch(directive) is None or not directive.isprintable():
            raise InvalidArgumentError(
                f"--directive must be one option of {site.system} without {system.prefix}, such as {system.example!r}, "
                f"got {directive!r}."
            )
    given = settle(job, site)
    directives = dict.fromkeys((*system.directives(given, site), *site.directives, *given.directives, *job.directive))
    near = site.cpu_bind if job.depth is None and given.gpus_per_node else ""
    lines = [
        site.shell,
        *(f"{system.prefix} {directive}" for directive in directives),
        "",
        *site.setup,
        *_as_typed([bin_directory], f'export PATH={shlex.quote(bin_directory)}:"$PATH"  # {_WHOSE}'),
        "",
        *system.enter,
        *_launch_lines(given, site, near),
    ]
    return "\n".join(lines) + "\n"


def _launch_lines(job: BatchJob, site: Site, cpu_bind: str) -> list[str]:
    ppn = job.ranks_per_node
    hands_out = site.launcher in who_says("gpus_per_node")
    options = {
        **{"n": job.nodes * ppn, "ppn": ppn, "depth": job.depth, "cpu_bind": cpu_bind or None},
        **{"launcher": site.launcher, "gpus_per_node": job.gpus_per_node or None if hands_out else None},
    }
    # Without exec the shell would keep a batch system's signals to itself.
    words = ["exec", "hvdkit", "launch", *as_words(options), *(["--stage"] if job.stage else [])]
    line = shlex.join([*words, "--", *job.command])
    return _as_typed(job.command, line)


def _as_typed(words: Sequence[str], line: str) -> list[str]:
    """The line, and before it what keeps shellcheck from doubting the quoted words in it."""
    codes = [code for code, pattern in _LOOKS_WRONG.items() if any(map(pattern.search, words))]
    if not codes:
        return [line]
    return [f"# shellcheck disable={','.join(codes)}  # nothing in these words is for this shell to expand", line]
