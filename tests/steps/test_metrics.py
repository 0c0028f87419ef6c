"""Metrics averaged over ranks, and what the root does for everybody."""

import pytest

from hvdkit import AgreementError, CheckpointError, InvalidArgumentError
from hvdkit.steps.metrics import means, names_table, require_same_names, sums_and_counts
from hvdkit.steps.root import on_root


def test_numbers_count_once_and_pairs_by_their_count():
    pairs = sums_and_counts({"loss": 2, "accuracy": (3, 10)})
    assert pairs == {"accuracy": (3.0, 10.0), "loss": (2.0, 1.0)}
    assert means(pairs, [(6.0, 20.0), (5.0, 2.0)], 2) == {"accuracy": 0.3, "loss": 2.5}


@pytest.mark.parametrize("value", ["high", None, (1, 2, 3), (1, -1), (1, float("nan"))])
def test_what_is_no_metric_is_named(value):
    with pytest.raises(InvalidArgumentError, match="metric 'loss' must"):
        sums_and_counts({"loss": value})


def test_nothing_counted_is_an_error():
    with pytest.raises(InvalidArgumentError, match="total count of 0 over all 4 ranks"):
        means({"accuracy": (0.0, 0.0)}, [(0.0, 0.0)], 4)


def test_other_names_on_another_rank_are_an_error():
    mine, theirs = sums_and_counts({"loss": 1}), sums_and_counts({"lost": 1})
    require_same_names([names_table(mine)] * 2, mine)
    with pytest.raises(AgreementError, match=r"different metrics .*this rank gives loss"):
        require_same_names([names_table(mine), names_table(theirs)], mine)


def test_the_roots_result_and_error_reach_every_rank():
    wire = []
    assert on_root(True, lambda: 7, lambda outcome: wire.append(outcome) or outcome) == 7
    assert on_root(False, lambda: pytest.fail("only the root acts"), lambda outcome: wire[0]) == 7

    def fail():
        raise CheckpointError("full")

    with pytest.raises(CheckpointError, match="full"):
        on_root(True, fail, lambda outcome: wire.append(outcome) or outcome)
    with pytest.raises(CheckpointError, match="full"):
        on_root(False, fail, lambda outcome: wire[1])
