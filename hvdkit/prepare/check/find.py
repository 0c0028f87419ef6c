"""Rules about rank and size, GPUs, data, gradients and old versions: a script in, the places that break one out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hvdkit.prepare.check import steps
from hvdkit.prepare.check.case import Update
from hvdkit.prepare.check.flow import everything
from hvdkit.prepare.check.libraries import NUMBERS, RANKS, SAMPLERS, Role, role
from hvdkit.prepare.check.ranks import BACKUP
from hvdkit.prepare.check.source import argument, arguments, is_constant, makes_object, method, receiver, word
from hvdkit.prepare.check.steps import JudgedCase
from hvdkit.prepare.check.trace import Event

_FETCHES = (
    "urllib.request.urlretrieve", "wget.download", "gdown.download", "torch.hub.download_url_to_file",
    "torchvision.datasets.utils.download_url", "torchvision.datasets.utils.download_and_extract_archive",
    "keras.utils.get_file",
)  # fmt: skip
_DATA_SETS = ("torchvision.", "torchaudio.", "torchtext.", "torch_geometric.", "medmnist.")
_TAKE_NUMBERS = {
    "int", "float", "str", "range", "print", "len", "abs", "max", "min", "set_device", "shard", "format", "device",
    "take", "DistributedSampler", "set_visible_devices", "array_split", "info", "cuda", "islice", "round",
}  # fmt: skip
_NUMBER_ARGUMENTS = {
    "rank", "num_replicas", "world_size", "num_shards", "index", "root_rank", "device_ids", "steps_per_epoch",
}  # fmt: skip
_IN_STEP = "horovod.torch."
"""Whose optimizer averages gradients in ``step``, and not before."""
_ARITHMETIC = re.compile(r"builtins\.(int|min|max|round)|math\.(ceil|floor)|numpy\.ceil")
_SEEDS = re.compile(r"hvdkit\.(torch|tensorflow|keras)\.seed_everything")
_MOVES = re.compile(r"hvdkit\.(torch|tensorflow|keras)\.broadcast_state")
_CLIPS = re.compile(r"(torch|timm)\..*clip_grad")


# Functions for numbers ------------------------------------------------------------------------------------------------


def uncalled(case: JudgedCase) -> Iterator[ast.expr]:
    """The functions for rank and size that are used as numbers: where they are named without a call."""
    named = (node for node in case.nodes if _is_function(case, node))
    functions = {node for node in named if getattr(case.parents[node], "func", None) is not node}
    if not functions:
        return
    methods = {method(event.node) for event in case.events if not case.name(event.node)}

    def behind(one: ast.AST) -> list[ast.AST]:
        """Followed through names, arguments, dictionaries and returns."""
        is_end = one in functions or (isinstance(one, ast.Attribute) and one.attr in methods)
        return [] if is_end else case.behind(one)

    for node in case.nodes:
        is_read = isinstance(node, ast.expr) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        if is_read and _is_number(case, node):
            yield from (one for one in everything(node, behind) if one in functions and isinstance(one, ast.expr))


def _is_function(case: JudgedCase, node: ast.AST) -> bool:
    name = case.dotted(node) or ""
    if role(name) not in NUMBERS or name.startswith("mpi4py"):
        return False
    return not isinstance(node, ast.Name) or any(binding.imported for binding in case.reaching(node))


def _is_number(case: JudgedCase, node: ast.AST) -> bool:
    """Whether a value is used in a way that only makes sense for a number."""
    parent = case.parents[node]
    match parent:
        case ast.Compare(ops=operators, comparators=others):
            asks_none = any(isinstance(one, ast.Constant) and one.value is None for one in others)
            return not (asks_none and any(isinstance(one, (ast.Is, ast.IsNot)) for one in operators))
        case ast.BinOp() | ast.FormattedValue() | ast.Slice():
            return True
        case ast.UnaryOp() | ast.BoolOp() | ast.If() | ast.While() | ast.IfExp():  # a name may hold a function or None
            return isinstance(node, ast.Attribute) and case.dotted(node) is not None
        case ast.Subscript(slice=asked) | ast.Match(subject=asked):
            return asked is node
        case ast.keyword():
            return parent.arg in _NUMBER_ARGUMENTS
        case ast.Tuple():
            outer = case.parents[parent]
            return isinstance(outer, ast.BinOp) and isinstance(outer.op, ast.Mod)
        case ast.Call():
            return parent.func is not node and ast.unparse(parent.func).rpartition(".")[2] in _TAKE_NUMBERS
    return False


# The start, GPUs, parts of the data -----------------------------------------------------------------------------------


def pinned_by_global_rank(case: JudgedCase) -> Iterator[ast.expr]:
    """The first line that takes the rank in the job for the number of a GPU."""
    for chosen in sorted(steps.device_choices(case), key=lambda one: one.lineno):
        reached = case.reach(chosen)
        to_local = (ast.Mod, ast.Sub, ast.FloorDiv)
        sums = [node for node in reached if isinstance(node, ast.BinOp) and isinstance(node.op, to_local)]
        reckoned = any(not isinstance(one.left, (ast.Constant, ast.JoinedStr)) for one in sums)  # "cuda:%d" % rank
        named_local = any("local" in word(node) for node in reached)
        if case.kinds(chosen) == {Role.RANK} and not reckoned and not named_local:
            yield chosen
            return


def wrong_shards(case: JudgedCase) -> Iterator[Event]:
    """Calls that divide the data by the local rank, or with rank and size exchanged."""
    for event in case.events:
        call = event.node
        if case.name(call) in SAMPLERS:
            size, rank = argument(call, "num_replicas", 1), argument(call, "rank", 2)
        elif method(call) == "shard" and not case.name(call):
            size, rank = argument(call, "num_shards", 0), argument(call, "index", 1)
        else:
            continue
        given = (case.kinds(size), case.kinds(rank))
        if given in (({Role.RANK}, {Role.SIZE}), ({Role.SIZE}, {Role.LOCAL_RANK})) and event.reached:
            yield event


def stale_samplers(case: JudgedCase) -> Iterator[ast.Call]:
    """Samplers of a training over several epochs that are never told which epoch it is."""
    told = [case.made_by(SAMPLERS, receiver(event.node)) for event in case.methods("set_epoch")]
    handed_on = {made for event in case.events if case.is_opaque(event.node)
                 for made in case.calls(*arguments(event.node))}  # fmt: skip
    for loop, events in case.training_loops.items() if all(told) else ():
        epochs = any(event.reached and case.epochs_around(event, loop) for event in events)
        for loader in case.sources(loop) if epochs else []:
            for sampler in case.made_by(SAMPLERS, *arguments(loader), through=True):
                shuffle = argument(sampler, "shuffle", 3)
                always = shuffle is None or is_constant(shuffle, True)
                if always and not any(sampler in one for one in told) and not handed_on & {sampler, loader}:
                    yield sampler


def differing_steps(case: JudgedCase) -> Iterator[int]:
    """Lines where the number of steps is reckoned from the rank."""
    for event in case.fits:
        if _reckons_with_rank(case, argument(event.node, "steps_per_epoch")):
            yield event.node.lineno
    loops = {loop for event in case.steps for loop in event.loops if isinstance(loop, ast.For)}
    for loop in sorted(loops, key=lambda one: one.lineno):
        for call in case.calls(loop.iter):
            counts = case.name(call) == "builtins.range" and len(call.args) == 1
            takes = method(call) == "take" and not case.name(call) and call.args
            if (counts or takes) and _reckons_with_rank(case, call.args[0]):
                yield loop.lineno


def _reckons_with_rank(case: JudgedCase, node: ast.AST | None) -> bool:
    """Whether a rank is a term of a number; the length of a rank's part, which may well be equal on all, is not."""

    def terms(one: ast.AST) -> list[ast.AST]:
        if isinstance(one, ast.Call):
            return list(one.args) if _ARITHMETIC.fullmatch(case.name(one)) else []
        if isinstance(one, ast.Name):
            return case.behind(one)
        adds_up = isinstance(one, (ast.BinOp, ast.UnaryOp, ast.IfExp, ast.Compare, ast.BoolOp))
        return list(ast.iter_child_nodes(one)) if adds_up else []

    return node is not None and any(case.kind(one) in RANKS for one in everything(node, terms))


