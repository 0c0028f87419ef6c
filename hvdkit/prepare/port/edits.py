"""A script's text, and changes to it that are collected by piece and made at once; all else stays byte for byte."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from itertools import groupby
from typing import Any, NamedTuple

from hvdkit.prepare.check.source import decoded, parsed, read_script

Change = Callable[[str], str]
"""Makes the new text of a piece, from its text in which all that lies within has changed."""
_NOTHING = re.compile(r"[ \t\f]*(#.*)?$")
"""A line without code."""
MISFITS = (SyntaxError, tokenize.TokenError)
"""What is raised where changes do not fit the text."""
_BETWEEN = re.compile(rb"(\s|\\[\r\n]|#[^\r\n]*)*")
"""What may stand between two parts of an expression."""
_MOVED = re.compile("\0(\\d+) (\\d+)\0")
"""In new code: here stands this piece of the old text, with what changes in it."""
_Placed = ast.expr | ast.stmt | ast.keyword


class Piece(NamedTuple):
    """A piece of the text: bytes of UTF-8, and which of several of the same bytes holds the others."""

    start: int
    end: int
    level: int = 0


_Asked = dict[Piece | ast.AST, dict[str, list[Any]]]
"""By piece, call, import or statement what is asked of it."""


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

    def piece(self, node: _Placed) -> Piece:
        """Where a node is."""
        end = self.starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        return Piece(self.starts[node.lineno - 1] + node.col_offset, end)

    def lines(self, first: int, after: int) -> str:
        """The text of lines that are counted from 1, up to one."""
        ends = [*self.starts, len(self.data)]
        return self.data[self.starts[first - 1] : ends[after - 1]].decode()

    def source(self, node: ast.AST) -> str:
        """The text of an expression, as the owner wrote it, on one line."""
        start, end, _ = self.piece(node) if isinstance(node, ast.expr) else Piece(0, 0)
        written = self.data[start:end].decode()
        return written if written and "\n" not in written and "\r" not in written else ast.unparse(node)

    def moved(self, node: ast.expr) -> str:
        """What stands in new code for the text of an expression, and for all that changes in it."""
        start, end, _ = self.piece(node)
        try:
            alone = len(parsed(self.data[start:end], self.path).body) == 1
        except SyntaxError:
            alone = False
        return f"\0{start} {end}\0" if alone else f"(\0{start} {end}\0)"  # which goes on over lines in brackets

    def argument(self, whole: ast.Call, node: _Placed) -> Piece:
        """Where an argument of a call is, with the parentheses around it."""
        start, end, _ = self.piece(node)
        beside: list[_Placed] = [whole.func, *whole.args, *whole.keywords]
        before = max(end_of for part in beside if (end_of := self.piece(part).end) <= start)
        gap = re.sub(rb"#[^\r\n]*", lambda comment: b" " * len(comment.group()), self.data[before:start])
        opened = [before + one.start() for one in re.finditer(rb"\(", gap)]
        while opened and (closed := self.over(end, b")")) != end and closed < self.piece(whole).end:
            start, end = opened.pop(), closed
        return Piece(start, end)

    def over(self, position: int, marks: bytes) -> int:
        """Behind one of these marks, where it is the next after a position, over comments and ends of lines."""
        found = _BETWEEN.match(self.data, position)
        at = found.end() if found else position
        return at + 1 if at < len(self.data) and self.data[at : at + 1] in marks else position

    def line(self, position: int) -> int:
        """The line of a place, counted from 1."""
        return bisect_right(self.starts, position)

    def own_lines(self, start: int, end: int) -> Piece | None:
        """The lines on which nothing else stands than this piece and a comment; None where something does."""
        line = self.line(start)
        first, after = self.starts[line - 1], [*self.starts, len(self.data)][self.line(end - 1)]
        continued = line > 1 and re.fullmatch(rb"[^#]*\\\s*", self.data[self.starts[line - 2] : first])
        rest = re.fullmatch(rb"\s*(#.*)?\s*", self.data[end:after])
        return None if continued or self.data[first:start].strip(b" \t") or not rest else Piece(first, after)

    def stands_alone(self, statement: ast.AST) -> bool:
        """Whether a statement shares its lines with no other, so that code can be put above and below it."""
        if not isinstance(statement, ast.stmt) or statement not in self._blocks:
            return False
        start, end, _ = self.piece(statement)
        goes_on = isinstance(statement, ast.If) and self.data.startswith(b"elif", start)
        return not goes_on and self.own_lines(start, self.over(end, b";")) is not None

    @cached_property
    def unit(self) -> str:
        """By what the script's first block is indented."""
        for node in (node for node in ast.walk(self.tree) if isinstance(node, ast.stmt)):
            first: ast.AST | None = next(iter(getattr(node, "body", None) or []), None)
            if isinstance(first, ast.stmt) and first.lineno > node.lineno and self.stands_alone(first):
                line = self.data[self.starts[first.lineno - 1] :]
                return line[node.col_offset : first.col_offset].decode()
        return "    "


