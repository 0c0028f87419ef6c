"""Where a value can come from: through assignments, objects, and the script's own functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hvdkit.prepare.check.call_arguments import arguments, default_of, element, given_for
from hvdkit.prepare.check.libraries import KEPT_AS_IT_IS, role
from hvdkit.prepare.check.names import Names
from hvdkit.prepare.check.program import Binding, FunctionNode, everything

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
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


class Flow(Names):
    """The program as a graph of values.

    Attributes:
        calls_of: by function of the script, the calls that run it, as far as they are known.
        started: by function, the calls that hand it to something that will run it (``mp.spawn(f, ...)``), each with
            the argument that it is.
        rank_parameters: parameters that ``mp.spawn`` fills with the number of the process.
    """

    def __init__(self, tree: ast.Module) -> None:
        super().__init__(tree)
        self.calls_of: dict[FunctionNode, list[ast.Call]] = {}
        self.started: dict[FunctionNode, list[tuple[ast.Call, ast.expr]]] = {}
        self.rank_parameters: set[ast.arg] = set()
        self._returns: dict[FunctionNode, list[ast.expr]] = {}
        self._resolved: dict[ast.expr, list[FunctionNode]] = {}
        self._opaque: dict[ast.Call, bool] = {}
        self._reached: dict[tuple[ast.AST, bool], frozenset[ast.AST]] = {}
        self._classes = {node.name: node for node in self.classes}
        for function in self.functions:
            self._returns[function] = list(self._found_returns(function))
        for _ in range(_PASSES):
            self._find_calls()

    def reach(self, start: ast.AST, through: bool = False) -> frozenset[ast.AST]:
        """All expressions that a value can come from.

        Args:
            through: also through the calls of other packages (what their arguments and objects were); without it only
                what hands on the value itself: names, arithmetic, comparisons, the script's own functions.
        """
        key = (start, through)
        if key not in self._reached:
            self._reached[key] = frozenset(everything(start, lambda node: self._sources(node, through)))
        return self._reached[key]

    def calls(self, start: ast.AST, through: bool = False) -> list[ast.Call]:
        """The calls among what a value can come from, in the order of the text."""
        found = [node for node in self.reach(start, through) if isinstance(node, ast.Call)]
        return sorted(found, key=lambda call: (call.lineno, call.col_offset))

    def _sources(self, node: ast.AST, through: bool) -> Iterator[ast.AST]:
        match node:
            case ast.Name() | ast.arg():
                yield from self.behind(node)
            case ast.Attribute():
                yield from self.behind(node)
                if through and (self.dotted(node) is None or node.attr in self.attributes):
                    yield node.value
            case ast.Call():
                yield from self._call(node, through)
            case ast.Subscript():
                chosen = self.entry(node)
                yield from chosen if chosen else (node.value, node.slice)
            case ast.Lambda():
                yield node.body
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return
            case _:
                yield from (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr_context))

    def behind(self, node: ast.AST) -> list[ast.AST]:
        """One step back: what a name, an attribute, a parameter, an entry or a call of the script's own stands for."""
        match node:
            case ast.Name():
                return [value for binding in self.reaching(node) for value in self.bound(binding)]
            case ast.Attribute():
                bindings = self.attributes.get(node.attr, [])
                own = [one.node for one in bindings if isinstance(one.node, _FUNCTIONS) and _is_property(one.node)]
                values = [value for binding in bindings for value in self.bound(binding)]
                return [*values, *(value for function in own for value in self.returned(function))]
            case ast.arg():
                return list(self.arguments_for(node))
            case ast.Subscript():
                return self.entry(node)
            case ast.IfExp():
                return [node.body, node.orelse]
            case ast.Call():
                return [value for function in self.callees(node) for value in self.returned(function)]
        return []

    def bound(self, binding: Binding) -> Iterator[ast.AST]:
        """The expressions behind a binding: one element of a tuple where the text shows it."""
        if isinstance(binding.node, ast.arg):
            yield binding.node
        if binding.value is None:
            return
        if not binding.index:
            yield binding.value
            return
        own = [one for function in self._resolved.get(binding.value, []) for one in self._returns[function]]
        for whole in own or [binding.value]:
            yield element(whole, binding.index)

    def _call(self, node: ast.Call, through: bool) -> Iterator[ast.AST]:
        yield from self.behind(node)
        name = self.dotted(node.func)
        if name is not None and (name in KEPT_AS_IT_IS or name.removeprefix("builtins.") in _BUILTINS):
            yield from arguments(node)
        elif isinstance(node.func, ast.Attribute) and name is None:
            if through or node.func.attr in _SAME_OBJECT | _SAME_TEXT:
                yield node.func.value
            if through or node.func.attr in _SAME_TEXT:
                yield from arguments(node)
        elif through and not _is_whole_data_set(name):
            yield node.func
            yield from arguments(node)

    def entry(self, node: ast.Subscript) -> list[ast.AST]:
        """The values under a constant key, where the text shows the whole dictionary."""
        if not isinstance(node.slice, ast.Constant) or not isinstance(node.value, ast.Name):
            return []
        bindings = self.reaching(node.value)
        found: list[ast.AST] = []
        for binding in bindings:
            key = _assigned_key(binding)
            if isinstance(binding.value, ast.Dict) and not binding.index:
                pairs = zip(binding.value.keys, binding.value.values, strict=True)
                found += [
                    value for name, value in pairs if isinstance(name, ast.Constant) and name.value == node.slice.value
                ]
            elif key is not None and binding.value is not None:
                found += [binding.value] if key == node.slice.value else []
            else:
                return []
        return found

    def arguments_for(self, parameter: ast.arg) -> list[ast.expr]:
        """What is given for a parameter in the calls that are known, and its default."""
        function = self.parents[self.parents[parameter]]
        if not isinstance(function, _FUNCTIONS):
            return []
        given = [
            one for call in self.calls_of.get(function, []) for one in given_for(function, parameter, call.args, call)
        ]
        for call, handed in self.started.get(function, []):
            given += given_for(function, parameter, self._given_with(call, handed), None)
        default = default_of(function.args, parameter)
        return [*given, *([default] if default is not None else [])]

    def _given_with(self, call: ast.Call, function: ast.expr) -> list[ast.expr]:
        """The arguments in ``mp.spawn(f, args=(...))``, ``Thread(target=f, args=(...))``, ``partial(f, ...)``."""
        named = next((keyword.value for keyword in call.keywords if keyword.arg == "args"), None)
        spawned = _is_spawn(self.dotted(call.func))
        if named is None and spawned and len(call.args) > 1:
            named = call.args[1]
        if isinstance(named, (ast.Tuple, ast.List)):
            first: list[ast.expr] = [ast.Constant(value=None)] if spawned else []
            return [*first, *named.elts]
        return list(call.args[call.args.index(function) + 1 :]) if function in call.args and named is None else []

    def callees(self, call: ast.Call) -> list[FunctionNode]:
        """The functions of the script that a call runs: a function, a method, or what makes an object."""
        return self._resolved.get(call, [])

    def _callees(self, called: ast.expr) -> list[FunctionNode]:
        named = self._named(called)
        if named:
            own = [[one] if isinstance(one, _FUNCTIONS) else self._methods(one, "__init__") for one in named]
            return [function for functions in own for function in functions]
        if isinstance(called, ast.Attribute) and self.dotted(called) is None:
            return [one for owner in self._owner_classes(called.value) for one in self._methods(owner, called.attr)]
        return []

    def class_of(self, call: ast.Call) -> ast.ClassDef | None:
        """The class of the script that a call makes an object of."""
        return next((one for one in self._named(call.func) if isinstance(one, ast.ClassDef)), None)

    def _owner_classes(self, receiver: ast.expr) -> list[ast.ClassDef]:
        own = self.owner_class(receiver)
        if isinstance(receiver, ast.Name) and receiver.id in ("self", "cls") and own is not None:
            return [own]
        if (
            isinstance(receiver, ast.Call)
            and isinstance(receiver.func, ast.Name)
            and receiver.func.id == "super"
            and own
        ):
            return self._bases(own)
        named = [one for one in self._named(receiver) if isinstance(one, ast.ClassDef)]
        if named:
            return named
        made = [self.class_of(call) for call in self.calls(receiver)]
        return list(dict.fromkeys(one for one in made if one is not None))

    def _bases(self, owner: ast.ClassDef) -> list[ast.ClassDef]:
        return [
            self._classes[base.id] for base in owner.bases if isinstance(base, ast.Name) and base.id in self._classes
        ]

    def _methods(self, owner: ast.ClassDef, name: str, depth: int = 0) -> list[FunctionNode]:
        own: list[FunctionNode] = [
            node
            for node in owner.body
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name
        ]
        if own or depth > 9:
            return own
        return [method for base in self._bases(owner) for method in self._methods(base, name, depth + 1)]

    def _named(self, node: ast.AST) -> list[FunctionNode | ast.ClassDef]:
        """The functions and classes of the script that an expression names, also through ``f = tf.function(f)``."""
        return [one for one in everything(node, self._naming) if isinstance(one, (*_FUNCTIONS, ast.ClassDef))]

    def _naming(self, node: ast.AST) -> Iterator[ast.AST]:
        if isinstance(node, ast.Call) and self.dotted(node.func) in KEPT_AS_IT_IS:
            yield from node.args[:1]
        for binding in self.reaching(node) if isinstance(node, ast.Name) else ():
            if isinstance(binding.node, (*_FUNCTIONS, ast.ClassDef)):
                yield binding.node
            elif isinstance(binding.node, ast.arg):
                yield from self.arguments_for(binding.node)
            elif binding.value is not None and not binding.index and binding.replaces:
                yield binding.value

    def function_arguments(self, call: ast.Call) -> list[FunctionNode]:
        """Functions of the script among the arguments of a call: something else will run them."""
        return [function for function, _ in self._functions_in(call)]

    def _functions_in(self, call: ast.Call) -> list[tuple[FunctionNode, ast.expr]]:
        found: list[tuple[FunctionNode, ast.expr]] = []
        for argument in arguments(call):
            named = [one for one in self._named(argument) if isinstance(one, _FUNCTIONS)]
            if isinstance(argument, ast.Attribute) and self.dotted(argument) is None:
                named += [one for one in self._callees(argument) if not _is_property(one)]
            found += [(function, argument) for function in named]
        return found

    def _find_calls(self) -> None:
        """Find which functions each call runs, from what the last pass found out about objects and arguments."""
        calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        resolved: dict[ast.expr, list[FunctionNode]] = {call: self._callees(call.func) for call in calls}
        handed_on = {call: self._functions_in(call) for call in calls}
        self._resolved, self.calls_of, self.started = resolved, {}, {}
        for call in calls:
            for function in resolved[call]:
                self.calls_of.setdefault(function, []).append(call)
            for function, argument in handed_on[call]:
                self.started.setdefault(function, []).append((call, argument))
                if _is_spawn(self.dotted(call.func)) and function.args.args:
                    self.rank_parameters.add(function.args.args[0])
        self._reached.clear()

    def returned(self, function: FunctionNode) -> list[ast.expr]:
        """What a function of the script returns or yields."""
        return self._returns[function]

    def _found_returns(self, function: FunctionNode) -> Iterator[ast.expr]:
        if isinstance(function, ast.Lambda):
            yield function.body
            return
        for node in self.preorder(function):
            returns = isinstance(node, (ast.Return, ast.Yield)) and self.function(node) is function
            if returns and isinstance(node, (ast.Return, ast.Yield)) and node.value is not None:
                yield node.value

    def is_opaque(self, call: ast.Call) -> bool:
        """Whether a call runs code that this text does not show and that no known package documents."""
        if call not in self._opaque:
            self._opaque[call] = False  # for objects that are made from themselves
            self._opaque[call] = self._is_opaque(call)
        return self._opaque[call]

    def _is_opaque(self, call: ast.Call) -> bool:
        if self.callees(call) or self.class_of(call):
            return False
        name = self.dotted(call.func)
        if name is not None:
            return role(name) is None and not self.is_known(name)
        if isinstance(call.func, ast.Attribute):
            return any(self.is_opaque(made) for made in self.calls(call.func.value) if made is not call)
        return isinstance(call.func, ast.Name) and not self._bound_here(call.func)

    def _bound_here(self, name: ast.Name) -> bool:
        return any(binding.value is not None or isinstance(binding.node, ast.arg) for binding in self.reaching(name))


def _is_spawn(name: str | None) -> bool:
    return name is not None and name.endswith(("multiprocessing.spawn", "multiprocessing.start_processes", "xmp.spawn"))


def _is_whole_data_set(name: str | None) -> bool:
    """A known data set: where a rank keeps its copy does not make it this rank's part."""
    if name is None:
        return False
    return name.endswith(".load_data") or (
        name.startswith("torchvision.datasets.") and not name.endswith(("ImageFolder", "DatasetFolder"))
    )


def _is_property(function: FunctionNode) -> bool:
    decorators = [] if isinstance(function, ast.Lambda) else function.decorator_list
    return any(isinstance(one, ast.Name) and one.id.endswith("property") for one in decorators)


def _assigned_key(binding: Binding) -> object:
    """The key in ``d["key"] = value``."""
    targets = binding.node.targets if isinstance(binding.node, ast.Assign) else []
    for target in targets:
        if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant) and not binding.replaces:
            return target.slice.value
    return None
