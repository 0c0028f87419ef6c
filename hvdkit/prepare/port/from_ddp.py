"""From PyTorch's DistributedDataParallel."""

from __future__ import annotations

import ast

from hvdkit.prepare.check.libraries import DDP, SAMPLERS, Role
from hvdkit.prepare.check.source import argument, has_stars, receiver
from hvdkit.prepare.check.trace import Event
from hvdkit.prepare.port import from_single
from hvdkit.prepare.port.plan import PortPlan, Unsure

_DIST = "torch.distributed."
_OPERATIONS = {"SUM": "Sum", "AVG": "Average", "MIN": "Min", "MAX": "Max", "PRODUCT": "Product"}
_KNOWN = {"init_process_group", "destroy_process_group", "get_rank", "get_world_size", "all_reduce", "barrier",
          "broadcast", "ReduceOp"}  # fmt: skip
_LEFT_OUT = {"device_ids", "output_device", "find_unused_parameters", "broadcast_buffers", "static_graph",
             "gradient_as_bucket_view", "bucket_cap_mb"}  # fmt: skip


def port(plan: PortPlan) -> None:
    """Port a script that uses DDP; ``Unsure`` where nothing of it can be ported for certain."""
    case = plan.case
    plan.binding = "torch"
    if case.rank_parameters or case.others:
        first = next(iter(case.rank_parameters), None)
        raise Unsure(first or 1, "it starts its ranks itself (mp.spawn), or is distributed otherwise, too",
                     "start it by hvdkit launch, and call what was spawned directly")  # fmt: skip
    _require_known(plan)
    start = plan.starting(_DIST)
    asked = [node for node in case.nodes if isinstance(node, ast.Call) and plan.number(node, _DIST)]
    if any(case.function(one) is case.function(start) and one.lineno < start.lineno for one in asked):
        raise Unsure(start, "rank and size are asked for before the process group is made", "move it up")
    wraps = [event for event in case.having(Role.DISTRIBUTE) if DDP.fullmatch(case.name(event.node))]
    pins = [event for event in case.named("cuda.set_device") if event.reached]
    pin = "" if pins else f"\n{plan.hk}.pin_device({plan.world})"
    plan.edit("swap", start, f"{plan.world} = {plan.hk}.init(){pin}")
    plan.import_(f"import hvdkit.torch as {plan.hk}")
    models = _unwrap(plan, wraps)
    made = [event for event in case.optimizers if event.reached]
    if not made:
        raise Unsure(wraps[0].node, "no optimizer is made in this text", f"{plan.hk}.distribute(optimizer, model)")
    plan.each(lambda plan, event: _optimizer(plan, event, models), made)
    plan.each(PortPlan.pin, pins)
    plan.each(_message, [event for event in case.events if case.name(event.node).startswith(_DIST)])
    plan.each(_sampler, [event for event in case.events if case.name(event.node) in SAMPLERS])
    for event in case.methods("no_sync"):
        with plan.sure():
            plan.change(event.node, f"{plan.hk}.no_sync({plan.moved(receiver(event.node))})")
    plan.replace_numbers(_DIST)


def _require_known(plan: PortPlan) -> None:
    """DDP is started and asked in ways that are all known, or nothing is changed."""
    case = plan.case
    for name, line in case.used.items():
        rest = name.removeprefix(_DIST).split(".")[0]
        if name.startswith(_DIST) and rest and rest not in _KNOWN and rest != "torch":
            raise Unsure(line, f"it uses torch.distributed.{rest}", "see docs/migrate.md for Horovod's")
    for node in case.nodes:
        asks = isinstance(node, ast.Call) and node.args and case.name(node) in ("os.environ.get", "os.getenv")
        key = node.args[0] if asks else None  # type: ignore[attr-defined]
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant) and "environ" in ast.unparse(node):
            key = node.left
        if isinstance(key, ast.Constant) and key.value in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            raise Unsure(node, "it asks the environment, which another launcher fills otherwise",
                         f"{plan.world} = {plan.hk}.init(), always: one process is a job of one")  # fmt: skip
        if isinstance(node, ast.Attribute) and node.attr in ("require_backward_grad_sync", "register_comm_hook"):
            raise Unsure(node, f"it uses DDP's {node.attr}", f"with {plan.hk}.no_sync(model): around those backwards")


