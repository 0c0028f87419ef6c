"""Steps 5 and 6: the same state on every rank, and one rank that writes it down."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hvdkit.prepare.check.calls import argument, arguments, has_stars, method, receiver
from hvdkit.prepare.check.case import Case
from hvdkit.prepare.check.libraries import Role
from hvdkit.prepare.check.trace import Event
from hvdkit.prepare.check.training import once, over
from hvdkit.prepare.check.verdict import Verdict, done, missing, not_needed, undecided

_STATE = {
    "state_dict", "parameters", "named_parameters", "get_weights", "weights", "variables", "trainable_variables",
    "data",
}  # fmt: skip
_LOADS = {"load_state_dict", "load_weights", "set_weights"}
_OWN_FILES = ("io.BytesIO", "tempfile.mk", "tempfile.Named", "tempfile.Temporary", "tempfile.Spooled")
_SAVES = {"torch.save", "torch.jit.save", "tensorflow.saved_model.save", "keras.models.save_model"}
_BACKUP = "keras.callbacks.BackupAndRestore"
_PATHS = (
    "f", "filepath", "path", "directory", "backup_dir", "checkpoint_dir", "export_dir", "file_prefix", "save_path",
)  # fmt: skip
_STATES = ("every rank", "unknown", "some ranks")
_TF_CHECKPOINTS = ("tensorflow.train.Checkpoint",)


def broadcast(case: Case) -> Verdict:
    """Step 5."""
    sent = case.having(Role.BROADCAST, Role.ELASTIC, Role.FIT) + _sent_by_hand(case)
    callbacks = case.having(Role.BROADCAST_CALLBACK)
    if callbacks and not sent:
        return _by_callback(case, callbacks)
    wrapped = case.having(Role.DISTRIBUTE)
    if case.library == "ddp" and wrapped:
        return not_needed("DDP sends the model of rank 0 to all ranks when it wraps it", case.lines(wrapped))
    doubt = _why_unclear(case)
    if sent:
        lacking = (_only_optimizers(case, sent) if not doubt else []) or _loaded_on_root(case, sent)
        return missing(case.lines(lacking), "a part of the state is sent") if lacking else done(case.lines(sent))
    # It belongs at ``fit``, or where the optimizer is distributed, or at the first step.
    place = case.fits or wrapped or case.steps
    return undecided(doubt) if doubt else missing(case.lines(place[:1]))


def _only_optimizers(case: Case, sent: list[Event]) -> list[Event]:
    """The first broadcast, where all of them send an optimizer's state and none the model's."""
    for event in sent:
        made = case.calls(*_objects(event))
        optimizers = made and all(map(case.is_optimizer, made))
        by_name = case.name(event.node).endswith("broadcast_optimizer_state")
        by_value = case.name(event.node).endswith("broadcast_variables") and optimizers
        if case.role(event.node) != Role.BROADCAST or not (by_name or by_value):
            return []
    return sent[:1]


def _loaded_on_root(case: Case, sent: list[Event]) -> list[Event]:
    """Loads of an optimizer's state on one rank, where no broadcast sends it to the others."""
    if any(not case.name(one.node).endswith("broadcast_parameters") for one in sent):
        return []
    made = {load: case.calls(receiver(load.node)) for load in loads(case) if load.reached}
    of_optimizers = [load for load, calls in made.items() if calls and all(map(case.is_optimizer, calls))]
    return [load for load in of_optimizers if case.where(load) == "some ranks"]


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
        plain = all(guard.wraps for guard in event.guards)
        if plain and case.where(event) == "every rank" and event.order < case.steps[0].order:
            return f"every rank loads its state from a file in line {event.node.lineno}"
    return ""


def _sent_by_hand(case: Case) -> list[Event]:
    """The collectives that send a state, or what is loaded as one."""
    loaded = case.calls(*(one for load in loads(case) for one in load.node.args))
    found = []
    for event in case.having(Role.COLLECTIVE):
        around = [one for loop in event.loops for one in over(loop)]
        reached = case.reach(*arguments(event.node), *around, through=True)
        of_state = any(isinstance(node, ast.Attribute) and node.attr in _STATE for node in reached)
        sends = case.name(event.node).rpartition(".")[2].startswith(("broadcast", "bcast"))
        found += [event] if sends and (of_state or event.node in loaded) else []
    return found


