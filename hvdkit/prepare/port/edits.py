"""A script's text, and changes to it that are collected by piece and made at once; all else stays byte for byte."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from hvdkit.prepare.check.source import decoded, read_script

Change = Callable[[str], str]
"""Makes the new text of a piece, from its text in which all that lies within has changed."""
_NOTHING = re.compile(r"[ \t\f]*(#.*)?$")
"""A line without code."""


_Placed = ast.expr | ast.stmt | ast.keyword | ast.alias


class _Piece(NamedTuple):
    """A piece of the text: bytes of UTF-8, and which of several of the same bytes holds the others."""

    start: int
    end: int
    level: int = 0


class ScriptText:
    """One script.

    Attributes:
        content: as it was read, in its own encoding.
        tree: what ``check`` reads.
    """

    def __init__(self, path: str, content: bytes, tree: ast.Module) -> None:
        self.path, self.content, self.tree = path, content, tree
        text, self.encoding = decoded(content)
        self.data = text.encode()
        self.newline = next(iter(re.findall(r"\r\n|\r|\n", text)), "\n")
        self.starts = [0, *(one.end() for one in re.finditer(rb"\r\n|\r|\n", self.data))]
        self._blocks: dict[ast.AST, list[ast.stmt]] = {}
        for node in ast.walk(tree):
            for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
                if isinstance(block, list):
                    self._blocks |= dict.fromkeys(block, block)

    def block(self, statement: ast.AST) -> list[ast.stmt]:
        """The statements among which one stands."""
        return self._blocks.get(statement, [])

    def piece(self, node: _Placed, level: int = 0) -> _Piece:
        """Where a node is."""
        end = self.starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        return _Piece(self.starts[node.lineno - 1] + node.col_offset, end, level)

    def lines(self, first: int, after: int) -> str:
        """The text of lines that are counted from 1, up to one."""
        ends = [*self.starts, len(self.data)]
        return self.data[self.starts[first - 1] : ends[after - 1]].decode()

    def source(self, node: ast.AST) -> str:
        """The text of an expression, as the owner wrote it, on one line."""
        start, end, _ = self.piece(node) if isinstance(node, ast.expr) else _Piece(0, 0)
        written = self.data[start:end].decode()
        return written if written and "\n" not in written and "\r" not in written else ast.unparse(node)

    def stands_alone(self, statement: ast.AST) -> bool:
        """Whether a statement shares its lines with no other, so that code can be put above and below it."""
        if not isinstance(statement, ast.stmt) or statement not in self._blocks:
            return False
        start, end, _ = self.piece(statement)
        before = self.data[self.starts[statement.lineno - 1] : start]
        after = self.data[end : [*self.starts, len(self.data)][statement.end_lineno or 0]]
        return not before.strip() and re.fullmatch(r"\s*;?\s*(#.*)?\s*", after.decode()) is not None


def read(path: str) -> ScriptText:
    """Read and parse one script.

    Raises:
        InvalidArgumentError: as ``check.source.read_script``.
    """
    script = read_script(path)
    return ScriptText(path, script.content, script.tree)


class Edits:
    """The changes of one script."""

    def __init__(self, text: ScriptText) -> None:
        self.text = text
        self._changes: dict[_Piece, list[Change]] = {}
        self._statements: dict[ast.stmt, dict[str, list[str]]] = {}

    def __bool__(self) -> bool:
        return bool(self._changes or self._statements)

    def change(self, piece: _Piece, make: Change) -> None:
        """Make another text of a piece, once: two calls of ``fit`` may ask for the same of their data set."""
        made = self._changes.setdefault(piece, [])
        if make not in made:
            made.append(make)

    def add(self, call: ast.Call, argument: str, place: int | None = None) -> None:
        """Give a call one more argument, at the end or at a place further up."""
        given = [self.text.piece(one) for one in _in_order([*call.args, *call.keywords])]
        end = self.text.piece(call).end
        separator = ", " if given else ""
        if place is None or place >= len(given):
            place = len(given)
            if len(given) > 1 and b"," in self.text.data[given[-1].end : end]:  # one argument a line
                separator = self.text.data[given[-2].end : given[-1].start].decode()
        at = given[place - 1].end if given else end - 1
        self.change(_Piece(at, at), _adding(f"{separator}{argument}"))

    def drop(self, whole: Sequence[_Placed], gone: Sequence[ast.AST]) -> None:
        """Take some of the arguments of a call, or of the names of an import, out; not all of them."""
        ordered = _in_order(whole)
        pieces = [self.text.piece(one) for one in ordered]
        kept = next(place for place, one in enumerate(ordered) if one not in gone)
        if kept:
            self.change(_Piece(pieces[0].start, pieces[kept].start), to(""))
        for place in range(kept + 1, len(ordered)):
            if ordered[place] in gone:
                self.change(_Piece(pieces[place - 1].end, pieces[place].end), to(""))

    def edit(self, how: str, statement: ast.stmt, code: str = "") -> None:
        """Change a statement as a whole.

        Args:
            how: insert code "before" it and its comments, "first" of all that is before it, or "after" it; "swap" it
                for code, under its comments;
                "remove" it, with the comments directly above it; "unwrap" the block of a ``with``; "guard" it by a
                condition.
        """
        codes = self._statements.setdefault(statement, {}).setdefault(how, [])
        if code not in codes:
            codes.append(code)

    def made(self) -> bytes:
        """The script with all changes."""
        text = self.text
        changes = dict(self._changes)
        for statement in self._statements:
            first = self._first_line(statement)
            end = [*text.starts, len(text.data)][statement.end_lineno or statement.lineno]
            changes[_Piece(text.starts[first - 1], end, 2)] = [self._around(statement, first)]
        order = sorted(changes, key=lambda one: (one.start, one.start != one.end, -one.end, -one.level))

        def rendered(piece: _Piece, inside: list[_Piece]) -> str:
            """The text of a piece, from the inside out."""
            made, at = "", piece.start
            while inside:
                child, within = inside.pop(0), []
                while inside and inside[0].start < child.end:
                    within.append(inside.pop(0))
                made += text.data[at : child.start].decode() + rendered(child, within)
                at = child.end
            made += text.data[at : piece.end].decode()
            for change in changes.get(piece, ()):
                made = change(made)
            return made

        return rendered(_Piece(0, len(text.data), 3), order).encode(text.encoding)

    # Statements -------------------------------------------------------------------------------------------------------

    def _first_line(self, statement: ast.stmt) -> int:
        """The first line of a statement, its decorators and the comments and empty lines above it."""
        line = _start(statement)
        beside = self.text.block(statement)
        if statement is self.text.tree.body[0]:  # what is above it is about the whole script
            return line
        at = beside.index(statement)
        above = (beside[at - 1].end_lineno or 0) + 1 if at else 1
        while line > above:
            previous = self.text.lines(line - 1, line).rstrip("\r\n")
            deeper = len(previous) - len(previous.lstrip()) > statement.col_offset
            if not _NOTHING.match(previous) or (deeper and previous.strip()):
                break
            line -= 1
        return line

    def _around(self, statement: ast.stmt, first: int) -> Change:
        """What to do with the lines of a statement and of what is above it."""
        text, how = self.text, self._statements[statement]
        start = _start(statement)
        above = text.lines(first, start)
        indent = text.data[text.starts[statement.lineno - 1] :][: statement.col_offset].decode()
        beside = text.block(statement)

        def lines(*codes: str) -> str:
            unit, newline = self._unit, text.newline
            found = [line for code in codes for line in code.split("\n")]
            found = [re.sub("^( {4})+", lambda spaces: unit * (len(spaces.group()) // 4), line) for line in found]
            return "".join(f"{indent}{line}{newline}" if line else newline for line in found)

        def make(old: str) -> str:
            head = lines(*how.get("first", ()), *how.get("before", ()))
            tail = lines(*how.get("after", ()))
            lead, middle = above, old[len(above) :]
            if "remove" in how:
                kept = lead.splitlines(keepends=True)
                while kept and kept[-1].strip():  # a comment on what is gone
                    kept.pop()
                gone = all(set(self._statements.get(one, {})) == {"remove"} for one in beside)
                last = lines("pass") if gone and statement is beside[-1] else ""
                return "".join([*kept, head, tail, last])
            if "unwrap" in how:
                inside: ast.stmt = getattr(statement, "body", [statement])[0]
                body = middle.splitlines(keepends=True)[inside.lineno - start :]
                middle = _reindented("".join(body), lambda line: line[inside.col_offset - statement.col_offset :])
            elif "swap" in how:
                end = self.text.piece(statement).end
                rest = text.data[end : [*text.starts, len(text.data)][statement.end_lineno or 0]].decode()
                simple = not hasattr(statement, "body")
                new = lines(*how["swap"][-1:])
                middle = new.removesuffix(text.newline) + rest if simple else new
            elif "guard" in how:
                inner = _reindented(middle, lambda line: self._unit + line if line.strip() else line)
                middle = f"{indent}if {how['guard'][0]}:{text.newline}{inner}"
            if tail and not middle.endswith(("\n", "\r")):  # the last line of the script
                return f"{head}{lead}{middle}{text.newline}{tail}".removesuffix(text.newline)
            return f"{head}{lead}{middle}{tail}"

        return make

    @property
    def _unit(self) -> str:
        """By what the script's first block is indented."""
        for node in (one for one in ast.walk(self.text.tree) if isinstance(one, ast.stmt)):
            first: ast.AST | None = next(iter(getattr(node, "body", None) or []), None)
            if isinstance(first, ast.stmt) and first.lineno > node.lineno and self.text.stands_alone(first):
                line = self.text.data[self.text.starts[first.lineno - 1] :]
                return line[node.col_offset : first.col_offset].decode()
        return "    "


