"""Steps 5 and 6: the same state on every rank, and one rank that writes it down."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hvdkit.prepare.check.call_arguments import arguments
from hvdkit.prepare.check.case import Case
from hvdkit.prepare.check.facts import argument, has_stars, method, receiver
from hvdkit.prepare.check.libraries import Role
from hvdkit.prepare.check.trace import Event
from hvdkit.prepare.check.verdict import Verdict, done, missing, not_needed, undecided

_STATE = {
    "state_dict", "parameters", "named_parameters", "get_weights", "weights", "variables", "trainable_variables",
    "data",
}  # fmt: skip
_LOADS = {"load_state_dict", "load_weights", "set_weights"}
_OWN_FILES = ("io.BytesIO", "tempfile.mk", "tempfile.Named", "tempfile.Temporary", "tempfile.Spooled")
_SAVES = {"torch.save", "torch.jit.save", "tensorflow.saved_model.save", "keras.models.save_model"}
_BACKUP = "keras.callbacks.BackupAndRestore"
_TF_CHECKPOINTS = ("tensorflow.train.Checkpoint",)


def broadcast(case: Case) -> Verdict:
    """Step 5."""
    sent = [
        *case.having(Role.BROADCAST, Role.ELASTIC, Role.FIT),
        *(one for one in case.having(Role.COLLECTIVE) if _sends_state(case, one)),
    ]
    callbacks = case.having(Role.BROADCAST_CALLBACK)
    if callbacks and not sent:
        return _by_callback(case, callbacks)
    wrapped = case.having(Role.DISTRIBUTE)
    if case.library == "ddp" and wrapped:
        return not_needed("DDP sends the model of rank 0 to all ranks when it wraps it", case.lines(wrapped))
    if sent:
        lacking = _only_optimizers(case, sent) or _loaded_on_root(case, sent)
        return missing(case.lines(lacking), "a part of the state is sent") if lacking else done(case.lines(sent))
    doubt = _why_unclear(case)
    # It belongs at ``fit``, or where the optimizer is distributed, or at the first step.
    place = case.fits[:1] or wrapped[:1] or case.steps[:1]
    return undecided(doubt) if doubt else missing(case.lines(place))


def _only_optimizers(case: Case, sent: list[Event]) -> list[Event]:
    """The broadcasts, where all of them send an optimizer's state and none the model's."""
    if any(case.role(event.node) != Role.BROADCAST for event in sent) or _why_unclear(case):
        return []
    for event in sent:
        made = [call for one in _objects(event) for call in case.calls(one)]
        optimizers = bool(made) and all(
            case.makes_optimizer(call) or case.role(call) == Role.DISTRIBUTE for call in made
        )
        by_name = case.name(event.node).endswith("broadcast_optimizer_state")
        if not by_name and not (optimizers and case.name(event.node).endswith("broadcast_variables")):
            return []
    return sent[:1]


def _loaded_on_root(case: Case, sent: list[Event]) -> list[Event]:
    """Loads of an optimizer's state on one rank, where no broadcast sends it to the others."""
    whole = [one for one in sent if not case.name(one.node).endswith("broadcast_parameters")]
    if whole or any(_sends_state(case, one) for one in case.having(Role.COLLECTIVE)):
        return []
    found = []
    for load in loads(case):
        made = case.calls(receiver(load.node))
        if made and all(case.is_torch_optimizer(call) or case.role(call) == Role.DISTRIBUTE for call in made):
            found += [load] if load.reached and case.where(load) == "some ranks" else []
    return found


def _by_callback(case: Case, callbacks: list[Event]) -> Verdict:
    for call in [event.node for event in case.fits[:1]]:
        if argument(call, "callbacks") is None and not has_stars(call):
            return missing([call.lineno], f"the callback of line {callbacks[0].node.lineno} is not given to fit")
    return done(case.lines(callbacks))


def _why_unclear(case: Case) -> str:
    if doubt := case.elsewhere():
        return doubt
    if not case.steps:
        return "nothing is trained in this text"
    if case.library == "ddp":
        return "DDP does it when it wraps a model, and none is wrapped in this text"
    for event in case.methods(*_LOADS):
        plain = not any(not guard.wraps for guard in event.guards)
        if plain and case.where(event) == "every rank" and event.order < case.steps[0].order:
            return f"every rank loads its state from a file in line {event.node.lineno}"
    return ""


