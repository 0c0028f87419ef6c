"""From a script that trains in one process: what all frameworks have in common, PyTorch's loops, and TensorFlow."""

from __future__ import annotations

import ast
import re

from hvdkit.prepare.check import find
from hvdkit.prepare.check.calls import argument, arguments, has_stars, is_constant, method, receiver
from hvdkit.prepare.check.libraries import LOADERS
from hvdkit.prepare.check.trace import Event
from hvdkit.prepare.port import keras_2, on_root, seeds
from hvdkit.prepare.port.edits import starred
from hvdkit.prepare.port.plan import PortPlan, Unsure, is_text

RATES = {"SGD": "0.001", "Adam": "0.001", "AdamW": "0.001", "Adadelta": "1.0", "Adagrad": "0.01", "RMSprop": "0.01",
         "Adamax": "0.002", "NAdam": "0.002", "RAdam": "0.001", "ASGD": "0.01"}  # fmt: skip
"""The learning rates of torch.optim's optimizers where none is given."""
_SAMPLERS = [f"torch.utils.data.{one}Sampler" for one in ("Random", "WeightedRandom", "SubsetRandom", "Sequential")]
_KERAS_RATES = {"SGD": "0.01", **dict.fromkeys(
    ("Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl", "Lion"), "0.001"
)}  # fmt: skip
"""Keras 3's learning rates where none is given."""
_BY_NAME = {name.lower(): name for name in _KERAS_RATES}
_FIT = ("x", "y", "batch_size", "epochs", "verbose", "callbacks", "validation_split", "validation_data", "shuffle")
_LARGER = (
    "each rank takes batches of the script's size: on 2 ranks the global batch and the learning rate are twice the "
    "script's (docs/same_result.md keeps both)"
)
_TAPE = "tensorflow.GradientTape"
_SLICES = "tensorflow.data.Dataset.from_tensor_slices"
_ARRAYS = ("numpy.", "keras.datasets.", "keras.utils.to_categorical", "keras.utils.pad_sequences", "tensorflow.cast",
           "sklearn.", "builtins.", "pandas.", "keras.preprocessing.sequence.")  # fmt: skip


def port(plan: PortPlan) -> None:
    """Port a script that no library distributes; ``Unsure`` where nothing of it can be ported for certain."""
    case = plan.case
    if case.others:
        raise Unsure(1, f"{case.others[0]} distributes it", "take that out first, or use docs/migrate.md")
    steps = [event for event in case.steps if event.reached]
    if not steps:
        raise Unsure(1, "nothing that trains is found in this text", "port the script that starts the training")
    torch = [event for event in steps if method(event.node) in ("backward", "step")]
    plan.binding = "torch" if torch else "keras" if case.fits else "tensorflow"
    _start(plan, steps[0])
    if plan.binding == "torch":
        _torch(plan)
    else:
        _tensorflow(plan)
        keras_2.port(plan)
    plan.each(_download, [*find.downloads(case), *(event for event in case.events if _fetches(plan, event))])
    on_root.port(plan)
    held = [argument(fit.node, name, _FIT.index(name)) for fit in case.fits for name in _FIT if "validation" in name]
    if any(held) or case.evaluation_loops or case.evaluations:
        plan.note("every rank evaluates on all validation data, as before; docs/quickstart.md divides them")


def _start(plan: PortPlan, first: Event) -> None:
    """``init`` and ``pin_device``: at the beginning of the function in which the training starts, or of the script."""
    code = f"{plan.world} = {plan.hk}.init()\n{plan.hk}.pin_device({plan.world})"
    functions = plan.case.callees(first.stack[0]) if first.stack else []
    main = functions[0] if len(functions) == 1 and _holds_all(plan, first.stack[0]) else None
    plan.import_(f"import hvdkit.{plan.binding} as {plan.hk}")
    if isinstance(main, ast.FunctionDef):
        start = plan.statement(next(statement for statement in main.body if not is_text(statement)))
    else:
        body, last = plan.text.tree.body, plan.last_import()
        below = body if last is None else body[body.index(last) + 1 :]
        begins = [one for one in below if not is_text(one)]
        if not begins:
            raise Unsure(first.node, "the text does not show where the script begins", "call hk.init() first")
        start, code = plan.statement(begins[0]), f"\n{code}"
    plan.start = start
    plan.edit("before", start, "\n".join([code, *seeds.same_data(plan, start)]))


