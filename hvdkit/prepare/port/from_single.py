"""From a script that trains in one process: what all frameworks have in common, and PyTorch's loops."""

from __future__ import annotations

import ast
import re

from hvdkit.prepare.check import find
from hvdkit.prepare.check.libraries import LOADERS
from hvdkit.prepare.check.source import argument, arguments, has_stars, is_constant, method
from hvdkit.prepare.check.trace import Event
from hvdkit.prepare.port import each_rank, from_single_tf
from hvdkit.prepare.port.edits import starred
from hvdkit.prepare.port.plan import LARGER, PortPlan, Unsure, is_text

RATES = {"SGD": "0.001", "Adam": "0.001", "AdamW": "0.001", "Adadelta": "1.0", "Adagrad": "0.01", "RMSprop": "0.01",
         "Adamax": "0.002", "NAdam": "0.002", "RAdam": "0.001", "ASGD": "0.01"}  # fmt: skip
"""The learning rates of torch.optim's optimizers where none is given."""
_SAMPLERS = [f"torch.utils.data.{one}Sampler" for one in ("Random", "WeightedRandom", "SubsetRandom", "Sequential")]


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
        from_single_tf.port(plan)
    plan.each(_download, [*find.downloads(case), *(event for event in case.events if _fetches(plan, event))])
    each_rank.on_root(plan)
    places = (("validation_split", 6), ("validation_data", 7))
    held = [argument(fit.node, name, place) for fit in case.fits for name, place in places]
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
    plan.edit("before", start, "\n".join([code, *each_rank.same_data(plan, start)]))


def _holds_all(plan: PortPlan, call: ast.Call) -> bool:
    """Whether all that trains, loads data, writes or prints happens in one call that the module makes: ``main()``."""
    case = plan.case
    loaders = [event for event in case.events if case.name(event.node) in LOADERS]
    used = [*case.steps, *case.optimizers, *loaders, *each_rank.writers(plan), *each_rank.drawn_data(plan)]
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
                each_rank.own_numbers(plan, plan.first_step(home, event) or home)
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
    plan.note(LARGER)
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
    if event.loops:
        raise Unsure(call, "the loader is made anew in a loop, so that each pass would have the same order", write)
    if not 1 <= len(call.args) <= 3 or any(isinstance(value, ast.Starred) for value in call.args):
        raise Unsure(call, "which data it loads the text does not show", write)
    given = call.args[0]
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
    seeded = {one.node for one in each_rank.drawn_data(plan)}  # at the script's start, if not by itself
    if not seeded.issuperset(drawn) and not case.fixed_seed([given]):
        raise Unsure(call, "the data are split at random, on each rank in another way", "torch.manual_seed(0) before")
    stars = [keyword for keyword in call.keywords if keyword.arg is None]
    plan.change(call.func, f"{hk}.shard")
    if len(call.args) == 3:
        plan.rename(call.args[2], "shuffle")
    gone = {"drop_last"} if ordered else {"drop_last", "sampler"}
    plan.drop(call, [keyword for keyword in call.keywords if keyword.arg in gone])
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
            each_rank.order(plan, event)
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
    if has_stars(call):
        raise Unsure(call, "every rank downloads", "download where the local rank is 0, and let the others wait")
    kept = [plan.src(value) for value in call.args]
    named = [keyword for keyword in call.keywords if "transform" not in str(keyword.arg)]
    kept += [f"{keyword.arg}={plan.src(keyword.value)}" for keyword in named]
    fetch = f"{plan.src(call.func)}({', '.join(kept)})"
    plan.edit("before", home, f"if {world}.local_rank == 0:\n    {fetch}\n{wait}")
    plan.rename(download, "download", "False")
