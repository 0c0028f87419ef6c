"""From plain Horovod: what its scripts for every framework have in common, PyTorch's, and TensorFlow's."""

from __future__ import annotations

import ast
from textwrap import indent

from hvdkit.prepare.check.case import once
from hvdkit.prepare.check.libraries import Role
from hvdkit.prepare.check.source import (
    FunctionNode,
    argument,
    arguments,
    given_for,
    has_stars,
    is_constant,
    method,
    receiver,
)
from hvdkit.prepare.check.trace import Event
from hvdkit.prepare.port.from_single_tf import spell_for_keras_3
from hvdkit.prepare.port.plan import PortPlan, Unsure

_BINDINGS = {f"horovod.{one}": one for one in ("torch", "keras", "tensorflow")} | {"horovod.tensorflow.keras": "keras"}
_CONSTANTS = {
    "Compression.none": '"none"', "Compression.fp16": '"fp16"', "Average": '"average"', "Sum": '"sum"',
    "Adasum": '"adasum"',
}  # fmt: skip
_SENT = {"broadcast_parameters": "params", "broadcast_optimizer_state": "optimizer"}
"""By Horovod's function the argument that is sent."""
_KNOWN = {"optimizer", "named_parameters", "compression", "backward_passes_per_step", "op", "gradient_predivide_factor",
          "groups", "num_groups", "sparse_as_dense", "process_set"}  # fmt: skip
_SETTINGS = ("set_memory_growth", "set_visible_devices", "keras.backend.set_session", "tensorflow.Session",
             "builtins.len")  # fmt: skip
_RATES = {
    "LearningRateWarmupCallback": ("Warmup", {"steps_per_epoch": 3, "warmup_epochs": 1}),
    "LearningRateScheduleCallback": ("LearningRateSchedule", {
        "multiplier": 1, "start_epoch": 2, "end_epoch": 3, "staircase": 4, "steps_per_epoch": 6,
    }),
}  # fmt: skip
"""By Horovod's callback hvdkit's, and the places of the arguments that both have."""
_DROPPED = {"average_aggregated_gradients", "name"}


def port(plan: PortPlan) -> None:
    """Port a script that uses Horovod; ``Unsure`` where nothing of it can be ported for certain."""
    case = plan.case
    modules = [_BINDINGS.get(one, "") for one in case.modules]
    if elastic := case.having(Role.ELASTIC):
        raise Unsure(elastic[0].node, "it trains elastically", "port it by docs/migrate.md, and docs/elastic.md")
    if len(modules) != 1 or not modules[0]:
        found = ", ".join(case.modules) or "none"
        raise Unsure(1, f"it uses several of Horovod's modules, or one without ranks' gradients ({found})",
                     "port one framework at a time")  # fmt: skip
    plan.binding = "keras" if modules[0] == "tensorflow" and case.fits else modules[0]
    if plan.binding != "torch" and case.asks_for_keras_2:
        raise Unsure(1, "it asks for Keras 2 (TF_USE_LEGACY_KERAS or tf_keras), and hvdkit needs Keras 3",
                     "move it to Keras 3 first")  # fmt: skip
    plan.edit("swap", plan.starting("horovod."), f"{plan.world} = {plan.hk}.init()")
    _import(plan)
    if plan.binding == "torch":
        _torch(plan)
    else:
        _tensorflow(plan)
        spell_for_keras_3(plan)
    plan.replace_numbers("horovod.")


def _import(plan: PortPlan) -> None:
    """Import hvdkit where Horovod is imported."""
    code = f"import hvdkit.{plan.binding} as {plan.hk}"
    for node in plan.text.tree.body:
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if any(name.startswith("horovod.") for name in names) and plan.text.stands_alone(node):
            plan.edit("after", node, code)
            return
    plan.import_(code)