def read(path: str) -> ScriptText:
    """Read and parse one script.

    Raises:
        InvalidArgumentError: as ``check.source.read_script``.
    """
    script = read_script(path)
    return ScriptText(path, script.content, script.tree)


class Edits:
    """The changes of one script.

    Attributes:
        asked: of what, how and with what, each once, in order.
    """

    def __init__(self, text: ScriptText) -> None:
        self.text = text
        self.asked: dict[tuple[Piece | ast.AST, str, Any], None] = {}

    def change(self, piece: Piece, make: Change) -> None:
        """Make another text of a piece, once: two calls of ``fit`` may ask for the same of their data set."""
        self.asked[piece, "change", make] = None

    def add(self, call: ast.Call, argument: str, place: int | None = None) -> None:
        """Give a call one more argument, at the end or at a place further up."""
        self.asked[call, "add", (place, argument)] = None

    def drop(self, call: ast.Call, gone: Sequence[ast.AST]) -> None:
        """Take some of the arguments of a call out."""
        self.asked |= {(call, "drop", one): None for one in gone}

    def edit(self, how: str, statement: ast.stmt, code: str = "") -> None:
        """Change a statement as a whole.

        Args:
            how: insert code "before" it and its comments, "first" of all that is before it, or "after" it; "swap" it
                for code, under its comments;
                "remove" it, with the comments directly above it; "unwrap" the block of a ``with``; "guard" it by a
                condition.
        """
        if how == "unwrap" and isinstance(statement, ast.With):
            header = self._header(statement)
            self.change(header, to(""))
            if header.end == self.text.piece(statement.body[0]).start:  # all of it on one line
                return
        self.asked[statement, how, code] = None

    def made(self) -> bytes:
        """The script with all changes."""
        text = self.text
        asked: _Asked = {}
        for at, how, what in self.asked:
            asked.setdefault(at, {}).setdefault(how, []).append(what)
        changes: dict[Piece, list[Change]] = {}
        for at, hows in asked.items():
            if isinstance(at, Piece):
                changes.setdefault(at, []).extend(hows["change"])
            elif isinstance(at, ast.Call):
                for piece, change in self._arguments(at, hows.get("drop", []), hows.get("add", [])):
                    changes.setdefault(piece, []).append(change)
            elif isinstance(at, ast.stmt):
                first = self._first_line(at)
                end = [*text.starts, len(text.data)][at.end_lineno or at.lineno]
                changes[Piece(text.starts[first - 1], end, 2)] = [self._around(at, first, asked)]
        order = sorted(changes, key=lambda one: (one.start, one.start != one.end, -one.end, -one.level))

        def rendered(piece: Piece, inside: list[Piece]) -> str:
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
            return _MOVED.sub(lambda found: moved(int(found[1]), int(found[2])), made)

        def moved(start: int, end: int) -> str:
            """The text of an expression that stands elsewhere now, without what is asked of its old place."""
            inside = [one for one in order if start <= one.start < end and start < one.end <= end]
            return rendered(
                Piece(start, end, 3), [piece for piece in inside if piece[:2] != (start, end) or not piece.level]
            )

        return rendered(Piece(0, len(text.data), 3), [*order]).encode(text.encoding)

    def parsed(self) -> ScriptText:
        """The script with all changes, read again; raises one of ``MISFITS`` where it would be no Python."""
        content = self.made()
        tree = parsed(content, self.text.path)
        compile(tree, self.text.path, "exec", dont_inherit=True)
        return ScriptText(self.text.path, content, tree)

    def _arguments(
        self, call: ast.Call, gone: list[ast.AST], added: list[tuple[int | None, str]]
    ) -> Iterator[tuple[Piece, Change]]:
        """The pieces of a call that go, and those that come."""
        text = self.text
        given: list[_Placed] = [*call.args, *call.keywords]
        given.sort(key=lambda one: (one.lineno, one.col_offset))
        pieces = [text.argument(call, value) for value in given]
        kept = [place for place, one in enumerate(given) if one not in gone]
        for stays, run in groupby(range(len(given)), lambda place: place in kept):
            if not stays:
                places = [*run]
                yield self._run(pieces, places[0], places[-1], bool(kept)), to("")
        for place, code in added:
            before = [index for index in kept if place is None or index < place]
            if not before:
                end = text.piece(call).end - 1
                yield Piece(end, end), _adding(code)
                continue
            start, end, _ = pieces[before[-1]]
            comma = text.over(end, b",")
            lines = text.own_lines(start, comma)
            if comma != end and lines and before[-1] == len(given) - 1:  # one argument a line
                indent = text.data[lines.start : start].decode()
                yield Piece(lines.end, lines.end), _adding(f"{indent}{code},{text.newline}")
            else:
                yield Piece(end, end), _adding(f", {code}")

    def _run(self, pieces: list[Piece], first: int, last: int, some_stay: bool) -> Piece:
        """What goes with the arguments from one to another, so that a comment stays with its argument."""
        text, start, end = self.text, pieces[first].start, pieces[last].end
        comma = text.over(end, b",")
        if not some_stay:
            return Piece(start, comma)
        if lines := text.own_lines(start, comma):
            return lines
        before = pieces[first - 1].end if first else start
        if last + 1 < len(pieces):
            beside = first and not re.search(rb"[\r\n]", text.data[before:start])
            return Piece(text.over(before, b","), comma) if beside else Piece(start, pieces[last + 1].start)
        return Piece(start, comma) if b"#" in text.data[before:start] else Piece(before, end)

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

    def _around(self, statement: ast.stmt, first: int, asked: _Asked) -> Change:
        """What to do with the lines of a statement and of what is above it."""
        text, how = self.text, asked[statement]
        start = _start(statement)
        above = text.lines(first, start)
        indent = re.sub(r"[^ \t].*", "", text.lines(statement.lineno, statement.lineno + 1), flags=re.DOTALL)
        beside = text.block(statement)

        def lines(*codes: str) -> str:
            unit, newline = text.unit, text.newline
            found = [line for code in codes for line in code.split("\n")]
            found = [re.sub("^( {4})+", lambda spaces: unit * (len(spaces.group()) // 4), line) for line in found]
            return "".join(f"{indent}{line}{newline}" if line else newline for line in found)

        def make(old: str) -> str:
            head = lines(*how.get("first", ()), *how.get("before", ()))
            tail = lines(*how.get("after", ()))
            lead, middle = above, old[len(above) :]
            if "remove" in how:
                kept = _lines(lead)
                while kept and kept[-1].strip():  # a comment on what is gone
                    kept.pop()
                gone = all(set(asked.get(statement, {})) == {"remove"} for statement in beside)
                last = lines("pass") if gone and statement is beside[-1] else ""
                return "".join([*kept, head, tail, last])
            if "unwrap" in how:
                inside: ast.stmt = getattr(statement, "body", [statement])[0]
                width = inside.col_offset - statement.col_offset  # further to the left, as far as a line can go
                middle = _reindented(middle, lambda line: line[min(width, len(line) - len(line.lstrip(" \t"))) :])
            elif "swap" in how:
                end = self.text.piece(statement).end
                rest = text.data[end : [*text.starts, len(text.data)][statement.end_lineno or 0]].decode()
                simple = not hasattr(statement, "body")
                new = lines(*how["swap"][-1:])
                middle = new.removesuffix(text.newline) + rest if simple else new
            elif "guard" in how:
                # By tabs or blanks in front of those that a line shares with its block, or behind them.
                inner = _reindented(middle, lambda line: re.sub(f"^({indent})?", rf"\g<0>{text.unit}", line))
                middle = f"{indent}if {how['guard'][0]}:{text.newline}{inner}"
            if tail and not middle.endswith(("\n", "\r")):  # the last line of the script
                return f"{head}{lead}{middle}{text.newline}{tail}".removesuffix(text.newline)
            return f"{head}{lead}{middle}{tail}"

        return make

    def _header(self, statement: ast.With) -> Piece:
        """``with ...:``, with its lines where the block begins on another."""
        text, item, inside = self.text, statement.items[-1], statement.body[0]
        end = text.piece(item.optional_vars or item.context_expr).end
        while (further := text.over(end, b"),:")) != end:
            end = further
        if _start(inside) == text.line(end):
            return Piece(text.piece(statement).start, text.piece(inside).start)
        return Piece(text.starts[statement.lineno - 1], text.starts[text.line(end)])


def _lines(code: str) -> list[str]:
    """The lines of a text, as Python counts them, with their ends."""
    return [one for one in re.split(r"(?<=\n)|(?<=\r)(?!\n)", code) if one]


def _reindented(code: str, make: Change) -> str:
    """Lines of code under another indentation; empty ones, and those that begin within a text, stay."""
    inside: set[int] = set()
    begun: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO("if 1:\n" + re.sub(r"\r\n?", "\n", code)).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_START":
            begun.append(token.start[0])
        elif kind in ("STRING", "FSTRING_END"):
            inside |= set(range((begun.pop() if kind == "FSTRING_END" else token.start[0]) + 1, token.end[0] + 1))
    lines = enumerate(_lines(code), 2)
    return "".join(make(one) if one.strip() and at not in inside else one for at, one in lines)


def _start(statement: ast.stmt) -> int:
    """The first line of a statement or of its decorators."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(one.lineno for one in decorators)])


# Expressions: the functions are cached, so that the same change is the same object ------------------------------------


@cache
def to(code: str) -> Change:
    """Another text in the place of this one."""
    return lambda _: code


@cache
def around(template: str) -> Change:
    """An expression that holds this one where ``template`` says ``__``."""
    return lambda old: template.replace("__", old)


def starred(node: ast.expr) -> str:
    """``__``, for what a star is put in front of; in brackets where that needs them."""
    closed = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.List, ast.Tuple, ast.Dict)
    return "__" if isinstance(node, closed) else "(__)"


@cache
def with_first(code: str) -> Change:
    """A list with one more element in front of all that it has."""
    return lambda old: f"[{code}" + (" " if old[1] not in "] \t\r\n" else "") + old[1:]


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
