"""How gradients lie in buckets, and the words that travel beside them."""

import numpy as np
import pytest

from hvdkit.core import layout
from hvdkit.core.layout import FLAGS, ControlWord, Flags, is_held, joined, read_flags, said_by_some


def written(control, *args, **kwargs):
    word = np.full(len(control), np.nan, dtype=np.float32)
    control.write(word, *args, **kwargs)
    return word


def test_a_usual_word_says_nothing_and_has_all_gradients():
    word = written(ControlWord(3))
    assert len(word) == FLAGS + 3
    assert read_flags(word) == Flags()
    assert [is_held(word, gradient) for gradient in range(3)] == [True] * 3


def test_the_sum_says_how_many_ranks_say_what():
    control = ControlWord(3)
    words = [
        written(control, Flags(changed=1), absent=[0, 2]),
        written(control, absent=[2]),
        written(control),
        written(control, Flags(weighted=1, weight=2.5), absent=[2]),
        written(control, Flags(failed=1), absent=range(3)),
    ]
    whole = np.sum(words[:2] + words[3:], axis=0)
    assert read_flags(whole) == Flags(unusual=4, failed=1, changed=1, weighted=1, weight=2.5)
    assert [is_held(whole, gradient) for gradient in range(3)] == [True, True, False]
    assert is_held(np.sum(words, axis=0), 2)


@pytest.mark.parametrize("flag", [name for name in Flags._fields if name not in ("unusual", "weight")])
def test_whatever_is_said_is_unusual(flag):
    said = read_flags(written(ControlWord(1), Flags(**{flag: 1})))
    assert said == Flags(unusual=1)._replace(**{flag: 1})


def test_a_gradient_that_is_none_is_unusual():
    assert read_flags(written(ControlWord(2), absent=[1])) == Flags(unusual=1)


def test_a_rank_that_has_joined_and_adds_zeros_says_nothing():
    control = ControlWord(1)
    whole = written(control) + np.zeros(len(control))
    assert read_flags(whole) == Flags()
    assert is_held(whole, 0)


def test_a_mean_is_read_as_a_number_of_ranks():
    control = ControlWord(0)
    words = [written(control, Flags(late=1)), written(control), written(control, Flags(late=1))]
    mean = np.mean(words, axis=0, dtype=np.float16)  # rounded as by compression
    assert read_flags(mean, 3).late == pytest.approx(2, abs=0.01)


def test_words_of_several_buckets_are_joined():
    assert joined([]) == Flags()
    assert joined([Flags(unusual=1, late=2), Flags(late=1, failed=1)]) == Flags(unusual=1, late=2, failed=1)


@pytest.mark.parametrize(
    ("flag", "ranks", "some"), [(0, 4, False), (1, 4, True), (3, 4, True), (4, 4, False), (3.998, 4, False)]
)
def test_said_by_some_is_neither_none_nor_all(flag, ranks, some):
    assert said_by_some(flag, ranks) == some


def test_buckets_are_closed_when_they_are_full_and_hold_one_kind():
    kinds = ["a", "b", "a", "a", "b", "a"]
    assert layout.in_buckets(kinds, [4, 9, 6, 3, 1, 2], limit=10) == [[0, 2], [1, 4], [3, 5]]
    assert layout.in_buckets(kinds, [10] * 6, limit=10) == [[0], [1], [2], [3], [4], [5]]
    assert layout.in_buckets([], [], limit=1) == []


def test_gradients_are_ordered_as_they_arrived_on_the_first_rank():
    """Those that did not arrive follow, last layer first."""
    first = layout.by_arrival({"d": 0, "b": 1}, ["a", "b", "c", "d", "e"])
    second = layout.by_arrival({"a": 0}, ["a", "b", "c", "d", "e"])
    assert layout.sorted_alike([first, second]) == [3, 1, 4, 2, 0]
