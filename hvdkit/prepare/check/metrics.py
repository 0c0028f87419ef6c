"""Numbers of one rank's part that are shown as if they were of the whole."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hvdkit.prepare.check.data import SHARDED, Data
from hvdkit.prepare.check.facts import Facts, argument, method
from hvdkit.prepare.check.libraries import AVERAGE_CALLBACK, LOADERS, REDUCE, SAMPLERS
from hvdkit.prepare.check.trace import Event
from hvdkit.prepare.check.training import Training

_SHOWS = {
    "info",
    "debug",
    "warning",
    "log",
    "add_scalar",
    "add_scalars",
    "log_metric",
    "log_metrics",
    "echo",
    "write",
    "print",
}
_METRIC = re.compile(
    r"acc|loss|err|score|metric|f1|prec|recall|correct|mse|mae|top\d|auc|ppl|perplex|hits", re.IGNORECASE
)
_DECIDES = ("callbacks.EarlyStopping", "callbacks.ReduceLROnPlateau")


def unaveraged(facts: Facts, training: Training, data: Data) -> Iterator[int]:
    """Lines that show a metric of one rank's part of the test data."""
    for loop, inside in training.evaluation_loops.items():
        if not _is_part(facts, training, data, loop):
            continue
        body = {node for statement in getattr(loop, "body", []) for node in ast.walk(statement)}
        last = max(event.order for event in inside)
        for event in facts.events:
            after = event.order > last and loop not in event.loops and event.reached
            if not after or not _shows(facts, event) or _says_rank(facts, event):
                continue
            if any(_is_local(facts, value, body) for value in shown(event.node)):
                yield event.node.lineno
                break
    yield from _evaluated(facts, training, data)
    yield from _fitted(facts, training, data)


def _is_part(facts: Facts, training: Training, data: Data, loop: ast.AST) -> bool:
    """Whether a rank sees only its part of what a loop goes over."""
    for loader in training.sources(loop):
        given = [*loader.args, *(one.value for one in loader.keywords)]
        parts = any(facts.made_by(one, SAMPLERS, through=True) or data.shard_lines(one) for one in given)
        if facts.name(loader) in LOADERS and parts:
            return True
    return any(data.shard_lines(one) for one in training.drawn_from(loop))


def _shows(facts: Facts, event: Event) -> bool:
    return facts.name(event.node) in ("builtins.print", "wandb.log", "click.echo") or method(event.node) in _SHOWS


def shown(call: ast.Call) -> list[ast.expr]:
    """The single values in what a call prints: those in f-strings, ``%``, ``format``, tuples and dictionaries."""
    found: list[ast.expr] = []
    stack: list[ast.AST] = [*call.args, *(keyword.value for keyword in call.keywords)]
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
                stack += [*node.args, *(keyword.value for keyword in node.keywords)]
            case ast.BinOp(op=ast.Add()) if any(
                isinstance(one, (ast.Constant, ast.JoinedStr)) for one in (node.left, node.right)
            ):
                stack += [node.left, node.right]
            case ast.expr():
                found.append(node)
    return found


def _is_local(facts: Facts, value: ast.expr, body: set[ast.AST]) -> bool:
    """Whether a shown value was made in a loop and no collective took part in it."""
    reached = facts.flow.reach(value, through=True)
    names = [one for one in reached if isinstance(one, (ast.Name, ast.Attribute))]
    if not body & reached or not any(_METRIC.search(ast.unparse(one)) for one in [value, *names]):
        return False
    for call in (one for one in reached if isinstance(one, ast.Call)):
        own = facts.flow.callees(call)
        if any(
            facts.role(inner) == REDUCE
            for function in own
            for inner in ast.walk(function)
            if isinstance(inner, ast.Call)
        ):
            return False
        if facts.role(call) == REDUCE or facts.name(call).startswith("torchmetrics."):
            return False
        last = ast.unparse(call.func).rpartition(".")[2]
        if facts.flow.is_opaque(call) and not last[:1].isupper():
            return False
    made = {
        ast.unparse(one)
        for one in body
        if isinstance(one, (ast.Name, ast.Attribute)) and isinstance(one.ctx, ast.Store)
    }
    return not _is_reduced_by_function(facts, made & {ast.unparse(name) for name in names})


def _is_reduced_by_function(facts: Facts, texts: set[str]) -> bool:
    """``average(total)``: a function of the script that is given one of these names and reduces in place."""
    for event in facts.events:
        given = {ast.unparse(one) for one in event.node.args}
        if isinstance(facts.program.parents[event.node], ast.Expr) and given & texts:
            inside = [node for function in facts.flow.callees(event.node) for node in ast.walk(function)]
            if any(isinstance(node, ast.Call) and facts.role(node) == REDUCE for node in inside):
                return True
    return False


def _says_rank(facts: Facts, event: Event) -> bool:
    """Whether it says whose number it is."""
    return any(facts.has_rank(value) for value in shown(event.node)) or "rank" in ast.unparse(event.node).lower()


# Keras --------------------------------------------------------------------------------------------------------------


def _evaluated(facts: Facts, training: Training, data: Data) -> Iterator[int]:
    """``evaluate`` on a part, shown without a mean over the ranks."""
    parts = [event for event in training.evaluations if _takes_part(data, argument(event.node, "x", 0))]
    parts = [event for event in parts if argument(event.node, "callbacks") is None]
    for event in facts.events:
        if not _shows(facts, event) or not event.reached or _says_rank(facts, event):
            continue
        for value in shown(event.node):
            calls = facts.flow.calls(value, through=True)
            averaged = any(facts.role(call) == REDUCE or facts.flow.is_opaque(call) for call in calls)
            if any(one.node in calls for one in parts) and not averaged:
                yield event.node.lineno
                break


def _takes_part(data: Data, given: ast.expr | None) -> bool:
    return given is not None and bool(data.shard_lines(given))


def _fitted(facts: Facts, training: Training, data: Data) -> Iterator[int]:
    """``fit`` that reports or decides on what one rank sees, without a callback that averages."""
    if facts.having(AVERAGE_CALLBACK) or facts.having(REDUCE):
        return
    deciding = [event for event in facts.named(*_DECIDES) if event.reached]
    for event in training.fits:
        callbacks = argument(event.node, "callbacks")
        if callbacks is not None and facts.hidden(callbacks):
            continue
        if _takes_part(data, argument(event.node, "validation_data")):
            yield event.node.lineno
            continue
        for callback in deciding:
            monitor = argument(callback.node, "monitor", 0)
            of_training = isinstance(monitor, ast.Constant) and not str(monitor.value).startswith("val")
            if of_training and data.fit_part(event).kind == SHARDED:
                yield callback.node.lineno
