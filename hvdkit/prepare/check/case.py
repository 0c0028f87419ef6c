"""A script as steps and rules see it: ranks and sizes, what happens on every rank, where it trains, on which data."""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterable
from dataclasses import dataclass
from functools import cached_property

from hvdkit.prepare.check import libraries
from hvdkit.prepare.check.flow import LOOPS, Flow, remembered
from hvdkit.prepare.check.libraries import LOADERS, NUMBERS, RANKS, VARIABLES, Role, role
from hvdkit.prepare.check.source import argument, arguments, has_stars, makes_object, method, receiver, word
from hvdkit.prepare.check.trace import Condition, Event, Tracer

_TOPOLOGY = {
    "rank": Role.RANK, "is_root": Role.RANK, "cross_rank": Role.RANK, "local_rank": Role.LOCAL_RANK, "size": Role.SIZE,
    "local_size": Role.LOCAL_SIZE,
}  # fmt: skip
_ENVIRONMENT = ("os.environ", "os.environ.get", "os.getenv")
_TORCH_OPTIMIZERS = re.compile(
    r"(torch\.optim|torch_optimizer|apex\.optimizers)\.(?!.*(lr_scheduler|swa_utils))(.*\.)?[A-Z]\w*"
)
_KERAS_OPTIMIZERS = re.compile(
    r"(keras|tensorflow_addons)\.optimizers\.(?!.*schedules\.)(.*\.)?[A-Z]\w*|"
    r"tensorflow\.(compat\.v1\.)?train\.(.*\.)?\w*Optimizer"
)
_TF_SOURCES = ("tensorflow.data.", "tensorflow_datasets.load", "tensorflow_datasets.as_numpy")
_KERAS_MODELS = ("keras.Sequential", "keras.Model", "keras.models.", "keras.applications.")
_OWN_MODELS = ("keras.Sequential", "keras.Model", "keras.models.Model")
_HOLDERS = {
    "parameters", "named_parameters", "state_dict", "load_state_dict", "trainable_variables", "trainable_weights",
    "compile", "fit", "fit_generator", "apply_gradients", "zero_grad", "set_weights", "get_weights", "load_weights",
}  # fmt: skip
"""Attributes that only models and optimizers have."""
_HOLDER_NAMES = re.compile(r"(^|[._])(model|net|network|optimizer|optim|opt)$")
_COUNTS = re.compile(r"((enumerate|tqdm|reversed)\()*[\w.]*range\(")
"""``range(...)`` and ``enumerate(range(...))``: numbers, not data."""
_TENSORFLOW_1 = re.compile(
    r"tensorflow\.(compat\.v1\.)?(estimator|contrib|layers|placeholder|InteractiveSession|get_variable"
    r"|variable_scope|(global|local)_variables_initializer|get_default_graph|reset_default_graph|app"
    r"|train\.(\w*Optimizer|\w+Hook|Monitored\w*Session|Supervisor|Saver|Scaffold"
    r"|(get_|create_|get_or_create_)?global_step|\w*batch))\b.*"
    r"|tensorflow\.compat\.v1\.(Session|disable_(eager_execution|v2_behavior|v2_tensorshape))"
    r"|keras\.losses\.\w+_cross_entropy|horovod\.tensorflow\.(broadcast_global_variables|\w+Hook)"
)
"""TensorFlow 1's way to train."""


@dataclass(frozen=True)
class Update:
    """A place where a model changes.

    Attributes:
        event: the call that does it: ``step``, ``apply_gradients``, ``minimize`` or ``compile``.
        optimizer: the expression of the optimizer.
        gradients: what is applied, where that is an argument.
    """

    event: Event
    optimizer: ast.expr
    gradients: ast.expr | None = None


