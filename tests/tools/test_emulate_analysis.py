"""What is read from an emulation's samples: bandwidth, percentiles, bands, ranks, outliers."""

import json
import math

import numpy as np
import pytest
from emulate_results import from_sizes, made, results, sample

from hvdkit.common import json_files
from hvdkit.common.allreduce import bus_factor
from hvdkit.errors import DataError, InvalidArgumentError
from hvdkit.measure.emulate import analysis
from hvdkit.measure.emulate.analysis import analyse, page

# Bandwidth


@pytest.mark.parametrize(
    ("collective", "factor"),
    [("allreduce", 1.5), ("reduce_scatter_all_gather", 1.5), ("all_to_all", 0.75), ("broadcast", 1)],
)
def test_bus_factors_are_those_of_nccl_tests(collective, factor):
    assert bus_factor(collective, 4) == factor


def test_one_rank_carries_nothing():
    assert bus_factor("allreduce", 1) == 0
    assert analyse(made({400: 0.1}, ranks=1)).overall.busbw_bytes_per_s.value == 0


def test_an_unknown_collective_is_refused():
    with pytest.raises(InvalidArgumentError, match="gossip"):
        bus_factor("gossip", 4)


def test_bandwidth_is_of_the_transfer_not_of_the_wait_for_late_ranks():
    one = sample(0, 0, 4_000_000, [0.5, 0.1, 0.1, 0.1], skew=0.4, transfer=0.1)
    row = analyse(results(from_sizes([4_000_000]), [one])).rows[0]
    assert row.algbw_bytes_per_s.value == pytest.approx(4e7) and row.busbw_bytes_per_s.value == pytest.approx(6e7)
    assert (row.max_s, row.skew_s, row.transfer_s.value) == (0.5, 0.4, 0.1)


def test_all_together_bandwidth_is_bytes_by_time():
    found = analyse(made({400: 0.001, 4_000_000: 0.1}))
    assert found.overall.algbw_bytes_per_s.value == pytest.approx(4_000_400 / (0.9 * 0.101))
    assert found.overall.nbytes is None and found.overall.per_step == 2


def test_a_transfer_of_no_time_has_no_bandwidth():
    row = analyse(results(from_sizes([4]), [sample(0, 0, 4, [0.1, 0.1], transfer=0.0)])).rows[0]
    assert row.algbw_bytes_per_s is None and row.busbw_bytes_per_s is None


# Sizes, steps, percentiles


def test_each_size_has_a_row_the_smallest_first():
    found = analyse(made({803840: 0.02, 131584: 0.004, 33024: 0.002, 2600: 0.001}))
    assert [row.nbytes for row in found.rows] == [2600, 33024, 131584, 803840]
    assert [row.count for row in found.rows] == [650, 8256, 32896, 200960]
    assert {row.dtype for row in found.rows} == {"float32"} and found.trials == 8
    assert found.rows[-1].p50_s.value == pytest.approx(0.02)


def test_equal_sizes_of_a_step_share_a_row():
    steps = from_sizes([40, 40, 80])
    found = analyse(results(steps, [sample(t, i, s, [0.1, 0.2]) for t in range(3) for i, s in enumerate((40, 40, 80))]))
    assert [(row.nbytes, row.per_step, row.samples) for row in found.rows] == [(40, 2, 6), (80, 1, 3)]


def test_a_step_is_the_sum_of_its_delays_and_only_complete_ones_count():
    steps = from_sizes([40, 80])
    samples = [sample(0, 0, 40, [0.1]), sample(0, 1, 80, [0.3]), sample(1, 0, 40, [0.1])]
    assert analyse(results(steps, samples)).step.max_s == pytest.approx(0.4)
    assert analyse(results(steps, samples)).step.samples == 1
    assert analyse(results(steps, samples[2:])).step is None


@pytest.mark.parametrize(("count", "known"), [(1, 1), (9, 1), (10, 2), (99, 2), (100, 3), (999, 3), (1000, 4)], ids=str)
def test_percentiles_are_given_only_where_the_sample_supports_them(count, known):
    found = analyse(made({40: 0.1}, trials=count)).overall
    given = [found.p50_s, found.p90_s, found.p99_s, found.p999_s]
    assert [one is not None for one in given] == [True] * known + [False] * (4 - known)


def test_percentiles_are_those_of_the_sample():
    samples = [sample(t, 0, 40, [float(t)]) for t in range(1001)]
    found = analyse(results(from_sizes([40]), samples)).rows[0]
    assert (found.p50_s.value, found.p90_s, found.p99_s, found.p999_s) == (500, 900, 990, pytest.approx(999))
    assert (found.samples, found.max_s) == (1001, 1000)


def test_what_is_left_out_is_said():
    notes = " ".join(analyse(made({40: 0.1}, trials=99)).notes)
    assert "p99 needs 100, p99.9 needs 1000; some size has 99" in notes and "p90" not in notes
    assert "Left out" not in " ".join(analyse(made({40: 0.1}, trials=1000)).notes)


def test_nothing_measured_is_an_error():
    with pytest.raises(DataError, match="no sample"):
        analyse(results(from_sizes([4]), []))


# The distribution and its band


