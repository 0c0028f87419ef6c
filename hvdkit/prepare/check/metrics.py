"""Numbers of one rank's part that are shown as if they were of the whole."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hvdkit.prepare.check.call_arguments import arguments
from hvdkit.prepare.check.case import SHARDED, Case
from hvdkit.prepare.check.facts import argument, method, receiver
from hvdkit.prepare.check.libraries import LOADERS, SAMPLERS, Role
from hvdkit.prepare.check.trace import Event

_SHOWS = {
    "info", "debug", "warning", "log", "add_scalar", "add_scalars", "log_metric", "log_metrics", "echo", "write",
    "print",
}  # fmt: skip
_METRIC = re.compile(
    r"acc|loss|err|score|metric|f1|prec|recall|correct|mse|mae|top\d|auc|ppl|perplex|hits", re.IGNORECASE
)
_DECIDES = ("callbacks.EarlyStopping", "callbacks.ReduceLROnPlateau")


def unaveraged(case: Case) -> Iterator[int]:
    """Lines that show a metric of one rank's part of the test data."""
    for loop, inside in case.evaluation_loops.items():
        if not _is_part(case, loop):
            continue
        body = {node for statement in getattr(loop, "body", []) for node in ast.walk(statement)}
        last = max(event.order for event in inside)
        for event in case.events:
            after = event.order > last and loop not in event.loops and event.reached
            if not after or not _shows(case, event) or _says_rank(case, event):
                continue
            if any(_is_local(case, value, body) for value in shown(event.node)):
                yield event.node.lineno
                break
    yield from _evaluated(case)
    yield from _fitted(case)


def _is_part(case: Case, loop: ast.AST) -> bool:
    """Whether a rank sees only its part of what a loop goes over."""
    for loader in case.sources(loop):
        given = arguments(loader)
        parts = any(case.made_by(one, SAMPLERS, through=True) or case.shard_lines(one) for one in given)
        if case.name(loader) in LOADERS and parts:
            return True
    return any(case.shard_lines(one) for one in case.drawn_from(loop))


def _shows(case: Case, event: Event) -> bool:
    return case.name(event.node) in ("builtins.print", "wandb.log", "click.echo") or method(event.node) in _SHOWS


def shown(call: ast.Call) -> list[ast.expr]:
    """The single values in what a call prints: those in f-strings, ``%``, ``format``, tuples and dictionaries."""
    found: list[ast.expr] = []
    stack: list[ast.AST] = [*arguments(call)]
    while stack:
        node = stack.pop()
        match node:
            case ast.JoinedStr():
                stack += node.values
            case ast.FormattedValue():
                stack.append(node.value)
            case ast.BinOp(op=ast.Mod(), left=ast.Constant(value=str())):
                stack.append(node.right)
            case ast.Tuple() | ast.List():
                stack += node.elts
            case ast.Dict():
                stack += node.values
            case ast.Call(func=ast.Attribute(attr="format")):
                stack += arguments(node)
            case ast.BinOp(op=ast.Add()) if any(
                isinstance(one, (ast.Constant, ast.JoinedStr)) for one in (node.left, node.right)
            ):
                stack += [node.left, node.right]
            case ast.expr():
                found.append(node)
    return found


def _is_local(case: Case, value: ast.expr, body: set[ast.AST]) -> bool:
    """Whether a shown value was made in a loop and no collective took part in it."""
    reached = case.reach(value, through=True)
    names = [one for one in reached if isinstance(one, (ast.Name, ast.Attribute))]
    if not body & reached or not any(_METRIC.search(ast.unparse(one)) for one in [value, *names]):
        return False
    for call in (one for one in reached if isinstance(one, ast.Call)):
        own = case.callees(call)
        if any(
            case.role(inner) == Role.REDUCE
            for function in own
            for inner in ast.walk(function)
            if isinstance(inner, ast.Call)
        ):
            return False
        if case.role(call) == Role.REDUCE or case.name(call).startswith("torchmetrics."):
            return False
        last = ast.unparse(call.func).rpartition(".")[2]
        if case.is_opaque(call) and not last[:1].isupper():
            return False
    made = {
        ast.unparse(one)
        for one in body
        if isinstance(one, (ast.Name, ast.Attribute)) and isinstance(one.ctx, ast.Store)
    }
    texts = {ast.unparse(name) for name in names}
    return not _is_reduced_by_function(case, made & texts, texts)


def _is_reduced_by_function(case: Case, made: set[str], texts: set[str]) -> bool:
    """``average(total)``, ``meter.all_reduce()``: a function of the script that reduces one of these in place."""
    for event in case.events:
        given = {ast.unparse(one) for one in event.node.args} & made
        if isinstance(case.parents[event.node], ast.Expr) and (given or ast.unparse(receiver(event.node)) in texts):
            inside = [node for function in case.callees(event.node) for node in ast.walk(function)]
            if any(isinstance(node, ast.Call) and case.role(node) == Role.REDUCE for node in inside):
                return True
    return False


def _says_rank(case: Case, event: Event) -> bool:
    """Whether it says whose number it is."""
    return any(case.has_rank(value) for value in shown(event.node)) or "rank" in ast.unparse(event.node).lower()


# Keras --------------------------------------------------------------------------------------------------------------


def _evaluated(case: Case) -> Iterator[int]:
    """``evaluate`` on a part, shown without a mean over the ranks."""
    parts = [event for event in case.evaluations if _takes_part(case, argument(event.node, "x", 0))]
    parts = [event for event in parts if argument(event.node, "callbacks") is None]
    for event in case.events:
        if not _shows(case, event) or not event.reached or _says_rank(case, event):
            continue
        for value in shown(event.node):
            calls = case.calls(value, through=True)
            averaged = any(case.role(call) == Role.REDUCE or case.is_opaque(call) for call in calls)
            if any(one.node in calls for one in parts) and not averaged:
                yield event.node.lineno
                break


def _takes_part(case: Case, given: ast.expr | None) -> bool:
    return given is not None and bool(case.shard_lines(given))


def _fitted(case: Case) -> Iterator[int]:
    """``fit`` that reports or decides on what one rank sees, without a callback that averages."""
    if case.guards_fit or case.having(Role.AVERAGE_CALLBACK) or case.having(Role.REDUCE):
        return
    deciding = [event for event in case.named(*_DECIDES) if event.reached]
    for event in case.fits:
        callbacks = argument(event.node, "callbacks")
        if callbacks is not None and case.hidden(callbacks):
            continue
        if _takes_part(case, argument(event.node, "validation_data")):
            yield event.node.lineno
            continue
        for callback in deciding:
            monitor = argument(callback.node, "monitor", 0)
            of_training = isinstance(monitor, ast.Constant) and not str(monitor.value).startswith("val")
            if of_training and case.fit_part(event).kind == SHARDED:
                yield callback.node.lineno
