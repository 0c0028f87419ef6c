"""``hvd.rank == 0``: the function where its number is meant."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hvdkit.prepare.check.case import Case
from hvdkit.prepare.check.libraries import NUMBERS, role
from hvdkit.prepare.check.program import everything

_TAKE_NUMBERS = {
    "int", "float", "str", "range", "print", "len", "abs", "max", "min", "set_device", "shard", "format", "device",
    "take", "DistributedSampler", "set_visible_devices", "array_split", "info", "cuda", "islice", "round",
}  # fmt: skip
_NUMBER_ARGUMENTS = {
    "rank", "num_replicas", "world_size", "num_shards", "index", "root_rank", "device_ids", "steps_per_epoch",
}  # fmt: skip


def uncalled(case: Case) -> Iterator[ast.expr]:
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


def _named_by(case: Case, node: ast.AST, functions: set[ast.AST], methods: set[str]) -> Iterator[ast.expr]:
    """The functions that a value may be, followed through names, arguments, dictionaries and returns."""

    def behind(one: ast.AST) -> list[ast.AST]:
        is_end = one in functions or (isinstance(one, ast.Attribute) and one.attr in methods)
        return [] if is_end else case.behind(one)

    yield from (one for one in everything(node, behind) if one in functions and isinstance(one, ast.expr))


def _is_function(case: Case, node: ast.AST) -> bool:
    name = case.dotted(node) if isinstance(node, (ast.Attribute, ast.Name)) else None
    if name is None or role(name) not in NUMBERS or name.startswith("mpi4py"):
        return False
    imports = case.reaching(node) if isinstance(node, ast.Name) else []
    return isinstance(node, ast.Attribute) or any(one.imported for one in imports)


def _is_number(case: Case, node: ast.AST) -> bool:
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
