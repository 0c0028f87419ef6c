"""From one process in TensorFlow: Keras' fit, loops over a tape, and spellings that Keras 3 does not know."""

from __future__ import annotations

import ast
import re

from hvdkit.prepare.check.source import argument, arguments, has_stars, is_constant, method, receiver
from hvdkit.prepare.check.trace import Event
from hvdkit.prepare.port import each_rank
from hvdkit.prepare.port.edits import starred
from hvdkit.prepare.port.plan import LARGER, PortPlan, Unsure

_KERAS_RATES = {"SGD": "0.01", **dict.fromkeys(
    ("Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl", "Lion"), "0.001"
)}  # fmt: skip
"""Keras 3's learning rates where none is given."""
_BY_NAME = {name.lower(): name for name in _KERAS_RATES}
_FIT = ("x", "y", "batch_size", "epochs", "verbose", "callbacks", "validation_split", "validation_data", "shuffle")
_TAPE = "tensorflow.GradientTape"
_SLICES = "tensorflow.data.Dataset.from_tensor_slices"
_ARRAYS = ("numpy.", "keras.datasets.", "keras.utils.to_categorical", "keras.utils.pad_sequences", "tensorflow.cast",
           "sklearn.", "builtins.", "pandas.", "keras.preprocessing.sequence.")  # fmt: skip
_NOT_IN_3 = {"workers", "use_multiprocessing", "max_queue_size"}


def port(plan: PortPlan) -> None:
    """Steps 3, 4, 5 and 7, of ``fit`` or of a tape."""
    case = plan.case
    made = [event for event in case.optimizers if event.reached]
    inner = {call for one in made for given in arguments(one.node) for call in case.calls(given)}
    plan.each(_keras_optimizer, [event for event in made if event.node not in inner])
    if plan.binding == "keras":
        plan.each(_compile, case.methods("compile"))
        fits = [event for event in case.fits if event.reached]
        for fit in fits[:1]:
            with plan.sure():
                each_rank.own_numbers(plan, plan.statement(fit.node))
        plan.each(_fit, fits)
    else:
        with plan.sure():
            _tapes(plan)
        sources = [one for loop in case.training_loops for one in case.drawn_from(loop)]
        if not sources:
            plan.leave(case.steps[0].node, "the training data come from no data set that the text shows",
                f"{plan.hk}.shard((x, y), {plan.world}, batch_size)")  # fmt: skip
        for one in sources:
            with plan.sure():
                _data_set(plan, one)
    spell_for_keras_3(plan)


# Steps 3 and 4 --------------------------------------------------------------------------------------------------------


def _keras_optimizer(plan: PortPlan, event: Event) -> None:
    call = event.node
    rate = argument(call, "learning_rate", 0)
    rate = argument(call, "lr") if rate is None else rate
    last = plan.case.name(call).rpartition(".")[2]
    scale = f"{plan.hk}.scale_lr({{}}, {plan.use_world(call)})"
    if rate is None and (has_stars(call) or last not in _KERAS_RATES):
        write = f"{plan.hk}.distribute({last}({scale.format('rate')}))"
        raise Unsure(call, "the text does not show its learning rate", write)
    made = plan.case.calls(rate) if rate is not None else []
    schedules = [call for call in made if plan.case.name(call).startswith("keras.") or plan.case.class_of(call)]
    if schedules and rate is not None:
        plan.leave(rate, "its learning rate is a schedule, which counts the steps of one process",
            f"scale its rates, {scale.format('rate')}, and divide its steps by {plan.world}.size")  # fmt: skip
    else:
        plan.scale(call, rate, _KERAS_RATES.get(last, ""), "learning_rate", scale)
        plan.note(LARGER)
    if plan.binding == "keras":
        plan.change(call, f"{plan.hk}.distribute(__)")


def _compile(plan: PortPlan, event: Event) -> None:
    """``compile(optimizer="adam")``."""
    call = event.node
    given = argument(call, "optimizer", 0)
    if not plan.case.holds_keras_model(receiver(call)) or not isinstance(given, ast.Constant):
        return
    name = _BY_NAME.get(str(given.value).lower())
    if name is None:
        raise Unsure(given, f"{given.value!r} is no optimizer that is known", f"{plan.hk}.distribute(optimizer)")
    rate = f"{plan.hk}.scale_lr({_KERAS_RATES[name]}, {plan.use_world(call)})"
    keras = plan.called("keras")
    if not keras:
        keras = plan.free("keras", "keras_3")
        plan.import_("import keras" if keras == "keras" else f"import keras as {keras}")
    plan.change(given, f"{plan.hk}.distribute({keras}.optimizers.{name}({rate}))")
    plan.note(LARGER)


