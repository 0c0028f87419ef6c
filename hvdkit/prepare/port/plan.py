"""What is changed in one script, what stays and why."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from libcst import CSTNode

from hvdkit.prepare.check.case import once
from hvdkit.prepare.check.libraries import Role
from hvdkit.prepare.check.source import FunctionNode, arguments, method
from hvdkit.prepare.check.steps import JudgedCase
from hvdkit.prepare.check.trace import Event
from hvdkit.prepare.port.edits import Edits, ScriptText, places

_NUMBERS = {one: one for one in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")}
_NUMBERS |= {"get_rank": "rank", "get_world_size": "size"}
"""By what Horovod and PyTorch call them hvdkit's values of the topology."""
_VARIABLES = {"RANK": "rank", "WORLD_SIZE": "size", "LOCAL_RANK": "local_rank"}
_PLAIN = (ast.If, ast.IfExp, ast.While, ast.BoolOp, ast.Assign, ast.keyword, ast.Return, ast.Call, ast.NamedExpr)
LARGER = (
    "each rank takes batches of the script's size: on 2 ranks the global batch and the learning rate are twice the "
    "script's (docs/same_result.md keeps both)"
)


@dataclass(frozen=True)
class Left:
    """What is not certain, and stays.

    Attributes:
        line: in the script that was given.
        why: the reason, a sentence without its full stop.
        write: what to write by hand.
    """

    line: int
    why: str
    write: str


class Unsure(Exception):  # noqa: N818 - it never leaves this room
    """A change that is not certain; nothing of it has been made."""

    def __init__(self, node: ast.AST | int, why: str, write: str) -> None:
        super().__init__(why)
        self.left = Left(node if isinstance(node, int) else getattr(node, "lineno", 1), why, write)


