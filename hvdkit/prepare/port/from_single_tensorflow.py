"""From one process with Keras' ``fit``, or a loop over a TensorFlow tape."""

from __future__ import annotations

import ast

from hvdkit.prepare.check.calls import argument, arguments, has_stars, is_constant, method, receiver
from hvdkit.prepare.check.trace import Event
from hvdkit.prepare.port import seeds
from hvdkit.prepare.port.edits import around, to, with_argument, without
from hvdkit.prepare.port.plan import PortPlan, Unsure

_RATES = {"SGD": "0.01", **dict.fromkeys(("Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl",
                                          "Lion"), "0.001")}  # fmt: skip
"""Keras 3's learning rates where none is given."""
_BY_NAME = {name.lower(): name for name in _RATES}
_FIT = ("x", "y", "batch_size", "epochs", "verbose", "callbacks", "validation_split", "validation_data", "shuffle")
_TAPE = "tensorflow.GradientTape"
_SLICES = "tensorflow.data.Dataset.from_tensor_slices"
_ARRAYS = ("numpy.", "keras.datasets.", "keras.utils.to_categorical", "keras.utils.pad_sequences", "tensorflow.cast",
           "sklearn.", "builtins.", "pandas.", "keras.preprocessing.sequence.")  # fmt: skip


def port(plan: PortPlan) -> None:
    """Port what is TensorFlow's."""
    case = plan.case
    made = [one for one in case.optimizers if one.reached]
    inner = {call for one in made for given in arguments(one.node) for call in case.calls(given)}
    plan.each(_optimizer, [one for one in made if one.node not in inner])
    if plan.adapter == "keras":
        plan.each(_compile, case.methods("compile"))
        fits = [one for one in case.fits if one.reached]
        for fit in fits[:1]:
            with plan.sure():
                seeds.of_each_rank(plan, plan.statement(fit.node))
        plan.each(_fit, fits)
        return
    with plan.sure():
        _tapes(plan)
    sources = [one for loop in case.training_loops for one in case.drawn_from(loop)]
    if not sources:
        plan.leave(case.steps[0].node, "the training data come from no data set that the text shows",
            f"{plan.hk}.shard((x, y), {plan.world}, batch_size)")  # fmt: skip
    for one in sources:
        with plan.sure():
            _data_set(plan, one)


# Steps 3 and 4 --------------------------------------------------------------------------------------------------------


def _optimizer(plan: PortPlan, event: Event) -> None:
    call = event.node
    rate = argument(call, "learning_rate", 0)
    rate = argument(call, "lr") if rate is None else rate
    last = plan.case.name(call).rpartition(".")[2]
    scale = f"{plan.hk}.scale_lr({{}}, {plan.use_world(call)})"
    if rate is None and (has_stars(call) or last not in _RATES):
        write = f"{plan.hk}.distribute({last}({scale.format('rate')}))"
        raise Unsure(call, "the text does not show its learning rate", write)
    made = plan.case.calls(rate) if rate is not None else []
    schedules = [one for one in made if plan.case.name(one).startswith("keras.") or plan.case.class_of(one)]
    if schedules and rate is not None:
        plan.leave(rate, "its learning rate is a schedule, which counts the steps of one process",
            f"scale its rates, {scale.format('rate')}, and divide its steps by {plan.world}.size")  # fmt: skip
    else:
        plan.scale(call, rate, _RATES.get(last, ""), "learning_rate", scale)
    if plan.adapter == "keras":
        plan.change(call, around(f"{plan.hk}.distribute(__)"))


def _compile(plan: PortPlan, event: Event) -> None:
    """``compile(optimizer="adam")``."""
    call = event.node
    given = argument(call, "optimizer", 0)
    if not plan.case.holds_keras_model(receiver(call)) or not isinstance(given, ast.Constant):
        return
    name = _BY_NAME.get(str(given.value).lower())
    if name is None:
        raise Unsure(given, f"{given.value!r} is no optimizer that is known", f"{plan.hk}.distribute(optimizer)")
    rate = f"{plan.hk}.scale_lr({_RATES[name]}, {plan.use_world(call)})"
    plan.change(given, to(f"{plan.hk}.distribute({_keras(plan)}.optimizers.{name}({rate}))"))


