"""The table of the eight steps, and what is said of each for one script: done, missing, not needed or undecided."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from hvdkit.prepare.check.case import once, over
from hvdkit.prepare.check.libraries import LOADERS, NUMBERS, SAMPLERS, Role
from hvdkit.prepare.check.ranks import KERAS_WRITERS, SHARDED, STATES, UNCLEAR, WHOLE, DataCase
from hvdkit.prepare.check.source import (
    argument,
    arguments,
    entries,
    has_stars,
    is_constant,
    makes_object,
    method,
    receiver,
)
from hvdkit.prepare.check.trace import Event

DONE = "done"
MISSING = "missing"
NOT_NEEDED = "not needed"
UNDECIDED = "undecided"

_CHOOSES = ("cuda.set_device", "xpu.set_device", "accelerator.set_device_index")
_TAKES_DEVICE = ("set_visible_devices", "torch.device", "cuda.device", "tensorflow.device")
_NEUTRAL_CALLS = ("add_argument", "autocast", "GradScaler", "init_process_group", "manual_seed")
_MULTIPLIES = (
    "StepLR", "MultiStepLR", "ExponentialLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "ReduceLROnPlateau",
    "PolynomialLR", "LinearLR", "ConstantLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler",
)  # fmt: skip
"""Schedules that multiply the optimizer's own rate, so that an unscaled one stays unscaled."""
_STATE = {
    "state_dict", "parameters", "named_parameters", "get_weights", "weights", "variables", "trainable_variables",
    "data",
}  # fmt: skip
_LOADS = {"load_state_dict", "load_weights", "set_weights"}
TF_CHECKPOINTS = ("tensorflow.train.Checkpoint",)


@dataclass(frozen=True)
class Verdict:
    """Whether a script does a step.

    Attributes:
        status: DONE, MISSING, NOT_NEEDED or UNDECIDED.
        note: why it is not needed or undecided, or what else a reader should know; "" for nothing.
        lines: where it is done.
        blamed: the lines where something is missing for certain; empty where that is no finding.
    """

    status: str
    note: str = ""
    lines: tuple[int, ...] = ()
    blamed: tuple[int, ...] = ()


def _done(lines: Iterable[int], note: str = "") -> Verdict:
    return Verdict(DONE, note, tuple(sorted(set(lines))))


def _missing(blamed: Iterable[int], note: str = "") -> Verdict:
    return Verdict(MISSING, note, (), tuple(sorted(set(blamed))))


def _undecided(note: str) -> Verdict:
    return Verdict(UNDECIDED, note)


def _may_do_it(who: str) -> Verdict:
    return _undecided(f"{who} may do it, which is not read here")


# 1: initialise --------------------------------------------------------------------------------------------------------


def _init(case: DataCase) -> Verdict:
    having = case.having(Role.INIT, Role.FIT)
    events = [event for event in having if not case.name(event.node).startswith("mpi4py")]  # its import does it
    reached = [event for event in events if event.reached]
    if reached:
        return _done(case.lines(reached))
    if events:
        return _undecided(f"line {events[0].node.lineno} does it, in a function that nothing in this text calls")
    if doubts := [*case.others, *case.strangers()]:
        return _may_do_it(doubts[0])
    uses = case.having(*NUMBERS, Role.DISTRIBUTE, Role.BROADCAST, Role.REDUCE)
    return _missing(case.lines(uses)[:1]) if uses else _undecided("the library is imported and nothing of it is used")


# 2: pin one GPU per process -------------------------------------------------------------------------------------------


def _pin(case: DataCase) -> Verdict:
    """Whether a GPU is chosen by a rank, where one is used."""
    lines = [*case.lines(case.having(Role.PIN, Role.FIT)), *(node.lineno for node in device_choices(case))]
    if lines:
        return _done(lines)
    moved = [event for event in case.methods("cuda") if not case.name(event.node)]
    named = [node.lineno for node in case.nodes if isinstance(node, ast.Constant) and _names_gpu(case, node)]
    used = sorted([*case.lines([*moved, *case.named(*_CHOOSES)]), *named])
    opaque = [event.node for event in case.events if case.is_opaque(event.node) and not makes_object(event.node)]
    if opaque:
        return _may_do_it(ast.unparse(opaque[0].func))
    if used:
        return _missing(used[:1])
    if {name.split(".")[0] for name in case.used} & {"tensorflow", "keras"}:
        return _undecided("TensorFlow takes every GPU that it sees; the text does not say whether there is one")
    return Verdict(NOT_NEEDED, "no GPU is used")


