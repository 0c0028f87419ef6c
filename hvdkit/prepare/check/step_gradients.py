"""Step 4: the gradients of all ranks become one."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hvdkit.prepare.check.facts import Facts, argument, method
from hvdkit.prepare.check.libraries import DISTRIBUTE, FIT, LOAD_MODEL, REDUCE
from hvdkit.prepare.check.trace import Event
from hvdkit.prepare.check.training import Training, Update
from hvdkit.prepare.check.verdict import Verdict, done, missing, undecided


def distribute(facts: Facts, training: Training) -> Verdict:
    """Step 4."""
    events = facts.having(DISTRIBUTE, FIT, LOAD_MODEL)
    if events:
        return done(facts.lines(events))
    by_hand = training.reduces_gradients()
    if by_hand:
        return done(facts.lines(by_hand), "by hand")
    doubt = facts.others[0] if facts.others else training.handed_away()
    if doubt:
        return undecided(f"{doubt} may do it, which is not read here")
    if not training.steps:
        return undecided("nothing is trained in this text")
    tapes = [one for one in training.steps if method(one.node) == "gradient"]
    makers = (
        tapes[:1] or training.optimizers[:1] or [update.event for update in training.updates][:1] or training.steps[:1]
    )
    return missing(facts.lines(makers))


def undistributed(facts: Facts, training: Training) -> Iterator[Event]:
    """Updates by an optimizer that nothing distributes, in a script that distributes one."""
    events = facts.having(DISTRIBUTE, LOAD_MODEL)
    if not events or training.reduces_gradients() or facts.library == "ddp" or training.handed_away():
        return
    in_place = any(facts.name(event.node).startswith(("hvdkit.keras", "hvdkit.tensorflow")) for event in events)
    for update in training.updates:
        if update.event.reached and not in_place and _is_local(facts, training, update):
            yield update.event


def _is_local(facts: Facts, training: Training, update: Update) -> bool:
    """Whether everything shows where the optimizer and the gradients come from, and nothing of it is distributed."""
    sources = facts.flow.calls(update.optimizer)
    gradients = facts.flow.calls(update.gradients, through=True) if update.gradients is not None else []
    if method(update.event.node) == "compile" and isinstance(update.optimizer, ast.Constant):
        return facts.library == "horovod"
    seen = any(training.makes_optimizer(call) for call in sources)
    averaged = any(facts.role(call) in (DISTRIBUTE, REDUCE) for call in [*sources, *gradients])
    hidden = any(facts.flow.is_opaque(call) for call in [*sources, *gradients] if not _is_model_call(call))
    if update.gradients is None and method(update.event.node) == "apply_gradients":
        return False
    return seen and not averaged and not hidden


def _is_model_call(call: ast.Call) -> bool:
    """A layer or model that is called; what is in it does not average gradients."""
    return ast.unparse(call.func).rpartition(".")[2][:1].isupper()


def unwrapped_models(facts: Facts) -> Iterator[Event]:
    """Training steps of DDP scripts that run the bare model, although another name has the wrapped one."""
    wrapped = [event.node for event in facts.having(DISTRIBUTE)]
    bare = {made for call in wrapped for made in facts.flow.calls(_first(call)) if facts.flow.class_of(made)}
    backward = [event for event in facts.methods("backward") if event.reached and event.loops]
    for event in facts.events:
        called = event.node.func
        if not isinstance(called, (ast.Name, ast.Attribute)) or not event.reached or facts.name(event.node):
            continue
        sources = set(facts.flow.calls(called))
        is_model = sources & bare and not sources & set(wrapped)
        is_object = isinstance(called, ast.Name) or called.attr in facts.program.attributes  # not model.train()
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


def distributed_twice(facts: Facts) -> Iterator[Event]:
    """Wrappers around what is wrapped already, and updates of averaged gradients by an optimizer that averages."""
    for event in facts.having(DISTRIBUTE):
        inner = event.node.args[0] if event.node.args else argument(event.node, "optimizer")
        around = facts.flow.calls(inner) if inner is not None else []
        if event.reached and any(facts.role(call) == DISTRIBUTE and call is not event.node for call in around):
            yield event


def averaged_twice(facts: Facts, training: Training) -> Iterator[Event]:
    """Updates that apply gradients from a distributed tape by a distributed optimizer."""
    for update in training.updates:
        if update.gradients is None or not update.event.reached:
            continue
        optimizers = _wrappers(facts, facts.flow.calls(update.optimizer))
        tapes = _wrappers(facts, facts.flow.calls(update.gradients, through=True))
        tapes = [call for call in tapes if call not in optimizers]
        conditional = any(guard for call in [*optimizers, *tapes] for guard in _guards(facts, call))
        if optimizers and tapes and not conditional:
            yield update.event


def _wrappers(facts: Facts, calls: list[ast.Call]) -> list[ast.Call]:
    return [call for call in calls if facts.role(call) == DISTRIBUTE]


def _guards(facts: Facts, call: ast.Call) -> list[object]:
    return [guard for event in facts.events if event.node is call for guard in event.guards if not guard.wraps]
