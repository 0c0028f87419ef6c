"""A script as bytes, as the syntax tree that ``check`` reads, and as LibCST's tree, which keeps every byte."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider

from hvdkit.common import files
from hvdkit.errors import InvalidArgumentError
from hvdkit.prepare.check.source import read_script, too_deep

_Expressions = dict[tuple[int, int, int, int], cst.BaseExpression]
_Statements = dict[tuple[int, int], cst.BaseSmallStatement | cst.BaseCompoundStatement]


class ScriptText:
    """One script, with LibCST's nodes for those of ``ast``.

    Attributes:
        tree: what ``check`` reads.
        module: what is rewritten.
    """

    def __init__(self, path: str, content: bytes, tree: ast.Module) -> None:
        self.path, self.content, self.tree = path, content, tree
        try:
            self.module = cst.parse_module(content)
        except cst.ParserSyntaxError as error:
            raise InvalidArgumentError(
                f"{path}, line {error.raw_line}, is written in a way that LibCST cannot read; rewrite that line."
            ) from error
        except RecursionError as error:
            raise too_deep(path) from error
        if self.module.bytes != content:
            raise InvalidArgumentError(
                f"{path} holds characters between its lines that cannot be kept (a form feed); take them out."
            )
        self._lines = re.split(r"\r\n|\r|\n", content.decode(self.module.encoding).removeprefix("\ufeff"))

    @cached_property
    def _wrapper(self) -> MetadataWrapper:
        return MetadataWrapper(self.module, unsafe_skip_copy=True)

    @cached_property
    def parents(self) -> Mapping[cst.CSTNode, cst.CSTNode]:
        """Of LibCST's nodes."""
        return self._wrapper.resolve(ParentNodeProvider)

    @cached_property
    def _places(self) -> tuple[_Expressions, _Statements]:
        expressions: _Expressions = {}
        statements: _Statements = {}
        for node, found in self._wrapper.resolve(PositionProvider).items():
            place = (found.start.line, found.start.column, found.end.line, found.end.column)
            if isinstance(node, cst.BaseExpression):
                expressions[place] = node
            elif isinstance(node, (cst.BaseSmallStatement, cst.BaseCompoundStatement)):
                statements[place[:2]] = node
        return expressions, statements

    def _column(self, line: int, column: int) -> int:
        """In characters what ``ast`` counts in bytes of UTF-8."""
        return len(self._lines[line - 1].encode()[:column].decode())

    def expression(self, node: ast.expr) -> cst.BaseExpression | None:
        """LibCST's node of an expression; None where it has none of its own."""
        end = node.end_lineno or node.lineno
        expressions, _ = self._places
        return expressions.get(
            (node.lineno, self._column(node.lineno, node.col_offset), end, self._column(end, node.end_col_offset or 0))
        )

    def argument(self, node: ast.expr) -> cst.Arg | None:
        """The argument of a call that an expression is."""
        found = self.expression(node)
        parent = self.parents.get(found) if found is not None else None
        return parent if isinstance(parent, cst.Arg) else None

    def line(self, node: ast.AST) -> cst.SimpleStatementLine | cst.BaseCompoundStatement | None:
        """The statement that stands alone on its lines in a block; None where others share its line."""
        if not isinstance(node, ast.stmt):
            return None
        _, statements = self._places
        found = statements.get((node.lineno, self._column(node.lineno, node.col_offset)))
        if not isinstance(found, cst.BaseSmallStatement):
            return found
        parent = self.parents[found]
        return parent if isinstance(parent, cst.SimpleStatementLine) and len(parent.body) == 1 else None

    def source(self, node: ast.AST) -> str:
        """The text of an expression, as the owner wrote it, on one line."""
        found = self.expression(node) if isinstance(node, ast.expr) else None
        written = self.module.code_for_node(found) if found is not None else ast.unparse(node)
        return written if "\n" not in written and "\r" not in written else ast.unparse(node)


def read(path: str) -> ScriptText:
    """Read and parse one script.

    Raises:
        InvalidArgumentError: as ``check.source.read_script``, or it cannot be kept byte for byte.
    """
    tree = read_script(path).tree
    return ScriptText(path, files.content(Path(path)), tree)
