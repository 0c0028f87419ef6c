"""Steps 5 and 6: the same state on every rank, and one rank that writes it down."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hvdkit.prepare.check.facts import Facts, argument, has_stars, method
from hvdkit.prepare.check.libraries import (
    BROADCAST,
    BROADCAST_CALLBACK,
    CHECKPOINT_CALLBACK,
    CHECKPOINTS,
    COLLECTIVE,
    DISTRIBUTE,
    ELASTIC,
    FIT,
)
from hvdkit.prepare.check.trace import Event
from hvdkit.prepare.check.training import Training
from hvdkit.prepare.check.verdict import Verdict, done, missing, not_needed, undecided

_STATE = {
    "state_dict",
    "parameters",
    "named_parameters",
    "get_weights",
    "weights",
    "variables",
    "trainable_variables",
    "data",
}
_LOADS = {"load_state_dict", "load_weights", "set_weights"}
_OWN_FILES = ("io.BytesIO", "tempfile.mk", "tempfile.Named", "tempfile.Temporary", "tempfile.Spooled")
_TF_CHECKPOINTS = ("tensorflow.train.Checkpoint",)


def broadcast(facts: Facts, training: Training) -> Verdict:
    """Step 5."""
    sent = [
        *facts.having(BROADCAST, ELASTIC, FIT),
        *(one for one in facts.having(COLLECTIVE) if _sends_state(facts, one)),
    ]
    callbacks = facts.having(BROADCAST_CALLBACK)
    if callbacks and not sent:
        return _by_callback(facts, training, callbacks)
    wrapped = facts.having(DISTRIBUTE)
    if facts.library == "ddp" and wrapped:
        return not_needed("DDP sends the model of rank 0 to all ranks when it wraps it", facts.lines(wrapped))
    if sent:
        lacking = _only_optimizers(facts, training, sent) or _loaded_on_root(facts, training, sent)
        return missing(facts.lines(lacking), "a part of the state is sent") if lacking else done(facts.lines(sent))
    doubt = _why_unclear(facts, training)
    if doubt:
        return undecided(doubt)
    return missing(facts.lines(_without_broadcast(facts, training)))


def _only_optimizers(facts: Facts, training: Training, sent: list[Event]) -> list[Event]:
    """The broadcasts, where all of them send an optimizer's state and none the model's."""
    if any(facts.role(event.node) != BROADCAST for event in sent) or _why_unclear(facts, training):
        return []
    for event in sent:
        made = [call for one in _objects(event) for call in facts.flow.calls(one)]
        optimizers = bool(made) and all(
            training.makes_optimizer(call) or facts.role(call) == DISTRIBUTE for call in made
        )
        by_name = facts.name(event.node).endswith("broadcast_optimizer_state")
        if not by_name and not (optimizers and facts.name(event.node).endswith("broadcast_variables")):
            return []
    return sent[:1]


def _loaded_on_root(facts: Facts, training: Training, sent: list[Event]) -> list[Event]:
    """Loads of an optimizer's state on one rank, where no broadcast sends it to the others."""
    whole = [one for one in sent if not facts.name(one.node).endswith("broadcast_parameters")]
    if whole or any(_sends_state(facts, one) for one in facts.having(COLLECTIVE)):
        return []
    found = []
    for load in loads(facts):
        receiver = load.node.func.value if isinstance(load.node.func, ast.Attribute) else load.node
        made = facts.flow.calls(receiver)
        if made and all(training.is_torch_optimizer(call) or facts.role(call) == DISTRIBUTE for call in made):
            found += [load] if load.reached and facts.where(load) == "some ranks" else []
    return found


def _by_callback(facts: Facts, training: Training, callbacks: list[Event]) -> Verdict:
    for event in training.fits:
        given = argument(event.node, "callbacks")
        if given is None and not has_stars(event.node):
            return missing([event.node.lineno], f"the callback of line {callbacks[0].node.lineno} is not given to fit")
        break
    return done(facts.lines(callbacks))


def _why_unclear(facts: Facts, training: Training) -> str:
    doubt = facts.others[0] if facts.others else training.handed_away()
    if doubt:
        return f"{doubt} may do it, which is not read here"
    if not training.steps:
        return "nothing is trained in this text"
    if facts.library == "ddp":
        return "DDP does it when it wraps a model, and none is wrapped in this text"
    for event in facts.methods(*_LOADS):
        plain = not any(not guard.wraps for guard in event.guards)
        if plain and facts.where(event) == "every rank" and event.order < training.steps[0].order:
            return f"every rank loads its state from a file in line {event.node.lineno}"
    return ""


