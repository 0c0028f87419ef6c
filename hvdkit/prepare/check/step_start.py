"""Steps 1 to 3: who am I, which GPU is mine, how fast to learn."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hvdkit.prepare.check.calls import argument, entries, has_stars, is_constant, makes_object, method
from hvdkit.prepare.check.case import Case
from hvdkit.prepare.check.libraries import LOADERS, NUMBERS, Role
from hvdkit.prepare.check.trace import Event
from hvdkit.prepare.check.verdict import Verdict, done, may_do_it, missing, not_needed, undecided

_CHOOSES = ("cuda.set_device", "xpu.set_device", "accelerator.set_device_index")
_TAKES_DEVICE = ("set_visible_devices", "torch.device", "cuda.device", "tensorflow.device")
_NEUTRAL_CALLS = ("add_argument", "autocast", "GradScaler", "init_process_group", "manual_seed")
_MULTIPLIES = (
    "StepLR", "MultiStepLR", "ExponentialLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "ReduceLROnPlateau",
    "PolynomialLR", "LinearLR", "ConstantLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler",
)  # fmt: skip
"""Schedules that multiply the optimizer's own rate, so that an unscaled one stays unscaled."""
_LENGTH = re.compile(r"step|epoch|total|t_max|len|iter", re.IGNORECASE)
"""Arguments of schedules that say how long, not how fast."""


def starts(case: Case) -> list[Event]:
    """The events that initialise the library; mpi4py does so when it is imported."""
    return [one for one in case.having(Role.INIT, Role.FIT) if not case.name(one.node).startswith("mpi4py")]


def init(case: Case) -> Verdict:
    """Step 1."""
    events = starts(case)
    reached = [one for one in events if one.reached]
    if reached:
        return done(case.lines(reached))
    if events:
        return undecided(f"line {events[0].node.lineno} does it, in a function that nothing in this text calls")
    doubts = [*case.others, *([case.runner] if case.runner else []), *case.strangers()]
    if doubts:
        return may_do_it(doubts[0])
    uses = case.having(*NUMBERS, Role.DISTRIBUTE, Role.BROADCAST, Role.REDUCE)
    return missing(case.lines(uses)[:1]) if uses else undecided("the library is imported and nothing of it is used")


def pin(case: Case) -> Verdict:
    """Step 2."""
    lines = [*case.lines(case.having(Role.PIN, Role.FIT)), *(node.lineno for node in device_choices(case))]
    if lines:
        return done(lines)
    if _hides_gpus(case):
        return not_needed("GPUs are hidden from this script")
    used = gpu_uses(case)
    opaque = [one.node for one in case.events if case.is_opaque(one.node) and not makes_object(one.node)]
    setup = next((ast.unparse(call.func) for call in opaque), None)
    if used:
        return undecided(f"{setup} is not in this text and may do it") if setup else missing(used[:1])
    if case.frameworks & {"tensorflow", "keras"}:
        return undecided("TensorFlow takes every GPU that it sees; the text does not say whether there is one")
    if line := _asked_for_a_device(case):
        return undecided(f"line {line} takes its device from outside of this text")
    return undecided(f"{setup} may use a GPU, which is not read here") if setup else not_needed("no GPU is used")


def device_choices(case: Case) -> Iterator[ast.expr]:
    """The expressions that choose a GPU by a rank, or by something that the text does not fix."""
    for call in (event.node for event in case.events):
        if case.name(call).endswith(_CHOOSES):
            yield from (one for one in call.args if not _is_fixed(case, one))
        elif case.name(call).endswith(_TAKES_DEVICE) or method(call) in ("cuda", "to"):
            yield from (one for one in call.args if case.has_rank(one))
        named = [argument(call, word) for word in ("device_ids", "device", "visible_device_list")]
        yield from (one for one in named if one is not None and case.has_rank(one))
    options = [binding.value for binding in case.attributes.get("visible_device_list", [])]
    for value in [*options, *_environment(case, "CUDA_VISIBLE_DEVICES")]:
        if value is not None and case.has_rank(value):
            yield value


def _is_fixed(case: Case, node: ast.expr) -> bool:
    """Whether a value is a number in the text: the same GPU on every rank."""
    leaves = [one for one in case.reach(node) if not isinstance(one, (ast.Name, ast.arg, ast.UnaryOp, ast.unaryop))]
    return all(isinstance(one, ast.Constant) for one in leaves)


