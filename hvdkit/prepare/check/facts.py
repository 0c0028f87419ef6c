"""What steps and rules ask of a script: is it this rank's, does it happen on every rank, what is this call for."""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterable, Sequence
from functools import cached_property

from hvdkit.prepare.check import libraries
from hvdkit.prepare.check.calls import method, receiver, word
from hvdkit.prepare.check.flow import Flow
from hvdkit.prepare.check.libraries import NUMBERS, RANKS, VARIABLES, Role, library_of, role
from hvdkit.prepare.check.names import OTHER_DISTRIBUTORS, OTHER_WAYS
from hvdkit.prepare.check.program import remembered
from hvdkit.prepare.check.trace import Condition, Event, Tracer

_TOPOLOGY = {
    "rank": Role.RANK, "is_root": Role.RANK, "cross_rank": Role.RANK, "local_rank": Role.LOCAL_RANK, "size": Role.SIZE,
    "local_size": Role.LOCAL_SIZE,
}  # fmt: skip
_RUNNERS = ("horovod.spark", "horovod.ray")
_ENVIRONMENT = ("os.environ", "os.environ.get", "os.getenv")


class ScriptFacts(Flow):
    """A script, seen through everything that is known about it.

    Attributes:
        events: the calls in the order in which they run.
        library: "hvdkit", "horovod", "ddp" or "none".
    """

    def __init__(self, tree: ast.Module) -> None:
        super().__init__(tree)
        self.events = Tracer(self).run()

    @cached_property
    def used(self) -> dict[str, int]:
        """Full names of everything that the script names or imports, with the first line."""
        found = dict(self.imported)
        for node in self.nodes:
            if isinstance(node, (ast.Name, ast.Attribute)) and (name := self.dotted(node)) is not None:
                found.setdefault(name, node.lineno)
        return found

    @cached_property
    def library(self) -> str:
        """The library that distributes the training."""
        kinds = {library_of(name) for name in self.used}
        if libraries.STARTS_DDP in self.used:
            return "ddp"
        return next((name for name in ("hvdkit", "horovod", "ddp") if name in kinds), "none")

    @cached_property
    def modules(self) -> list[str]:
        """The modules of the library that are used: "horovod.torch", ..."""
        if self.library == "ddp":
            return ["torch.distributed"]
        found = {match.group() for name in self.used if (match := libraries.MODULES.match(name)) is not None}
        return sorted(one for one in found if one.startswith(self.library))

    @cached_property
    def guards_fit(self) -> bool:
        """Whether Keras' ``fit`` is hvdkit's: it averages the logs, and lets callbacks that write do so on the root."""
        return "hvdkit.keras" in self.modules

    @cached_property
    def others(self) -> list[str]:
        """Other ways to distribute a training, which are not checked."""
        found = {OTHER_DISTRIBUTORS.get(name.split(".")[0]) for name in self.used}
        found |= {way for names, way in OTHER_WAYS.items() for name in self.used if re.fullmatch(names, name)}
        return sorted(way for way in found if way is not None)

    @cached_property
    def runner(self) -> str | None:
        """What starts the ranks from within this script, so that its text is not that of every rank."""
        return next((".".join(name.split(".")[:2]) for name in self.used if name.startswith(_RUNNERS)), None)

    @cached_property
    def frameworks(self) -> set[str]:
        """The frameworks that are imported: "torch", "tensorflow", "keras"."""
        return {name.split(".")[0] for name in self.used} & {"torch", "tensorflow", "keras"}

    # What a call is for -----------------------------------------------------------------------------------------

    def role(self, call: ast.Call) -> Role | None:
        """What a call does for the eight steps; methods of hvdkit's ``Checkpoints`` are collectives."""
        known = role(self.dotted(call.func))
        if known is None and method(call) in ("save", "restore"):
            made = [role(self.dotted(one.func)) for one in self.calls(receiver(call))]
            return Role.COLLECTIVE if Role.CHECKPOINTS in made else None
        return known

    @cached_property
    def _roles(self) -> list[Role | None]:
        return [self.role(event.node) for event in self.events]

    def having(self, *roles: Role) -> list[Event]:
        """The events with one of these roles, in order."""
        return [event for event, known in zip(self.events, self._roles, strict=True) if known in roles]

    def lines(self, events: Iterable[Event]) -> list[int]:
        """The lines of events, each once."""
        return sorted({event.node.lineno for event in events})

    def name(self, call: ast.Call) -> str:
        """The full name of what is called, "" for the script's own."""
        return self.dotted(call.func) or ""

    def named(self, *endings: str) -> list[Event]:
        """The events whose full name ends so."""
        return [event for event in self.events if self.name(event.node).endswith(endings)]

    def methods(self, *attributes: str) -> list[Event]:
        """The events that call a method, or a function of a module, of this name."""
        return [event for event in self.events if method(event.node) in attributes]

    # Rank and size ----------------------------------------------------------------------------------------------

    def kind(self, node: ast.AST) -> Role | None:
        """Whether an expression itself is a rank or a size: RANK, LOCAL_RANK, SIZE, LOCAL_SIZE or None."""
        match node:
            case (
                ast.Call(func=asked, args=[ast.Constant(value=key), *_])
                | ast.Subscript(value=asked, slice=ast.Constant(value=key))
            ) if self.dotted(asked) in _ENVIRONMENT:
                return next((kind for kind, names in VARIABLES.items() if key in names), None)
            case ast.Attribute() if self.is_topology(node):
                return _TOPOLOGY[node.attr]
            case ast.Call() | ast.Attribute() | ast.Name():
                known = self.role(node) if isinstance(node, ast.Call) else role(self.dotted(node))
                return known if known in NUMBERS else None
        return Role.SPAWNED if node in self.rank_parameters else None

    def is_topology(self, node: ast.Attribute) -> bool:
        """Whether it is a value of hvdkit's topology: ``world.rank``, ``world.is_root``."""
        if node.attr not in _TOPOLOGY or role(self.dotted(node)) is not None:
            return False
        return any(self.name(call).startswith("hvdkit.") for call in self.having_made(node.value, Role.INIT))

    def kinds(self, *nodes: ast.AST | None) -> set[Role]:
        """Ranks and sizes among what values come from."""
        return {kind for one in self.reach(*nodes) if (kind := self.kind(one)) is not None}

    def has_rank(self, *nodes: ast.AST | None, through: bool = False) -> bool:
        """Whether a value comes from a rank, or from something that is named like one."""
        return self._speaks_of(self.reach(*nodes, through=through), RANKS, libraries.RANK_WORDS)

    def has_size(self, *nodes: ast.AST | None, through: bool = False) -> bool:
        """Whether a value comes from the number of processes, or from something that is named like it."""
        return self._speaks_of(self.reach(*nodes, through=through), (Role.SIZE, Role.LOCAL_SIZE), libraries.SIZE_WORDS)

    def _speaks_of(self, nodes: Iterable[ast.AST], kinds: Sequence[Role], named: re.Pattern[str]) -> bool:
        return any(self.kind(one) in kinds or named.search(word(one)) for one in nodes)

    # Guards -----------------------------------------------------------------------------------------------------

    def where(self, event: Event) -> str:
        """Where an event happens, as far as the text says: "every rank", "some ranks" or "unknown"."""
        if any(self.splits_ranks(guard) for guard in event.guards):
            return "some ranks"
        if not self.on_ranks(event) or not event.reached or any(self._is_unclear(guard) for guard in event.guards):
            return "unknown"
        return "every rank"

    def on_ranks(self, event: Event) -> bool:
        """Whether an event is one of the ranks, and not of a driver that hands them a function."""
        return not self.runner or any(self.function_arguments(call) for call in event.stack)

    def splits_ranks(self, guard: Condition) -> bool:
        """Whether a condition may be true on one rank and false on another."""
        if guard.wraps:
            return any(libraries.RANK_WORDS.search(word(node)) for node in ast.walk(guard.test))
        return self._differs(guard.test)

    @remembered(False)
    def _differs(self, test: ast.expr) -> bool:
        """Whether it comes from a rank, or is set under ``if rank == 0:`` (``verbose = 1``, ``return True``)."""
        if self.has_rank(test):
            return True
        setters: list[ast.AST] = []
        for node in self.reach(test):
            if isinstance(node, ast.Name):
                setters += [binding.node for binding in self.reaching(node)]
            elif isinstance(node, ast.Call):
                inside = [one for function in self.callees(node) for one in ast.walk(function)]
                setters += [one for one in inside if isinstance(one, ast.Return)]
        around = {parent for setter in setters for parent in self.ancestors(setter)}
        return any(isinstance(one, ast.If) and self.has_rank(one.test) for one in around)

    def _is_unclear(self, guard: Condition) -> bool:
        if guard.wraps:
            return False
        return self._means_one_process(guard) or any(
            (isinstance(node, ast.Call) and self.is_opaque(node))
            or (isinstance(node, ast.arg) and not self.arguments_for(node) and node.arg not in ("self", "cls"))
            for node in self.reach(guard.test)
        )

    def _means_one_process(self, guard: Condition) -> bool:
        """``if size == 1:``, or the other branch of ``if size > 1:``: there is no other rank."""
        for node in ast.walk(guard.test):
            match node:
                case ast.Compare(left=left, ops=[operator], comparators=[ast.Constant(value=1 | 2)]):
                    below = isinstance(operator, (ast.Eq, ast.Lt, ast.LtE))
                    if below == guard.holds and self.has_size(left):
                        return True
        return False

    def is_locked(self, event: Event) -> bool:
        """Whether it happens inside a lock, so that one process at a time does it."""
        return any(guard.wraps and "lock" in ast.unparse(guard.test).lower() for guard in event.guards)

    # Objects ----------------------------------------------------------------------------------------------------

    def made_by(self, names: Container[str], *nodes: ast.AST | None, through: bool = False) -> list[ast.Call]:
        """The calls with one of these full names among what values come from."""
        return [call for call in self.calls(*nodes, through=through) if self.name(call) in names]

    def having_made(self, node: ast.AST | None, *roles: Role, through: bool = False) -> list[ast.Call]:
        """The calls with one of these roles among what a value comes from."""
        return [call for call in self.calls(node, through=through) if self.role(call) in roles]

    def hidden(self, node: ast.AST | None, through: bool = False) -> str | None:
        """The name of a function that is not in this text and that takes part in a value; None where all is seen."""
        opaque = filter(self.is_opaque, self.calls(node, through=through))
        return next((ast.unparse(call.func) for call in opaque), None)