def downloads(case: JudgedCase) -> Iterator[Event]:
    """Downloads that nothing keeps to one rank of a host."""
    waits = [event.order for event in case.having(Role.BARRIER) if case.where(event) == "some ranks"]
    for event in case.events:
        if waits and waits[0] < event.order:
            return
        everywhere = _downloads(case, event.node) and case.where(event) == "every rank" and not case.is_locked(event)
        if everywhere and not case.has_rank(*arguments(event.node)):
            yield event


def _downloads(case: JudgedCase, call: ast.Call) -> bool:
    name = case.name(call)
    return name in _FETCHES or (name.startswith(_DATA_SETS) and is_constant(argument(call, "download"), True))


# Gradients ------------------------------------------------------------------------------------------------------------


def not_distributed(case: JudgedCase) -> Iterator[Event | int]:
    """Where gradients stay on their rank: nothing is distributed, or another optimizer, tape or model is used."""
    yield from case.verdicts[3].blamed
    if case.library == "ddp":
        yield from _unwrapped_models(case)
    elif case.having(Role.DISTRIBUTE, Role.LOAD_MODEL) and not case.reduces_gradients() and not case.handed_away:
        for update in case.updates:
            if update.event.reached and _is_local(case, update):
                yield update.event
        for between, update in _passes(case):
            if _skips_synchronizing(case, update.event) and not _is_synchronized(between):
                yield update.event


