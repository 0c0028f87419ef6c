"""What an allreduce costs: formulas against counts by hand, and what is fitted against parameters that are known."""

import dataclasses
import functools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from plan_scale_measured import ALPHA, BETA, OVERHEAD, SIZES, results, seconds

from hvdkit.common import json_files
from hvdkit.errors import DataError, InvalidArgumentError
from hvdkit.measure.emulate.results import EmulateResults
from hvdkit.measure.plan import network as model

RANKS = st.integers(1, 100_000)
BYTES = st.integers(1, 1 << 40)


@pytest.mark.parametrize(("n", "messages", "moved"), [(1, 0, 0), (2, 2, 100), (4, 6, 150), (5, 8, 160)])
def test_a_ring_is_that_of_the_literature(n, messages, moved):
    assert (model.messages(n), model.moved(100, n)) == (messages, moved)


@given(BYTES, RANKS)
def test_a_rank_more_or_a_byte_more_never_costs_less(nbytes, n):
    assert model.messages(n + 1) >= model.messages(n)
    assert model.moved(nbytes, n + 1) >= model.moved(nbytes, n) and model.moved(nbytes + 1, n) >= model.moved(nbytes, n)


def allreduce_s(costs, nbytes, ranks):
    """The seconds to be expected, with their interval."""
    return model.estimated(costs.draws_s(nbytes, ranks))


# Fitted

EVERYWHERE = [1, 2, 3, 4, 5, 8, 100, 1023, 1024, 100_000]


@functools.cache
def fitted(*ranks, **how):
    return model.fit([results(n, **how) for n in ranks])


def test_known_parameters_come_back():
    parameters = fitted(2, 3).network.parameters()
    for name, true in (("overhead_s", OVERHEAD), ("alpha_s", ALPHA), ("beta_s_per_byte", BETA)):
        assert parameters[name].low <= true <= parameters[name].high, name
    assert parameters["beta_s_per_byte"].value == pytest.approx(BETA, rel=0.02)


def test_the_intervals_of_parameters_hold_what_they_say():
    held = dict.fromkeys(("overhead_s", "alpha_s", "beta_s_per_byte"), 0)
    true = {"overhead_s": OVERHEAD, "alpha_s": ALPHA, "beta_s_per_byte": BETA}
    for seed in range(8):
        parameters = fitted(2, 3, 4, seed=seed).network.parameters()
        for name in held:
            held[name] += parameters[name].low <= true[name] <= parameters[name].high
    assert min(held.values()) >= 6, held


def test_what_disturbs_whole_sizes_widens_the_intervals():
    disturbed = fitted(2, 3, 4, noise=1e-4, spoil=lambda rng, times: times * np.exp(rng.normal(0, 0.1)))
    beta = disturbed.network.parameters()["beta_s_per_byte"]
    assert beta.low <= BETA <= beta.high and beta.high - beta.low > 0.03 * BETA


def test_how_far_whole_sizes_are_off_the_formula_is_in_the_interval_of_a_new_one():
    many = fitted(2, 3, 4, 5, 6, 8, noise=1e-4, spoil=lambda rng, times: times * np.exp(rng.normal(0, 0.2)))
    predicted = allreduce_s(many, 2**20, 4)
    assert predicted.low < 0.85 * predicted.value and predicted.high > 1.15 * predicted.value


@pytest.mark.parametrize("nbytes", SIZES)
def test_two_and_three_ranks_predict_four(nbytes):
    costs = fitted(2, 3)
    for n in (4, 64, 1000):
        predicted = allreduce_s(costs, nbytes, n)
        assert predicted.value == pytest.approx(seconds(nbytes, n), rel=0.1)
        assert predicted.low < predicted.value < predicted.high


def test_prediction_intervals_hold_new_medians():
    held = total = 0
    for seed in range(6):
        costs = fitted(2, 3, seed=seed)
        for nbytes in SIZES:
            predicted = allreduce_s(costs, nbytes, 4)
            held += predicted.low <= seconds(nbytes, 4) <= predicted.high
            total += 1
    assert held / total >= 0.85


def test_outliers_do_not_move_it():
    def spoil(rng, times):
        return np.where(rng.random(len(times)) < 0.15, times * 50, times)

    clean, dirty = fitted(2, 3), fitted(2, 3, spoil=spoil)
    for nbytes in SIZES:
        assert allreduce_s(dirty, nbytes, 4).value == pytest.approx(allreduce_s(clean, nbytes, 4).value, rel=0.05)


@pytest.mark.parametrize("factor", [4, 0.2])
def test_a_size_that_was_disturbed_throughout_does_not_move_it(factor):
    disturbed = results(3)
    for index, sample in enumerate(disturbed.samples):
        if sample.nbytes == 2**19:
            disturbed.samples[index] = replace(sample, transfer_s=factor * sample.transfer_s)
    costs = model.fit([results(2), disturbed, results(4)])
    assert allreduce_s(costs, 2**24, 8).value == pytest.approx(seconds(2**24, 8), rel=0.05)
    assert allreduce_s(costs, 2**19, 8).value == pytest.approx(seconds(2**19, 8), rel=0.15)