def _reindented(code: str, make: Change) -> str:
    """Lines of code under another indentation; those that begin within a text stay."""
    deep = "if 1:\n" if code[:1].isspace() else ""
    inside: set[int] = set()
    begun: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(deep + code).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_START":
            begun.append(token.start[0])
        elif kind in ("STRING", "FSTRING_END"):
            inside |= set(range((begun.pop() if kind == "FSTRING_END" else token.start[0]) + 1, token.end[0] + 1))
    lines = re.split(r"(?<=\n)|(?<=\r)(?!\n)", code)
    return "".join(one if at in inside else make(one) for at, one in enumerate(lines, 1 + bool(deep)))


def _start(statement: ast.stmt) -> int:
    """The first line of a statement or of its decorators."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(one.lineno for one in decorators)])


def _in_order(nodes: Sequence[_Placed]) -> list[_Placed]:
    return sorted(nodes, key=lambda one: (one.lineno, one.col_offset))


# Expressions: the functions are cached, so that the same change is the same object ------------------------------------


@cache
def to(code: str) -> Change:
    """Another text in the place of this one."""
    return lambda _: code


@cache
def around(template: str) -> Change:
    """An expression that holds this one where ``template`` says ``__``."""
    return lambda old: template.replace("__", old)


@cache
def as_keyword(name: str, value: str | None = None, had: bool = False) -> Change:
    """An argument under this name, "" for none; with another value. ``had``: whether it had a name."""

    def make(old: str) -> str:
        equal, given = "=", old
        if had:
            _, equal, given = re.split(r"(\s*=\s*)", old, maxsplit=1)
        return (f"{name}{equal}" if name else "") + (given if value is None else value)

    return make


@cache
def _adding(code: str) -> Change:
    return lambda old: old + code
