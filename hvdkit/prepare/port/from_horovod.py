"""From plain Horovod: what its scripts for every framework have in common, and those for PyTorch."""

from __future__ import annotations

import ast

from hvdkit.prepare.check.call_arguments import arguments
from hvdkit.prepare.check.facts import argument, has_stars, is_constant, method
from hvdkit.prepare.check.libraries import Role
from hvdkit.prepare.check.removed import asks_for_keras_2
from hvdkit.prepare.check.trace import Event
from hvdkit.prepare.port import from_horovod_tensorflow, keras_2, numbers
from hvdkit.prepare.port.edits import as_keyword, called, to, with_argument
from hvdkit.prepare.port.plan import Plan, Unsure

_ADAPTERS = {
    "horovod.torch": "torch",
    "horovod.keras": "keras",
    "horovod.tensorflow.keras": "keras",
    "horovod.tensorflow": "tensorflow",
}
_CONSTANTS = {
    "Compression.none": '"none"', "Compression.fp16": '"fp16"', "Average": '"average"', "Sum": '"sum"',
    "Adasum": '"adasum"',
}  # fmt: skip
_ORDER = ("optimizer", "named_parameters", "compression", "backward_passes_per_step", "op", "gradient_predivide_factor")
_SAME = {"compression", "backward_passes_per_step", "op", "gradient_predivide_factor", "groups", "sparse_as_dense",
         "process_set"}  # fmt: skip


def port(plan: Plan) -> None:
    """Port a script that uses Horovod.

    Raises:
        Unsure: nothing of it can be ported for certain.
    """
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
    start = plan.starting("horovod.")
    plan.start_at(start)
    plan.edit("swap", start, f"{plan.world} = {plan.hk}.init()")
    _import(plan)
    if plan.adapter == "torch":
        _torch(plan)
    else:
        from_horovod_tensorflow.port(plan)
        keras_2.port(plan)
    numbers.replace(plan, "horovod.")


def _import(plan: Plan) -> None:
    """Import hvdkit where Horovod is imported."""
    code = f"import hvdkit.{plan.adapter} as {plan.hk}"
    for node in plan.text.tree.body:
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if any(name.startswith("horovod.") for name in names) and plan.text.line(node) is not None:
            plan.edit("after", node, code)
            return
    plan.import_(code)


def options(plan: Plan, call: ast.Call, *names: str) -> None:
    """Horovod's constants among what these arguments can be become hvdkit's words."""
    given = [one.value for one in call.keywords if one.arg in names]
    found = [(node, word) for one in given for node in plan.case.reach(one) if (word := constant(plan, node))]
    inside = [node for node, _ in found]
    for other in plan.case.nodes:
        if isinstance(other, ast.Call) and other is not call and plan.case.name(other).startswith("horovod."):
            shared = [x for one in arguments(other) for x in plan.case.reach(one) if x in inside]
            if shared and plan.case.role(other) != Role.DISTRIBUTE:
                raise Unsure(shared[0], f"`{ast.unparse(shared[0])}` goes to `{ast.unparse(other.func)}`, too",
                             "give each its own: hvdkit takes words, Horovod its constants")  # fmt: skip
    for node, word in found:
        if isinstance(node, ast.expr):
            plan.change(node, to(word))


def constant(plan: Plan, node: ast.AST) -> str:
    """hvdkit's word for a constant of Horovod, "" for everything else."""
    name = plan.case.dotted(node) if isinstance(node, ast.Attribute) else None
    if not name or not name.startswith("horovod."):
        return ""
    return next((word for ending, word in _CONSTANTS.items() if name.endswith(f".{ending}")), "")


# PyTorch --------------------------------------------------------------------------------------------------------------


def _torch(plan: Plan) -> None:
    before = len(plan.left)
    for event in plan.case.named("cuda.set_device"):
        with plan.sure():
            _pin(plan, event)
    distributed = plan.of("horovod.torch.", Role.DISTRIBUTE)
    plan.each(lambda event: _optimizer(plan, event), *distributed)
    if distributed and len(plan.left) == before:
        for event in plan.case.methods("synchronize", "skip_synchronize"):
            with plan.sure():
                _waits(plan, event)
    _broadcasts(plan)


def _pin(plan: Plan, event: Event) -> None:
    chosen = event.node.args[0] if event.node.args else None
    if chosen is not None and numbers.number(plan, chosen, "horovod.") == "local_rank":
        plan.edit("swap", plan.alone(event), f"{plan.hk}.pin_device({plan.use_world(event.node)})")


