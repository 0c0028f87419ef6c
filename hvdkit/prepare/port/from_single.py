"""From a script that trains in one process: where it starts, what all frameworks have in common, and PyTorch loops."""

from __future__ import annotations

import ast
import re

from hvdkit.prepare.check import find
from hvdkit.prepare.check.call_arguments import arguments
from hvdkit.prepare.check.facts import argument, has_stars, is_constant, method, receiver
from hvdkit.prepare.check.libraries import LOADERS
from hvdkit.prepare.check.trace import Event
from hvdkit.prepare.port import from_single_tensorflow, keras_2
from hvdkit.prepare.port.edits import Change, around, as_keyword, called, with_argument, without
from hvdkit.prepare.port.plan import Plan, Unsure, is_text

RATES = {"SGD": "0.001", "Adam": "0.001", "AdamW": "0.001", "Adadelta": "1.0", "Adagrad": "0.01", "RMSprop": "0.01",
         "Adamax": "0.002", "NAdam": "0.002", "RAdam": "0.001", "ASGD": "0.01"}  # fmt: skip
"""The learning rates of torch.optim's optimizers where none is given."""
_WRITES = ("torch.save", "torchvision.utils.save_image", "numpy.save", "numpy.savez", "numpy.savetxt",
           "matplotlib.pyplot.savefig")  # fmt: skip
_METHODS = ("save", "save_weights", "savefig", "save_pretrained", "to_csv", "export")
_ALSO_OTHERS = ("save", "export")
"""Those of them that other objects have, too, and that may do more than write a file."""
_PATH = re.compile(r"path|file|ckpt|checkpoint")
_SAMPLERS = tuple(
    f"torch.utils.data.{one}"
    for one in ("RandomSampler", "WeightedRandomSampler", "SubsetRandomSampler", "SequentialSampler")
)


def port(plan: Plan) -> None:
    """Port a script that no library distributes.

    Raises:
        Unsure: nothing of it can be ported for certain.
    """
    case = plan.case
    if case.others:
        raise Unsure(1, f"{case.others[0]} distributes it", "take that out first, or use docs/migrate.md")
    steps = [event for event in case.steps if event.reached]
    if not steps:
        raise Unsure(1, "nothing that trains is found in this text", "port the script that starts the training")
    torch = [event for event in steps if method(event.node) in ("backward", "step")]
    plan.adapter = "torch" if torch else "keras" if case.fits else "tensorflow"
    _start(plan, steps[0])
    if plan.adapter == "torch":
        _torch(plan)
    else:
        from_single_tensorflow.port(plan)
        keras_2.port(plan)
    _files(plan)


def _start(plan: Plan, first: Event) -> None:
    """``init`` and ``pin_device``: at the beginning of the function in which the training starts, or of the script."""
    code = f"{plan.world} = {plan.hk}.init()\n{plan.hk}.pin_device({plan.world})"
    functions = plan.case.callees(first.stack[0]) if first.stack else []
    main = functions[0] if len(functions) == 1 and _all_in(plan, first.stack[0]) else None
    plan.import_(f"import hvdkit.{plan.adapter} as {plan.hk}")
    if isinstance(main, ast.FunctionDef):
        body = [one for one in main.body if not is_text(one)]
        statement = plan.statement(body[0]) if body[0] in main.body else main.body[0]
        plan.start_at(statement)
        plan.edit("before", statement, code)
        return
    last = plan.last_import()
    body = plan.text.tree.body
    at = body.index(last) + 1 if last is not None else 0
    while at < len(body) and is_text(body[at]):
        at += 1
    if at >= len(body) or plan.text.line(body[at]) is None:
        raise Unsure(first.node, "the text does not show where the script begins", "call hk.init() first")
    plan.start_at(body[at])
    plan.edit("before", body[at], f"\n{code}")


def _all_in(plan: Plan, call: ast.Call) -> bool:
    """Whether all that trains or loads data happens in one call that the module makes: ``main()``."""
    if plan.case.function(call) is not None:
        return False
    events = [
        *plan.case.steps,
        *plan.case.optimizers,
        *(e for e in plan.case.events if plan.case.name(e.node) in LOADERS),
    ]
    return all(call in event.stack or not event.reached for event in events)


