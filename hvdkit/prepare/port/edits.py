"""A script's text, and changes to it that are collected by node and made at once; all else stays byte for byte."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import libcst as cst
from libcst.metadata import ByteSpanPositionProvider, CodeSpan, MetadataWrapper

from hvdkit.prepare.check.source import decoded, parsed, read_script

MISFITS = (SyntaxError, cst.ParserSyntaxError)
"""What is raised where changes do not fit the text."""
OLD = "__"
"""In new code for an expression: here stands the old one."""
_MOVED = re.compile(r"__(\d+)_(\d+)__")
"""In new code: here stands the expression between these bytes, with what changes in it."""

_EQUAL = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
_ONE_BLANK: cst.BaseParenthesizableWhitespace = cst.SimpleWhitespace(" ")
_NO_COMMENT = cst.TrailingWhitespace()


class ScriptText:
    """One script.

    Attributes:
        content: as it was read, in its own encoding.
        tree: what ``check`` reads.
    """

    def __init__(self, path: str, content: bytes, tree: ast.Module) -> None:
        self.path, self.content, self.tree = path, content, tree
        text, self.encoding = decoded(content)
        self._data = text.encode()
        self._starts = [0, *(end.end() for end in re.finditer(rb"\r\n|\r|\n", self._data))]

    @cached_property
    def module(self) -> cst.Module:
        """What LibCST reads, which makes the changes."""
        return cst.parse_module(self._data.decode())

    @property
    def is_whole(self) -> bool:
        """Whether LibCST gives the text back as it is; it drops form feeds in front of code."""
        try:
            return self.module.code.encode() == self._data
        except cst.ParserSyntaxError:  # what only Python's own parser knows
            return False

    @cached_property
    def _nodes(self) -> dict[tuple[int, int], cst.CSTNode]:
        """By first and last byte the expressions, and the statements that share their lines with no other."""
        metadata = MetadataWrapper(self.module, unsafe_skip_copy=True)
        spans: dict[cst.CSTNode, CodeSpan] = dict(metadata.resolve(ByteSpanPositionProvider))
        found: dict[tuple[int, int], cst.CSTNode] = {}
        for node, span in spans.items():
            first = last = span
            if isinstance(node, (cst.Tuple, cst.GeneratorExp)) and node.lpar:  # to ``ast`` these hold their brackets
                first, last = spans[node.lpar[-1]], spans[node.rpar[0]]
            if isinstance(node, cst.BaseExpression):
                found.setdefault((first.start, last.start + last.length), node)
            elif isinstance(node, (cst.Module, cst.IndentedBlock)):
                for statement in node.body:
                    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) == 1:
                        found[spans[statement].start, -1] = statement
        return found

    def node(self, node: ast.expr | ast.stmt) -> cst.CSTNode | None:
        """LibCST's node of an expression, or of a statement that stands alone."""
        start, end = self.span(node)
        return self._nodes.get((start, -1 if isinstance(node, ast.stmt) else end))

    def between(self, start: int, end: int) -> cst.CSTNode:
        """The expression between two bytes."""
        return self._nodes[start, end]

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Where a node begins and ends, in bytes of UTF-8."""
        end = self._starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        return self._starts[node.lineno - 1] + node.col_offset, end

    def source(self, node: ast.AST) -> str:
        """The text of an expression, as the owner wrote it, on one line."""
        start, end = self.span(node) if isinstance(node, ast.expr) else (0, 0)
        written = self._data[start:end].decode()
        return written if written and "\n" not in written and "\r" not in written else ast.unparse(node)

    def moved(self, node: ast.expr) -> str:
        """What stands in new code for an expression, and for all that changes in it."""
        start, end = self.span(node)
        try:
            alone = len(parsed(self._data[start:end], self.path).body) == 1
        except SyntaxError:
            alone = False
        return f"__{start}_{end}__" if alone else f"(__{start}_{end}__)"  # which goes on over lines in brackets

    def stands_alone(self, statement: ast.AST) -> bool:
        """Whether a statement shares its lines with no other, so that code can be put above and below it."""
        return isinstance(statement, ast.stmt) and self.node(statement) is not None


def read(path: str) -> ScriptText:
    """Read and parse one script.

    Raises:
        InvalidArgumentError: as ``check.source.read_script``.
    """
    script = read_script(path)
    return ScriptText(path, script.content, script.tree)


class Edits(cst.CSTTransformer):
    """The changes of one script.

    Attributes:
        asked: of what node, how and with what, each once, in order: two calls of ``fit`` may ask for the same of their
            data set.

    ::

        expression  change            new code, in which ``__`` is the old one
        list        begin             one more element, in front of all
        call        rename            place of an argument, its keyword ("" for none), another value (or None)
                    drop              place of an argument
                    add               place (None: the end), keyword, value
        statement   before, after     code above it and its comments, or below
                    first             code above all that is "before"
                    swap              code in its place, under its comments
                    remove, unwrap    nothing in its place, without the comments directly above; the block of a ``with``
                    guard             a condition around it
    """

    def __init__(self, text: ScriptText) -> None:
        super().__init__()
        self.text = text
        self.asked: dict[tuple[cst.CSTNode, str, Any], None] = {}
        self._of: dict[cst.CSTNode, dict[str, list[Any]]] = {}

    def parsed(self) -> ScriptText:
        """The script with all changes, read again; raises one of ``MISFITS`` where it would be no Python."""
        self._of = {}
        for node, how, what in self.asked:
            self._of.setdefault(node, {}).setdefault(how, []).append(what)
        content = self.text.module.visit(self).code.encode(self.text.encoding)
        tree = parsed(content, self.text.path)
        compile(tree, self.text.path, "exec", dont_inherit=True)
        return ScriptText(self.text.path, content, tree)

    def on_leave(self, original_node: cst.CSTNodeT, updated_node: cst.CSTNodeT) -> Any:
        """LibCST's: what a node becomes, once all that lies within has changed."""
        made: Any = updated_node
        asked = self._of.get(original_node, {})
        if isinstance(original_node, (cst.Module, cst.IndentedBlock)):
            return self._block(original_node, made)
        if isinstance(made, cst.Call) and asked:
            made = self._call(made, asked)
        for code in asked.get("begin", ()):
            more: Any = cst.Element(self._expression(code))
            if made.elements:  # a comment in front of the first one stays there
                space = made.lbracket.whitespace_after
                more = more.with_changes(comma=cst.Comma(whitespace_after=_ONE_BLANK if space.empty else space))
                made = made.with_changes(lbracket=cst.LeftSquareBracket())
            made = made.with_changes(elements=[more, *made.elements])
        for code in asked.get("change", ()):
            made = self._expression(code, made)
        return made

    # Expressions ------------------------------------------------------------------------------------------------------

    def _expression(self, code: str, old: cst.BaseExpression | None = None) -> Any:
        """New code, in the brackets of the old expression."""
        made: Any = cst.parse_expression(code).visit(_Filling(self, old))
        if old is None or isinstance(old, (cst.Tuple, cst.GeneratorExp)):
            return made
        return made.with_changes(lpar=[*old.lpar, *made.lpar], rpar=[*made.rpar, *old.rpar])

    def _call(self, call: cst.Call, asked: dict[str, list[Any]]) -> cst.Call:
        """Other arguments; a comment stays with its argument."""
        given: list[cst.Arg | None] = [*call.args]
        for place, keyword, value in asked.get("rename", ()):
            old = call.args[place]
            made = old if value is None else old.with_changes(value=self._expression(value))
            given[place] = _named(made, keyword, old.equal if old.keyword else _EQUAL)
        for place in asked.get("drop", ()):
            given[place] = None
        left = [one for one in given if one is not None]
        if left and given[-1] is None and not getattr(_space(left[-1]), "first_line", _NO_COMMENT).comment:
            end, gap = call.args[-1].comma, _space(call.args[-1])
            if isinstance(gap, cst.ParenthesizedWhitespace):
                end = cst.Comma(whitespace_after=gap.with_changes(first_line=_NO_COMMENT))
            left[-1] = left[-1].with_changes(comma=end)
        start = call.whitespace_before_args if left or asked.get("add") else cst.SimpleWhitespace("")
        for place, keyword, value in asked.get("add", ()):
            new = _named(cst.Arg(self._expression(value)), keyword, _EQUAL)
            at = len(left) if place is None else sum(one is not None for one in given[:place])
            if at:
                before, after = left[at - 1], _ONE_BLANK
                gap, lead = _space(before), _space(left[at - 2]) if at > 1 else start
                new = new.with_changes(comma=before.comma, whitespace_after_arg=before.whitespace_after_arg)
                if at == len(left) and isinstance(gap, cst.ParenthesizedWhitespace) and isinstance(lead, type(gap)):
                    # One argument a line.
                    after = gap.with_changes(indent=lead.indent, last_line=lead.last_line)
                    line_end = gap.with_changes(first_line=_NO_COMMENT, empty_lines=[])
                    new = new.with_changes(comma=cst.Comma(whitespace_after=line_end))
                comma = cst.Comma(whitespace_after=after)
                left[at - 1] = before.with_changes(comma=comma, whitespace_after_arg=cst.SimpleWhitespace(""))
            elif left:
                new = new.with_changes(comma=cst.Comma(whitespace_after=_ONE_BLANK))
            left.insert(at, new)
        return call.with_changes(args=left, whitespace_before_args=start)

    # Statements -------------------------------------------------------------------------------------------------------

    def _block(self, block: cst.Module | cst.IndentedBlock, made: Any) -> Any:
        """A block whose statements have more beside them, or others in their place."""
        body: list[Any] = []
        above: list[cst.EmptyLine] = []  # what statements that are gone leave: lines that are not about them
        for old, now in zip(block.body, made.body, strict=True):
            asked = self._of.get(old, {})
            above += now.leading_lines
            head = self._statements(*asked.get("first", ()), *asked.get("before", ()))
            new: list[Any] = [now.with_changes(leading_lines=[])]
            below: list[cst.EmptyLine] = []
            if "remove" in asked:
                new = []
                while above and above[-1].comment:
                    above.pop()
            elif "unwrap" in asked:
                new, below = [*now.body.body], [*getattr(now.body, "footer", ())]
                if isinstance(now.body, cst.SimpleStatementSuite):
                    new = [cst.SimpleStatementLine(new, trailing_whitespace=now.body.trailing_whitespace)]
            elif "swap" in asked:
                new = self._statements(asked["swap"][-1])
                if isinstance(now, cst.SimpleStatementLine):
                    new[-1] = new[-1].with_changes(trailing_whitespace=now.trailing_whitespace)
            elif "guard" in asked:
                new = [cst.If(cst.parse_expression(asked["guard"][0]), cst.IndentedBlock(new))]
            if head and old is not self.text.module.body[0]:  # what is above that is about the whole script
                body += head
                head = []
            new = [*head, *new, *self._statements(*asked.get("after", ()))]
            if new:
                new[0] = new[0].with_changes(leading_lines=[*above, *new[0].leading_lines])
                above = []
            body += new
            above += below
        return made.with_changes(body=body, footer=[*above, *made.footer])

    def _statements(self, *codes: str) -> list[Any]:
        """New statements."""
        found: list[Any] = []
        for code in codes:
            module = cst.ensure_type(cst.parse_module(code).visit(_Filling(self, None)), cst.Module)
            first, *others = module.body
            found += [first.with_changes(leading_lines=[*module.header, *first.leading_lines]), *others]
        return found