@pytest.mark.parametrize("algorithm", model.ALGORITHMS)
def test_how_a_library_s_messages_grow_is_found(algorithm):
    costs = fitted(2, 4, 8, known=False, noise=0.02, algorithm=algorithm)
    assert (costs.network.algorithm, costs.network.rival) == (algorithm, None)
    for nbytes in (2**16, 2**20, 2**24):
        true, predicted = seconds(nbytes, 1024, algorithm=algorithm), allreduce_s(costs, nbytes, 1024)
        assert predicted.value == pytest.approx(true, rel=0.1) and predicted.low <= true <= predicted.high


@pytest.mark.parametrize("algorithm", model.ALGORITHMS)
def test_what_two_and_three_ranks_cannot_tell_is_in_the_interval_and_said(algorithm):
    costs = fitted(2, 3, known=False, algorithm=algorithm)
    assert costs.network.rival is not None and any("the intervals hold both" in note for note in costs.notes)
    for nbytes in (2**16, 2**24):
        predicted = allreduce_s(costs, nbytes, 1024)
        assert predicted.low <= seconds(nbytes, 1024, algorithm=algorithm) <= predicted.high


def test_a_byte_that_costs_more_beyond_a_burst_is_found():
    burst = 1 << 20

    def limited(nbytes, n):
        moved = model.moved(nbytes, n)
        return OVERHEAD + 1e-9 * min(moved, burst) + 8e-9 * max(0.0, moved - burst)

    costs = fitted(2, 3, time=limited, noise=0.01)
    assert len(costs.network.knots) > 1 and any("changes with the size: " in note for note in costs.notes)
    errors = [allreduce_s(costs, nbytes, 4).value / limited(nbytes, 4) - 1 for nbytes in SIZES]
    assert np.median(np.abs(errors)) < 0.1
    for nbytes in SIZES:
        assert allreduce_s(costs, nbytes, 4).value >= bound_s(costs.network, nbytes, 4) * (1 - 1e-9)


def bound_s(level, nbytes, n):
    """The least that any flat allreduce takes: 2(n-1)/n * nbytes at the rate of the fastest piece."""
    return model.moved(nbytes, n) * min(slope for _, slope, _ in level.pieces())


def stepped(nbytes, n):
    """Half a megabyte passes at once; what is more waits for the link, and so does its first half megabyte."""
    moved = model.moved(nbytes, n)
    return OVERHEAD + (1e-9 * moved if moved < 1 << 19 else 4e-3 + 8e-9 * (moved - (1 << 19)))


def test_a_step_in_the_cost_of_bytes_is_found_and_the_slope_behind_it_is_not_bent():
    costs = fitted(2, 3, time=stepped, noise=0.01)
    (_, _, none), (begins, slope, step) = costs.network.pieces()
    assert none == 0 and (1 << 18) < begins < (1 << 20)
    assert slope == pytest.approx(8e-9, rel=0.03) and step > 1e-3
    for nbytes in (1 << 16, 1 << 22, 1 << 24):
        assert allreduce_s(costs, nbytes, 4).value == pytest.approx(stepped(nbytes, 4), rel=0.1)
    assert any(" Gbit/s from 0 B on" in note and note.endswith(" ms once.") for note in costs.notes)
    known = costs.network.as_json()["pieces"]
    assert [one["s_once"] for one in known] == [0, step]


def test_one_rank_takes_no_time():
    costs = fitted(2, 3)
    assert allreduce_s(costs, 1 << 24, 1).value == 0
    assert allreduce_s(costs, 0, 8).value == 0
    assert allreduce_s(model.CostModel(ppn=4).with_network(1e-6, 1e9), 1 << 20, 1).value == 0


@pytest.mark.parametrize("how", [{}, {"known": False}, {"noise": 0.3}], ids=str)
def test_it_grows_with_ranks_and_bytes_and_keeps_the_bound(how):
    costs = fitted(2, 3, **how)
    for nbytes in (1, 1000, *SIZES, 1 << 33):
        times = [allreduce_s(costs, nbytes, n).value for n in EVERYWHERE]
        assert times == sorted(times)
        for n, taken in zip(EVERYWHERE, times, strict=True):
            assert taken >= bound_s(costs.network, nbytes, n) * (1 - 1e-9)
    for n in EVERYWHERE:
        times = [allreduce_s(costs, nbytes, n).value for nbytes in (0, 1, 1000, *SIZES, 1 << 33)]
        assert times == sorted(times) and min(times) >= 0


