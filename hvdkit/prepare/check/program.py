"""Scopes, what is bound to each name, and which of the assignments reach a use."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

Node = TypeVar("Node", bound=ast.AST)
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
ScopeNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef | ast.Module
Place = tuple[tuple[int, int], ...]
"""Where a statement is: for each enclosing block, outermost first, the block and the position in it."""

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_SCOPES = (*_FUNCTIONS, ast.ClassDef, ast.Module)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
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
        replaces: False for what only changes the object or adds to it (``x += y``, ``x.append(y)``).
    """

    node: ast.AST
    value: ast.expr | None
    index: tuple[int, ...] = ()
    replaces: bool = True


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


class Program:
    """A module's names: who binds them, and which bindings a use can see.

    Attributes:
        attributes: by attribute name, the bindings of ``<anything>.name`` and of names in class bodies.
        functions, classes: all of them, wherever they are defined.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.parents: dict[ast.AST, ast.AST] = {}
        self.attributes: dict[str, list[Binding]] = {}
        self.functions: list[FunctionNode] = []
        self.classes: list[ast.ClassDef] = []
        self._scopes: dict[ast.AST, Scope] = {}
        self._places: dict[ast.AST, Place] = {}
        self._owners: dict[int, ast.AST] = {}
        self._reaching: dict[ast.Name, list[Binding]] = {}
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
        self._number(tree, ())
        self.nodes = list(self.preorder(tree))
        for node in self.nodes:
            if isinstance(node, _FUNCTIONS):
                self.functions.append(node)
            elif isinstance(node, ast.ClassDef):
                self.classes.append(node)
        _Binder(self).bind()

    def preorder(self, node: ast.AST) -> Iterator[ast.AST]:
        """A node and everything in it, in the order of the text."""
        stack = [node]
        while stack:
            current = stack.pop()
            yield current
            stack.extend(reversed(list(ast.iter_child_nodes(current))))

    def _number(self, node: ast.AST, outer: Place) -> None:
        for name in ("body", "orelse", "handlers", "finalbody", "cases"):
            block = getattr(node, name, None)
            if not isinstance(block, list):
                continue
            self._owners[id(block)] = node
            inner = () if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else outer
            for position, child in enumerate(block):
                self._places[child] = (*inner, (id(block), position))
                self._number(child, self._places[child])

    def statement(self, node: ast.AST) -> ast.AST:
        """The statement, except clause or module that a node belongs to."""
        while node not in self._places and node in self.parents:
            node = self.parents[node]
        return node

    def place(self, node: ast.AST) -> Place:
        """Where a node's statement is, within its function."""
        return self._places.get(self.statement(node), ())

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """A node's parent, that one's parent and so on."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def scope(self, node: ast.AST) -> Scope:
        """The scope in which an expression or statement runs; a decorator or a default runs outside of its function."""
        child = node
        for parent in self.ancestors(node):
            if isinstance(parent, _SCOPES) and _runs_inside(child, parent):
                return self.scope_of(parent)
            child = parent
        return self.scope_of(self.tree)

    def scope_of(self, owner: ScopeNode) -> Scope:
        """The scope that a function, class or module makes."""
        if owner not in self._scopes:
            parent = None if isinstance(owner, ast.Module) else self.scope(owner)
            self._scopes[owner] = Scope(owner, parent)
        return self._scopes[owner]

    def function(self, node: ast.AST) -> FunctionNode | None:
        """The function in which a node runs; None on module level."""
        scope: Scope | None = self.scope(node)
        while scope is not None and isinstance(scope.node, ast.ClassDef):
            scope = scope.parent
        return scope.node if scope is not None and isinstance(scope.node, _FUNCTIONS) else None

    def owner_class(self, node: ast.AST) -> ast.ClassDef | None:
        """The class in whose body a node is, at any depth."""
        return next((parent for parent in self.ancestors(node) if isinstance(parent, ast.ClassDef)), None)

    def lookup(self, name: str, scope: Scope) -> Scope | None:
        """The scope whose name it is; None for a builtin or a name that nobody binds."""
        current: Scope | None = scope
        while current is not None:
            hidden = isinstance(current.node, ast.ClassDef) and current is not scope
            if name in current.bindings and name not in current.declared_elsewhere and not hidden:
                return current
            current = current.parent
        return None

    def reaching(self, name: ast.Name) -> list[Binding]:
        """The bindings that a use of a name can see, without those that were overwritten on every way there."""
        if name not in self._reaching:
            self._reaching[name] = self._find_reaching(name)
        return self._reaching[name]

    def _find_reaching(self, name: ast.Name) -> list[Binding]:
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
        return self._visible(name, [one for one in bindings if self._same_function(one, scope)], bindings)

    def _same_function(self, binding: Binding, scope: Scope) -> bool:
        return isinstance(binding.node, ast.arg) or self.scope(binding.node) is scope

    def _visible(self, use: ast.AST, local: list[Binding], everything: list[Binding]) -> list[Binding]:
        foreign = [binding for binding in everything if binding not in local]
        before = [binding for binding in local if self._precedes(binding, use)]
        certain = [binding for binding in before if binding.replaces and self._always_before(binding, use)]
        last = max(certain, key=lambda one: _position(one.node), default=None)
        seen = [one for one in before if last is None or one is last or _position(one.node) > _position(last.node)]
        for binding in local:
            if binding not in before and self._comes_round(binding, use, last):
                seen.append(binding)
        return seen + foreign

    def _precedes(self, binding: Binding, use: ast.AST) -> bool:
        if isinstance(binding.node, ast.arg):
            return True
        mine, other = self.place(binding.node), self.place(use)
        if mine == other:
            return isinstance(binding.node, ast.NamedExpr) and _position(binding.node) < _position(use)
        for one, another in zip(mine, other, strict=False):
            if one[0] != another[0]:  # two blocks of one statement: of an ``if`` only one runs
                return not isinstance(self._owners[one[0]], ast.If) and _position(binding.node) < _position(use)
            if one[1] != another[1]:
                return one[1] < another[1]
        return len(mine) < len(other)

    def _always_before(self, binding: Binding, use: ast.AST) -> bool:
        if isinstance(binding.node, ast.arg):
            return True
        mine, other = self.place(binding.node), self.place(use)
        if not mine or len(other) < len(mine) or mine[:-1] != other[: len(mine) - 1]:
            return False
        return mine[-1][0] == other[len(mine) - 1][0] and mine[-1][1] <= other[len(mine) - 1][1]

    def _comes_round(self, binding: Binding, use: ast.AST, last: Binding | None) -> bool:
        """Whether a binding further down reaches a use in the next turn of a loop."""
        around = [node for node in self.ancestors(use) if isinstance(node, _LOOPS)]
        shared = [loop for loop in around if loop in set(self.ancestors(binding.node))]
        if not shared:
            return False
        return last is None or shared[0] not in set(self.ancestors(last.node))


class _Binder:
    """Fills the bindings of a program."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def bind(self) -> None:
        for node in self.program.nodes:
            if isinstance(node, (ast.Global, ast.Nonlocal)):
                self.program.scope(node).declared_elsewhere.update(node.names)
        for node in self.program.nodes:
            self._bind_node(node)
        for node in self.program.nodes:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                self._changes(node.value)

    def _bind_node(self, node: ast.AST) -> None:
        """Note each name that this node binds, with the value that it is bound to."""
        match node:
            case ast.Assign():
                for target in node.targets:
                    self._target(target, node, node.value)
            case ast.AnnAssign() | ast.NamedExpr() if node.value is not None:
                self._target(node.target, node, node.value)
            case ast.AugAssign():
                self._target(node.target, node, node.value, replaces=False)
            case ast.For() | ast.AsyncFor() | ast.comprehension():
                self._target(node.target, node, node.iter)
            case ast.withitem() if node.optional_vars is not None:
                self._target(node.optional_vars, self.program.statement(node), node.context_expr)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                self._name(node.name, Binding(node, None), self.program.scope(node))
            case ast.Import() | ast.ImportFrom():
                for alias in node.names:
                    self._name(alias.asname or alias.name.split(".")[0], Binding(alias, None), self.program.scope(node))
            case ast.arg():
                self._parameter(node)

    def _target(
        self, target: ast.expr, node: ast.AST, value: ast.expr, index: tuple[int, ...] = (), replaces: bool = True
    ) -> None:
        match target:
            case ast.Name():
                self._name(target.id, Binding(node, value, index, replaces), self.program.scope(node))
            case ast.Attribute():
                self._attribute(target.attr, Binding(node, value, index, replaces))
            case ast.Subscript():
                self._target_object(target.value, node, value)
            case ast.Starred():
                self._target(target.value, node, value, (), replaces)
            case ast.Tuple() | ast.List():
                self._unpack(target.elts, node, value, index)

    def _unpack(self, targets: Sequence[ast.expr], node: ast.AST, value: ast.expr, index: tuple[int, ...]) -> None:
        pairs = isinstance(value, (ast.Tuple, ast.List)) and not index and not isinstance(node, (ast.For, ast.AsyncFor))
        for position, target in enumerate(targets):
            if pairs and isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(targets):
                self._target(target, node, value.elts[position])
            else:
                self._target(target, node, value, (*index, position))

    def _target_object(self, changed: ast.expr, node: ast.AST, value: ast.expr) -> None:
        """Bind what is put into an object to the name of the object."""
        if isinstance(changed, ast.Name):
            scope = self.program.lookup(changed.id, self.program.scope(node))
            if scope is not None and not any(isinstance(one.node, ast.alias) for one in scope.bindings[changed.id]):
                self._name(changed.id, Binding(node, value, replaces=False), scope)
        elif isinstance(changed, ast.Attribute):
            self._attribute(changed.attr, Binding(node, value, replaces=False))
        elif isinstance(changed, ast.Subscript):
            self._target_object(changed.value, node, value)

    def _changes(self, call: ast.Call) -> None:
        """``x.append(y)`` puts y into x; ``all_reduce(x)`` puts its result into x."""
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
            if called in _PUTS_INTO and isinstance(call.func, ast.Attribute):
                self._target_object(call.func.value, call, argument)
            elif called in _WRITES_INTO_ARGUMENTS:
                self._target_object(argument, call, call)

    def _parameter(self, node: ast.arg) -> None:
        function = next(parent for parent in self.program.ancestors(node) if isinstance(parent, _FUNCTIONS))
        self._name(node.arg, Binding(node, None), self.program.scope_of(function))

    def _name(self, name: str, binding: Binding, scope: Scope) -> None:
        while name in scope.declared_elsewhere and scope.parent is not None:
            scope = scope.parent
        scope.bindings.setdefault(name, []).append(binding)
        if isinstance(scope.node, ast.ClassDef):
            self._attribute(name, binding)

    def _attribute(self, name: str, binding: Binding) -> None:
        self.program.attributes.setdefault(name, []).append(binding)


def _runs_inside(child: ast.AST, owner: ScopeNode) -> bool:
    return child is owner.body if isinstance(owner, ast.Lambda) else child in owner.body


def _position(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
