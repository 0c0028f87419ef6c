"""Changes to a LibCST tree, collected first and made at once; what no change names stays byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import libcst as cst

Change = Callable[[Any], Any]
_Block = cst.Module | cst.IndentedBlock
_Statement = cst.BaseStatement
_Around = dict[str, list[str]]
_SPACE = cst.SimpleWhitespace(" ")
_TIGHT = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))


class Edits:
    """The changes of one script."""

    def __init__(self, module: cst.Module) -> None:
        self._module = module
        self._changes: dict[cst.CSTNode, list[Change]] = {}
        self._around: dict[cst.CSTNode, _Around] = {}

    def __bool__(self) -> bool:
        return bool(self._changes or self._around)

    def change(self, node: cst.CSTNode, make: Change) -> None:
        """Make another node of an expression, after what is inside of it has changed."""
        self._changes.setdefault(node, []).append(make)

    def edit(self, how: str, statement: cst.CSTNode, code: str = "") -> None:
        """Change a statement as a whole.

        Args:
            how: insert code "before" it and its comments, "first" of all that is before it, or "after" it; "swap" it
                for code, under its comments;
                "remove" it, with the comments directly above it; "unwrap" the block of a ``with``; "guard" it by a
                condition.
        """
        self._around.setdefault(statement, {}).setdefault(how, []).append(code)

    def made(self) -> bytes:
        """The script with all changes."""
        return self._module.visit(_Maker(self._module, self._changes, self._around)).bytes


class _Maker(cst.CSTTransformer):
    def __init__(
        self, module: cst.Module, changes: dict[cst.CSTNode, list[Change]], around: dict[cst.CSTNode, _Around]
    ) -> None:
        super().__init__()
        self._config = module.config_for_parsing
        self._changes, self._around = changes, around

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        updated: Any = super().on_leave(original_node, updated_node)
        for make in self._changes.get(original_node, ()):
            updated = make(updated)
        if isinstance(original_node, (cst.Module, cst.IndentedBlock)):
            return self._block(original_node, updated)
        return updated

    def _block(self, original: _Block, updated: _Block) -> _Block:
        if not any(one in self._around for one in original.body):
            return updated
        body: list[_Statement] = []
        kept: list[cst.EmptyLine] = []  # comments above a statement that is gone, which are not about it
        for old, new in zip(original.body, updated.body, strict=True):
            statements, left = self._made(self._around.get(old, {}), new)
            if kept and statements:
                first = cast(Any, statements[0])
                statements[0] = first.with_changes(leading_lines=[*kept, *first.leading_lines])
                kept = []
            kept += left
            body += statements
        return updated.with_changes(body=body or self._parsed("pass"))

    def _made(self, around: _Around, new: _Statement) -> tuple[list[_Statement], list[cst.EmptyLine]]:
        head = self._all([*around.get("first", ()), *around.get("before", ())])
        tail = self._all(around.get("after", ()))
        line = cast(Any, new)
        if "remove" in around:
            left = _not_about(line.leading_lines)
            if not head + tail:
                return [], left
            first = cast(Any, (head + tail)[0])
            return [first.with_changes(leading_lines=left), *(head + tail)[1:]], []
        if "unwrap" in around:
            inner = list(line.body.body)
            inner[0] = inner[0].with_changes(leading_lines=[*line.leading_lines, *inner[0].leading_lines])
            return [*head, *inner, *tail], list(line.body.footer)
        if "swap" in around:
            made = [cast(Any, one) for one in self._parsed(around["swap"][-1])]
            made[0] = made[0].with_changes(leading_lines=line.leading_lines)
            if isinstance(new, cst.SimpleStatementLine) and isinstance(made[-1], cst.SimpleStatementLine):
                made[-1] = made[-1].with_changes(trailing_whitespace=new.trailing_whitespace)
            return [*head, *made, *tail], []
        if "guard" in around:
            made = cast(Any, self._parsed(f"if {around['guard'][0]}:\n    pass")[0])
            block = made.body.with_changes(indent=None, body=[line.with_changes(leading_lines=[])])
            return [*head, made.with_changes(body=block, leading_lines=line.leading_lines), *tail], []
        return [*head, new, *tail], []

    def _all(self, codes: Iterable[str]) -> list[_Statement]:
        return [one for code in codes for one in self._parsed(code)]

    def _parsed(self, code: str) -> list[_Statement]:
        """Statements; an empty line in front of the code stays above the first of them."""
        made = [cast(Any, one) for one in cst.parse_module(code.lstrip("\n"), self._config).body]
        if code.startswith("\n"):
            made[0] = made[0].with_changes(leading_lines=[cst.EmptyLine(indent=False), *made[0].leading_lines])
        return made


def _not_about(lines: Iterable[cst.EmptyLine]) -> list[cst.EmptyLine]:
    """The lines above a statement down to the last empty one."""
    found = list(lines)
    while found and found[-1].comment is not None:
        found.pop()
    return found


# Expressions ----------------------------------------------------------------------------------------------------------


def to(code: str) -> Change:
    """Another expression in the place of this one."""
    return lambda old: cst.parse_expression(code).with_changes(
        **({"lpar": old.lpar, "rpar": old.rpar} if getattr(old, "lpar", None) else {})
    )


def around(template: str) -> Change:
    """An expression that holds this one where ``template`` says ``__``."""

    def make(old: Any) -> Any:
        made = cst.parse_expression(template)
        return made.visit(_Fill(old))

    return make


class _Fill(cst.CSTTransformer):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> Any:  # noqa: N802
        return self._value if original_node.value == "__" else updated_node


def called(code: str) -> Change:
    """The same call of another function."""
    return lambda call: call.with_changes(func=cst.parse_expression(code))


def without(places: Iterable[int]) -> Change:
    """A call without the arguments at these places."""
    gone = set(places)

    def make(call: Any) -> Any:
        kept = [one for place, one in enumerate(call.args) if place not in gone]
        if kept and len(call.args) - 1 in gone:
            last = call.args[-1]
            kept[-1] = kept[-1].with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
        return call.with_changes(args=kept)

    return make


def with_argument(value: str, keyword: str = "", place: int | None = None) -> Change:
    """A call with one more argument, at the end or at a place further up."""

    def make(call: Any) -> Any:
        name = cst.Name(keyword) if keyword else None
        equal = _TIGHT if keyword else cst.MaybeSentinel.DEFAULT
        new = cst.Arg(cst.parse_expression(value), keyword=name, equal=equal)
        args = list(call.args)
        comma = cst.Comma(whitespace_after=_SPACE)
        if place is not None and place < len(args):
            if args[place - 1].comma.whitespace_after.empty:
                args[place - 1] = args[place - 1].with_changes(comma=comma)
            return call.with_changes(args=[*args[:place], new.with_changes(comma=comma), *args[place:]])
        if not args:
            return call.with_changes(args=[new])
        last = args[-1]
        between = args[-2].comma if len(args) > 1 else comma
        if isinstance(last.comma, cst.Comma):  # one argument a line
            new = new.with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
            args[-1] = last.with_changes(comma=between)
        else:
            new = new.with_changes(whitespace_after_arg=last.whitespace_after_arg)
            args[-1] = last.with_changes(comma=comma, whitespace_after_arg=cst.SimpleWhitespace(""))
        return call.with_changes(args=[*args, new])

    return make


def as_keyword(name: str, value: str | None = None) -> Change:
    """An argument under this name, "" for none; with another value."""

    def make(argument: Any) -> Any:
        made = argument.with_changes(
            keyword=cst.Name(name) if name else None,
            equal=(argument.equal if argument.keyword else _TIGHT) if name else cst.MaybeSentinel.DEFAULT,
        )
        return made if value is None else made.with_changes(value=cst.parse_expression(value))

    return make