class PortPlan:
    """The port of one script.

    Attributes:
        case: what ``check`` knows of it.
        binding: "torch", "keras" or "tensorflow".
        world, hk, hvd: free names for the topology, hvdkit's module and Horovod's.
        start: the statement that starts the library, where ``world`` is bound, or above which it will be.
        left: what stays.
        notes: what else the owner should know.
    """

    def __init__(self, text: ScriptText) -> None:
        self.text = text
        self.case = JudgedCase(text.tree)
        self.edits = Edits(text)
        self.src = text.source
        self.left: list[Left] = []
        self.notes: list[str] = []
        self.binding = ""
        self.start: ast.stmt | None = None
        self._needs: set[FunctionNode | None] = set()
        nodes = self.case.nodes
        self._taken = {node.id for node in nodes if isinstance(node, ast.Name)}
        self._taken |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        self._taken |= {(node.asname or node.name).split(".")[0] for node in nodes if isinstance(node, ast.alias)}
        self.world = self.free("world", "topology", "hvdkit_world")
        self.hk = self.free("hk", "hvdkit_", "hk_")
        self._horovod = ""

    def free(self, *names: str) -> str:
        """The first of these names that the script does not use."""
        found = next((name for name in names if name not in self._taken), f"{names[0]}_of_hvdkit")
        self._taken.add(found)
        return found

    @contextmanager
    def sure(self) -> Iterator[None]:
        """Around one change: where it is not certain, it becomes a line of the report."""
        before = {**self.edits.asked}, self._horovod, {*self._needs}
        try:
            yield
        except Unsure as error:
            self.edits.asked, self._horovod, self._needs = before
            self.left.append(error.left)

    def each(self, change: Callable[[PortPlan, Event], None], events: Iterable[Event]) -> None:
        """Try a change on each call of these events, once."""
        for event in once(events):
            with self.sure():
                change(self, event)

    # Statements and expressions -------------------------------------------------------------------------------------

    def statement(self, node: ast.AST) -> ast.stmt:
        """The statement of a node, standing alone on its lines in a block; ``Unsure`` where it shares its line."""
        found = self.case.statement(node)
        if not isinstance(found, ast.stmt) or not self.text.stands_alone(found):
            raise Unsure(node, "it shares its line with another statement", "put it on a line of its own")
        return found

    def alone(self, call: ast.Call) -> ast.Expr:
        """The statement that is nothing but a call; ``Unsure`` where the call is part of something larger."""
        found = self.statement(call)
        if isinstance(found, ast.Expr) and found.value is call:
            return found
        name = ast.unparse(call.func)
        raise Unsure(call, f"`{name}` is part of a larger expression", f"call `{name}` on a line of its own")

    def assigned(self, call: ast.Call) -> ast.Assign | None:
        """The statement that only gives a call's result one name or attribute."""
        found = self.statement(call)
        if isinstance(found, ast.Assign) and found.value is call and len(found.targets) == 1:
            return found if isinstance(found.targets[0], (ast.Name, ast.Attribute)) else None
        return None

    def _node(self, node: ast.expr | ast.stmt) -> CSTNode:
        found = self.text.node(node)
        if found is None:
            raise Unsure(node, "what it would become does not fit the text around it", "see docs/migrate.md")
        return found

    def _ask(self, node: ast.expr | ast.stmt, how: str, what: object) -> None:
        self.edits.asked[self._node(node), how, what] = None

    def moved(self, node: ast.expr) -> str:
        """What stands in new code for an expression, and for all that changes in it."""
        self._node(node)
        return self.text.moved(node)

    def change(self, node: ast.expr, code: str) -> None:
        """Put code in the place of an expression; ``__`` in it is the old one."""
        self._ask(node, "change", code)

    def begin(self, node: ast.List, code: str) -> None:
        """Give a list one more element, in front of all that it has."""
        self._ask(node, "begin", code)

    def rename(self, node: ast.expr, keyword: str, value: str | None = None) -> None:
        """Give an argument this keyword, "" for none, and another value."""
        whole = self.case.parents[node]
        call = self.case.parents[whole] if isinstance(whole, ast.keyword) else whole
        if isinstance(call, ast.Call):
            place = places(call).index(whole if isinstance(whole, ast.keyword) else node)
            self._ask(call, "rename", (place, keyword, value))

    def add(self, call: ast.Call, value: str, keyword: str = "", place: int | None = None) -> None:
        """Give a call one more argument, at the end or at a place further up; ``Unsure`` of ``f(x for x in y)``."""
        given = arguments(call)
        if given and self.text.span(given[-1])[1] == self.text.span(call)[1]:
            raise Unsure(call, "its argument is a generator that has no brackets of its own", "add them")
        self._ask(call, "add", (place, keyword, value))

    def drop(self, call: ast.Call, gone: Iterable[ast.expr | ast.keyword]) -> None:
        """Take arguments out of a call."""
        for one in gone:
            self._ask(call, "drop", places(call).index(one))

    def edit(self, how: str, statement: ast.AST, code: str = "") -> None:
        """Change a statement as a whole: see ``Edits``; ``Unsure`` where it shares its line."""
        self._ask(self.statement(statement), how, code)

    def leave(self, node: ast.AST | int, why: str, write: str) -> None:
        """List what stays."""
        self.left.append(Unsure(node, why, write).left)

    def note(self, text: str) -> None:
        """Tell the owner something, once."""
        if text not in self.notes:
            self.notes.append(text)

    # The topology ---------------------------------------------------------------------------------------------------

    def starting(self, prefix: str) -> ast.stmt:
        """The statement that starts the library, once and always, and will bind ``world``; ``Unsure`` without one."""
        events = self.of(prefix, Role.INIT)
        write = f"{self.world} = {self.hk}.init(), once, on every way: one process is a job of one"
        if len({event.node for event in events}) != 1:
            blamed = events[-1].node if events else 1
            raise Unsure(blamed, "the library is started in several places, or nowhere", write)
        statement = self.alone(events[0].node)
        for node in self.case.ancestors(statement):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
                break
            if not (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)):
                raise Unsure(statement, "the library is started on a condition", write)
        self.start = statement
        return statement

    def use_world(self, node: ast.AST) -> str:
        """The topology's name, which will be visible where a node runs."""
        self._needs.add(self.case.function(node))
        return self.world

    def called(self, module: str) -> str:
        """How the script names a module, "" where it does not."""
        nodes = (node for node in self.case.nodes if isinstance(node, (ast.Name, ast.Attribute)))
        return next((ast.unparse(node) for node in nodes if self.case.dotted(node) == module), "")

    def use_horovod(self) -> str:
        """The name of Horovod's own module, which will be imported."""
        if not self._horovod:
            module = f"horovod.{'torch' if self.binding == 'torch' else 'tensorflow'}"
            imports = [alias for node in self.case.nodes if isinstance(node, ast.Import) for alias in node.names]
            known = [alias.asname or "" for alias in imports if alias.name == module]
            self._horovod = known[0] if known else self.free("hvd", "horovod_", "hvd_")
            if not known:
                self.import_(f"import {module} as {self._horovod}")
        return self._horovod

    def declare(self) -> None:
        """Make the topology global where functions use it that do not lie in the one that starts the library."""
        home = None if self.start is None else self.case.function(self.start)
        away = [one for one in self._needs if one is None or home not in (one, *self.case.ancestors(one))]
        if self.start is not None and home is not None and away:
            self.edit("first", self.start, f"global {self.world}")  # in front of what binds it

    def number(self, node: ast.AST, prefix: str) -> str:
        """Which value of the topology a call of the library with this prefix is, "" for every other expression."""
        if not isinstance(node, ast.Call):
            return ""
        name = self.case.name(node)
        if name.startswith(prefix) and not node.args and not node.keywords:
            return _NUMBERS.get(name.rpartition(".")[2], "")
        if prefix == "torch.distributed." and name == "builtins.int":
            match node.args:
                case [ast.Subscript(value=base, slice=ast.Constant(value=str(key)))]:
                    return _VARIABLES.get(key, "") if self.case.dotted(base) == "os.environ" else ""
        return ""

    def replace_numbers(self, prefix: str) -> None:
        """``hvd.rank()`` becomes ``world.rank``, and ``hvd.rank() == 0`` becomes ``world.is_root``."""
        for node in self.case.nodes:
            if isinstance(node, ast.Call) and (value := self.number(node, prefix)):
                with self.sure():
                    self._replace_number(node, value)

    def _replace_number(self, node: ast.Call, value: str) -> None:
        world = self.use_world(node)
        match self.case.parents[node]:
            case (
                ast.Compare(
                    left=left, ops=[ast.Eq() | ast.NotEq() as operator], comparators=[ast.Constant(value=0)]
                ) as comparison
            ) if value == "rank" and left is node:
                negated = isinstance(operator, ast.NotEq)
                if not negated or isinstance(self.case.parents[comparison], _PLAIN):
                    self.change(comparison, f"{'not ' * negated}{world}.is_root")
                    return
        self.change(node, f"{world}.{value}")

    def import_(self, code: str) -> None:
        """Import something, below the script's first imports."""
        last, body = self.last_import(), self.text.tree.body
        first = next((statement for statement in body if not is_text(statement)), body[0])
        self.edit("after" if last else "before", last or first, code)

    def last_import(self) -> ast.stmt | None:
        """The last of the imports with which the script begins."""
        last = None
        for statement in self.text.tree.body:
            inside = ast.walk(statement) if isinstance(statement, (ast.Try, ast.If)) else [statement]
            if any(isinstance(node, (ast.Import, ast.ImportFrom)) for node in inside):
                last = statement
            constant = isinstance(getattr(statement, "value", None), ast.Constant)  # a text, or a name for one
            if statement is not last and not constant and not re.search(r"^__\w+__ =|environ", ast.unparse(statement)):
                break
        return last

    def first_step(self, home: ast.stmt, event: Event) -> ast.stmt | None:
        """The statement beside ``home`` in which the first training step after an event happens, through calls."""
        beside = self.case.block(home)
        below = [one for one in beside[beside.index(home) + 1 :] if self.text.stands_alone(one)]
        steps = (one for one in self.case.steps if one.order > event.order and one.reached)
        nodes = (node for step in steps for node in (step.node, *step.stack))
        outward = (one for node in nodes for one in (node, *self.case.ancestors(node)))
        return next((one for one in outward if isinstance(one, ast.stmt) and one in below), None)

    def distribute(self, home: ast.Assign, event: Event, model: str, more: str = "") -> None:
        """Steps 4 and 5 of a PyTorch optimizer: below the statement that makes it, and above the first step."""
        optimizer = self.src(home.targets[0])
        first = self.first_step(home, event)
        beside = self.case.block(home)
        before = beside[: beside.index(first or home)]
        copies = dict.fromkeys(self.src(one) for statement in before for one in _copies_of(statement, model))
        sent = "\n".join(f"{self.hk}.broadcast_state({one})" for one in (f"{model}, {optimizer}", *copies))
        self.edit("after", home, f"{more}{optimizer} = {self.hk}.distribute({optimizer}, {model})")
        self.edit("before" if first else "after", first or home, sent)

    def pin(self, event: Event) -> None:
        """Step 2 where a GPU is chosen: a call on a line of its own."""
        self.edit("swap", self.alone(event.node), f"{self.hk}.pin_device({self.use_world(event.node)})")

    def scale(self, call: ast.Call, rate: ast.expr | None, default: str, keyword: str, scaled: str) -> None:
        """Step 3 of an optimizer: scale the rate that it is given, or its own where none is.

        Args:
            scaled: code with ``{}`` for the rate.
        """
        if rate is None:
            self.add(call, scaled.format(default), keyword)
        elif not self.case.has_size(rate, through=True):
            self.change(rate, scaled.format("__"))

    # What rules ask -------------------------------------------------------------------------------------------------

    def of(self, prefix: str, *roles: Role) -> list[Event]:
        """The events with a role whose full name begins so."""
        return [event for event in self.case.having(*roles) if self.case.name(event.node).startswith(prefix)]

    def makers(self, text: str) -> list[ast.Call]:
        """The calls that make what goes by this name or attribute anywhere, each once."""
        nodes = [node for node in self.case.nodes if isinstance(node, (ast.Name, ast.Attribute))]
        return list(dict.fromkeys(x for node in nodes if ast.unparse(node) == text for x in self.case.calls(node)))

    def models_of(self, node: ast.expr) -> set[str]:
        """The models whose ``parameters()`` a value holds, as text."""
        named = ("parameters", "named_parameters")
        calls = [call for call in self.case.calls(node, through=True) if method(call) in named]
        calls += [one for one in ast.walk(node) if isinstance(one, ast.Call) and method(one) == "parameters"]
        return {ast.unparse(call.func.value) for call in calls if isinstance(call.func, ast.Attribute)}


def _copies_of(statement: ast.stmt, model: str) -> list[ast.expr]:
    """What a statement makes a copy of a model: a target network, a teacher, an average of its weights."""
    match statement:
        case ast.Assign(targets=[made], value=ast.Call() as value):
            while isinstance(value.func, ast.Attribute) and isinstance(value.func.value, ast.Call):
                value = value.func.value  # deepcopy(model) of deepcopy(model).eval()
            maker, copied = ast.unparse(value.func), [ast.unparse(one) for one in value.args[:1]]
            return [made] if maker.endswith(("deepcopy", "AveragedModel")) and copied == [model] else []
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=filled, attr="load_state_dict"), args=[state, *_])):
            return [filled] if ast.unparse(state) == f"{model}.state_dict()" else []
    return []


def is_text(node: ast.stmt) -> bool:
    """Whether a statement is a docstring, or text between code."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
