"""The command ``hvdkit port``: a script in, the ported one without unused imports, and what is left, out."""

from __future__ import annotations

import ast
import difflib
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

import click

from hvdkit.common import files
from hvdkit.common.commands import time_limit
from hvdkit.common.units import count_text
from hvdkit.prepare.check.rules import check_script
from hvdkit.prepare.check.source import Script, too_deep
from hvdkit.prepare.check.steps import UNDECIDED
from hvdkit.prepare.port import from_ddp, from_horovod, from_single
from hvdkit.prepare.port.edits import MISFITS, Edits, ScriptText, read
from hvdkit.prepare.port.plan import Left, PortPlan, Unsure

_FROM = {"horovod": from_horovod.port, "ddp": from_ddp.port, "none": from_single.port}
_NAMES = {"horovod": "plain Horovod", "ddp": "PyTorch DDP", "none": "one process", "hvdkit": "hvdkit"}
_LEFT_BEHIND = re.compile(
    r"horovod\.\w|torch\.distributed\b|torch\.nn\.parallel\b|torch\.utils\.data\.(distributed\.)?DistributedSampler$"
)
_BY_HAND = {
    4: {"keras": "hk.distribute(optimizer)", "tensorflow": "tape = hk.distribute(tape)",
        "torch": "hk.distribute(optimizer, model)"},
    5: {"keras": "callbacks=[hk.BroadcastState()] in fit",
        **dict.fromkeys(("tensorflow", "torch"), "hk.broadcast_state(model, optimizer), before the first step")},
    7: {**dict.fromkeys(("keras", "tensorflow"), "hk.shard((x, y), world, batch_size)"),
        "torch": "hk.shard(dataset, world, batch_size), or draw each rank's samples by a seed of its own"},
}  # fmt: skip
"""By step and binding."""
_UNNOTICED = range(4, 9)
"""The steps that a training may lack and run all the same."""


@click.command()
@click.argument("script", metavar="SCRIPT.py")
@click.argument("arguments", metavar="[-- ARGUMENT ...]", nargs=-1)
@click.option("-o", "--output", metavar="OUT", type=click.Path(path_type=Path), help="Write the ported script there.")
@click.option("--in-place", is_flag=True, help="Overwrite SCRIPT.py with the ported script.")
@click.option("--diff", is_flag=True, help="Show what changes, as a unified diff, and write nothing.")
@click.option("--try", "try_", is_flag=True, help="Run both scripts for some steps, and compare their weights.")
@click.option(
    "--try-steps", type=click.IntRange(1, 1000), default=5, show_default=True, metavar="N", help="Steps of --try."
)
@time_limit(600.0, "Time limit of each run of --try.", "--try-timeout", most=None)
def port(
    script: str,
    arguments: tuple[str, ...],
    *,
    output: Path | None,
    in_place: bool,
    diff: bool,
    try_: bool,
    try_steps: int,
    try_timeout: float,
) -> int:
    """Write the eight steps into a training script.

    Reads a script that trains in one process, that uses Horovod, or PyTorch's DistributedDataParallel, and writes one
    that uses hvdkit. It handles PyTorch loops, Keras' fit and loops over a TensorFlow tape. Nothing is run without
    --try. What is not changed stays byte for byte.

    It never guesses: what the text does not show for certain stays as it is. It is listed with its line in the ported
    script, the reason, and what to write by hand. What `hvdkit check` finds in the result is listed, too.

    --try runs the script in one process and the ported one on 1 and on 2 ranks here, from fixed seeds, for a few
    optimizer steps. They run in this directory, with your data and the arguments after `--`; what a script writes by
    then is written. 1 rank must take the script's own steps. 2 ranks must take those of one process that is given both
    ranks' batches. The verdict comes first, then how near the weights are, then what could not be compared, and why.

    \b
    Examples:
      hvdkit port train.py --diff
      hvdkit port train.py -o train_hvdkit.py
      hvdkit port train.py -o train_hvdkit.py --try -- --batch-size 16

    Without -o or --in-place the script goes to standard output, and the report to standard error.

    Exit status: 0 where no place is left to write by hand and --try finds no difference, 1 otherwise, 2 for bad usage,
    such as a file that is not Python. A step that the text leaves open is a note.
    """
    if (output is not None) + in_place + diff > 1:
        raise click.UsageError("give one of -o, --in-place and --diff")
    if arguments and not try_:
        raise click.UsageError(f"{arguments[0]!r} is an argument of the script, which runs only with --try")
    ported = port_script(read(script))
    if diff:
        _show_diff(ported)
    elif in_place:
        path = Path(script).resolve()
        mode = path.stat().st_mode
        with files.replacing(path) as file:
            file.write(ported.after)
        path.chmod(mode)
    elif output is not None:
        with files.replacing(output, Path(script)) as file:
            file.write(ported.after)
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(ported.after)
    told = in_place or output is not None
    click.echo(ported.as_text(), err=not told)
    equal = True
    if try_:
        from hvdkit.prepare.port import trial  # with NumPy, which nothing else here needs

        scripts = trial.Scripts(ported.before.path, ported.before.content, ported.after, ported.library == "ddp")
        tried = trial.attempt(scripts, arguments, try_steps, try_timeout)
        click.echo(tried.as_text(), err=not told)
        equal = tried.ok
    return 1 if ported.left or not equal else 0


