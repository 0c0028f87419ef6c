"""Step 3: how fast to learn."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hvdkit.prepare.check.calls import argument, entries, has_stars, method
from hvdkit.prepare.check.case import Case
from hvdkit.prepare.check.libraries import LOADERS, Role
from hvdkit.prepare.check.verdict import Verdict, done, may_do_it, missing, not_needed, undecided

_MULTIPLIES = (
    "StepLR", "MultiStepLR", "ExponentialLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "ReduceLROnPlateau",
    "PolynomialLR", "LinearLR", "ConstantLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler",
)  # fmt: skip
"""Schedules that multiply the optimizer's own rate, so that an unscaled one stays unscaled."""
_LENGTH = re.compile(r"step|epoch|total|t_max|len|iter", re.IGNORECASE)
"""Arguments of schedules that say how long, not how fast."""


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
