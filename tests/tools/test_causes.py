"""Causes: what is worth a sentence, and how it is said."""

from __future__ import annotations

import numpy as np
import pytest

from hvdkit.observe import lateness
from hvdkit.read.causes import Cause, by_cost


def _cause(kind: str, share: float, **other: object) -> Cause:
    return Cause(kind, 0.02 * share, share, f"It is {kind}.", "file: 1", "Mend it.", **other)  # type: ignore[arg-type]


def test_the_most_costly_comes_first_and_what_costs_little_is_not_said() -> None:
    found = by_cost([_cause("small", 0.019), _cause("input", 0.3), _cause("late", 0.5)])

    assert [cause.kind for cause in found] == ["late", "input"]


def test_a_cause_says_its_cost_per_step_or_once() -> None:
    assert _cause("input", 0.5).sentence() == "It is input. It costs 10.0 ms per step (50%)."
    assert _cause("setup", 0.5, per_step=False).sentence().endswith("It costs 10.0 ms once (50%).")


@pytest.mark.parametrize(
    ("ranks", "late", "blamed"),
    [
        (4, {2: 1.0}, (2,)),
        (64, {2: 1.0}, (2,)),
        (4, {1: 1.0, 2: 1.0}, (1, 2)),
        (16, dict.fromkeys(range(8), 1.0), tuple(range(8))),
        (4, {1: 0.1}, (1,)),
        (4, dict.fromkeys(range(4), 0.25), ()),
        (2, dict.fromkeys(range(2), 0.5), ()),
        (4, {}, ()),
    ],
    ids=["one", "one-of-many", "two", "half", "now-and-then", "each-in-turn", "two-in-turn", "nobody"],
)
def test_ranks_are_blamed_by_their_own_excess_and_not_by_how_often_they_are_last(
    ranks: int, late: dict[int, float], blamed: tuple[int, ...]
) -> None:
    """``late``: in which part of the steps each rank takes twice as long."""
    rng = np.random.default_rng(0)
    own = 1 + 0.1 * rng.uniform(size=(ranks, 200))
    for rank, part in late.items():
        own[rank] += rng.uniform(size=200) < part
    costs = lateness.costs(own)
    assert costs.sum() == pytest.approx((own.max(axis=0) - lateness.lower_median(own)).mean())
    assert lateness.to_blame(dict(enumerate(costs.tolist()))) == blamed


@pytest.mark.parametrize("steps", [0, 3])
def test_where_nothing_is_lost_it_is_in_no_step(steps: int) -> None:
    assert lateness.when(np.zeros(steps)) == lateness.When("steady", steps, steps, 0.0)


def test_a_rank_that_is_nearly_as_late_as_the_last_one_is_blamed_too() -> None:
    own = np.array([1.0, 2.0, 1.8, 1.0])[:, None] + np.zeros(50)
    assert lateness.to_blame(dict(enumerate(lateness.costs(own).tolist()))) == (1, 2)
