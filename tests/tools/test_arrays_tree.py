"""Containers of arrays of any framework: order, rebuilding, reading without a copy."""

import array
import collections
import dataclasses
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pytest

from hvdkit.arrays import tree as arrays_tree
from hvdkit.errors import InvalidArgumentError


class Slots(NamedTuple):
    count: int
    trace: dict


@dataclasses.dataclass(frozen=True)
class Layer:
    weight: np.ndarray
    bias: object = None


class OverDlpack:
    """An array type of its own that offers DLPack and nothing else."""

    def __init__(self, values):
        self.values = np.array(values)
        self.device = (1, 0)

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.device


class OverMethod:
    def __init__(self, values):
        self.values = np.array(values)

    def __array__(self, dtype=None, copy=None):
        return self.values


class OwnNamespace(OverDlpack):
    def __array_namespace__(self, *, api_version=None):
        class Namespace:
            @staticmethod
            def asarray(values, copy=None):
                made = OwnNamespace(values)
                made.values = values.copy() if copy else values
                return made

        return Namespace


TREE = {
    "b": [np.zeros(2), (np.ones(1), None)],
    "a": Slots(3, {"x": 1.5}),
    "c": Layer(np.arange(3)),
    "d": collections.defaultdict(list, {"k": np.ones(2)}),
    "e": {},
}


def test_paths_come_in_the_order_of_the_names():
    paths = [path for path, _ in arrays_tree.flatten(TREE)]
    assert paths == ["a.count", "a.trace.x", "b.0", "b.1.0", "b.1.1", "c.weight", "c.bias", "d.k"]
    assert arrays_tree.flatten(np.zeros(1))[0][0] == "the array"


def test_dicts_filled_in_another_order_are_the_same():
    one, other = {"x": 1, "y": 2, 3: 4}, {3: 4, "y": 2, "x": 1}
    assert arrays_tree.flatten(one) == arrays_tree.flatten(other)


def test_rebuilding_keeps_every_container():
    leaves = [leaf for _, leaf in arrays_tree.flatten(TREE)]
    again = arrays_tree.rebuild(TREE, iter(leaves))
    assert list(again) == list(TREE)
    assert isinstance(again["a"], Slots) and again["a"] == TREE["a"]
    assert isinstance(again["b"][1], tuple) and again["b"][1][1] is None
    assert isinstance(again["c"], Layer) and again["c"].weight is TREE["c"].weight
    assert again["d"].default_factory is list and again["d"] is not TREE["d"]
    proxy = MappingProxyType({"z": 1, "a": 2})
    assert arrays_tree.rebuild(proxy, iter([20, 10])) == {"z": 10, "a": 20}


@dataclasses.dataclass(frozen=True)
class Derived:
    w: object
    square: object = dataclasses.field(init=False)

    def __init__(self, of):
        object.__setattr__(self, "w", of)
        object.__setattr__(self, "square", of * of)


def test_rebuilding_a_data_class_asks_for_its_fields_alone():
    """Its type may be made of other arguments, or may be frozen."""
    found = arrays_tree.rebuild([Derived(3)], iter([1, 2]))[0]
    assert (type(found), found.w, found.square) == (Derived, 1, 2)


def test_a_watcher_sees_every_change_of_the_containers_and_none_of_the_leaves():
    def tree():
        return {"a": [np.zeros(1), (np.zeros(1), {"q": np.zeros(1)})], "s": Layer(np.zeros(1), [np.zeros(1)])}

    def of(change):
        given = tree()
        intact = arrays_tree.watcher(given)
        before = intact()
        change(given)
        return before, intact()

    assert of(lambda one: one["a"][0].fill(3)) == (True, True)
    for change in (
        lambda one: one.update(a=one["a"].copy()),
        lambda one: one["a"].__setitem__(0, np.zeros(1)),
        lambda one: one["a"].append(1),
        lambda one: one["a"][1][1].update(q=np.zeros(1)),
        lambda one: one["s"].bias.pop(),
        lambda one: one.pop("s"),
    ):
        assert of(change) == (True, False)


def test_none_stands_for_a_whole_container():
    outline = {"layer": {"w": 0, "b": 1}, "last": 2}
    assert arrays_tree.leaves_like(outline, {"layer": None, "last": 7}) == [7, None, None]
    assert arrays_tree.leaves_like(outline, None) == [None, None, None]


