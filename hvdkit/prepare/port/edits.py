"""Changes to a LibCST tree, collected first and made at once, each once a node; all else stays byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import libcst as cst
from libcst import matchers

Change = Callable[[Any], Any]
_TIGHT = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))


class Edits(cst.CSTTransformer):
    """The changes of one script."""

    def __init__(self, module: cst.Module) -> None:
        super().__init__()
        self._module = module
        self._changes: dict[cst.CSTNode, list[Change]] = {}
        self._around: dict[cst.CSTNode, dict[str, list[str]]] = {}

    def __bool__(self) -> bool:
        return bool(self._changes or self._around)

    def change(self, node: cst.CSTNode, make: Change) -> None:
        """Make another node of an expression, after what is inside of it has changed."""
        _add(self._changes.setdefault(node, []), make)

    def edit(self, how: str, statement: cst.CSTNode, code: str = "") -> None:
        """Change a statement as a whole.

        Args:
            how: insert code "before" it and its comments, "first" of all that is before it, or "after" it; "swap" it
                for code, under its comments;
                "remove" it, with the comments directly above it; "unwrap" the block of a ``with``; "guard" it by a
                condition.
        """
        _add(self._around.setdefault(statement, {}).setdefault(how, []), code)

    def made(self) -> bytes:
        """The script with all changes."""
        return self._module.visit(self).bytes

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        """LibCST's call at each node, from the inside out."""
        updated: Any = super().on_leave(original_node, updated_node)
        for make in self._changes.get(original_node, ()):
            updated = make(updated)
        if isinstance(original_node, (cst.Module, cst.IndentedBlock)):
            return self._block(original_node, updated)
        return updated

    def _block(self, original: cst.Module | cst.IndentedBlock, updated: Any) -> Any:
        if not any(one in self._around for one in original.body):
            return updated
        body: list[Any] = []
        kept: list[cst.EmptyLine] = []  # comments above a statement that is gone, which are not about it
        for old, new in zip(original.body, updated.body, strict=True):
            statements, left = self._made(self._around.get(old, {}), new)
            if kept and statements:
                statements[0] = _under([*kept, *statements[0].leading_lines], statements[0])
                kept = []
            kept += left
            body += statements
        return updated.with_changes(body=body or self._parsed("pass"))

    def _made(self, around: dict[str, list[str]], new: Any) -> tuple[list[Any], list[cst.EmptyLine]]:
        """The statements in the place of one, and the comments that are left of it."""
        head = self._parsed(*around.get("first", ()), *around.get("before", ()))
        tail = self._parsed(*around.get("after", ()))
        middle, left = [new], []
        if "remove" in around:
            left = _not_about(new.leading_lines)
            if not head + tail:
                return [], left
            first, *rest = head + tail
            return [_under(left, first), *rest], []
        if "unwrap" in around:
            middle, left = list(new.body.body), list(new.body.footer)
            middle[0] = _under([*new.leading_lines, *middle[0].leading_lines], middle[0])
        elif "swap" in around:
            middle = self._parsed(around["swap"][-1])
            middle[0] = _under(new.leading_lines, middle[0])
            if isinstance(new, cst.SimpleStatementLine) and isinstance(middle[-1], cst.SimpleStatementLine):
                middle[-1] = middle[-1].with_changes(trailing_whitespace=new.trailing_whitespace)
        elif "guard" in around:
            (guard,) = self._parsed(f"if {around['guard'][0]}:\n    pass")
            block = guard.body.with_changes(indent=None, body=[_under([], new)])
            middle = [_under(new.leading_lines, guard.with_changes(body=block))]
        return [*head, *middle, *tail], left

    def _parsed(self, *codes: str) -> list[Any]:
        """Statements; an empty line in front of a code stays above the first of its own."""
        made: list[Any] = []
        for code in codes:
            first, *rest = cst.parse_module(code.lstrip("\n"), self._module.config_for_parsing).body
            empty = [cst.EmptyLine(indent=False)] if code.startswith("\n") else []
            made += [_under([*empty, *first.leading_lines], first), *rest]
        return made


def _add(made: list[Any], one: object) -> None:
    """Two calls of ``fit`` may ask for the same change of the data set that they share."""
    if one not in made:
        made.append(one)


def _under(lines: Iterable[cst.EmptyLine], statement: Any) -> Any:
    """A statement with these comments and empty lines above it."""
    return statement.with_changes(leading_lines=list(lines))


def _not_about(lines: Iterable[cst.EmptyLine]) -> list[cst.EmptyLine]:
    """The lines above a statement down to the last empty one."""
    found = list(lines)
    while found and found[-1].comment is not None:
        found.pop()
    return found


# Expressions: the functions are cached, so that the same change is the same object ------------------------------------


@cache
def to(code: str) -> Change:
    """Another expression in the place of this one."""
    return lambda old: cst.parse_expression(code).with_changes(
        **({"lpar": old.lpar, "rpar": old.rpar} if getattr(old, "lpar", None) else {})
    )


@cache
def around(template: str) -> Change:
    """An expression that holds this one where ``template`` says ``__``."""
    return lambda old: matchers.replace(cst.parse_expression(template), matchers.Name("__"), old)


@cache
def called(code: str) -> Change:
    """The same call of another function."""
    return lambda call: call.with_changes(func=cst.parse_expression(code))


@cache
def without(places: tuple[int, ...], field: str = "args") -> Change:
    """A call without the arguments at these places, or an import without these "names"."""

    def make(node: Any) -> Any:
        given = getattr(node, field)
        kept = [one for place, one in enumerate(given) if place not in places]
        if kept and len(given) - 1 in places:
            ending = {one: getattr(given[-1], one, None) for one in ("comma", "whitespace_after_arg")}
            kept[-1] = kept[-1].with_changes(**{one: value for one, value in ending.items() if value is not None})
        return node.with_changes(**{field: kept})

    return make


@cache
def with_argument(value: str, keyword: str = "", place: int | None = None) -> Change:
    """A call with one more argument, at the end or at a place further up."""

    def make(call: Any) -> Any:
        new = as_keyword(keyword, value)(cst.Arg(cst.Name("_")))
        args = list(call.args)
        comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        if place is not None and place < len(args):
            if args[place - 1].comma.whitespace_after.empty:
                args[place - 1] = args[place - 1].with_changes(comma=comma)
            args.insert(place, new.with_changes(comma=comma))
        elif args:
            last = args[-1]
            new = new.with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
            if isinstance(last.comma, cst.Comma):  # one argument a line
                args[-1:] = [last.with_changes(comma=args[-2].comma if len(args) > 1 else comma), new]
            else:
                args[-1:] = [last.with_changes(comma=comma, whitespace_after_arg=cst.SimpleWhitespace("")), new]
        else:
            args = [new]
        return call.with_changes(args=args)

    return make


@cache
def as_keyword(name: str, value: str | None = None) -> Change:
    """An argument under this name, "" for none; with another value."""

    def make(argument: Any) -> Any:
        made = argument.with_changes(
            keyword=cst.Name(name) if name else None,
            equal=(argument.equal if argument.keyword else _TIGHT) if name else cst.MaybeSentinel.DEFAULT,
        )
        return made if value is None else made.with_changes(value=cst.parse_expression(value))

    return make