# 5: the order -----------------------------------------------------------------------------------------------------


def early_broadcasts(case: Case) -> Iterator[Event]:
    """Broadcasts of what does not exist yet, or of what is replaced from a file before training begins."""
    if not case.steps:
        return
    for event in case.having(Role.BROADCAST):
        if event.reached and any(is_early(case, event) for is_early in _EARLY):
            yield event


def _objects(event: Event) -> list[ast.expr]:
    """What a broadcast sends: ``model`` of ``model.state_dict()``."""
    return [_owner(sent) for sent in event.node.args]


def _owner(sent: ast.expr) -> ast.expr:
    part = sent.func if isinstance(sent, ast.Call) else sent
    return _owner(part.value) if isinstance(part, ast.Attribute) and part.attr in _STATE else sent


def _before_it_exists(case: Case, event: Event) -> bool:
    """``broadcast(optimizer)`` above ``optimizer = ...``, in one function."""
    names = [one for one in _objects(event) if isinstance(one, ast.Name) and not case.reaching(one)]
    return any(case.lookup(one.id, case.scope(one)) is case.scope(one) for one in names)


def _before_it_has_slots(case: Case, event: Event) -> bool:
    """A Keras optimizer has nothing to send before its first step, unless it is built."""
    if not case.name(event.node).endswith("broadcast_variables"):
        return False
    applied = [one for one in case.steps if method(one.node) in ("apply_gradients", "apply", "minimize")]
    if not applied or applied[0].order < event.order or set(event.loops) & set(applied[0].loops):
        return False
    builds = [one for one in case.methods("build") if one.order < event.order]
    if any(map(case.is_optimizer, case.calls(*(receiver(one.node) for one in builds)))):
        return False
    sent = _objects(event)
    wrapped = [call.args[0] for one in sent for call in case.having_made(one, Role.DISTRIBUTE) if call.args]
    return any(case.is_keras_optimizer(call) for call in case.calls(*sent, *wrapped))


def _before_loading(case: Case, event: Event) -> bool:
    sent = _identities(case, _objects(event))
    for load in loads(case):
        is_between = event.order < load.order < case.steps[0].order
        replaced = sent & _identities(case, _loaded(case, load))
        if not is_between or not load.reached or not replaced:
            continue
        others = case.having(Role.BROADCAST, Role.COLLECTIVE)
        again = [one for one in others if replaced & _identities(case, _objects(one))] + _sent_by_hand(case)
        is_sent = any(load.order < one.order < case.steps[0].order for one in again)
        given = {case.role(call) for call in case.calls(*load.node.args)}
        if not is_sent and not given & {Role.BROADCAST, Role.COLLECTIVE}:
            return True
    return False


_EARLY = (_before_it_exists, _before_it_has_slots, _before_loading)


def _identities(case: Case, objects: list[ast.expr]) -> set[str | ast.Call]:
    """What tells whether two expressions are one object: the same text, or made by the same call."""
    texts = {ast.unparse(one) for one in objects if isinstance(one, (ast.Name, ast.Attribute))}
    return texts | {call for call in case.calls(*objects) if not case.role(call)}


def _loaded(case: Case, load: Event) -> list[ast.expr]:
    """The objects whose state a load replaces; those in a ``tf.train.Checkpoint``."""
    made = case.made_by(_TF_CHECKPOINTS, receiver(load.node))
    return [receiver(load.node)] + [one.value for call in made for one in call.keywords]


def loads(case: Case) -> list[Event]:
    """The events that replace a state by one from a file."""
    found = [event for event in case.methods(*_LOADS) if not case.name(event.node)]
    read = case.methods("restore", "read")
    return found + [event for event in read if case.made_by(_TF_CHECKPOINTS, receiver(event.node))]


