"""Where a value can come from: through names, assignments, objects, and the script's own functions."""

from __future__ import annotations

import ast
import builtins
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, KeysView, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypeVar, cast

from hvdkit.prepare.check.libraries import KEPT_AS_IT_IS, KNOWN_PACKAGES, OTHER_DISTRIBUTORS, canonical, role
from hvdkit.prepare.check.source import FunctionNode, argument, arguments, default_of, given_for, position

Node = TypeVar("Node", bound=ast.AST)
Method = TypeVar("Method", bound=Callable[..., Any])

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
_DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)
_PUTS_INTO = {
    "append", "appendleft", "extend", "insert", "add", "add_", "copy_", "update", "update_state", "setdefault", "put",
    "assign", "assign_add",
}  # fmt: skip
_WRITES_INTO_ARGUMENTS = {
    "all_reduce", "reduce", "allreduce_", "allreduce_async_", "grouped_allreduce_", "Allreduce", "Reduce", "all_gather",
    "all_gather_object", "all_gather_into_tensor", "gather", "gather_object", "reduce_scatter", "Allgather", "Gather",
    "broadcast_object_list", "Bcast",
}  # fmt: skip
_SAME_OBJECT = {
    "to", "cuda", "cpu", "xpu", "float", "half", "double", "bfloat16", "type", "detach", "clone", "contiguous",
    "train", "eval", "requires_grad_", "numpy", "item", "mean", "sum", "get", "copy", "split", "strip", "lower",
    "upper", "items", "values", "keys", "pop", "tolist", "__iter__", "as_numpy_iterator", "result", "compute",
}  # fmt: skip
"""Methods whose result is their object, or what is in it, in another dress."""
_SAME_TEXT = {"format", "join", "replace", "startswith", "endswith"}
_BUILTINS = {
    "int", "str", "float", "bool", "min", "max", "abs", "round", "list", "tuple", "dict", "set", "sum", "any", "all",
    "sorted", "range", "enumerate", "zip", "iter", "next", "reversed", "map", "filter", "format", "len", "repr", "pow",
    "divmod",
}  # fmt: skip
_WHOLE_DATA_SETS = re.compile(r".*\.load_data|torchvision\.datasets\.(?!.*(Image|Dataset)Folder$).*")
"""Where a rank keeps its copy of these does not make it this rank's part."""
_PASSES = 3
"""So often calls are resolved anew: a method of an object that came as an argument needs the second or third time."""


@dataclass(eq=False)
class Binding:
    """One way in which a name or an attribute gets a value.

    Attributes:
        node: what is blamed for it; its line.
        value: the expression, None for a parameter, an import or a definition.
        index: which element of the value, for ``a, (b, c) = value``: () is all of it.
        replaces: False for what only changes the object or adds to it (``x += y``, ``x.append(y)``).
        imported: the full name of what is imported.
    """

    node: ast.AST
    value: ast.expr | None = None
    index: tuple[int, ...] = ()
    replaces: bool = True
    imported: str = ""


def everything(start: Node, following: Callable[[Node], Iterable[Node]]) -> dict[Node, None]:
    """A node, what follows it, what follows that and so on: each once, in the order in which they are met."""
    found: dict[Node, None] = {}
    stack = [start]
    while stack:
        node = stack.pop()
        if node not in found:
            found[node] = None
            stack.extend(following(node))
    return found


def remembered(while_asked: object) -> Callable[[Method], Method]:
    """Keeps what a method answers of a node; ``while_asked`` is the answer where a question leads back to itself."""

    def decorate(method: Method) -> Method:
        @wraps(method)
        def ask(self: Any, node: ast.AST) -> Any:
            known = self.__dict__.setdefault(f"_{method.__name__} of", {})
            if node not in known:
                known[node] = while_asked
                known[node] = method(self, node)
            return known[node]

        return cast("Method", ask)

    return decorate