def _holds_all(plan: PortPlan, call: ast.Call) -> bool:
    """Whether all that trains, loads data, writes or prints happens in one call that the module makes: ``main()``."""
    case = plan.case
    loaders = [event for event in case.events if case.name(event.node) in LOADERS]
    used = [*case.steps, *case.optimizers, *loaders, *on_root.events(plan), *seeds.drawn_data(plan)]
    inside = all(call in one.stack or not one.reached for one in used)
    return inside and case.function(call) is None


# PyTorch --------------------------------------------------------------------------------------------------------------


def _torch(plan: PortPlan) -> None:
    case = plan.case
    made = [event for event in case.optimizers if event.reached]
    for event in made[:1]:
        with plan.sure():
            home = plan.assigned(event.node)
            if home is not None:
                seeds.of_each_rank(plan, plan.first_step(home, event) or home)
    plan.each(_optimizer, made)
    if not case.optimizers:
        raise Unsure(case.steps[0].node, "no optimizer is made in this text", f"{plan.hk}.distribute(optimizer, model)")
    loaders = {call for loop in case.training_loops for call in case.sources(loop) if case.name(call) in LOADERS}
    plan.each(_loader, [event for event in case.events if event.node in loaders])
    if not loaders:
        write = f"{plan.hk}.shard(dataset, {plan.world}, batch_size), or draw them by a seed of each rank"
        plan.leave(case.steps[0].node, "the training data come from no DataLoader that the text shows", write)
    _differing(plan)


def _optimizer(plan: PortPlan, event: Event) -> None:
    """Steps 3, 4 and 5, around the statement that makes an optimizer."""
    call, hk = event.node, plan.hk
    write = f"{hk}.distribute(optimizer, model); {hk}.broadcast_state(model, optimizer)"
    home = plan.assigned(call)
    if home is None or not call.args:
        raise Unsure(call, "the optimizer is not simply given a name", write)
    models = {_whole(plan, text) for text in plan.models_of(call.args[0])}
    if len(models) != 1:
        raise Unsure(call, f"it steps the parameters of {len(models)} models, as far as the text shows", write)
    if event.loops:
        raise Unsure(call, "an optimizer is made in a loop", write)
    rate, name = argument(call, "lr", 1), plan.case.name(call)
    default = RATES.get(name.rpartition(".")[2], "") if name.startswith("torch.optim.") and not has_stars(call) else ""
    if rate is None and not default:
        raise Unsure(call, "the text does not show its learning rate", f"lr={hk}.scale_lr(lr, {plan.world})")
    scaled = f"{hk}.scale_lr({{}}, {plan.use_world(call)})"
    for group in plan.case.reach(call.args[0]):
        if isinstance(group, ast.Dict):
            for key, value in zip(group.keys, group.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "lr":
                    plan.change(value, scaled.format("__"))
    plan.scale(call, rate, default, "lr", scaled)
    plan.note(_LARGER)
    model = models.pop()
    plan.distribute(home, event, model, f"{hk}.sync_batch_norm({model})\n" if _normalizes(plan, call, model) else "")


def _whole(plan: PortPlan, text: str) -> str:
    """``model`` for ``model.classifier``, or for ``head`` of ``Sequential(body, head)``: all of it is broadcast."""
    for node in plan.case.nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=whole)], value=ast.Call() as made) if whole != text:
                parts = [one for given in arguments(made) for one in getattr(given, "elts", [given])]
                if _is_module(plan, made) and text in map(ast.unparse, parts):
                    return _whole(plan, whole)
    base = text.split(".")[0]
    return base if base != "self" and base in plan.case.holders else text


def _is_module(plan: PortPlan, call: ast.Call) -> bool:
    """Whether a call makes a module that may hold others."""
    own = plan.case.class_of(call)
    bases = [ast.unparse(base) for base in own.bases] if own is not None else []
    return any(one.endswith("Module") for one in bases) or plan.case.name(call) == "torch.nn.Sequential"