def _environment(case: Case, variable: str) -> Iterator[ast.expr]:
    """What the script puts into an environment variable."""
    for node in case.nodes:
        yield from entries(node, variable)
        match node:
            case ast.Assign(targets=[ast.Subscript(value=base, slice=ast.Constant(value=key))]) if key == variable:
                yield from [node.value] if case.dotted(base) == "os.environ" else []
            case ast.Call(args=[ast.Constant(value=key), value]) if key == variable:
                yield from [value] if case.name(node) in ("os.environ.setdefault", "os.putenv") else []


def _hides_gpus(case: Case) -> bool:
    values = _environment(case, "CUDA_VISIBLE_DEVICES")
    chosen = [event.node.args[0] for event in case.named("set_visible_devices") if event.node.args]
    hidden = any(is_constant(one, "") or is_constant(one, "-1") for one in values)
    return hidden or any(isinstance(one, ast.List) and not one.elts for one in chosen)


def gpu_uses(case: Case) -> list[int]:
    """The lines that use a GPU, in order."""
    moved = [event for event in case.methods("cuda") if not case.name(event.node)]
    named = [one.lineno for one in case.nodes if isinstance(one, ast.Constant) and _names_gpu(case, one)]
    return sorted([*(event.node.lineno for event in [*moved, *case.named(*_CHOOSES)]), *named])


def _names_gpu(case: Case, node: ast.Constant) -> bool:
    """Whether a text is the name of a GPU that something is put on."""
    text = node.value.lower() if isinstance(node.value, str) else ""
    around = list(case.ancestors(node))
    call = next((one for one in around if isinstance(one, ast.Call)), None)
    if text == "gpu" or "/gpu" in text or "device:gpu" in text:
        return call is not None and case.name(call).startswith("tensorflow.")
    if text != "cuda" and not text.startswith("cuda:"):
        return False
    if call is not None and ast.unparse(call.func).endswith(_NEUTRAL_CALLS):
        return False
    value_of = isinstance(around[0], (ast.IfExp, ast.Assign, ast.Call, ast.keyword))
    return value_of and not any(isinstance(one, ast.Compare) for one in around[:2])


def _asked_for_a_device(case: Case) -> int | None:
    """The first line that moves something to a device of which the text says nothing."""
    for call in (event.node for event in case.events):
        for one in call.args[:1] if method(call) == "to" or case.name(call) == "torch.device" else []:
            reached = case.reach(one, through=True)
            asked = any(isinstance(node, (ast.Attribute, ast.arg)) for node in reached)
            if asked and "device" in ast.unparse(one) and not any(is_constant(node, "cpu") for node in reached):
                return call.lineno
    return None


# 3 --------------------------------------------------------------------------------------------------------------------


def learning_rate(case: Case) -> Verdict:
    """Step 3."""
    changes = list(_changes(case))
    elsewhere = [line for line, is_scaled, _ in changes if is_scaled]
    scaled = [*case.lines(case.having(Role.SCALE)), *elsewhere]
    unscaled, unclear = [], ""
    for event in case.optimizers:
        rates = _rates(case, event.node)
        if _is_scaled(case, *rates):
            scaled.append(event.node.lineno)
        elif why := _is_unclear(case, event.node, rates):
            unclear = why
        else:
            unscaled.append(event.node.lineno)
    if unscaled and not elsewhere:
        doubt = next((why for _, _, why in changes if why), "")
        return _no_scaling_needed(case) or (undecided(doubt) if doubt else missing(unscaled))
    if scaled:
        return done(scaled)
    if unclear:
        return undecided(unclear)
    hidden = case.handed_away()
    return may_do_it(hidden) if hidden else undecided("no optimizer is made in this text")


def _rates(case: Case, call: ast.Call) -> list[ast.expr]:
    """The learning rate of an optimizer and those of its parameter groups."""
    position = 1 if case.is_torch_optimizer(call) else 0
    found = [argument(call, "lr"), argument(call, "learning_rate"), argument(call, "", position)]
    groups = call.args[:position] + [keyword.value for keyword in call.keywords if keyword.arg is None]
    for node in case.reach(*groups):
        found += entries(node, "lr", "learning_rate")
        if isinstance(node, ast.Call) and case.name(node) == "builtins.dict":
            found += [argument(node, "lr"), argument(node, "learning_rate")]
    return [one for one in found if one is not None]


