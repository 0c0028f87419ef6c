"""What the algorithms of an allreduce cost: against counts by hand and against what no allreduce can beat."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.measure.predict import formulas
from hvdkit.measure.predict.formulas import FLAT, Terms

RANKS = st.integers(1, 100_000)
SIZES = st.integers(1, 1 << 40)


@pytest.mark.parametrize(
    ("algorithm", "n", "terms"),
    [
        ("ring", 2, Terms(2, 100, 50)),
        ("ring", 4, Terms(6, 150, 75)),
        ("ring", 5, Terms(8, 160, 80)),
        ("recursive_doubling", 2, Terms(1, 100, 100)),
        ("recursive_doubling", 8, Terms(3, 300, 300)),
        ("recursive_doubling", 6, Terms(4, 400, 300)),
        ("rabenseifner", 2, Terms(2, 100, 50)),
        ("rabenseifner", 8, Terms(6, 175, 87.5)),
        ("rabenseifner", 5, Terms(6, 350, 175)),
        ("tree", 2, Terms(2, 200, 100)),
        ("tree", 5, Terms(6, 600, 300)),
        ("tree", 8, Terms(6, 600, 300)),
    ],
)
def test_terms_are_those_of_the_literature(algorithm, n, terms):
    assert FLAT[algorithm](100, n) == terms


@pytest.mark.parametrize("algorithm", FLAT)
def test_one_rank_has_nothing_to_do(algorithm):
    assert FLAT[algorithm](1 << 20, 1) == Terms(0, 0, 0)


@given(st.sampled_from(sorted(FLAT)), SIZES, RANKS)
def test_no_algorithm_moves_less_than_the_bound(algorithm, nbytes, n):
    moved = FLAT[algorithm](nbytes, n).moved
    assert moved >= 2 * (n - 1) / n * nbytes * (1 - 1e-12)
    assert FLAT[algorithm](nbytes, n).reduced >= (n - 1) / n * nbytes * (1 - 1e-12)


@given(st.sampled_from(["ring", "tree"]), SIZES, RANKS)
def test_a_rank_more_or_a_byte_more_never_costs_less(algorithm, nbytes, n):
    fewer, more, larger = (FLAT[algorithm](*case) for case in ((nbytes, n), (nbytes, n + 1), (nbytes + 1, n)))
    assert more.messages >= fewer.messages and more.moved >= fewer.moved and more.reduced >= fewer.reduced
    assert larger.messages == fewer.messages and larger.moved >= fewer.moved


@given(st.sampled_from(["recursive_doubling", "rabenseifner"]), SIZES, st.integers(0, 16))
def test_powers_of_two_cost_less_than_what_is_folded_onto_them(algorithm, nbytes, power):
    here, next_one, between = (FLAT[algorithm](nbytes, n) for n in (2**power, 2 ** (power + 1), 2**power + 1))
    assert here.moved <= next_one.moved and here.messages <= next_one.messages
    if power:
        assert between.moved == here.moved + 2 * nbytes and between.messages == here.messages + 2


def test_ranks_of_a_host_share_its_link_unless_they_form_a_ring():
    assert formulas.shared("ring", 100, 8, 4) == formulas.ring(100, 8)
    assert formulas.shared("recursive_doubling", 100, 8, 4).moved == 4 * formulas.recursive_doubling(100, 8).moved


def test_hierarchical_moves_between_hosts_what_a_ring_of_hosts_moves():
    inside, between = formulas.hierarchical(100, 8, 4)
    assert inside == formulas.ring(100, 4)
    assert between.messages == 2 and between.moved == pytest.approx(formulas.ring(100, 2).moved)
    assert between.reduced == pytest.approx(formulas.ring(25, 2).reduced)
    assert formulas.hierarchical(100, 4, 4) == (formulas.ring(100, 4), Terms())
    assert formulas.hierarchical(100, 9, 4) == formulas.hierarchical(100, 12, 4)


@given(SIZES, st.integers(2, 5000), st.integers(1, 16))
def test_hierarchical_never_beats_the_bound_of_its_hosts(nbytes, n, ppn):
    hosts = -(-n // ppn)
    _, between = formulas.hierarchical(nbytes, n, ppn)
    assert between.moved >= 2 * (hosts - 1) / hosts * nbytes * (1 - 1e-9)