def _tapes(plan: PortPlan) -> None:
    """The tapes whose gradients are applied; and the broadcast before the first step."""
    case, hk = plan.case, plan.hk
    write = f"tape = {hk}.distribute(tape); {hk}.broadcast_state(model, optimizer) once the model has its variables"
    for update in case.updates:
        if update.gradients is None:
            raise Unsure(update.event.node, "the text does not show which gradients are applied", write)
        found = [call for call in case.calls(update.gradients, through=True) if method(call) == "gradient"]
        outer = [one for one in found if not any(one in case.calls(arg, through=True) for other in found
                                                 if other is not one for arg in other.args)]  # fmt: skip
        tapes = {tape for one in outer for tape in case.made_by((_TAPE,), receiver(one))}
        trained = [one.args[1] for one in outer if len(one.args) > 1 and isinstance(one.args[1], ast.Attribute)]
        models = {ast.unparse(one.value) for one in trained if "trainable" in one.attr}
        makers = [event for event in case.optimizers if event.node in case.calls(update.optimizer)]
        if len(tapes) != 1 or len(models) != 1 or len(makers) != 1:
            raise Unsure(update.event.node, "the text does not show one tape, one model and one optimizer", write)
        model, optimizer = models.pop(), plan.src(update.optimizer)
        first = plan.first_step(plan.statement(makers[0].node), makers[0])
        if first is None or not _is_built(plan, model):
            raise Unsure(update.event.node, "the text does not show where the model has its variables", write)
        plan.change(tapes.pop(), f"{hk}.distribute(__)")
        each_rank.own_numbers(plan, first)
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
    others = [call for call in sources if not case.name(call).startswith(_ARRAYS)]  # calls that may make no array
    strange = any(case.name(one) or case.class_of(one) or case.is_opaque(one) for one in others)
    if y is None and any(case.name(call).startswith("tensorflow.data.") for call in sources):
        _data_set(plan, x)
        steps = argument(call, "steps_per_epoch")
        if steps is not None and not is_constant(steps, None):
            whole = "__" if isinstance(steps, (ast.Constant, ast.Name, ast.Attribute, ast.Call)) else "int(__)"
            plan.change(steps, f"max(1, {whole} // {plan.use_world(call)}.size)")
    elif y is not None or (sources and not strange):
        _arrays(plan, call, x, y, write)
    else:
        raise Unsure(call, "the text does not show what the training data are", write)
    callbacks = argument(call, "callbacks", 5)
    plan.use_world(call)
    if callbacks is None:
        plan.add(call, f"[{hk}.BroadcastState()]", "callbacks")
    elif is_constant(callbacks, None):
        plan.change(callbacks, f"[{hk}.BroadcastState()]")
    elif isinstance(callbacks, ast.Call) and case.name(callbacks).startswith("keras.callbacks."):
        plan.change(callbacks, f"[{hk}.BroadcastState(), __]")
    elif isinstance(callbacks, ast.List):
        plan.begin(callbacks, f"{hk}.BroadcastState()")
    else:
        maybe = any(is_constant(node, None) for node in case.reach(callbacks))
        given = "(__ or [])" if maybe and not isinstance(callbacks, ast.BoolOp) else starred(callbacks)
        plan.change(callbacks, f"[{hk}.BroadcastState(), *{given}]")


def _arrays(plan: PortPlan, call: ast.Call, x: ast.expr, y: ast.expr | None, write: str) -> None:
    """``fit(x, y, batch_size=..., validation_split=...)`` of arrays."""
    given = {name: argument(call, name, place) for place, name in enumerate(_FIT)}
    split, batch, order = given["validation_split"], given["batch_size"], given["shuffle"]
    weights = argument(call, "sample_weight")
    arrays = [one for one in (x, y, weights) if one is not None]
    plain = all(isinstance(one, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)) for one in arrays)
    if argument(call, "steps_per_epoch") is not None or not plain:
        raise Unsure(call, "fit counts steps by itself, or is given more than plain arrays", write)
    parts = [plan.moved(one) for one in arrays]
    held = ""
    if split is not None and not is_constant(split, 0.0):
        statement = plan.statement(call)
        if not all(isinstance(one, ast.Name) for one in arrays):
            raise Unsure(call, "validation_split of what has no name", "split the arrays, and give validation_data=")
        held = plan.free("n_train", "n_fit", "hvdkit_n_train")
        plan.edit("before", statement, f"{held} = int(len({parts[0]}) * (1.0 - {plan.src(split)}))")
        last = f"({', '.join(f'{part}[{held}:]' for part in parts)})"
        parts = [f"{part}[:{held}]" for part in parts]
    data = parts[0] if len(parts) == 1 else f"({', '.join(parts)})"
    options = f", shuffle={plan.src(order)}" if order is not None and not is_constant(order, True) else ""
    size = plan.src(batch) if batch is not None else "32"
    world = plan.use_world(call)
    plan.rename(x, "" if x in call.args else "x", f"{plan.hk}.shard({data}, {world}, {size}{options})")
    gone: list[ast.expr | ast.keyword] = []
    for place, one in enumerate(arguments(call)):
        if one in (y, weights, batch, order):
            gone.append(one if place < len(call.args) else call.keywords[place - len(call.args)])
        elif one is split and held:
            plan.rename(split, "validation_data", last)
        elif 2 <= place < len(call.args):
            plan.rename(one, _FIT[place])
    plan.drop(call, gone)


