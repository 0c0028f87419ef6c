"""Steps 1 and 2: who am I, which GPU is mine."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hvdkit.prepare.check.calls import argument, entries, is_constant, makes_object, method
from hvdkit.prepare.check.case import Case
from hvdkit.prepare.check.libraries import NUMBERS, Role
from hvdkit.prepare.check.trace import Event
from hvdkit.prepare.check.verdict import Verdict, done, may_do_it, missing, not_needed, undecided

_CHOOSES = ("cuda.set_device", "xpu.set_device", "accelerator.set_device_index")
_TAKES_DEVICE = ("set_visible_devices", "torch.device", "cuda.device", "tensorflow.device")
_NEUTRAL_CALLS = ("add_argument", "autocast", "GradScaler", "init_process_group", "manual_seed")


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
