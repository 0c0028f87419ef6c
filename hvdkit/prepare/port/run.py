"""A script in, the ported one and its report out."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from difflib import SequenceMatcher
from textwrap import fill

from hvdkit.common.units import count_text
from hvdkit.prepare.check.report import check_script
from hvdkit.prepare.check.source import Script, too_deep
from hvdkit.prepare.check.steps import UNDECIDED
from hvdkit.prepare.port import from_ddp, from_horovod, from_single
from hvdkit.prepare.port.edits import MISFITS, Edits, ScriptText
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


def port(text: ScriptText) -> Ported:
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
    for _, i1, i2, j1, j2 in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        for at in range(i1, max(i2, i1 + 1)):
            lines.setdefault(at, min(j1 + at - i1, max(j2 - 1, j1)))
    return [Left(lines.get(finding.line - 1, finding.line - 1) + 1, finding.why, finding.write) for finding in left]