def _show_diff(ported: Ported) -> None:
    before, after = (re.findall(rb".*\n|.+", one) for one in (ported.before.content, ported.after))
    path = os.fsencode(ported.before.path)
    lines = difflib.diff_bytes(difflib.unified_diff, before, after, path, path)
    ended = (one if one.endswith(b"\n") else one + b"\n\\ No newline at end of file\n" for one in lines)
    click.echo(b"".join(ended), nl=False)


@dataclass(frozen=True)
class Ported:
    """One script, ported as far as that is certain.

    Attributes:
        before: the script.
        after: the ported one, the same bytes where nothing is certain.
        library: what it was: "horovod", "ddp", "none" (one process) or "hvdkit".
        binding: hvdkit's module for it.
        left: what stays, by line of the ported script.
        notes: what else to know.
        sure: the ported script shows for each of steps 4 to 8 whether it is done, and no earlier port left anything.
    """

    before: ScriptText
    after: bytes
    library: str
    binding: str
    left: tuple[Left, ...]
    notes: tuple[str, ...]
    sure: bool

    def as_text(self) -> str:
        """What stays, by line of the ported script, with reason and what to write."""
        changed = self.after != self.before.content
        to = f" to hvdkit.{self.binding}" if changed else ", nothing changed"
        lines = [f"{self.before.path}: from {_NAMES[self.library]}{to}"]
        for finding in self.left:
            lines += ["", f"line {finding.line}: {finding.why}.", _filled(f"write: {finding.write}")]
        if self.notes:
            lines += ["", *(_filled(f"note: {one}.") for one in self.notes)]
        if self.left:
            end = f"{count_text(len(self.left), 'place')} to write by hand."
        elif self.sure:
            end = "Nothing is left to write by hand."
        else:
            end = "Whether something is left to write by hand is not certain: see the notes."
        return "\n".join([*lines, "", end])


def _filled(text: str) -> str:
    return fill(
        text, 110, initial_indent="  ", subsequent_indent=" " * 9, break_long_words=False, break_on_hyphens=False
    )


def port_script(text: ScriptText) -> Ported:
    """Write the eight steps into a script, as far as its text shows where they belong.

    Raises:
        InvalidArgumentError: it nests expressions more deeply than LibCST goes.
    """
    try:
        plan, after = _planned(text)
    except RecursionError as error:
        raise too_deep(text.path) from error
    library = plan.case.library
    left = _moved(plan.left, text, after)
    found = check_script(Script(text.path, after.tree))
    left += [Left(finding.line, finding.what, finding.fix) for finding in found.findings]
    written = library == "none" and after is not text and not left
    doubts = {number: found.verdicts[number - 1] for number in _UNNOTICED}
    doubts = {number: verdict for number, verdict in doubts.items() if verdict.status == UNDECIDED}
    for number, verdict in doubts.items():
        if written and number in _BY_HAND:
            why = f"whether step {number} is done is not certain: {verdict.note}"
            left.append(Left(1, why, _BY_HAND[number][plan.binding]))
        else:
            plan.note(f"step {number} is not certain: {verdict.note}")
    kept = {(finding.line, finding.why): finding for finding in left}
    return Ported(text, after.content, library, plan.binding, tuple(sorted(kept.values(), key=lambda one: one.line)),
                  tuple(plan.notes), sure=not doubts and library != "hvdkit")  # fmt: skip


def _planned(text: ScriptText) -> tuple[PortPlan, ScriptText]:
    """What is changed, and the script with it."""
    plan = PortPlan(text)
    library = plan.case.library
    if library == "hvdkit":
        plan.note("it uses hvdkit already; what an earlier port left to write by hand is not listed again")
    if library not in _FROM or plan.case.of_tensorflow_1:  # those are in the findings
        return plan, text
    try:
        if not text.is_whole:
            odd = "form feeds in front of code, lines that end in CR alone, or code that LibCST does not read"
            raise Unsure(1, f"it has {odd}", "write it otherwise first")
        _FROM[library](plan)
        plan.declare()
        return plan, _tidy(text, plan.edits.parsed()) if plan.edits.asked else text
    except MISFITS as error:
        line = getattr(error, "lineno", 1)
        unsure = Unsure(1, f"the changes do not fit its text (line {line})", "port it by docs/migrate.md")
    except Unsure as error:
        unsure = error
    plan.left, plan.notes = [unsure.left], []
    return plan, text


def _tidy(before: ScriptText, after: ScriptText) -> ScriptText:
    """A ported script without the imports of Horovod and DDP that its changes, and not its owner, have left unused."""
    gone = _used(before.tree) - _used(after.tree)
    edits = Edits(after)
    for statement in (node for node in ast.walk(after.tree) if isinstance(node, (ast.Import, ast.ImportFrom))):
        base = f"{statement.module}." if isinstance(statement, ast.ImportFrom) else ""
        names = {one.asname or one.name for one in statement.names}
        left_behind = all(_LEFT_BEHIND.match(base + one.name) for one in statement.names)
        node = after.node(statement)
        if names <= gone and left_behind and node is not None:
            edits.asked[node, "remove", ""] = None
    return edits.parsed() if edits.asked else after


def _used(tree: ast.Module) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _moved(left: list[Left], before: ScriptText, after: ScriptText) -> list[Left]:
    """The same with the lines of the ported script."""
    if after is before:
        return left
    old, new = before.content.splitlines(), after.content.splitlines()
    lines: dict[int, int] = {}
    for _, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        for at in range(i1, max(i2, i1 + 1)):
            lines.setdefault(at, min(j1 + at - i1, max(j2 - 1, j1)))
    return [Left(lines.get(finding.line - 1, finding.line - 1) + 1, finding.why, finding.write) for finding in left]
