"""What steps and rules ask of a script: is it this rank's, does it happen on every rank, what is this call for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import cached_property, lru_cache

from hvdkit.prepare.check import libraries
from hvdkit.prepare.check.flow import Flow
from hvdkit.prepare.check.libraries import NUMBERS, VARIABLES, Role, library_of, role
from hvdkit.prepare.check.names import OTHER_DISTRIBUTORS
from hvdkit.prepare.check.trace import Condition, Event, trace

_TOPOLOGY = {
    "rank": Role.RANK,
    "is_root": Role.RANK,
    "cross_rank": Role.RANK,
    "local_rank": Role.LOCAL_RANK,
    "size": Role.SIZE,
    "local_size": Role.LOCAL_SIZE,
}
_RUNNERS = ("horovod.spark", "horovod.ray")
_ENVIRONMENT = ("os.environ.get", "os.getenv")


class ScriptFacts(Flow):
    """A script, seen through everything that is known about it.

    Attributes:
        events: the calls in the order in which they run.
        library: "hvdkit", "horovod", "ddp" or "none".
    """

    def __init__(self, tree: ast.Module) -> None:
        super().__init__(tree)
        self.events = trace(self)
        self._ranks: dict[ast.AST, bool] = {}

    @cached_property
    def used(self) -> dict[str, int]:
        """Full names of everything that the script names or imports, with the first line."""
        found = {name: node.lineno for name, node in self.imported.items()}
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
        found = {OTHER_DISTRIBUTORS[root] for name in self.used if (root := name.split(".")[0]) in OTHER_DISTRIBUTORS}
        for name in self.used:
            if name.startswith("tensorflow.distribute.") and name.endswith("Strategy"):
                found.add("tf.distribute")
            if name.startswith("torch.distributed.rpc"):
                found.add("torch.distributed.rpc")
            if "FullyShardedDataParallel" in name or name.endswith("fully_shard"):
                found.add("FSDP")
        return sorted(found)

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
        if known is None and isinstance(call.func, ast.Attribute) and call.func.attr in ("save", "restore"):
            made = self.calls(call.func.value)
            return Role.COLLECTIVE if any(role(self.dotted(one.func)) == Role.CHECKPOINTS for one in made) else None
        return known

    @cached_property
    def _by_role(self) -> dict[Role, list[Event]]:
        found: dict[Role, list[Event]] = {}
        for event in self.events:
            if (purpose := self.role(event.node)) is not None:
                found.setdefault(purpose, []).append(event)
        return found

    def having(self, *roles: Role) -> list[Event]:
        """The events with one of these roles, in order."""
        return sorted((one for purpose in roles for one in self._by_role.get(purpose, [])), key=lambda one: one.order)

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
        return [
            one for one in self.events if isinstance(one.node.func, ast.Attribute) and one.node.func.attr in attributes
        ]

    # Rank and size ----------------------------------------------------------------------------------------------

    def kind(self, node: ast.AST) -> Role | None:
        """Whether an expression itself is a rank or a size: RANK, LOCAL_RANK, SIZE, LOCAL_SIZE or None."""
        match node:
            case ast.Call() if self.name(node) in _ENVIRONMENT and node.args:
                return _variable(node.args[0])
            case ast.Subscript() if self.dotted(node.value) == "os.environ":
                return _variable(node.slice)
            case ast.Attribute() if self.is_topology(node):
                return _TOPOLOGY[node.attr]
            case ast.Call() | ast.Attribute() | ast.Name():
                known = self.role(node) if isinstance(node, ast.Call) else role(self.dotted(node))
                return known if known in NUMBERS else None
        return Role.SPAWNED if node in self.rank_parameters else None

    def is_topology(self, node: ast.Attribute) -> bool:
        """Whether it is a value of hvdkit's topology: ``world.rank``, ``world.is_root``."""
        return node.attr in _TOPOLOGY and role(self.dotted(node)) is None and self._is_world(node.value)

    def _is_world(self, node: ast.expr) -> bool:
        return any(self.role(call) == Role.INIT and self.name(call).startswith("hvdkit.") for call in self.calls(node))

    def kinds(self, node: ast.AST, through: bool = False) -> set[Role]:
        """Ranks and sizes among what a value comes from."""
        return {kind for one in self.reach(node, through) if (kind := self.kind(one)) is not None}

    def has_rank(self, node: ast.AST, through: bool = False) -> bool:
        """Whether a value comes from a rank, or from something that is named like one."""
        if self.kinds(node, through) & {Role.RANK, Role.LOCAL_RANK, Role.SPAWNED}:
            return True
        return any(libraries.RANK_WORDS.search(word) for one in self.reach(node, through) for word in words(one))

    def has_size(self, node: ast.AST, through: bool = False) -> bool:
        """Whether a value comes from the number of processes, or from something that is named like it."""
        if self.kinds(node, through) & {Role.SIZE, Role.LOCAL_SIZE}:
            return True
        return any(libraries.SIZE_WORDS.search(word) for one in self.reach(node, through) for word in words(one))

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
            return any(libraries.RANK_WORDS.search(word) for node in ast.walk(guard.test) for word in words(node))
        if guard.test not in self._ranks:
            self._ranks[guard.test] = self.has_rank(guard.test) or self._set_under_rank(guard.test)
        return self._ranks[guard.test]

    def _set_under_rank(self, test: ast.expr) -> bool:
        """``verbose = 0``, then ``if rank == 0: verbose = 1``; or a function that returns from such an ``if``."""
        for node in self.reach(test):
            setters: list[ast.AST] = []
            if isinstance(node, ast.Name):
                setters = [binding.node for binding in self.reaching(node)]
            elif isinstance(node, ast.Call):
                setters = [
                    one for function in self.callees(node) for one in ast.walk(function) if isinstance(one, ast.Return)
                ]
            for setter in setters:
                around = [parent for parent in self.ancestors(setter) if isinstance(parent, ast.If)]
                if any(self.has_rank(parent.test) for parent in around):
                    return True
        return False

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
                case ast.Compare(left=left, ops=[operator], comparators=[ast.Constant(value=1 | 2)]) if self.has_size(
                    left
                ):
                    if isinstance(operator, (ast.Eq, ast.Lt, ast.LtE)) == guard.holds:
                        return True
        return False

    def is_locked(self, event: Event) -> bool:
        """Whether it happens inside a lock, so that one process at a time does it."""
        return any(guard.wraps and "lock" in ast.unparse(guard.test).lower() for guard in event.guards)

    def uses(self, target: ast.expr) -> list[ast.Name]:
        """Where the value that one assignment gives to a name is read."""
        if not isinstance(target, ast.Name):
            return []
        reads = [one for one in self.nodes if isinstance(one, ast.Name) and one.id == target.id]
        statement = self.statement(target)
        return [
            read
            for read in reads
            if isinstance(read.ctx, ast.Load) and any(one.node is statement for one in self.reaching(read))
        ]

    # Objects ----------------------------------------------------------------------------------------------------

    def made_by(self, node: ast.AST, names: Iterable[str], through: bool = False) -> list[ast.Call]:
        """The calls with one of these full names among what a value comes from."""
        wanted = frozenset(names)
        return [call for call in self.calls(node, through) if self.name(call) in wanted]

    def having_made(self, node: ast.AST, *roles: Role, through: bool = False) -> list[ast.Call]:
        """The calls with one of these roles among what a value comes from."""
        return [call for call in self.calls(node, through) if self.role(call) in roles]

    def hidden(self, node: ast.AST, through: bool = False) -> str | None:
        """The name of a function that is not in this text and that takes part in a value; None where all is seen."""
        for call in self.calls(node, through):
            if self.is_opaque(call):
                return ast.unparse(call.func)
        return None