def _keras(plan: PortPlan) -> str:
    """How the script names Keras."""
    if known := plan.called("keras"):
        return known
    name = plan.free("keras", "keras_3")
    plan.import_("import keras" if name == "keras" else f"import keras as {name}")
    return name


def _tapes(plan: PortPlan) -> None:
    """The tapes whose gradients are applied; and the broadcast before the first step."""
    case, hk = plan.case, plan.hk
    write = f"tape = {hk}.distribute(tape); {hk}.broadcast_state(model, optimizer) once the model has its variables"
    for update in case.updates:
        if update.gradients is None:
            raise Unsure(update.event.node, "the text does not show which gradients are applied", write)
        found = [one for one in case.calls(update.gradients, through=True) if method(one) == "gradient"]
        outer = [one for one in found if not any(one in case.calls(arg, through=True) for other in found
                                                 if other is not one for arg in other.args)]  # fmt: skip
        tapes = {tape for one in outer for tape in case.made_by((_TAPE,), receiver(one))}
        trained = [one.args[1] for one in outer if len(one.args) > 1 and isinstance(one.args[1], ast.Attribute)]
        models = {ast.unparse(one.value) for one in trained if "trainable" in one.attr}
        makers = [one for one in case.optimizers if one.node in case.calls(update.optimizer)]
        if len(tapes) != 1 or len(models) != 1 or len(makers) != 1:
            raise Unsure(update.event.node, "the text does not show one tape, one model and one optimizer", write)
        model, optimizer = models.pop(), plan.src(update.optimizer)
        first = plan.first_step(plan.statement(makers[0].node), makers[0])
        if first is None or not _is_built(plan, model):
            raise Unsure(update.event.node, "the text does not show where the model has its variables", write)
        plan.change(tapes.pop(), around(f"{hk}.distribute(__)"))
        seeds.of_each_rank(plan, first)
        plan.edit("before", first, f"{hk}.broadcast_state({model}, {optimizer})")


def _is_built(plan: PortPlan, model: str) -> bool:
    """Whether a model has its variables as soon as it is made."""
    case = plan.case
    for call in plan.makers(model):
        name = case.name(call)
        functional = name in ("keras.Model", "keras.models.Model") and len(arguments(call)) >= 2
        layers = argument(call, "layers", 0) if name in ("keras.Sequential", "keras.models.Sequential") else None
        first = layers.elts[0] if isinstance(layers, (ast.List, ast.Tuple)) and layers.elts else None
        shaped = isinstance(first, ast.Call) and (
            case.name(first).endswith((".Input", ".InputLayer")) or argument(first, "input_shape") is not None
        )
        if functional or shaped or name.startswith("keras.applications."):
            return True
    return False


# Step 7 and 5 in fit --------------------------------------------------------------------------------------------------


def _fit(plan: PortPlan, event: Event) -> None:
    """Give ``fit`` sharded data and the callbacks of the steps; raises Unsure where its data are not known."""
    call, case, hk = event.node, plan.case, plan.hk
    write = f"fit({hk}.shard((x, y), {plan.world}, batch_size), callbacks=[{hk}.BroadcastState()])"
    x, y = argument(call, "x", 0), argument(call, "y", 1)
    if x is None or has_stars(call) or len(call.args) > len(_FIT) or case.where(event) == "unknown":
        raise Unsure(call, "what fit is given the text does not show", write)
    if event.loops:
        raise Unsure(call, "fit runs in a loop, where hk.shard would begin anew each time", write)
    sources = case.calls(x, through=True)
    others = [one for one in sources if not case.name(one).startswith(_ARRAYS)]  # calls that may make no array
    strange = any(case.name(one) or case.class_of(one) or case.is_opaque(one) for one in others)
    if y is None and any(case.name(one).startswith("tensorflow.data.") for one in sources):
        _data_set(plan, x)
        steps = argument(call, "steps_per_epoch")
        if steps is not None and not is_constant(steps, None):
            whole = "__" if isinstance(steps, (ast.Constant, ast.Name, ast.Attribute, ast.Call)) else "int(__)"
            plan.change(steps, around(f"max(1, {whole} // {plan.use_world(call)}.size)"))
    elif y is not None or (sources and not strange):
        _arrays(plan, call, x, y, write)
    else:
        raise Unsure(call, "the text does not show what the training data are", write)
    callbacks = argument(call, "callbacks", 5)
    plan.use_world(call)
    if callbacks is None:
        plan.change(call, with_argument(f"[{hk}.BroadcastState()]", "callbacks"))
    elif isinstance(callbacks, ast.List):
        plan.change(callbacks, to(f"[{', '.join([f'{hk}.BroadcastState()', *map(plan.src, callbacks.elts)])}]"))
    else:
        plan.change(callbacks, around(f"[{hk}.BroadcastState(), *__]"))


