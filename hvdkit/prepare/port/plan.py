"""What is changed in one script, what stays and why."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hvdkit.prepare.check.facts import method
from hvdkit.prepare.check.libraries import Role
from hvdkit.prepare.check.program import FunctionNode
from hvdkit.prepare.check.steps import JudgedCase
from hvdkit.prepare.check.trace import Event
from hvdkit.prepare.port.edits import Change, Edits
from hvdkit.prepare.port.text import Text

NUMBERS = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")


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


class Plan:
    """The port of one script.

    Attributes:
        case: what ``check`` knows of it.
        adapter: "torch", "keras" or "tensorflow".
        world, hk, hvd: free names for the topology, hvdkit's module and Horovod's.
        left: what stays.
        notes: what else the owner should know.
        started: init has a place, so that ``world`` exists.
    """

    def __init__(self, text: Text) -> None:
        self.text = text
        self.case = JudgedCase(text.tree)
        self.edits = Edits(text.module)
        self.left: list[Left] = []
        self.notes: list[str] = []
        self.adapter = ""
        self.started = False
        self._home: FunctionNode | None = None
        self._start: ast.stmt | None = None
        self._needs: set[FunctionNode | None] = set()
        self._taken = {one.id for one in self.case.nodes if isinstance(one, ast.Name)}
        self._taken |= {one.arg for one in self.case.nodes if isinstance(one, ast.arg)}
        self._taken |= {(one.asname or one.name).split(".")[0] for one in self.case.nodes if isinstance(one, ast.alias)}
        self.world = self.free("world", "topology", "hvdkit_world")
        self.hk = self.free("hk", "hvdkit_", "hk_")
        self._horovod = ""

    def free(self, *names: str) -> str:
        """The first of these names that the script does not use."""
        found = next((one for one in names if one not in self._taken), f"{names[0]}_of_hvdkit")
        self._taken.add(found)
        return found

    @contextmanager
    def sure(self) -> Iterator[None]:
        """Around one change: what is not certain of it becomes a line of the report."""
        try:
            yield
        except Unsure as unsure:
            self.left.append(unsure.left)

    def each(self, change: Callable[[Event], None], *events: Event) -> None:
        """Try a change on each call of these events, once."""
        for node in dict.fromkeys(event.node for event in events):
            with self.sure():
                change(next(event for event in events if event.node is node))

    # Statements and expressions -------------------------------------------------------------------------------------

    def statement(self, node: ast.AST) -> ast.stmt:
        """The statement of a node, standing alone on its lines in a block.

        Raises:
            Unsure: it shares its line.
        """
        found = self.case.statement(node)
        if not isinstance(found, ast.stmt) or self.text.line(found) is None:
            raise _shared(node)
        return found

    def alone(self, event: Event) -> ast.Expr:
        """The statement that is nothing but a call.

        Raises:
            Unsure: the call is part of something larger.
        """
        found = self.statement(event.node)
        if isinstance(found, ast.Expr) and found.value is event.node:
            return found
        name = ast.unparse(event.node.func)
        raise Unsure(event.node, f"`{name}` is part of a larger expression", f"call `{name}` on a line of its own")

    def assigned(self, call: ast.Call) -> ast.Assign | None:
        """The statement that only gives a call's result one name or attribute."""
        found = self.statement(call)
        if isinstance(found, ast.Assign) and found.value is call and len(found.targets) == 1:
            return found if isinstance(found.targets[0], (ast.Name, ast.Attribute)) else None
        return None

    def change(self, node: ast.expr, make: Change) -> None:
        """Change an expression.

        Raises:
            Unsure: LibCST does not show it as one.
        """
        found = self.text.expression(node)
        if found is None:
            raise Unsure(node, f"`{ast.unparse(node)}` cannot be told apart in its line", "change it by hand")
        self.edits.change(found, make)

    def change_argument(self, node: ast.expr, make: Change) -> None:
        """Change an argument as a whole, its keyword included."""
        found = self.text.argument(node)
        if found is None:
            raise Unsure(node, f"`{ast.unparse(node)}` cannot be told apart in its call", "change it by hand")
        self.edits.change(found, make)

    def edit(self, how: str, statement: ast.AST, code: str = "") -> None:
        """Change a statement as a whole: see ``Edits.edit``.

        Raises:
            Unsure: it shares its line.
        """
        line = self.text.line(statement)
        if line is None:
            raise _shared(statement)
        self.edits.edit(how, line, code)

    def leave(self, node: ast.AST | int, why: str, write: str) -> None:
        """List what stays."""
        self.left.append(Unsure(node, why, write).left)

    def src(self, node: ast.AST) -> str:
        """The text of an expression."""
        return self.text.source(node)

    def block(self, statement: ast.AST) -> list[ast.stmt]:
        """The statements among which one stands."""
        parent = self.case.parents[statement]
        for name in ("body", "orelse", "finalbody"):
            found = getattr(parent, name, None)
            if isinstance(found, list) and statement in found:
                return found
        return []

    # The topology ---------------------------------------------------------------------------------------------------

    def starting(self, prefix: str) -> ast.stmt:
        """The statement that starts the library, once and always.

        Raises:
            Unsure: it is started in several ways, or on a condition.
        """
        events = self.of(prefix, Role.INIT)
        write = f"{self.world} = {self.hk}.init(), once, on every way: one process is a job of one"
        if len({one.node for one in events}) != 1:
            raise Unsure(
                events[-1].node if events else 1, "the library is started in several places, or nowhere", write
            )
        statement = self.alone(events[0])
        for one in self.case.ancestors(statement):
            if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
                break
            if not (isinstance(one, ast.If) and "__name__" in ast.unparse(one.test)):
                raise Unsure(statement, "the library is started on a condition", write)
        return statement

    def start_at(self, statement: ast.stmt) -> None:
        """The statement that starts the library: where ``world`` is bound, or above which it will be."""
        self.started, self._start, self._home = True, statement, self.case.function(statement)

    def use_world(self, node: ast.AST) -> str:
        """The topology's name, which will be visible where a node runs."""
        self._needs.add(self.case.function(node))
        return self.world

    def use_horovod(self) -> str:
        """The name of Horovod's own module, which will be imported."""
        if not self._horovod:
            known = next((alias for alias in self._imports() if alias[0] == f"horovod.{self.adapter}"), None)
            self._horovod = known[1] if known else self.free("hvd", "horovod_", "hvd_")
            if known is None:
                self.import_(f"import horovod.{self.adapter} as {self._horovod}")
        return self._horovod

    def _imports(self) -> list[tuple[str, str]]:
        nodes = [one for one in self.case.nodes if isinstance(one, ast.Import)]
        return [(alias.name, alias.asname or "") for node in nodes for alias in node.names]

    def declare(self) -> None:
        """Make the topology global where functions use it that do not lie in the one that starts the library."""
        if self._start is None or self._home is None:
            return
        for function in self._needs:
            inside = [] if function is None else [function, *self.case.ancestors(function)]
            if self._home not in inside:
                self.edit("first", self._start, f"global {self.world}")  # in front of what binds it
                return

    def import_(self, code: str) -> None:
        """Import something, below the script's first imports."""
        last = self.last_import()
        self.edit("after" if last else "before", last or self.text.tree.body[0], code)

    def last_import(self) -> ast.stmt | None:
        """The last of the imports with which the script begins."""
        last = None
        for one in self.text.tree.body:
            inside = ast.walk(one) if isinstance(one, (ast.Try, ast.If)) else [one]
            if any(isinstance(node, (ast.Import, ast.ImportFrom)) for node in inside):
                last = one
            elif not (
                isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
            ) and "environ" not in ast.unparse(one):
                break
        return last

    def first_step(self, home: ast.stmt, event: Event) -> ast.stmt | None:
        """The statement beside ``home`` in which the first training step after an event happens, through calls."""
        beside = self.block(home)
        for step in self.case.steps:
            if step.order <= event.order or not step.reached:
                continue
            for node in (step.node, *step.stack):
                for one in (node, *self.case.ancestors(node)):
                    at = next((at for at, other in enumerate(beside) if other is one), -1)
                    if at > beside.index(home) and self.text.line(beside[at]) is not None:
                        return beside[at]
        return None

    def distribute(self, home: ast.Assign, event: Event, model: str, more: str = "") -> None:
        """Steps 4 and 5 of a PyTorch optimizer: below the statement that makes it, and above the first step."""
        optimizer = self.src(home.targets[0])
        sent = f"{self.hk}.broadcast_state({model}, {optimizer})"
        first = self.first_step(home, event)
        self.edit("after", home, f"{more}{optimizer} = {self.hk}.distribute({optimizer}, {model})")
        self.edit("before" if first else "after", first or home, sent)

    # What rules ask -------------------------------------------------------------------------------------------------

    def of(self, prefix: str, *roles: Role) -> list[Event]:
        """The events with a role whose full name begins so."""
        return [event for event in self.case.having(*roles) if self.case.name(event.node).startswith(prefix)]

    def is_root_only(self, event: Event) -> bool:
        """Whether a condition on the rank is around an event already."""
        return self.case.where(event) == "some ranks"

    def models_of(self, node: ast.expr) -> set[str]:
        """The models whose ``parameters()`` a value holds, as text."""
        calls = [
            one for one in self.case.calls(node, through=True) if method(one) in ("parameters", "named_parameters")
        ]
        calls += [one for one in ast.walk(node) if isinstance(one, ast.Call) and method(one) == "parameters"]
        return {ast.unparse(one.func.value) for one in calls if isinstance(one.func, ast.Attribute)}


def _shared(node: ast.AST) -> Unsure:
    return Unsure(node, "it shares its line with another statement", "put it on a line of its own")


def is_text(node: ast.stmt) -> bool:
    """Whether a statement is a docstring, or text between code."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
