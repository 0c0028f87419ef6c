"""Metrics of one rank's part of the data that are shown as if they were of the whole."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hvdkit.prepare.check.calls import argument, arguments, makes_object, method, receiver
from hvdkit.prepare.check.flow import everything
from hvdkit.prepare.check.libraries import LOADERS, Role
from hvdkit.prepare.check.parts import SHARDED
from hvdkit.prepare.check.steps import JudgedCase
from hvdkit.prepare.check.trace import Event

_SHOWS = {
    "info", "debug", "warning", "log", "add_scalar", "add_scalars", "log_metric", "log_metrics", "echo", "write",
    "print",
}  # fmt: skip
_HOLDS_VALUES = (ast.JoinedStr, ast.FormattedValue, ast.Dict, ast.Tuple, ast.List)
_METRIC = re.compile(
    r"acc|loss|err|score|metric|f1|prec|recall|correct|mse|mae|top\d|auc|ppl|perplex|hits", re.IGNORECASE
)


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