class _Filling(cst.CSTTransformer):
    """Puts old expressions into new code."""

    def __init__(self, edits: Edits, old: cst.BaseExpression | None) -> None:
        super().__init__()
        self._edits, self._old = edits, old

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> Any:  # noqa: N802
        """LibCST's."""
        found: Any = self._old if original_node.value == OLD else None
        if moved := _MOVED.fullmatch(original_node.value):
            found = self._edits.text.between(int(moved[1]), int(moved[2])).visit(self._edits)
        if found is None or isinstance(found, (cst.Tuple, cst.GeneratorExp)):
            return found or updated_node
        return found.with_changes(lpar=updated_node.lpar, rpar=updated_node.rpar)


def _named(argument: cst.Arg, keyword: str, equal: Any) -> cst.Arg:
    """An argument under another keyword, "" for none."""
    return argument.with_changes(
        keyword=cst.Name(keyword) if keyword else None, equal=equal if keyword else cst.MaybeSentinel.DEFAULT
    )


def _space(argument: cst.Arg) -> cst.BaseParenthesizableWhitespace:
    """What stands behind the comma of an argument."""
    return argument.comma.whitespace_after if isinstance(argument.comma, cst.Comma) else cst.SimpleWhitespace("")


def starred(node: ast.expr) -> str:
    """``__``, for what a star is put in front of; in brackets where that needs them."""
    closed = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.List, ast.Tuple, ast.Dict)
    return OLD if isinstance(node, closed) else f"({OLD})"


def places(call: ast.Call) -> Sequence[ast.expr | ast.keyword]:
    """The arguments of a call in the order of the text."""
    given: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    return sorted(given, key=lambda one: (one.lineno, one.col_offset))