def device_choices(case: DataCase) -> Iterator[ast.expr]:
    """The expressions that choose a GPU by a rank, or by something that the text does not fix."""
    for call in (event.node for event in case.events):
        if case.name(call).endswith(_CHOOSES):
            number = (ast.Constant, ast.Name, ast.arg, ast.UnaryOp, ast.unaryop)  # the same GPU on every rank
            yield from (value for value in call.args if not all(isinstance(x, number) for x in case.reach(value)))
        elif case.name(call).endswith(_TAKES_DEVICE) or method(call) in ("cuda", "to"):
            yield from (value for value in call.args if case.has_rank(value))
        named = [argument(call, word) for word in ("device_ids", "device", "visible_device_list")]
        yield from (one for one in named if one is not None and case.has_rank(one))
    options = [binding.value for binding in case.attributes.get("visible_device_list", [])]
    for node in case.nodes:
        match node:
            case ast.Assign(targets=[ast.Subscript(slice=ast.Constant(value="CUDA_VISIBLE_DEVICES"))]):
                options.append(node.value)
    yield from (value for value in options if value is not None and case.has_rank(value))


def _names_gpu(case: DataCase, node: ast.Constant) -> bool:
    """Whether a text is the name of a GPU that something is put on."""
    text = node.value.lower() if isinstance(node.value, str) else ""
    if "cuda" not in text and "gpu" not in text:
        return False
    around = list(case.ancestors(node))
    call = next((node for node in around if isinstance(node, ast.Call)), None)
    if text == "gpu" or "/gpu" in text or "device:gpu" in text:
        return call is not None and case.name(call).startswith("tensorflow.")
    if text != "cuda" and not text.startswith("cuda:"):
        return False
    if call is not None and ast.unparse(call.func).endswith(_NEUTRAL_CALLS):
        return False
    return not isinstance(around[0], ast.Compare)


# 3: scale the learning rate -------------------------------------------------------------------------------------------


def _learning_rate(case: DataCase) -> Verdict:
    """Whether the number of processes is in every optimizer's rate, or in what sets it later."""
    changes = list(_rate_changes(case))
    set_later = [line for line, scales in changes if scales]
    scaled = [*case.lines(case.having(Role.SCALE)), *set_later]
    unscaled, unclear = [], ""
    for event in case.optimizers:
        rates = _rates(case, event.node)
        if _is_scaled(case, *rates):
            scaled.append(event.node.lineno)
        elif why := _unclear_rate(case, event.node, rates):
            unclear = why
        else:
            unscaled.append(event.node.lineno)
    if unscaled and not set_later:
        if changes:
            return _undecided(f"line {changes[0][0]} sets the learning rate anew")
        return _no_scaling_needed(case) or _missing(unscaled)
    if scaled:
        return _done(scaled)
    if unclear:
        return _undecided(unclear)
    hidden = case.handed_away
    return _may_do_it(hidden) if hidden else _undecided("no optimizer is made in this text")


def _rates(case: DataCase, call: ast.Call) -> list[ast.expr]:
    """The learning rate of an optimizer and those of its parameter groups."""
    position = 1 if case.is_torch_optimizer(call) else 0
    found = [argument(call, "lr"), argument(call, "learning_rate"), argument(call, "", position)]
    groups = call.args[:position] + [keyword.value for keyword in call.keywords if keyword.arg is None]
    for node in case.reach(*groups):
        found += entries(node, "lr", "learning_rate")
        if isinstance(node, ast.Call) and case.name(node) == "builtins.dict":
            found += [argument(node, "lr"), argument(node, "learning_rate")]
    return [one for one in found if one is not None]