def _sends_state(case: Case, event: Event) -> bool:
    if not case.name(event.node).rpartition(".")[2].startswith(("broadcast", "bcast")):
        return False
    given = arguments(event.node)
    around = [one.iter for one in event.loops if isinstance(one, (ast.For, ast.comprehension))]
    reached = [node for one in [*given, *around] for node in case.reach(one, through=True)]
    loaded = [call for load in loads(case) for one in load.node.args for call in case.calls(one)]
    return event.node in loaded or any(isinstance(node, ast.Attribute) and node.attr in _STATE for node in reached)


# 5: the order -----------------------------------------------------------------------------------------------------


def early_broadcasts(case: Case) -> Iterator[Event]:
    """Broadcasts of what does not exist yet, or of what is replaced from a file before training begins."""
    if not case.steps:
        return
    seen: set[ast.Call] = set()
    for event in case.having(Role.BROADCAST):
        if not event.reached or event.node in seen:
            continue
        if _before_it_exists(case, event) or _before_it_has_slots(case, event) or _before_loading(case, event):
            seen.add(event.node)
            yield event


def _objects(event: Event) -> list[ast.expr]:
    """What a broadcast sends: ``model`` of ``model.state_dict()``."""
    found = []
    for sent in event.node.args:
        while isinstance(sent, (ast.Call, ast.Attribute)) and _is_part(sent):
            sent = sent.func if isinstance(sent, ast.Call) else sent.value
        found.append(sent)
    return found


def _is_part(node: ast.Call | ast.Attribute) -> bool:
    part = node.func if isinstance(node, ast.Call) else node
    return isinstance(part, ast.Attribute) and part.attr in _STATE


def _before_it_exists(case: Case, event: Event) -> bool:
    """``broadcast(optimizer)`` above ``optimizer = ...``, in one function."""
    for one in _objects(event):
        if not isinstance(one, ast.Name):
            continue
        scope = case.scope(one)
        bindings = scope.bindings.get(one.id, [])
        if bindings and case.lookup(one.id, scope) is scope and not case.reaching(one):
            return True
    return False


def _before_it_has_slots(case: Case, event: Event) -> bool:
    """A Keras optimizer has nothing to send before its first step, unless it is built."""
    if not case.name(event.node).endswith("broadcast_variables"):
        return False
    applied = [one for one in case.steps if method(one.node) in ("apply_gradients", "apply", "minimize")]
    if not applied or applied[0].order < event.order or set(event.loops) & set(applied[0].loops):
        return False
    for one in _objects(event):
        sources = case.calls(one)
        wrapped = [call.args[0] for call in case.having_made(one, Role.DISTRIBUTE) if call.args]
        sources += [inner for given in wrapped for inner in case.calls(given)]
        built = any(build.order < event.order for build in case.methods("build") if _is_of_optimizer(case, build))
        if any(case.is_keras_optimizer(call) for call in sources) and not built:
            return True
    return False


def _is_of_optimizer(case: Case, event: Event) -> bool:
    makers = case.calls(receiver(event.node))
    return any(case.is_keras_optimizer(call) or case.role(call) == Role.DISTRIBUTE for call in makers)


def _before_loading(case: Case, event: Event) -> bool:
    sent = _identities(case, _objects(event))
    for load in loads(case):
        is_between = event.order < load.order < case.steps[0].order
        replaced = sent & _identities(case, _loaded(case, load))
        if not is_between or not load.reached or not replaced:
            continue
        after = [
            one for one in case.having(Role.BROADCAST, Role.COLLECTIVE) if load.order < one.order < case.steps[0].order
        ]
        again = [one for one in after if case.role(one.node) == Role.COLLECTIVE and _sends_state(case, one)]
        again += [one for one in after if replaced & _identities(case, _objects(one))]
        given = [case.having_made(one, Role.BROADCAST, Role.COLLECTIVE) for one in load.node.args]
        if not again and not any(given):
            return True
    return False


def _identities(case: Case, objects: list[ast.expr]) -> set[str | ast.Call]:
    """What tells whether two expressions are one object: the same text, or made by the same call."""
    texts = {ast.unparse(one) for one in objects if isinstance(one, (ast.Name, ast.Attribute))}
    return texts | {call for one in objects for call in case.calls(one) if not case.role(call)}


def _loaded(case: Case, load: Event) -> list[ast.expr]:
    """The objects whose state a load replaces; those in a ``tf.train.Checkpoint``."""
    made = case.made_by(receiver(load.node), _TF_CHECKPOINTS)
    return [receiver(load.node)] + [one.value for call in made for one in call.keywords]


def loads(case: Case) -> list[Event]:
    """The events that replace a state by one from a file."""
    found = [event for event in case.methods(*_LOADS) if not case.name(event.node)]
    read = case.methods("restore", "read")
    return found + [event for event in read if case.made_by(receiver(event.node), _TF_CHECKPOINTS)]


