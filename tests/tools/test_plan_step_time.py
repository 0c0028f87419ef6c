"""From the cost of an allreduce to a step: what backward hides, who keeps whom waiting, what is left of the speed."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_scale_measured import results

from hvdkit.measure.emulate.plan import Collective, ReplayPlan
from hvdkit.measure.plan import network as model
from hvdkit.measure.plan import scale
from hvdkit.measure.plan.scale import predict
from hvdkit.measure.plan.step_time import Delays, Fusion, Gradient, Workload, exchange, gradients, measured

NONE = measured([])
AT_ONCE = Fusion(threshold=0, cycle_s=0)


def plan(*sizes, gaps=None, dtype="float32"):
    gaps = gaps or [0.0] * len(sizes)
    item = {"float32": 4, "float64": 8, "int32": 4}[dtype]
    found = (
        Collective(f"g{i}", size // item, dtype, gap) for i, (size, gap) in enumerate(zip(sizes, gaps, strict=True))
    )
    return ReplayPlan(tuple(found))


# Overlap


def test_gradients_become_ready_in_the_order_of_the_plan():
    assert [one.ready for one in gradients(plan(4, 4, 4, 4))] == [0.25, 0.5, 0.75, 1.0]
    assert [one.ready for one in gradients(plan(4, 4, gaps=[3.0, 1.0]))] == [0.75, 1.0]


def test_half_precision_halves_float32_quarters_float64_and_leaves_integers():
    for dtype, factor in (("float32", 0.5), ("float64", 0.25), ("int32", 1.0)):
        assert gradients(plan(800, dtype=dtype), 2)[0].nbytes == 800 * factor
    assert gradients(plan(800))[0].nbytes == 800


def test_what_fits_behind_backward_is_hidden():
    grads = gradients(plan(1000, 1000))  # ready at 5 and 10 s; 2 s each
    found = exchange(grads, 10.0, AT_ONCE, lambda nbytes: nbytes / 500)
    assert (found.buckets, found.busy_s, found.exposed_s) == ((1000, 1000), 4.0, 2.0)
    slow = exchange(grads, 10.0, AT_ONCE, lambda nbytes: nbytes / 100)  # 10 s each: 5..15, 15..25
    assert slow.exposed_s == 15.0
    assert exchange(grads, 0.0, AT_ONCE, lambda nbytes: nbytes / 500).exposed_s == 4.0


def test_buckets_fill_up_to_the_threshold_in_order():
    grads = [Gradient(0.0, size) for size in (40, 40, 40, 300, 10)]
    found = exchange(grads, 1.0, Fusion(threshold=100, cycle_s=0), lambda nbytes: 1.0)
    assert found.buckets == (80, 40, 300, 10)
    assert exchange(grads, 1.0, Fusion(threshold=0, cycle_s=0), lambda nbytes: 1.0).buckets == (40, 40, 40, 300, 10)
    assert exchange(grads, 1.0, Fusion(threshold=1e9, cycle_s=0), lambda nbytes: 1.0).buckets == (430,)


def test_what_becomes_ready_while_a_bucket_is_sent_goes_together():
    grads = [Gradient(share, 10) for share in (0.1, 0.2, 0.3, 0.9)]
    found = exchange(grads, 10.0, Fusion(threshold=1e9, cycle_s=0), lambda nbytes: 4.0)
    assert found.buckets == (10, 20, 10)  # from 1 to 5, from 5 to 9, from 9 to 13
    assert found.exposed_s == pytest.approx(3.0)


def test_a_burst_that_a_link_lets_pass_is_let_pass_once():
    grads = [Gradient(share / 10, 100) for share in range(1, 11)]
    found = exchange(grads, 1.0, AT_ONCE, lambda nbytes: max(0.0, nbytes - 100) / 100)
    assert len(found.buckets) == 10 and found.busy_s == 9.0
    assert found.exposed_s == pytest.approx(0.1 + 9.0 - 1.0)


def test_a_gradient_waits_for_the_next_cycle():
    found = exchange([Gradient(0.55, 10)], 10.0, Fusion(1e9, cycle_s=2.0), lambda nbytes: 1.0)
    assert found.exposed_s == 0.0
    second = exchange([Gradient(0.1, 10), Gradient(0.55, 10)], 10.0, Fusion(1e9, cycle_s=5.0), lambda nbytes: 1.0)
    assert second.exposed_s == pytest.approx(1.0)  # cycles begin at 5 and at 10
    late = exchange([Gradient(1.0, 10)], 9.0, Fusion(1e9, cycle_s=2.0), lambda nbytes: 1.0)
    assert late.exposed_s == pytest.approx(2.0)  # a cycle begins at 10, and it takes until 11


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 10**8)), min_size=1, max_size=30),
    st.floats(0, 10), st.floats(0, 1e8), st.floats(0, 1), st.floats(1e-9, 1e-7),
)  # fmt: skip
def test_nothing_is_lost_and_no_more_is_exposed_than_there_is(sizes, backward_s, threshold, cycle_s, beta):
    grads = [
        Gradient(ready, nbytes) for ready, (_, nbytes) in zip(sorted(share for share, _ in sizes), sizes, strict=True)
    ]
    found = exchange(grads, backward_s, Fusion(threshold, cycle_s), lambda nbytes: 1e-3 + beta * nbytes)
    total = sum(one.nbytes for one in grads)
    assert sum(found.buckets) == pytest.approx(total)
    assert found.busy_s == pytest.approx(1e-3 * len(found.buckets) + beta * total)
    assert max(0.0, found.busy_s - backward_s) - 1e-6 <= found.exposed_s <= found.busy_s + cycle_s + 1e-6


# Stragglers


def test_the_expected_range_of_exponential_delays_comes_out():
    rng = np.random.default_rng(1)
    delays = Delays(4, np.ptp(rng.exponential(1.0, (4000, 4)), axis=1))
    for n in (2, 4, 16, 256, 4096):
        harmonic = float(np.sum(1 / np.arange(1, n)))  # the mean range of n exponential delays
        assert delays.expected_s(n) == pytest.approx(harmonic, rel=0.15), n
    assert delays.expected_s(1) == 0
    assert delays.expected_s(4) == pytest.approx(delays.skews.mean(), rel=0.03)


def test_the_wait_grows_with_the_ranks_and_says_when_it_is_extrapolated():
    delays = measured([results(3, trials=100, sizes=(4096, 8192))])
    waits = [delays.expected_s(n) for n in (1, 2, 3, 10, 100, 1000, 100_000)]
    assert waits == sorted(waits) and waits[-1] == pytest.approx(delays.skews.max())
    assert [delays.extrapolates(n) for n in (2, 100, 1000)] == [False, False, True]


def test_few_skews_are_not_continued():
    delays = Delays(2, np.array([1.0, 2.0, 4.0]))
    assert delays.expected_s(100_000) == pytest.approx(4.0)
    assert delays.expected_s(2) == pytest.approx(7 / 3, rel=0.01)


def test_of_a_step_the_largest_skew_counts_and_of_measurements_the_one_with_most_ranks():
    run = results(2, trials=3, sizes=(4096, 8192))
    largest = [max(one.skew_s for one in run.samples if one.trial == trial) for trial in range(3)]
    assert sorted(measured([run]).skews) == sorted(largest)
    assert measured([run, results(3, trials=7)]).ranks == 3
    assert len(measured([run, results(3, trials=7)]).skews) == 7
    assert measured([]).expected_s(8) == 0 and not measured([]).extrapolates(8)


# A step


def steps(ranks, costs=None, delays=NONE, **work):
    grads = work.pop("gradients", gradients(plan(*[4_000_000] * 25)))
    work = {"compute_s": 0.3, **work}
    return predict(costs or model.CostModel().with_network(10e-6, 1e9), delays, Workload(grads, **work), ranks)


def test_one_rank_is_fully_efficient():
    row = steps([1])[0]
    assert row.step.value == 0.3 and row.efficiency.value == 1.0
    assert row.communication.value == row.exposed.value == row.straggler.value == 0


def test_a_step_is_computation_exposed_communication_and_wait():
    delays = measured([results(3, trials=100, skew_s=1e-3)])
    for row in steps([2, 16, 512], delays=delays):
        grown = 1 + scale.GROWTH.value * math.log2(row.ranks)  # none of them was measured
        assert row.step.value == pytest.approx((0.3 + row.exposed.value + row.straggler.value) * grown)
        assert row.efficiency.value == pytest.approx(0.3 / row.step.value)
        assert 0 < row.exposed.value < row.communication.value
        assert row.straggler.low < row.straggler.value < row.straggler.high
        assert row.efficiency.low < row.efficiency.value < row.efficiency.high


def test_efficiency_falls_with_the_ranks():
    delays = measured([results(3, trials=100, skew_s=1e-3)])
    efficiency = [row.efficiency.value for row in steps([1, 2, 4, 64, 1024, 100_000], delays=delays)]
    assert efficiency == sorted(efficiency, reverse=True) and 0 < efficiency[-1] < efficiency[0] == 1


def test_what_ifs_do_what_they_say():
    base, (apart,) = steps([64])[0], steps([64], overlap=False)
    assert apart.exposed.value == pytest.approx(apart.communication.value)
    assert base.efficiency.value > apart.efficiency.value
    half = steps([64], gradients=gradients(plan(*[4_000_000] * 25), 2), overlap=False)[0]
    assert half.communication.value < 0.6 * apart.communication.value
    unfused = steps([64], fusion=Fusion(0, 1e-3), overlap=False)[0]
    assert unfused.buckets == 25 and apart.buckets == 1
    assert unfused.communication.value == pytest.approx(apart.communication.value + 24 * 126 * 10e-6)
    faster = steps([64], model.CostModel().with_network(10e-6, 1e10), overlap=False)[0]
    assert faster.communication.value == pytest.approx(126e-5 + (apart.communication.value - 126e-5) / 10)


def test_without_computation_only_communication_is_predicted():
    row = steps([8], compute_s=None)[0]
    assert row.communication.value > 0 and row.exposed is row.step is row.efficiency is None


def test_intervals_come_from_the_measurements():
    quiet, noisy = (model.fit([results(n, noise=noise) for n in (2, 3)]) for noise in (0.01, 0.2))
    widths = []
    for costs in (quiet, noisy):
        row = steps([3], costs, overlap=False)[0]  # measured: beyond that the error of published figures is in it
        assert row.step.low < row.step.value < row.step.high
        widths.append(row.step.high - row.step.low)
    assert widths[1] > 3 * widths[0]
