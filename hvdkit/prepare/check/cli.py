"""The command ``hvdkit check``: steps and findings as text for people and as JSON for programs."""

from __future__ import annotations

import shutil
from textwrap import fill

import click

from hvdkit.common import json_files
from hvdkit.common.commands import JSON
from hvdkit.common.json_files import Document, Part
from hvdkit.common.units import count_text
from hvdkit.prepare.check.rules import BrokenRule, Checked, check_script
from hvdkit.prepare.check.source import read_script
from hvdkit.prepare.check.steps import STEPS, StepRule, Verdict
from hvdkit.prepare.doctor.finding import explanation

_LIBRARIES = {"horovod": "plain Horovod", "hvdkit": "hvdkit", "ddp": "PyTorch DDP", "none": "none found"}
_COLOURS = {"done": "green", "missing": "red", "undecided": "yellow", "not needed": None}
_WIDEST = 110


@click.command()
@click.argument("scripts", nargs=-1, required=True, metavar="SCRIPT.py ...")
@JSON
def check(scripts: tuple[str, ...], json_: bool) -> int:
    """Report which of the eight steps a training script does, and its mistakes.

    Reads the text of the scripts; runs nothing and imports nothing from them. It understands scripts that use
    Horovod (horovod.torch, horovod.tensorflow, horovod.tensorflow.keras, horovod.keras), hvdkit or PyTorch's
    DistributedDataParallel.

    \b
    For each of the eight steps it says
      done         with the lines
      missing
      not needed   and why: DDP, for example, broadcasts the model itself
      undecided    what the text does not settle: data that another module loads, for example

    Then it lists findings by line, each with what, why and fix. Examples are a rank that is compared without being
    called, a checkpoint that every rank writes, and a collective on a branch that one rank takes. docs/check.md lists
    all rules. A finding is what the text shows for certain.

    \b
    Examples:
      hvdkit check train.py
      hvdkit check examples/*/cnn.py
      hvdkit check --json train.py | python -c 'import json, sys; print(json.load(sys.stdin)["ok"])'

    The JSON object has "ok" and "scripts"; each of these has "path", "library" ("horovod", "hvdkit", "ddp" or "none"),
    "steps" (number, name, status, lines, note) and "findings" (rule, line, what, why, fix). A script without any of
    the libraries trains in one process: the report says so, and that is no finding.

    Exit status: 0 without findings, 1 with findings, 2 for bad usage, such as a file that is not Python.
    """
    checked = [check_script(script) for script in [read_script(path) for path in scripts]]
    ok = not any(one.findings for one in checked)
    if json_:
        click.echo(json_files.encode(CheckReport(ok, tuple(map(_script, checked)))), nl=False)
    else:
        width = min(shutil.get_terminal_size().columns, _WIDEST)
        click.echo("\n\n".join("\n".join(_lines(one, width)) for one in checked))
    return 0 if ok else 1


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


def _script(checked: Checked) -> OneScript:
    steps = tuple(
        ScriptStep(step.number, step.name, verdict.status, verdict.lines, verdict.note)
        for step, verdict in zip(STEPS, checked.verdicts, strict=True)
    )
    return OneScript(checked.path, checked.library, steps, tuple(checked.findings))


def _lines(checked: Checked, width: int) -> list[str]:
    """One script as text, in lines of at most ``width`` columns where words allow."""
    used = f" ({', '.join(checked.modules)})" if checked.modules else ""
    lines = [f"{click.style(checked.path, bold=True)}: {_LIBRARIES[checked.library]}{used}"]
    if checked.library == "none":
        nothing = "No Horovod, hvdkit or DDP in this text: it trains in one process, and there are no steps to check."
        others = f"It uses {', '.join(checked.others)}, which is not checked."
        lines.append(f"  {others if checked.others else nothing}")
        if not checked.findings:
            return lines
    else:
        lines += [_step(*one, width) for one in zip(STEPS, checked.verdicts, strict=True)]
    for finding in checked.findings:
        place = click.style(f"{checked.path}:{finding.line}", bold=True)
        lines += ["", f"{place} [{finding.rule}]", *explanation(finding, width, hanging=8, end=".")]
    return [*lines, "", f"{count_text(len(checked.findings), 'finding') if checked.findings else 'No findings'}."]


def _step(step: StepRule, verdict: Verdict, width: int) -> str:
    longest = max(len(one.name) for one in STEPS)
    status = click.style(verdict.status.ljust(10), fg=_COLOURS[verdict.status])
    start = f"  {step.number} {step.name.ljust(longest)}  {status}  "
    where = f"line{'s' if len(verdict.lines) > 1 else ''} {', '.join(map(str, verdict.lines))}" if verdict.lines else ""
    said = "; ".join(part for part in (where, verdict.note) if part)
    indent = " " * (longest + 18)
    text = fill(said, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False)
    return (start + text.removeprefix(indent)).rstrip()
