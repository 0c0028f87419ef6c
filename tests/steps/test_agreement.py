"""Digests of named arrays and the first difference between ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.errors import AgreementError, InvalidArgumentError, name_ranks
from hvdkit.steps.agreement import (
    EveryFewSteps,
    agree,
    array_digests,
    digest,
    digest_table,
    first_difference,
    join_chunks,
    masked_shift,
    salted,
)


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


@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
def test_padding_does_not_count(dtype):
    values = (np.arange(1, 5) / 3).astype(dtype)
    padded = np.frombuffer(b"\xff" * values.nbytes, dtype=dtype).copy()
    for position, value in enumerate(values):
        padded[position] = value
    assert (padded == values).all() and digest(padded) == digest(values)
    assert digest(values * (1 + np.finfo(dtype).eps)) != digest(values)


def test_memory_order_does_not_count():
    array = np.arange(6.0).reshape(2, 3)
    assert digest(array) == digest(np.asfortranarray(array))


def table_of(**arrays):
    return digest_table(arrays, list(map(digest, arrays.values())))


def test_equal_tables_agree():
    table = table_of(a=np.ones(3), b=np.zeros(2))
    assert table.shape == (2, 2) and table.dtype == np.int64
    assert first_difference([table, table.copy(), table.copy()]) is None
    assert first_difference([digest_table([])] * 2) is None


def test_the_first_difference_names_position_and_ranks():
    same = table_of(a=np.ones(3), b=np.zeros(2), c=np.zeros(1))
    other = table_of(a=np.ones(3), b=np.ones(2), c=np.ones(1))
    difference = first_difference([same, other, same, other])
    assert (difference.position, difference.groups, difference.same_names) == (1, ((0, 2), (1, 3)), True)


def test_another_name_or_number_of_arrays_is_another_model():
    short, long = table_of(a=np.ones(3)), table_of(a=np.ones(3), b=np.ones(1))
    renamed = table_of(z=np.ones(3))
    assert not first_difference([short, long]).same_names
    assert first_difference([short, long]).position == 1
    assert not first_difference([short, renamed]).same_names


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((3,), "rank 3"), ((0, 1, 2), "ranks 0-2"), ((0, 1, 2, 5), "ranks 0-2, 5"), ((0, 2), "ranks 0, 2")],
)
def test_ranks_are_named_in_runs(ranks, text):
    assert name_ranks(ranks) == text


TOP, BOTH = 1 << 63, 1 << 63 | 1 << 31  # the signs of a float64, and of two float32
MASKS = st.sampled_from([TOP, 1 << 31, BOTH, sum(1 << bit for bit in range(15, 64, 16))])
MASKS |= st.integers(0, 63).map(lambda bit: 1 << bit)
WORDS = st.just(0) | MASKS | st.integers(0, 2**64 - 1)


def flipped(words, data):
    """The same bits of one word or more."""
    places = data.draw(st.sets(st.integers(0, len(words) - 1), min_size=1), "places")
    changed = words.copy()
    changed[list(places)] ^= np.uint64(data.draw(MASKS, "bits"))
    return words, changed


def exchanged(words, data):
    """Two words that differ in these bits."""
    places = [data.draw(st.integers(0, len(words) - 1), "place") for _ in range(2)]
    words[places[1]] = words[places[0]] ^ np.uint64(data.draw(MASKS, "bits"))
    changed = words.copy()
    changed[places] = words[places[::-1]]
    return words, changed


def rotated(words, data):
    return words, np.roll(words, data.draw(st.integers(1, len(words) - 1), "by"))


def all_equal(words, data):
    words[:] = words[0]
    return words, words ^ np.uint64(data.draw(MASKS, "bits"))


@pytest.mark.parametrize("change", [flipped, exchanged, rotated, all_equal])
@pytest.mark.parametrize("chunk", [64, 3], ids=["one chunk", "chunks"])
@given(words=st.lists(WORDS, min_size=4, max_size=16), data=st.data())
def test_no_structured_change_is_missed(words, data, change, chunk):
    """Among the words of one tensor, and of two, between which they move."""
    before, after = change(np.array(words, dtype=np.uint64), data)
    split = data.draw(st.integers(0, len(words)), "first word of the second tensor")
    digests = [array_digests(np.split(one, [split]), chunk).tolist() for one in (before, after)]
    assert (digests[0] != digests[1]) == (before != after).any()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "complex128"])
def test_changed_signs_change_the_digest(dtype):
    """Of all elements, of every second and of every fourth one."""
    arrays = [np.ones(8, dtype=dtype) for _ in range(8)]
    for array, (first, step) in zip(arrays, [(0, 1), (0, 2), (1, 2), (0, 4), (1, 4), (2, 4), (3, 4)], strict=False):
        array[first::step] *= -1
    assert len(set(array_digests(arrays).tolist())) == 8


@pytest.mark.parametrize("shift", [masked_shift, lambda words, by: (words.view(np.uint64) >> by).view(np.int64)])
def test_words_are_mixed_as_splitmix64_mixes_them(shift):
    """The first two numbers of Vigna's splitmix64.c from the seed 1234567."""
    gamma = 0x9E3779B97F4A7C15
    states = np.array([1234567 + gamma, 1234567 + 2 * gamma - 2**64], dtype=np.uint64).view(np.int64)
    mixed = salted(states, np.zeros(2, dtype=np.int64), shift).view(np.uint64)
    assert mixed.tolist() == [6457827717110365317, 3203168211198807973]


def test_the_order_of_chunks_counts():
    one, two = np.int64(1), np.int64(2)
    assert join_chunks([one, two]) != join_chunks([two, one])
    assert join_chunks([]) == 0


class Minimum:
    """What a rank gets from an allreduce: the element-wise minimum of what all give."""

    def __init__(self):
        self.given = []

    def allreduce(self, values, name, op):
        assert op == "min"
        self.given.append(values)
        return np.min(self.given, axis=0)


def test_one_minimum_tells_whether_all_tables_are_equal():
    same, other = digest_table(["a", "b"], [1, 2]), digest_table(["a", "b"], [1, 3])
    assert digest_table(["a"], [2**63 - 1])[0, 1] == 2**63 - 1
    for tables in ([same] * 3, [same, other, same], [same, digest_table(["a", "c"], [1, 2])]):
        ranks = Minimum()
        for table in tables:
            agree(ranks, table, "given")
        answers = {agree(ranks, table, "asked") for table in tables}
        assert answers == {all(np.array_equal(table, tables[0]) for table in tables)}


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
