"""Random numbers: the same on every rank where they make the data, each rank's own where they augment and drop."""

from __future__ import annotations

import ast
import re

from hvdkit.prepare.check.calls import argument, default_of, given_for, method
from hvdkit.prepare.check.steps import JudgedCase
from hvdkit.prepare.check.trace import Event
from hvdkit.prepare.port.plan import PortPlan

_FAMILIES = {
    "torch": (r"torch\.(rand\w*|normal|bernoulli|multinomial|utils\.data\.random_split)", "manual_seed(0)"),
    "numpy.random": (r"numpy\.random\.(?!seed|default_rng|RandomState|Generator|get_state|set_state)\w+", "seed(0)"),
    "random": (r"random\.(?!seed|Random|getstate|setstate)\w+", "seed(0)"),
    "tensorflow": (r"tensorflow\.random\.(?!set_seed|Generator|stateless)\w+", "random.set_seed(0)"),
}
"""By module what draws from its one generator, and what seeds that."""
_SEEDS = {"torch": "torch.manual_seed", "numpy.random": "numpy.random.seed", "random": "random.seed",
          "tensorflow": "tensorflow.random.set_seed"}  # fmt: skip
_ALL = "keras.utils.set_random_seed"
_LAYERS = re.compile(
    r"keras\.layers\.(\w*Dropout\w*|Gaussian\w+|Random\w+)|tensorflow\.(image\.random_|random\.(?!set_seed))\w+"
)
_LATER = ("random_split", "randperm", "permutation", "train_test_split", "random.shuffle")


def drawn_data(plan: PortPlan) -> list[Event]:
    """Random numbers that are drawn before the training, as data are: from the generators that a seed sets."""
    case = plan.case
    first = next((one.order for one in case.steps if one.reached), 0)
    families = "|".join(draws for draws, _ in _FAMILIES.values())
    found = [one for one in case.events if one.reached and one.order < first
             and re.fullmatch(families, case.name(one.node)) and argument(one.node, "generator") is None]  # fmt: skip
    return [one for one in found if not any(map(case.function_arguments, one.stack))]  # not what ``map`` is given


def _unseeded(plan: PortPlan) -> dict[str, Event]:
    """By module the first number that is drawn before a seed is set."""
    found: dict[str, Event] = {}
    for event in drawn_data(plan):
        family = next(one for one, (draws, _) in _FAMILIES.items() if re.fullmatch(draws, plan.case.name(event.node)))
        seeds = [one for one in plan.case.events if plan.case.name(one.node) in (_SEEDS[family], _ALL)]
        if not any(one.order < event.order for one in seeds):
            found.setdefault(family, event)
    return found


def same_data(plan: PortPlan, start: ast.stmt) -> list[str]:
    """The lines that seed, above a statement, what nobody has seeded: every rank would have data of its own."""
    imports = [one for one in plan.case.nodes if isinstance(one, (ast.Import, ast.ImportFrom))]
    above = [one for module in imports if module.lineno < start.lineno for one in module.names]
    known = {(one.asname or one.name).split(".")[0] for one in above}
    lines = []
    for family, event in _unseeded(plan).items():
        if (module := plan.called(family)).split(".")[0] in known:
            lines.append(f"{module}.{_FAMILIES[family][1]}")
        else:
            write = f"{_SEEDS[family]}(0) before it"
            plan.leave(event.node, "without a seed every rank draws numbers of its own here", write)
    return lines


def of_each_rank(plan: PortPlan, first: ast.stmt) -> None:
    """Give each rank numbers of its own from ``first`` on, where the script seeds all ranks alike."""
    case = plan.case
    own = plan.binding == "torch"
    names = {*_SEEDS.values(), _ALL} - (set() if own else {_SEEDS["numpy.random"]})  # of which no layer draws
    seeds = [one for one in case.events if case.name(one.node) in names and one.reached]
    if not seeds:
        if own and _unseeded(plan):
            plan.edit("before", first, f"{plan.hk}.seed_everything(0, {plan.use_world(first)})")
        return
    seed = seeds[0].node
    why = "every rank draws the same numbers from this seed, in augmentation and dropout, too"
    place = f"once the data are there and before {plan.hk}.broadcast_state"
    write = f"{plan.hk}.seed_everything(seed, {plan.world}), {place}"
    if not own:  # where Keras' layers take the rank's own numbers only if they are asked to in time
        if any(_LAYERS.fullmatch(name) for name in case.used):
            plan.leave(seed, why, write)
        return
    inside = [one for one in case.events if {first} & {*case.ancestors(one.node), *map(case.statement, one.stack)}]
    begun = min((one.order for one in inside), default=0)
    given = _known_at(plan, seeds[0], first)
    later = [one for one in case.events if one.order > begun and one.reached]
    moved = [one for one in later if one in seeds or case.name(one.node).endswith(_LATER)]
    if given is None or moved or method(seed) == "seed_everything":
        plan.leave(seed, why, write)
        return
    plan.edit("before", first, f"{plan.hk}.seed_everything({plan.src(given)}, {plan.use_world(first)})")


def order(plan: PortPlan, loader: Event) -> None:
    """Give ``shard`` the seed that the script's user can set; its own stays where the script has a fixed one."""
    seeds = [one for one in plan.case.events if plan.case.name(one.node) == _SEEDS["torch"] and one.reached]
    set_before = len(seeds) == 1 and seeds[0].order < loader.order
    given = _known_at(plan, seeds[0], loader.node) if set_before else None
    if given is not None and not isinstance(given, ast.Constant):
        plan.add(loader.node, plan.src(given), "seed")


def _known_at(plan: PortPlan, seed: Event, node: ast.AST) -> ast.expr | None:
    """What a call seeds with, where that is the same at a node and the call always happens; else None."""
    case, given = plan.case, _given(plan.case, seed)
    if given is None or not all(one.wraps or "__name__" in ast.unparse(one.test) for one in seed.guards):
        return None
    used = [one.id for one in ast.walk(given) if isinstance(one, ast.Name)]
    here, there = case.scope(given), case.scope(node)
    return given if all(case.lookup(one, here) is case.lookup(one, there) for one in used) else None


def _given(case: JudgedCase, seed: Event) -> ast.expr | None:
    """What a call seeds with: in ``set_seed(seed)`` of the script's own what that was called with."""
    given, function = argument(seed.node, "seed", 0), case.function(seed.node)
    bound = [one.node for one in case.reaching(given)] if isinstance(given, ast.Name) else []
    match bound:
        case [ast.arg() as parameter] if function is not None and seed.stack:
            values: list[ast.expr | None] = [*given_for(function, parameter, seed.stack[-1])]
            values = values or [default_of(function, parameter)]
            return values[0] if len(values) == 1 else None
    return given