def _is_scaled(case: DataCase, *rates: ast.AST) -> bool:
    made = case.calls(*rates, through=True)
    return case.has_size(*rates, through=True) or any(case.role(call) in (Role.SCALE, Role.WARMUP) for call in made)


def _unclear_rate(case: DataCase, call: ast.Call, rates: list[ast.expr]) -> str:
    if has_stars(call) and not rates:
        return "the learning rate comes in a dictionary"
    hidden = next(filter(None, (case.hidden(rate, through=True) for rate in rates)), None)
    if hidden:
        return f"the learning rate comes from {hidden}, which is not in this text"
    if any(case.name(call).startswith("keras.") or case.class_of(call) for call in case.calls(*rates)):
        return "the learning rate is a schedule of its own"
    return "the learning rate comes from a caller that is not in this text" if _is_given(case, *rates) else ""


def _is_given(case: DataCase, *values: ast.AST) -> bool:
    """Whether values come from a caller that is not in this text."""
    parameters = [node for node in case.reach(*values, through=True) if isinstance(node, ast.arg)]
    return not all(map(case.arguments_for, parameters))


def _rate_changes(case: DataCase) -> Iterator[tuple[int, bool]]:
    """What else sets a rate: the line, and whether the number of processes is in it."""
    for node in (node for node in case.nodes if isinstance(node, (ast.Assign, ast.AugAssign))):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            match target:  # ``group["lr"] = ...``, ``opt.learning_rate = ...``
                case ast.Subscript(slice=ast.Constant(value="lr")):
                    yield node.lineno, _is_scaled(case, node.value)
                case ast.Attribute(attr="learning_rate" | "lr", value=owner) if "opt" in ast.unparse(owner).lower():
                    yield node.lineno, _is_scaled(case, node.value)
    for call in (event.node for event in case.events):
        functions = [node for function in case.function_arguments(call) for node in ast.walk(function)]
        given = [*call.args[1:], *(keyword.value for keyword in call.keywords)]
        scales = case.has_size(*given, *functions)
        if case.role(call) == Role.WARMUP and case.name(call).startswith("horovod"):
            if scales or case.has_size(*call.args[:1]):  # else it reaches the optimizer's own rate
                yield call.lineno, True
        elif _is_schedule(case, call, case.name(call) or ast.unparse(call.func)):
            yield call.lineno, scales
        elif method(call) in ("assign", "set_value") and re.search(r"\blr\b|learning_rate", ast.unparse(call)):
            yield call.lineno, False


def _is_schedule(case: DataCase, call: ast.Call, name: str) -> bool:
    """Whether a call makes a schedule that does more than multiply the optimizer's own rate."""
    strange = case.is_opaque(call) and re.search(r"warm|sched|lr", name, re.IGNORECASE) is not None
    known = ".lr_scheduler." in name or name.endswith("LearningRateScheduler")
    return (strange or known) and not name.endswith(_MULTIPLIES)


def _no_scaling_needed(case: DataCase) -> Verdict | None:
    if case.others:
        return _may_do_it(case.others[0])
    if case.library == "ddp":
        return _undecided("no factor for the number of processes; the rate may have been tuned for the whole job")
    for event in [*case.having(Role.DISTRIBUTE), *case.reduces_gradients()]:
        if case.operations(event.node) & {"sum", "adasum"}:
            return Verdict(NOT_NEEDED, "gradients are summed or combined by Adasum, not averaged", (event.node.lineno,))
    for call in (event.node for event in case.events):
        place = 1 if case.name(call) in LOADERS else 2 if case.role(call) == Role.SHARD else None
        place = 0 if method(call) in ("batch", "padded_batch") and not case.name(call) else place
        if case.has_size(argument(call, "batch_size", place)):
            return Verdict(NOT_NEEDED, "the batch of a rank is its part of the global batch", (call.lineno,))
    return None


# 4: distribute the optimizer ------------------------------------------------------------------------------------------


