"""The mistakes that ``check_rates.py`` injects into correct scripts, each a small change at one place of the text.

A mistake yields the changes that it knows for a script, one for each place; nothing where the script has no such place.
It is written for how the scripts look, not for what `hvdkit check` knows: it goes by the names in the text.
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Change = Callable[[], None]
RANK = re.compile(r"\brank\b|\bget_rank\b|local_rank|is_root|is_main|gpu_id|verbose")
LIBRARY = re.compile(r"\b(hvd|hk|dist)\.|\b(rank|size|local_rank|distribute|shard)\(")
NUMBERS = ("rank", "local_rank", "size", "get_rank", "get_world_size", "local_size")
SAVES = ("save", "save_weights", "save_model", "ModelCheckpoint")
WRAPPERS = ("DistributedOptimizer", "DistributedGradientTape", "distribute", "DDP", "DistributedDataParallel")
BROADCASTS = ("broadcast_parameters", "broadcast_state", "broadcast_variables", "broadcast_optimizer_state")
CALLBACKS = ("BroadcastGlobalVariablesCallback", "BroadcastState")
LOADS = re.compile(r"\.(load_state_dict|restore|load_weights)\(")
MEANS = ("allreduce", "average_metrics", "all_reduce", "metric_average", "reduce_mean")
TOGETHER = (*MEANS, *BROADCASTS, "barrier", "check_agreement", "broadcast", "broadcast_object")
PINS = ("set_device", "set_visible_devices", "pin_device")


def last(call: ast.AST) -> str:
    """The last name of what is called: ``save`` of ``torch.save(...)``; "" for anything else."""
    called = call.func if isinstance(call, ast.Call) else None
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


class Text:
    """A script that is to be changed in place."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self.nodes = list(ast.walk(tree))
        self.source = ast.unparse(tree)

    def written(self) -> str:
        return ast.unparse(self.tree)

    def calls(self, *names: str) -> list[ast.Call]:
        return [node for node in self.nodes if isinstance(node, ast.Call) and last(node) in names]

    def statement(self, node: ast.AST) -> ast.stmt:
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def block(self, statement: ast.AST) -> list[ast.stmt]:
        """The list of statements in which one is."""
        parent = self.parents[statement]
        blocks = [getattr(parent, name, None) for name in ("body", "orelse", "finalbody")]
        return next(one for one in blocks if isinstance(one, list) and statement in one)

    def replace(self, node: ast.AST, new: ast.AST) -> None:
        parent = self.parents[node]
        for name, value in ast.iter_fields(parent):
            if value is node:
                setattr(parent, name, new)
            elif isinstance(value, list) and node in value:
                value[value.index(node)] = new

    def splice(self, statement: ast.stmt, new: list[ast.stmt]) -> None:
        """Statements in place of one."""
        block = self.block(statement)
        place = block.index(statement)
        block[place : place + 1] = new or ([ast.Pass()] if len(block) == 1 else [])

    def remove(self, node: ast.AST) -> None:
        """A statement that is one call, or an element of a list."""
        parent = self.parents[node]
        if isinstance(parent, ast.List):
            parent.elts.remove(node)
        elif isinstance(parent, ast.Expr):
            self.splice(parent, [])

    def is_statement(self, node: ast.AST) -> bool:
        return isinstance(self.parents[node], ast.Expr)

    def on_one_rank(self) -> ast.expr:
        """The condition under which one rank goes on, in the words of the script."""
        for pattern, test in (
            (r"\bworld = ", "world.rank == 0"),
            (r"import horovod[\w.]* as hvd|import torch as hvd", "hvd.rank() == 0"),
            (r"import torch.distributed as dist", "dist.get_rank() == 0"),
        ):
            if re.search(pattern, self.source):
                return ast.parse(test, mode="eval").body
        return ast.parse("torch.distributed.get_rank() == 0", mode="eval").body


@dataclass(frozen=True)
class Mistake:
    """A mistake: the rule that finds it, what is done to a script, and the changes that do it."""

    rule: str
    what: str
    inject: Callable[[Text], Iterator[Change]]


MISTAKES: list[Mistake] = []


def mistake(rule: str, what: str) -> Callable[[Callable[[Text], Iterator[Change]]], Callable]:
    def keep(inject: Callable[[Text], Iterator[Change]]) -> Callable:
        MISTAKES.append(Mistake(rule, what, inject))
        return inject

    return keep


# Rank and size ----------------------------------------------------------------------------------------------------