def _normalizes(plan: PortPlan, optimizer: ast.Call, model: str) -> bool:
    """Whether a model has BatchNorm for certain; where it may have some, that is listed."""
    case = plan.case
    made = plan.makers(model)
    if any("BatchNorm" in ast.unparse(case.class_of(call) or call) for call in made):
        return True
    unread = ("torchvision.models", "timm.", "torch.hub")
    hidden = any(case.is_opaque(call) or case.name(call).startswith(unread) for call in made)
    if hidden or any("BatchNorm" in name for name in case.used):
        plan.leave(optimizer, f"{model} may hold BatchNorm, whose statistics would be each rank's",
            f"{plan.hk}.sync_batch_norm({model}), where it does: they are those of the whole batch then")  # fmt: skip
    return False


_OWN = re.compile(r"loss|acc|metric|score|patience|best|stop|error|counter")
"""Names of what one rank sees of its own part."""


def _differing(plan: PortPlan) -> None:
    """What may differ between ranks, or be meant for one device, and keeps them from being one training."""
    hk, world = plan.hk, plan.world
    mean = f"{hk}.average_metrics({{'loss': loss}}, {world})['loss'], the same on every rank"
    for event in plan.case.events:
        name = plan.case.name(event.node)
        if name.endswith(".ReduceLROnPlateau"):
            plan.leave(event.node, "it sets the rate by a number that may be one rank's own", mean)
        if name.endswith(".DataParallel") or (method(event.node) == "cuda" and event.node.args and not name):
            plan.leave(event.node, "it chooses devices by their numbers", f"device = {hk}.pin_device({world})")
        if name.endswith((".OneCycleLR", ".CyclicLR")) and event.reached:
            plan.leave(event.node, f"{name.rpartition('.')[2]} sets rates of its own, unscaled",
                f"max_lr={hk}.scale_lr(max_lr, {world}); count steps in len(loader)")  # fmt: skip
    for node in plan.case.nodes:
        match node:
            case ast.Constant(value=str(text)) if re.fullmatch(r"cuda:\d+", text):
                plan.leave(node, f"{text!r} is the same GPU on every rank", f"device = {hk}.pin_device({world})")
            case ast.If(test=test, body=[*_, ast.Break() | ast.Return()]) if _OWN.search(ast.unparse(test)):
                if any(node in ast.walk(loop) for event in plan.case.steps for loop in event.loops):
                    plan.leave(node, "it may end the training on one rank alone, and the others would wait", mean)
            case ast.Assign(targets=[ast.Subscript(slice=ast.Constant(value="lr"))]):
                write = f"{hk}.scale_lr(rate, {world}), unless it is reckoned from the scaled one"
                plan.leave(node, "it sets a learning rate of its own", write)


