"""Calls that all ranks make together, on a branch that only some of them take."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hvdkit.prepare.check.calls import method
from hvdkit.prepare.check.flow import remembered
from hvdkit.prepare.check.libraries import RANKS, TOGETHER, Role
from hvdkit.prepare.check.steps import JudgedCase
from hvdkit.prepare.check.trace import Event

_GROUPS = {"process_set", "group", "process_group"}
_ROOT = "root"
_OTHERS = "others"
_ONE = "one"
_DEEPEST = 9


def _takers(case: JudgedCase, test: ast.AST, holds: bool, depth: int = 0) -> str | None:
    """_ROOT, _OTHERS or _ONE where a condition on the rank decides for certain; None for everything else."""
    if depth > _DEEPEST:
        return None
    match test:
        case ast.BoolOp():
            decides = isinstance(test.op, ast.And) == holds
            sides = [_takers(case, one, holds, depth + 1) for one in test.values] if decides else []
            return next((one for one in sides if one is not None), None)
        case ast.UnaryOp(op=ast.Not()):
            return _takers(case, test.operand, not holds, depth + 1)
        case ast.Compare(ops=[operator], comparators=[right]):
            return _compared(case, test.left, operator, right, holds)
        case ast.IfExp(body=body, orelse=ast.Constant(value=None | False | 0)):
            both = not isinstance(body, ast.Constant) or bool(body.value)
            return _takers(case, test.test, holds, depth + 1) if both else None
        case ast.Attribute(attr="is_root") if case.kind(test) == Role.RANK:
            return _ROOT if holds else _OTHERS
        case ast.Name() | ast.Attribute() | ast.Call() | ast.arg():
            if _is_rank(case, test):
                return _OTHERS if holds else _ROOT
            named = {_takers(case, node, holds, depth + 1) for node in case.behind(test)}
            return named.pop() if len(named) == 1 else None
    return None


def _compared(case: JudgedCase, left: ast.expr, operator: ast.cmpop, right: ast.expr, holds: bool) -> str | None:
    if isinstance(left, ast.Constant) and isinstance(operator, (ast.Eq, ast.NotEq, ast.Is, ast.IsNot)):
        left, right = right, left
    if not isinstance(right, ast.Constant) or not _is_rank(case, left):
        return None
    if isinstance(operator, (ast.Eq, ast.Is, ast.NotEq, ast.IsNot)):
        equal = isinstance(operator, (ast.Eq, ast.Is)) == holds
        return (_ROOT if equal else _OTHERS) if right.value == 0 else _ONE
    above = isinstance(operator, (ast.Gt, ast.GtE)) == holds
    edge = {ast.Gt: 0, ast.LtE: 0, ast.GtE: 1, ast.Lt: 1}.get(type(operator))
    return (_OTHERS if above else _ROOT) if right.value == edge else _ONE


@remembered(False)
def _is_rank(case: JudgedCase, node: ast.AST) -> bool:
    """Whether an expression is a rank and nothing else, for certain."""
    if case.kind(node) in RANKS:
        return getattr(node, "attr", "") != "is_root"
    if isinstance(node, ast.Call) and case.name(node) == "builtins.int" and node.args:
        return _is_rank(case, node.args[0])
    values = case.behind(node) if isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.arg)) else []
    return bool(values) and all(_is_rank(case, value) for value in values)


def _backwards(case: JudgedCase) -> list[Event]:
    """Backward passes in which a distributed optimizer or model averages gradients."""
    made = case.having(Role.DISTRIBUTE)
    if not made or any(keyword.arg in _GROUPS for event in made for keyword in event.node.keywords):
        return []
    first = min(event.order for event in made)
    return [event for event in case.steps if method(event.node) == "backward" and event.order > first]


def on_some_ranks(case: JudgedCase) -> Iterator[ast.expr]:
    """What is called, on the branch itself, of collectives that some ranks never reach."""
    sides: dict[str, set[str]] = {}
    found = []
    callbacks = (Role.BROADCAST_CALLBACK, Role.AVERAGE_CALLBACK, Role.CHECKPOINT_CALLBACK)
    for event in [*case.having(*TOGETHER, *callbacks), *_backwards(case)]:
        certain = [guard for guard in event.guards if guard.certain and not guard.wraps]
        taken = next(((who, guard) for guard in certain if (who := _takers(case, guard.test, guard.holds))), None)
        if taken is not None and not any(keyword.arg in _GROUPS for keyword in event.node.keywords):
            called = case.name(event.node) or ast.unparse(event.node.func)
            sides.setdefault(called, set()).add(taken[0])
            found.append((event, called, *taken))
    for event, called, ranks, guard in found:
        others = sides[called] - {ranks}  # who makes the same call on a branch of their own
        if others if ranks == _ONE else others - {_ONE}:
            continue
        # The call on the branch itself: of a function that holds the collective, or the collective.
        inside = case.function(guard.test)
        under = {event.node for event in case.events if guard in event.guards}
        way = [one for one in [*event.stack, event.node] if case.function(one) is inside and one in under]
        yield (way[0] if way else event.node).func
