"""Nested containers of arrays of any framework, and the arrays as NumPy's; the inside of ``hvdkit.arrays``.

Containers are mappings (in the order of their keys' names), lists, tuples, named tuples and data classes; everything
else is a leaf. ``None`` stands for an array that is missing. ``OwnState`` around some of them says which arrays in it
are divided among the ranks; its leaves have the paths that they would have without it.
"""

from __future__ import annotations

import array
import copy
import dataclasses
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdkit.errors import InvalidArgumentError

Array = npt.NDArray[Any]

_CUDA = (2, 13)  # DLPack: DLDeviceType
_ALONE = "the array"  # of a tree that is a leaf
_NUMBERS = (bool, int, float, complex)
_BYTES = (memoryview, bytearray, bytes, array.array)
_NO_NUMBERS = "OSUMm"  # kinds of NumPy's types
_REFUSALS = (BufferError, TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError)
_READERS: tuple[tuple[Callable[[Any], bool], Callable[[Any], Array]], ...] = (
    (lambda leaf: isinstance(leaf, (*_NUMBERS, np.generic)), np.asarray),
    (lambda leaf: hasattr(leaf, "__dlpack__"), np.from_dlpack),
    (lambda _: True, lambda leaf: np.asarray(memoryview(leaf))),
    (lambda leaf: hasattr(leaf, "__array__"), np.asarray),
)
"""What may be read as a NumPy array, and how, tried in turn."""


@dataclasses.dataclass(frozen=True, slots=True)
class OwnPart:
    """What this rank keeps of an array that is divided among the ranks.

    Attributes:
        leaf: the numbers, in an array of any shape.
        shape: of the whole array.
        start, stop: which numbers of it, counted in C order.
    """

    leaf: Any
    shape: tuple[int, ...]
    start: int
    stop: int


class OwnState:
    """A part of a state of which every rank keeps other numbers. Made by ``ShardedState.state`` and ``shard_state``.

    ``broadcast_state``, ``check_agreement`` and ``CheckAgreement`` leave these numbers alone; ``Checkpoints`` saves and
    restores them on any number of ranks, and into and from a state that is not divided.

    Attributes:
        inner: the containers.
        shards: how the parameters are divided, a ``ShardedState``.
        parts: path in ``inner`` (a leaf that is not named is common to all ranks), and what ``OwnPart`` holds.
    """

    def __init__(self, inner: Any, shards: Any, parts: tuple[tuple[str, tuple[int, ...], int, int], ...]) -> None:
        self.inner, self.shards, self.parts = inner, shards, parts

    def leaves(self) -> list[tuple[str, Any]]:
        """As ``flatten``, with the arrays that are divided as ``OwnPart``."""
        parts = {path: (shape, start, stop) for path, shape, start, stop in self.parts}
        return [(path, OwnPart(leaf, *parts[path]) if path in parts else leaf) for path, leaf in flatten(self.inner)]


def flatten(tree: Any) -> list[tuple[str, Any]]:
    """The leaves with their paths ("layers.0.weight"), in an order that does not depend on how dicts were filled."""
    found: list[tuple[str, Any]] = []

    def visit(path: str, value: Any) -> None:
        if isinstance(value, OwnState):
            for below, leaf in value.leaves():
                inside = "" if below == _ALONE else below
                found.append((".".join(filter(None, (path, inside))) or _ALONE, leaf))
            return
        children = _children(value)
        if children is None:
            found.append((path or _ALONE, value))
            return
        for name, child in children:
            visit(f"{path}.{name}" if path else name, child)

    visit("", tree)
    return found


def rebuild(tree: Any, leaves: Iterator[Any]) -> Any:
    """Containers like those of ``tree`` around other leaves, which come in ``flatten``'s order."""
    if isinstance(tree, OwnState):
        return OwnState(rebuild(tree.inner, leaves), tree.shards, tree.parts)
    children = _children(tree)
    if children is None:
        return next(leaves)
    values = [rebuild(child, leaves) for _, child in children]
    if isinstance(tree, Mapping):
        items = dict(zip(_ordered(tree), values, strict=True))
        if type(tree) is dict or not isinstance(tree, dict):
            return type(tree)({key: items[key] for key in tree})  # type: ignore[call-arg]
        changed = copy.copy(tree)  # a subclass may want other arguments, as defaultdict does
        changed.update(items)
        return changed
    if isinstance(tree, (list, tuple)):
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    changed = copy.copy(tree)  # its type may want other arguments than its fields
    for (name, _), value in zip(children, values, strict=True):
        object.__setattr__(changed, name, value)  # also where it is frozen
    return changed


def leaves_like(outline: Any, tree: Any) -> list[Any]:
    """The leaves of ``tree``, which must have the containers of ``outline``; None may stand for a whole container.

    Raises:
        InvalidArgumentError: other containers; the message names the place.
    """
    found: list[Any] = []

    def visit(path: str, expected: Any, value: Any) -> None:
        children = _children(expected)
        if children is None:
            if value is not None and _children(value) is not None:
                raise _other(path, "an array", value)
            found.append(value)
            return
        given = [(name, None) for name, _ in children] if value is None else _children(value)
        names = [name for name, _ in children]
        if given is None or [name for name, _ in given] != names:
            raise _other(path, f"a container of {', '.join(names[:4]) or 'nothing'}", value)
        for (name, child), (_, other) in zip(children, given, strict=True):
            visit(f"{path}.{name}" if path else name, child, other)

    visit("", outline, tree)
    return found