@mistake("rank-not-called", "hvd.rank() becomes hvd.rank")
def uncalled(text):
    for call in text.calls(*NUMBERS):
        if not call.args and not text.is_statement(call):
            yield lambda call=call: text.replace(call, call.func)


@mistake("init-missing", "the line that initialises the library is taken out")
def no_init(text):
    for call in text.calls("init", "init_process_group"):
        if text.is_statement(call):
            yield lambda call=call: text.remove(call)


# Devices and rate -------------------------------------------------------------------------------------------------


@mistake("gpu-not-pinned", "the line that chooses the GPU is taken out")
def no_pin(text):
    pins = [call for call in text.calls(*PINS) if text.is_statement(call)]
    chosen_again = re.search(r"device_ids=\[|torch\.device\('cuda', ", text.source)
    for call in pins if len(pins) == 1 and not chosen_again else []:
        yield lambda call=call: text.remove(call)


@mistake("gpu-pinned-by-global-rank", "the GPU is chosen by hvd.rank()")
def global_pin(text):
    for node in text.nodes:
        is_local = last(node) == "local_rank"
        if not is_local:
            continue
        around = ast.unparse(text.statement(node))
        if re.search(r"set_device|set_visible_devices|CUDA_VISIBLE_DEVICES", around):
            rank = ast.parse("hvd.rank()" if "hvd.local_rank" in around else "rank()", mode="eval").body
            yield lambda node=node, rank=rank: text.replace(node, rank)


@mistake("learning-rate-unscaled", "the factor for the number of processes is taken out everywhere")
def unscaled(text):
    products = [node for node in text.nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)]
    rates = []
    for node in products:
        for factor, other in ((node.right, node.left), (node.left, node.right)):
            is_size = last(factor) in ("size", "get_world_size") or ast.unparse(factor) in ("size", "world.size")
            if is_size and re.search(r"lr|rate|0\.\d|1e-", ast.unparse(other)):
                rates.append((node, other))
    calls = text.calls("scale_lr")

    if (
        not re.search(r"\b(hvd|hk)\.|from hvdkit\.torch|from horovod", text.source)
        or "DistributedDataParallel" in text.source
    ):
        return  # under DDP the rate may have been tuned for the whole job

    def change():
        for node, other in rates:
            text.replace(node, other)
        for call in calls:
            text.replace(call, call.args[0])

    if rates or calls:
        yield change


# Gradients --------------------------------------------------------------------------------------------------------


@mistake("optimizer-not-distributed", "the wrapper around optimizer, tape or model is taken off")
def undistributed(text):
    for call in text.calls(*WRAPPERS):
        if text.is_statement(call):
            yield lambda call=call: text.remove(call)
        elif call.args:
            yield lambda call=call: text.replace(call, call.args[0])


@mistake("distributed-twice", "the wrapper is put around its own result")
def twice(text):
    for call in text.calls(*WRAPPERS):
        if call.args and not text.is_statement(call):
            inner = ast.Call(call.func, list(call.args), list(call.keywords))
            yield lambda call=call, inner=inner: call.args.__setitem__(0, inner)


@mistake("gradients-not-averaged-yet", "gradients are clipped after backward")
def early_clip(text):
    for call in text.calls("backward") if _is_horovods(text) else []:
        if text.is_statement(call) and "skip_synchronize" not in text.source:
            clip = ast.parse("torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)").body
            yield lambda call=call, clip=clip: text.splice(text.statement(call), [text.statement(call), *clip])


@mistake("gradients-not-averaged-yet", "optimizer.synchronize() is taken out")
def no_synchronize(text):
    for call in text.calls("synchronize"):
        if text.is_statement(call) and "optim" in ast.unparse(call):
            yield lambda call=call: text.remove(call)


@mistake("closure-not-averaged", "the step is given a closure")
def closure(text):
    for call in text.calls("step") if _is_horovods(text) else []:
        if not call.args and re.search(r"optim", ast.unparse(call.func)):
            given = ast.parse("lambda: loss", mode="eval").body
            yield lambda call=call, given=given: call.args.append(given)


def _is_horovods(text):
    """Whether gradients are averaged by Horovod's own optimizer for PyTorch."""
    return "horovod.torch" in text.source and bool(text.calls("DistributedOptimizer"))


def _without_keras_2(text):
    for statement in [node for node in text.nodes if isinstance(node, (ast.Assign, ast.Expr))]:
        if "TF_USE_LEGACY_KERAS" in ast.unparse(statement):
            yield lambda statement=statement: text.splice(statement, [])


