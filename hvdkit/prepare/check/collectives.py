"""Calls that all ranks must make together, on a branch that only some of them take."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hvdkit.prepare.check.facts import Facts
from hvdkit.prepare.check.libraries import (
    AVERAGE_CALLBACK,
    BARRIER,
    BROADCAST,
    BROADCAST_CALLBACK,
    CHECKPOINT_CALLBACK,
    COLLECTIVE,
    LOCAL_RANK,
    RANK,
    REDUCE,
    SPAWNED,
)
from hvdkit.prepare.check.trace import Event, Guard

ROOT = "root"
OTHERS = "others"
ONE = "one"
_TOGETHER = (BROADCAST, REDUCE, COLLECTIVE, BARRIER, BROADCAST_CALLBACK, AVERAGE_CALLBACK, CHECKPOINT_CALLBACK)
_GROUPS = {"process_set", "group", "process_group"}


class Branches:
    """Which ranks take a branch, where the text says it for certain."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def side(self, event: Event) -> tuple[str, Guard] | None:
        """The ranks that reach an event, and the condition that keeps the others away; None where all may."""
        for guard in event.guards:
            if guard.certain and not guard.wraps and (side := self.takers(guard.test, guard.holds)) is not None:
                return side, guard
        return None

    def takers(self, test: ast.expr, holds: bool, depth: int = 0) -> str | None:
        """ROOT, OTHERS or ONE where a condition on the rank decides for certain; None for everything else."""
        if depth > 9:
            return None
        match test:
            case ast.BoolOp():
                decides = isinstance(test.op, ast.And) == holds
                sides = [self.takers(one, holds, depth + 1) for one in test.values] if decides else []
                return next((side for side in sides if side is not None), None)
            case ast.UnaryOp(op=ast.Not()):
                return self.takers(test.operand, not holds, depth + 1)
            case ast.Compare(ops=[operator], comparators=[right]):
                return self._compared(test.left, operator, right, holds)
            case ast.IfExp(body=body, orelse=ast.Constant(value=None | False | 0)):
                both = not isinstance(body, ast.Constant) or bool(body.value)
                return self.takers(test.test, holds, depth + 1) if both else None
            case ast.Name() | ast.Attribute() | ast.Call():
                return self._named(test, holds, depth)
        return None

    def _compared(self, left: ast.expr, operator: ast.cmpop, right: ast.expr, holds: bool) -> str | None:
        if isinstance(left, ast.Constant) and isinstance(operator, (ast.Eq, ast.NotEq, ast.Is, ast.IsNot)):
            left, right = right, left
        if not isinstance(right, ast.Constant) or not self.is_rank(left):
            return None
        if isinstance(operator, (ast.Eq, ast.Is, ast.NotEq, ast.IsNot)):
            equal = isinstance(operator, (ast.Eq, ast.Is)) == holds
            return (ROOT if equal else OTHERS) if right.value == 0 else ONE
        above = isinstance(operator, (ast.Gt, ast.GtE)) == holds
        edge = {ast.Gt: 0, ast.LtE: 0, ast.GtE: 1, ast.Lt: 1}.get(type(operator))
        return (OTHERS if above else ROOT) if right.value == edge else ONE

    def _named(self, test: ast.Name | ast.Attribute | ast.Call, holds: bool, depth: int) -> str | None:
        if isinstance(test, ast.Attribute) and test.attr == "is_root" and self.facts.kind(test) == RANK:
            return ROOT if holds else OTHERS
        if self.is_rank(test):
            return OTHERS if holds else ROOT
        values = self._values(test)
        sides = {self.takers(one, holds, depth + 1) for one in values}
        return sides.pop() if len(sides) == 1 else None

    def _values(self, test: ast.Name | ast.Attribute | ast.Call) -> list[ast.expr]:
        if isinstance(test, ast.Call):
            return [one for function in self.facts.flow.callees(test) for one in self.facts.flow.returned(function)]
        if isinstance(test, ast.Name):
            bindings = self.facts.program.reaching(test)
        else:
            bindings = self.facts.program.attributes.get(test.attr, [])
        found: list[ast.expr] = []
        for binding in bindings:
            if isinstance(binding.node, ast.arg):
                found += self.facts.flow.arguments_for(binding.node)
            elif binding.value is None or binding.index:
                return []
            else:
                found.append(binding.value)
        return found

    def is_rank(self, node: ast.expr, depth: int = 0) -> bool:
        """Whether an expression is a rank and nothing else, for certain."""
        if self.facts.kind(node) in (RANK, LOCAL_RANK) and not (
            isinstance(node, ast.Attribute) and node.attr == "is_root"
        ):
            return True
        if depth > 9:
            return False
        if isinstance(node, ast.Call):
            if self.facts.name(node) == "builtins.int" and node.args:
                return self.is_rank(node.args[0], depth + 1)
            values = [one for function in self.facts.flow.callees(node) for one in self.facts.flow.returned(function)]
        elif isinstance(node, (ast.Name, ast.Attribute)):
            if isinstance(node, ast.Name) and self._is_spawned(node):
                return True
            values = self._values(node)
        else:
            return False
        return bool(values) and all(self.is_rank(one, depth + 1) for one in values)

    def _is_spawned(self, name: ast.Name) -> bool:
        return any(self.facts.kind(one.node) == SPAWNED for one in self.facts.program.reaching(name))

    # The rule -------------------------------------------------------------------------------------------------------

    def on_some_ranks(self) -> Iterator[tuple[int, str]]:
        """Lines, and what is called there, of collectives that some ranks never reach."""
        together = [event for event in self.facts.having(*_TOGETHER) if not self._has_group(event.node)]
        sides = {event.order: self.side(event) for event in together}
        taken = {(self._called(event), side[0]) for event in together if (side := sides[event.order]) is not None}
        for event in together:
            side = sides[event.order]
            if side is None or self._is_matched(event, side[0], taken):
                continue
            call = self._entry(event, side[1])
            yield call.lineno, ast.unparse(call.func)

    def _called(self, event: Event) -> str:
        return self.facts.name(event.node) or ast.unparse(event.node.func)

    def _is_matched(self, event: Event, side: str, taken: set[tuple[str, str]]) -> bool:
        """Whether the other ranks make the same call on their own branch."""
        if side == ONE:
            return sum(one == self._called(event) for one, _ in taken) > 1
        return (self._called(event), OTHERS if side == ROOT else ROOT) in taken

    def _has_group(self, call: ast.Call) -> bool:
        return any(keyword.arg in _GROUPS for keyword in call.keywords)

    def _entry(self, event: Event, guard: Guard) -> ast.Call:
        """The call on the branch itself: of a function that holds the collective, or the collective."""
        inside = self.facts.program.function(guard.test)
        way = [*event.stack, event.node]
        return next(
            (call for call in way if self.facts.program.function(call) is inside and self._is_under(call, guard)),
            event.node,
        )

    def _is_under(self, call: ast.Call, guard: Guard) -> bool:
        return any(one.node is call and guard in one.guards for one in self.facts.events)