def _variable(node: ast.AST) -> Role | None:
    """What a variable of the environment holds under some launcher."""
    name = node.value if isinstance(node, ast.Constant) else None
    return next((kind for kind, names in VARIABLES.items() if name in names), None)


def argument(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """An argument by its name or its position; None where it is not given in the text."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if position is not None and position < len(call.args):
        before = call.args[: position + 1]
        return None if any(isinstance(one, ast.Starred) for one in before) else before[-1]
    return None


def has_stars(call: ast.Call) -> bool:
    """Whether a call takes arguments from ``*`` or ``**``, which the text may not show."""
    return any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords)


def receiver(call: ast.Call) -> ast.expr:
    """The object whose method is called; what is called itself where it is no method."""
    return call.func.value if isinstance(call.func, ast.Attribute) else call.func


def is_constant(node: ast.expr | None, value: object) -> bool:
    """Whether an argument is this literal."""
    return isinstance(node, ast.Constant) and type(node.value) is type(value) and node.value == value


def method(call: ast.Call) -> str:
    """The name of the method, or of the function in a module, that is called; "" for a plain name."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def words(node: ast.AST) -> list[str]:
    """The name that a node uses, in lower case with underscores."""
    if isinstance(node, ast.Call):
        return words(node.func)
    name = getattr(node, {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg"}.get(type(node), ""), None)
    return [_snake_case(name)] if isinstance(name, str) else []


@lru_cache(maxsize=4096)
def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