@mistake("keras-3-optimizer", "the line that asks for the Keras that Horovod knows is taken out")
def keras_3(text):
    if text.calls("DistributedOptimizer"):
        yield from _without_keras_2(text)


@mistake("removed", "compile gets an argument of Keras 2")
def removed_argument(text):
    for call in text.calls("compile") if "TF_USE_LEGACY_KERAS" not in text.source else []:
        if any(one.arg == "optimizer" for one in call.keywords):
            old = ast.keyword("experimental_run_tf_function", ast.Constant(False))
            yield lambda call=call, old=old: call.keywords.append(old)


@mistake("resume-on-some-ranks", "the root alone backs up instead of saving")
def backup_on_root(text):
    for call in text.calls("ModelCheckpoint") if "horovod" in text.source else []:
        if isinstance(call.func, ast.Attribute):
            yield lambda call=call: setattr(call.func, "attr", "BackupAndRestore")


# State ------------------------------------------------------------------------------------------------------------


@mistake("broadcast-missing", "nothing is sent")
def no_broadcast(text):
    sent = [call for call in text.calls(*BROADCASTS) if text.is_statement(call)]
    listed = [call for call in text.calls(*CALLBACKS) if isinstance(text.parents[call], ast.List)]

    def change():
        for call in [*sent, *listed]:
            text.remove(call)

    if sent or listed:
        yield change


@mistake("broadcast-missing", "the model is not sent, the optimizer's state is")
def model_not_sent(text):
    sent = [call for call in text.calls(*BROADCASTS) if text.is_statement(call)]
    models = [call for call in sent if call.args and re.search("model|net", ast.unparse(call.args[0]))]
    if len(sent) > len(models) == 1:
        yield lambda: text.remove(models[0])


@mistake("broadcast-too-early", "the state is sent before the object is made")
def before_made(text):
    for call in text.calls(*BROADCASTS):
        statement = text.statement(call)
        if not text.is_statement(call) or not call.args:
            continue
        block, wanted = text.block(statement), ast.unparse(call.args[-1]).split(".")[0]
        makers = [one for one in block[: block.index(statement)] if isinstance(one, ast.Assign)
                  and any(isinstance(target, ast.Name) and target.id == wanted for target in one.targets)]  # fmt: skip
        if makers:
            yield lambda block=block, statement=statement, maker=makers[0]: _move(block, statement, maker)


@mistake("broadcast-too-early", "the state is sent before a checkpoint is loaded")
def before_loaded(text):
    for call in text.calls(*BROADCASTS):
        statement = text.statement(call)
        if not text.is_statement(call):
            continue
        block = text.block(statement)
        loads = [one for one in block[: block.index(statement)] if LOADS.search(ast.unparse(one))
                 and not isinstance(one, (ast.FunctionDef, ast.ClassDef))]  # fmt: skip
        if loads:
            yield lambda block=block, statement=statement, load=loads[0]: _move(block, statement, load)


def _move(block, statement, before):
    block.remove(statement)
    block.insert(block.index(before), statement)


@mistake("seeded-too-late", "seed_everything goes below broadcast_state")
def late_seed(text):
    for call in text.calls("seed_everything"):
        seed = text.statement(call)
        block = text.block(seed)
        sent = [one for one in block[block.index(seed) :] if ast.unparse(one).startswith("hk.broadcast_state(")]
        if sent and text.is_statement(call):
            yield lambda block=block, seed=seed, sent=sent[-1]: _move_below(block, seed, sent)


def _move_below(block, statement, other):
    block.remove(statement)
    block.insert(block.index(other) + 1, statement)


@mistake("checkpoint-on-every-rank", "the condition on the rank around the save becomes True")
def unguarded_save(text):
    for node in text.nodes:
        if not isinstance(node, ast.If) or not RANK.search(ast.unparse(node.test)):
            continue
        inside = [one for statement in node.body for one in ast.walk(statement)]
        ways = [*inside, *_reached(text, inside)]
        if any(last(one) in SAVES and not text.source.count("def " + last(one)) for one in ways):
            yield lambda node=node: _drop_rank(node)


def _reached(text, nodes):
    """What the script's own functions do that are called here."""
    names = {last(one) for one in nodes if isinstance(one, ast.Call)}
    return [one for node in text.nodes if isinstance(node, ast.FunctionDef) and node.name in names
            for one in ast.walk(node)]  # fmt: skip


