"""Steps 7 and 8: which samples are mine, how many steps make an epoch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hvdkit.prepare.check.data import DRAWN, SHARDED, UNCLEAR, WHOLE, Data, Part
from hvdkit.prepare.check.facts import Facts, argument, method
from hvdkit.prepare.check.libraries import FIT, LOCAL_RANK, RANK, SAMPLERS, SHARD, SIZE, SPAWNED, STEPS
from hvdkit.prepare.check.trace import Event
from hvdkit.prepare.check.training import Training
from hvdkit.prepare.check.verdict import Verdict, done, missing, not_needed, undecided

_ARITHMETIC = (
    "builtins.int",
    "builtins.min",
    "builtins.max",
    "builtins.round",
    "math.ceil",
    "math.floor",
    "numpy.ceil",
)


def shard(facts: Facts, training: Training, data: Data) -> Verdict:
    """Step 7."""
    if facts.having(FIT):
        return done(facts.lines(facts.having(FIT)))
    parts = data.parts
    sharded = [line for part in parts if part.kind == SHARDED for line in part.lines]
    whole = [part for part in parts if part.kind == WHOLE]
    forgotten = _forgotten(facts, training, data)
    if whole and forgotten and not sharded:
        return undecided(f"not sharded; random draws would do, with the steps of line {forgotten[0]} divided")
    if whole:
        return missing([line for part in whole for line in part.lines[:1]])
    unclear = next((part for part in parts if part.kind in (UNCLEAR, DRAWN)), None)
    if sharded:
        return done(sharded)
    if unclear is not None:
        return undecided(f"not sharded in this text, and {unclear.why}" if unclear.kind == UNCLEAR else unclear.why)
    anywhere = [
        *facts.lines(facts.having(SHARD)),
        *(one.node.lineno for one in facts.named(*SAMPLERS)),
        *_slices(facts),
    ]
    return done(anywhere) if anywhere else undecided("where the training data come from the text does not show")


def _slices(facts: Facts) -> list[int]:
    """``x[rank::size]``, wherever it is."""
    subscripts = [node for node in facts.program.nodes if isinstance(node, ast.Subscript)]
    return [
        one.lineno for one in subscripts if facts.kinds(one.slice) & {RANK, SPAWNED} and facts.kinds(one.slice) & {SIZE}
    ]


# 8 ------------------------------------------------------------------------------------------------------------------


def steps_per_epoch(facts: Facts, training: Training, data: Data) -> Verdict:
    """Step 8."""
    asked = facts.having(STEPS, FIT)
    if asked:
        return done(facts.lines(asked))
    forgotten = _forgotten(facts, training, data)
    if forgotten:
        return missing(forgotten)
    divided = [line for event in training.fits for line in _divided_fit(facts, event)]
    divided += [line for loop in training.training_loops for line in _divided_loop(facts, loop)]
    if divided:
        return done(divided)
    parts = data.parts
    if parts and all(part.kind == SHARDED and part.balanced for part in parts):
        return not_needed(
            "every rank's part has the same number of batches", [line for part in parts for line in part.lines[:1]]
        )
    if any(part.kind == WHOLE for part in parts):
        return Verdict(
            "missing", (), "an epoch is the whole data set on every rank; sharding it (step 7) divides the steps"
        )
    return undecided(_why(parts))


def _why(parts: list[Part]) -> str:
    if any(part.kind == SHARDED for part in parts):
        return "the parts may differ by a sample, and one batch more on one rank makes it wait for ever"
    return "how many steps make an epoch the text does not show"


def _steps(event: Event) -> ast.expr | None:
    return argument(event.node, "steps_per_epoch")


def _forgotten(facts: Facts, training: Training, data: Data) -> list[int]:
    """The lines that count steps and forget to divide them by the number of processes."""
    fits = [event.node.lineno for event in training.fits if _undivided(facts, data, event)]
    return fits + [line for loop in training.training_loops for line in _undivided_loop(facts, training, data, loop)]


def _undivided(facts: Facts, data: Data, event: Event) -> bool:
    """Whether ``steps_per_epoch`` counts the samples of the whole data set on every rank."""
    steps = _steps(event)
    if steps is None or (isinstance(steps, ast.Constant) and steps.value is None) or _is_divided(facts, steps):
        return False
    epochs = argument(event.node, "epochs")
    if facts.hidden(steps, through=True) or (epochs is not None and facts.has_size(epochs, through=True)):
        return False
    part = data.fit_part(event)
    if part.kind == UNCLEAR or data.shard_lines(steps):
        return False
    return _is_counted(facts, steps) or (part.kind == WHOLE and isinstance(steps, ast.Constant))


def _is_counted(facts: Facts, steps: ast.expr) -> bool:
    """Samples divided by something, such as a batch: a count of all samples, not a number that somebody chose."""
    reached = facts.flow.reach(steps)
    return any(isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.FloorDiv)) for node in reached)


def _undivided_loop(facts: Facts, training: Training, data: Data, loop: ast.AST) -> list[int]:
    """``dataset.repeat().take(n // batch)``: n times through a part, or all the random draws of one process."""
    if not isinstance(loop, (ast.For, ast.AsyncFor)):
        return []
    calls = facts.flow.calls(loop.iter, through=True)
    methods = {method(call) for call in calls if not facts.name(call)}
    kind = data.loop_part(loop, training.training_loops[loop]).kind
    takes = [call for call in calls if method(call) == "take" and not facts.name(call) and call.args]
    if kind == SHARDED and "repeat" in methods:
        takes = [call for call in takes if _is_counted(facts, call.args[0]) and not data.shard_lines(call.args[0])]
    elif kind != WHOLE or "shuffle" not in methods:
        return []
    return [one.lineno for one in takes if not _is_divided(facts, one.args[0]) and not facts.hidden(one.args[0], True)]


def _is_divided(facts: Facts, steps: ast.expr) -> bool:
    return facts.has_size(steps, through=True)


def _divided_fit(facts: Facts, event: Event) -> list[int]:
    limits = [one.value for one in event.node.keywords if one.arg in ("steps_per_epoch", "epochs")]
    return [event.node.lineno] if any(_is_divided(facts, one) for one in limits) else []


def _divided_loop(facts: Facts, loop: ast.AST) -> list[int]:
    """``dataset.take(n // size)`` and ``range(n // size)``."""
    if not isinstance(loop, (ast.For, ast.AsyncFor)):
        return []
    found = []
    for call in facts.flow.calls(loop.iter, through=True):
        counts = method(call) == "take" or facts.name(call) in ("builtins.range", "itertools.islice")
        if counts and any(facts.has_size(one) for one in call.args):
            found.append(call.lineno)
    return found


def differing_steps(facts: Facts, training: Training) -> Iterator[int]:
    """Lines where the number of steps is reckoned from the rank."""
    for event in training.fits:
        steps = _steps(event)
        if steps is not None and _reckons_with_rank(facts, steps):
            yield event.node.lineno
    loops = {loop for event in training.steps for loop in event.loops if isinstance(loop, ast.For)}
    for loop in sorted(loops, key=lambda one: one.lineno):
        for call in facts.flow.calls(loop.iter):
            ends = call.args[:1] if facts.name(call) == "builtins.range" and len(call.args) == 1 else []
            ends = call.args[:1] if method(call) == "take" and not facts.name(call) else ends
            if any(_reckons_with_rank(facts, one) for one in ends):
                yield loop.lineno


def _reckons_with_rank(facts: Facts, node: ast.AST) -> bool:
    """Whether a rank is a term of a number; the length of a rank's part, which may well be equal on all, is not."""
    stack, seen = [node], set()
    while stack:
        one = stack.pop()
        if one in seen:
            continue
        seen.add(one)
        if facts.kind(one) in (RANK, LOCAL_RANK, SPAWNED):
            return True
        if isinstance(one, ast.Call):
            stack += one.args if facts.name(one) in _ARITHMETIC else []
        elif isinstance(one, ast.Name):
            stack += [value for binding in facts.program.reaching(one) for value in facts.flow.bound(binding)]
        elif isinstance(one, (ast.BinOp, ast.UnaryOp, ast.IfExp, ast.Compare, ast.BoolOp)):
            stack += list(ast.iter_child_nodes(one))
    return False


def stale_samplers(facts: Facts, training: Training) -> Iterator[ast.Call]:
    """Samplers of a training over several epochs that are never told which epoch it is."""
    told = facts.methods("set_epoch")
    known = [
        facts.made_by(event.node.func.value, SAMPLERS) for event in told if isinstance(event.node.func, ast.Attribute)
    ]
    if any(not one for one in known):
        return
    told_samplers = {call for one in known for call in one}
    found: dict[ast.Call, None] = {}
    for loop, events in training.training_loops.items():
        epochs = any(event.reached and training.epochs_around(event, loop) for event in events)
        for loader in training.sources(loop) if epochs else []:
            given = [*loader.args, *(keyword.value for keyword in loader.keywords)]
            for sampler in (call for one in given for call in facts.made_by(one, SAMPLERS, through=True)):
                shuffle = argument(sampler, "shuffle", 3)
                always = shuffle is None or (isinstance(shuffle, ast.Constant) and shuffle.value is True)
                if always and sampler not in told_samplers and not _handed_on(facts, sampler, loader):
                    found[sampler] = None
    yield from found


def _handed_on(facts: Facts, sampler: ast.Call, loader: ast.Call) -> bool:
    """Whether code that is not in this text gets the sampler or its loader."""
    for event in facts.events:
        if facts.flow.is_opaque(event.node):
            given = [*event.node.args, *(keyword.value for keyword in event.node.keywords)]
            if any({sampler, loader} & set(facts.flow.calls(one)) for one in given):
                return True
    return False
