"""Step 4: the gradients of all ranks become one."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hvdkit.prepare.check.case import Case
from hvdkit.prepare.check.facts import argument, method
from hvdkit.prepare.check.libraries import Role
from hvdkit.prepare.check.trace import Event
from hvdkit.prepare.check.training import Update
from hvdkit.prepare.check.verdict import Verdict, done, missing, undecided


def distribute(case: Case) -> Verdict:
    """Step 4."""
    events = case.having(Role.DISTRIBUTE, Role.FIT, Role.LOAD_MODEL)
    if events:
        return done(case.lines(events))
    by_hand = case.reduces_gradients()
    if by_hand:
        return done(case.lines(by_hand), "by hand")
    if doubt := case.elsewhere():
        return undecided(doubt)
    if not case.steps:
        return undecided("nothing is trained in this text")
    tapes = [one for one in case.steps if method(one.node) == "gradient"]
    makers = tapes[:1] or case.optimizers[:1] or [update.event for update in case.updates][:1] or case.steps[:1]
    return missing(case.lines(makers))


def undistributed(case: Case) -> Iterator[Event]:
    """Updates by an optimizer that nothing distributes, in a script that distributes one."""
    events = case.having(Role.DISTRIBUTE, Role.LOAD_MODEL)
    if not events or case.reduces_gradients() or case.library == "ddp" or case.handed_away():
        return
    in_place = any(case.name(event.node).startswith(("hvdkit.keras", "hvdkit.tensorflow")) for event in events)
    for update in case.updates:
        if update.event.reached and not in_place and _is_local(case, update):
            yield update.event


def _is_local(case: Case, update: Update) -> bool:
    """Whether everything shows where the optimizer and the gradients come from, and nothing of it is distributed."""
    sources = case.calls(update.optimizer)
    gradients = case.calls(update.gradients, through=True) if update.gradients is not None else []
    if method(update.event.node) == "compile" and isinstance(update.optimizer, ast.Constant):
        return case.library == "horovod"
    seen = any(case.makes_optimizer(call) for call in sources)
    averaged = any(case.role(call) in (Role.DISTRIBUTE, Role.REDUCE) for call in [*sources, *gradients])
    hidden = any(case.is_opaque(call) for call in [*sources, *gradients] if not _is_model_call(call))
    if update.gradients is None and method(update.event.node) == "apply_gradients":
        return False
    return seen and not averaged and not hidden


def _is_model_call(call: ast.Call) -> bool:
    """A layer or model that is called; what is in it does not average gradients."""
    return ast.unparse(call.func).rpartition(".")[2][:1].isupper()


def unwrapped_models(case: Case) -> Iterator[Event]:
    """Training steps of DDP scripts that run the bare model, although another name has the wrapped one."""
    wrapped = [event.node for event in case.having(Role.DISTRIBUTE)]
    bare = {made for call in wrapped for made in case.calls(_first(call)) if case.class_of(made)}
    backward = [event for event in case.methods("backward") if event.reached and event.loops]
    for event in case.events:
        called = event.node.func
        if not isinstance(called, (ast.Name, ast.Attribute)) or not event.reached or case.name(event.node):
            continue
        sources = set(case.calls(called))
        is_model = sources & bare and not sources & set(wrapped)
        is_object = isinstance(called, ast.Name) or called.attr in case.attributes  # not model.train()
        if is_model and is_object and any(_belong(event, one) for one in backward):
            yield event


def _belong(event: Event, backward: Event) -> bool:
    return (
        bool(event.loops)
        and event.loops == backward.loops
        and event.stack == backward.stack
        and event.order < backward.order
    )


def _first(call: ast.Call) -> ast.expr:
    return argument(call, "module", 0) or argument(call, "optimizer", 0) or call


def distributed_twice(case: Case) -> Iterator[Event]:
    """Wrappers around what is wrapped already, and updates of averaged gradients by an optimizer that averages."""
    for event in case.having(Role.DISTRIBUTE):
        inner = event.node.args[0] if event.node.args else argument(event.node, "optimizer")
        around = _wrappers(case, inner) if inner is not None else []
        if event.reached and any(call is not event.node for call in around):
            yield event
    for update in case.updates:
        if update.gradients is None or not update.event.reached:
            continue
        optimizers = _wrappers(case, update.optimizer)
        tapes = [one for one in _wrappers(case, update.gradients, through=True) if one not in optimizers]
        ways = [event for event in case.events if event.node in [*optimizers, *tapes]]
        conditional = any(not guard.wraps for event in ways for guard in event.guards)
        if optimizers and tapes and not conditional:
            yield update.event


def _wrappers(case: Case, node: ast.expr, through: bool = False) -> list[ast.Call]:
    return case.having_made(node, Role.DISTRIBUTE, through=through)