def _drop_rank(node):
    """Only the part of a condition that asks for the rank."""
    if isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And):
        kept = [one for one in node.test.values if not RANK.search(ast.unparse(one))]
        node.test = kept[0] if len(kept) == 1 else ast.BoolOp(ast.And(), kept) if kept else ast.Constant(True)
    else:
        node.test = ast.Constant(True)


@mistake("checkpoint-on-every-rank", "every rank saves at the end of each epoch")
def new_save(text):
    for loop in [node for node in text.nodes if isinstance(node, ast.For) and "epoch" in ast.unparse(node.target)]:
        names = [name for name in ("model", "net") if re.search(rf"\b{name} = ", text.source)]
        if names and "import torch" in text.source and re.search(rf"\b{names[0]}\b", ast.unparse(text.parents[loop])):
            save = ast.parse(f"torch.save({names[0]}.state_dict(), 'last.pt')").body
            yield lambda loop=loop, save=save: loop.body.extend(save)


# Data -------------------------------------------------------------------------------------------------------------


def _of_training(call):
    return not re.search(r"test|val", ast.unparse(call), re.IGNORECASE)


@mistake("dataset-not-sharded", "the loader shuffles instead of taking its sampler")
def no_sampler(text):
    for call in text.calls("DataLoader"):
        sampler = [one for one in call.keywords if one.arg == "sampler"]
        if sampler and _of_training(call):
            kept = [one for one in call.keywords if one.arg not in ("sampler", "shuffle")]
            shuffles = [*kept, ast.keyword("shuffle", ast.Constant(True))]
            yield lambda call=call, shuffles=shuffles: setattr(call, "keywords", shuffles)


@mistake("dataset-not-sharded", "dataset.shard(size, rank) or x[rank::size] is taken out")
def no_shard(text):
    for call in text.calls("shard"):
        on_data = isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) not in ("hk", "hvd")
        drawn = ".shuffle(" in text.source and re.search(r"// hvd\.size\(\)", text.source)  # random draws, a share each
        if on_data and not drawn and _of_training(text.statement(call)):
            yield lambda call=call: text.replace(call, call.func.value)
    slices = [node for node in text.nodes if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice)
              and node.slice.lower is not None and re.search(r"\brank\b", ast.unparse(node.slice.lower))]  # fmt: skip

    def change():
        for node in slices:
            text.replace(node, node.value)

    if slices:
        yield change


@mistake("dataset-not-sharded", "hk.shard(data, world, batch) becomes a loader over everything")
def whole_loader(text):
    for call in text.calls("shard"):
        if "torch" in text.source and len(call.args) >= 3 and _of_training(text.statement(call)):
            loader = (
                f"torch.utils.data.DataLoader({ast.unparse(call.args[0])}, {ast.unparse(call.args[2])}, shuffle=True)"
            )
            new = ast.parse(loader, mode="eval").body
            yield lambda call=call, new=new: text.replace(call, new)


def _parts(text):
    """The calls that are given size and rank, with both."""
    for call in text.calls("DistributedSampler", "shard"):
        named = {one.arg: one for one in call.keywords}
        size, rank = named.get("num_replicas") or named.get("num_shards"), named.get("rank") or named.get("index")
        if size is not None and rank is not None:
            yield call, size, rank
        elif last(call) == "shard" and re.search(r"size", ast.unparse(call.args[0])) and len(call.args) == 2:
            yield call, *call.args
        elif last(call) == "DistributedSampler" and len(call.args) == 3:
            yield call, *call.args[1:]


@mistake("dataset-sharded-wrongly", "size and rank are exchanged")
def exchanged(text):
    for call, size, rank in _parts(text):
        if isinstance(size, ast.keyword):
            yield lambda size=size, rank=rank: _exchange(size, rank)
        else:
            yield lambda call=call: call.args.extend([call.args.pop(), call.args.pop()])


def _exchange(size, rank):
    size.value, rank.value = rank.value, size.value


@mistake("dataset-sharded-wrongly", "the local rank takes the place of the rank")
def local_part(text):
    for _, _, rank in _parts(text):
        value = rank.value if isinstance(rank, ast.keyword) else rank
        if last(value) == "rank":
            local = ast.parse(ast.unparse(value.func).replace("rank", "local_rank") + "()", mode="eval").body
            yield lambda value=value, local=local: text.replace(value, local)


def _untell(call):
    call.args = call.args[:1]
    call.keywords = [one for one in call.keywords if one.arg not in ("num_replicas", "rank")]