# 6 ------------------------------------------------------------------------------------------------------------------


def checkpoint(case: Case) -> Verdict:
    """Step 6."""
    kept = case.having(Role.CHECKPOINTS, Role.CHECKPOINT_CALLBACK)
    if case.guards_fit:
        kept += [event for event in case.events if _is_callback(case, event.node)]
    kept += [event for event in case.having(Role.FIT) if argument(event.node, "checkpoint_dir") is not None]
    states: dict[str, list[Event]] = {state: [] for state in _STATES}
    for event in writes(case):
        states[_state(case, event)].append(event)
    if everywhere := states["every rank"]:
        return missing(case.lines(everywhere), "a checkpoint is written by every rank")
    if lines := case.lines([*kept, *states["some ranks"]]):
        return done(lines)
    if unclear := case.lines(states["unknown"]):
        return undecided(f"whether line {unclear[0]} runs on one rank or on all, the text does not say")
    doubt = case.elsewhere()
    return undecided(doubt) if doubt else not_needed("no checkpoint is written")


def _state(case: Case, event: Event) -> str:
    """Where a write happens, over all the ways to it: on every rank as soon as one way is open to all."""
    if case.has_rank(*_paths(case, event.node)):
        return "some ranks"
    states = {case.where(one) for one in case.events if one.node is event.node}
    statement = case.statement(event.node)
    if _is_callback(case, event.node) and isinstance(statement, ast.Assign) and statement.value is event.node:
        names = [one for one in case.nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)]
        uses = [one for one in names if any(binding.node is statement for binding in case.reaching(one))]
        states = {state for name in uses for state in _use_states(case, name)} or {"unknown"}
    return next(state for state in _STATES if state in states)


def _use_states(case: Case, name: ast.Name) -> set[str]:
    """Where a name is used: at the calls around it, or under the conditions around its statement."""
    around = list(case.ancestors(name))
    if case.has_rank(*(one.test for one in around if isinstance(one, (ast.If, ast.IfExp)))):
        return {"some ranks"}
    return {case.where(event) for event in case.events if event.node in around} or {"every rank"}


def _paths(case: Case, call: ast.Call) -> list[ast.expr | None]:
    """The arguments that say where to write, those of the checkpoint object included."""
    given = [argument(call, name) for name in _PATHS]
    given.append(argument(call, "", 1 if case.name(call) else 0) or argument(call, "", 0))
    makers = [] if case.name(call) else case.calls(receiver(call))
    return given + [one for made in makers if ".train." in case.name(made) for one in arguments(made)]


def writes(case: Case) -> list[Event]:
    """The events that write a model's state to a file, each call once."""
    return once(event for event in case.events if _writes(case, event.node) and not case.is_locked(event))


def _writes(case: Case, call: ast.Call) -> bool:
    name, called = case.name(call), method(call)
    if name in _SAVES:
        target = argument(call, "f", 1) or argument(call, "filepath", 1)
        return not any(case.name(one).startswith(_OWN_FILES) for one in case.calls(target))
    if _is_callback(case, call):
        return not case.guards_fit
    if name or not called or case.role(call):
        return False
    made = [case.name(one) for one in case.calls(receiver(call))]
    if called in ("save", "write") and any(re.search(r"\btrain\.(Checkpoint(Manager)?|Saver)$", one) for one in made):
        return True
    keras = called == "save_weights" or (called in ("save", "export") and case.holds_keras_model(receiver(call)))
    return keras and not any(one.startswith("torch.") for one in made)


def _is_callback(case: Case, call: ast.Call) -> bool:
    return case.name(call) in ("keras.callbacks.ModelCheckpoint", _BACKUP)


def lone_backups(case: Case) -> Iterator[Event]:
    """``BackupAndRestore`` on some ranks only: the others do not go on where it does."""
    for event in writes(case):
        own = case.has_rank(*_paths(case, event.node))
        if case.name(event.node) == _BACKUP and not own and _state(case, event) == "some ranks":
            yield event
