"""From plain Horovod: what its scripts for every framework have in common, and those for PyTorch."""

from __future__ import annotations

import ast

from hvdkit.prepare.check.calls import argument, arguments, has_stars, is_constant, method, receiver
from hvdkit.prepare.check.libraries import Role
from hvdkit.prepare.check.removed import asks_for_keras_2
from hvdkit.prepare.check.trace import Event
from hvdkit.prepare.port import from_horovod_tensorflow, keras_2
from hvdkit.prepare.port.edits import called, to, with_argument
from hvdkit.prepare.port.plan import PortPlan, Unsure

_ADAPTERS = {f"horovod.{one}": one for one in ("torch", "keras", "tensorflow")} | {"horovod.tensorflow.keras": "keras"}
_CONSTANTS = {
    "Compression.none": '"none"', "Compression.fp16": '"fp16"', "Average": '"average"', "Sum": '"sum"',
    "Adasum": '"adasum"',
}  # fmt: skip
_SENT = {"broadcast_parameters": "params", "broadcast_optimizer_state": "optimizer"}
"""By Horovod's function the argument that is sent."""
_KNOWN = {"optimizer", "named_parameters", "compression", "backward_passes_per_step", "op", "gradient_predivide_factor",
          "groups", "num_groups", "sparse_as_dense", "process_set"}  # fmt: skip


def port(plan: PortPlan) -> None:
    """Port a script that uses Horovod; ``Unsure`` where nothing of it can be ported for certain."""
    case = plan.case
    modules = [_ADAPTERS.get(one, "") for one in case.modules]
    if case.runner or case.having(Role.ELASTIC):
        first = next(iter([*case.having(Role.ELASTIC), *case.events])).node
        what = f"{case.runner} starts its ranks" if case.runner else "it trains elastically"
        raise Unsure(first, what, "port it by docs/migrate.md, and docs/elastic.md")
    if len(modules) != 1 or not modules[0]:
        found = ", ".join(case.modules) or "none"
        raise Unsure(1, f"it uses several of Horovod's modules, or one without ranks' gradients ({found})",
                     "port one framework at a time")  # fmt: skip
    plan.adapter = "keras" if modules[0] == "tensorflow" and case.fits else modules[0]
    if plan.adapter != "torch" and asks_for_keras_2(case):
        raise Unsure(1, "it asks for Keras 2 (TF_USE_LEGACY_KERAS or tf_keras), and hvdkit needs Keras 3",
                     "move it to Keras 3 first")  # fmt: skip
    plan.edit("swap", plan.starting("horovod."), f"{plan.world} = {plan.hk}.init()")
    _import(plan)
    if plan.adapter == "torch":
        _torch(plan)
    else:
        from_horovod_tensorflow.port(plan)
        keras_2.port(plan)
    plan.replace_numbers("horovod.")


def _import(plan: PortPlan) -> None:
    """Import hvdkit where Horovod is imported."""
    code = f"import hvdkit.{plan.adapter} as {plan.hk}"
    for node in plan.text.tree.body:
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if any(name.startswith("horovod.") for name in names) and plan.text.line(node) is not None:
            plan.edit("after", node, code)
            return
    plan.import_(code)


def distribute(plan: PortPlan, call: ast.Call, names: dict[str, str]) -> None:
    """Horovod's call becomes hvdkit's: words for constants, and these arguments under hvdkit's names."""
    given = [one.value for one in call.keywords if one.arg in ("compression", "op")]
    found = {node: word for one in given for node in plan.case.reach(one) if (word := _word(plan, node))}
    for other in plan.case.nodes:
        if isinstance(other, ast.Call) and other is not call and plan.case.name(other).startswith("horovod."):
            shared = [x for one in arguments(other) for x in plan.case.reach(one) if x in found]
            if shared and plan.case.role(other) != Role.DISTRIBUTE:
                raise Unsure(shared[0], f"`{ast.unparse(shared[0])}` goes to `{ast.unparse(other.func)}`, too",
                             "give each its own: hvdkit takes words, Horovod its constants")  # fmt: skip
    for node, word in found.items():
        if isinstance(node, ast.expr):
            plan.change(node, to(word))
    plan.change(call, called(f"{plan.hk}.distribute"))
    for one in call.keywords:
        if one.arg in names:
            plan.rename(one.value, names[one.arg])


def _word(plan: PortPlan, node: ast.AST) -> str:
    """hvdkit's word for a constant of Horovod, "" for everything else."""
    name = (plan.case.dotted(node) if isinstance(node, ast.Attribute) else None) or ""
    known = _CONSTANTS.items() if name.startswith("horovod.") else ()
    return next((word for ending, word in known if name.endswith(f".{ending}")), "")


# PyTorch --------------------------------------------------------------------------------------------------------------