def _words(plan: PortPlan, call: ast.Call, names: dict[str, str]) -> None:
    """Horovod's call becomes hvdkit's: words for constants, and these arguments under hvdkit's names."""
    given = [keyword.value for keyword in call.keywords if keyword.arg in ("compression", "op")]
    found = {node: word for value in given for node in plan.case.reach(value) if (word := _word(plan, node))}
    for other in plan.case.nodes:
        if isinstance(other, ast.Call) and other is not call and plan.case.name(other).startswith("horovod."):
            shared = [x for value in arguments(other) for x in plan.case.reach(value) if x in found]
            if shared and plan.case.role(other) != Role.DISTRIBUTE:
                raise Unsure(shared[0], f"`{ast.unparse(shared[0])}` goes to `{ast.unparse(other.func)}`, too",
                             "give each its own: hvdkit takes words, Horovod its constants")  # fmt: skip
    for node, word in found.items():
        if isinstance(node, ast.expr):
            plan.change(node, word)
    plan.change(call.func, f"{plan.hk}.distribute")
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
    pins = [event for event in plan.case.named("cuda.set_device") if event.node.args]
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
    lists = [one for one in call.keywords if one.arg == "groups" and isinstance(one.value, ast.List)]
    odd = [one.arg for one in call.keywords if one.arg not in _KNOWN or one in lists]
    optimizer, named = argument(call, "optimizer", 0), argument(call, "named_parameters", 1)
    models = plan.models_of(named) if named is not None else _stepped(plan, optimizer)
    if odd or len(models) != 1 or optimizer is None:
        why = f"hvdkit knows no {odd[0]}=" if odd else "the text does not show which model the optimizer steps"
        raise Unsure(call, why, f"{plan.hk}.distribute(optimizer, model), which names the gradients itself")
    model = models.pop()
    _words(plan, call, {"num_groups": "groups"})
    if named is None:
        plan.add(call, model, "" if call.args else "model", place=1 if call.args else None)
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
    made = [call for call in calls if plan.case.is_torch_optimizer(call) and call.args]
    return {text for call in made for text in plan.models_of(call.args[0])}


def _broadcasts(plan: PortPlan) -> None:
    """Parameters and optimizer state, in one call where one follows the other."""
    calls = [event.node for event in plan.of("horovod.torch.", Role.BROADCAST)]
    names = {call: plan.case.name(call).rpartition(".")[2] for call in calls}
    done: list[ast.Call] = []
    for call, name in names.items():
        if name not in _SENT or call in done:
            continue
        with plan.sure():
            statement = plan.alone(call)
            beside = plan.case.block(statement)
            below = beside[beside.index(statement) + 1 :][:1]
            sent = {name: call}
            if name == "broadcast_parameters":
                following = [later for later in names if [plan.case.statement(later)] == below]
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
    words = [*models, *([plan.moved(optimizer)] if optimizer is not None else [])]
    if roots and not is_constant(roots[0], 0):
        words.append(f"root={plan.moved(roots[0])}")
    return f"{plan.hk}.broadcast_state({', '.join(words)})"


# TensorFlow: Keras' fit and loops over a tape ------------------------------------------------------------------------


def _tensorflow(plan: PortPlan) -> None:
    with plan.sure():
        _pin(plan)
    plan.each(_distribute, plan.of("horovod.", Role.DISTRIBUTE))
    plan.each(_callback, plan.of("horovod.", Role.BROADCAST_CALLBACK, Role.AVERAGE_CALLBACK, Role.WARMUP))
    for event in plan.of("horovod.", Role.LOAD_MODEL):
        plan.leave(event.node, "Horovod's load_model wraps Keras 2's optimizers",
            f"model = keras.models.load_model(path); {plan.hk}.distribute(model.optimizer)")  # fmt: skip
    with plan.sure():
        _broadcast_variables(plan)


# Step 2 ---------------------------------------------------------------------------------------------------------------


def _pin(plan: PortPlan) -> None:
    """A list of GPUs or a session's settings, and the statements that use them, become ``pin_device``."""
    case = plan.case
    made = case.named("tensorflow.ConfigProto")
    chosen = [event.node.args[0] for event in case.named("set_visible_devices") if event.node.args]
    for gpu in (one for one in chosen if case.kinds(one)):
        lists = [call for call in case.calls(gpu) if case.name(call).endswith("list_physical_devices")]
        made += [event for event in case.events if event.node in lists]
    for event in made[:1]:
        home = plan.statement(event.node)
        name = ast.unparse(home.targets[0]) if isinstance(home, ast.Assign) else ""
        beside = plan.case.block(home)
        uses = [node for node in case.nodes if isinstance(node, ast.Name) and node.id == name]
        parts = dict.fromkeys(next((x for x in (one, *case.ancestors(one)) if x in beside), None) for one in uses)
        rest = [part for part in parts if part is not home]
        if not name or not all(isinstance(one, ast.stmt) and _only_sets_up(plan, one, name) for one in rest):
            write = f"{plan.hk}.pin_device({plan.world}), right after init"
            raise Unsure(event.node, "what it makes is used for more than choosing a GPU", write)
        plan.edit("swap", home, f"{plan.hk}.pin_device({plan.use_world(home)})")
        for part in rest:
            plan.edit("remove", part)  # type: ignore[arg-type]


