"""Digests of named arrays and the first difference between ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.errors import AgreementError, InvalidArgumentError
from hvdkit.steps.agreement import (
    EveryFewSteps,
    agree,
    digest,
    digest_table,
    first_difference,
    join_chunks,
    salted,
    salts,
    value_table,
)
from hvdkit.steps.ranks import name_ranks


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


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=20), st.data())
def test_salted_words_tell_every_change_and_every_exchange(words, data):
    before = np.array(words, dtype=np.int64)
    first, second = (data.draw(st.integers(0, len(words) - 1)) for _ in range(2))
    changed, exchanged = before.copy(), before.copy()
    changed[first] ^= np.int64(1 << data.draw(st.integers(0, 62)))
    exchanged[[first, second]] = exchanged[[second, first]]
    digests = [int(salted(array, salts(len(words))).sum()) for array in (before, changed, exchanged)]
    assert digests[1] != digests[0]
    assert (digests[2] != digests[0]) == (words[first] != words[second])


def test_bits_that_move_change_the_digest():
    digests = {int(salted(np.array(bits, dtype=np.int64), salts(4)).sum()) for bits in ([1, 0, 0, 1], [0, 1, 1, 0])}
    assert len(digests) == 2


def test_the_order_of_chunks_counts():
    one, two = np.int64(1), np.int64(2)
    assert join_chunks([one, two]) != join_chunks([two, one])
    assert join_chunks([]) == 0


def ranks_minimum(everyone):
    """The element-wise minimum of what each rank gives to an allreduce."""
    given_by_rank = []
    for tables in everyone:
        agree(tables, lambda values: given_by_rank.append(values) or values)
    return np.min(given_by_rank, axis=0)


def test_one_minimum_tells_whether_all_tables_are_equal():
    same, other = value_table(["a", "b"], [1, 2]), value_table(["a", "b"], [1, 3])
    assert value_table(["a"], [2**63 - 1])[0, 1] == 2**63 - 1
    for everyone in ([[same]] * 3, [[same], [other], [same]], [[same], [value_table(["a", "c"], [1, 2])]]):
        lowest = ranks_minimum(everyone)
        answers = {agree(tables, lambda _, lowest=lowest: lowest) for tables in everyone}
        assert answers == {all(np.array_equal(tables[0], everyone[0][0]) for tables in everyone)}


def test_every_few_steps_raises_or_warns():
    def fail():
        raise AgreementError("the ranks disagree.")

    raising, warning = EveryFewSteps(fail, 3, "raise"), EveryFewSteps(fail, 2, "warn")
    raising.step()
    raising.step()
    with pytest.raises(AgreementError, match="after step 3, the ranks disagree"):
        raising.step()
    with pytest.warns(RuntimeWarning, match="after step 2, the ranks disagree"):
        [warning.step() for _ in range(2)]
    for every, reaction in ((0, "raise"), (1.5, "raise"), (True, "raise"), (1, "log")):
        with pytest.raises(InvalidArgumentError, match=r"every must be an integer >= 1|on_disagreement must be"):
            EveryFewSteps(fail, every, reaction)
