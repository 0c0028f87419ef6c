"""Steps 1 and 2: who am I, which GPU is mine."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hvdkit.prepare.check.case import Case
from hvdkit.prepare.check.facts import method
from hvdkit.prepare.check.libraries import Role
from hvdkit.prepare.check.verdict import Verdict, done, missing, not_needed, undecided

_CHOOSES = ("cuda.set_device", "xpu.set_device", "accelerator.set_device_index")
_NEUTRAL_CALLS = ("add_argument", "autocast", "GradScaler", "init_process_group", "manual_seed")


def init(case: Case) -> Verdict:
    """Step 1."""
    events = [one for one in case.having(Role.INIT, Role.FIT) if not case.name(one.node).startswith("mpi4py")]
    reached = [one for one in events if one.reached]
    if reached:
        return done(case.lines(reached))
    if events:
        return undecided(f"line {events[0].node.lineno} does it, in a function that nothing in this text calls")
    doubts = [*case.others, *([case.runner] if case.runner else []), *case.strangers()]
    if doubts:
        return undecided(f"{doubts[0]} may do it, which is not read here")
    uses = case.having(
        Role.RANK, Role.LOCAL_RANK, Role.SIZE, Role.LOCAL_SIZE, Role.DISTRIBUTE, Role.BROADCAST, Role.REDUCE
    )
    return missing(case.lines(uses)[:1]) if uses else undecided("the library is imported and nothing of it is used")


def pin(case: Case) -> Verdict:
    """Step 2."""
    asked, chosen = case.having(Role.PIN, Role.FIT), list(device_choices(case))
    if asked or chosen:
        return done([*case.lines(asked), *(node.lineno for node in chosen)])
    if _hides_gpus(case):
        return not_needed("GPUs are hidden from this script")
    used = gpu_uses(case)
    setup = next((one for one in case.events if case.is_opaque(one.node) and not _makes_object(one.node)), None)
    if used and setup is not None:
        return undecided(f"{ast.unparse(setup.node.func)} is not in this text and may do it")
    if used:
        return missing(used[:1])
    if case.frameworks & {"tensorflow", "keras"}:
        return undecided("TensorFlow takes every GPU that it sees; the text does not say whether there is one")
    line = _asked_for_a_device(case)
    if line:
        return undecided(f"line {line} takes its device from outside of this text")
    if setup is not None:
        return undecided(f"{ast.unparse(setup.node.func)} may use a GPU, which is not read here")
    return not_needed("no GPU is used")


def _makes_object(call: ast.Call) -> bool:
    return ast.unparse(call.func).rpartition(".")[2][:1].isupper()


def device_choices(case: Case) -> Iterator[ast.expr]:
    """The expressions that choose a GPU by a rank, or by something that the text does not fix."""
    for event in case.events:
        name, call = case.name(event.node), event.node
        if name.endswith(_CHOOSES):
            yield from (one for one in call.args if not _is_fixed(case, one))
        elif name.endswith(("set_visible_devices", "torch.device", "cuda.device", "tensorflow.device")) or method(
            call
        ) in ("cuda", "to"):
            yield from (one for one in call.args if case.has_rank(one))
        named = [one.value for one in call.keywords if one.arg in ("device_ids", "device", "visible_device_list")]
        yield from (one for one in named if case.has_rank(one))
    for binding in case.attributes.get("visible_device_list", []):
        if binding.value is not None and case.has_rank(binding.value):
            yield binding.value
    yield from (value for value in _environment(case, "CUDA_VISIBLE_DEVICES") if case.has_rank(value))


def _is_fixed(case: Case, node: ast.expr) -> bool:
    """Whether a value is a number in the text: the same GPU on every rank."""
    leaves = [one for one in case.reach(node) if not isinstance(one, (ast.Name, ast.arg, ast.UnaryOp, ast.unaryop))]
    return all(isinstance(one, ast.Constant) for one in leaves)


def _environment(case: Case, variable: str) -> Iterator[ast.expr]:
    """What the script puts into an environment variable."""
    for node in case.nodes:
        match node:
            case ast.Assign(targets=[ast.Subscript(value=base, slice=ast.Constant(value=str(key)))]):
                if key == variable and case.dotted(base) == "os.environ":
                    yield node.value
            case ast.Dict():
                pairs = zip(node.keys, node.values, strict=True)
                yield from (value for key, value in pairs if isinstance(key, ast.Constant) and key.value == variable)
            case ast.Call(args=[ast.Constant(value=str(key)), value]):
                if key == variable and case.name(node) in ("os.environ.setdefault", "os.putenv"):
                    yield value


def _hides_gpus(case: Case) -> bool:
    values = _environment(case, "CUDA_VISIBLE_DEVICES")
    if any(isinstance(one, ast.Constant) and one.value in ("", "-1") for one in values):
        return True
    chosen = [event.node.args[0] for event in case.named("set_visible_devices") if event.node.args]
    return any(isinstance(one, ast.List) and not one.elts for one in chosen)


def gpu_uses(case: Case) -> list[int]:
    """The lines that use a GPU, in order."""
    calls = [*case.methods("cuda"), *case.named(*_CHOOSES)]
    found = [one.node.lineno for one in calls if case.name(one.node).endswith(_CHOOSES) or not case.name(one.node)]
    for node in case.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _names_gpu(case, node):
            found.append(node.lineno)
    return sorted(found)


def _names_gpu(case: Case, node: ast.Constant) -> bool:
    """Whether a text is the name of a GPU that something is put on."""
    text = str(node.value).lower()
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
    for event in case.events:
        moves = method(event.node) == "to" or case.name(event.node) == "torch.device"
        for one in event.node.args[:1] if moves else []:
            texts = [node.value for node in case.reach(one, through=True) if isinstance(node, ast.Constant)]
            asked = [node for node in case.reach(one, through=True) if isinstance(node, (ast.Attribute, ast.arg))]
            if "device" in ast.unparse(one) and not {"cpu"} & set(map(str, texts)) and asked:
                return event.node.lineno
    return None
