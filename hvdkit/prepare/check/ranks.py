"""What each rank trains on (its part of the data, all of it, or what the text does not show), and where it writes."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hvdkit.prepare.check.case import Case, over
from hvdkit.prepare.check.flow import everything
from hvdkit.prepare.check.libraries import LOADERS, RANKS, SAMPLERS, Role
from hvdkit.prepare.check.source import argument, arguments, is_constant, method, receiver, word
from hvdkit.prepare.check.trace import Event

_SEEDS = (
    "torch.manual_seed", "numpy.random.seed", "random.seed", "tensorflow.random.set_seed", "tensorflow.set_random_seed",
    "keras.utils.set_random_seed", "numpy.random.default_rng", "numpy.random.RandomState",
)  # fmt: skip
_RANDOM = re.compile(
    r"(?=torch\.rand|numpy\.random\.|tensorflow\.random\.|keras\.random\.|random\.)"
    r"(.*\.)?(?!randperm$|random_split$)(rand|normal|uniform|standard_normal)\w*$"
)
"""What makes up data; ``numpy.random.permutation`` and seeds only order them."""
_NOT_DATA = {"collate_fn", "worker_init_fn", "generator"}
_OWN_FILES = ("io.BytesIO", "tempfile.mk", "tempfile.Named", "tempfile.Temporary", "tempfile.Spooled")
_SAVES = {"torch.save", "torch.jit.save", "tensorflow.saved_model.save", "keras.models.save_model"}
BACKUP = "keras.callbacks.BackupAndRestore"
KERAS_WRITERS = ("keras.callbacks.ModelCheckpoint", BACKUP)
_PATHS = (
    "f", "filepath", "path", "directory", "backup_dir", "checkpoint_dir", "export_dir", "file_prefix", "save_path",
)  # fmt: skip
_TF_WRITERS = re.compile(r"\btrain\.(Checkpoint(Manager)?|Saver)$")
STATES = ("every rank", "unknown", "some ranks")

SHARDED = "sharded"
WHOLE = "whole"
UNCLEAR = "unclear"


@dataclass(frozen=True)
class DataPart:
    """What one rank gets of one data set for training.

    Attributes:
        kind: SHARDED, WHOLE or UNCLEAR.
        lines: where that is decided.
        why: for UNCLEAR.
        balanced: every rank gets the same number of batches whatever the sizes are.
    """

    kind: str
    lines: tuple[int, ...]
    why: str = ""
    balanced: bool = False


class DataCase(Case):
    """A script, the data that its training goes over, and where it writes."""

    @cached_property
    def parts(self) -> list[DataPart]:
        """The part of each data set that the script trains on; ``dataset.take(1)`` is a first step and no training."""
        loops = []
        for loop, steps in self.training_loops.items():
            takes = [call for call in self.calls(*self.drawn_from(loop)) if method(call) == "take"]
            if not any(is_constant(argument(call, "count", 0), 1) for call in takes):
                loops.append(self.loop_part(loop, steps))
        fits = [event for event in self.fits if not is_constant(argument(event.node, "steps_per_epoch"), 1)]
        return loops + [self.fit_part(event) for event in fits]

    def loop_part(self, loop: ast.AST, steps: list[Event]) -> DataPart:
        """The part of what a loop goes over, from the training steps in it."""
        for guard in (guard for event in steps for guard in event.guards):
            inside = loop in self.ancestors(guard.test) and guard.test is not getattr(loop, "test", None)
            if inside and self.splits_ranks(guard):
                return DataPart(SHARDED, (guard.test.lineno,))
        sources = self.sources(loop)
        loaders = [call for call in sources if self.name(call) in LOADERS]
        if loaders:
            parts = [self._loader_part(call, steps) for call in loaders]
            order = (WHOLE, UNCLEAR, SHARDED)
            return min(parts, key=lambda part: order.index(part.kind))
        lines = tuple(sorted({call.lineno for call in sources}))
        return self._part_of(self.drawn_from(loop), lines, self.has_size(*over(loop), through=True))

    def _loader_part(self, loader: ast.Call, steps: list[Event]) -> DataPart:
        given = [*loader.args, *(keyword.value for keyword in loader.keywords if keyword.arg not in _NOT_DATA)]
        if samplers := self.made_by(SAMPLERS, *given, through=True):
            return DataPart(SHARDED, (*(call.lineno for call in samplers), loader.lineno), balanced=True)
        around = [loop.iter for event in steps for loop in event.loops if isinstance(loop, (ast.For, ast.AsyncFor))]
        uncut = [node for node in around if "islice" not in ast.unparse(node)]
        whole = [node for node in uncut if self.made_by(LOADERS, node, through=True)]
        divided = self.has_size(*(node for node in around if node not in whole), through=True)
        return self._part_of(given, (loader.lineno,), divided)

    def fit_part(self, event: Event) -> DataPart:
        """The part of what Keras' ``fit`` is given."""
        call = event.node
        given = [argument(call, "x", 0), argument(call, "generator"), argument(call, "y", 1)]
        known = [value for value in given if value is not None]
        if not known:
            return DataPart(UNCLEAR, (call.lineno,), "what fit is given the text does not show")
        divided = self.has_size(argument(call, "steps_per_epoch"), argument(call, "epochs"), through=True)
        return self._part_of(known, (call.lineno,), divided)

    def _part_of(self, given: Sequence[ast.expr], lines: tuple[int, ...], divided: bool) -> DataPart:
        """Which part of the data a rank reads through these expressions.

        ``divided``: whether its steps are divided by ranks.
        """
        if sharding := self.shard_lines(*given):
            balanced = any(map(self._divides_evenly, self.calls(*given, through=True)))
            return DataPart(SHARDED, tuple(sharding), balanced=balanced)
        doubt = next((why for value in given if (why := self._doubt(value))), "")
        if doubt:
            return DataPart(UNCLEAR, lines, doubt)
        lines = tuple(call.lineno for call in self.tf_sources(*given)[:1]) or lines
        shuffles = any(method(call) == "shuffle" for call in self.calls(*given, through=True))
        draws_alike = not shuffles or self.fixed_seed(given)
        if not divided or (self.tf_sources(*given) and draws_alike):
            return DataPart(WHOLE, lines)
        return DataPart(UNCLEAR, lines, "each rank may draw at random from all data, for its share of the steps")

    def _divides_evenly(self, call: ast.Call) -> bool:
        """hvdkit's ``shard``, or what leaves the samples out that are too few for every rank."""
        whole_rounds = method(call) == "batch" and is_constant(argument(call, "drop_remainder", 1), True)
        return self.role(call) == Role.SHARD or (whole_rounds and self.has_size(argument(call, "batch_size", 0)))

    def shard_lines(self, *nodes: ast.AST | None) -> list[int]:
        """The lines that make values this rank's part."""
        reached = [node for node in self.reach(*nodes, through=True) if isinstance(node, (ast.expr, ast.arg))]
        return sorted({node.lineno for node in reached if self._shards(node)})

    def _shards(self, node: ast.AST) -> bool:
        if self.kind(node) in RANKS:
            return True
        if not isinstance(node, ast.Call):
            names = ("rank", "local_rank", "worker_rank", "global_rank")
            return isinstance(node, (ast.Name, ast.arg)) and word(node) in names
        if self.role(node) == Role.SHARD or self.name(node) in SAMPLERS:
            return True
        if method(node) == "shard" and len(arguments(node)) >= 2:
            return True
        made = self.class_of(node)
        own = self.function_arguments(node) if made is None else [made]
        return any(self.kind(inside) in (Role.RANK, Role.SPAWNED) for function in own for inside in ast.walk(function))

    def _doubt(self, node: ast.expr) -> str:
        """Why it is not clear what a value holds; "" where the text shows it."""
        if maker := self.hidden(node, through=True):
            return f"the data come from {maker}, which is not in this text"
        for one in self.reach(*everything(node, self._objects)):
            if isinstance(one, ast.arg) and not self.arguments_for(one) and one.arg not in ("self", "cls"):
                return f"the data come from a caller that is not in this text ({one.arg})"
            if isinstance(one, ast.Constant) and one.value is ...:
                return "the data are left out of this text"
        calls = [event.node for event in self.events]
        seeds = [call for call in calls if self.name(call) in _SEEDS or method(call) == "manual_seed"]
        if self.has_rank(*(value for call in seeds for value in call.args)):
            return "each rank has a seed of its own"
        drawn = self.calls(node, through=True)
        own = [klass for call in drawn if (klass := self.class_of(call)) is not None]
        drawn += [node for klass in own for node in ast.walk(klass) if isinstance(node, ast.Call)]
        if any(_RANDOM.match(self.name(call)) for call in drawn) and not self.fixed_seed([node]):
            return "each rank makes random data of its own"
        return ""

    def _objects(self, node: ast.AST) -> list[ast.expr]:
        """What methods are called of where a value comes from: ``data`` of ``data.repeat().batch(8)``."""
        calls = [call for call in self.calls(node) if not self.name(call)]
        return [call.func.value for call in calls if isinstance(call.func, ast.Attribute)]

    def tf_sources(self, *nodes: ast.expr) -> list[ast.Call]:
        """The calls of ``tf.data`` and ``tensorflow_datasets`` that values are made by."""
        calls = self.calls(*nodes, through=True)
        return [call for call in calls if self.name(call).startswith(("tensorflow.data.", "tensorflow_datasets."))]

    def fixed_seed(self, given: Sequence[ast.expr]) -> bool:
        """Whether all ranks draw the same random numbers."""
        seeds = [argument(event.node, "seed", 0) for event in self.events if self.name(event.node) in _SEEDS]
        calls = self.calls(*given, through=True)
        seeds += [argument(call, "seed", 1) for call in calls if method(call) == "shuffle" and not self.name(call)]
        seeds += [argument(call, "seed") for call in calls if method(call).startswith("flow")]
        return any(seed is not None and not is_constant(seed, None) and not self.has_rank(seed) for seed in seeds)

    # Where a checkpoint is written ------------------------------------------------------------------------------------

    def writes_checkpoint(self, call: ast.Call) -> bool:
        """Whether a call writes a checkpoint that every rank would write."""
        name, called = self.name(call), method(call)
        if name in _SAVES:
            target = argument(call, "f", 1) or argument(call, "filepath", 1)
            return not any(self.name(call).startswith(_OWN_FILES) for call in self.calls(target))
        if name in KERAS_WRITERS:
            return not self.guards_fit
        if name or not called or self.role(call):
            return False
        made = [self.name(one) for one in self.calls(receiver(call))]
        if called in ("save", "write") and any(map(_TF_WRITERS.search, made)):
            return True
        keras = called == "save_weights" or (called in ("save", "export") and self.holds_keras_model(receiver(call)))
        return keras and not any(maker.startswith("torch.") for maker in made)

    def has_own_path(self, call: ast.Call) -> bool:
        """Whether a rank is in the arguments that say where to write, those of the checkpoint object included."""
        given = [argument(call, name) for name in _PATHS]
        given.append(argument(call, "", 1 if self.name(call) else 0) or argument(call, "", 0))
        owners = [] if self.name(call) else self.calls(receiver(call))
        makers = [one for one in owners if ".train." in self.name(one)]
        return self.has_rank(*given, *(value for made in makers for value in arguments(made)))

    def where_it_writes(self, event: Event) -> str:
        """Where a write happens, over all the ways to it: on every rank as soon as one way is open to all."""
        if self.has_own_path(event.node):
            return "some ranks"
        states = {self.where(way) for way in self.events if way.node is event.node}
        statement = self.statement(event.node)
        is_named = isinstance(statement, ast.Assign) and statement.value is event.node
        if is_named and self.name(event.node) in KERAS_WRITERS:
            names = [node for node in self.nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
            uses = [name for name in names if any(binding.node is statement for binding in self.reaching(name))]
            states = {state for name in uses for state in self._where_it_is_used(name)} or {"unknown"}
        return next(state for state in STATES if state in states)

    def _where_it_is_used(self, name: ast.Name) -> set[str]:
        """Where a name is used: at the calls around it, or under the conditions around its statement."""
        around = list(self.ancestors(name))
        if self.has_rank(*(node.test for node in around if isinstance(node, (ast.If, ast.IfExp)))):
            return {"some ranks"}
        return {self.where(event) for event in self.events if event.node in around} or {"every rank"}
