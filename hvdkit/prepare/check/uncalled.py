"""``hvd.rank == 0``: the function where its number is meant."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hvdkit.prepare.check.facts import Facts
from hvdkit.prepare.check.libraries import LOCAL_RANK, LOCAL_SIZE, RANK, SIZE, role

_NUMBERS = (RANK, LOCAL_RANK, SIZE, LOCAL_SIZE)
_TAKE_NUMBERS = {
    "int", "float", "str", "range", "print", "len", "abs", "max", "min", "set_device", "shard", "format", "device",
    "take", "DistributedSampler", "set_visible_devices", "array_split", "info", "cuda", "islice", "round",
}  # fmt: skip
_NUMBER_ARGUMENTS = {
    "rank", "num_replicas", "world_size", "num_shards", "index", "root_rank", "device_ids", "steps_per_epoch",
}  # fmt: skip


def uncalled(facts: Facts) -> Iterator[ast.expr]:
    """The functions for rank and size that are used as numbers: where they are named without a call."""
    if not any(_is_function(facts, node) and not _is_called(facts, node) for node in facts.program.nodes):
        return
    calls = [node.func for node in facts.program.nodes if isinstance(node, ast.Call) and not facts.name(node)]
    called = {func.attr for func in calls if isinstance(func, ast.Attribute)}
    for node in facts.program.nodes:
        if not isinstance(node, (ast.Attribute, ast.Name, ast.Subscript, ast.Call)):
            continue
        if isinstance(node, ast.Call) or isinstance(node.ctx, ast.Load):
            yield from _functions(facts, node, called) if _is_number(facts, node) else ()


def _functions(facts: Facts, node: ast.expr, called: set[str]) -> list[ast.expr]:
    """The uncalled functions that a value may be, followed through names, arguments, dictionaries and returns."""
    found: list[ast.expr] = []
    stack: list[ast.AST] = [node]
    seen: set[ast.AST] = set()
    while stack:
        one = stack.pop()
        if one in seen:
            continue
        seen.add(one)
        if isinstance(one, ast.expr) and _is_function(facts, one):
            found.append(one)
        elif isinstance(one, ast.Attribute) and one.attr in called:
            continue
        else:
            stack += _behind(facts, one)
    return found


def _is_called(facts: Facts, node: ast.AST) -> bool:
    parent = facts.program.parents[node]
    return isinstance(parent, ast.Call) and parent.func is node


def _is_function(facts: Facts, node: ast.AST) -> bool:
    if not isinstance(node, (ast.Attribute, ast.Name)):
        return False
    name = facts.names.dotted(node)
    if name is None or role(name) not in _NUMBERS or name.startswith("mpi4py"):
        return False
    imports = facts.program.reaching(node) if isinstance(node, ast.Name) else []
    return isinstance(node, ast.Attribute) or any(isinstance(one.node, ast.alias) for one in imports)


def _behind(facts: Facts, node: ast.AST) -> list[ast.AST]:
    match node:
        case ast.Name():
            return [value for binding in facts.program.reaching(node) for value in facts.flow.bound(binding)]
        case ast.Attribute():
            bindings = facts.program.attributes.get(node.attr, [])
            return [value for binding in bindings for value in facts.flow.bound(binding)]
        case ast.arg():
            return list(facts.flow.arguments_for(node))
        case ast.Subscript():
            return facts.flow.entry(node)
        case ast.IfExp():
            return [node.body, node.orelse]
        case ast.Call():
            return [value for function in facts.flow.callees(node) for value in facts.flow.returned(function)]
    return []


def _is_number(facts: Facts, node: ast.expr) -> bool:
    """Whether a value is used in a way that only makes sense for a number."""
    parent = facts.program.parents[node]
    match parent:
        case ast.Compare(ops=operators, comparators=others):
            return not any(isinstance(one, ast.Constant) and one.value is None for one in others) or not any(
                isinstance(one, (ast.Is, ast.IsNot)) for one in operators
            )
        case ast.BinOp() | ast.FormattedValue() | ast.Slice():
            return True
        case ast.UnaryOp() | ast.BoolOp() | ast.If() | ast.While():
            return _is_condition(facts, node)
        case ast.IfExp():
            return _is_condition(facts, node) if parent.test is node else _is_number(facts, parent)
        case ast.Subscript():
            return parent.slice is node
        case ast.Match():
            return parent.subject is node
        case ast.keyword():
            return parent.arg in _NUMBER_ARGUMENTS
        case ast.List():
            return isinstance(facts.program.parents[parent], ast.keyword)
        case ast.Tuple():
            outer = facts.program.parents[parent]
            return isinstance(outer, ast.BinOp) and isinstance(outer.op, ast.Mod)
        case ast.Call():
            return parent.func is not node and ast.unparse(parent.func).rpartition(".")[2] in _TAKE_NUMBERS
        case ast.Assign(targets=[ast.Subscript(value=base)]):
            return facts.names.dotted(base) == "os.environ"
    return False


def _is_condition(facts: Facts, node: ast.expr) -> bool:
    """``if hvd.rank:``; of a name, such as one that may hold functions, it is not certain what a condition asks."""
    return isinstance(node, ast.Attribute) and facts.names.dotted(node) is not None
