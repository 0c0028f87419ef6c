"""The calls of a script in the order in which they first run, each with the conditions that it runs under."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hvdkit.prepare.check.flow import Flow
from hvdkit.prepare.check.program import FunctionNode

_MOST_EVENTS = 60_000
_MOST_VISITS = 6
"""A function is followed at so many of its calls: enough for every guard that is written, bounded for any script."""
_DEEPEST = 30
"""So many functions deep a call is followed; what lies deeper counts as reached by nothing that is known."""
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_LATER = ("atexit.", "signal.", "threading.Timer")
"""What is handed to these runs some other time."""
_EXITS = {"sys.exit", "os._exit", "builtins.exit", "builtins.quit"}


@dataclass(frozen=True)
class Condition:
    """A condition on the way to a call.

    Attributes:
        test: the condition, or the decorator or context manager that acts as one.
        holds: whether it must be true or false.
        certain: False where only one of several ways there goes through it.
        wraps: it is a decorator or a context manager, so that only its name can say what it does.
    """

    test: ast.expr
    holds: bool = True
    certain: bool = True
    wraps: bool = False


@dataclass(frozen=True)
class Event:
    """One call, the way there and how sure it is that it runs.

    Attributes:
        node: the call.
        guards: the conditions, outermost first, across functions.
        loops: the loops around it, outermost first, across functions.
        stack: the calls of the script's own functions that lead here.
        reached: False for functions that nothing in the text calls: someone else may.
        order: its place in the sequence.
    """

    node: ast.Call
    guards: tuple[Condition, ...]
    loops: tuple[ast.AST, ...]
    stack: tuple[ast.Call, ...]
    reached: bool
    order: int


@dataclass(frozen=True)
class _Way:
    guards: tuple[Condition, ...] = ()
    loops: tuple[ast.AST, ...] = ()
    stack: tuple[ast.Call, ...] = ()
    functions: tuple[FunctionNode, ...] = ()
    reached: bool = True

    def under(self, *guards: Condition) -> _Way:
        return _Way((*self.guards, *guards), self.loops, self.stack, self.functions, self.reached)

    def within(self, loop: ast.AST) -> _Way:
        return _Way(self.guards, (*self.loops, loop), self.stack, self.functions, self.reached)

    def into(self, call: ast.Call, function: FunctionNode) -> _Way:
        return _Way(self.guards, self.loops, (*self.stack, call), (*self.functions, function), self.reached)


_Leak = tuple[Condition, bool]
"""A condition that holds for what follows, since the other branch left; and whether that left the function."""


class Tracer:
    """Walks through a program as if it ran, both branches of every condition, every loop once."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.events: list[Event] = []
        self._visits: dict[FunctionNode, int] = {}

    def run(self) -> list[Event]:
        """The events of the whole script: from the module down, then of functions that nothing calls."""
        self._block(self.flow.tree.body, _Way())
        functions = [one for one in self.flow.functions if not isinstance(one, ast.Lambda)]
        called = {*self.flow.calls_of, *self.flow.started}
        for function in sorted(functions, key=lambda one: one in called):  # first those that nothing calls
            if function not in self._visits:
                self._function(function, _Way(functions=(function,), reached=False))
        return self.events

    def _function(self, function: FunctionNode, way: _Way) -> None:
        self._visits[function] = self._visits.get(function, 0) + 1
        if isinstance(function, ast.Lambda):
            self._expression(function.body, way)
            return
        self._block(function.body, way.under(*(Condition(one, wraps=True) for one in function.decorator_list)))

    def _block(self, statements: Sequence[ast.stmt], way: _Way) -> list[_Leak]:
        leaks: list[_Leak] = []
        for statement in statements:
            new = self._statement(statement, way)
            leaks += new
            way = way.under(*(guard for guard, _ in new)) if new else way
        return leaks

    def _statement(self, node: ast.stmt, way: _Way) -> list[_Leak]:
        """Follow a statement under the guards of ``way``; gives the ways by which a loop or function is left in it."""
        match node:
            case ast.If():
                return self._if(node, way)
            case ast.For() | ast.AsyncFor():
                self._expression(node.iter, way)
                return self._loop(node, way.within(node), way)
            case ast.While():
                self._expression(node.test, way)
                return self._loop(node, way.within(node).under(Condition(node.test)), way)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    self._expression(item.context_expr, way)
                return self._block(
                    node.body, way.under(*(Condition(one.context_expr, wraps=True) for one in node.items))
                )
            case ast.Try() | ast.TryStar():
                leaks = [leak for part in (node.body, node.orelse) for leak in self._block(part, way)]
                for handler in node.handlers:
                    self._block(handler.body, way)
                self._block(node.finalbody, way)
                return leaks
            case ast.Match():
                self._expression(node.subject, way)
                for case in node.cases:
                    self._block(case.body, way.under(Condition(node.subject, certain=False)))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for decorator in node.decorator_list:
                    self._expression(decorator, way)
            case ast.ClassDef():
                self._block(
                    [one for one in node.body if not isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))], way
                )
            case _:
                for child in ast.iter_child_nodes(node):
                    self._expression(child, way)
        return []

    def _if(self, node: ast.If, way: _Way) -> list[_Leak]:
        self._expression(node.test, way)
        inner = self._block(node.body, way.under(Condition(node.test)))
        inner += self._block(node.orelse, way.under(Condition(node.test, holds=False)))
        leaks = [(Condition(guard.test, guard.holds, certain=False), leaves) for guard, leaves in inner]
        for block, holds in ((node.body, False), (node.orelse, True)):
            if block and self._leaves(block[-1]):
                leaks.append((Condition(node.test, holds), not isinstance(block[-1], (ast.Continue, ast.Break))))
        return leaks

    def _leaves(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            return self.flow.dotted(node.value.func) in _EXITS
        return isinstance(node, _LEAVES)

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, inside: _Way, outside: _Way) -> list[_Leak]:
        leaks = self._block(node.body, inside) + self._block(node.orelse, outside)
        return [leak for leak in leaks if leak[1]]

    def _expression(self, node: ast.AST, way: _Way) -> None:
        """Follow an expression under the guards of ``way``, down to the calls in it."""
        match node:
            case ast.IfExp():
                self._expression(node.test, way)
                self._expression(node.body, way.under(Condition(node.test)))
                self._expression(node.orelse, way.under(Condition(node.test, holds=False)))
            case ast.BoolOp():
                before: tuple[Condition, ...] = ()
                for value in node.values:
                    self._expression(value, way.under(*before))
                    before = (*before, Condition(value, isinstance(node.op, ast.And)))
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                self._comprehension(node, way)
            case ast.Call():
                self._call(node, way)
            case ast.Lambda():
                return
            case _:
                for child in ast.iter_child_nodes(node):
                    self._expression(child, way)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, way: _Way) -> None:
        for generator in node.generators:
            self._expression(generator.iter, way)
            way = way.within(generator)
            for condition in generator.ifs:
                self._expression(condition, way)
                way = way.under(Condition(condition))
        for element in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self._expression(element, way)

    def _call(self, node: ast.Call, way: _Way) -> None:
        if len(self.events) >= _MOST_EVENTS:
            return
        for part in (node.func, *node.args, *(keyword.value for keyword in node.keywords)):
            self._expression(part, way)
        self.events.append(Event(node, way.guards, way.loops, way.stack, way.reached, len(self.events)))
        for function in self._run_by(node):
            may_enter = function not in way.functions and len(way.functions) < _DEEPEST
            if may_enter and self._visits.get(function, 0) < _MOST_VISITS:
                self._function(function, way.into(node, function))

    def _run_by(self, node: ast.Call) -> Iterator[FunctionNode]:
        own = self.flow.callees(node)
        yield from own
        if not own and not (self.flow.dotted(node.func) or "").startswith(_LATER):
            yield from self.flow.function_arguments(node)
        made = self.flow.class_of(node)
        if made is not None and self.flow.is_keras_callback(made):
            yield from (one for one in made.body if isinstance(one, ast.FunctionDef) and one.name.startswith("on_"))


def trace(flow: Flow) -> list[Event]:
    """The calls of a script in the order in which they first run; calls in several ways are there several times."""
    return Tracer(flow).run()