def test_the_band_holds_the_true_distribution_as_often_as_it_says():
    assert analysis.band(4) == pytest.approx(math.sqrt(math.log(2 / 0.05) / 8))  # Massart
    rng, held = np.random.default_rng(1), 0
    for _ in range(400):
        values, shares = np.sort(rng.random(50)), np.arange(1, 51) / 50
        apart = max((shares - values).max(), (values - (shares - 1 / 50)).max())
        held += apart <= analysis.band(50)
    assert 0.93 <= held / 400 <= 0.985


# Intervals


def test_the_same_samples_give_the_same_numbers():
    assert analyse(made({40: 0.1}, noise=0.3)) == analyse(made({40: 0.1}, noise=0.3))


# Ranks and outliers


def test_ranks_are_told_apart():
    steps = from_sizes([40])
    samples = [sample(t, 0, 40, [0.3, 0.3, 0.1] if t else [0.1, 0.2, 0.3], skew=0.2) for t in range(4)]
    ranks = analyse(results(steps, samples, ranks=3)).ranks
    assert [one.slowest for one in ranks] == [0.75, 0, 0.25]
    assert [one.latest for one in ranks] == [0.25, 0, 0.75]


def test_waiting_for_a_late_rank_is_said_with_its_number():
    steps = from_sizes([40])
    samples = [sample(t, 0, 40, [0.3, 0.3, 0.01], skew=0.29) for t in range(9)]
    (note,) = [note for note in analyse(results(steps, samples, ranks=3)).notes if "waiting for late ranks" in note]
    assert "rank 2 comes last most often, in 100%" in note
    assert not any("waiting" in note for note in analyse(made({40: 0.1})).notes)


def test_the_longest_is_named_with_trial_and_ranks():
    steps = from_sizes([40, 80], names=["fc2", "fc1"])
    samples = [sample(t, i, s, [0.020 + 0.0001 * t, 0.02]) for t in range(20) for i, s in enumerate((40, 80))]
    samples[20] = sample(10, 0, 40, [12.0, 0.01], skew=11.9)
    longest = analyse(results(steps, samples, ranks=2)).longest
    assert (longest.trial, longest.index, longest.slowest_rank, longest.skew_s) == (10, 0, 0, 11.9)


@pytest.mark.parametrize(("collective", "said"), [("allreduce", True), ("broadcast", False)])
def test_who_came_last_is_not_said_of_a_broadcast_whose_root_waits_for_nobody(collective, said):
    samples = [sample(t, 0, 40, [0.3, 0.3, 0.01], skew=0.29) for t in range(9)]
    found = results(from_sizes([40]), samples, ranks=3, collective=collective)
    text = page(found, analyse(found))
    words = " ".join(map(str, [*text.parts[1:], *text.notes]))
    assert all((phrase in words) is said for phrase in ("comes last", "came last", "waiting for late ranks"))


def test_unchecked_results_are_said_to_be_so():
    assert any("not checked" in note for note in analyse(made({40: 0.1}, check=False)).notes)
    assert not any("not checked" in note for note in analyse(made({40: 0.1})).notes)


def test_what_the_run_noted_is_kept():
    assert analyse(made({40: 0.1}, notes=["Interrupted after 3 of 8 trials."])).notes[0].startswith("Interrupted")


def test_for_a_program_names_are_those_of_nccl_tests_and_units_seconds_and_bytes():
    value = json.loads(json_files.encode(analyse(made({4_000_000: 0.1}))))
    assert list(value)[:3] == ["hvdkit", "kind", "schema"] and value["kind"] == "emulate-summary"
    (row,) = value["rows"]
    assert (row["size"], row["count"], row["type"]) == (4_000_000, 1_000_000, "float32")
    assert row["p50_s"]["value"] == pytest.approx(0.1)
    rates = row["algbw_bytes_per_s"]["value"], row["busbw_bytes_per_s"]["value"]
    assert rates == (pytest.approx(4e6 / 0.09), pytest.approx(1.5 * 4e6 / 0.09))
    assert row["p99_s"] is None


# Collectives of a step that overlap


def test_a_step_whose_collectives_overlap_takes_as_long_as_the_longest():
    steps = from_sizes([40, 80])
    samples = [sample(t, i, s, [0.1 + 0.2 * i]) for t in range(3) for i, s in enumerate((40, 80))]
    found = analyse(results(steps, samples, fusion=True))
    assert found.step.max_s == pytest.approx(0.3)
    assert found.overall.algbw_bytes_per_s.value == pytest.approx(120 / 0.3)
    apart = analyse(results(steps, samples, fusion=False))
    assert apart.step.max_s == pytest.approx(0.4) and apart.overall.algbw_bytes_per_s.value == pytest.approx(120 / 0.4)


def test_collectives_that_overlap_are_not_independent_samples():
    steps = from_sizes([4 * size for size in range(1, 11)])
    samples = [sample(t, i, 4 * (i + 1), [0.1 + t]) for t in range(10) for i in range(10)]
    fused, apart = (analyse(results(steps, samples, fusion=fusion, ranks=1)) for fusion in (True, False))
    assert fused.cdf_band == pytest.approx(math.sqrt(math.log(40) / 20)) and apart.cdf_band < fused.cdf_band / 3
    assert fused.overall.p99_s is None and apart.overall.p99_s is not None
    assert fused.overall.p50_s.low is None and apart.overall.p50_s.low is not None
