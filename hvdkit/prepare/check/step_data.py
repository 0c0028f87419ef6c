"""Steps 7 and 8: which samples are mine, how many steps make an epoch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hvdkit.prepare.check.call_arguments import arguments
from hvdkit.prepare.check.case import DRAWN, SHARDED, UNCLEAR, WHOLE, Case, DataPart
from hvdkit.prepare.check.facts import argument, is_constant, method, receiver
from hvdkit.prepare.check.libraries import SAMPLERS, Role
from hvdkit.prepare.check.program import everything
from hvdkit.prepare.check.trace import Event
from hvdkit.prepare.check.verdict import Verdict, done, missing, not_needed, undecided

_ARITHMETIC = re.compile(r"builtins\.(int|min|max|round)|math\.(ceil|floor)|numpy\.ceil")


def shard(case: Case) -> Verdict:
    """Step 7."""
    if case.having(Role.FIT):
        return done(case.lines(case.having(Role.FIT)))
    parts = case.parts
    sharded = [line for part in parts if part.kind == SHARDED for line in part.lines]
    whole = [part for part in parts if part.kind == WHOLE]
    forgotten = _forgotten(case)
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
        *case.lines(case.having(Role.SHARD)),
        *(one.node.lineno for one in case.named(*SAMPLERS)),
        *_slices(case),
    ]
    return done(anywhere) if anywhere else undecided("where the training data come from the text does not show")


def _slices(case: Case) -> list[int]:
    """``x[rank::size]``, wherever it is."""
    subscripts = [node for node in case.nodes if isinstance(node, ast.Subscript)]
    return [
        one.lineno
        for one in subscripts
        if case.kinds(one.slice) & {Role.RANK, Role.SPAWNED} and case.kinds(one.slice) & {Role.SIZE}
    ]


# 8 ------------------------------------------------------------------------------------------------------------------


def steps_per_epoch(case: Case) -> Verdict:
    """Step 8."""
    asked = case.having(Role.STEPS, Role.FIT)
    if asked:
        return done(case.lines(asked))
    forgotten = _forgotten(case)
    if forgotten:
        return missing(forgotten)
    divided = [line for event in case.fits for line in _divided_fit(case, event)]
    divided += [line for loop in case.training_loops for line in _divided_loop(case, loop)]
    if divided:
        return done(divided)
    parts = case.parts
    if parts and all(part.kind == SHARDED and part.balanced for part in parts):
        return not_needed(
            "every rank's part has the same number of batches", [line for part in parts for line in part.lines[:1]]
        )
    if any(part.kind == WHOLE for part in parts):
        return Verdict(
            "missing", (), "an epoch is the whole data set on every rank; sharding it (step 7) divides the steps"
        )
    return undecided(_why(parts))


def _why(parts: list[DataPart]) -> str:
    if any(part.kind == SHARDED for part in parts):
        return "the parts may differ by a sample, and one batch more on one rank makes it wait forever"
    return "how many steps make an epoch the text does not show"


def _steps(event: Event) -> ast.expr | None:
    return argument(event.node, "steps_per_epoch")


def _forgotten(case: Case) -> list[int]:
    """The lines that count steps and forget to divide them by the number of processes."""
    fits = [event.node.lineno for event in case.fits if _undivided(case, event)]
    return fits + [line for loop in case.training_loops for line in _undivided_loop(case, loop)]


def _undivided(case: Case, event: Event) -> bool:
    """Whether ``steps_per_epoch`` counts the samples of the whole data set on every rank."""
    steps = _steps(event)
    if steps is None or (isinstance(steps, ast.Constant) and steps.value in (None, 1)) or _is_divided(case, steps):
        return False
    epochs = argument(event.node, "epochs")
    if case.hidden(steps, through=True) or (epochs is not None and case.has_size(epochs, through=True)):
        return False
    part = case.fit_part(event)
    if part.kind == UNCLEAR or case.shard_lines(steps):
        return False
    return _is_counted(case, steps) or (part.kind == WHOLE and isinstance(steps, ast.Constant))


def _is_counted(case: Case, steps: ast.expr) -> bool:
    """Samples divided by something, such as a batch: a count of all samples, not a number that somebody chose."""
    reached = case.reach(steps)
    return any(isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.FloorDiv)) for node in reached)


def _undivided_loop(case: Case, loop: ast.AST) -> list[int]:
    """``dataset.repeat().take(n // batch)``: n times through a part, or all the random draws of one process."""
    if not isinstance(loop, (ast.For, ast.AsyncFor)):
        return []
    calls = case.calls(loop.iter, through=True)
    methods = {method(call) for call in calls if not case.name(call)}
    kind = case.loop_part(loop, case.training_loops[loop]).kind
    takes = [call for call in calls if method(call) == "take" and not case.name(call) and call.args]
    if kind == SHARDED and "repeat" in methods:
        takes = [call for call in takes if _is_counted(case, call.args[0]) and not case.shard_lines(call.args[0])]
    elif kind != WHOLE or "shuffle" not in methods:
        return []
    takes = [one for one in takes if not is_constant(one.args[0], 1)]  # a first step, for what is made by it
    return [one.lineno for one in takes if not _is_divided(case, one.args[0]) and not case.hidden(one.args[0], True)]


def _is_divided(case: Case, steps: ast.expr) -> bool:
    return case.has_size(steps, through=True)


def _divided_fit(case: Case, event: Event) -> list[int]:
    limits = [one.value for one in event.node.keywords if one.arg in ("steps_per_epoch", "epochs")]
    return [event.node.lineno] if any(_is_divided(case, one) for one in limits) else []


def _divided_loop(case: Case, loop: ast.AST) -> list[int]:
    """``dataset.take(n // size)`` and ``range(n // size)``."""
    if not isinstance(loop, (ast.For, ast.AsyncFor)):
        return []
    found = []
    for call in case.calls(loop.iter, through=True):
        counts = method(call) == "take" or case.name(call) in ("builtins.range", "itertools.islice")
        if counts and any(case.has_size(one) for one in call.args):
            found.append(call.lineno)
    return found


def differing_steps(case: Case) -> Iterator[int]:
    """Lines where the number of steps is reckoned from the rank."""
    for event in case.fits:
        steps = _steps(event)
        if steps is not None and _reckons_with_rank(case, steps):
            yield event.node.lineno
    loops = {loop for event in case.steps for loop in event.loops if isinstance(loop, ast.For)}
    for loop in sorted(loops, key=lambda one: one.lineno):
        for call in case.calls(loop.iter):
            ends = call.args[:1] if case.name(call) == "builtins.range" and len(call.args) == 1 else []
            ends = call.args[:1] if method(call) == "take" and not case.name(call) else ends
            if any(_reckons_with_rank(case, one) for one in ends):
                yield loop.lineno


def _reckons_with_rank(case: Case, node: ast.AST) -> bool:
    """Whether a rank is a term of a number; the length of a rank's part, which may well be equal on all, is not."""

    def terms(one: ast.AST) -> list[ast.AST]:
        if isinstance(one, ast.Call):
            return list(one.args) if _ARITHMETIC.fullmatch(case.name(one)) else []
        if isinstance(one, ast.Name):
            return case.behind(one)
        adds_up = isinstance(one, (ast.BinOp, ast.UnaryOp, ast.IfExp, ast.Compare, ast.BoolOp))
        return list(ast.iter_child_nodes(one)) if adds_up else []

    ranks = (Role.RANK, Role.LOCAL_RANK, Role.SPAWNED)
    return any(case.kind(one) in ranks for one in everything(node, terms))


def stale_samplers(case: Case) -> Iterator[ast.Call]:
    """Samplers of a training over several epochs that are never told which epoch it is."""
    told = case.methods("set_epoch")
    known = [case.made_by(receiver(event.node), SAMPLERS) for event in told]
    if any(not one for one in known):
        return
    told_samplers = {call for one in known for call in one}
    found: dict[ast.Call, None] = {}
    for loop, events in case.training_loops.items():
        epochs = any(event.reached and case.epochs_around(event, loop) for event in events)
        for loader in case.sources(loop) if epochs else []:
            given = arguments(loader)
            for sampler in (call for one in given for call in case.made_by(one, SAMPLERS, through=True)):
                shuffle = argument(sampler, "shuffle", 3)
                always = shuffle is None or (isinstance(shuffle, ast.Constant) and shuffle.value is True)
                if always and sampler not in told_samplers and not _handed_on(case, sampler, loader):
                    found[sampler] = None
    yield from found


def _handed_on(case: Case, sampler: ast.Call, loader: ast.Call) -> bool:
    """Whether code that is not in this text gets the sampler or its loader."""
    for event in case.events:
        if case.is_opaque(event.node):
            given = arguments(event.node)
            if any({sampler, loader} & set(case.calls(one)) for one in given):
                return True
    return False