def _only_sets_up(plan: PortPlan, statement: ast.stmt, name: str) -> bool:
    """Whether a statement only lets memory grow and chooses GPUs."""
    if isinstance(statement, ast.Assign):
        return ast.unparse(statement.targets[0]).startswith(f"{name}.gpu_options.")
    names = [plan.case.name(node) for node in ast.walk(statement) if isinstance(node, ast.Call)]
    known = all(name.endswith(_SETTINGS) or name.startswith("horovod.") for name in names)
    plain = (ast.If, ast.For, ast.Expr)
    return known and all(isinstance(node, plain) for node in ast.walk(statement) if isinstance(node, ast.stmt))


# Steps 4, 3 and 5 -----------------------------------------------------------------------------------------------------


def _distribute(plan: PortPlan, event: Event) -> None:
    """``hvd.DistributedOptimizer`` and ``hvd.DistributedGradientTape``."""
    call = event.node
    gone = []
    for keyword in call.keywords:
        passes = keyword.arg == "backward_passes_per_step" and is_constant(keyword.value, 1)
        if keyword.arg in _DROPPED or passes:
            gone.append(keyword)
        elif keyword.arg not in ("compression", "op", "gradient_predivide_factor", "sparse_as_dense", "process_set",
                             "optimizer", "gradtape"):  # fmt: skip
            raise Unsure(call, f"hvdkit has no {keyword.arg}= here", "accumulate with the optimizer's own "
                         f"gradient_accumulation_steps=, and call {plan.hk}.distribute")  # fmt: skip
    known = plan.case.name(call).endswith((".DistributedOptimizer", ".DistributedGradientTape"))
    if has_stars(call) or len(call.args) > 1 or not known:
        raise Unsure(call, "which arguments it gets the text does not show", f"{plan.hk}.distribute(optimizer)")
    _words(plan, call, {"optimizer": "", "gradtape": ""})
    plan.drop(call, gone)


def _callback(plan: PortPlan, event: Event) -> None:
    """Horovod's callbacks."""
    call = event.node
    if has_stars(call):
        raise Unsure(call, "its arguments are not in the text", "give hvdkit's callback its arguments")
    role = plan.case.role(call)
    if role == Role.BROADCAST_CALLBACK:
        root = argument(call, "root_rank", 0)
        given = "" if root is None or is_constant(root, 0) else plan.moved(root)
        plan.change(call, f"{plan.hk}.BroadcastState({given})")
    elif role == Role.AVERAGE_CALLBACK:
        plan.change(call, f"{plan.hk}.AverageMetrics({plan.use_world(call)})")
    else:
        _rate(plan, call)


def _rate(plan: PortPlan, call: ast.Call) -> None:
    """A warmup or a schedule; hvdkit's have no initial rate, as they know the optimizer's."""
    name, places = _RATES[plan.case.name(call).rpartition(".")[2]]
    known = {*places, "initial_lr", "momentum_correction", "verbose"}
    odd = [keyword.arg for keyword in call.keywords if keyword.arg not in known]
    if odd:
        raise Unsure(call, f"hvdkit's callback has no {odd[0]}=", "leave it out, or do it in a callback of your own")
    given = [plan.use_world(call)] if name == "Warmup" else []
    for one, place in places.items():
        value = argument(call, one, place)
        if value is not None and not is_constant(value, None):
            given.append(f"{one.removeprefix('warmup_')}={plan.moved(value)}")
    plan.change(call, f"{plan.hk}.{name}({', '.join(given)})")
    plan.note(f"line {call.lineno}: hvdkit does not print the rate; fit logs it as learning_rate")


# Step 5 in a loop of your own -----------------------------------------------------------------------------------------


