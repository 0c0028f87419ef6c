"""Step 4: the gradients of all ranks become one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hvdkit.prepare.check.calls import argument, is_constant, makes_object, method, receiver
from hvdkit.prepare.check.case import Case
from hvdkit.prepare.check.libraries import Role
from hvdkit.prepare.check.trace import Event
from hvdkit.prepare.check.training import Update
from hvdkit.prepare.check.verdict import Verdict, done, missing, undecided

_IN_STEP = "horovod.torch."
"""Whose optimizer averages gradients in ``step``, and not before."""
_CLIPS = re.compile(r"(torch|timm)\..*clip_grad")
_HOROVODS_OWN = ("synchronize", "skip_synchronize", "set_backward_passes_per_step")


def distribute(case: Case) -> Verdict:
    """Step 4."""
    if by_hand := case.reduces_gradients():
        return done(case.lines(by_hand), "by hand")
    if doubt := case.elsewhere():
        return undecided(doubt)
    if not case.steps:
        return undecided("nothing is trained in this text")
    tapes = [one for one in case.steps if method(one.node) == "gradient"]
    makers = tapes or case.optimizers or [update.event for update in case.updates] or case.steps
    return missing(case.lines(makers[:1]))


def undistributed(case: Case) -> Iterator[Event]:
    """Updates by an optimizer that nothing distributes, in a script that distributes one."""
    events = case.having(Role.DISTRIBUTE, Role.LOAD_MODEL)
    if not events or case.reduces_gradients() or case.library == "ddp" or case.handed_away():
        return
    for update in case.updates:
        if update.event.reached and _is_local(case, update):
            yield update.event
    for between, update in _passes(case):
        if _skips_synchronizing(case, update.event) and not _is_synchronized(between):
            yield update.event


def _is_local(case: Case, update: Update) -> bool:
    """Whether everything shows where the optimizer and the gradients come from, and nothing of it is distributed."""
    if method(update.event.node) == "compile" and isinstance(update.optimizer, ast.Constant):
        return case.library == "horovod"
    if update.gradients is None and method(update.event.node) == "apply_gradients":
        return False
    # A layer or a model may be called on the way: what is in it does not average gradients.
    made = [*case.calls(update.optimizer), *case.calls(update.gradients, through=True)]
    averaged = any(case.role(call) in (Role.DISTRIBUTE, Role.REDUCE) for call in made)
    hidden = any(case.is_opaque(call) and not makes_object(call) for call in made)
    unseen = any(not _optimizers(case, _first(call)) for call in _in_place(case))  # a tape, or from elsewhere
    seen = bool(_optimizers(case, update.optimizer))
    return seen and not averaged and not hidden and not unseen and not _distributors(case, update.optimizer)


def _distributors(case: Case, optimizer: ast.expr) -> list[ast.Call]:
    """The calls that made an optimizer a distributed one: another one, or itself in its place."""
    own = _optimizers(case, optimizer)
    changed = [call for call in _in_place(case) if own & _optimizers(case, _first(call))]
    return [*case.having_made(optimizer, Role.DISTRIBUTE), *changed]


def _optimizers(case: Case, node: ast.expr) -> set[ast.Call]:
    return {call for call in case.calls(node) if case.makes_optimizer(call)}


def _in_place(case: Case) -> list[ast.Call]:
    """The calls of hvdkit's ``distribute``, after which the optimizer that they got is a distributed one."""
    calls = [event.node for event in case.having(Role.DISTRIBUTE) if case.name(event.node).startswith("hvdkit.")]
    return [call for call in calls if not _is_adasum(case, call)]


def _is_adasum(case: Case, call: ast.Call) -> bool:
    return case.operations(call) == {"adasum"}


def unwrapped_models(case: Case) -> Iterator[Event]:
    """Training steps of DDP scripts that run the bare model, although another name has the wrapped one."""
    wrapped = {event.node for event in case.having(Role.DISTRIBUTE)}
    bare = {made for made in case.calls(*map(_first, wrapped)) if case.class_of(made)}
    trained = {(one.loops, one.stack): one.order for one in case.methods("backward") if one.reached and one.loops}
    for event in case.events:
        called = event.node.func
        is_object = isinstance(called, ast.Name) or method(event.node) in case.attributes  # not model.train()
        if not is_object or not event.reached or case.name(event.node):
            continue
        sources = set(case.calls(called))
        if sources & bare and not sources & wrapped and event.order < trained.get((event.loops, event.stack), 0):
            yield event


def _first(call: ast.Call) -> ast.expr:
    return argument(call, "module", 0) or argument(call, "optimizer", 0) or call


