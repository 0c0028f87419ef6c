"""Optimizers, updates, loops over data and ``fit``: where a script trains and where it evaluates."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from hvdkit.prepare.check.call_arguments import arguments
from hvdkit.prepare.check.facts import ScriptFacts, argument, has_stars, method, receiver
from hvdkit.prepare.check.libraries import LOADERS, Role
from hvdkit.prepare.check.trace import Event

_TAPES = ("tensorflow.GradientTape",)
_TF_SOURCES = ("tensorflow.data.", "tensorflow_datasets.load", "tensorflow_datasets.as_numpy")
_KERAS_MODELS = ("keras.Sequential", "keras.Model", "keras.models.", "keras.applications.")
_HOLDERS = {
    "parameters", "named_parameters", "state_dict", "load_state_dict", "trainable_variables", "trainable_weights",
    "compile", "fit", "fit_generator", "apply_gradients", "zero_grad", "set_weights", "get_weights", "load_weights",
}  # fmt: skip
"""Attributes that only models and optimizers have."""
_HOLDER_NAMES = re.compile(r"(^|[._])(model|net|network|optimizer|optim|opt)$")


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

    def is_torch_optimizer(self, call: ast.Call) -> bool:
        """Whether a call makes one of ``torch.optim`` or a package that follows it."""
        name = self.name(call)
        known = name.startswith(("torch.optim.", "torch_optimizer.", "apex.optimizers."))
        return (
            known and name.rpartition(".")[2][:1].isupper() and "lr_scheduler" not in name and "swa_utils" not in name
        )

    def is_keras_optimizer(self, call: ast.Call) -> bool:
        """Whether a call makes one of Keras or TensorFlow."""
        name = self.name(call)
        last = name.rpartition(".")[2]
        if name.startswith(("keras.optimizers.", "tensorflow_addons.optimizers.")):
            return last[:1].isupper() and ".schedules." not in name
        return name.startswith(("tensorflow.train.", "tensorflow.compat.v1.train.")) and last.endswith("Optimizer")

    @cached_property
    def updates(self) -> list[Update]:
        """The updates of all models, in order."""
        return [update for event in self.events if (update := self._update(event)) is not None]

    def _update(self, event: Event) -> Update | None:
        called = event.node.func
        if not isinstance(called, ast.Attribute) or self.dotted(called) is not None:
            return None
        if called.attr == "step":
            for candidate in (called.value, *event.node.args[:1]):
                if any(self._is_optimizer(call) for call in self.calls(candidate)):
                    return Update(event, candidate)
        if called.attr in ("apply_gradients", "apply"):
            grads = argument(event.node, "grads_and_vars", 0) or argument(event.node, "grads", 0)
            known = called.attr == "apply_gradients" or any(self._is_optimizer(c) for c in self.calls(called.value))
            return Update(event, called.value, grads) if known else None
        if called.attr == "minimize":
            return Update(event, called.value)
        optimizer = argument(event.node, "optimizer", 0) if called.attr == "compile" else None
        return Update(event, optimizer) if optimizer is not None else None

    def _is_optimizer(self, call: ast.Call) -> bool:
        return self.makes_optimizer(call) or self.role(call) == Role.DISTRIBUTE

    @cached_property
    def steps(self) -> list[Event]:
        """The events that compute or apply gradients, in order; ``fit`` too."""
        backward = [one for one in self.methods("backward") if self.dotted(one.node.func) is None]
        applied = [update.event for update in self.updates if method(update.event.node) != "compile"]
        tapes = [one for one in self.methods("gradient") if self._is_tape(one.node)]
        of_arrays = self.events if "hvdkit.arrays" in self.modules else []  # which has no optimizer: its mean is called
        averaged = [one for one in of_arrays if self.having_made(receiver(one.node), Role.DISTRIBUTE)]
        return sorted(
            {*backward, *applied, *tapes, *averaged, *self.fits, *self.having(Role.FIT)}, key=lambda one: one.order
        )

    def _is_tape(self, call: ast.Call) -> bool:
        return bool(self.made_by(receiver(call), _TAPES, through=True))

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
        for event in self.events:
            given = arguments(event.node)
            if not self.is_opaque(event.node):
                continue
            if any(ast.unparse(one) in self.holders or has_stars(event.node) for one in given):
                return ast.unparse(event.node.func)
            if self._result_is_held(event.node):
                return ast.unparse(event.node.func)
        return None

    def elsewhere(self) -> str:
        """Why a step may be done where this text does not show it; "" where it is all here."""
        doubt = next(iter(self.others), None) or self.handed_away()
        return f"{doubt} may do it, which is not read here" if doubt else ""

    def _result_is_held(self, call: ast.Call) -> bool:
        """``model, optimizer = build(args)``: a function, not a class, whose result is a model or an optimizer."""
        last = ast.unparse(call.func).rpartition(".")[2]
        if last[:1].isupper():
            return False
        statement = self.statement(call)
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        texts = [
            ast.unparse(one)
            for target in targets
            for one in (target.elts if isinstance(target, ast.Tuple) else [target])
        ]
        return any(text in self.holders for text in texts)

    # Keras' fit ---------------------------------------------------------------------------------------------------

    @cached_property
    def fits(self) -> list[Event]:
        """The events that train a Keras model by ``fit``."""
        return [event for event in self.methods("fit", "fit_generator") if self._is_keras_model(event.node)]

    @cached_property
    def evaluations(self) -> list[Event]:
        """The events that evaluate a Keras model by ``evaluate``."""
        return [event for event in self.methods("evaluate", "evaluate_generator") if self._is_keras_model(event.node)]

    def _is_keras_model(self, call: ast.Call) -> bool:
        return self.dotted(receiver(call)) is None and self.holds_keras_model(receiver(call))

    def holds_keras_model(self, node: ast.expr) -> bool:
        """Whether an expression is a Keras model: it is made as one, compiled somewhere, or a callback's own."""
        if ast.unparse(node) in self._compiled:
            return True
        own = self.owner_class(node)
        if own is not None and ast.unparse(node) == "self.model" and self.is_keras_callback(own):
            return True
        made = self.calls(node)
        return any(self.name(call).startswith(_KERAS_MODELS) or self._is_own_model(call) for call in made)

    @cached_property
    def _compiled(self) -> set[str]:
        nodes = [one.node.func for one in self.methods("compile") if self.dotted(one.node.func) is None]
        return {ast.unparse(node.value) for node in nodes if isinstance(node, ast.Attribute)}

    def _is_own_model(self, call: ast.Call) -> bool:
        own = self.class_of(call)
        bases = [self.dotted(base) or "" for base in own.bases] if own is not None else []
        return any(base.startswith(("keras.Model", "keras.models.Model", "keras.Sequential")) for base in bases)

    # Loops over data ----------------------------------------------------------------------------------------------

    @cached_property
    def training_loops(self) -> dict[ast.AST, list[Event]]:
        """The innermost loops around training steps that go over data, with the steps in them."""
        found: dict[ast.AST, list[Event]] = {}
        for event in self.steps:
            loop = next((one for one in reversed(event.loops) if self.is_data(one)), None)
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
        found = {loop: events for loop, events in inside.items() if loop not in trains and self.is_data(loop)}
        return {loop: events for loop, events in found.items() if not self._is_part_of_step(loop, events[0])}

    def _is_part_of_step(self, loop: ast.AST, event: Event) -> bool:
        """A loop over what a training step made of its own batch: gradients that are on their way."""
        drawn = {call for outer in event.loops if outer in self.training_loops for call in self.sources(outer)}
        return bool(drawn & set(self.sources(loop)))

    def is_data(self, loop: ast.AST) -> bool:
        """Whether a loop goes over a loader or a data set."""
        return bool(self.sources(loop))

    def sources(self, loop: ast.AST) -> list[ast.Call]:
        """The calls that made what a loop goes over: loaders, ``tf.data`` sets, hvdkit's shards."""
        return [call for one in self.drawn_from(loop) for call in self._makers(one)]

    def drawn_from(self, loop: ast.AST) -> list[ast.expr]:
        """What a loop goes over, or what ``next(...)`` draws from inside of a loop that only counts."""
        if isinstance(loop, (ast.For, ast.AsyncFor, ast.comprehension)) and not _counts(loop.iter):
            return [loop.iter]
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
        place = event.loops.index(loop)
        return any(isinstance(outer, (ast.For, ast.AsyncFor, ast.While)) for outer in event.loops[:place])

    def operations(self, call: ast.Call) -> set[str]:
        """What ``op=`` may be in a call that averages: "average", "sum", "adasum"; none where it is not given."""
        operation = argument(call, "op")
        reached = self.reach(operation) if operation is not None else frozenset()
        named = {(self.dotted(one) or "").rpartition(".")[2].lower() for one in reached}
        texts = {str(one.value) for one in reached if isinstance(one, ast.Constant)}
        return (named | texts) & {"average", "sum", "adasum"}

    def reduces_gradients(self) -> list[Event]:
        """The events that average gradients by hand."""
        return [one for one in self.having(Role.REDUCE) if one.reached and self._is_about_gradients(one)]

    def _is_about_gradients(self, event: Event) -> bool:
        given = arguments(event.node)
        around = [one.iter for one in event.loops if isinstance(one, (ast.For, ast.comprehension))]
        texts = " ".join(ast.unparse(one) for one in [*given, *around]).lower()
        reached = [node for one in given for node in self.reach(one)]
        return "grad" in texts or any(isinstance(node, ast.Attribute) and node.attr == "grad" for node in reached)


def once(events: Iterable[Event]) -> list[Event]:
    """The first event of each call."""
    found: dict[ast.Call, Event] = {}
    for event in events:
        found.setdefault(event.node, event)
    return list(found.values())


def _counts(node: ast.expr) -> bool:
    """``range(...)`` and ``enumerate(range(...))``: numbers, not data."""
    while (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("enumerate", "tqdm", "reversed")
    ):
        if not node.args:
            return False
        node = node.args[0]
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, (ast.Name, ast.Attribute))
        and ast.unparse(node.func).endswith("range")
    )
