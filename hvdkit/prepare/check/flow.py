"""Where a value can come from: through assignments, objects, and the script's own functions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, KeysView, Sequence

from hvdkit.prepare.check.calls import argument, arguments, default_of, element, entries, given_for
from hvdkit.prepare.check.libraries import KEPT_AS_IT_IS, role
from hvdkit.prepare.check.names import Names
from hvdkit.prepare.check.program import FUNCTIONS, Binding, FunctionNode, everything, position, remembered

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_SAME_OBJECT = {
    "to", "cuda", "cpu", "xpu", "float", "half", "double", "bfloat16", "type", "detach", "clone", "contiguous",
    "train", "eval", "requires_grad_", "numpy", "item", "mean", "sum", "get", "copy", "split", "strip", "lower",
    "upper", "items", "values", "keys", "pop", "tolist", "__iter__", "as_numpy_iterator", "result", "compute",
}  # fmt: skip
"""Methods whose result is their object, or what is in it, in another dress."""
_PASSES = 3
"""So often calls are resolved anew: a method of an object that came as an argument needs the second or third time."""
_SAME_TEXT = {"format", "join", "replace", "startswith", "endswith"}
_BUILTINS = {
    "int", "str", "float", "bool", "min", "max", "abs", "round", "list", "tuple", "dict", "set", "sum", "any", "all",
    "sorted", "range", "enumerate", "zip", "iter", "next", "reversed", "map", "filter", "format", "len", "repr", "pow",
    "divmod",
}  # fmt: skip
_WHOLE_DATA_SETS = re.compile(r".*\.load_data|torchvision\.datasets\.(?!.*(Image|Dataset)Folder$).*")
"""Where a rank keeps its copy of these does not make it this rank's part."""


class Flow(Names):
    """The program as a graph of values.

    Attributes:
        calls_of: by function of the script, the calls that run it, as far as they are known.
        started: by function, the calls of it by what it is handed to (``mp.spawn(f, ...)``).
        rank_parameters: parameters that ``mp.spawn`` fills with the number of the process.
    """

    def __init__(self, tree: ast.Module) -> None:
        super().__init__(tree)
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
            case ast.Subscript() if behind:
                return behind
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
            case ast.Subscript():
                return self._entry(node)
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
        return [element(whole, binding.index) for whole in own or [binding.value]]

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

    def _entry(self, node: ast.Subscript) -> list[ast.AST]:
        """The values under a constant key, where the text shows the whole dictionary."""
        if not isinstance(node.slice, ast.Constant) or not isinstance(node.value, ast.Name):
            return []
        found: list[ast.AST] = []
        for binding in self.reaching(node.value):
            if isinstance(binding.value, ast.Dict) and not binding.index and binding.key is None:
                found += entries(binding.value, node.slice.value)
            elif binding.key is None or binding.value is None:
                return []
            elif binding.key == node.slice.value:
                found.append(binding.value)
        return found

    def arguments_for(self, parameter: ast.arg) -> list[ast.expr]:
        """What is given for a parameter in the calls that are known, and its default."""
        function = self.parents[self.parents[parameter]]
        if not isinstance(function, FUNCTIONS):
            return []
        calls = [*self.calls_of.get(function, []), *self.started.get(function, [])]
        default = default_of(function, parameter)
        given = [value for call in calls for value in given_for(function, parameter, call)]
        return given if default is None else [*given, default]

    def _call_later(self, call: ast.Call, function: ast.expr) -> ast.Call:
        """The call in ``mp.spawn(f, args=(...))``, ``Thread(target=f, args=(...))``, ``partial(f, ...)``."""
        spawned = _is_spawn(self.dotted(call.func))
        named = argument(call, "args", 1 if spawned else None)
        if isinstance(named, (ast.Tuple, ast.List)):
            first: list[ast.expr] = [ast.Constant(value=None)] if spawned else []
            return ast.Call(function, [*first, *named.elts], [])
        positional = function in call.args and named is None
        return ast.Call(function, call.args[call.args.index(function) + 1 :] if positional else [], [])

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
        made = [self.class_of(call) for call in self.calls(receiver)] if not named else []
        return named or list(dict.fromkeys(one for one in made if one is not None))

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
        resolved: dict[ast.Call, list[FunctionNode]] = {}
        handed_on: dict[ast.Call, list[tuple[FunctionNode, ast.expr]]] = {}
        for call in (node for node in self.nodes if isinstance(node, ast.Call)):
            for one in self._named(call.func):
                own = self._methods(one, "__init__") if isinstance(one, ast.ClassDef) else [one]
                resolved.setdefault(call, []).extend(own)
            for given in arguments(call):
                named = [one for one in self._named(given) if isinstance(one, FUNCTIONS) and not _is_property(one)]
                handed_on.setdefault(call, []).extend((one, given) for one in named)
        self._resolved, self._handed_on, self.calls_of, self.started = resolved, handed_on, {}, {}
        for call, functions in resolved.items():
            for function in functions:
                self.calls_of.setdefault(function, []).append(call)
        for call, pairs in handed_on.items():
            for function, given in pairs:
                self.started.setdefault(function, []).append(self._call_later(call, given))
                if _is_spawn(self.dotted(call.func)) and function.args.args:
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


def _is_spawn(name: str | None) -> bool:
    return name is not None and name.endswith(("multiprocessing.spawn", "multiprocessing.start_processes", "xmp.spawn"))


def _is_property(function: FunctionNode) -> bool:
    decorators = [] if isinstance(function, ast.Lambda) else function.decorator_list
    return any(isinstance(one, ast.Name) and one.id.endswith("property") for one in decorators)