def _loader(plan: PortPlan, event: Event) -> None:
    """``DataLoader(...)`` of a loop that trains becomes ``shard(...)``."""
    case, call, hk = plan.case, event.node, plan.hk
    write = f"{hk}.shard(dataset, {plan.world}, batch_size, shuffle=True)"
    names = {keyword.arg for keyword in call.keywords}
    given = argument(call, "dataset", 0)
    if event.loops:
        raise Unsure(call, "the loader is made anew in a loop, so that each pass would have the same order", write)
    if (
        given is None
        or not call.args
        or len(call.args) > 3
        or any(isinstance(value, ast.Starred) for value in call.args)
    ):
        raise Unsure(call, "which data it loads the text does not show", write)
    if any(call in case.sources(loop) for loop in case.evaluation_loops):
        raise Unsure(call, "the same loader trains and evaluates", f"{write} for training, a DataLoader for the rest")
    sampler = argument(call, "sampler")
    ordered = sampler is not None and not is_constant(sampler, None)
    known = sampler is None or all(case.name(call) in _SAMPLERS for call in case.calls(sampler))
    if argument(call, "batch_sampler") is not None or (ordered and not known):
        raise Unsure(call, "its sampler is not one that hk.shard is known to divide", f"{write}, or sampler=")
    own = [klass for call in case.calls(given) if (klass := case.class_of(call)) is not None]
    if any("Iterable" in ast.unparse(base) for klass in own for base in klass.bases):
        raise Unsure(call, "an IterableDataset must yield each rank's own samples", "yield every size-th of them")
    draws = ("random_split", "randperm", "permutation")
    drawn = [call for call in case.calls(given, through=True) if case.name(call).endswith(draws)]
    seeded = {one.node for one in seeds.drawn_data(plan)}  # at the script's start, if not by itself
    if not seeded.issuperset(drawn) and not case.fixed_seed([given]):
        raise Unsure(call, "the data are split at random, on each rank in another way", "torch.manual_seed(0) before")
    stars = [keyword for keyword in call.keywords if keyword.arg is None]
    plan.change(call.func, f"{hk}.shard")
    if len(call.args) == 3:
        plan.rename(call.args[2], "shuffle")
    drops = [
        keyword for keyword in call.keywords if keyword.arg == "drop_last" or (keyword.arg == "sampler" and not ordered)
    ]
    plan.drop(call, drops)
    if not any(keyword.arg == "drop_last" and is_constant(keyword.value, True) for keyword in call.keywords):
        part = "a last partial batch, which the script would train on, is left out, and len(loader) does not count it"
        plan.note(f"{part}: remainder='exact' keeps it (docs/same_result.md)")
    plan.add(call, plan.use_world(call), place=1)
    shuffles = len(call.args) == 3 or "shuffle" in names
    if not stars:
        if len(call.args) < 2 and "batch_size" not in names:
            plan.add(call, "1", "batch_size")
        if not shuffles and not ordered:
            plan.add(call, "False", "shuffle")
        if shuffles and not ordered and not is_constant(argument(call, "shuffle", 2), False):
            seeds.order(plan, event)
    elif not shuffles:
        plan.change(stars[0].value, f'{{"shuffle": False, **{starred(stars[0].value)}}}')
    _whole_lengths(plan, call, given)


def _whole_lengths(plan: PortPlan, call: ast.Call, given: ast.expr) -> None:
    """Sums over this rank's part that are divided by the number of all samples."""
    for node in plan.case.nodes:
        match node:
            case ast.BinOp(op=ast.Div(), right=right) | ast.AugAssign(op=ast.Div(), value=right):
                sets = [node for node in ast.walk(right) if isinstance(node, ast.Attribute) and node.attr == "dataset"]
                counts = f"len({ast.unparse(given)})" in map(ast.unparse, ast.walk(right))
                if counts or any(call in plan.case.calls(one.value) for one in sets):
                    plan.leave(node, f"`{ast.unparse(right)}` counts all samples, and each rank sums over its part",
                        f"{plan.hk}.average_metrics({{'loss': (total, count)}}, {plan.world})")  # fmt: skip


def _fetches(plan: PortPlan, event: Event) -> bool:
    """Whether a call loads a data set of Keras, which it downloads to where every rank looks for it."""
    return event.reached and re.fullmatch(r"keras\.datasets\.\w+\.load_data", plan.case.name(event.node)) is not None


def _download(plan: PortPlan, event: Event) -> None:
    """One process of each host downloads, and the others wait."""
    call = event.node
    download = argument(call, "download")
    home = plan.statement(call)
    hvd, world = plan.use_horovod(), plan.use_world(call)
    wait = f"{hvd}.barrier()" if plan.binding == "torch" else f"{hvd}.allgather_object(None)  # the others wait"
    if download is None:
        how = "before" if _fetches(plan, event) else "swap"
        home = home if how == "before" else plan.alone(call)
        plan.edit(how, home, f"if {world}.local_rank == 0:\n    {plan.src(call)}\n{wait}")
        return
    kept = [plan.src(value) for value in call.args]
    kept += [
        f"{keyword.arg}={plan.src(keyword.value)}"
        for keyword in call.keywords
        if keyword.arg and "transform" not in keyword.arg
    ]
    if has_stars(call):
        raise Unsure(call, "every rank downloads", "download where the local rank is 0, and let the others wait")
    fetch = f"{plan.src(call.func)}({', '.join(kept)})"
    plan.edit("before", home, f"if {world}.local_rank == 0:\n    {fetch}\n{wait}")
    plan.rename(download, "download", "False")


# TensorFlow: Keras' fit and loops over a tape ------------------------------------------------------------------------


def _tensorflow(plan: PortPlan) -> None:
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
        plan.note(_LARGER)
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
    plan.note(_LARGER)


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
