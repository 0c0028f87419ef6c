"""Steps 7 and 8: which samples are mine, how many steps make an epoch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hvdkit.prepare.check.calls import argument, arguments, is_constant, method, receiver
from hvdkit.prepare.check.case import DRAWN, SHARDED, UNCLEAR, WHOLE, Case
from hvdkit.prepare.check.libraries import RANKS, SAMPLERS, Role
from hvdkit.prepare.check.program import everything
from hvdkit.prepare.check.trace import Event
from hvdkit.prepare.check.training import over
from hvdkit.prepare.check.verdict import Verdict, done, missing, not_needed, undecided

_ARITHMETIC = re.compile(r"builtins\.(int|min|max|round)|math\.(ceil|floor)|numpy\.ceil")


def shard(case: Case) -> Verdict:
    """Step 7."""
    parts, forgotten = case.parts, _forgotten(case)
    sharded = [line for part in parts if part.kind == SHARDED for line in part.lines]
    whole = [line for part in parts if part.kind == WHOLE for line in part.lines[:1]]
    unclear = next((part for part in parts if part.kind in (UNCLEAR, DRAWN)), None)
    if whole and forgotten and not sharded:
        return undecided(f"not sharded; random draws would do, with the steps of line {forgotten[0]} divided")
    if whole:
        return missing(whole)
    if sharded:
        return done(sharded)
    if unclear is not None:
        return undecided(f"not sharded in this text, and {unclear.why}" if unclear.kind == UNCLEAR else unclear.why)
    anywhere = [*case.lines([*case.having(Role.SHARD), *case.named(*SAMPLERS)]), *_slices(case)]
    return done(anywhere) if anywhere else undecided("where the training data come from the text does not show")


def _slices(case: Case) -> list[int]:
    """``x[rank::size]``, wherever it is."""
    found = [(one.lineno, case.kinds(one.slice)) for one in case.nodes if isinstance(one, ast.Subscript)]
    return [line for line, kinds in found if Role.SIZE in kinds and kinds & {Role.RANK, Role.SPAWNED}]


# 8 ------------------------------------------------------------------------------------------------------------------


def steps_per_epoch(case: Case) -> Verdict:
    """Step 8."""
    if forgotten := _forgotten(case):
        return missing(forgotten)
    divided = [event.node.lineno for event in case.fits if _divides_fit(case, event)]
    divided += [line for loop in case.training_loops for line in _divided_loop(case, loop)]
    if divided:
        return done(divided)
    parts = case.parts
    if parts and all(part.kind == SHARDED and part.balanced for part in parts):
        return not_needed(
            "every rank's part has the same number of batches", [line for part in parts for line in part.lines[:1]]
        )
    kinds = {part.kind for part in parts}
    if WHOLE in kinds:
        return missing((), "an epoch is the whole data set on every rank; sharding it (step 7) divides the steps")
    if SHARDED in kinds:
        return undecided("the parts may differ by a sample, and one batch more on one rank makes it wait forever")
    return undecided("how many steps make an epoch the text does not show")


def _forgotten(case: Case) -> list[int]:
    """The lines that count steps and forget to divide them by the number of processes."""
    fits = [event.node.lineno for event in case.fits if _undivided(case, event)]
    return fits + [line for loop in case.training_loops for line in _undivided_loop(case, loop)]


def _undivided(case: Case, event: Event) -> bool:
    """Whether ``steps_per_epoch`` counts the samples of the whole data set on every rank."""
    steps, part = argument(event.node, "steps_per_epoch"), case.fit_part(event)
    if steps is None or is_constant(steps, None) or is_constant(steps, 1) or part.kind == UNCLEAR:
        return False
    if _divides_fit(case, event) or case.hidden(steps, through=True) or case.shard_lines(steps):
        return False
    return _is_counted(case, steps) or (part.kind == WHOLE and isinstance(steps, ast.Constant))


def _divides_fit(case: Case, event: Event) -> bool:
    return case.has_size(argument(event.node, "steps_per_epoch"), argument(event.node, "epochs"), through=True)


def _is_counted(case: Case, steps: ast.expr) -> bool:
    """Samples divided by something, such as a batch: a count of all samples, not a number that somebody chose."""
    reached = case.reach(steps)
    return any(isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.FloorDiv)) for node in reached)


def _undivided_loop(case: Case, loop: ast.AST) -> list[int]:
    """``dataset.repeat().take(n // batch)``: n times through a part, or all the random draws of one process."""
    calls = [call for call in case.calls(*over(loop), through=True) if not case.name(call)]
    methods = {method(call) for call in calls}
    kind = case.loop_part(loop, case.training_loops[loop]).kind
    takes = [call for call in calls if method(call) == "take" and call.args]
    if kind == SHARDED and "repeat" in methods:
        takes = [call for call in takes if _is_counted(case, call.args[0]) and not case.shard_lines(call.args[0])]
    elif kind != WHOLE or "shuffle" not in methods:
        return []
    takes = [one for one in takes if not is_constant(one.args[0], 1)]  # a first step, for what is made by it
    seen = [one for one in takes if not case.hidden(one.args[0], through=True)]
    return [one.lineno for one in seen if not case.has_size(one.args[0], through=True)]


def _divided_loop(case: Case, loop: ast.AST) -> list[int]:
    """``dataset.take(n // size)`` and ``range(n // size)``."""
    calls = case.calls(*over(loop), through=True)
    counts = [one for one in calls if method(one) == "take" or case.name(one) in ("builtins.range", "itertools.islice")]
    return [call.lineno for call in counts if case.has_size(*call.args)]


def differing_steps(case: Case) -> Iterator[int]:
    """Lines where the number of steps is reckoned from the rank."""
    for event in case.fits:
        if _reckons_with_rank(case, argument(event.node, "steps_per_epoch")):
            yield event.node.lineno
    loops = {loop for event in case.steps for loop in event.loops if isinstance(loop, ast.For)}
    for loop in sorted(loops, key=lambda one: one.lineno):
        for call in case.calls(loop.iter):
            counts = case.name(call) == "builtins.range" and len(call.args) == 1
            takes = method(call) == "take" and not case.name(call) and call.args
            if (counts or takes) and _reckons_with_rank(case, call.args[0]):
                yield loop.lineno


def _reckons_with_rank(case: Case, node: ast.AST | None) -> bool:
    """Whether a rank is a term of a number; the length of a rank's part, which may well be equal on all, is not."""

    def terms(one: ast.AST) -> list[ast.AST]:
        if isinstance(one, ast.Call):
            return list(one.args) if _ARITHMETIC.fullmatch(case.name(one)) else []
        if isinstance(one, ast.Name):
            return case.behind(one)
        adds_up = isinstance(one, (ast.BinOp, ast.UnaryOp, ast.IfExp, ast.Compare, ast.BoolOp))
        return list(ast.iter_child_nodes(one)) if adds_up else []

    return node is not None and any(case.kind(one) in RANKS for one in everything(node, terms))


def stale_samplers(case: Case) -> Iterator[ast.Call]:
    """Samplers of a training over several epochs that are never told which epoch it is."""
    told = [case.made_by(SAMPLERS, receiver(event.node)) for event in case.methods("set_epoch")]
    for loop, events in case.training_loops.items() if all(told) else ():
        epochs = any(event.reached and case.epochs_around(event, loop) for event in events)
        for loader in case.sources(loop) if epochs else []:
            for sampler in case.made_by(SAMPLERS, *arguments(loader), through=True):
                shuffle = argument(sampler, "shuffle", 3)
                always = shuffle is None or is_constant(shuffle, True)
                if always and not any(sampler in one for one in told) and not _handed_on(case, sampler, loader):
                    yield sampler


def _handed_on(case: Case, sampler: ast.Call, loader: ast.Call) -> bool:
    """Whether code that is not in this text gets the sampler or its loader."""
    opaque = [event.node for event in case.events if case.is_opaque(event.node)]
    return any({sampler, loader} & set(case.calls(*arguments(call))) for call in opaque)