# PyTorch --------------------------------------------------------------------------------------------------------------


def _torch(plan: Plan) -> None:
    case = plan.case
    plan.each(lambda event: _optimizer(plan, event), *[one for one in case.optimizers if one.reached])
    if not case.optimizers:
        raise Unsure(case.steps[0].node, "no optimizer is made in this text", f"{plan.hk}.distribute(optimizer, model)")
    loaders = {call: events for loop, events in case.training_loops.items()
               for call in case.sources(loop) if case.name(call) in LOADERS}  # fmt: skip
    plan.each(lambda event: _loader(plan, event), *[one for one in case.events if one.node in loaders])
    if not loaders:
        write = f"{plan.hk}.shard(dataset, {plan.world}, batch_size), or draw them by a seed of each rank"
        plan.leave(case.steps[0].node, "the training data come from no DataLoader that the text shows", write)
    _differing(plan)
    seen = set()
    for event in find.downloads(case):
        if event.node not in seen:
            seen.add(event.node)
            with plan.sure():
                _download(plan, event)


def _optimizer(plan: Plan, event: Event) -> None:
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
    model, rates = models.pop(), _rates(plan, call)
    if rates is None:
        raise Unsure(call, "the text does not show its learning rate", f"lr={hk}.scale_lr(lr, {plan.world})")
    for make, node in rates:
        plan.change(node, make)
    plan.use_world(call)
    plan.distribute(home, event, model, f"{hk}.sync_batch_norm({model})\n" if _normalizes(plan, call, model) else "")


def _whole(plan: Plan, text: str) -> str:
    """``model`` for ``model.classifier``: what is broadcast is the whole model."""
    base = text.split(".")[0]
    return base if base != "self" and base in plan.case.holders else text


def _normalizes(plan: Plan, optimizer: ast.Call, model: str) -> bool:
    """Whether a model has BatchNorm for certain; where it may have some, that is listed."""
    case = plan.case
    nodes = [one for one in case.nodes if isinstance(one, (ast.Name, ast.Attribute)) and ast.unparse(one) == model]
    made = list(dict.fromkeys(call for one in nodes for call in case.calls(one)))
    for call in made:
        if any("BatchNorm" in ast.unparse(one) for one in [case.class_of(call) or call]):
            return True
    hidden = [case.name(one) for one in made if case.name(one).startswith(("torchvision.models", "timm.", "torch.hub"))]
    hidden += [ast.unparse(one.func) for one in made if case.is_opaque(one)]
    if hidden or any("BatchNorm" in name for name in case.used):
        plan.leave(
            optimizer,
            f"{model} may hold BatchNorm, whose statistics would be each rank's",
            f"{plan.hk}.sync_batch_norm({model}), where it does: they are those of the whole batch then",
        )
    return False


def _rates(plan: Plan, call: ast.Call) -> list[tuple[Change, ast.expr]] | None:
    """The changes that scale an optimizer's learning rates; None where the text does not show them."""
    scale = around(f"{plan.hk}.scale_lr(__, {plan.world})")
    rate = argument(call, "lr", 1)
    found: list[tuple[Change, ast.expr]] = []
    for node in plan.case.reach(call.args[0]) if call.args else ():
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            found += [(scale, value) for key, value in pairs if isinstance(key, ast.Constant) and key.value == "lr"]
    if rate is not None:
        return found if plan.case.has_size(rate, through=True) else [*found, (scale, rate)]
    last = plan.case.name(call).rpartition(".")[2]
    if has_stars(call) or last not in RATES or not plan.case.name(call).startswith("torch.optim."):
        return None
    return [*found, (with_argument(f"{plan.hk}.scale_lr({RATES[last]}, {plan.world})", "lr"), call)]


_OWN = re.compile(r"loss|acc|metric|score|patience|best|stop|error|counter")
"""Names of what one rank sees of its own part."""


