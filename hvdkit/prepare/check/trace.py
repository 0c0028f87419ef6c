"""The calls of a script in the order in which they first run, each with the conditions that it runs under."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hvdkit.prepare.check.flow import FUNCTIONS, Flow
from hvdkit.prepare.check.source import FunctionNode, arguments

_MOST_EVENTS = 60_000
_MOST_VISITS = 6
"""A function is followed at so many of its calls: enough for every guard that is written, bounded for any script."""
_DEEPEST = 30
"""So many functions deep a call is followed; what lies deeper counts as reached by nothing that is known."""
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
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


@dataclass(frozen=True, kw_only=True)
class Way:
    """How the text leads to a place, and how sure it is that it does.

    Attributes:
        guards: the conditions, outermost first, across functions.
        loops: the loops around it, outermost first, across functions.
        stack: the calls of the script's own functions that lead here.
        functions: these functions.
        reached: False for functions that nothing in the text calls: someone else may.
    """

    guards: tuple[Condition, ...] = ()
    loops: tuple[ast.AST, ...] = ()
    stack: tuple[ast.Call, ...] = ()
    functions: tuple[FunctionNode, ...] = ()
    reached: bool = True

    def under(self, *guards: Condition) -> Way:
        """The way on, under more conditions."""
        return replace(self, guards=(*self.guards, *guards))

    def within(self, loop: ast.AST) -> Way:
        """The way on, into a loop."""
        return replace(self, loops=(*self.loops, loop))


@dataclass(frozen=True, kw_only=True)
class Event(Way):
    """A call, and one way there.

    Attributes:
        node: the call.
        order: its place in the sequence.
    """

    node: ast.Call
    order: int


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
        self._follow(self.flow.tree.body, Way())
        functions = [one for one in self.flow.functions if not isinstance(one, ast.Lambda)]
        called = {*self.flow.calls_of, *self.flow.started}
        for function in sorted(functions, key=lambda one: one in called):  # first those that nothing calls
            if function not in self._visits:
                self._function(function, Way(functions=(function,), reached=False))
        return self.events

    def _function(self, function: FunctionNode, way: Way) -> None:
        self._visits[function] = self._visits.get(function, 0) + 1
        decorators = [] if isinstance(function, ast.Lambda) else function.decorator_list
        self._follow(function.body, way.under(*(Condition(one, wraps=True) for one in decorators)))

    def _follow(self, node: object, way: Way) -> list[_Leak]:
        """Follow a piece of the text, or several in a row, down to the calls in it; gives what holds after it."""
        leaks: list[_Leak] = []
        match node:
            case list():
                for one in node:
                    new = self._follow(one, way)
                    leaks += new
                    way = way.under(*(guard for guard, _ in new))
            case ast.If() | ast.IfExp():
                leaks = self._if(node, way)
            case ast.For() | ast.AsyncFor() | ast.While():
                leaks = self._loop(node, way)
            case ast.With() | ast.AsyncWith():
                self._follow(node.items, way)
                inside = way.under(*(Condition(one.context_expr, wraps=True) for one in node.items))
                leaks = self._follow(node.body, inside)
            case ast.ExceptHandler():
                self._follow(node.body, way)
            case ast.Match():
                self._follow(node.subject, way)
                for case in node.cases:
                    self._follow(case.body, way.under(Condition(node.subject, certain=False)))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._follow(node.decorator_list, way)
            case ast.ClassDef():
                self._follow([statement for statement in node.body if not isinstance(statement, FUNCTIONS)], way)
            case ast.BoolOp():
                for value in node.values:
                    self._follow(value, way)
                    way = way.under(Condition(value, isinstance(node.op, ast.And)))
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                self._comprehension(node, way)
            case ast.Call():
                self._call(node, way)
            case ast.AST() if not isinstance(node, ast.Lambda):
                for _, value in ast.iter_fields(node):
                    leaks += self._follow(value, way)
        return leaks

    def _if(self, node: ast.If | ast.IfExp, way: Way) -> list[_Leak]:
        self._follow(node.test, way)
        inner = self._follow(node.body, way.under(Condition(node.test)))
        inner += self._follow(node.orelse, way.under(Condition(node.test, holds=False)))
        leaks = [(replace(guard, certain=False), leaves) for guard, leaves in inner]
        for block, holds in ((node.body, False), (node.orelse, True)):
            if isinstance(block, list) and block and self._leaves(block[-1]):
                leaks.append((Condition(node.test, holds), not isinstance(block[-1], (ast.Continue, ast.Break))))
        return leaks

    def _leaves(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            return self.flow.dotted(node.value.func) in _EXITS
        return isinstance(node, _LEAVES)

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, way: Way) -> list[_Leak]:
        condition = (Condition(node.test),) if isinstance(node, ast.While) else ()
        self._follow(node.test if isinstance(node, ast.While) else node.iter, way)
        leaks = self._follow(node.body, way.within(node).under(*condition)) + self._follow(node.orelse, way)
        return [leak for leak in leaks if leak[1]]

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, way: Way) -> None:
        for generator in node.generators:
            self._follow(generator.iter, way)
            way = way.within(generator)
            for condition in generator.ifs:
                self._follow(condition, way)
                way = way.under(Condition(condition))
        self._follow([node.key, node.value] if isinstance(node, ast.DictComp) else node.elt, way)

    def _call(self, node: ast.Call, way: Way) -> None:
        if len(self.events) >= _MOST_EVENTS:
            return
        self._follow([node.func, *arguments(node)], way)
        self.events.append(Event(**vars(way), node=node, order=len(self.events)))
        for function in self._run_by(node):
            may_enter = function not in way.functions and len(way.functions) < _DEEPEST
            if may_enter and self._visits.get(function, 0) < _MOST_VISITS:
                inside = replace(way, stack=(*way.stack, node), functions=(*way.functions, function))
                self._function(function, inside)

    def _run_by(self, node: ast.Call) -> Iterator[FunctionNode]:
        own = self.flow.callees(node)
        yield from own
        if not own:
            yield from self.flow.function_arguments(node)
        made = self.flow.class_of(node)
        if made is not None and self.flow.is_keras_callback(made):
            methods = (statement for statement in made.body if isinstance(statement, ast.FunctionDef))
            yield from (method for method in methods if method.name.startswith("on_"))