def _is_local(case: JudgedCase, update: Update) -> bool:
    """Whether everything shows where the optimizer and the gradients come from, and nothing of it is distributed."""
    # A layer or a model may be called on the way: what is in it does not average gradients.
    made = [*case.calls(update.optimizer), *case.calls(update.gradients, through=True)]
    averaged = any(case.role(call) in (Role.DISTRIBUTE, Role.REDUCE) for call in made)
    hidden = any(case.is_opaque(call) and not makes_object(call) for call in made)
    unseen = any(not _optimizers(case, _first(call)) for call in _in_place(case))  # a tape, or from elsewhere
    seen = bool(_optimizers(case, update.optimizer))
    return seen and not averaged and not hidden and not unseen and not _distributors(case, update.optimizer)


def _distributors(case: JudgedCase, optimizer: ast.expr) -> list[ast.Call]:
    """The calls that made an optimizer a distributed one: another one, or itself in its place."""
    own = _optimizers(case, optimizer)
    changed = [call for call in _in_place(case) if own & _optimizers(case, _first(call))]
    return [*case.having_made(optimizer, Role.DISTRIBUTE), *changed]


def _optimizers(case: JudgedCase, node: ast.expr) -> set[ast.Call]:
    return {call for call in case.calls(node) if case.makes_optimizer(call)}


def _in_place(case: JudgedCase) -> list[ast.Call]:
    """The calls of hvdkit's ``distribute``, after which the optimizer that they got is a distributed one."""
    calls = [event.node for event in case.having(Role.DISTRIBUTE) if case.name(event.node).startswith("hvdkit.")]
    return [call for call in calls if case.operations(call) != {"adasum"}]


def _first(call: ast.Call) -> ast.expr:
    return argument(call, "module", 0) or argument(call, "optimizer", 0) or call


def _unwrapped_models(case: JudgedCase) -> Iterator[Event]:
    """Training steps of DDP scripts that run the bare model, although another name has the wrapped one."""
    wrapped = {event.node for event in case.having(Role.DISTRIBUTE)}
    bare = {made for made in case.calls(*map(_first, wrapped)) if case.class_of(made)}
    backwards = (event for event in case.methods("backward") if event.reached and event.loops)
    trained = {(event.loops, event.stack): event.order for event in backwards}
    for event in case.events:
        called = event.node.func
        is_object = isinstance(called, ast.Name) or method(event.node) in case.attributes  # not model.train()
        if not is_object or not event.reached or case.name(event.node):
            continue
        sources = set(case.calls(called))
        if sources & bare and not sources & wrapped and event.order < trained.get((event.loops, event.stack), 0):
            yield event