def _without_broadcast(facts: Facts, training: Training) -> list[Event]:
    """Where the broadcast belongs: at ``fit``, or where the optimizer is distributed, or at the first step."""
    return training.fits[:1] or facts.having(DISTRIBUTE)[:1] or training.steps[:1]


def _sends_state(facts: Facts, event: Event) -> bool:
    if not facts.name(event.node).rpartition(".")[2].startswith(("broadcast", "bcast")):
        return False
    given = [*event.node.args, *(keyword.value for keyword in event.node.keywords)]
    around = [one.iter for one in event.loops if isinstance(one, (ast.For, ast.comprehension))]
    reached = [node for one in [*given, *around] for node in facts.flow.reach(one, through=True)]
    loaded = [call for load in loads(facts) for one in load.node.args for call in facts.flow.calls(one)]
    return event.node in loaded or any(isinstance(node, ast.Attribute) and node.attr in _STATE for node in reached)


# 5: the order -----------------------------------------------------------------------------------------------------


def early_broadcasts(facts: Facts, training: Training) -> Iterator[Event]:
    """Broadcasts of what does not exist yet, or of what is replaced from a file before training begins."""
    if not training.steps:
        return
    seen: set[ast.Call] = set()
    for event in facts.having(BROADCAST):
        if not event.reached or event.node in seen:
            continue
        if (
            _before_it_exists(facts, event)
            or _before_it_has_slots(facts, training, event)
            or _before_loading(facts, training, event)
        ):
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


def _before_it_exists(facts: Facts, event: Event) -> bool:
    """``broadcast(optimizer)`` above ``optimizer = ...``, in one function."""
    for one in _objects(event):
        if not isinstance(one, ast.Name):
            continue
        scope = facts.program.scope(one)
        bindings = scope.bindings.get(one.id, [])
        if bindings and facts.program.lookup(one.id, scope) is scope and not facts.program.reaching(one):
            return True
    return False


def _before_it_has_slots(facts: Facts, training: Training, event: Event) -> bool:
    """A Keras optimizer has nothing to send before its first step, unless it is built."""
    if not facts.name(event.node).endswith("broadcast_variables"):
        return False
    applied = [one for one in training.steps if method(one.node) in ("apply_gradients", "apply", "minimize")]
    if not applied or applied[0].order < event.order or set(event.loops) & set(applied[0].loops):
        return False
    for one in _objects(event):
        sources = facts.flow.calls(one)
        wrapped = [call.args[0] for call in sources if facts.role(call) == DISTRIBUTE and call.args]
        sources += [inner for given in wrapped for inner in facts.flow.calls(given)]
        built = any(
            build.order < event.order for build in facts.methods("build") if _is_of_optimizer(facts, training, build)
        )
        if any(training.is_keras_optimizer(call) for call in sources) and not built:
            return True
    return False


def _is_of_optimizer(facts: Facts, training: Training, event: Event) -> bool:
    makers = facts.flow.calls(event.node.func.value) if isinstance(event.node.func, ast.Attribute) else []
    return any(training.is_keras_optimizer(call) or facts.role(call) == DISTRIBUTE for call in makers)


def _before_loading(facts: Facts, training: Training, event: Event) -> bool:
    sent = _identities(facts, _objects(event))
    for load in loads(facts):
        is_between = event.order < load.order < training.steps[0].order
        if not is_between or not load.reached or not sent & _identities(facts, _loaded(facts, load)):
            continue
        again = [
            one
            for one in facts.having(BROADCAST, COLLECTIVE)
            if load.order < one.order < training.steps[0].order
            and (facts.role(one.node) == BROADCAST or _sends_state(facts, one))
        ]
        given = [call for one in load.node.args for call in facts.flow.calls(one)]
        if not again and not any(facts.role(call) in (BROADCAST, COLLECTIVE) for call in given):
            return True
    return False


def _identities(facts: Facts, objects: list[ast.expr]) -> set[str | ast.Call]:
    """What tells whether two expressions are one object: the same text, or made by the same call."""
    texts = {ast.unparse(one) for one in objects if isinstance(one, (ast.Name, ast.Attribute))}
    return texts | {call for one in objects for call in facts.flow.calls(one) if not facts.role(call)}


def _loaded(facts: Facts, load: Event) -> list[ast.expr]:
    """The objects whose state a load replaces; those in a ``tf.train.Checkpoint``."""
    receiver = load.node.func.value if isinstance(load.node.func, ast.Attribute) else load.node
    made = facts.made_by(receiver, _TF_CHECKPOINTS)
    return [receiver] + [one.value for call in made for one in call.keywords]


def loads(facts: Facts) -> list[Event]:
    """The events that replace a state by one from a file."""
    found = [event for event in facts.methods(*_LOADS) if not facts.name(event.node)]
    for event in facts.methods("restore", "read"):
        if isinstance(event.node.func, ast.Attribute) and facts.made_by(event.node.func.value, _TF_CHECKPOINTS):
            found.append(event)
    return found


