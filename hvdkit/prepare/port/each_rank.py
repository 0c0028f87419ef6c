"""What differs between ranks: the root alone writes, prints and shows progress; each draws numbers of its own."""

from __future__ import annotations

import ast
import re

from hvdkit.prepare.check.libraries import LOADERS
from hvdkit.prepare.check.source import argument, arguments, default_of, given_for, method, receiver
from hvdkit.prepare.check.steps import JudgedCase
from hvdkit.prepare.check.trace import Event
from hvdkit.prepare.port.plan import PortPlan, Unsure

_TRACKERS = r"(wandb|mlflow|neptune|comet_ml|clearml|aim|swanlab|dvclive)\."
_WRITERS = re.compile(
    r"torch\.(save|jit\.save|onnx\.export|utils\.tensorboard\.\w*SummaryWriter)|torchvision\.utils\.save_image"
    r"|torchaudio\.save|safetensors\.\w+\.save_file|tensorboardX\.SummaryWriter|numpy\.save\w*"
    r"|matplotlib\.pyplot\.(savefig|imsave)|(pickle|cloudpickle|joblib|json|yaml|toml)\.dump|csv\.(writer|DictWriter)"
    r"|tensorflow\.(saved_model\.save|io\.(write_file|TFRecordWriter)|summary\.create_file_writer)"
    r"|keras\.(utils\.plot_model|models\.save_model|saving\.save_model)|imageio\.\w*(write|save)|cv2\.imwrite"
    r"|scipy\.io\.savemat|shutil\.(rmtree|move|copy\w*)|os\.(makedirs|mkdir|remove|unlink|rename|replace|rmdir)"
    r"|logging\.(basicConfig|(handlers\.)?\w*Handler)|" + _TRACKERS + r".+"
)
"""Functions that write where they are called, and classes whose objects do."""
PRINTS = re.compile(r"builtins\.print|pprint\.pprint|rich\.print|click\.echo|sys\.std(out|err)\.write")
_BARS = re.compile(r"tqdm\.(\w+\.)*(tqdm|trange)")
_METHODS = ("save", "save_weights", "savefig", "save_pretrained", "to_csv", "to_parquet", "to_pickle", "write_text",
            "write_bytes", "tofile", "export", "mkdir")  # fmt: skip
_ALSO_OTHERS = ("save", "export")
"""Those of them that other objects have, too, and that may do more than write a file."""
_PATH = re.compile(r"path|file|ckpt|checkpoint")
_STATES = ("eval", "train", "requires_grad_", "load_state_dict", "zero_grad", "step")
"""Methods after which a model, or its rate, is in another state: on the other ranks it would stay as it was."""

_FAMILIES = {
    "torch": (r"torch\.(rand\w*|normal|bernoulli|multinomial|utils\.data\.random_split)", "manual_seed"),
    "numpy.random": (r"numpy\.random\.(?!seed|default_rng|RandomState|Generator|get_state|set_state)\w+", "seed"),
    "random": (r"random\.(?!seed|Random|getstate|setstate)\w+", "seed"),
    "tensorflow": (r"tensorflow\.random\.(?!set_seed|Generator|stateless)\w+", "random.set_seed"),
}
"""By module what draws from its one generator, and what seeds that."""
_SEEDS = {family: f"{family}.{seed}" for family, (_, seed) in _FAMILIES.items()}
_ALL = "keras.utils.set_random_seed"
_LAYERS = re.compile(
    r"keras\.layers\.(\w*Dropout\w*|Gaussian\w+|Random\w+)|tensorflow\.(image\.random_|random\.(?!set_seed))\w+"
)
_LATER = ("random_split", "randperm", "permutation", "train_test_split", "random.shuffle")


# Files, records, prints -----------------------------------------------------------------------------------------------


def writers(plan: PortPlan) -> list[Event]:
    """What writes or prints on every rank."""
    found = [event for event in plan.case.events if plan.case.where(event) != "some ranks"]
    return [one for one in found if _saves(plan, one.node) or (one.reached and _writes(plan, one.node))]


def on_root(plan: PortPlan) -> None:
    """Step 6, and prints: on the root alone."""
    guarded: set[ast.AST] = set()
    for event in writers(plan):
        if not guarded & set(plan.case.ancestors(event.node)):
            with plan.sure():
                _require_file(plan, event)
                statements = set(_statements(plan, event.node, event.node))
                guarded |= statements
                for statement in statements:
                    if not guarded & set(plan.case.ancestors(statement)):
                        plan.edit("guard", statement, f"{plan.use_world(statement)}.is_root")
    for node in plan.case.nodes:
        named = (plan.case.dotted(node) or "") if isinstance(node, ast.Attribute) else ""
        if re.match(_TRACKERS, named) and not guarded & set(plan.case.ancestors(node)):
            plan.leave(node, f"`{ast.unparse(node)}` is read on every rank", f"if {plan.world}.is_root: around it")
    for event in plan.case.events:
        if _BARS.fullmatch(plan.case.name(event.node)) and event.reached and argument(event.node, "disable") is None:
            with plan.sure():
                plan.add(event.node, f"not {plan.use_world(event.node)}.is_root", "disable")


def _saves(plan: PortPlan, call: ast.Call) -> bool:
    named = plan.case.name(call)
    own = not named and bool(arguments(call)) and not plan.case.callees(call)
    return _WRITERS.fullmatch(named) is not None or (own and method(call) in _METHODS)