def _unwrap(plan: PortPlan, wraps: list[Event]) -> dict[str, str]:
    """Take DDP off; returns by the wrapped model's name that of the model."""
    found: dict[str, str] = {}
    hk = plan.hk
    for event in {one.node: one for one in wraps}.values():
        call = event.node
        home, model = plan.assigned(call), argument(call, "module", 0)
        unknown = {keyword.arg for keyword in call.keywords} - {"module", *_LEFT_OUT}
        odd = has_stars(call) or len(call.args) > 1 or unknown
        if home is None or model is None or odd or plan.case.where(event) == "some ranks":
            raise Unsure(call, "the text does not show what DDP wraps, or how", f"{hk}.distribute(optimizer, model)")
        name, inner = plan.src(home.targets[0]), plan.src(model)
        found[name] = inner
        if name == inner:
            plan.edit("remove", home)
        else:
            plan.change(call, plan.moved(model))
        for node in plan.case.nodes:
            if isinstance(node, ast.Attribute) and node.attr == "module" and call in plan.case.calls(node.value):
                plan.change(node, plan.moved(node.value))
    if not found:
        raise Unsure(1, "no DistributedDataParallel is made in this text", f"{hk}.distribute(optimizer, model)")
    return found


def _optimizer(plan: PortPlan, event: Event, models: dict[str, str]) -> None:
    """DDP's hooks become the optimizer's, and the rate stays what it was."""
    call = event.node
    write = f"{plan.hk}.distribute(optimizer, model); {plan.hk}.broadcast_state(model, optimizer)"
    home = plan.assigned(call)
    found = {text.removesuffix(".module") for text in plan.models_of(call.args[0])} if call.args else set()
    model = next(iter(found), "")
    if len(found) != 1 or home is None or model not in {*models, *models.values()}:
        raise Unsure(call, "the text does not show whose parameters it steps", write)
    if plan.case.function(home) is not None and plan.first_step(home, event) is None:
        raise Unsure(call, "the text does not show where it trains", write)
    rate, default = argument(call, "lr", 1), from_single.RATES.get(plan.case.name(call).rpartition(".")[2])
    keep = f'{plan.hk}.scale_lr({{}}, {plan.use_world(call)}, "none")'
    if rate is not None or default is not None:
        plan.scale(call, rate, default or "", "lr", keep)
    target = model if model in models else next(name for name, inner in models.items() if inner == model)
    plan.distribute(home, event, target)
    if any("BatchNorm" in name and "Sync" not in name for name in plan.case.used):
        plan.note(
            "DDP gave every rank the root's BatchNorm statistics before each forward, now each keeps its own: "
            f"{plan.hk}.average_statistics(model) before evaluation, or {plan.hk}.sync_batch_norm(model)"
        )


def _message(plan: PortPlan, event: Event) -> None:
    """Replace a call of ``torch.distributed`` by Horovod's; raises Unsure where the text does not show what it does."""
    call = event.node
    last = plan.case.name(call).removeprefix(_DIST)
    if last == "destroy_process_group":
        plan.edit("remove", plan.alone(call))
    elif last == "barrier":
        plan.change(call, f"{plan.use_horovod()}.barrier()")
    elif last in ("all_reduce", "broadcast"):
        odd = [keyword.arg for keyword in call.keywords if keyword.arg not in ("op", "tensor", "src")]
        if odd or not call.args or has_stars(call):
            raise Unsure(call, f"dist.{last} with {odd[0] if odd else 'no tensor'}", "see docs/migrate.md")
        hvd, given = plan.use_horovod(), plan.moved(call.args[0])
        if last == "broadcast":
            source = argument(call, "src", 1)
            done = f"broadcast_({given}, root_rank={'0' if source is None else plan.moved(source)})"
        else:
            operation = argument(call, "op", 1)
            word = ast.unparse(operation).rpartition(".")[2] if operation is not None else "SUM"
            if word not in _OPERATIONS or len(call.args) > 1:
                write = f"{hvd}.allreduce_(x, op={hvd}.Sum)"
                raise Unsure(call, "which operation it does the text does not show", write)
            done = f"allreduce_({given}, op={hvd}.{_OPERATIONS[word]})"
        plan.change(call, f"{hvd}.{done}")


def _sampler(plan: PortPlan, event: Event) -> None:
    """Without PyTorch's process group it is told rank and size."""
    call = event.node
    if has_stars(call) or len(call.args) > 1:
        raise Unsure(call, "which arguments it gets the text does not show", "num_replicas=world.size, rank=world.rank")
    for name, value in (("num_replicas", "size"), ("rank", "rank")):
        if argument(call, name) is None:
            plan.add(call, f"{plan.use_world(call)}.{value}", name)
