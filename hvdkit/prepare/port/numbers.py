"""Rank and size, which become the values of hvdkit's topology."""

from __future__ import annotations

import ast

from hvdkit.prepare.port.edits import to
from hvdkit.prepare.port.plan import NUMBERS, Plan

_NAMES = {
    "get_rank": "rank",
    "get_world_size": "size",
    "RANK": "rank",
    "WORLD_SIZE": "size",
    "LOCAL_RANK": "local_rank",
}
_PLAIN = (ast.If, ast.IfExp, ast.While, ast.BoolOp, ast.Assign, ast.keyword, ast.Return, ast.Call, ast.NamedExpr)


def replace(plan: Plan, prefix: str) -> None:
    """``hvd.rank()`` becomes ``world.rank``, and ``hvd.rank() == 0`` becomes ``world.is_root``.

    Args:
        prefix: of the full names that are meant, such as "horovod.".
    """
    for node in plan.case.nodes:
        if isinstance(node, ast.Call) and (value := number(plan, node, prefix)):
            with plan.sure():
                _replace(plan, node, value)


def number(plan: Plan, node: ast.AST, prefix: str) -> str:
    """Which value of the topology an expression is, "" for every other."""
    case = plan.case
    if not isinstance(node, ast.Call):
        return ""
    name = case.name(node)
    if name.startswith(prefix) and not node.args and not node.keywords:
        last = name.rpartition(".")[2]
        return _NAMES.get(last, last if last in NUMBERS else "")
    if prefix == "torch.distributed." and name == "builtins.int" and len(node.args) == 1:
        match node.args[0]:
            case ast.Subscript(value=base, slice=ast.Constant(value=str(key))) if case.dotted(base) == "os.environ":
                return _NAMES.get(key, "")
    return ""


def _replace(plan: Plan, node: ast.Call, value: str) -> None:
    world = plan.use_world(node)
    match plan.case.parents[node]:
        case ast.Compare(left=left, ops=[operator], comparators=[ast.Constant(value=0)]) as around:
            asked = value == "rank" and left is node
            if asked and isinstance(operator, ast.Eq):
                plan.change(around, to(f"{world}.is_root"))
                return
            if asked and isinstance(operator, ast.NotEq) and isinstance(plan.case.parents[around], _PLAIN):
                plan.change(around, to(f"not {world}.is_root"))
                return
    plan.change(node, to(f"{world}.{value}"))