def _distribute(case: DataCase) -> Verdict:
    if by_hand := case.reduces_gradients():
        return _done(case.lines(by_hand), "by hand")
    if doubt := _why_training_is_unclear(case):
        return _undecided(doubt)
    tapes = [event for event in case.steps if method(event.node) == "gradient"]
    makers = tapes or case.optimizers or [update.event for update in case.updates] or case.steps
    return _missing(case.lines(makers[:1]))


def _why_training_is_unclear(case: DataCase) -> str:
    return case.elsewhere() or ("" if case.steps else "nothing is trained in this text")


# 5: broadcast the state -----------------------------------------------------------------------------------------------


def _broadcast(case: DataCase) -> Verdict:
    """Whether the state of model and optimizer is sent, by calls, by a callback that fit gets, or by DDP."""
    sent = case.having(Role.BROADCAST, Role.ELASTIC, Role.FIT) + sent_by_hand(case)
    callbacks = case.having(Role.BROADCAST_CALLBACK)
    if callbacks and not sent:
        for call in [event.node for event in case.fits[:1]]:
            if argument(call, "callbacks") is None and not has_stars(call):
                return _missing([call.lineno], f"the callback of line {callbacks[0].node.lineno} is not given to fit")
        return _done(case.lines(callbacks))
    wrapped = case.having(Role.DISTRIBUTE)
    if case.library == "ddp" and wrapped:
        why = "DDP sends the model of rank 0 to all ranks when it wraps it"
        return Verdict(NOT_NEEDED, why, tuple(case.lines(wrapped)))
    of_ddp = "DDP does it when it wraps a model, and none is wrapped in this text" if case.library == "ddp" else ""
    doubt = _why_training_is_unclear(case) or of_ddp
    if sent:
        lacking = (_only_optimizers(case, sent) if not doubt else []) or _loaded_on_root(case, sent)
        return _missing(case.lines(lacking), "a part of the state is sent") if lacking else _done(case.lines(sent))
    # It belongs at ``fit``, or where the optimizer is distributed, or at the first step.
    place = case.fits or wrapped or case.steps
    return _undecided(doubt) if doubt else _missing(case.lines(place[:1]))


def _only_optimizers(case: DataCase, sent: list[Event]) -> list[Event]:
    """The first broadcast, where all of them send an optimizer's state and none the model's."""
    for event in sent:
        made = case.calls(*sent_objects(event))
        optimizers = made and all(map(case.is_optimizer, made))
        by_name = case.name(event.node).endswith("broadcast_optimizer_state")
        by_value = case.name(event.node).endswith("broadcast_variables") and optimizers
        if case.role(event.node) != Role.BROADCAST or not (by_name or by_value):
            return []
    return sent[:1]


def _loaded_on_root(case: DataCase, sent: list[Event]) -> list[Event]:
    """Loads of an optimizer's state on one rank, where no broadcast sends it to the others."""
    if any(not case.name(event.node).endswith("broadcast_parameters") for event in sent):
        return []
    made = {load: case.calls(receiver(load.node)) for load in loads(case) if load.reached}
    of_optimizers = [load for load, calls in made.items() if calls and all(map(case.is_optimizer, calls))]
    return [load for load in of_optimizers if case.where(load) == "some ranks"]


def sent_by_hand(case: DataCase) -> list[Event]:
    """The collectives that send a state, or what is loaded as one."""
    loaded = case.calls(*(value for load in loads(case) for value in load.node.args))
    found = []
    for event in case.having(Role.COLLECTIVE):
        around = [one for loop in event.loops for one in over(loop)]
        reached = case.reach(*arguments(event.node), *around, through=True)
        of_state = any(isinstance(node, ast.Attribute) and node.attr in _STATE for node in reached)
        sends = case.name(event.node).rpartition(".")[2].startswith(("broadcast", "bcast"))
        found += [event] if sends and (of_state or event.node in loaded) else []
    return found