def _is_scaled(case: Case, *rates: ast.AST) -> bool:
    made = case.calls(*rates, through=True)
    return case.has_size(*rates, through=True) or any(case.role(one) in (Role.SCALE, Role.WARMUP) for one in made)


def _is_unclear(case: Case, call: ast.Call, rates: list[ast.expr]) -> str:
    if has_stars(call) and not rates:
        return "the learning rate comes in a dictionary"
    for rate in rates:
        hidden = case.hidden(rate, through=True)
        if hidden:
            return f"the learning rate comes from {hidden}, which is not in this text"
        if any(case.name(one).startswith("keras.") or case.class_of(one) for one in case.calls(rate)):
            return "the learning rate is a schedule of its own"
        parameters = [one for one in case.reach(rate, through=True) if isinstance(one, ast.arg)]
        if not all(case.arguments_for(one) for one in parameters):
            return "the learning rate comes from a caller that is not in this text"
    return ""


def _changes(case: Case) -> Iterator[tuple[int, bool, str]]:
    """What else sets a rate: the line, whether the number of processes is in it, and the doubt that it leaves."""
    for node in _assignments(case):
        yield node.lineno, _is_scaled(case, node.value), f"line {node.lineno} sets the learning rate anew"
    for call in (event.node for event in case.events):
        functions = [node for function in case.function_arguments(call) for node in ast.walk(function)]
        if case.role(call) == Role.WARMUP and case.name(call).startswith("horovod"):
            rates = [argument(call, "initial_lr", 0), argument(call, "multiplier")]
            yield call.lineno, case.has_size(*rates, *functions), ""
        elif method(call) == "add_argument" and "lr" in ast.unparse(call.args[0] if call.args else call):
            yield call.lineno, case.has_size(argument(call, "default"), *functions), ""
        elif _is_schedule(case, call):
            given = [*call.args[1:2], *(one.value for one in call.keywords if not _LENGTH.search(one.arg or ""))]
            yield call.lineno, case.has_size(*given, *functions), f"the schedule of line {call.lineno} may scale it"
        elif method(call) in ("assign", "set_value") and re.search(r"\blr\b|learning_rate", ast.unparse(call)):
            yield call.lineno, False, f"line {call.lineno} sets the learning rate anew"


def _is_schedule(case: Case, call: ast.Call) -> bool:
    """Whether a call makes a schedule that does more than multiply the optimizer's own rate."""
    name = case.name(call) or ast.unparse(call.func)
    strange = case.is_opaque(call) and re.search(r"warm|sched|lr", name, re.IGNORECASE) is not None
    known = ".lr_scheduler." in name or name.endswith("LearningRateScheduler")
    return (strange or known) and not name.endswith(_MULTIPLIES)


def _assignments(case: Case) -> Iterator[ast.Assign | ast.AugAssign]:
    """The assignments that set a rate in an optimizer: ``group["lr"] = ...``, ``opt.learning_rate = ...``."""
    for node in case.nodes:
        if not isinstance(node, (ast.Assign, ast.AugAssign)):
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            match target:
                case ast.Subscript(slice=ast.Constant(value="lr")):
                    yield node
                case ast.Attribute(attr="learning_rate" | "lr", value=owner) if "opt" in ast.unparse(owner).lower():
                    yield node


def _no_scaling_needed(case: Case) -> Verdict | None:
    if case.others:
        return may_do_it(case.others[0])
    if case.library == "ddp":
        return undecided(
            "no factor for the number of processes; whether the rate was tuned for one the text does not say"
        )
    for event in [*case.having(Role.DISTRIBUTE), *case.reduces_gradients()]:
        if case.operations(event.node) & {"sum", "adasum"}:
            return not_needed("gradients are summed or combined by Adasum, not averaged", [event.node.lineno])
    for event in case.events:
        if case.has_size(batch_size(case, event.node)):
            return not_needed("the batch of a rank is its part of the global batch", [event.node.lineno])
    return None


def batch_size(case: Case, call: ast.Call) -> ast.expr | None:
    """The batch size that a call is given."""
    place = None
    if case.name(call) in LOADERS:
        place = 1
    elif method(call) in ("batch", "padded_batch") and not case.name(call):
        place = 0
    elif case.role(call) == Role.SHARD:
        place = 2
    return argument(call, "batch_size", place)