def _arrays(plan: PortPlan, call: ast.Call, x: ast.expr, y: ast.expr | None, write: str) -> None:
    """``fit(x, y, batch_size=..., validation_split=...)`` of arrays."""
    given = {name: argument(call, name, place) for place, name in enumerate(_FIT)}
    split, batch, order = given["validation_split"], given["batch_size"], given["shuffle"]
    weights = argument(call, "sample_weight")
    arrays = [one for one in (x, y, weights) if one is not None]
    plain = all(isinstance(one, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)) for one in arrays)
    if argument(call, "steps_per_epoch") is not None or not plain:
        raise Unsure(call, "fit counts steps by itself, or is given more than plain arrays", write)
    parts = [plan.src(one) for one in arrays]
    held = ""
    if split is not None and not is_constant(split, 0.0):
        statement = plan.statement(call)
        if not all(isinstance(one, ast.Name) for one in arrays):
            raise Unsure(call, "validation_split of what has no name", "split the arrays, and give validation_data=")
        held = plan.free("n_train", "n_fit", "hvdkit_n_train")
        plan.edit("before", statement, f"{held} = int(len({parts[0]}) * (1.0 - {plan.src(split)}))")
        last = f"({', '.join(f'{one}[{held}:]' for one in parts)})"
        parts = [f"{one}[:{held}]" for one in parts]
    data = parts[0] if len(parts) == 1 else f"({', '.join(parts)})"
    options = f", shuffle={plan.src(order)}" if order is not None and not is_constant(order, True) else ""
    size = plan.src(batch) if batch is not None else "32"
    world = plan.use_world(call)
    plan.rename(x, "" if x in call.args else "x", f"{plan.hk}.shard({data}, {world}, {size}{options})")
    gone = []
    for place, one in enumerate(arguments(call)):
        if one in (y, weights, batch, order):
            gone.append(place)
        elif one is split and held:
            plan.rename(split, "validation_data", last)
        elif 2 <= place < len(call.args):
            plan.rename(one, _FIT[place])
    if gone:
        plan.change(call, without(tuple(gone)))


def _data_set(plan: PortPlan, node: ast.expr) -> None:
    """A ``tf.data`` pipeline that begins with arrays: each rank takes as many of its samples, one in every ``size``."""
    case, world = plan.case, plan.world
    shard = f"shard({world}.size, {world}.rank)"
    write = f"dataset.{shard}, in front of shuffle and batch, of as many samples on every rank"
    sources = case.tf_sources(node)
    chain = {method(one) for one in case.calls(node, through=True) if not case.name(one)}
    partial = chain & {"take", "skip", "shard", "window", "interleave"}
    if [case.name(one) for one in sources] != [_SLICES] or partial:
        raise Unsure(node, "the text does not show a pipeline that begins with arrays and trains on all of them", write)
    source = sources[0]
    evaluated = [argument(one.node, "validation_data", 7) for one in case.fits]
    evaluated += [argument(one.node, "x", 0) for one in [*case.evaluations, *case.methods("predict")]]
    looped = [call for loop in case.evaluation_loops for call in case.sources(loop)]
    if source in [*looped, *case.calls(*evaluated, through=True)]:
        raise Unsure(source, "the same data are trained and evaluated on", write)
    plan.use_world(source)
    plan.change(source, around(f"__.batch({world}.size, drop_remainder=True).unbatch().{shard}"))