def watcher(tree: Any) -> Callable[[], bool]:
    """What tells whether the containers of a tree still hold the very objects that they hold now."""
    held: list[tuple[Any, list[Any]]] = []

    def visit(value: Any) -> None:
        children = _children(value)
        if children is not None:
            held.append((value, list(_values(value))))
            for _, child in children:
                visit(child)

    visit(tree)
    return lambda: all(_holds(container, values) for container, values in held)


def is_on_gpu(leaf: Any) -> bool:
    """Whether an array says that it is in the memory of a CUDA GPU."""
    ask = getattr(leaf, "__dlpack_device__", None)
    if isinstance(leaf, np.ndarray) or ask is None:
        return False
    try:
        return int(ask()[0]) in _CUDA
    except _REFUSALS:
        return False


def to_host(leaf: Any, path: str) -> Array:
    """An array, or a number, as a NumPy array: without a copy wherever its memory can be read.

    Tried in turn: NumPy itself, DLPack, the buffer protocol, ``__array__``, CuPy's ``get``.

    Raises:
        InvalidArgumentError: none of them serves.
    """
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind not in _NO_NUMBERS:
        return leaf
    for is_one, read in _READERS:
        try:
            found = read(leaf) if is_one(leaf) else None
        except _REFUSALS:  # of DLPack: a type that it or NumPy does not know, such as bfloat16
            continue
        if found is not None and found.dtype.kind not in _NO_NUMBERS:
            return found
    if type(leaf).__module__.partition(".")[0] == "cupy":
        return leaf.get()  # type: ignore[no-any-return]
    kind = f"{type(leaf).__name__} of {leaf.dtype}" if hasattr(leaf, "dtype") else type(leaf).__name__
    raise InvalidArgumentError(
        f"{path} is of type {kind}, which is neither a number nor an array that NumPy can read "
        "(DLPack, the buffer protocol or __array__); leave it out, or give its arrays, of one on a GPU a copy in the "
        "host's memory."
    )


def maker(leaf: Any) -> Callable[[Array], Any]:
    """What makes an array of the framework of ``leaf`` out of a NumPy array, with memory of its own.

    For a NumPy array that is the array itself. In turn: the namespace of the array API (``__array_namespace__``), its
    package's ``from_dlpack``, the type itself. What only offers its bytes (``memoryview``, ``array.array``) becomes a
    NumPy array.

    Raises:
        InvalidArgumentError: the type makes arrays of other types or shapes of NumPy's, or none.
    """
    if isinstance(leaf, np.ndarray):
        return as_it_is
    if isinstance(leaf, _NUMBERS):
        kind: Any = type(leaf)
        return lambda values: kind(values.item())
    if isinstance(leaf, np.generic):
        return lambda values: values[()]
    if isinstance(leaf, _BYTES):
        return np.array
    namespace = getattr(leaf, "__array_namespace__", None)
    if namespace is not None:
        xp = namespace()
        return lambda values: xp.asarray(values, copy=True)
    package = sys.modules.get(type(leaf).__module__.partition(".")[0])
    if hasattr(package, "from_dlpack"):
        return lambda values: package.from_dlpack(values.copy())  # type: ignore[union-attr]
    return _by_type(leaf)


def _by_type(leaf: Any) -> Callable[[Array], Any]:
    """The type itself, if it makes of a NumPy array the array that it was."""
    kind = type(leaf)
    values = to_host(leaf, kind.__name__)
    try:
        made = to_host(kind(values), kind.__name__)
    except (*_REFUSALS, InvalidArgumentError):
        made = None
    if made is None or (made.dtype, made.shape) != (values.dtype, values.shape):
        raise InvalidArgumentError(
            f"{kind.__name__}(array) does not keep the type {values.dtype} and the shape {values.shape} of a NumPy "
            "array; give NumPy arrays (numpy.asarray), and make your own of the results."
        )
    return kind


def as_it_is(values: Array) -> Array:
    """What makes a NumPy array of a NumPy array."""
    return values


def _ordered(mapping: Mapping[Any, Any]) -> list[Any]:
    return sorted(mapping, key=lambda key: (str(key), type(key).__name__))  # 1 and "1" are two keys


def _children(value: Any) -> list[tuple[str, Any]] | None:
    """Names and values in a container; None for a leaf."""
    if isinstance(value, (np.ndarray, int)):  # told at once what is asked most often
        return None
    if isinstance(value, Mapping):
        return [(str(key), value[key]) for key in _ordered(value)]
    if isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", None) or map(str, range(len(value)))
        return list(zip(names, value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not hasattr(value, "shape"):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def _values(container: Any) -> Any:
    """What a container holds, with a length."""
    if isinstance(container, Mapping):
        return container.values()
    return container if isinstance(container, (list, tuple)) else [child for _, child in _children(container) or ()]


def _holds(container: Any, values: list[Any]) -> bool:
    now = _values(container)
    return len(now) == len(values) and all(map(operator.is_, now, values))


def _other(path: str, expected: str, value: Any) -> InvalidArgumentError:
    children = _children(value)
    if children is None:
        given = type(value).__name__
    else:
        given = f"a {type(value).__name__} of {', '.join(name for name, _ in children[:4]) or 'nothing'}"
    return InvalidArgumentError(
        f"the gradients differ from the parameters at {path or 'the top'}: expected {expected}, got {given}; give "
        "gradients in the containers that distribute was given."
    )