def _differing(plan: Plan) -> None:
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
                f"max_lr={plan.hk}.scale_lr(max_lr, {plan.world}); count steps in len(loader)")  # fmt: skip
    for node in plan.case.nodes:
        match node:
            case ast.Constant(value=str(text)) if re.fullmatch(r"cuda:\d+", text):
                plan.leave(node, f"{text!r} is the same GPU on every rank", f"device = {hk}.pin_device({world})")
            case ast.If(test=test, body=[*_, ast.Break() | ast.Return()]) if _OWN.search(ast.unparse(test)):
                if any(node in ast.walk(loop) for event in plan.case.steps for loop in event.loops):
                    plan.leave(node, "it may end the training on one rank alone, and the others would wait", mean)
            case ast.Assign(targets=[ast.Subscript(slice=ast.Constant(value="lr"))]):
                write = f"{plan.hk}.scale_lr(rate, {plan.world}), unless it is reckoned from the scaled one"
                plan.leave(node, "it sets a learning rate of its own", write)


def _loader(plan: Plan, event: Event) -> None:
    """``DataLoader(...)`` of a loop that trains becomes ``shard(...)``."""
    case, call, hk = plan.case, event.node, plan.hk
    write = f"{hk}.shard(dataset, {plan.world}, batch_size, shuffle=True)"
    names = {one.arg for one in call.keywords}
    given = argument(call, "dataset", 0)
    if event.loops:
        raise Unsure(call, "the loader is made anew in a loop, so that each pass would have the same order", write)
    if given is None or not call.args or len(call.args) > 3 or any(isinstance(one, ast.Starred) for one in call.args):
        raise Unsure(call, "which data it loads the text does not show", write)
    if any(call in case.sources(loop) for loop in case.evaluation_loops):
        raise Unsure(call, "the same loader trains and evaluates", f"{write} for training, a DataLoader for the rest")
    sampler, batches = argument(call, "sampler"), argument(call, "batch_sampler")
    if batches is not None or (sampler is not None and not is_constant(sampler, None)
                               and not all(case.name(one) in _SAMPLERS for one in case.calls(sampler))):  # fmt: skip
        raise Unsure(call, "its sampler is not one that hk.shard is known to divide", f"{write}, or sampler=")
    made = case.calls(given)
    own = [klass for one in made if (klass := case.class_of(one)) is not None]
    if any("Iterable" in ast.unparse(base) for klass in own for base in klass.bases):
        raise Unsure(call, "an IterableDataset must yield each rank's own samples", "yield every size-th of them")
    through = case.calls(given, through=True)
    drawn = any(case.name(one).endswith(("random_split", "randperm", "permutation")) for one in through)
    if drawn and not case.fixed_seed([given]):
        raise Unsure(call, "the data are split at random, on each rank in another way", "torch.manual_seed(0) before")
    stars = [one for one in call.keywords if one.arg is None]
    plan.change(call, called(f"{hk}.shard"))
    if len(call.args) == 3:
        plan.change_argument(call.args[2], as_keyword("shuffle"))
    drops = [len(call.args) + at for at, one in enumerate(call.keywords)
             if one.arg == "drop_last" or (one.arg in ("sampler",) and is_constant(one.value, None))]  # fmt: skip
    if drops:
        plan.change(call, without(drops))
    plan.change(call, with_argument(plan.use_world(call), place=1))
    if not stars:
        if len(call.args) < 2 and "batch_size" not in names:
            plan.change(call, with_argument("1", "batch_size"))
        if len(call.args) < 3 and "shuffle" not in names and (sampler is None or is_constant(sampler, None)):
            plan.change(call, with_argument("False", "shuffle"))
    elif "shuffle" not in names and len(call.args) < 3:
        plan.change(stars[0].value, around('{"shuffle": False, **__}'))
    _whole_lengths(plan, call)


