"""Step 3: scaling rules and warmup."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit import InvalidArgumentError, Topology
from hvdkit.steps.learning_rate import scale_factor, scale_lr, warmup_multiplier, warmup_steps


@pytest.mark.parametrize(("rule", "rate"), [("linear", 0.08), ("sqrt", 0.01 * math.sqrt(8)), ("none", 0.01)])
def test_rules(rule, rate):
    assert scale_lr(0.01, Topology(3, 8), rule) == pytest.approx(rate)


def test_a_rate_of_numpy_is_a_plain_number():
    assert repr(scale_lr(np.float32(0.5), Topology(0, 2))) == "1.0"


@pytest.mark.parametrize("base", [0, -0.1, math.nan, math.inf, "0.1", None])
def test_a_rate_that_cannot_be_is_refused(base):
    with pytest.raises(InvalidArgumentError, match="base_lr must be a positive, finite number"):
        scale_lr(base, Topology(0, 2))


def test_an_unknown_rule_lists_the_known_ones():
    with pytest.raises(InvalidArgumentError, match="linear, sqrt, none, got 'cubic'"):
        scale_lr(0.1, Topology(0, 2), "cubic")


@pytest.mark.parametrize("per_epoch", [1, 14, 1000])
def test_the_tutorials_epoch_ends(per_epoch):
    """8 workers, base 0.01, 3 epochs: 0.0333, 0.0567, 0.0800."""
    length = warmup_steps(3, per_epoch)
    rates = [0.08 * warmup_multiplier(epoch * per_epoch, length, scale_factor(8)) for epoch in (0, 1, 2, 3, 4)]
    assert [round(rate, 4) for rate in rates] == [0.01, 0.0333, 0.0567, 0.08, 0.08]


@given(
    size=st.integers(1, 4096),
    epochs=st.floats(0, 20),
    per_epoch=st.integers(1, 500),
    rule=st.sampled_from(["linear", "sqrt"]),
)
def test_warmup_is_monotone_and_continuous_from_base_to_scaled(size, epochs, per_epoch, rule):
    base, factor, length = 0.01, scale_factor(size, rule), warmup_steps(epochs, per_epoch)
    rates = [base * factor * warmup_multiplier(step, length, factor) for step in range(length + 3)]
    if length > 0:
        assert rates[0] == pytest.approx(base)
    assert rates[length:] == pytest.approx([base * factor] * 3)
    largest_step = base * (factor - 1) / max(length, 1)
    for earlier, later in itertools.pairwise(rates):
        assert -1e-15 <= later - earlier <= largest_step * (1 + 1e-6) + 1e-15


@pytest.mark.parametrize(("epochs", "per_epoch"), [(-1, 10), (math.nan, 10), (1, 0), (1, 2.5)])
def test_warmup_lengths_that_cannot_be_are_refused(epochs, per_epoch):
    with pytest.raises(InvalidArgumentError):
        warmup_steps(epochs, per_epoch)


@pytest.mark.parametrize("arguments", [(-1, 10, 2.0), (0, -1, 2.0), (0, 10, 0.5), (0, 10, math.nan)])
def test_warmup_multiplier_refuses_what_cannot_be(arguments):
    with pytest.raises(InvalidArgumentError):
        warmup_multiplier(*arguments)