class Case(Flow):
    """A training script, with everything that steps and rules ask of it.

    Attributes:
        events: the calls in the order in which they run.
    """

    def __init__(self, tree: ast.Module) -> None:
        super().__init__(tree)
        self.events = Tracer(self).run()

    # What it uses -----------------------------------------------------------------------------------------------------

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
        """The library that distributes the training: "hvdkit", "horovod", "ddp" or "none"."""
        kinds = {libraries.library_of(name) for name in self.used}
        if any(name.startswith(("horovod.spark", "horovod.ray")) for name in self.used):
            return "none"  # the text is not that of every rank
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
        found = {libraries.OTHER_DISTRIBUTORS.get(name.split(".")[0]) for name in self.used}
        found |= {way for names, way in libraries.OTHER_WAYS.items() for name in self.used if re.fullmatch(names, name)}
        return sorted(way for way in found if way is not None)

    @cached_property
    def asks_for_keras_2(self) -> bool:
        """Whether the script asks for the Keras that Horovod was made for."""
        legacy = any(isinstance(node, ast.Constant) and node.value == "TF_USE_LEGACY_KERAS" for node in self.nodes)
        imports = {name.split(".")[0] for name in self.imported}
        return legacy or "tf_keras" in imports or any(".legacy" in name for name in self.used)

    @cached_property
    def of_tensorflow_1(self) -> list[Event]:
        """The events that train as TensorFlow 1 did, unless the version is asked for."""
        found = [event for event in self.events if _TENSORFLOW_1.fullmatch(self.name(event.node))]
        return [event for event in found if not self.asks_version(event)]

    def asks_version(self, event: Event) -> bool:
        """Whether an event depends on the version of a package."""
        return any(re.search(r"__version__|hasattr", ast.unparse(guard.test)) for guard in event.guards)

    # What a call is for -----------------------------------------------------------------------------------------------

    def name(self, call: ast.Call) -> str:
        """The full name of what is called, "" for the script's own."""
        return self.dotted(call.func) or ""

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

    def named(self, *endings: str) -> list[Event]:
        """The events whose full name ends so."""
        return [event for event in self.events if self.name(event.node).endswith(endings)]

    def methods(self, *attributes: str) -> list[Event]:
        """The events that call a method, or a function of a module, of this name."""
        return [event for event in self.events if method(event.node) in attributes]

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

    # Rank and size ----------------------------------------------------------------------------------------------------

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
        return {kind for node in self.reach(*nodes) if (kind := self.kind(node)) is not None}

    def has_rank(self, *nodes: ast.AST | None, through: bool = False) -> bool:
        """Whether a value comes from a rank, or from something that is named like one."""
        reached = self.reach(*nodes, through=through)
        return any(self.kind(node) in RANKS or libraries.RANK_WORDS.search(word(node)) for node in reached)

    def has_size(self, *nodes: ast.AST | None, through: bool = False) -> bool:
        """Whether a value comes from the number of processes, or from something that is named like it."""
        sizes, reached = (Role.SIZE, Role.LOCAL_SIZE), self.reach(*nodes, through=through)
        return any(self.kind(node) in sizes or libraries.SIZE_WORDS.search(word(node)) for node in reached)

    # Where a call happens ---------------------------------------------------------------------------------------------

    def where(self, event: Event) -> str:
        """Where an event happens, as far as the text says: "every rank", "some ranks" or "unknown"."""
        if any(self.splits_ranks(guard) for guard in event.guards):
            return "some ranks"
        if not event.reached or any(self._is_unclear(guard) for guard in event.guards):
            return "unknown"
        return "every rank"

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
                setters += [node for node in inside if isinstance(node, ast.Return)]
        around = {parent for setter in setters for parent in self.ancestors(setter)}
        return any(isinstance(node, ast.If) and self.has_rank(node.test) for node in around)

    def _is_unclear(self, guard: Condition) -> bool:
        """Whether a condition hangs on what the text does not show, or leaves one process alone (``size == 1``)."""
        if guard.wraps:
            return False
        for node in ast.walk(guard.test):
            match node:
                case ast.Compare(left=left, ops=[operator], comparators=[ast.Constant(value=1 | 2)]):
                    below = isinstance(operator, (ast.Eq, ast.Lt, ast.LtE))
                    if below == guard.holds and self.has_size(left):
                        return True
        return any(
            (isinstance(node, ast.Call) and self.is_opaque(node))
            or (isinstance(node, ast.arg) and not self.arguments_for(node) and node.arg not in ("self", "cls"))
            for node in self.reach(guard.test)
        )

    def is_locked(self, event: Event) -> bool:
        """Whether it happens inside a lock, so that one process at a time does it."""
        return any(guard.wraps and "lock" in ast.unparse(guard.test).lower() for guard in event.guards)

    # Optimizers and updates -------------------------------------------------------------------------------------------

    @cached_property
    def optimizers(self) -> list[Event]:
        """The events that make an optimizer of PyTorch, Keras or TensorFlow; each call once."""
        return once(event for event in self.events if self.makes_optimizer(event.node))

    def makes_optimizer(self, call: ast.Call) -> bool:
        """Whether a call makes an optimizer whose learning rate the text shows."""
        return self.is_torch_optimizer(call) or self.is_keras_optimizer(call)

    def is_optimizer(self, call: ast.Call) -> bool:
        """Whether a call makes an optimizer, or a distributed one of it."""
        return self.makes_optimizer(call) or self.role(call) == Role.DISTRIBUTE

    def is_torch_optimizer(self, call: ast.Call) -> bool:
        """Whether a call makes one of ``torch.optim`` or a package that follows it."""
        return _TORCH_OPTIMIZERS.fullmatch(self.name(call)) is not None

    def is_keras_optimizer(self, call: ast.Call) -> bool:
        """Whether a call makes one of Keras or TensorFlow."""
        return _KERAS_OPTIMIZERS.fullmatch(self.name(call)) is not None

    @cached_property
    def updates(self) -> list[Update]:
        """The updates of all models, in order."""
        found = []
        for event in self.events:
            call, owner = event.node, receiver(event.node)
            match method(call) if self.dotted(call.func) is None else "":
                case "step":
                    given = (one for one in (owner, *call.args[:1]) if any(map(self.is_optimizer, self.calls(one))))
                    found += [Update(event, value) for value in given][:1]
                case "apply_gradients":
                    found.append(Update(event, owner, argument(call, "grads_and_vars", 0)))
                case "apply" if any(map(self.is_optimizer, self.calls(owner))):
                    found.append(Update(event, owner, argument(call, "grads", 0)))
                case "minimize":
                    found.append(Update(event, owner))
                case "compile" if (optimizer := argument(call, "optimizer", 0)) is not None:
                    found.append(Update(event, optimizer))
        return found

    @cached_property
    def steps(self) -> list[Event]:
        """The events that compute or apply gradients, in order; ``fit`` too."""
        found = [event for event in self.methods("backward") if self.dotted(event.node.func) is None]
        found += [update.event for update in self.updates if method(update.event.node) != "compile"]
        found += [event for event in self.methods("gradient")
                  if self.made_by(("tensorflow.GradientTape",), receiver(event.node), through=True)]  # fmt: skip
        of_arrays = self.events if "hvdkit.arrays" in self.modules else []  # which has no optimizer: its mean is called
        found += [one for one in of_arrays if self.having_made(receiver(one.node), Role.DISTRIBUTE)]
        return sorted({*found, *self.fits, *self.having(Role.FIT)}, key=lambda one: one.order)

    def operations(self, call: ast.Call) -> set[str]:
        """What ``op=`` may be in a call that averages: "average", "sum", "adasum"; none where it is not given."""
        reached = self.reach(argument(call, "op"))
        named = {(self.dotted(node) or "").rpartition(".")[2].lower() for node in reached}
        texts = {str(node.value) for node in reached if isinstance(node, ast.Constant)}
        return (named | texts) & {"average", "sum", "adasum"}

    def reduces_gradients(self) -> list[Event]:
        """The events that average gradients by hand."""
        found = []
        for event in (event for event in self.having(Role.REDUCE) if event.reached):
            given = arguments(event.node)
            texts = map(ast.unparse, [*given, *(one for loop in event.loops for one in over(loop))])
            reached = self.reach(*given)
            of_grad = any(getattr(node, "attr", "") == "grad" for node in reached)
            if of_grad or any("grad" in text.lower() for text in texts):
                found.append(event)
        return found

    # What other modules may do ----------------------------------------------------------------------------------------

    @cached_property
    def holders(self) -> set[str]:
        """The texts of expressions that hold a model or an optimizer: ``model``, ``self.net``, ``opt``."""
        nodes = [node for node in self.nodes if isinstance(node, (ast.Attribute, ast.Name))]
        by_use = {
            ast.unparse(node.value)
            for node in nodes
            if isinstance(node, ast.Attribute) and node.attr in _HOLDERS and self.dotted(node) is None
        }
        return by_use | {text for node in nodes if _HOLDER_NAMES.search(text := ast.unparse(node))}

    @cached_property
    def handed_away(self) -> str | None:
        """A function that is not in this text and gets or makes a model or an optimizer: it may do any step."""
        for call in (event.node for event in self.events if self.is_opaque(event.node)):
            given = arguments(call)
            if given and (has_stars(call) or any(ast.unparse(value) in self.holders for value in given)):
                return ast.unparse(call.func)
            statement = self.statement(call)  # ``model, optimizer = build(args)``
            targets = statement.targets if isinstance(statement, ast.Assign) and not makes_object(call) else []
            each = [one for target in targets for one in (target.elts if isinstance(target, ast.Tuple) else [target])]
            if any(ast.unparse(one) in self.holders for one in each):
                return ast.unparse(call.func)
        return None

    def elsewhere(self) -> str:
        """Why a step may be done where this text does not show it; "" where it is all here."""
        doubt = next(iter(self.others), None) or self.handed_away
        return f"{doubt} may do it, which is not read here" if doubt else ""

    # Keras' fit -------------------------------------------------------------------------------------------------------

    @cached_property
    def fits(self) -> list[Event]:
        """The events that train a Keras model by ``fit``."""
        return self._of_keras_model("fit", "fit_generator")

    @cached_property
    def evaluations(self) -> list[Event]:
        """The events that evaluate a Keras model by ``evaluate``."""
        return self._of_keras_model("evaluate", "evaluate_generator")

    def _of_keras_model(self, *methods: str) -> list[Event]:
        called = [(event, receiver(event.node)) for event in self.methods(*methods)]
        return [event for event, owner in called if self.dotted(owner) is None and self.holds_keras_model(owner)]

    def holds_keras_model(self, node: ast.expr) -> bool:
        """Whether an expression is a Keras model: it is made as one, compiled somewhere, or a callback's own."""
        text, own = ast.unparse(node), self.owner_class(node)
        if text in self._compiled or (text == "self.model" and own is not None and self.is_keras_callback(own)):
            return True
        made = self.calls(node)
        bases = [base for call in made if (klass := self.class_of(call)) is not None for base in klass.bases]
        of_own = any((self.dotted(base) or "").startswith(_OWN_MODELS) for base in bases)
        return of_own or any(self.name(call).startswith(_KERAS_MODELS) for call in made)

    @cached_property
    def _compiled(self) -> set[str]:
        return {ast.unparse(receiver(event.node)) for event in self.methods("compile") if not self.name(event.node)}

    # Loops over data --------------------------------------------------------------------------------------------------

    @cached_property
    def training_loops(self) -> dict[ast.AST, list[Event]]:
        """The innermost loops around training steps that go over data, with the steps in them."""
        found: dict[ast.AST, list[Event]] = {}
        for event in self.steps:
            loop = next((loop for loop in reversed(event.loops) if self.sources(loop)), None)
            if loop is not None:
                found.setdefault(loop, []).append(event)
        return found

    @cached_property
    def evaluation_loops(self) -> dict[ast.AST, list[Event]]:
        """The loops over data in which nothing is trained, with the events in them."""
        inside: dict[ast.AST, list[Event]] = {}
        for event in self.events:
            for loop in event.loops:
                inside.setdefault(loop, []).append(event)
        trains = {loop for event in self.steps for loop in event.loops}
        found = {loop: events for loop, events in inside.items() if loop not in trains and self.sources(loop)}
        return {loop: events for loop, events in found.items() if not self._is_part_of_step(loop, events[0])}

    def _is_part_of_step(self, loop: ast.AST, event: Event) -> bool:
        """A loop over what a training step made of its own batch: gradients that are on their way."""
        drawn = {call for outer in event.loops if outer in self.training_loops for call in self.sources(outer)}
        return bool(drawn & set(self.sources(loop)))

    def sources(self, loop: ast.AST) -> list[ast.Call]:
        """The calls that made what a loop goes over: loaders, ``tf.data`` sets, hvdkit's shards."""
        found = []
        for one in self.drawn_from(loop):
            direct = [call for call in self.calls(one) if self._makes_data(call)]
            found += direct or [call for call in self.calls(one, through=True) if self._makes_data(call)]
        return found

    def _makes_data(self, call: ast.Call) -> bool:
        name = self.name(call)
        return name in LOADERS or name.startswith(_TF_SOURCES) or self.role(call) == Role.SHARD

    def drawn_from(self, loop: ast.AST) -> list[ast.expr]:
        """What a loop goes over, or what ``next(...)`` draws from inside of a loop that only counts."""
        data = [one for one in over(loop) if not _COUNTS.match(ast.unparse(one))]
        if data:
            return data
        inside = [event for event in self.events if event.loops and event.loops[-1] is loop]
        return [event.node.args[0] for event in inside if self.name(event.node) == "builtins.next" and event.node.args]

    def epochs_around(self, event: Event, loop: ast.AST) -> bool:
        """Whether a loop over data runs again and again: it is inside of another loop."""
        return any(isinstance(outer, LOOPS) for outer in event.loops[: event.loops.index(loop)])


def over(loop: ast.AST) -> list[ast.expr]:
    """What a loop or a comprehension goes over; nothing for ``while``."""
    return [loop.iter] if isinstance(loop, (ast.For, ast.AsyncFor, ast.comprehension)) else []


def once(events: Iterable[Event]) -> list[Event]:
    """The first event of each call."""
    found: dict[ast.Call, Event] = {}
    for event in events:
        found.setdefault(event.node, event)
    return list(found.values())