def _whole_lengths(plan: Plan, call: ast.Call) -> None:
    """Sums over this rank's part that are divided by the number of all samples."""
    for node in plan.case.nodes:
        match node:
            case ast.BinOp(op=ast.Div(), right=right) | ast.AugAssign(op=ast.Div(), value=right):
                pass
            case _:
                continue
        for one in ast.walk(right):
            if isinstance(one, ast.Attribute) and one.attr == "dataset" and call in plan.case.calls(one.value):
                why = f"`{ast.unparse(right)}` counts all samples, and each rank sums over its part"
                write = f"{plan.hk}.average_metrics({{'loss': (total, count)}}, {plan.world})"
                plan.leave(node, why, write)
                break


def _download(plan: Plan, event: Event) -> None:
    """One process of each host downloads, and the others wait."""
    call = event.node
    download = argument(call, "download")
    home = plan.statement(call)
    hvd, world = plan.use_horovod(), plan.use_world(call)
    if download is None:
        home = plan.alone(event)
        plan.edit("swap", home, f"if {world}.local_rank == 0:\n    {plan.src(call)}\n{hvd}.barrier()")
        return
    kept = [plan.src(one) for one in call.args]
    kept += [f"{one.arg}={plan.src(one.value)}" for one in call.keywords if one.arg and "transform" not in one.arg]
    if has_stars(call):
        raise Unsure(call, "every rank downloads", "download where the local rank is 0, and let the others wait")
    fetch = f"{plan.src(call.func)}({', '.join(kept)})"
    plan.edit("before", home, f"if {world}.local_rank == 0:\n    {fetch}\n{hvd}.barrier()")
    plan.change_argument(download, as_keyword("download", "False"))


# Files ----------------------------------------------------------------------------------------------------------------


def _files(plan: Plan) -> None:
    """Step 6: what writes a file does so on the root."""
    case = plan.case
    seen = set()
    for event in case.events:
        call = event.node
        name = case.name(call)
        own = not name and bool(call.args or call.keywords) and not case.callees(call)
        writes = name in _WRITES or (own and method(call) in _METHODS)
        if call in seen or plan.is_root_only(event) or not (event.reached or writes):
            continue
        seen.add(call)
        with plan.sure():
            if writes:
                if own and method(call) in _ALSO_OTHERS and not _writes_a_file(plan, call):
                    why = f"the text does not show what `{ast.unparse(call.func)}` does"
                    raise Unsure(call, why, f"if {plan.world}.is_root: around it, where all it does is write a file")
                statement = plan.alone(event)
                _require_unread(plan, event)
                plan.edit("guard", statement, f"{plan.use_world(statement)}.is_root")
            elif name in ("builtins.open", "io.open") and _opens_to_write(call):
                write = f"if {plan.world}.is_root: around what writes"
                raise Unsure(call, "every rank opens this file to write", write)


def _writes_a_file(plan: Plan, call: ast.Call) -> bool:
    return plan.case.holds_keras_model(receiver(call)) or any(map(_may_be_path, arguments(call)))


def _opens_to_write(call: ast.Call) -> bool:
    mode = argument(call, "mode", 1)
    return isinstance(mode, ast.Constant) and isinstance(mode.value, str) and bool(set(mode.value) & set("wax"))


def _may_be_path(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=str()) | ast.JoinedStr() | ast.BinOp():
            return True
        case ast.Call() if any(isinstance(one, ast.Constant) and isinstance(one.value, str) for one in ast.walk(node)):
            return True
        case ast.Name() | ast.Attribute() | ast.Call():
            return _PATH.search(ast.unparse(node).lower()) is not None
    return False


def _require_unread(plan: Plan, event: Event) -> None:
    """A file that the script reads later must be there on every rank by then."""
    paths = {ast.unparse(one) for one in arguments(event.node) if _may_be_path(one)}
    for other in plan.case.events:
        name = plan.case.name(other.node)
        if other.order <= event.order or method(other.node) in _METHODS or name in (*_WRITES, "builtins.print"):
            continue
        if paths & {ast.unparse(one) for one in arguments(other.node)}:
            why = f"every rank writes it, and line {other.node.lineno} may read it"
            raise Unsure(event.node, why, f"if {plan.world}.is_root: around it, and a barrier before it is read")