class Flow:
    """A program as a graph of values.

    Attributes:
        nodes: all of them, in the order of the text.
        parents: of each node but the module the one that holds it.
        imported: the full names of what is imported and of the modules that it comes from, with the first line.
        attributes: by attribute name, the bindings of ``<anything>.name`` and of names in class bodies.
        functions: all of them, wherever they are defined.
        calls_of: by function of the script, the calls that run it, as far as they are known.
        started: by function, the calls of it by what it is handed to (``mp.spawn(f, ...)``).
        rank_parameters: parameters that ``mp.spawn`` fills with the number of the process.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.nodes: list[ast.AST] = []
        self.parents: dict[ast.AST, ast.AST] = {}
        self.imported: dict[str, int] = {}
        self.attributes: dict[str, list[Binding]] = defaultdict(list)
        self._blocks: dict[ast.AST, tuple[ast.AST, str]] = {}
        self._scopes: dict[ast.AST, ast.AST] = {tree: tree}
        self._bindings: dict[ast.AST, dict[str, list[Binding]]] = defaultdict(dict)
        self._declared_elsewhere: set[tuple[ast.AST, str]] = set()
        self._enter(tree)
        self.functions = [node for node in self.nodes if isinstance(node, FUNCTIONS)]
        for node in self.nodes:
            self._bind(node)
        for node in self.nodes:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                self._change(node.value)
        self.calls_of: dict[FunctionNode, list[ast.Call]] = {}
        self.started: dict[FunctionNode, list[ast.Call]] = {}
        self.rank_parameters: set[ast.arg] = set()
        self._resolved: dict[ast.Call, list[FunctionNode]] = {}
        self._handed_on: dict[ast.Call, list[tuple[FunctionNode, ast.expr]]] = {}
        self._reached: dict[tuple[ast.AST | None, bool], dict[ast.AST, None]] = {}
        self._classes = {node.name: node for node in self.nodes if isinstance(node, ast.ClassDef)}
        self._returned = {one: [one.body] if isinstance(one, ast.Lambda) else [] for one in self.functions}
        for node in self.nodes:
            if isinstance(node, (ast.Return, ast.Yield)) and node.value and (function := self.function(node)):
                self._returned[function].append(node.value)
        for _ in range(_PASSES):
            self._find_calls()

    # What is where ----------------------------------------------------------------------------------------------------

    def _enter(self, tree: ast.Module) -> None:
        """Note of every node its parent, the block that it is a statement of, and the scope in which it runs."""
        stack: list[ast.AST] = [tree]
        while stack:
            node = stack.pop()
            self.nodes.append(node)
            outside = self._scopes[node]
            inside = node if isinstance(node, _DEFINITIONS) else outside
            for name, value in reversed(list(ast.iter_fields(node))):
                children = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, ast.AST)]
                for child in reversed(children):
                    self.parents[child] = node
                    # A decorator or a default runs outside of its function.
                    self._scopes[child] = inside if name == "body" else outside
                    if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
                        self._blocks[child] = (node, name)
                    elif isinstance(child, ast.arg):  # bound as if by the first statement of its function
                        self._scopes[child] = self.parents[node]
                        self._blocks[child] = (self.parents[node], "body")
                    stack.append(child)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """A node's parent, that one's parent and so on."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def statement(self, node: ast.AST) -> ast.AST:
        """The statement, except clause or module that a node belongs to."""
        while node not in self._blocks and node in self.parents:
            node = self.parents[node]
        return node

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """The statements among which one stands."""
        around, name = self._blocks[statement]
        beside: list[ast.stmt] = getattr(around, name)
        return beside

    def scope(self, node: ast.AST) -> ast.AST:
        """The function, class or module in whose scope an expression or statement runs."""
        return self._scopes[node]

    def function(self, node: ast.AST) -> FunctionNode | None:
        """The function in which a node runs; None on module level."""
        scope = self._scopes[node]
        while isinstance(scope, ast.ClassDef):
            scope = self._scopes[scope]
        return scope if isinstance(scope, FUNCTIONS) else None

    def owner_class(self, node: ast.AST) -> ast.ClassDef | None:
        """The class in whose body a node is, at any depth."""
        return next((parent for parent in self.ancestors(node) if isinstance(parent, ast.ClassDef)), None)

    # Who binds a name -------------------------------------------------------------------------------------------------

    def _bind(self, node: ast.AST) -> None:
        """Note each name that this node binds, with the value that it is bound to."""
        match node:
            case ast.Assign():
                for target in node.targets:
                    self._target(target, Binding(node, node.value))
            case ast.AnnAssign() | ast.NamedExpr() if node.value is not None:
                self._target(node.target, Binding(node, node.value))
            case ast.AugAssign():
                self._target(node.target, Binding(node, node.value, replaces=False))
            case ast.For() | ast.AsyncFor() | ast.comprehension():
                self._target(node.target, Binding(node, node.iter))
            case ast.withitem() if node.optional_vars is not None:
                self._target(node.optional_vars, Binding(self.statement(node), node.context_expr))
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                self._name(node.name, Binding(node), self.scope(node))
            case ast.Import() | ast.ImportFrom():
                base = "." * node.level + (node.module or "") if isinstance(node, ast.ImportFrom) else ""
                if base:
                    self.imported.setdefault(base, node.lineno)
                for alias in node.names:
                    full, first = f"{base}.{alias.name}" if base else alias.name, alias.name.split(".")[0]
                    self.imported.setdefault(full, node.lineno)
                    meant = full if base or alias.asname else first  # ``import a.b`` binds a
                    self._name(alias.asname or first, Binding(node, imported=meant), self.scope(node))
            case ast.Global() | ast.Nonlocal():
                self._declared_elsewhere.update((self.scope(node), name) for name in node.names)
            case ast.arg():
                self._name(node.arg, Binding(node), self.scope(node))

    def _target(self, target: ast.expr, binding: Binding) -> None:
        match target:
            case ast.Name():
                self._name(target.id, binding, self.scope(binding.node))
            case ast.Attribute():
                self.attributes[target.attr].append(binding)
            case ast.Subscript():
                self._put(target.value, replace(binding, index=(), replaces=False))
            case ast.Starred():
                self._target(target.value, replace(binding, index=()))
            case ast.Tuple() | ast.List():
                whole = getattr(binding.value, "elts", [])
                apart = not binding.index and not isinstance(binding.node, (ast.For, ast.AsyncFor))
                for place, one in enumerate(target.elts):
                    if apart and len(whole) == len(target.elts):
                        self._target(one, replace(binding, value=whole[place]))
                    else:
                        self._target(one, replace(binding, index=(*binding.index, place)))

    def _put(self, changed: ast.expr, binding: Binding) -> None:
        """Bind what is put into an object to the name of the object."""
        while isinstance(changed, ast.Subscript):
            changed = changed.value
        if isinstance(changed, ast.Name):
            scope = self.lookup(changed.id, self.scope(binding.node))
            if scope is not None and not any(known.imported for known in self._bindings[scope][changed.id]):
                self._name(changed.id, binding, scope)
        elif isinstance(changed, ast.Attribute):
            self.attributes[changed.attr].append(binding)

    def _change(self, call: ast.Call) -> None:
        """``x.append(y)`` puts y into x; ``all_reduce(x)`` puts its result into x."""
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        for given in arguments(call):
            if called in _PUTS_INTO and isinstance(call.func, ast.Attribute):
                self._put(call.func.value, Binding(call, given, replaces=False))
            elif called in _WRITES_INTO_ARGUMENTS:
                self._put(given, Binding(call, call, replaces=False))

    def _name(self, name: str, binding: Binding, scope: ast.AST) -> None:
        while (scope, name) in self._declared_elsewhere and scope is not self.tree:
            scope = self._scopes[scope]
        self._bindings[scope].setdefault(name, []).append(binding)
        if isinstance(scope, ast.ClassDef):
            self.attributes[name].append(binding)

    # What a use of a name can see -------------------------------------------------------------------------------------

    def lookup(self, name: str, scope: ast.AST) -> ast.AST | None:
        """The scope whose name it is; None for a builtin or a name that nobody binds."""
        current = scope
        while True:
            hidden = isinstance(current, ast.ClassDef) and current is not scope
            if name in self._bindings[current] and (current, name) not in self._declared_elsewhere and not hidden:
                return current
            if current is self.tree:
                return None
            current = self._scopes[current]

    @remembered([])
    def reaching(self, name: ast.Name) -> list[Binding]:
        """The bindings that a use of a name can see, without those that were overwritten on every way there."""
        scope = self.scope(name)
        owner = self.lookup(name.id, scope)
        if owner is None:
            return []
        around = list(self.ancestors(name))
        generators = {x for node in around if isinstance(node, _COMPREHENSIONS) for x in node.generators}
        known = self._bindings[owner][name.id]
        if own := [binding for binding in known if binding.node in generators]:
            return own
        bindings = [binding for binding in known if not isinstance(binding.node, ast.comprehension)]
        if owner is not scope:
            return bindings
        foreign = [binding for binding in bindings if self.scope(binding.node) is not scope]
        bindings = [binding for binding in bindings if binding not in foreign]
        # Those above that nothing overwrites on every way there, then those of the turn of a loop before.
        above = [binding for binding in bindings if self._precedes(binding.node, name)]
        blocks = self._blocks_around(name).items()
        certain = [one for one in above if one.replaces and self._blocks[self.statement(one.node)] in blocks]
        last = max(certain, key=lambda one: position(one.node), default=None)
        seen = [one for one in above if last is None or one is last or position(one.node) > position(last.node)]
        for binding in bindings:
            outer = list(self.ancestors(binding.node))
            shared = next((loop for loop in around if isinstance(loop, LOOPS) and loop in outer), None)
            if binding not in above and shared and (last is None or shared not in self.ancestors(last.node)):
                seen.append(binding)
        return seen + foreign

    def _blocks_around(self, node: ast.AST) -> dict[ast.AST, str]:
        """The statements around that of a node, and in which block of them it is."""
        return dict(self._blocks[one] for one in (node, *self.ancestors(node)) if one in self._blocks)

    def _precedes(self, node: ast.AST, use: ast.AST) -> bool:
        """Whether what binds a name is above a use, in another statement and not on the other branch of an ``if``."""
        if self.statement(node) is self.statement(use) and not isinstance(node, ast.NamedExpr):
            return False
        mine, others = self._blocks_around(node), self._blocks_around(use)
        one_branch = all(others.get(one, block) == block for one, block in mine.items() if isinstance(one, ast.If))
        return one_branch and position(node) < position(use)

    # Names as their packages know them --------------------------------------------------------------------------------

    @remembered(None)  # what names itself through a loop of aliases has no name
    def dotted(self, node: ast.AST) -> str | None:
        """The full name of what an expression names, ``keras.`` for every way to Keras; None for the script's own."""
        match node:
            case ast.Name():
                return canonical(self._resolve(node))
            case ast.Attribute():
                base = self.dotted(node.value)
                return canonical(f"{base}.{node.attr}") if base else self._alias(self.attributes.get(node.attr, []))
            case ast.Call(args=[ast.Constant(value=str(module)), *_]):
                return canonical(module) if self.dotted(node.func) == "importlib.import_module" else None
        return None

    def _resolve(self, name: ast.Name) -> str | None:
        scope = self.lookup(name.id, self.scope(name))
        if scope is not None:
            bindings = self._bindings[scope][name.id]
            handed_on = all(isinstance(binding.node, ast.arg) for binding in bindings)  # a module, under its own name
            outside = self._bindings[self.tree].get(name.id, [])
            imports = [binding.imported for binding in (outside if handed_on else bindings) if binding.imported]
            return imports[0] if imports else self._alias(bindings)
        if hasattr(builtins, name.id):
            return f"builtins.{name.id}"
        stars = [module.removesuffix(".*") for module in self.imported if module.endswith(".*")]
        distributed = [module for module in stars if module.split(".")[0] in ("horovod", "hvdkit")]
        strange = [module for module in stars if not self.is_known(module)]
        return next((f"{module}.{name.id}" for module in distributed or strange or stars), None)

    def _alias(self, bindings: list[Binding]) -> str | None:
        """The full name behind ``keras = tf.keras``: of a name that is bound once, to another name."""
        replacing = [binding for binding in bindings if binding.replaces]
        if len(replacing) != 1 or replacing[0].index:
            return None
        value = replacing[0].value
        return self.dotted(value) if isinstance(value, (ast.Attribute, ast.Name, ast.Call)) else None

    def is_known(self, dotted: str) -> bool:
        """Whether it comes from a package of which nothing unexpected is to be feared."""
        root = dotted.split(".")[0]
        return root in KNOWN_PACKAGES or root == "builtins"

    def strangers(self) -> list[str]:
        """Imported modules that are neither known packages nor other distributors: the script's own, not read here."""
        roots = {name.split(".")[0] or name for name in self.imported}
        return sorted(root for root in roots if root not in KNOWN_PACKAGES and root not in OTHER_DISTRIBUTORS)

    # Where a value comes from -----------------------------------------------------------------------------------------

    def reach(self, *starts: ast.AST | None, through: bool = False) -> KeysView[ast.AST]:
        """All expressions that values can come from, in the order in which they are met.

        Args:
            starts: the values; None is an argument that is not given.
            through: also through the calls of other packages (what their arguments and objects were); without it only
                what hands on the value itself: names, arithmetic, comparisons, the script's own functions.
        """
        found: dict[ast.AST, None] = {}
        for start in starts:
            if start is not None and (start, through) not in self._reached:
                self._reached[start, through] = everything(start, lambda node: self._sources(node, through))
            found |= self._reached.get((start, through), {})
        return found.keys()

    def calls(self, *starts: ast.AST | None, through: bool = False) -> list[ast.Call]:
        """The calls among what values can come from, in the order of the text."""
        found = [node for node in self.reach(*starts, through=through) if isinstance(node, ast.Call)]
        return sorted(found, key=position)

    def _sources(self, node: ast.AST, through: bool) -> Sequence[ast.AST]:
        behind = self.behind(node)
        match node:
            case ast.Name() | ast.arg() | ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return behind
            case ast.Attribute():
                of_object = through and (self.dotted(node) is None or node.attr in self.attributes)
                return [*behind, node.value] if of_object else behind
            case ast.Call():
                return [*behind, *self._given_on(node, through)]
            case ast.Lambda():
                return [node.body]
        return [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr_context)]

    def behind(self, node: ast.AST) -> list[ast.AST]:
        """One step back: what a name, an attribute, a parameter, an entry or a call of the script's own stands for."""
        match node:
            case ast.Name():
                return [value for binding in self.reaching(node) for value in self._bound(binding)]
            case ast.Attribute():
                bindings = self.attributes.get(node.attr, [])
                own = [one.node for one in bindings if isinstance(one.node, FUNCTIONS) and _is_property(one.node)]
                values = [value for binding in bindings for value in self._bound(binding)]
                return values + [value for function in own for value in self._returned[function]]
            case ast.arg():
                return list(self.arguments_for(node))
            case ast.IfExp():
                return [node.body, node.orelse]
            case ast.Call():
                return [value for function in self.callees(node) for value in self._returned[function]]
        return []

    def _bound(self, binding: Binding) -> list[ast.AST]:
        """The expressions behind a binding: one element of a tuple where the text shows it."""
        if binding.value is None:
            return [binding.node] if isinstance(binding.node, ast.arg) else []
        own = self.behind(binding.value) if binding.index and isinstance(binding.value, ast.Call) else []
        found: list[ast.AST] = []
        for whole in own or [binding.value]:
            for place in binding.index:
                inside = whole.elts if isinstance(whole, (ast.Tuple, ast.List)) else []
                if place >= len(inside) or any(isinstance(node, ast.Starred) for node in inside):
                    break
                whole = inside[place]
            found.append(whole)
        return found

    def _given_on(self, call: ast.Call, through: bool) -> list[ast.expr]:
        """What of its arguments and its object is in the result of a call."""
        name = self.dotted(call.func)
        if name is not None and (name in KEPT_AS_IT_IS or name.removeprefix("builtins.") in _BUILTINS):
            return arguments(call)
        if name is None and isinstance(call.func, ast.Attribute):
            is_text = call.func.attr in _SAME_TEXT
            given = arguments(call) if through or is_text else []
            return [call.func.value, *given] if through or is_text or call.func.attr in _SAME_OBJECT else []
        return [call.func, *arguments(call)] if through and not _WHOLE_DATA_SETS.fullmatch(name or "") else []

    def arguments_for(self, parameter: ast.arg) -> list[ast.expr]:
        """What is given for a parameter in the calls that are known, and its default."""
        function = self.parents[self.parents[parameter]]
        if not isinstance(function, FUNCTIONS):
            return []
        calls = [*self.calls_of.get(function, []), *self.started.get(function, [])]
        default = default_of(function, parameter)
        given = [value for call in calls for value in given_for(function, parameter, call)]
        return given if default is None else [*given, default]

    # Functions and classes --------------------------------------------------------------------------------------------

    def callees(self, call: ast.Call) -> list[FunctionNode]:
        """The functions of the script that a call runs: a function, a method, or what makes an object."""
        return self._resolved.get(call, [])

    def class_of(self, call: ast.Call) -> ast.ClassDef | None:
        """The class of the script that a call makes an object of."""
        return next(iter(self._classes_named(call.func)), None)

    def function_arguments(self, call: ast.Call) -> list[FunctionNode]:
        """Functions of the script among the arguments of a call: something else will run them."""
        return [function for function, _ in self._handed_on.get(call, [])]

    def is_keras_callback(self, node: ast.ClassDef) -> bool:
        """Whether ``fit`` will call the methods of a class."""
        return any((self.dotted(base) or "").endswith("callbacks.Callback") for base in node.bases)

    def _named(self, node: ast.AST) -> Sequence[FunctionNode | ast.ClassDef]:
        """The functions and classes of the script that an expression names: ``f``, ``tf.function(f)``, ``model.f``."""
        if isinstance(node, ast.Attribute) and self.dotted(node) is None:
            return [one for owner in self._owner_classes(node.value) for one in self._methods(owner, node.attr)]
        return [one for one in everything(node, self._naming) if isinstance(one, _DEFINITIONS)]

    def _classes_named(self, node: ast.AST) -> list[ast.ClassDef]:
        return [one for one in everything(node, self._naming) if isinstance(one, ast.ClassDef)]

    def _naming(self, node: ast.AST) -> Iterator[ast.AST]:
        if isinstance(node, ast.Call) and self.dotted(node.func) in KEPT_AS_IT_IS:
            yield from node.args[:1]
        for binding in self.reaching(node) if isinstance(node, ast.Name) else ():
            if isinstance(binding.node, _DEFINITIONS):
                yield binding.node
            elif isinstance(binding.node, ast.arg):
                yield from self.arguments_for(binding.node)
            elif binding.value is not None and not binding.index and binding.replaces:
                yield binding.value

    def _owner_classes(self, receiver: ast.expr) -> list[ast.ClassDef]:
        own = self.owner_class(receiver)
        match receiver:
            case ast.Name(id="self" | "cls") if own is not None:
                return [own]
            case ast.Call(func=ast.Name(id="super")) if own is not None:
                return self._bases(own)
        named = self._classes_named(receiver)
        made = {self.class_of(call): None for call in self.calls(receiver)} if not named else {}
        return named or [klass for klass in made if klass is not None]

    def _bases(self, owner: ast.ClassDef) -> list[ast.ClassDef]:
        named = [base.id for base in owner.bases if isinstance(base, ast.Name)]
        return [self._classes[name] for name in named if name in self._classes]

    def _methods(self, owner: ast.ClassDef, name: str) -> list[FunctionNode]:
        """The method of a class, or of the nearest class that it is made from."""
        for one in everything(owner, self._bases):
            own: list[FunctionNode] = [node for node in one.body if isinstance(node, FUNCTIONS) and node.name == name]
            if own:
                return own
        return []

    def _find_calls(self) -> None:
        """Find which functions each call runs, from what the last pass found out about objects and arguments."""
        resolved: dict[ast.Call, list[FunctionNode]] = defaultdict(list)
        handed_on: dict[ast.Call, list[tuple[FunctionNode, ast.expr]]] = defaultdict(list)
        for call in (node for node in self.nodes if isinstance(node, ast.Call)):
            for one in self._named(call.func):
                own = self._methods(one, "__init__") if isinstance(one, ast.ClassDef) else [one]
                resolved[call] += own
            for given in arguments(call):
                named = [one for one in self._named(given) if isinstance(one, FUNCTIONS) and not _is_property(one)]
                handed_on[call] += [(one, given) for one in named]
        self._resolved, self._handed_on, self.calls_of, self.started = resolved, handed_on, {}, {}
        for call, functions in resolved.items():
            for function in functions:
                self.calls_of.setdefault(function, []).append(call)
        for call, pairs in handed_on.items():
            spawned = re.search(r"(multiprocessing\.(spawn|start_processes)|xmp\.spawn)$", self.dotted(call.func) or "")
            for function, given in pairs:
                # The call in ``mp.spawn(f, args=(...))``, ``Thread(target=f, args=(...))``, ``partial(f, ...)``.
                handed = argument(call, "args", 1 if spawned else None)
                values = call.args[call.args.index(given) + 1 :] if given in call.args and handed is None else []
                if isinstance(handed, (ast.Tuple, ast.List)):
                    values = [*([ast.Constant(value=None)] if spawned else []), *handed.elts]
                self.started.setdefault(function, []).append(ast.Call(given, values, []))
                if spawned and function.args.args:
                    self.rank_parameters.add(function.args.args[0])
        self._reached.clear()

    @remembered(False)  # for objects that are made from themselves
    def is_opaque(self, call: ast.Call) -> bool:
        """Whether a call runs code that this text does not show and that no known package documents."""
        if self.callees(call) or self.class_of(call):
            return False
        name = self.dotted(call.func)
        if name is not None:
            return role(name) is None and not self.is_known(name)
        if isinstance(call.func, ast.Attribute):
            return any(self.is_opaque(made) for made in self.calls(call.func.value) if made is not call)
        bound = self.reaching(call.func) if isinstance(call.func, ast.Name) else []
        here = any(one.value is not None or isinstance(one.node, ast.arg) for one in bound)
        return isinstance(call.func, ast.Name) and not here


def _is_property(function: FunctionNode) -> bool:
    decorators = [] if isinstance(function, ast.Lambda) else function.decorator_list
    return any(isinstance(one, ast.Name) and one.id.endswith("property") for one in decorators)
