"""Step 3: how fast to learn."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hvdkit.prepare.check.case import Case
from hvdkit.prepare.check.facts import argument, has_stars, method
from hvdkit.prepare.check.libraries import LOADERS, Role
from hvdkit.prepare.check.verdict import Verdict, done, missing, not_needed, undecided

_MULTIPLIES = (
    "StepLR", "MultiStepLR", "ExponentialLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "ReduceLROnPlateau",
    "PolynomialLR", "LinearLR", "ConstantLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler",
)  # fmt: skip
"""Schedules that multiply the optimizer's own rate, so that an unscaled one stays unscaled."""
_LENGTH = re.compile(r"step|epoch|total|t_max|len|iter", re.IGNORECASE)
"""Arguments of schedules that say how long, not how fast."""


def learning_rate(case: Case) -> Verdict:
    """Step 3."""
    if case.having(Role.FIT):
        return done(case.lines(case.having(Role.FIT)))
    elsewhere = _scaled_elsewhere(case)
    scaled = [*case.lines(case.having(Role.SCALE)), *elsewhere]
    unscaled, unclear = [], ""
    for event in case.optimizers:
        rates = _rates(case, event.node)
        if any(_is_scaled(case, one) for one in rates):
            scaled.append(event.node.lineno)
        elif why := _is_unclear(case, event.node, rates):
            unclear = why
        else:
            unscaled.append(event.node.lineno)
    if unscaled and not elsewhere:
        doubt = _set_later(case)
        return _no_scaling_needed(case) or (undecided(doubt) if doubt else missing(unscaled))
    if scaled:
        return done(scaled)
    hidden = case.handed_away()
    return undecided(
        unclear or (f"{hidden} may do it, which is not read here" if hidden else "no optimizer is made in this text")
    )


def _rates(case: Case, call: ast.Call) -> list[ast.expr]:
    """The learning rate of an optimizer and those of its parameter groups."""
    found = [argument(call, "lr"), argument(call, "learning_rate")]
    position = 1 if case.is_torch_optimizer(call) else 0
    found.append(argument(call, "", position))
    spread = [keyword.value for keyword in call.keywords if keyword.arg is None]
    for one in [*spread, *(call.args[:1] if position == 1 else [])]:
        found += [rate for node in case.reach(one) for rate in _in_dictionary(case, node)]
    return [one for one in found if one is not None]


def _in_dictionary(case: Case, node: ast.AST) -> list[ast.expr]:
    """The rate in ``{"lr": rate}`` and ``dict(lr=rate)``."""
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return [value for key, value in pairs if isinstance(key, ast.Constant) and key.value in ("lr", "learning_rate")]
    if isinstance(node, ast.Call) and case.name(node) == "builtins.dict":
        return [keyword.value for keyword in node.keywords if keyword.arg in ("lr", "learning_rate")]
    return []


def _is_scaled(case: Case, rate: ast.AST) -> bool:
    return case.has_size(rate, through=True) or bool(case.having_made(rate, Role.SCALE, Role.WARMUP, through=True))


def _is_unclear(case: Case, call: ast.Call, rates: list[ast.expr]) -> str:
    if has_stars(call) and not rates:
        return "the learning rate comes in a dictionary"
    for rate in rates:
        hidden = case.hidden(rate, through=True)
        if hidden:
            return f"the learning rate comes from {hidden}, which is not in this text"
        if any(case.name(one).startswith("keras.") or case.class_of(one) for one in case.calls(rate)):
            return "the learning rate is a schedule of its own"
        if any(isinstance(one, ast.arg) and not case.arguments_for(one) for one in case.reach(rate, True)):
            return "the learning rate comes from a caller that is not in this text"
    return ""


def _scaled_elsewhere(case: Case) -> list[int]:
    """Lines of schedules, warmups and assignments of a rate that know the number of processes."""
    found = [node.lineno for node in _assignments(case) if _is_scaled(case, node.value)]
    for event in case.events:
        if case.role(event.node) == Role.WARMUP and case.name(event.node).startswith("horovod"):
            rates = [argument(event.node, "initial_lr", 0), argument(event.node, "multiplier")]
        elif method(event.node) == "add_argument" and "lr" in ast.unparse(
            event.node.args[0] if event.node.args else event.node
        ):
            rates = [argument(event.node, "default")]
        elif _is_schedule(case, event.node):
            rates = [keyword.value for keyword in event.node.keywords if not _LENGTH.search(keyword.arg or "")]
            rates += event.node.args[1:2]
        else:
            continue
        own: list[ast.AST] = [node for function in case.function_arguments(event.node) for node in ast.walk(function)]
        if any(rate is not None and case.has_size(rate) for rate in rates) or any(case.has_size(one) for one in own):
            found.append(event.node.lineno)
    return found


def _is_schedule(case: Case, call: ast.Call) -> bool:
    """Whether a call makes a schedule that does more than multiply the optimizer's own rate."""
    name = case.name(call) or ast.unparse(call.func)
    if name.endswith(_MULTIPLIES):
        return False
    strange = case.is_opaque(call) and re.search(r"warm|sched|lr", name, re.IGNORECASE) is not None
    return strange or ".lr_scheduler." in name or name.endswith("LearningRateScheduler")


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


def _set_later(case: Case) -> str:
    """Why an unscaled rate may still become a scaled one; "" where nothing changes it."""
    for node in _assignments(case):
        return f"line {node.lineno} sets the learning rate anew"
    for event in case.events:
        line = event.node.lineno
        if _is_schedule(case, event.node):
            return f"the schedule of line {line} may scale it"
        if method(event.node) in ("assign", "set_value") and re.search(
            r"\blr\b|learning_rate", ast.unparse(event.node)
        ):
            return f"line {line} sets the learning rate anew"
    return ""


def _no_scaling_needed(case: Case) -> Verdict | None:
    if case.others:
        return undecided(f"{case.others[0]} may do it, which is not read here")
    if case.library == "ddp":
        return undecided(
            "no factor for the number of processes; whether the rate was tuned for one the text does not say"
        )
    for event in [*case.having(Role.DISTRIBUTE), *case.reduces_gradients()]:
        if case.operations(event.node) & {"sum", "adasum"}:
            return not_needed("gradients are summed or combined by Adasum, not averaged", [event.node.lineno])
    for event in case.events:
        if any(case.has_size(size) for size in batch_sizes(case, event.node)):
            return not_needed("the batch of a rank is its part of the global batch", [event.node.lineno])
    return None


def batch_sizes(case: Case, call: ast.Call) -> list[ast.expr]:
    """The batch size that a call is given."""
    size = argument(call, "batch_size")
    if size is None and case.name(call) in LOADERS:
        size = argument(call, "batch_size", 1)
    elif size is None and method(call) in ("batch", "padded_batch") and not case.name(call):
        size = argument(call, "batch_size", 0)
    elif size is None and case.role(call) == Role.SHARD:
        size = argument(call, "batch_size", 2)
    return [size] if size is not None else []
