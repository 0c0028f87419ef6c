"""Rules about calls: left out, in the wrong order, by the wrong number, on the wrong ranks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hvdkit.prepare.check import step_gradients, step_start
from hvdkit.prepare.check.calls import argument, arguments, has_stars, is_constant, method, word
from hvdkit.prepare.check.libraries import NUMBERS, RANKS, SAMPLERS, TOGETHER, Role, role
from hvdkit.prepare.check.program import everything
from hvdkit.prepare.check.steps import JudgedCase
from hvdkit.prepare.check.trace import Condition, Event

_FETCHES = (
    "urllib.request.urlretrieve", "wget.download", "gdown.download", "torch.hub.download_url_to_file",
    "torchvision.datasets.utils.download_url", "torchvision.datasets.utils.download_and_extract_archive",
    "keras.utils.get_file",
)  # fmt: skip
_FETCHERS = re.compile(r"(wget|curl)\b")
_NEED_INIT = (Role.DISTRIBUTE, Role.PIN, Role.SCALE, Role.SHARD, Role.CHECKPOINTS)
_REDUCE_TO_LOCAL = (ast.Mod, ast.Sub, ast.FloorDiv)
_DATA_SETS = ("torchvision.", "torchaudio.", "torchtext.", "torch_geometric.", "medmnist.")

_TAKE_NUMBERS = {
    "int", "float", "str", "range", "print", "len", "abs", "max", "min", "set_device", "shard", "format", "device",
    "take", "DistributedSampler", "set_visible_devices", "array_split", "info", "cuda", "islice", "round",
}  # fmt: skip
_NUMBER_ARGUMENTS = {
    "rank", "num_replicas", "world_size", "num_shards", "index", "root_rank", "device_ids", "steps_per_epoch",
}  # fmt: skip
ROOT = "root"
OTHERS = "others"
ONE = "one"
_CALLBACKS = (Role.BROADCAST_CALLBACK, Role.AVERAGE_CALLBACK, Role.CHECKPOINT_CALLBACK)
_GROUPS = {"process_set", "group", "process_group"}
_DEEPEST = 9


# Functions for numbers ------------------------------------------------------------------------------------------------


def uncalled(case: JudgedCase) -> Iterator[ast.expr]:
    """The functions for rank and size that are used as numbers: where they are named without a call."""
    functions = {node for node in case.nodes if _is_function(case, node)}
    if all(getattr(case.parents[node], "func", None) is node for node in functions):
        return
    methods = {
        node.func.attr
        for node in case.nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not case.name(node)
    }
    for node in case.nodes:
        is_read = isinstance(node, ast.expr) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        if is_read and _is_number(case, node):
            yield from _named_by(case, node, functions, methods)


def _named_by(case: JudgedCase, node: ast.AST, functions: set[ast.AST], methods: set[str]) -> Iterator[ast.expr]:
    """The functions that a value may be, followed through names, arguments, dictionaries and returns."""

    def behind(one: ast.AST) -> list[ast.AST]:
        is_end = one in functions or (isinstance(one, ast.Attribute) and one.attr in methods)
        return [] if is_end else case.behind(one)

    yield from (one for one in everything(node, behind) if one in functions and isinstance(one, ast.expr))


def _is_function(case: JudgedCase, node: ast.AST) -> bool:
    name = case.dotted(node) if isinstance(node, (ast.Attribute, ast.Name)) else None
    if name is None or role(name) not in NUMBERS or name.startswith("mpi4py"):
        return False
    imports = case.reaching(node) if isinstance(node, ast.Name) else []
    return isinstance(node, ast.Attribute) or any(one.imported for one in imports)


def _is_number(case: JudgedCase, node: ast.AST) -> bool:
    """Whether a value is used in a way that only makes sense for a number."""
    parent = case.parents[node]
    match parent:
        case ast.Compare(ops=operators, comparators=others):
            asks_none = any(isinstance(one, ast.Constant) and one.value is None for one in others)
            return not (asks_none and any(isinstance(one, (ast.Is, ast.IsNot)) for one in operators))
        case ast.BinOp() | ast.FormattedValue() | ast.Slice():
            return True
        case ast.IfExp() if parent.test is not node:
            return _is_number(case, parent)
        case ast.UnaryOp() | ast.BoolOp() | ast.If() | ast.While() | ast.IfExp():  # a name may hold a function or None
            return isinstance(node, ast.Attribute) and case.dotted(node) is not None
        case ast.Subscript(slice=asked) | ast.Match(subject=asked):
            return asked is node
        case ast.keyword():
            return parent.arg in _NUMBER_ARGUMENTS
        case ast.List():
            return isinstance(case.parents[parent], ast.keyword)
        case ast.Tuple():
            outer = case.parents[parent]
            return isinstance(outer, ast.BinOp) and isinstance(outer.op, ast.Mod)
        case ast.Call():
            return parent.func is not node and ast.unparse(parent.func).rpartition(".")[2] in _TAKE_NUMBERS
        case ast.Assign(targets=[ast.Subscript(value=base)]):
            return case.dotted(base) == "os.environ"
    return False


def called_values(case: JudgedCase) -> Iterator[Event]:
    """``world.rank()``: hvdkit's topology has numbers, not functions."""
    for event in case.events:
        if isinstance(event.node.func, ast.Attribute) and case.is_topology(event.node.func):
            yield event


