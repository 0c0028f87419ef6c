"""Optimizers, updates, loops over data and ``fit``: where a script trains and where it evaluates."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from hvdkit.prepare.check.calls import argument, arguments, has_stars, makes_object, method, receiver
from hvdkit.prepare.check.facts import ScriptFacts
from hvdkit.prepare.check.libraries import LOADERS, Role
from hvdkit.prepare.check.program import LOOPS
from hvdkit.prepare.check.trace import Event

_TORCH_OPTIMIZERS = re.compile(
    r"(torch\.optim|torch_optimizer|apex\.optimizers)\.(?!.*(lr_scheduler|swa_utils))(.*\.)?[A-Z]\w*"
)
_KERAS_OPTIMIZERS = re.compile(
    r"(keras|tensorflow_addons)\.optimizers\.(?!.*schedules\.)(.*\.)?[A-Z]\w*|"
    r"tensorflow\.(compat\.v1\.)?train\.(.*\.)?\w*Optimizer"
)
_TAPES = ("tensorflow.GradientTape",)
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


class Training(ScriptFacts):
    """Where a script trains."""

    # Optimizers and updates ---------------------------------------------------------------------------------------

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
        return [update for event in self.events if (update := self._update(event)) is not None]

    def _update(self, event: Event) -> Update | None:
        call, owner = event.node, receiver(event.node)
        match method(call) if self.dotted(call.func) is None else "":
            case "step":
                given = (one for one in (owner, *call.args[:1]) if any(map(self.is_optimizer, self.calls(one))))
                return next((Update(event, one) for one in given), None)
            case "apply_gradients":
                return Update(event, owner, argument(call, "grads_and_vars", 0))
            case "apply" if any(map(self.is_optimizer, self.calls(owner))):
                return Update(event, owner, argument(call, "grads", 0))
            case "minimize":
                return Update(event, owner)
            case "compile" if (optimizer := argument(call, "optimizer", 0)) is not None:
                return Update(event, optimizer)
        return None

    @cached_property
    def steps(self) -> list[Event]:
        """The events that compute or apply gradients, in order; ``fit`` too."""
        backward = [one for one in self.methods("backward") if self.dotted(one.node.func) is None]
        applied = [update.event for update in self.updates if method(update.event.node) != "compile"]
        tapes = [one for one in self.methods("gradient") if self.made_by(_TAPES, receiver(one.node), through=True)]
        of_arrays = self.events if "hvdkit.arrays" in self.modules else []  # which has no optimizer: its mean is called
        averaged = [one for one in of_arrays if self.having_made(receiver(one.node), Role.DISTRIBUTE)]
        return sorted(
            {*backward, *applied, *tapes, *averaged, *self.fits, *self.having(Role.FIT)}, key=lambda one: one.order
        )

    @cached_property
    def holders(self) -> set[str]:
        """The texts of expressions that hold a model or an optimizer: ``model``, ``self.net``, ``opt``."""
        nodes = [one for one in self.nodes if isinstance(one, (ast.Attribute, ast.Name))]
        by_use = {
            ast.unparse(node.value)
            for node in nodes
            if isinstance(node, ast.Attribute) and node.attr in _HOLDERS and self.dotted(node) is None
        }
        return by_use | {text for node in nodes if _HOLDER_NAMES.search(text := ast.unparse(node))}

    def handed_away(self) -> str | None:
        """A function that is not in this text and gets or makes a model or an optimizer: it may do any step."""
        for call in (event.node for event in self.events if self.is_opaque(event.node)):
            given = arguments(call)
            if given and (has_stars(call) or any(ast.unparse(one) in self.holders for one in given)):
                return ast.unparse(call.func)
            if not makes_object(call) and self._result_is_held(call):
                return ast.unparse(call.func)
        return None

    def elsewhere(self) -> str:
        """Why a step may be done where this text does not show it; "" where it is all here."""
        doubt = next(iter(self.others), None) or self.handed_away()
        return f"{doubt} may do it, which is not read here" if doubt else ""

    def _result_is_held(self, call: ast.Call) -> bool:
        """``model, optimizer = build(args)``: the result is a model or an optimizer."""
        statement = self.statement(call)
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        each = [one for target in targets for one in (target.elts if isinstance(target, ast.Tuple) else [target])]
        return any(ast.unparse(one) in self.holders for one in each)

    # Keras' fit ---------------------------------------------------------------------------------------------------

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
        return any(self.name(call).startswith(_KERAS_MODELS) or self._is_own_model(call) for call in made)

    @cached_property
    def _compiled(self) -> set[str]:
        return {ast.unparse(receiver(one.node)) for one in self.methods("compile") if not self.name(one.node)}

    def _is_own_model(self, call: ast.Call) -> bool:
        own = self.class_of(call)
        return own is not None and any((self.dotted(base) or "").startswith(_OWN_MODELS) for base in own.bases)

    # Loops over data ----------------------------------------------------------------------------------------------

    @cached_property
    def training_loops(self) -> dict[ast.AST, list[Event]]:
        """The innermost loops around training steps that go over data, with the steps in them."""
        found: dict[ast.AST, list[Event]] = {}
        for event in self.steps:
            loop = next((one for one in reversed(event.loops) if self.sources(one)), None)
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
        return [call for one in self.drawn_from(loop) for call in self._makers(one)]

    def drawn_from(self, loop: ast.AST) -> list[ast.expr]:
        """What a loop goes over, or what ``next(...)`` draws from inside of a loop that only counts."""
        data = [one for one in over(loop) if not _COUNTS.match(ast.unparse(one))]
        if data:
            return data
        inside = [one for one in self.events if one.loops and one.loops[-1] is loop]
        return [one.node.args[0] for one in inside if self.name(one.node) == "builtins.next" and one.node.args]

    def _makers(self, node: ast.expr) -> list[ast.Call]:
        direct = [call for call in self.calls(node) if self._makes_data(call)]
        return direct or [call for call in self.calls(node, through=True) if self._makes_data(call)]

    def _makes_data(self, call: ast.Call) -> bool:
        name = self.name(call)
        return name in LOADERS or name.startswith(_TF_SOURCES) or self.role(call) == Role.SHARD

    def epochs_around(self, event: Event, loop: ast.AST) -> bool:
        """Whether a loop over data runs again and again: it is inside of another loop."""
        return any(isinstance(outer, LOOPS) for outer in event.loops[: event.loops.index(loop)])

    def operations(self, call: ast.Call) -> set[str]:
        """What ``op=`` may be in a call that averages: "average", "sum", "adasum"; none where it is not given."""
        reached = self.reach(argument(call, "op"))
        named = {(self.dotted(one) or "").rpartition(".")[2].lower() for one in reached}
        texts = {str(one.value) for one in reached if isinstance(one, ast.Constant)}
        return (named | texts) & {"average", "sum", "adasum"}

    def reduces_gradients(self) -> list[Event]:
        """The events that average gradients by hand."""
        return [one for one in self.having(Role.REDUCE) if one.reached and self._is_about_gradients(one)]

    def _is_about_gradients(self, event: Event) -> bool:
        given = arguments(event.node)
        around = [one for loop in event.loops for one in over(loop)]
        named = any("grad" in ast.unparse(one).lower() for one in [*given, *around])
        return named or any(isinstance(one, ast.Attribute) and one.attr == "grad" for one in self.reach(*given))


def over(loop: ast.AST) -> list[ast.expr]:
    """What a loop or a comprehension goes over; nothing for ``while``."""
    return [loop.iter] if isinstance(loop, (ast.For, ast.AsyncFor, ast.comprehension)) else []


def once(events: Iterable[Event]) -> list[Event]:
    """The first event of each call."""
    found: dict[ast.Call, Event] = {}
    for event in events:
        found.setdefault(event.node, event)
    return list(found.values())
