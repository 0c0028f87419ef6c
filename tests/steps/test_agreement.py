"""Digests of named arrays and the first difference between ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.steps.agreement import digest, digest_table, first_difference, name_ranks


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20), st.data())
def test_any_changed_bit_changes_the_digest(values, data):
    array = np.array(values, dtype=np.float32)
    position = data.draw(st.integers(0, len(values) - 1))
    bit = data.draw(st.integers(0, 31))
    changed = array.copy()
    changed.view(np.uint32)[position] ^= np.uint32(1 << bit)
    assert digest(array) == digest(array.copy())
    assert digest(array) != digest(changed)


def test_dtype_and_shape_count():
    zeros = np.zeros(4, dtype=np.float32)
    assert len({digest(zeros), digest(zeros.reshape(2, 2)), digest(zeros.view(np.int32)), digest(zeros[:3])}) == 4


def test_memory_order_does_not_count():
    array = np.arange(6.0).reshape(2, 3)
    assert digest(array) == digest(np.asfortranarray(array))


def test_equal_tables_agree():
    table = digest_table({"a": np.ones(3), "b": np.zeros(2)})
    assert table.shape == (2, 2) and table.dtype == np.int64
    assert first_difference([table, table.copy(), table.copy()]) is None
    assert first_difference([digest_table({})] * 2) is None


def test_the_first_difference_names_position_and_ranks():
    same = digest_table({"a": np.ones(3), "b": np.zeros(2), "c": np.zeros(1)})
    other = digest_table({"a": np.ones(3), "b": np.ones(2), "c": np.ones(1)})
    difference = first_difference([same, other, same, other])
    assert (difference.position, difference.groups, difference.same_names) == (1, ((0, 2), (1, 3)), True)


def test_another_name_or_number_of_arrays_is_another_model():
    short, long = digest_table({"a": np.ones(3)}), digest_table({"a": np.ones(3), "b": np.ones(1)})
    renamed = digest_table({"z": np.ones(3)})
    assert not first_difference([short, long]).same_names
    assert first_difference([short, long]).position == 1
    assert not first_difference([short, renamed]).same_names


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((3,), "rank 3"), ((0, 1, 2), "ranks 0-2"), ((0, 1, 2, 5), "ranks 0-2, 5"), ((0, 2), "ranks 0, 2")],
)
def test_ranks_are_named_in_runs(ranks, text):
    assert name_ranks(ranks) == text