def sent_objects(event: Event) -> list[ast.expr]:
    """What a broadcast sends: ``model`` of ``model.state_dict()``."""

    def owner(sent: ast.expr) -> ast.expr:
        part = sent.func if isinstance(sent, ast.Call) else sent
        return owner(part.value) if isinstance(part, ast.Attribute) and part.attr in _STATE else sent

    return [owner(sent) for sent in event.node.args]


def loads(case: DataCase) -> list[Event]:
    """The events that replace a state by one from a file."""
    found = [event for event in case.methods(*_LOADS) if not case.name(event.node)]
    read = case.methods("restore", "read")
    return found + [event for event in read if case.made_by(TF_CHECKPOINTS, receiver(event.node))]


# 6: checkpoint on one rank --------------------------------------------------------------------------------------------


def _checkpoint(case: DataCase) -> Verdict:
    kept = case.having(Role.CHECKPOINTS, Role.CHECKPOINT_CALLBACK)
    if case.guards_fit:
        kept += [event for event in case.events if case.name(event.node) in KERAS_WRITERS]
    kept += [event for event in case.having(Role.FIT) if argument(event.node, "checkpoint_dir") is not None]
    states: dict[str, list[Event]] = {state: [] for state in STATES}
    written = (event for event in case.events if case.writes_checkpoint(event.node))
    for event in once(event for event in written if not case.is_locked(event)):
        states[case.where_it_writes(event)].append(event)
    if everywhere := states["every rank"]:
        return _missing(case.lines(everywhere), "a checkpoint is written by every rank")
    if lines := case.lines([*kept, *states["some ranks"]]):
        return _done(lines)
    if unclear := case.lines(states["unknown"]):
        return _undecided(f"whether line {unclear[0]} runs on one rank or on all, the text does not say")
    doubt = case.elsewhere()
    return _undecided(doubt) if doubt else Verdict(NOT_NEEDED, "no checkpoint is written")


# 7: shard the data ----------------------------------------------------------------------------------------------------


def _shard(case: DataCase) -> Verdict:
    parts, forgotten = case.parts, _undivided_lines(case)
    sharded = [line for part in parts if part.kind == SHARDED for line in part.lines]
    whole = [line for part in parts if part.kind == WHOLE for line in part.lines[:1]]
    unclear = next((part for part in parts if part.kind == UNCLEAR), None)
    if whole and forgotten and not sharded:
        return _undecided(f"not sharded; random draws would do, with the steps of line {forgotten[0]} divided")
    if whole:
        return _missing(whole)
    if sharded:
        return _done(sharded)
    if unclear is not None:
        return _undecided(f"not sharded in this text, and {unclear.why}")
    anywhere = case.lines([*case.having(Role.SHARD), *case.named(*SAMPLERS)])
    return _done(anywhere) if anywhere else _undecided("where the training data come from the text does not show")


# 8: same steps per epoch ----------------------------------------------------------------------------------------------


def _steps_per_epoch(case: DataCase) -> Verdict:
    """Whether the steps of an epoch are divided by the number of processes, or follow from the parts."""
    if forgotten := _undivided_lines(case):
        return _missing(forgotten)
    divided = [event.node.lineno for event in case.fits if _divides_fit(case, event)]
    for loop in case.training_loops:  # ``dataset.take(n // size)`` and ``range(n // size)``
        for call in case.calls(*over(loop), through=True):
            counts = method(call) == "take" or case.name(call) in ("builtins.range", "itertools.islice")
            divided += [call.lineno] if counts and case.has_size(*call.args) else []
    if divided:
        return _done(divided)
    parts = case.parts
    if parts and all(part.kind == SHARDED and part.balanced for part in parts):
        lines = {line for part in parts for line in part.lines[:1]}
        return Verdict(NOT_NEEDED, "every rank's part has the same number of batches", tuple(sorted(lines)))
    kinds = {part.kind for part in parts}
    if WHOLE in kinds:
        return _missing((), "an epoch is the whole data set on every rank; sharding it (step 7) divides the steps")
    if SHARDED in kinds:
        return _undecided("the parts may differ by a sample, and one batch more on one rank makes it wait forever")
    return _undecided("how many steps make an epoch the text does not show")