def _optimizer(plan: Plan, event: Event) -> None:
    """``hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), ...)``."""
    call = event.node
    if has_stars(call) or len(call.args) > 2 or not plan.case.name(call).endswith(".DistributedOptimizer"):
        raise Unsure(call, "which arguments Horovod's optimizer gets the text does not show",
                     f"{plan.hk}.distribute(optimizer, model, compression=\"fp16\", op=\"average\")")  # fmt: skip
    odd = [one.arg for one in call.keywords if one.arg not in {*_SAME, *_ORDER, "num_groups"}]
    optimizer, named = argument(call, "optimizer", 0), argument(call, "named_parameters", 1)
    models = plan.models_of(named) if named is not None else set()
    if named is None and optimizer is not None:
        made = [one for one in plan.case.calls(optimizer) if plan.case.is_torch_optimizer(one) and one.args]
        models = {text for one in made for text in plan.models_of(one.args[0])}
    if odd or len(models) != 1 or optimizer is None:
        why = f"hvdkit knows no {odd[0]}=" if odd else "the text does not show which model the optimizer steps"
        raise Unsure(call, why, f"{plan.hk}.distribute(optimizer, model), which names the gradients itself")
    model = models.pop()
    options(plan, call, "compression", "op")
    plan.change(call, called(f"{plan.hk}.distribute"))
    if named is None:
        plan.change(call, with_argument(model, "" if call.args else "model", place=1 if call.args else None))
    else:
        first = named in call.args or (call.args and call.keywords[0].value is named)
        plan.change_argument(named, as_keyword("" if first else "model", model))
    for one in call.keywords:
        if one.arg == "num_groups":
            plan.change_argument(one.value, as_keyword("groups"))


def _waits(plan: Plan, event: Event) -> None:
    """``optimizer.synchronize()`` and ``with optimizer.skip_synchronize():`` are over when ``backward`` returns."""
    called_on = event.node.func.value if isinstance(event.node.func, ast.Attribute) else event.node.func
    if not plan.case.having_made(called_on, Role.DISTRIBUTE):
        return
    if method(event.node) == "synchronize":
        plan.edit("remove", plan.alone(event))
        return
    around = plan.case.parents[plan.case.parents[event.node]]
    if not isinstance(around, ast.With) or len(around.items) != 1:
        raise Unsure(event.node, "hvdkit's optimizer has no skip_synchronize", "leave it out")
    plan.edit("unwrap", around)


def _broadcasts(plan: Plan) -> None:
    """Parameters and optimizer state, in one call where one follows the other."""
    events = {one.node: one for one in plan.of("horovod.torch.", Role.BROADCAST)}
    done: set[ast.Call] = set()
    for node, event in events.items():
        name = plan.case.name(node).rpartition(".")[2]
        if name not in ("broadcast_parameters", "broadcast_optimizer_state") or node in done:
            continue
        with plan.sure():
            statement = plan.alone(event)
            beside = plan.block(statement)
            following = beside[beside.index(statement) + 1 :][:1]
            partner = next((other for other in events if following == [plan.case.statement(other)]), None)
            if name == "broadcast_parameters" and partner is not None and "optimizer" in plan.case.name(partner):
                plan.edit("swap", statement, _broadcast(plan, node, partner))
                plan.edit("remove", plan.alone(events[partner]))
                done.add(partner)
            else:
                pair = (node, None) if name == "broadcast_parameters" else (None, node)
                plan.edit("swap", statement, _broadcast(plan, *pair))


def _broadcast(plan: Plan, parameters: ast.Call | None, state: ast.Call | None) -> str:
    first = parameters or state
    assert first is not None  # noqa: S101 - one of them is given
    write = f"{plan.hk}.broadcast_state(model, optimizer)"
    optimizer = argument(state, "optimizer", 0) if state is not None else None
    if parameters is not None:
        given = argument(parameters, "params", 0)
        match given:
            case ast.Call(
                func=ast.Attribute(value=model, attr="state_dict" | "named_parameters"), args=[], keywords=[]
            ):
                models = {plan.src(model)}
            case _:
                models = set()
    else:
        made = [one for one in plan.case.calls(optimizer) if plan.case.is_torch_optimizer(one)] if optimizer else []
        models = {text for one in made if one.args for text in plan.models_of(one.args[0])}
    roots = [argument(one, "root_rank", 1) for one in (parameters, state) if one is not None]
    if len(models) != 1 or has_stars(first) or len({ast.unparse(one) for one in roots if one is not None}) > 1:
        raise Unsure(first, "the text does not show whose state is sent, or from where", write)
    root = next((one for one in roots if one is not None), None)
    sent = [models.pop(), *([plan.src(optimizer)] if optimizer is not None else [])]
    if root is not None and not is_constant(root, 0):
        sent.append(f"root={plan.src(root)}")
    return f"{plan.hk}.broadcast_state({', '.join(sent)})"