def test_the_bound_is_that_of_the_link():
    costs = model.CostModel().with_network(1e-6, 1e9)
    assert bound_s(costs.network, 1 << 30, 512) == pytest.approx(2 * 511 / 512 * (1 << 30) / 1e9)
    assert allreduce_s(costs, 1 << 30, 512).value == pytest.approx(
        bound_s(costs.network, 1 << 30, 512) + 2 * 511 * 1e-6
    )
    assert allreduce_s(costs, 1 << 30, 512).low is None


# Levels


def test_shared_memory_is_never_taken_for_a_network():
    costs = fitted(2, 3, hosts=1)
    assert allreduce_s(costs, 1 << 20, 3).value > 0
    assert costs.why_not(3) is None and "--alpha-us and --bandwidth-gbit" in costs.why_not(4)
    roomy = model.fit([results(n, hosts=1) for n in (2, 3)], ppn=16)
    assert allreduce_s(roomy, 1 << 20, 16).value > allreduce_s(roomy, 1 << 20, 3).value
    assert "17 ranks need 2 hosts of 16" in dataclasses.replace(roomy, cores=None).why_not(17)


def test_a_network_that_is_given_is_used_beyond_the_host():
    host = model.fit([results(n, hosts=1, alpha=1e-6, beta=1e-10) for n in (2, 3)])
    both = host.with_network(20e-6, 1e9)
    assert allreduce_s(both, 1 << 20, 3) == allreduce_s(host, 1 << 20, 3)
    expected = OVERHEAD + 20e-6 * 6 + 1.5 * (1 << 20) / 1e9
    assert allreduce_s(both, 1 << 20, 4).value == pytest.approx(expected, rel=0.1)


def test_one_number_of_ranks_is_told_to_be_too_few():
    costs = fitted(3)
    assert "overhead_s" not in costs.network.parameters()
    assert any("one number of ranks" in note for note in costs.notes)
    assert allreduce_s(costs, 1 << 20, 3).value == pytest.approx(seconds(1 << 20, 3), rel=0.05)


def test_two_numbers_of_ranks_are_not_called_one_where_they_tell_no_overhead():
    slow = {"overhead": 100 * OVERHEAD, "alpha": 100 * ALPHA, "beta": 100 * BETA}
    costs = model.fit([results(2), results(3, **slow)])  # of three ranks only that they wait for a core
    assert "overhead_s" not in costs.network.parameters()
    assert not any("one number of ranks" in note for note in costs.notes)
    assert any("do not tell what a call costs" in note for note in costs.notes)


@pytest.mark.parametrize(
    ("draws", "low", "high"),
    [((2, 3), 0, 3), ((0.2, 1.0), 0.2, 1.4), ((0.9, 1.8), 0.6, 1.8), ((0.8, 1.3), 0.8, 1.3), ((-9, 1.5), 0, 5.9)],
    ids=str,
)
def test_an_interval_is_around_its_value(draws, low, high):
    found = model.estimated(np.array([1.0, *np.repeat(draws, 100)]))
    assert (found.low, found.high) == pytest.approx((low, high), rel=0.2)
    assert found.low < found.value < found.high
    assert model.estimated(np.full(101, 2.0)).low is None


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ([], "no allreduce"),
        ([results(1)], "no allreduce"),
        ([results(2, sizes=(4096,))], "one size"),
        ([results(2, asked={"collective": "broadcast"})], "'broadcast'"),
        ([results(2), results(3, asked={"engine": "torch"})], "different engines, ring and torch"),
        ([results(2, asked={"fusion": True})], "--fusion off"),
    ],
    ids=["none", "alone", "one size", "broadcast", "engines", "fused"],
)
def test_measurements_that_make_no_model_are_refused(measured, said):
    with pytest.raises(InvalidArgumentError, match=said):
        model.fit(measured)


@pytest.mark.parametrize("time", ["-1.0", "NaN", "1e999"])
def test_times_that_cannot_be_are_refused(tmp_path, time):
    path = tmp_path / "r.json"
    json_files.write(path, results(2))
    path.write_text(re.sub(r'"transfer_s": [^,]*', f'"transfer_s": {time}', path.read_text(), count=1))
    with pytest.raises(DataError, match=r"r\.json is not a file of 'hvdkit emulate'"):
        json_files.read(path, EmulateResults)


def test_more_ranks_than_there_can_be_are_refused():
    assert "1000000" in model.CostModel().with_network(1e-6, 1e9).why_not(10**7)


def test_the_slower_level_sets_the_pace():
    slow = model.fit([results(n, hosts=1, trials=5, alpha=5e-3, beta=80e-9) for n in (2, 4)])
    wide, narrow = slow.with_network(5e-6, 1e10), slow.with_network(5e-6, 1e5)
    for nbytes in (2**16, 2**24):
        inside = allreduce_s(slow, nbytes, 4).value
        behind = [allreduce_s(one, nbytes, 8).value for one in (wide, narrow)]
        assert inside <= behind[0] < behind[1]
        assert behind[1] == pytest.approx(narrow.network.seconds(nbytes, 8)[0])
