"""Collectives that some ranks never reach, and metrics of one rank that none has averaged."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hvdkit.prepare.check.flow import everything, remembered
from hvdkit.prepare.check.libraries import LOADERS, RANKS, TOGETHER, Role
from hvdkit.prepare.check.ranks import SHARDED
from hvdkit.prepare.check.source import argument, arguments, makes_object, method, receiver
from hvdkit.prepare.check.steps import JudgedCase
from hvdkit.prepare.check.trace import Event

_GROUPS = {"process_set", "group", "process_group"}
_ROOT = "root"
_OTHERS = "others"
_ONE = "one"
_DEEPEST = 9
_SHOWS = {
    "info", "debug", "warning", "log", "add_scalar", "add_scalars", "log_metric", "log_metrics", "echo", "write",
    "print",
}  # fmt: skip
_HOLDS_VALUES = (ast.JoinedStr, ast.FormattedValue, ast.Dict, ast.Tuple, ast.List)
_METRIC = re.compile(
    r"acc|loss|err|score|metric|f1|prec|recall|correct|mse|mae|top\d|auc|ppl|perplex|hits", re.IGNORECASE
)


# A branch that only some ranks take -----------------------------------------------------------------------------------


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


# Metrics --------------------------------------------------------------------------------------------------------------


def unaveraged(case: JudgedCase) -> Iterator[int]:
    """Lines that show a metric of one rank's part of the test data."""
    shows = [event for event in case.events if event.reached and _shows(case, event)]
    for loop, inside in case.evaluation_loops.items():
        given = [value for loader in case.sources(loop) if case.name(loader) in LOADERS for value in arguments(loader)]
        if not case.shard_lines(*given, *case.drawn_from(loop)):  # every rank sees all
            continue
        body = {node for statement in getattr(loop, "body", []) for node in ast.walk(statement)}
        last = max(event.order for event in inside)
        for event in shows:
            after = event.order > last and loop not in event.loops
            if after and any(_is_of_one_rank(case, value, body) for value in shown(event.node)):
                yield event.node.lineno
                break
    yield from _evaluated(case, shows)
    yield from _fitted(case)


def _shows(case: JudgedCase, event: Event) -> bool:
    """Whether a call shows something and does not say whose number it is."""
    shows = case.name(event.node) in ("builtins.print", "wandb.log", "click.echo") or method(event.node) in _SHOWS
    return shows and not case.has_rank(*shown(event.node)) and "rank" not in ast.unparse(event.node).lower()


def shown(call: ast.Call) -> list[ast.expr]:
    """The single values in what a call prints: those in f-strings, ``%``, ``format``, tuples and dictionaries."""

    def parts(node: ast.AST) -> list[ast.expr]:
        inside = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        formats = isinstance(node, ast.Call) and method(node) == "format"
        joins = isinstance(node, ast.BinOp) and any(isinstance(one, (ast.Constant, ast.JoinedStr)) for one in inside)
        return inside if formats or joins or isinstance(node, _HOLDS_VALUES) else []

    return [value for one in arguments(call) for value in everything(one, parts) if not parts(value)]


def _is_of_one_rank(case: JudgedCase, value: ast.expr, body: set[ast.AST]) -> bool:
    """Whether a shown value was made in a loop and no collective took part in it."""
    reached = case.reach(value, through=True)
    names = [node for node in reached if isinstance(node, (ast.Name, ast.Attribute))]
    if not body & reached or not any(_METRIC.search(ast.unparse(one)) for one in [value, *names]):
        return False
    for call in (node for node in reached if isinstance(node, ast.Call)):
        if _reduces(case, call) or case.role(call) == Role.REDUCE or case.name(call).startswith("torchmetrics."):
            return False
        if case.is_opaque(call) and not makes_object(call):
            return False
    stored = [node for node in body if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store)]
    texts = {ast.unparse(name) for name in names}
    made = {ast.unparse(one) for one in stored} & texts
    for call in (event.node for event in case.events):  # ``average(total)``, ``meter.all_reduce()``: in place
        given = {ast.unparse(value) for value in call.args} & made or ast.unparse(receiver(call)) in texts
        if given and isinstance(case.parents[call], ast.Expr) and _reduces(case, call):
            return False
    return True


def _reduces(case: JudgedCase, call: ast.Call) -> bool:
    """Whether a function of the script that a call runs holds a collective that reduces."""
    inside = [node for function in case.callees(call) for node in ast.walk(function)]
    return any(isinstance(node, ast.Call) and case.role(node) == Role.REDUCE for node in inside)


def _evaluated(case: JudgedCase, shows: list[Event]) -> Iterator[int]:
    """Keras' ``evaluate`` on a part, shown without a mean over the ranks."""
    parts = [event.node for event in case.evaluations if case.shard_lines(argument(event.node, "x", 0))]
    parts = [call for call in parts if argument(call, "callbacks") is None]
    for event in shows if parts else ():
        for value in shown(event.node):
            calls = case.calls(value, through=True)
            averaged = any(case.role(call) == Role.REDUCE or case.is_opaque(call) for call in calls)
            if not averaged and set(parts) & set(calls):
                yield event.node.lineno


def _fitted(case: JudgedCase) -> Iterator[int]:
    """``fit`` that reports or decides on what one rank sees, without a callback that averages."""
    if case.guards_fit or case.having(Role.AVERAGE_CALLBACK, Role.REDUCE):
        return
    named = case.named("callbacks.EarlyStopping", "callbacks.ReduceLROnPlateau")
    deciding = [event.node for event in named if event.reached]
    for event in (event for event in case.fits if not case.hidden(argument(event.node, "callbacks"))):
        if case.shard_lines(argument(event.node, "validation_data")):
            yield event.node.lineno
            continue
        for callback in deciding:
            monitor = argument(callback, "monitor", 0)
            of_training = isinstance(monitor, ast.Constant) and not str(monitor.value).startswith("val")
            if of_training and case.fit_part(event).kind == SHARDED:
                yield callback.lineno