# Single calls ---------------------------------------------------------------------------------------------------------


def before_init(case: JudgedCase) -> Iterator[Event]:
    """The first call that needs the library, where it comes before init."""
    starts = step_start.starts(case)
    if not starts or not starts[0].reached or "torch.distributed.rpc" in case.others:
        return
    root = case.name(starts[0].node).split(".")[0]
    for event in case.having(*NUMBERS, *TOGETHER, *_NEED_INIT):
        if event.order > starts[0].order or not event.reached:
            return
        asked = any(re.search("is_initialized|is_available", ast.unparse(guard.test)) for guard in event.guards)
        if case.name(event.node).split(".")[0] == root and case.on_ranks(event) and not asked:
            yield event
            return


def pinned_by_global_rank(case: JudgedCase) -> Iterator[ast.expr]:
    """The first line that takes the rank in the job for the number of a GPU."""
    for chosen in sorted(step_start.device_choices(case), key=lambda one: one.lineno):
        reached = case.reach(chosen)
        sums = [one for one in reached if isinstance(one, ast.BinOp) and isinstance(one.op, _REDUCE_TO_LOCAL)]
        reckoned = any(not isinstance(one.left, (ast.Constant, ast.JoinedStr)) for one in sums)  # "cuda:%d" % rank
        named_local = any("local" in word(one) for one in reached)
        if case.kinds(chosen) == {Role.RANK} and not reckoned and not named_local:
            yield chosen
            return


def not_distributed(case: JudgedCase) -> Iterator[Event | int]:
    """Where gradients stay on their rank."""
    yield from case.verdicts[3].blamed
    yield from step_gradients.undistributed(case)
    if case.library == "ddp":
        yield from step_gradients.unwrapped_models(case)


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


def sampler_without_ranks(case: JudgedCase) -> Iterator[ast.expr]:
    """``DistributedSampler(dataset)`` in a script that has no process group of PyTorch."""
    if case.library == "ddp" or any(name.startswith("torch.distributed.") for name in case.used) or case.strangers():
        return
    for call in (event.node for event in case.events if event.reached):
        told = argument(call, "num_replicas", 1) is not None and argument(call, "rank", 2) is not None
        if case.name(call) in SAMPLERS and not told and not has_stars(call):
            yield call.func


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
    if name.startswith(("os.system", "os.popen", "subprocess.")):
        return any(isinstance(one, ast.Constant) and _FETCHERS.match(str(one.value)) for one in ast.walk(call))
    return name in _FETCHES or (name.startswith(_DATA_SETS) and is_constant(argument(call, "download"), True))


def downloads_without_barrier(case: JudgedCase) -> Iterator[Event]:
    """Downloads on one rank that the next use of the same data set on all ranks does not wait for."""
    for event in case.events:
        name = case.name(event.node)
        if name in _FETCHES or not _downloads(case, event.node) or _side(case, event) is None or not event.reached:
            continue
        after = case.events[event.order + 1 :]
        used = next((one for one in after if case.name(one.node) == name and not _downloads(case, one.node)), None)
        if used is None or case.where(used) != "every rank":
            continue
        between = [one.node for one in after if one.order < used.order]
        together = any(case.role(call) in (*TOGETHER, Role.INIT) for call in between)
        unsure = any(case.is_opaque(call) or method(call) in ("sleep", "wait", "exists") for call in between)
        if not together and not unsure:
            yield event


# Calls that all ranks make together, on a branch that only some of them take ------------------------------------------