# 6 ------------------------------------------------------------------------------------------------------------------


def checkpoint(case: Case) -> Verdict:
    """Step 6."""
    kept = case.having(Role.CHECKPOINTS, Role.CHECKPOINT_CALLBACK)
    if case.guards_fit:
        kept += [event for event in case.events if _is_callback(case, event.node)]
    if any(argument(event.node, "checkpoint_dir") is not None for event in case.having(Role.FIT)):
        kept = [*kept, *case.having(Role.FIT)]
    states = {event.node: _state(case, event) for event in writes(case)}
    everywhere = [node.lineno for node, state in states.items() if state == "every rank"]
    if everywhere:
        return missing(everywhere, "a checkpoint is written by every rank")
    unclear = [node.lineno for node, state in states.items() if state == "unknown"]
    lines = [*case.lines(kept), *(node.lineno for node, state in states.items() if state == "some ranks")]
    if unclear and not lines:
        return undecided(f"whether line {unclear[0]} runs on one rank or on all, the text does not say")
    if lines:
        return done(lines)
    doubt = case.elsewhere()
    return undecided(doubt) if doubt else not_needed("no checkpoint is written")


def _state(case: Case, event: Event) -> str:
    """Where a write happens, over all the ways to it: on every rank as soon as one way is open to all."""
    if any(case.has_rank(path) for path in _paths(case, event.node)):
        return "some ranks"
    states = {case.where(one) for one in case.events if one.node is event.node}
    statement = case.statement(event.node)
    if _is_callback(case, event.node) and isinstance(statement, ast.Assign) and statement.value is event.node:
        states = {state for name in case.uses(statement.targets[0]) for state in _use_states(case, name)} or {"unknown"}
    return next(state for state in ("every rank", "unknown", "some ranks") if state in states)


def _use_states(case: Case, name: ast.Name) -> set[str]:
    """Where a name is used: at the calls around it, or under the conditions around its statement."""
    around = {one for one in case.ancestors(name) if isinstance(one, ast.Call)}
    states = {case.where(event) for event in case.events if event.node in around}
    tests = [one.test for one in case.ancestors(name) if isinstance(one, (ast.If, ast.IfExp))]
    return {"some ranks"} if any(case.has_rank(test) for test in tests) else states or {"every rank"}


def _paths(case: Case, call: ast.Call) -> list[ast.expr]:
    """The arguments that say where to write, those of the checkpoint object included."""
    named = (
        "f",
        "filepath",
        "path",
        "directory",
        "backup_dir",
        "checkpoint_dir",
        "export_dir",
        "file_prefix",
        "save_path",
    )
    given = [argument(call, name) for name in named]
    given.append(argument(call, "", 1 if case.name(call) else 0) or argument(call, "", 0))
    makers = [] if case.name(call) else case.calls(receiver(call))
    given += [one for made in makers if ".train." in case.name(made) for one in arguments(made)]
    return [one for one in given if one is not None]


def writes(case: Case) -> list[Event]:
    """The events that write a model's state to a file, each call once."""
    found: dict[ast.Call, Event] = {}
    for event in case.events:
        if _writes(case, event.node) and not case.is_locked(event):
            found.setdefault(event.node, event)
    return list(found.values())


def _writes(case: Case, call: ast.Call) -> bool:
    name, called = case.name(call), method(call)
    if name in _SAVES:
        target = argument(call, "f", 1) or argument(call, "filepath", 1)
        return target is None or not any(case.name(one).startswith(_OWN_FILES) for one in case.calls(target))
    if _is_callback(case, call):
        return not case.guards_fit
    if name or not isinstance(call.func, ast.Attribute) or case.role(call):
        return False
    made = [case.name(one) for one in case.calls(call.func.value)]
    if called in ("save", "write") and any(re.search(r"\btrain\.(Checkpoint(Manager)?|Saver)$", one) for one in made):
        return True
    keras = called == "save_weights" or (called in ("save", "export") and case.holds_keras_model(call.func.value))
    return keras and not any(one.startswith("torch.") for one in made)


def _is_callback(case: Case, call: ast.Call) -> bool:
    return case.name(call) in ("keras.callbacks.ModelCheckpoint", _BACKUP)


def lone_backups(case: Case) -> Iterator[Event]:
    """``BackupAndRestore`` on some ranks only: the others do not go on where it does."""
    for event in writes(case):
        own = any(case.has_rank(path) for path in _paths(case, event.node))
        if case.name(event.node) == _BACKUP and not own and _state(case, event) == "some ranks":
            yield event