def _writes(plan: PortPlan, call: ast.Call) -> bool:
    """Whether a call prints, or opens a file to write."""
    if method(call) == "summary" and not plan.case.name(call):
        return plan.case.holds_keras_model(receiver(call))
    return PRINTS.fullmatch(plan.case.name(call)) is not None or _opens(plan, call)


def _opens(plan: PortPlan, call: ast.Call) -> bool:
    mode = argument(call, "mode", 0 if method(call) == "open" and not plan.case.name(call) else 1)
    text = mode.value if isinstance(mode, ast.Constant) and isinstance(mode.value, str) else ""
    opens = plan.case.name(call) in ("builtins.open", "io.open", "gzip.open", "h5py.File", "zipfile.ZipFile")
    return (opens or (method(call) == "open" and len(text) < 4)) and bool(set(text) & set("wax"))


def _statements(plan: PortPlan, node: ast.expr, blamed: ast.Call, depth: int = 0) -> list[ast.stmt]:
    """The statements that use what a call makes, and do nothing else: on the other ranks they are left out."""
    case, name = plan.case, ast.unparse(blamed.func)
    statement = case.statement(node)
    if not plan.text.stands_alone(statement):
        outer = case.parents[statement]  # `if x: print(x)` on one line
        statement = outer if isinstance(outer, ast.If) and not outer.orelse else statement
    statement = plan.statement(statement or node)
    write = f"if {plan.world}.is_root: around `{name}` alone, and not around the rest of the statement"
    if depth:  # what it makes has a name, and goes elsewhere
        made_by = f"{name}(...) if {plan.world}.is_root else None"
        write = f"{made_by}, and a test for None around what uses it, but not around what trains"
    if why := _does_more(plan, statement, blamed):
        raise Unsure(node, f"`{name}` runs on every rank, in a statement that {why}", write)
    match statement:
        case ast.Expr() | ast.If():
            return [statement]
        case ast.With(items=items) if any(node in ast.walk(one.context_expr) for one in items):
            return [statement]
        case ast.Assign(targets=[ast.Name() | ast.Attribute() as made], value=ast.Call() as value) if depth < 3:
            text = ast.unparse(made)
            nodes = [node for node in case.nodes if isinstance(node, (ast.Name, ast.Attribute))]
            named = [node for node in nodes if isinstance(node.ctx, ast.Load) and ast.unparse(node) == text]
            uses = [one for one in named if value in case.calls(one)]
            return [statement, *(x for one in uses for x in _statements(plan, one, blamed, depth + 1))]
    raise Unsure(node, f"`{name}` runs on every rank, as part of a larger statement", write)


def _does_more(plan: PortPlan, statement: ast.stmt, blamed: ast.Call) -> str:
    """What else a statement does that every rank has to do; "" for nothing."""
    case, inside, state = plan.case, set(ast.walk(statement)), ""
    for event in case.events:
        if inside & {event.node, *event.stack}:
            if event in case.steps or event in case.optimizers or case.name(event.node) in LOADERS:
                return "trains, too"
            if event in case.evaluations:
                return "evaluates, too, which all ranks may do together"
            if event.node is not blamed and (method(event.node) in _STATES or case.name(event.node) == "builtins.next"):
                state = f"calls `{ast.unparse(event.node.func)}`, which every rank has to do"
    if state:
        return state
    if any(isinstance(node, (ast.Break, ast.Continue, ast.Return, ast.Raise, ast.Yield)) for node in inside):
        return "may leave its loop or function"
    whole = not isinstance(statement, (ast.Expr, ast.Assign))  # whose names a with or an if makes, too
    named = [node for node in inside if whole or isinstance(case.parents[node], ast.NamedExpr)]
    made = {one.id for one in named if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    after = [node for node in case.nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    used = [one.id for one in after if one.id in made and one not in inside and one.lineno > statement.lineno]
    return f"makes `{used[0]}`, which is used after it" if used else ""


def _require_file(plan: PortPlan, event: Event) -> None:
    """What is called writes a file for certain, which no other rank reads."""
    call, case = event.node, plan.case
    if _WRITERS.fullmatch(case.name(call)) is None and _writes(plan, call):
        return
    to_file = case.holds_keras_model(receiver(call)) or any(map(_may_be_path, arguments(call)))
    if not case.name(call) and method(call) in _ALSO_OTHERS and not to_file:
        raise Unsure(call, f"the text does not show what `{ast.unparse(call.func)}` does",
                     f"if {plan.world}.is_root: around it, where all it does is write a file")  # fmt: skip
    paths = {ast.unparse(value) for value in arguments(call) if _may_be_path(value)}
    for other in case.events:
        if other.order <= event.order or _saves(plan, other.node) or _writes(plan, other.node):
            continue
        if paths & {ast.unparse(value) for value in arguments(other.node)}:
            why = f"every rank writes it, and line {other.node.lineno} may read it"
            raise Unsure(call, why, f"if {plan.world}.is_root: around it, and a barrier before it is read")


def _may_be_path(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=str()) | ast.JoinedStr() | ast.BinOp():
            return True
        case ast.Call() if any(isinstance(one, ast.Constant) and isinstance(one.value, str) for one in ast.walk(node)):
            return True
        case ast.Name() | ast.Attribute() | ast.Call():
            return _PATH.search(ast.unparse(node).lower()) is not None
    return False


# Random numbers -------------------------------------------------------------------------------------------------------


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
            lines.append(f"{module}.{_FAMILIES[family][1]}(0)")
        else:
            write = f"{_SEEDS[family]}(0) before it"
            plan.leave(event.node, "without a seed every rank draws numbers of its own here", write)
    return lines


def own_numbers(plan: PortPlan, first: ast.stmt) -> None:
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