def _broadcast_variables(plan: PortPlan) -> None:
    """Broadcasts after the first step of a ``tf.function`` go in front of the call that takes it."""
    calls = [event.node for event in once(plan.of("horovod.", Role.BROADCAST))]
    calls = [call for call in calls if plan.case.name(call).endswith("broadcast_variables")]
    if not calls:
        return
    write = f"before the first step, once the model has its variables: {plan.hk}.broadcast_state(model, optimizer)"
    model, optimizer = "", ""
    for call in calls:
        given = argument(call, "variables", 0)
        holder = given.func if isinstance(given, ast.Call) else given
        if not isinstance(holder, ast.Attribute) or holder.attr not in ("variables", "weights"):
            raise Unsure(call, "the text does not show whose variables these are", write)
        if any(plan.case.is_keras_optimizer(call) for call in plan.case.calls(holder.value)):
            optimizer = plan.src(holder.value)
        else:
            model = plan.src(holder.value)
    statements = [plan.alone(call) for call in calls]
    beside = plan.case.block(statements[0])
    around = plan.case.parents[statements[0]]
    if not model or not all(statement in beside for statement in statements):
        raise Unsure(statements[0], "the text does not show whose variables these are", write)
    sent = f"{plan.hk}.broadcast_state({', '.join(one for one in (model, optimizer) if one)})"
    function = plan.case.function(statements[0])
    whole = isinstance(around, ast.If) and beside is around.body and not around.orelse and beside == statements
    if whole and isinstance(function, ast.FunctionDef) and isinstance(around, ast.If):
        _before_first_step(plan, around, function, model, sent, write)
    elif any("function" in ast.unparse(one) for one in getattr(function, "decorator_list", [])):
        raise Unsure(statements[0], "it is inside of a tf.function, where hvdkit cannot send", write)
    else:
        plan.edit("swap", statements[0], sent)
        for one in statements[1:]:
            plan.edit("remove", one)


def _before_first_step(
    plan: PortPlan, around: ast.If, function: ast.FunctionDef, model: str, sent: str, write: str
) -> None:
    """``if first_batch:`` in the step becomes the same condition in front of the calls of the step."""
    parameters = [*function.args.args, *function.args.kwonlyargs]
    flag = next((one for one in parameters if ast.unparse(around.test) == one.arg), None)
    calls = plan.case.calls_of.get(function, [])
    if flag is None or not calls or not plan.text.stands_alone(around):
        raise Unsure(around, "the text does not show which step is the first", write)
    made = []
    for call in calls:
        given = given_for(function, flag, call)
        if len(given) != 1:
            raise Unsure(call, "the text does not show whether it is the first step", write)
        if is_constant(given[0], False):
            continue
        statement = plan.statement(call)
        names = {word.split(".")[0] for word in sent[:-1].split("(")[1].split(", ")}
        here, there = plan.case.scope(call), plan.case.scope(around)
        if any(plan.case.lookup(name, here) is not plan.case.lookup(name, there) for name in names):
            raise Unsure(call, "the model or the optimizer is not known where the step is called", write)
        lines = [f"{build}  # makes its variables"] if (build := _built(plan, function, call, model)) else []
        code = "\n".join([*lines, sent])
        if not is_constant(given[0], True):
            code = f"if {plan.moved(given[0])}:\n" + indent(code, "    ")
        made.append((statement, code))
    for statement, code in made:
        plan.edit("before", statement, code)
    plan.edit("remove", around)


def _built(plan: PortPlan, function: FunctionNode, call: ast.Call, model: str) -> str:
    """A call of the model with what the step gives it, "" where that is not known outside of the step."""
    inside = [node for node in ast.walk(function) if isinstance(node, ast.Call) and ast.unparse(node.func) == model]
    if not inside or not inside[0].args or not isinstance(inside[0].args[0], ast.Name):
        return ""
    first = inside[0].args[0]
    parameter = next((parameter for parameter in function.args.args if parameter.arg == first.id), None)
    if parameter is not None:
        given = given_for(function, parameter, call)
        return f"{model}({plan.src(given[0])})" if len(given) == 1 else ""
    known = plan.case.lookup(first.id, plan.case.scope(first)) is plan.case.lookup(first.id, plan.case.scope(call))
    return f"{model}({first.id})" if known else ""
