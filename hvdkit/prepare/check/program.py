"""Scopes, what is bound to each name, and which of the assignments reach a use."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, TypeVar, cast

Node = TypeVar("Node", bound=ast.AST)
Method = TypeVar("Method", bound=Callable[..., Any])
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
ScopeNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef | ast.Module

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
_SCOPES = (*FUNCTIONS, ast.ClassDef, ast.Module)
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


@dataclass(eq=False)
class Binding:
    """One way in which a name or an attribute gets a value.

    Attributes:
        node: what is blamed for it; its line.
        value: the expression, None for a parameter, an import or a definition.
        index: which element of the value, for ``a, (b, c) = value``: () is all of it.
        key: the constant in ``x["key"] = value``.
        replaces: False for what only changes the object or adds to it (``x += y``, ``x.append(y)``).
        imported: the full name of what is imported.
    """

    node: ast.AST
    value: ast.expr | None = None
    index: tuple[int, ...] = ()
    key: object = None
    replaces: bool = True
    imported: str = ""


@dataclass(eq=False)
class Scope:
    """A function, a class or the module, with the names that are bound in it."""

    node: ScopeNode
    parent: Scope | None
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    declared_elsewhere: set[str] = field(default_factory=set)


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


class Program:
    """A module's names: who binds them, and which bindings a use can see.

    Attributes:
        nodes: all of them, in the order of the text.
        imported: the full names of what is imported and of the modules that it comes from, with the first line.
        attributes: by attribute name, the bindings of ``<anything>.name`` and of names in class bodies.
        functions: all of them, wherever they are defined.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.nodes: list[ast.AST] = []
        self.parents: dict[ast.AST, ast.AST] = {}
        self.imported: dict[str, int] = {}
        self.attributes: dict[str, list[Binding]] = {}
        self._blocks: dict[ast.AST, tuple[ast.AST, str]] = {}
        self._scopes: dict[ast.AST, Scope] = {}
        self._inner: dict[ast.AST, Scope] = {}
        self._enter(tree)
        self.functions = [node for node in self.nodes if isinstance(node, FUNCTIONS)]
        for node in self.nodes:
            self._bind(node)
        for node in self.nodes:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                self._change(node.value)

    # What is where ------------------------------------------------------------------------------------------------

    def _enter(self, tree: ast.Module) -> None:
        """Note of every node its parent, the block that it is a statement of, and the scope in which it runs."""
        self._scopes[tree] = Scope(tree, None)
        stack: list[ast.AST] = [tree]
        while stack:
            node = stack.pop()
            self.nodes.append(node)
            outside = inside = self._scopes[node]
            if isinstance(node, _SCOPES):
                inside = self._inner[node] = Scope(node, outside) if node is not tree else outside
            for name, value in reversed(list(ast.iter_fields(node))):
                children = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, ast.AST)]
                for child in reversed(children):
                    self.parents[child] = node
                    # A decorator or a default runs outside of its function.
                    self._scopes[child] = inside if name == "body" else outside
                    if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
                        self._blocks[child] = (node, name)
                    elif isinstance(child, ast.arg):  # bound as if by the first statement of its function
                        self._scopes[child] = self._inner[self.parents[node]]
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

    def scope(self, node: ast.AST) -> Scope:
        """The scope in which an expression or statement runs."""
        return self._scopes[node]

    def function(self, node: ast.AST) -> FunctionNode | None:
        """The function in which a node runs; None on module level."""
        scope: Scope | None = self.scope(node)
        while scope is not None and isinstance(scope.node, ast.ClassDef):
            scope = scope.parent
        return scope.node if scope is not None and isinstance(scope.node, FUNCTIONS) else None

    def owner_class(self, node: ast.AST) -> ast.ClassDef | None:
        """The class in whose body a node is, at any depth."""
        return next((parent for parent in self.ancestors(node) if isinstance(parent, ast.ClassDef)), None)

    # What a use of a name can see -----------------------------------------------------------------------------------

    def lookup(self, name: str, scope: Scope) -> Scope | None:
        """The scope whose name it is; None for a builtin or a name that nobody binds."""
        current: Scope | None = scope
        while current is not None:
            hidden = isinstance(current.node, ast.ClassDef) and current is not scope
            if name in current.bindings and name not in current.declared_elsewhere and not hidden:
                return current
            current = current.parent
        return None

    @remembered([])
    def reaching(self, name: ast.Name) -> list[Binding]:
        """The bindings that a use of a name can see, without those that were overwritten on every way there."""
        scope = self.scope(name)
        owner = self.lookup(name.id, scope)
        if owner is None:
            return []
        around = {
            one for parent in self.ancestors(name) if isinstance(parent, _COMPREHENSIONS) for one in parent.generators
        }
        bindings = [one for one in owner.bindings[name.id] if not isinstance(one.node, ast.comprehension)]
        own = [binding for binding in owner.bindings[name.id] if binding.node in around]
        if own or owner is not scope:
            return own or bindings
        foreign = [one for one in bindings if self.scope(one.node) is not scope]
        return self._visible(name, [one for one in bindings if one not in foreign]) + foreign

    def _visible(self, use: ast.AST, bindings: list[Binding]) -> list[Binding]:
        """Those above a use that nothing overwrites on every way there, then those of the turn of a loop before."""
        above = [binding for binding in bindings if self._precedes(binding.node, use)]
        around = self._blocks_around(use).items()
        certain = [one for one in above if one.replaces and self._blocks[self.statement(one.node)] in around]
        last = max(certain, key=lambda one: position(one.node), default=None)
        seen = [one for one in above if last is None or one is last or position(one.node) > position(last.node)]
        loops = [node for node in self.ancestors(use) if isinstance(node, LOOPS)]
        for binding in bindings:
            shared = next((loop for loop in loops if loop in self.ancestors(binding.node)), None)
            if binding not in above and shared and (last is None or shared not in self.ancestors(last.node)):
                seen.append(binding)
        return seen

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

    # Who binds a name -----------------------------------------------------------------------------------------------

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
                self._import(node)
            case ast.Global() | ast.Nonlocal():
                self.scope(node).declared_elsewhere.update(node.names)
            case ast.arg():
                self._name(node.arg, Binding(node), self.scope(node))

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        base = "." * node.level + (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        if base:
            self.imported.setdefault(base, node.lineno)
        for alias in node.names:
            full, first = f"{base}.{alias.name}" if base else alias.name, alias.name.split(".")[0]
            self.imported.setdefault(full, node.lineno)
            meant = full if base or alias.asname else first  # ``import a.b`` binds a
            self._name(alias.asname or first, Binding(node, imported=meant), self.scope(node))

    def _target(self, target: ast.expr, binding: Binding) -> None:
        match target:
            case ast.Name():
                self._name(target.id, binding, self.scope(binding.node))
            case ast.Attribute():
                self._attribute(target.attr, binding)
            case ast.Subscript():
                key = target.slice.value if isinstance(target.slice, ast.Constant) else None
                self._put(target.value, replace(binding, index=(), key=key, replaces=False))
            case ast.Starred():
                self._target(target.value, replace(binding, index=()))
            case ast.Tuple() | ast.List():
                for place, one in enumerate(target.elts):
                    self._target(one, _element(binding, place, len(target.elts)))

    def _put(self, changed: ast.expr, binding: Binding) -> None:
        """Bind what is put into an object to the name of the object."""
        while isinstance(changed, ast.Subscript):
            changed = changed.value
        if isinstance(changed, ast.Name):
            scope = self.lookup(changed.id, self.scope(binding.node))
            if scope is not None and not any(one.imported for one in scope.bindings[changed.id]):
                self._name(changed.id, binding, scope)
        elif isinstance(changed, ast.Attribute):
            self._attribute(changed.attr, binding)

    def _change(self, call: ast.Call) -> None:
        """``x.append(y)`` puts y into x; ``all_reduce(x)`` puts its result into x."""
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
            if called in _PUTS_INTO and isinstance(call.func, ast.Attribute):
                self._put(call.func.value, Binding(call, argument, replaces=False))
            elif called in _WRITES_INTO_ARGUMENTS:
                self._put(argument, Binding(call, call, replaces=False))

    def _name(self, name: str, binding: Binding, scope: Scope) -> None:
        while name in scope.declared_elsewhere and scope.parent is not None:
            scope = scope.parent
        scope.bindings.setdefault(name, []).append(binding)
        if isinstance(scope.node, ast.ClassDef):
            self._attribute(name, binding)

    def _attribute(self, name: str, binding: Binding) -> None:
        self.attributes.setdefault(name, []).append(binding)


def _element(binding: Binding, place: int, of: int) -> Binding:
    """What the target at a position of a tuple of targets is bound to."""
    match binding.value:
        case ast.Tuple(elts=elements) | ast.List(elts=elements) if len(elements) == of and not binding.index:
            if not isinstance(binding.node, (ast.For, ast.AsyncFor)):
                return replace(binding, value=elements[place])
    return replace(binding, index=(*binding.index, place))


def position(node: ast.AST) -> tuple[int, int]:
    """Line and column."""
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