def distributed_twice(case: JudgedCase) -> Iterator[Event]:
    """Wrappers around what is wrapped already, and updates of averaged gradients by an optimizer that averages."""
    for event in case.having(Role.DISTRIBUTE):
        inner = event.node.args[0] if event.node.args else argument(event.node, "optimizer")
        if event.reached and any(call is not event.node for call in case.having_made(inner, Role.DISTRIBUTE)):
            yield event
    for between, update in _passes(case):
        if _is_synchronized(between) and not _skips_synchronizing(case, update.event):
            yield update.event
    for update in (one for one in case.updates if one.event.reached):
        optimizers = case.having_made(update.optimizer, Role.DISTRIBUTE)
        made = case.having_made(update.gradients, Role.DISTRIBUTE, through=True)
        tapes = [one for one in made if one not in optimizers]
        ways = [event for event in case.events if event.node in [*optimizers, *tapes]]
        conditional = any(not guard.wraps for event in ways for guard in event.guards)
        if optimizers and tapes and not conditional:
            yield update.event


def _averages_in_step(case: JudgedCase, optimizer: ast.expr) -> bool:
    made = _distributors(case, optimizer)
    return any(case.name(call).startswith(_IN_STEP) and case.operations(call) != {"adasum"} for call in made)


def _passes(case: JudgedCase) -> Iterator[tuple[list[Event], Update]]:
    """What runs between a backward and the step after it, with the step, of optimizers that average there."""

    def branches(event: Event) -> set[tuple[str, bool]]:
        return {(ast.unparse(guard.test), guard.holds) for guard in event.guards if guard.certain}

    def are_exclusive(one: Event, other: Event) -> bool:
        """Whether they are on two branches of one condition."""
        return any((test, not holds) in branches(other) for test, holds in branches(one))

    updates = {update.event.order: update for update in case.updates}
    since: list[Event] | None = None
    for event in case.events:
        if method(event.node) == "backward":
            since = []
        elif since is not None:
            if event.order in updates and event.reached and _averages_in_step(case, updates[event.order].optimizer):
                way = [one for one in since if not are_exclusive(one, event)]
                if not any(one.order in updates for one in way):
                    yield way, updates[event.order]
            since.append(event)


def _is_synchronized(events: list[Event]) -> bool:
    return any(method(event.node) == "synchronize" for event in events)


def _skips_synchronizing(case: JudgedCase, event: Event) -> bool:
    around = case.calls(*(guard.test for guard in event.guards if guard.wraps))
    return any(method(call) == "skip_synchronize" for call in around)


def early_uses(case: JudgedCase) -> Iterator[Event]:
    """The first use of gradients after a backward and before they are averaged: clipping, or a ``GradScaler``'s."""

    def uses_gradients(call: ast.Call) -> bool:
        if _CLIPS.match(case.name(call)):
            return True
        made = case.calls(receiver(call)) if method(call) in ("unscale_", "step") else []
        scalers = [call for call in made if case.name(call).endswith("GradScaler")]
        return any(not is_constant(argument(one, "enabled"), False) for one in scalers)

    for between, update in _passes(case) if not case.handed_away else ():
        events = [*between, update.event]
        place = next((place for place, event in enumerate(events) if uses_gradients(event.node)), None)
        if place is not None and not _is_synchronized(events[:place]):
            yield events[place]


def closures(case: JudgedCase) -> Iterator[Event]:
    """Steps that average first and call a closure then, which computes other gradients."""
    for update in case.updates:
        call = update.event.node
        given = argument(call, "closure", 0)
        is_step = method(call) == "step" and receiver(call) is update.optimizer
        has_closure = is_step and given is not None and not is_constant(given, None)
        if has_closure and update.event.reached and _averages_in_step(case, update.optimizer):
            yield update.event


# The state that is sent, and backups ----------------------------------------------------------------------------------


def early_broadcasts(case: JudgedCase) -> Iterator[Event]:
    """Broadcasts of what does not exist yet, or of what is replaced from a file before training begins."""
    for event in case.having(Role.BROADCAST) if case.steps else ():
        names = [one for one in steps.sent_objects(event) if isinstance(one, ast.Name) and not case.reaching(one)]
        # ``broadcast(optimizer)`` above ``optimizer = ...``, in one function
        before_it_exists = any(case.lookup(name.id, case.scope(name)) is case.scope(name) for name in names)
        if event.reached and (before_it_exists or _has_no_slots(case, event) or _is_loaded_later(case, event)):
            yield event