# 6 ------------------------------------------------------------------------------------------------------------------


def checkpoint(facts: Facts, training: Training) -> Verdict:
    """Step 6."""
    kept = facts.having(CHECKPOINTS, CHECKPOINT_CALLBACK)
    if any(argument(event.node, "checkpoint_dir") is not None for event in facts.having(FIT)):
        kept = [*kept, *facts.having(FIT)]
    states = {event.node: _state(facts, event) for event in writes(facts, training)}
    everywhere = [node.lineno for node, state in states.items() if state == "every rank"]
    if everywhere:
        return missing(everywhere, "a checkpoint is written by every rank")
    unclear = [node.lineno for node, state in states.items() if state == "unknown"]
    lines = [*facts.lines(kept), *(node.lineno for node, state in states.items() if state == "some ranks")]
    if unclear and not lines:
        return undecided(f"whether line {unclear[0]} runs on one rank or on all, the text does not say")
    if lines:
        return done(lines)
    hidden = training.handed_away() or next(iter(facts.others), None)
    return (
        undecided(f"{hidden} may do it, which is not read here") if hidden else not_needed("no checkpoint is written")
    )


def _state(facts: Facts, event: Event) -> str:
    """Where a write happens, over all the ways to it: on every rank as soon as one way is open to all."""
    if any(facts.has_rank(path) for path in _paths(facts, event.node)):
        return "some ranks"
    states = {facts.where(one) for one in facts.events if one.node is event.node}
    statement = facts.program.statement(event.node)
    if _is_callback(facts, event.node) and isinstance(statement, ast.Assign) and statement.value is event.node:
        states = {state for name in facts.uses(statement.targets[0]) for state in _use_states(facts, name)} or {
            "unknown"
        }
    return next(state for state in ("every rank", "unknown", "some ranks") if state in states)


def _use_states(facts: Facts, name: ast.Name) -> set[str]:
    """Where a name is used: at the calls around it, or under the conditions around its statement."""
    around = {one for one in facts.program.ancestors(name) if isinstance(one, ast.Call)}
    states = {facts.where(event) for event in facts.events if event.node in around}
    tests = [one.test for one in facts.program.ancestors(name) if isinstance(one, (ast.If, ast.IfExp))]
    return {"some ranks"} if any(facts.has_rank(test) for test in tests) else states or {"every rank"}


def _paths(facts: Facts, call: ast.Call) -> list[ast.expr]:
    """The arguments that say where to write, those of the checkpoint object included."""
    named = ("f", "filepath", "path", "directory", "checkpoint_dir", "export_dir", "file_prefix", "save_path")
    given = [argument(call, name) for name in named]
    given.append(argument(call, "", 1 if facts.name(call) else 0) or argument(call, "", 0))
    makers = facts.flow.calls(call.func.value) if isinstance(call.func, ast.Attribute) and not facts.name(call) else []
    given += [one for made in makers if ".train." in facts.name(made) for one in made.args]
    given += [one.value for made in makers if ".train." in facts.name(made) for one in made.keywords]
    return [one for one in given if one is not None]


def writes(facts: Facts, training: Training) -> list[Event]:
    """The events that write a model's state to a file, each call once."""
    found: dict[ast.Call, Event] = {}
    for event in facts.events:
        if _writes(facts, training, event.node) and not facts.is_locked(event):
            found.setdefault(event.node, event)
    return list(found.values())


def _writes(facts: Facts, training: Training, call: ast.Call) -> bool:
    name, called = facts.name(call), method(call)
    if name in ("torch.save", "torch.jit.save", "tensorflow.saved_model.save") or name.endswith(
        "keras.models.save_model"
    ):
        target = argument(call, "f", 1) or argument(call, "filepath", 1)
        return target is None or not any(facts.name(one).startswith(_OWN_FILES) for one in facts.flow.calls(target))
    if _is_callback(facts, call):
        return True
    if name or not isinstance(call.func, ast.Attribute) or facts.role(call):
        return False
    made = [facts.name(one) for one in facts.flow.calls(call.func.value)]
    if called in ("save", "write") and any(
        one.endswith(("train.Checkpoint", "train.CheckpointManager", "train.Saver")) for one in made
    ):
        return True
    keras = called == "save_weights" or (
        called in ("save", "save_weights", "export") and training.holds_keras_model(call.func.value)
    )
    return keras and not any(one.startswith("torch.") for one in made)


def _is_callback(facts: Facts, call: ast.Call) -> bool:
    return facts.name(call).endswith(("callbacks.ModelCheckpoint", "callbacks.BackupAndRestore"))
