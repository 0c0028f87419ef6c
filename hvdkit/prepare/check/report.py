"""Steps and findings as text for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

import click

from hvdkit.common import json_files
from hvdkit.common.json_files import Document, Part
from hvdkit.common.units import count_text
from hvdkit.prepare.check.rules import BrokenRule, examine
from hvdkit.prepare.check.source import Script, too_deep
from hvdkit.prepare.check.steps import STEPS, JudgedCase, Verdict
from hvdkit.prepare.doctor.checks import explanation

LIBRARIES = {"horovod": "plain Horovod", "hvdkit": "hvdkit", "ddp": "PyTorch DDP", "none": "none found"}
_COLOURS = {"done": "green", "missing": "red", "undecided": "yellow", "not needed": None}


class Checked(JudgedCase):
    """One script, what is said of its steps, and its findings by line."""

    def __init__(self, script: Script) -> None:
        super().__init__(script.tree)
        self.path = script.path
        self.findings = examine(self)


def check_script(script: Script) -> Checked:
    """Check one script.

    Raises:
        InvalidArgumentError: its expressions are nested too deeply to be followed.
    """
    try:
        return Checked(script)
    except RecursionError as error:
        raise too_deep(script.path) from error


class ScriptStep(Part, frozen=True):
    """One of the eight steps in a script.

    Attributes:
        number, name: which.
        status: "done", "missing", "undecided" or "not needed".
        lines: where it is done.
        note: what else there is to say.
    """

    number: int
    name: str
    status: str
    lines: tuple[int, ...]
    note: str


class OneScript(Part, frozen=True):
    """What is said of one script.

    Attributes:
        path: the script.
        library: "horovod", "hvdkit", "ddp" or "none".
        steps: in order.
        findings: by line.
    """

    path: str
    library: str
    steps: tuple[ScriptStep, ...]
    findings: tuple[BrokenRule, ...]


class CheckReport(Document, frozen=True):
    """What was said of scripts.

    Attributes:
        ok: there is no finding.
        scripts: in the order in which they were given.
    """

    kind = "check"
    written_by = "hvdkit check --json"

    ok: bool
    scripts: tuple[OneScript, ...]


def as_json(checked: Sequence[Checked]) -> str:
    """All scripts as one JSON object."""
    return json_files.encode(CheckReport(not any(one.findings for one in checked), tuple(map(_script, checked))))


def _script(checked: Checked) -> OneScript:
    steps = tuple(
        ScriptStep(step.number, step.name, verdict.status, tuple(verdict.lines), verdict.note)
        for step, verdict in zip(STEPS, checked.verdicts, strict=True)
    )
    return OneScript(checked.path, checked.library, steps, tuple(checked.findings))


def as_text(checked: Sequence[Checked], width: int) -> str:
    """All scripts, one after the other, in lines of at most ``width`` columns where words allow."""
    return "\n\n".join("\n".join(_lines(one, width)) for one in checked)


def _lines(checked: Checked, width: int) -> list[str]:
    used = f" ({', '.join(checked.modules)})" if checked.modules else ""
    lines = [f"{click.style(checked.path, bold=True)}: {LIBRARIES[checked.library]}{used}"]
    if checked.library == "none":
        nothing = "No Horovod, hvdkit or DDP in this text: it trains in one process, and there are no steps to check."
        others = f"It uses {', '.join(checked.others)}, which is not checked."
        lines.append(f"  {others if checked.others else nothing}")
        if not checked.findings:
            return lines
    else:
        lines += [_step(number, verdict, width) for number, verdict in enumerate(checked.verdicts)]
    for finding in checked.findings:
        place = click.style(f"{checked.path}:{finding.line}", bold=True)
        lines += ["", f"{place} [{finding.rule}]", *explanation(finding, width, hanging=8, end=".")]
    return [*lines, "", f"{count_text(len(checked.findings), 'finding') if checked.findings else 'No findings'}."]


def _step(index: int, verdict: Verdict, width: int) -> str:
    longest = max(len(step.name) for step in STEPS)
    status = click.style(verdict.status.ljust(10), fg=_COLOURS[verdict.status])
    start = f"  {STEPS[index].number} {STEPS[index].name.ljust(longest)}  {status}  "
    where = f"line{'s' if len(verdict.lines) > 1 else ''} {', '.join(map(str, verdict.lines))}" if verdict.lines else ""
    said = "; ".join(part for part in (where, verdict.note) if part)
    indent = " " * (longest + 18)
    text = fill(said, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False)
    return (start + text.removeprefix(indent)).rstrip()
