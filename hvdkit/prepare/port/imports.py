"""Imports that nothing uses any more, once a script is ported."""

from __future__ import annotations

import ast
import re
from typing import Any

import libcst as cst

from hvdkit.prepare.port.edits import Change, Edits
from hvdkit.prepare.port.text import Text

_LEFT_BEHIND = re.compile(
    r"horovod\.\w|torch\.distributed\b|torch\.nn\.parallel\b|torch\.utils\.data\.(distributed\.)?DistributedSampler$"
)


def tidy(before: Text, after: Text) -> bytes:
    """A ported script without the imports of Horovod and DDP that its changes have left unused.

    Args:
        before: the script that was ported; what it did not use either stays.
        after: the ported one.
    """
    gone = _used(before.tree) - _used(after.tree)
    edits = Edits(after.module)
    for statement in (one for one in ast.walk(after.tree) if isinstance(one, (ast.Import, ast.ImportFrom))):
        line = after.line(statement)
        base = f"{statement.module}." if isinstance(statement, ast.ImportFrom) else ""
        left = [at for at, one in enumerate(statement.names) if not _is_gone(base, one, gone)]
        if line is None or len(left) == len(statement.names):
            continue
        if left:
            edits.change(cst.ensure_type(line, cst.SimpleStatementLine).body[0], _only(left))
        else:
            edits.edit("remove", line)
    return edits.made() if edits else after.content


def _is_gone(base: str, alias: ast.alias, gone: set[str]) -> bool:
    plain = bool(alias.asname or base or "." not in alias.name)
    return plain and (alias.asname or alias.name) in gone and _LEFT_BEHIND.match(base + alias.name) is not None


def _only(places: list[int]) -> Change:
    """An import of some of its names."""

    def make(node: Any) -> Any:
        kept = [node.names[at] for at in places]
        return node.with_changes(names=[*kept[:-1], kept[-1].with_changes(comma=node.names[-1].comma)])

    return make


def _used(tree: ast.Module) -> set[str]:
    return {one.id for one in ast.walk(tree) if isinstance(one, ast.Name)}