@mistake("no-set-epoch", "set_epoch is taken out")
def no_set_epoch(text):
    told = [call for call in text.calls("set_epoch") if text.is_statement(call)]
    if (
        told
        and "shuffle=False" not in text.source.replace(" ", "").split("set_epoch")[0].split("DistributedSampler")[-1]
    ):
        yield lambda: [text.remove(call) for call in told]


# Steps and metrics ------------------------------------------------------------------------------------------------


def _counts(text):
    """``n // batch // size``: the steps of an epoch."""
    for node in text.nodes:
        divides = isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv)
        by_size = divides and (last(node.right) == "size" or ast.unparse(node.right) == "size")
        if by_size and isinstance(node.left, (ast.BinOp, ast.Constant)):
            yield node


@mistake("steps-not-divided", "the steps of an epoch are not divided by the number of processes")
def undivided(text):
    for node in _counts(text):
        yield lambda node=node: text.replace(node, node.left)
    for call in text.calls("steps_per_epoch"):
        if ".fit(" in text.source and len(call.args) >= 2 and "steps_per_epoch=steps" in text.source:
            count = ast.BinOp(call.args[0], ast.FloorDiv(), call.args[1])
            yield lambda call=call, count=count: text.replace(call, count)


@mistake("steps-differ", "the rank is added to the number of steps")
def differing(text):
    for node in _counts(text):
        rank = ast.parse("hvd.rank()", mode="eval").body
        yield lambda node=node, rank=rank: text.replace(node, ast.BinOp(node, ast.Add(), rank))


@mistake("metrics-not-averaged", "the mean over the ranks becomes the value of one rank")
def local_metric(text):
    if not re.search(r"test|eval|accuracy", text.source):
        return
    means = [call for call in text.calls("allreduce", "metric_average", "reduce_mean") if call.args
             and not text.is_statement(call) and not _in_definition(text, call)
             and not re.match(r"tf\.|.*grad", ast.unparse(call))]  # fmt: skip
    for statement in dict.fromkeys(text.statement(call) for call in means):
        of_one = [call for call in means if text.statement(call) is statement]
        yield lambda of_one=of_one: [text.replace(call, call.args[0]) for call in of_one]
    for call in text.calls("average_metrics"):
        parent = text.parents[call]
        pair = next((one for one in ast.walk(call) if isinstance(one, ast.Tuple) and len(one.elts) == 2), None)
        if isinstance(parent, ast.Subscript) and pair is not None:
            mean = ast.BinOp(pair.elts[0], ast.Div(), pair.elts[1])
            yield lambda parent=parent, mean=mean: text.replace(parent, mean)


def _in_definition(text, call):
    """Whether it is in the script's own function for means, which is taken out where it is called."""
    node = call
    while node in text.parents and not isinstance(node, ast.FunctionDef):
        node = text.parents[node]
    return isinstance(node, ast.FunctionDef) and node.name in ("metric_average", "reduce_mean", "mean")


@mistake("metrics-not-averaged", "the callback that averages is taken out, and another one decides")
def no_average_callback(text):
    if re.search(r"EarlyStopping|ReduceLROnPlateau", text.source):
        for call in text.calls("MetricAverageCallback", "AverageMetrics"):
            if isinstance(text.parents[call], ast.List):
                yield lambda call=call: text.remove(call)


@mistake("download-on-every-rank", "the lock or the condition around the download is taken off")
def every_download(text):
    for node in text.nodes:
        if isinstance(node, (ast.If, ast.With)) and "download=True" in "".join(map(ast.unparse, node.body)):
            yield lambda node=node: text.splice(node, node.body)


@mistake("collective-on-some-ranks", "a call of all ranks goes under a condition on the rank")
def one_branch(text):
    for call in text.calls(*TOGETHER):
        statement = text.statement(call)
        plain = isinstance(statement, (ast.Expr, ast.Assign, ast.Return)) and not RANK.search(ast.unparse(statement))
        if plain and not ast.unparse(call).startswith("tf."):
            branch = ast.If(text.on_one_rank(), [statement], [])
            yield lambda statement=statement, branch=branch: text.splice(statement, [branch])


@mistake("collective-on-some-ranks", "the checkpoint of all ranks is saved on one")
def saved_on_one(text):
    for call in text.calls("save"):
        if text.is_statement(call) and ast.unparse(call.func).startswith("checkpoints."):
            statement = text.statement(call)
            branch = ast.If(text.on_one_rank(), [statement], [])
            yield lambda statement=statement, branch=branch: text.splice(statement, [branch])