def _data_set(plan: PortPlan, node: ast.expr) -> None:
    """A ``tf.data`` pipeline that begins with arrays: each rank takes as many of its samples, one in every ``size``."""
    case, world = plan.case, plan.world
    shard = f"shard({world}.size, {world}.rank)"
    write = f"dataset.{shard}, in front of shuffle and batch, of as many samples on every rank"
    sources = case.tf_sources(node)
    chain = {method(call) for call in case.calls(node, through=True) if not case.name(call)}
    partial = chain & {"take", "skip", "shard", "window", "interleave"}
    if [case.name(call) for call in sources] != [_SLICES] or partial:
        raise Unsure(node, "the text does not show a pipeline that begins with arrays and trains on all of them", write)
    source = sources[0]
    evaluated = [argument(event.node, "validation_data", 7) for event in case.fits]
    evaluated += [argument(one.node, "x", 0) for one in [*case.evaluations, *case.methods("predict")]]
    looped = [call for loop in case.evaluation_loops for call in case.sources(loop)]
    if source in [*looped, *case.calls(*evaluated, through=True)]:
        raise Unsure(source, "the same data are trained and evaluated on", write)
    plan.use_world(source)
    plan.change(source, f"__.batch({world}.size, drop_remainder=True).unbatch().{shard}")


# Keras 3 --------------------------------------------------------------------------------------------------------------


def spell_for_keras_3(plan: PortPlan) -> None:
    """Replace spellings of Keras 2, where what replaces them is certain."""
    case = plan.case
    if case.asks_for_keras_2:
        return
    plan.each(_without_removed, case.methods("compile"))
    plan.each(_learning_rate, (event for event in case.events if case.is_keras_optimizer(event.node)))
    plan.each(_generator, case.methods("fit_generator", "evaluate_generator", "predict_generator"))
    plan.each(_file_of, case.named("keras.callbacks.ModelCheckpoint"))
    for node in case.nodes:
        match node:
            case ast.ImportFrom(
                module="keras.preprocessing.image", names=[ast.alias(name="ImageDataGenerator", asname=other)]
            ):
                alias = f" as {other}" if other else ""
                with plan.sure():
                    plan.edit("swap", node, f"from tensorflow.{node.module} import ImageDataGenerator{alias}")


def _without_removed(plan: PortPlan, event: Event) -> None:
    call = event.node
    if not has_stars(call):
        plan.drop(call, [keyword for keyword in call.keywords if keyword.arg == "experimental_run_tf_function"])


def _learning_rate(plan: PortPlan, event: Event) -> None:
    rate = argument(event.node, "lr")
    if rate is not None:
        plan.rename(rate, "learning_rate")


def _generator(plan: PortPlan, event: Event) -> None:
    """``fit_generator(flow, steps_per_epoch=...)`` is ``fit``."""
    call = event.node
    odd = [keyword.arg for keyword in call.keywords if keyword.arg in _NOT_IN_3]
    if len(call.args) > 1 or odd or has_stars(call) or not isinstance(call.func, ast.Attribute):
        raise Unsure(call, f"`{method(call)}` has arguments that Keras 3's method has not",
                     f"call {method(call).removesuffix('_generator')} with x= and keywords")  # fmt: skip
    plan.change(call.func, f"{plan.moved(call.func.value)}.{method(call).removesuffix('_generator')}")
    given = argument(call, "generator")
    if given is not None:
        plan.rename(given, "x")


def _file_of(plan: PortPlan, event: Event) -> None:
    """Keras 3 writes whole models to ``.keras`` and weights to ``.weights.h5``, and refuses other endings."""
    path = argument(event.node, "filepath", 0)
    weights = argument(event.node, "save_weights_only", 4)
    text = path.value if isinstance(path, ast.Constant) else None
    if path is None or not isinstance(text, str) or not text.endswith((".h5", ".hdf5")):
        return
    if weights is not None and not is_constant(weights, False):
        if text.endswith(".weights.h5") and isinstance(weights, ast.Constant):
            return
        raise Unsure(event.node, f"Keras 3 refuses the name {text!r} for weights", "end it with .weights.h5")
    plan.change(path, re.sub(r"\.(h5|hdf5)(['\"]+)$", r".keras\2", plan.src(path)))
    plan.note(f"line {path.lineno}: Keras 3 writes whole models to .keras files; the name ends so now")