def _torch(plan: PortPlan) -> None:
    before = len(plan.left)
    pins = [one for one in plan.case.named("cuda.set_device") if one.node.args]
    plan.each(PortPlan.pin, [one for one in pins if plan.number(one.node.args[0], "horovod.") == "local_rank"])
    distributed = plan.of("horovod.torch.", Role.DISTRIBUTE)
    plan.each(_optimizer, distributed)
    if distributed and len(plan.left) == before:
        plan.each(_waits, plan.case.methods("synchronize", "skip_synchronize"))
    _broadcasts(plan)


def _optimizer(plan: PortPlan, event: Event) -> None:
    """``hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), ...)``."""
    call = event.node
    if has_stars(call) or len(call.args) > 2 or not plan.case.name(call).endswith(".DistributedOptimizer"):
        raise Unsure(call, "which arguments Horovod's optimizer gets the text does not show",
                     f"{plan.hk}.distribute(optimizer, model, compression=\"fp16\", op=\"average\")")  # fmt: skip
    odd = [one.arg for one in call.keywords if one.arg not in _KNOWN]
    optimizer, named = argument(call, "optimizer", 0), argument(call, "named_parameters", 1)
    models = plan.models_of(named) if named is not None else _stepped(plan, optimizer)
    if odd or len(models) != 1 or optimizer is None:
        why = f"hvdkit knows no {odd[0]}=" if odd else "the text does not show which model the optimizer steps"
        raise Unsure(call, why, f"{plan.hk}.distribute(optimizer, model), which names the gradients itself")
    model = models.pop()
    distribute(plan, call, {"num_groups": "groups"})
    if named is None:
        plan.change(call, with_argument(model, "" if call.args else "model", place=1 if call.args else None))
    else:
        first = named in call.args or (call.args and call.keywords[0].value is named)
        plan.rename(named, "" if first else "model", model)


def _waits(plan: PortPlan, event: Event) -> None:
    """``optimizer.synchronize()`` and ``with optimizer.skip_synchronize():`` are over when ``backward`` returns."""
    if not plan.case.having_made(receiver(event.node), Role.DISTRIBUTE):
        return
    if method(event.node) == "synchronize":
        plan.edit("remove", plan.alone(event.node))
        return
    around = plan.case.parents[plan.case.parents[event.node]]
    if not isinstance(around, ast.With) or len(around.items) != 1:
        raise Unsure(event.node, "hvdkit's optimizer has no skip_synchronize", "leave it out")
    plan.edit("unwrap", around)


def _stepped(plan: PortPlan, optimizer: ast.expr | None) -> set[str]:
    """The models whose parameters an optimizer was made with, as text."""
    calls = plan.case.calls(optimizer) if optimizer is not None else []
    made = [one for one in calls if plan.case.is_torch_optimizer(one) and one.args]
    return {text for one in made for text in plan.models_of(one.args[0])}


def _broadcasts(plan: PortPlan) -> None:
    """Parameters and optimizer state, in one call where one follows the other."""
    names = {one.node: plan.case.name(one.node).rpartition(".")[2] for one in plan.of("horovod.torch.", Role.BROADCAST)}
    done: list[ast.Call] = []
    for call, name in names.items():
        if name not in _SENT or call in done:
            continue
        with plan.sure():
            statement = plan.alone(call)
            beside = plan.block(statement)
            below = beside[beside.index(statement) + 1 :][:1]
            sent = {name: call}
            if name == "broadcast_parameters":
                following = [one for one in names if [plan.case.statement(one)] == below]
                sent |= {names[one]: one for one in following if names[one] == "broadcast_optimizer_state"}
            plan.edit("swap", statement, _broadcast(plan, sent))
            for other in list(sent.values())[1:]:
                plan.edit("remove", plan.alone(other))
                done.append(other)


def _broadcast(plan: PortPlan, sent: dict[str, ast.Call]) -> str:
    """The one call for what these calls send, by their names."""
    first, *_ = sent.values()
    given = {name: argument(call, _SENT[name], 0) for name, call in sent.items()}
    optimizer = given.get("broadcast_optimizer_state")
    models: set[str] = set()
    match given.get("broadcast_parameters"):
        case ast.Call(func=ast.Attribute(value=model, attr="state_dict" | "named_parameters"), args=[], keywords=[]):
            models = {plan.src(model)}
        case None if "broadcast_parameters" not in sent:
            models = _stepped(plan, optimizer)
    roots = [one for call in sent.values() if (one := argument(call, "root_rank", 1)) is not None]
    if len(models) != 1 or has_stars(first) or len({ast.unparse(one) for one in roots}) > 1:
        raise Unsure(first, "the text does not show whose state is sent, or from where",
                     f"{plan.hk}.broadcast_state(model, optimizer)")  # fmt: skip
    words = [*models, *([plan.src(optimizer)] if optimizer is not None else [])]
    if roots and not is_constant(roots[0], 0):
        words.append(f"root={plan.src(roots[0])}")
    return f"{plan.hk}.broadcast_state({', '.join(words)})"