def _undivided_lines(case: DataCase) -> list[int]:
    """The lines that count steps and forget to divide them by the number of processes."""
    fits = [event.node.lineno for event in case.fits if _undivided_fit(case, event)]
    return fits + [line for loop in case.training_loops for line in _undivided_loop(case, loop)]


def _undivided_fit(case: DataCase, event: Event) -> bool:
    """Whether ``steps_per_epoch`` counts the samples of the whole data set on every rank."""
    steps, part = argument(event.node, "steps_per_epoch"), case.fit_part(event)
    if steps is None or is_constant(steps, None) or is_constant(steps, 1) or part.kind == UNCLEAR:
        return False
    if _divides_fit(case, event) or case.hidden(steps, through=True) or case.shard_lines(steps):
        return False
    if _is_given(case, steps):  # the caller may have divided them
        return False
    return _is_counted(case, steps) or (part.kind == WHOLE and isinstance(steps, ast.Constant))


def _divides_fit(case: DataCase, event: Event) -> bool:
    return case.has_size(argument(event.node, "steps_per_epoch"), argument(event.node, "epochs"), through=True)


def _is_counted(case: DataCase, steps: ast.expr) -> bool:
    """Samples divided by something, such as a batch: a count of all samples, not a number that somebody chose."""
    reached = case.reach(steps)
    return any(isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.FloorDiv)) for node in reached)


def _undivided_loop(case: DataCase, loop: ast.AST) -> list[int]:
    """``dataset.repeat().take(n // batch)``: n times through a part, or all the random draws of one process."""
    calls = [call for call in case.calls(*over(loop), through=True) if not case.name(call)]
    methods = {method(call) for call in calls}
    kind = case.loop_part(loop, case.training_loops[loop]).kind
    takes = [call for call in calls if method(call) == "take" and call.args]
    if kind == SHARDED and "repeat" in methods:
        takes = [call for call in takes if _is_counted(case, call.args[0]) and not case.shard_lines(call.args[0])]
    elif kind != WHOLE or "shuffle" not in methods:
        return []
    takes = [call for call in takes if not is_constant(call.args[0], 1)]  # a first step, for what is made by it
    seen = [call for call in takes if not case.hidden(call.args[0], through=True)]
    return [call.lineno for call in seen if not case.has_size(call.args[0], through=True)]


# The table ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepRule:
    """A row of the table.

    Attributes:
        number: 1 to 8.
        name: in a few words.
        judge: whether a script does it.
        done_by: calls that do it; the judge is asked where there are none.
    """

    number: int
    name: str
    judge: Callable[[DataCase], Verdict]
    done_by: tuple[Role, ...] = ()


STEPS = (
    StepRule(1, "initialise", _init),
    StepRule(2, "pin one GPU per process", _pin),
    StepRule(3, "scale the learning rate", _learning_rate, (Role.FIT,)),
    StepRule(4, "distribute the optimizer", _distribute, (Role.DISTRIBUTE, Role.FIT, Role.LOAD_MODEL)),
    StepRule(5, "broadcast the state", _broadcast),
    StepRule(6, "checkpoint on one rank", _checkpoint),
    StepRule(7, "shard the data", _shard, (Role.FIT,)),
    StepRule(8, "same steps per epoch", _steps_per_epoch, (Role.STEPS, Role.FIT)),
)


class JudgedCase(DataCase):
    """A script and what is said of its steps."""

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """What is said of each step, in order."""
        if self.library == "none":
            doubt = next(iter([*self.others, *self.strangers()]), None)
            return [_may_do_it(doubt) if doubt else Verdict(MISSING)] * len(STEPS)
        found = []
        for step in STEPS:
            calls = self.having(*step.done_by)
            found.append(_done(self.lines(calls)) if calls else step.judge(self))
        training = {event.order for event in self.steps}
        if any(event.reached and (event.order in training or self.role(event.node)) for event in self.events):
            return found
        elsewhere = _undecided("this text only defines functions; what calls them may do it")
        return [elsewhere if verdict.status == MISSING else verdict for verdict in found]