@pytest.mark.parametrize(
    ("outline", "tree", "leaves"),
    [
        (0, 7, [7]),
        ([0, (1, {"b": 3, "a": 2})], [7, (8, {"b": 10, "a": 9})], [7, 8, 9, 10]),
        ([0, (1, {"b": 3, "a": 2})], [7, (8, {"a": 9, "b": 10})], [7, 8, 9, 10]),
        ([0, (1, {"b": 3, "a": 2})], [7, None], [7, None, None, None]),
        ([0, [1, 2]], (7, (8, None)), [7, 8, None]),
        ({2: 1, 10: 0}, {"10": 7, "2": 8}, [7, 8]),
        ({"a": [0, 1]}, MappingProxyType({"a": (7, 8)}), [7, 8]),
        (Slots(0, (1, 2)), Slots(7, (8, 9)), [7, 8, 9]),
        ({"a": Slots(0, 1), "b": 2}, {"b": 9, "a": Slots(7, 8)}, [7, 8, 9]),
        ([[], {}, 0], [[], {}, 7], [7]),
    ],
    ids=repr,
)
def test_leaves_are_read_in_one_order_whatever_holds_them(outline, tree, leaves):
    assert arrays_tree.leaves_like(outline, tree) == leaves


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"layer": {"w": 1}, "last": 2}, ("at layer", "b, w", "dict of w")),
        ({"layer": {"w": 1, "b": 1}}, ("at the top", "last, layer", "dict of layer")),
        ({"layer": {"w": 1, "b": 1}, "last": [1, 2]}, ("at last", "an array", "list of 0, 1")),
        ({"layer": {"w": 1, "c": 1}, "last": 2}, ("at layer", "b, w", "dict of c, w")),
        ({"layer": {"w": 1, "b": 1}, "last": 2, "more": 3}, ("at the top", "last, layer", "dict of last, layer, more")),
        ({"layer": [1, 2], "last": 2}, ("at layer", "b, w", "list of 0, 1")),
        (3.0, ("at the top", "float")),
    ],
)
def test_other_containers_are_named(given, parts):
    with pytest.raises(InvalidArgumentError) as caught:
        arrays_tree.leaves_like({"layer": {"w": 0, "b": 1}, "last": 2}, given)
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize(
    "leaf",
    [
        np.arange(4.0),
        memoryview(np.arange(4.0)),
        array.array("d", range(4)),
        OverDlpack(np.arange(4.0)),
        OverMethod(np.arange(4.0)),
        OwnNamespace(np.arange(4.0)),
    ],
    ids=lambda leaf: type(leaf).__name__,
)
def test_arrays_are_read_without_a_copy(leaf):
    values = arrays_tree.to_host(leaf, "x")
    assert values.tolist() == [0, 1, 2, 3] and values.dtype == np.float64
    owner = getattr(leaf, "values", leaf)
    changed = np.asarray(owner)
    changed[0] = 9
    assert values[0] == 9


@pytest.mark.parametrize("number", [True, 3, 2.5, 1j, np.float32(2), np.int64(3)])
def test_numbers_are_arrays_without_dimensions(number):
    values = arrays_tree.to_host(number, "x")
    assert values.shape == () and values == number
    back = arrays_tree.maker(number)(values)
    assert back == number and type(back) is type(number)


@pytest.mark.parametrize("leaf", ["text", object(), print, np.array(["a"]), np.array([{}]), {1, 2}])
def test_what_is_no_array_is_refused_by_its_place(leaf):
    with pytest.raises(InvalidArgumentError, match=r"optimizer\.name is of type .* leave it out"):
        arrays_tree.to_host(leaf, "optimizer.name")


def test_makers_give_memory_of_their_own_to_all_but_numpy():
    values = np.arange(3.0)
    assert arrays_tree.maker(np.zeros(3))(values) is values
    for leaf in (memoryview(b"abc"), OwnNamespace([1.0]), OverDlpack([1.0])):
        made = arrays_tree.maker(leaf)(values)
        read = arrays_tree.to_host(made, "x")
        assert read.tolist() == [0, 1, 2] and not np.shares_memory(read, values)


def test_the_device_is_asked_and_memory_that_cannot_be_read_is_refused():
    class OnGpu(OverDlpack):
        def __dlpack__(self, **options):
            raise BufferError("the memory is on a GPU")

    there = OnGpu([1.0])
    there.device = (2, 0)
    assert [arrays_tree.is_on_gpu(one) for one in (there, OverDlpack([1.0]), np.ones(1), 1.0)] == [True] + [False] * 3
    with pytest.raises(InvalidArgumentError, match="of one on a GPU a copy"):
        arrays_tree.to_host(there, "x")


def test_a_type_that_makes_other_arrays_is_refused():
    class Single(OverDlpack):
        def __init__(self, values):
            super().__init__(np.asarray(values, np.float32))

    single = Single(np.ones(2))
    assert arrays_tree.maker(single)(np.ones(2, np.float32)).values.dtype == np.float32
    single.values = np.ones(2)
    with pytest.raises(
        InvalidArgumentError, match=r"Single\(array\) does not keep the type float64 and the shape \(2,\)"
    ):
        arrays_tree.maker(single)


@pytest.mark.parametrize(("values", "kind"), [([1.5, 2.5], "float64"), (7, "int64"), ([], "float16")])
def test_torch_keeps_types_and_shapes(values, kind):
    torch = pytest.importorskip("torch")
    given = torch.tensor(values, dtype=getattr(torch, kind))
    array = np.array(values, kind)
    made = arrays_tree.maker(given)(array)
    array[...] = 0
    assert made.dtype == given.dtype and made.tolist() == given.tolist()


def test_keys_of_the_same_name_have_an_order():
    first, second = {1: "number", "1": "text"}, {"1": "text", 1: "number"}
    assert arrays_tree.flatten(first) == arrays_tree.flatten(second)
