"""What each rank trains on: its part, random draws, or everything."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from hvdkit.prepare.check.facts import ScriptFacts, argument, is_constant, method, receiver, words
from hvdkit.prepare.check.libraries import LOADERS, SAMPLERS, Role
from hvdkit.prepare.check.program import everything
from hvdkit.prepare.check.trace import Event
from hvdkit.prepare.check.training import Training

SHARDED = "sharded"
DRAWN = "drawn"
WHOLE = "whole"
UNCLEAR = "unclear"

_SEEDS = (
    "torch.manual_seed", "numpy.random.seed", "random.seed", "tensorflow.random.set_seed", "tensorflow.set_random_seed",
    "keras.utils.set_random_seed", "numpy.random.default_rng", "numpy.random.RandomState",
)  # fmt: skip
_ORDERS = ("randperm", "random_split")
_RANDOM = ("torch.rand", "numpy.random.", "tensorflow.random.", "keras.random.", "random.")
_RANK_NAMES = {"rank", "local_rank", "worker_rank", "global_rank"}
_NOT_DATA = {"collate_fn", "worker_init_fn", "generator"}
_STEPS_ARGUMENTS = {"steps_per_epoch", "epochs"}


@dataclass(frozen=True)
class DataPart:
    """What one rank gets of one data set for training.

    Attributes:
        kind: SHARDED, DRAWN (each rank draws at random from everything, for its share of the steps), WHOLE or UNCLEAR.
        lines: where that is decided.
        why: for UNCLEAR and DRAWN.
        balanced: every rank gets the same number of batches whatever the sizes are.
    """

    kind: str
    lines: tuple[int, ...]
    why: str = ""
    balanced: bool = False


class Case(Training):
    """A training script, with everything that steps and rules ask of it."""

    @cached_property
    def parts(self) -> list[DataPart]:
        """The part of each data set that the script trains on."""
        loops = {loop: events for loop, events in self.training_loops.items() if not self._is_one_step(loop)}
        fits = [event for event in self.fits if not is_constant(argument(event.node, "steps_per_epoch"), 1)]
        return [self.loop_part(*one) for one in loops.items()] + [self.fit_part(event) for event in fits]

    def _is_one_step(self, loop: ast.AST) -> bool:
        """``dataset.take(1)``: a first step, for the variables that it makes; no training."""
        calls = [call for one in self.drawn_from(loop) for call in self.calls(one)]
        return any(method(call) == "take" and is_constant(argument(call, "count", 0), 1) for call in calls)

    # Loops ----------------------------------------------------------------------------------------------------------

    def loop_part(self, loop: ast.AST, steps: list[Event]) -> DataPart:
        """The part of what a loop goes over, from the training steps in it."""
        sources = self.sources(loop)
        lines = tuple(sorted({call.lineno for call in sources}))
        own = [guard for event in steps for guard in event.guards if self._is_inside(guard.test, loop)]
        if any(self.splits_ranks(guard) for guard in own):
            return DataPart(SHARDED, (next(guard.test.lineno for guard in own if self.splits_ranks(guard)),))
        loaders = [call for call in sources if self.name(call) in LOADERS]
        if loaders:
            parts = [self._loader_part(call, steps) for call in loaders]
            order = (WHOLE, UNCLEAR, DRAWN, SHARDED)
            return min(parts, key=lambda part: order.index(part.kind))
        limits = [loop.iter] if isinstance(loop, (ast.For, ast.AsyncFor, ast.comprehension)) else []
        return self._part_of(self.drawn_from(loop), lines, self._divided(limits))

    def _is_inside(self, node: ast.AST, loop: ast.AST) -> bool:
        return loop in set(self.ancestors(node)) and node is not getattr(loop, "test", None)

    def _loader_part(self, loader: ast.Call, steps: list[Event]) -> DataPart:
        given = [*loader.args, *(one.value for one in loader.keywords if one.arg not in _NOT_DATA)]
        samplers = [call for one in given for call in self.made_by(one, SAMPLERS, through=True)]
        if samplers:
            return DataPart(SHARDED, (*(call.lineno for call in samplers), loader.lineno), balanced=True)
        around = [one.iter for event in steps for one in event.loops if isinstance(one, (ast.For, ast.AsyncFor))]
        shortened = [one for one in around if "islice" in ast.unparse(one) or not self.made_by(one, LOADERS, True)]
        return self._part_of(given, (loader.lineno,), self._divided(shortened), passes_once=True)

    def _divided(self, nodes: Sequence[ast.expr]) -> bool:
        return any(self.has_size(node, through=True) for node in nodes)

    # Keras' fit -----------------------------------------------------------------------------------------------------

    def fit_part(self, event: Event) -> DataPart:
        """The part of what ``fit`` is given."""
        call = event.node
        given = [
            one
            for one in (argument(call, "x", 0), argument(call, "generator"), argument(call, "y", 1))
            if one is not None
        ]
        if not given:
            return DataPart(UNCLEAR, (call.lineno,), "what fit is given the text does not show")
        limits = [one.value for one in call.keywords if one.arg in _STEPS_ARGUMENTS]
        return self._part_of(given, (call.lineno,), self._divided(limits), passes_once=False, arrays=True)

    # All ------------------------------------------------------------------------------------------------------------

    def _part_of(
        self,
        given: Sequence[ast.expr],
        lines: tuple[int, ...],
        divided: bool,
        passes_once: bool = False,
        arrays: bool = False,
    ) -> DataPart:
        """Which part of the data a rank reads through these expressions.

        ``divided``: whether its steps are divided by ranks.
        """
        sharding = sorted({line for one in given for line in self.shard_lines(one)})
        if sharding:
            makers = [call for one in given for call in self.calls(one, through=True)]
            return DataPart(SHARDED, tuple(sharding), balanced=any(self.role(call) == Role.SHARD for call in makers))
        doubt = next((why for one in given if (why := self._doubt(one))), "")
        if doubt:
            return DataPart(UNCLEAR, lines, doubt)
        sources = sorted({call.lineno for one in given for call in self.tf_sources(one)})
        lines = tuple(sources[:1]) or lines
        if not divided:
            return DataPart(WHOLE, lines)
        if passes_once:
            return DataPart(UNCLEAR, lines, "the number of processes shortens its loop")
        shuffled = [self._is_shuffled(one, arrays) for one in given[:1]]
        if shuffled == [True] and not self.fixed_seed(given):
            return DataPart(
                DRAWN, lines, "each rank draws at random from the whole data set, for its share of the steps"
            )
        return DataPart(
            WHOLE if shuffled != [None] else UNCLEAR, lines, "whether the data are shuffled the text does not say"
        )

    def shard_lines(self, node: ast.expr) -> list[int]:
        """The lines that make a value this rank's part."""
        found = []
        for one in self.reach(node, through=True):
            if isinstance(one, ast.Call) and self._shards(one):
                found.append(one.lineno)
            elif self.kind(one) in (Role.RANK, Role.LOCAL_RANK, Role.SPAWNED) and not self._is_only_shown(one):
                found.append(one.lineno)  # type: ignore[attr-defined]
            elif isinstance(one, (ast.Name, ast.arg)) and _RANK_NAMES & set(words(one)):
                found.append(one.lineno)
        return sorted(set(found))

    def _shards(self, call: ast.Call) -> bool:
        if self.role(call) == Role.SHARD or self.name(call) in SAMPLERS:
            return True
        if method(call) == "shard" and len(call.args) + len(call.keywords) >= 2:
            return True
        own = self.class_of(call)
        inside = [own] if own is not None else list(self.function_arguments(call))
        return any(self.kind(node) in (Role.RANK, Role.SPAWNED) for one in inside for node in ast.walk(one))

    def _is_only_shown(self, node: ast.AST) -> bool:
        """A rank that is an option of something else: a device, a seed of augmentation, a message."""
        call = next((one for one in self.ancestors(node) if isinstance(one, ast.Call)), None)
        return call is not None and (method(call) in ("to", "cuda", "device") or self.name(call) == "builtins.print")

    def _doubt(self, node: ast.expr) -> str:
        """Why it is not clear what a value holds; "" where the text shows it."""
        for call in self._made_from(node):
            if self.is_opaque(call):
                return f"the data come from {ast.unparse(call.func)}, which is not in this text"
        for one in self.reach(node):
            if isinstance(one, ast.arg) and not self.arguments_for(one) and one.arg not in ("self", "cls"):
                return f"the data come from a caller that is not in this text ({one.arg})"
            if isinstance(one, ast.Constant) and one.value is ...:
                return "the data are left out of this text"
        if self._seed_has_rank():
            return "each rank has a seed of its own"
        if self._is_random(node) and not self.fixed_seed([node]):
            return "each rank makes random data of its own"
        return ""

    def _made_from(self, node: ast.expr) -> list[ast.Call]:
        """The calls that made a data set, and what those of ``torch.utils.data`` and ``tf.data`` were made from."""

        def inner(call: ast.Call) -> list[ast.Call]:
            wraps = self.name(call).startswith(("torch.utils.data.", "tensorflow.data."))
            of_object = isinstance(call.func, ast.Attribute) and not self.name(call)
            given = [*(call.args[:1] if wraps else []), *([receiver(call)] if of_object else [])]
            return [made for one in given for made in self.calls(one)]

        return list(dict.fromkeys(one for call in self.calls(node) for one in everything(call, inner)))

    def tf_sources(self, node: ast.expr) -> list[ast.Call]:
        """The calls of ``tf.data`` and ``tensorflow_datasets`` that a value is made by."""
        calls = self.calls(node, through=True)
        return [call for call in calls if self.name(call).startswith(("tensorflow.data.", "tensorflow_datasets."))]

    def _is_shuffled(self, node: ast.expr, arrays: bool) -> bool | None:
        """Whether the order is random; None where the text does not say. Keras shuffles arrays by itself."""
        calls = self.calls(node, through=True)
        if any(method(call) == "shuffle" and not self.name(call) for call in calls):
            return True
        if self.tf_sources(node):
            return False
        if any(method(call).startswith("flow") for call in calls):
            return all(not _is_false(argument(call, "shuffle")) for call in calls if method(call).startswith("flow"))
        own = any(self.class_of(call) for call in self.calls(node))
        return None if own or not arrays else True

    def fixed_seed(self, given: Sequence[ast.expr]) -> bool:
        """Whether all ranks draw the same random numbers."""
        seeds = [argument(event.node, "seed", 0) for event in self.events if self.name(event.node) in _SEEDS]
        calls = [call for one in given for call in self.calls(one, through=True)]
        seeds += [argument(call, "seed", 1) for call in calls if method(call) == "shuffle" and not self.name(call)]
        seeds += [argument(call, "seed") for call in calls if method(call).startswith("flow")]
        known = [
            seed for seed in seeds if seed is not None and not (isinstance(seed, ast.Constant) and seed.value is None)
        ]
        return any(not self.has_rank(seed) for seed in known)

    def _seed_has_rank(self) -> bool:
        calls = [event.node for event in self.events]
        seeds = [call for call in calls if self.name(call) in _SEEDS or method(call) == "manual_seed"]
        return any(self.has_rank(one) for call in seeds for one in call.args)

    def _is_random(self, node: ast.expr) -> bool:
        """Whether data are made up by a random generator rather than read."""
        return any(self.name(call).startswith(_RANDOM) and _is_source(self, call) for call in self._all(node))

    def _all(self, node: ast.expr) -> list[ast.Call]:
        calls = self.calls(node, through=True)
        own = [self.class_of(call) for call in calls]
        inside = [one for klass in own if klass is not None for one in ast.walk(klass) if isinstance(one, ast.Call)]
        return [*calls, *inside]

    # Wrong shards ---------------------------------------------------------------------------------------------------

    def wrong_shards(self) -> Iterator[Event]:
        """Calls that divide the data by the local rank, or with rank and size exchanged."""
        for event in self.events:
            pair = self._pair(event.node)
            if pair is None or not event.reached:
                continue
            size, rank = (self.kinds(one) for one in pair)
            exchanged = size == {Role.RANK} and rank == {Role.SIZE}
            if exchanged or (size == {Role.SIZE} and rank == {Role.LOCAL_RANK}):
                yield event

    def _pair(self, call: ast.Call) -> tuple[ast.expr, ast.expr] | None:
        """The arguments for the number of parts and for the part."""
        if self.name(call) in SAMPLERS:
            size, rank = argument(call, "num_replicas", 1), argument(call, "rank", 2)
        elif method(call) == "shard" and not self.name(call):
            size, rank = argument(call, "num_shards", 0), argument(call, "index", 1)
        else:
            return None
        return (size, rank) if size is not None and rank is not None else None


def _is_false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _is_source(facts: ScriptFacts, call: ast.Call) -> bool:
    """``numpy.random.rand`` makes data; ``numpy.random.permutation`` and seeds only order it."""
    last = facts.name(call).rpartition(".")[2]
    return last.startswith(("rand", "normal", "uniform", "standard_normal")) and last not in _ORDERS