def distributed_twice(case: Case) -> Iterator[Event]:
    """Wrappers around what is wrapped already, and updates of averaged gradients by an optimizer that averages."""
    for event in case.having(Role.DISTRIBUTE):
        inner = event.node.args[0] if event.node.args else argument(event.node, "optimizer")
        if event.reached and any(call is not event.node for call in case.having_made(inner, Role.DISTRIBUTE)):
            yield event
    for between, update in _passes(case):
        if _is_synchronized(between) and not _skips_synchronizing(case, update.event):
            yield update.event
    for update in (one for one in case.updates if one.event.reached):
        optimizers = case.having_made(update.optimizer, Role.DISTRIBUTE)
        made = case.having_made(update.gradients, Role.DISTRIBUTE, through=True)
        tapes = [one for one in made if one not in optimizers]
        ways = [event for event in case.events if event.node in [*optimizers, *tapes]]
        conditional = any(not guard.wraps for event in ways for guard in event.guards)
        if optimizers and tapes and not conditional:
            yield update.event


# In PyTorch: when gradients are the mean ----------------------------------------------------------------------------


def _averages_in_step(case: Case, optimizer: ast.expr) -> bool:
    made = _distributors(case, optimizer)
    return any(case.name(call).startswith(_IN_STEP) and not _is_adasum(case, call) for call in made)


def _passes(case: Case) -> Iterator[tuple[list[Event], Update]]:
    """What runs between a backward and the step after it, with the step, of optimizers that average there."""
    updates = {update.event.order: update for update in case.updates}
    since: list[Event] | None = None
    for event in case.events:
        if method(event.node) == "backward":
            since = []
        elif since is not None:
            if event.order in updates and event.reached and _averages_in_step(case, updates[event.order].optimizer):
                way = [one for one in since if not _exclude(one, event)]
                if not any(one.order in updates for one in way):
                    yield way, updates[event.order]
            since.append(event)


def _exclude(one: Event, other: Event) -> bool:
    """Whether they are on two branches of one condition."""
    mine, others = (
        {(ast.unparse(guard.test), guard.holds) for guard in event.guards if guard.certain} for event in (one, other)
    )
    return any((test, not holds) in others for test, holds in mine)


def _is_synchronized(events: list[Event]) -> bool:
    return any(method(event.node) == "synchronize" for event in events)


def _skips_synchronizing(case: Case, event: Event) -> bool:
    around = case.calls(*(guard.test for guard in event.guards if guard.wraps))
    return any(method(call) == "skip_synchronize" for call in around)


def early_uses(case: Case) -> Iterator[Event]:
    """The first use of gradients after a backward and before they are averaged: clipping, or a ``GradScaler``'s."""
    for between, update in _passes(case) if not case.handed_away() else ():
        events = [*between, update.event]
        place = next((place for place, event in enumerate(events) if _uses_gradients(case, event.node)), None)
        if place is not None and not _is_synchronized(events[:place]):
            yield events[place]


def _uses_gradients(case: Case, call: ast.Call) -> bool:
    if _CLIPS.match(case.name(call)):
        return True
    made = case.calls(receiver(call)) if method(call) in ("unscale_", "step") else []
    scalers = [one for one in made if case.name(one).endswith("GradScaler")]
    return any(not is_constant(argument(one, "enabled"), False) for one in scalers)


def closures(case: Case) -> Iterator[Event]:
    """Steps that average first and call a closure then, which computes other gradients."""
    for update in case.updates:
        call = update.event.node
        given = argument(call, "closure", 0)
        is_step = method(call) == "step" and receiver(call) is update.optimizer
        has_closure = is_step and given is not None and not is_constant(given, None)
        if has_closure and update.event.reached and _averages_in_step(case, update.optimizer):
            yield update.event


def left_schedules(case: Case) -> Iterator[Event]:
    """Schedules of an optimizer that was replaced by one which gets other parameter groups afterwards."""
    regrouped = [receiver(event.node) for event in case.methods("load_state_dict", "add_param_group")]
    regrouped += [one for event in case.having(Role.ELASTIC) if (one := argument(event.node, "optimizer", 1))]
    changed = set(case.calls(*regrouped))
    for event in case.events:
        optimizer = argument(event.node, "optimizer", 0)
        if ".lr_scheduler." not in case.name(event.node) or optimizer is None or not event.reached:
            continue
        made = _optimizers(case, optimizer)
        for later in case.having(Role.DISTRIBUTE):
            replaces = case.name(later.node).startswith(_IN_STEP) and later.order > event.order
            if replaces and later.node in changed and made & _optimizers(case, _first(later.node)):
                yield event


def unknown_calls(case: Case) -> Iterator[Event]:
    """Horovod's methods of an optimizer that is PyTorch's own, and PyTorch's argument of a method of Horovod's."""
    for event in case.methods("zero_grad", *_HOROVODS_OWN):
        made = _distributors(case, receiver(event.node))
        in_step = [case.name(call).startswith(_IN_STEP) or _is_adasum(case, call) for call in made]
        if method(event.node) == "zero_grad":
            is_unknown = any(in_step) and bool(event.node.args or event.node.keywords)
        else:
            is_unknown = bool(made) and not any(in_step)
        if is_unknown and event.reached:
            yield event