def _side(case: JudgedCase, event: Event) -> tuple[str, Condition] | None:
    """The ranks that reach an event, and the condition that keeps the others away; None where all may."""
    for guard in event.guards:
        if guard.certain and not guard.wraps and (taken := _takers(case, guard.test, guard.holds)) is not None:
            return taken, guard
    return None


def _takers(case: JudgedCase, test: ast.AST, holds: bool, depth: int = 0) -> str | None:
    """ROOT, OTHERS or ONE where a condition on the rank decides for certain; None for everything else."""
    if depth > _DEEPEST:
        return None
    match test:
        case ast.BoolOp():
            decides = isinstance(test.op, ast.And) == holds
            sides = [_takers(case, one, holds, depth + 1) for one in test.values] if decides else []
            return next((one for one in sides if one is not None), None)
        case ast.UnaryOp(op=ast.Not()):
            return _takers(case, test.operand, not holds, depth + 1)
        case ast.Compare(ops=[operator], comparators=[right]):
            return _compared(case, test.left, operator, right, holds)
        case ast.IfExp(body=body, orelse=ast.Constant(value=None | False | 0)):
            both = not isinstance(body, ast.Constant) or bool(body.value)
            return _takers(case, test.test, holds, depth + 1) if both else None
        case ast.Attribute(attr="is_root") if case.kind(test) == Role.RANK:
            return ROOT if holds else OTHERS
        case ast.Name() | ast.Attribute() | ast.Call() | ast.arg():
            if _is_rank(case, test):
                return OTHERS if holds else ROOT
            named = {_takers(case, one, holds, depth + 1) for one in case.behind(test)}
            return named.pop() if len(named) == 1 else None
    return None


def _compared(case: JudgedCase, left: ast.expr, operator: ast.cmpop, right: ast.expr, holds: bool) -> str | None:
    if isinstance(left, ast.Constant) and isinstance(operator, (ast.Eq, ast.NotEq, ast.Is, ast.IsNot)):
        left, right = right, left
    if not isinstance(right, ast.Constant) or not _is_rank(case, left):
        return None
    if isinstance(operator, (ast.Eq, ast.Is, ast.NotEq, ast.IsNot)):
        equal = isinstance(operator, (ast.Eq, ast.Is)) == holds
        return (ROOT if equal else OTHERS) if right.value == 0 else ONE
    above = isinstance(operator, (ast.Gt, ast.GtE)) == holds
    edge = {ast.Gt: 0, ast.LtE: 0, ast.GtE: 1, ast.Lt: 1}.get(type(operator))
    return (OTHERS if above else ROOT) if right.value == edge else ONE


def _is_rank(case: JudgedCase, node: ast.AST, depth: int = 0) -> bool:
    """Whether an expression is a rank and nothing else, for certain."""
    if case.kind(node) in RANKS:
        return getattr(node, "attr", "") != "is_root"
    if depth > _DEEPEST:
        return False
    if isinstance(node, ast.Call) and case.name(node) == "builtins.int" and node.args:
        return _is_rank(case, node.args[0], depth + 1)
    values = case.behind(node) if isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.arg)) else []
    return bool(values) and all(_is_rank(case, one, depth + 1) for one in values)


def on_some_ranks(case: JudgedCase) -> Iterator[ast.expr]:
    """What is called, on the branch itself, of collectives that some ranks never reach."""
    sides: dict[str, set[str]] = {}
    found = []
    for event in case.having(*TOGETHER, *_CALLBACKS):
        of_group = any(keyword.arg in _GROUPS for keyword in event.node.keywords)
        if not of_group and (taken := _side(case, event)) is not None:
            called = case.name(event.node) or ast.unparse(event.node.func)
            sides.setdefault(called, set()).add(taken[0])
            found.append((event, called, *taken))
    for event, called, ranks, guard in found:
        others = sides[called] - {ranks}  # who makes the same call on a branch of their own
        if not (others if ranks == ONE else others - {ONE}):
            yield _entry(case, event, guard).func


def _entry(case: JudgedCase, event: Event, guard: Condition) -> ast.Call:
    """The call on the branch itself: of a function that holds the collective, or the collective."""
    inside = case.function(guard.test)
    under = {one.node for one in case.events if guard in one.guards}
    way = [one for one in [*event.stack, event.node] if case.function(one) is inside and one in under]
    return way[0] if way else event.node