def late_seeds(case: JudgedCase) -> Iterator[Event]:
    """``seed_everything`` below the last ``broadcast_state``, which moves each rank to numbers of its own."""
    called = [(case.name(event.node), event) for event in case.events if event.reached]
    sent = [event.order for name, event in called if _MOVES.fullmatch(name)]
    if any(name.endswith(".BroadcastState") for name, _ in called):
        return  # which moves them when ``fit`` begins
    yield from (event for name, event in called if sent and _SEEDS.fullmatch(name) and event.order > max(sent))


def _has_no_slots(case: JudgedCase, event: Event) -> bool:
    """A Keras optimizer has nothing to send before its first step, unless it is built."""
    if not case.name(event.node).endswith("broadcast_variables"):
        return False
    applied = [event for event in case.steps if method(event.node) in ("apply_gradients", "apply", "minimize")]
    if not applied or applied[0].order < event.order or set(event.loops) & set(applied[0].loops):
        return False
    builds = [one for one in case.methods("build") if one.order < event.order]
    if any(map(case.is_optimizer, case.calls(*(receiver(one.node) for one in builds)))):
        return False
    sent = steps.sent_objects(event)
    wrapped = [call.args[0] for value in sent for call in case.having_made(value, Role.DISTRIBUTE) if call.args]
    return any(case.is_keras_optimizer(call) for call in case.calls(*sent, *wrapped))


def _is_loaded_later(case: JudgedCase, event: Event) -> bool:
    """Whether what is sent is replaced from a file before training begins, and not sent again."""

    def identities(objects: list[ast.expr]) -> set[str | ast.Call]:
        """What tells whether two expressions are one object: the same text, or made by the same call."""
        texts = {ast.unparse(one) for one in objects if isinstance(one, (ast.Name, ast.Attribute))}
        return texts | {call for call in case.calls(*objects) if not case.role(call)}

    for load in steps.loads(case):
        made = case.made_by(steps.TF_CHECKPOINTS, receiver(load.node))
        loaded = identities([receiver(load.node), *(keyword.value for call in made for keyword in call.keywords)])
        replaced = identities(steps.sent_objects(event)) & loaded
        if not event.order < load.order < case.steps[0].order or not load.reached or not replaced:
            continue
        others = case.having(Role.BROADCAST, Role.COLLECTIVE)
        again = [one for one in others if replaced & identities(steps.sent_objects(one))] + steps.sent_by_hand(case)
        is_sent = any(load.order < one.order < case.steps[0].order for one in again)
        given = {case.role(call) for call in case.calls(*load.node.args)}
        if not is_sent and not given & {Role.BROADCAST, Role.COLLECTIVE}:
            return True
    return False


def lone_backups(case: JudgedCase) -> Iterator[Event]:
    """``BackupAndRestore`` on some ranks only: the others do not go on where it does."""
    for event in case.named(BACKUP):
        if not case.has_own_path(event.node) and case.where_it_writes(event) == "some ranks":
            yield event


# Versions -------------------------------------------------------------------------------------------------------------


def horovods_keras_optimizers(case: JudgedCase) -> Iterator[Event]:
    """Horovod's optimizer for Keras 2, which does nothing in Keras 3."""
    for event in case.having(Role.DISTRIBUTE, Role.LOAD_MODEL) if not case.asks_for_keras_2 else ():
        name = case.name(event.node)
        sources = case.calls(argument(event.node, "optimizer", 0))
        on_keras = any(case.name(call).startswith("keras.") for call in sources)
        of_keras = name.startswith(("horovod.keras.", "horovod.tensorflow.keras."))
        takes_keras = of_keras or (name.startswith("horovod.tensorflow.") and on_keras)
        if takes_keras and not name.endswith("Tape") and not case.asks_version(event):
            yield event


def called_lists(case: JudgedCase) -> Iterator[Event]:
    """``optimizer.variables()``, which Keras 2 let scripts call, and which is a list in Keras 3."""
    for event in () if case.asks_for_keras_2 else case.events:
        if method(event.node) == "variables" and not arguments(event.node):
            made = case.calls(receiver(event.node), through=True)
            if any(case.name(call).startswith("keras.optimizers.") for call in made):
                yield event
