"""What is read from an emulation's samples: bandwidth, percentiles, bands, ranks, outliers, comparisons."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from emulate_results import ENVIRONMENT, from_sizes, made, results, sample
from msgspec.structs import replace

from hvdkit import cli
from hvdkit.common import intervals, json_files
from hvdkit.errors import DataError, InvalidArgumentError
from hvdkit.measure.emulate import analysis, spread
from hvdkit.measure.emulate import results as files
from hvdkit.measure.emulate.analysis import analyse, bus_factor


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")


# Bandwidth


@pytest.mark.parametrize(
    ("collective", "factor"),
    [
        ("allreduce", 1.5),
        ("all_reduce", 1.5),
        ("reduce_scatter+all_gather", 1.5),
        ("reduce_scatter_all_gather", 1.5),
        ("reduce-scatter", 0.75),
        ("all_gather", 0.75),
        ("all_to_all", 0.75),
        ("broadcast", 1),
    ],
)
def test_bus_factors_are_those_of_nccl_tests(collective, factor):
    assert bus_factor(collective, 4) == factor


def test_one_rank_carries_nothing():
    assert bus_factor("allreduce", 1) == 0
    assert analyse(made({400: 0.1}, ranks=1)).overall.busbw.value == 0


def test_an_unknown_collective_is_refused():
    with pytest.raises(InvalidArgumentError, match="gossip"):
        bus_factor("gossip", 4)


def test_bandwidth_is_of_the_transfer_not_of_the_wait_for_late_ranks():
    one = sample(0, 0, 4_000_000, [0.5, 0.1, 0.1, 0.1], skew=0.4, transfer=0.1)
    row = analyse(results(from_sizes([4_000_000]), [one])).rows[0]
    assert row.algbw.value == pytest.approx(4e7) and row.busbw.value == pytest.approx(6e7)
    assert (row.slowest.max, row.skew.max, row.transfer.max) == (0.5, 0.4, 0.1)


def test_all_together_bandwidth_is_bytes_by_time():
    found = analyse(made({400: 0.001, 4_000_000: 0.1}))
    assert found.overall.algbw.value == pytest.approx(4_000_400 / (0.9 * 0.101))
    assert found.overall.nbytes is None and found.overall.per_step == 2


def test_a_transfer_of_no_time_has_no_bandwidth():
    row = analyse(results(from_sizes([4]), [sample(0, 0, 4, [0.1, 0.1], transfer=0.0)])).rows[0]
    assert row.algbw is None and row.busbw is None


# Sizes, steps, percentiles


def test_each_size_has_a_row_the_smallest_first():
    found = analyse(made({803840: 0.02, 131584: 0.004, 33024: 0.002, 2600: 0.001}))
    assert [row.nbytes for row in found.rows] == [2600, 33024, 131584, 803840]
    assert [row.count for row in found.rows] == [650, 8256, 32896, 200960]
    assert {row.dtype for row in found.rows} == {"float32"} and found.trials == 8
    assert found.rows[-1].slowest.p50.value == pytest.approx(0.02)


def test_equal_sizes_of_a_step_share_a_row():
    steps = from_sizes([40, 40, 80])
    found = analyse(results(steps, [sample(t, i, s, [0.1, 0.2]) for t in range(3) for i, s in enumerate((40, 40, 80))]))
    assert [(row.nbytes, row.per_step, row.slowest.count) for row in found.rows] == [(40, 2, 6), (80, 1, 3)]


def test_a_step_is_the_sum_of_its_delays_and_only_complete_ones_count():
    steps = from_sizes([40, 80])
    samples = [sample(0, 0, 40, [0.1]), sample(0, 1, 80, [0.3]), sample(1, 0, 40, [0.1])]
    assert analyse(results(steps, samples)).step.max == pytest.approx(0.4)
    assert analyse(results(steps, samples)).step.count == 1
    assert analyse(results(steps, samples[2:])).step is None


@pytest.mark.parametrize(("count", "known"), [(1, 1), (9, 1), (10, 2), (99, 2), (100, 3), (999, 3), (1000, 4)], ids=str)
def test_percentiles_are_given_only_where_the_sample_supports_them(count, known):
    found = spread.times(np.linspace(1, 2, count), np.random.default_rng(0))
    given = [found.p50, found.p90, found.p99, found.p999]
    assert [one is not None for one in given] == [True] * known + [False] * (4 - known)


def test_percentiles_are_those_of_the_sample():
    found = spread.times(np.arange(1001.0), np.random.default_rng(0))
    assert (found.p50.value, found.p90, found.p99, found.p999) == (500, 900, 990, pytest.approx(999))
    assert (found.count, found.mean, found.min, found.max) == (1001, 500, 0, 1000)


def test_what_is_left_out_is_said():
    notes = " ".join(analyse(made({40: 0.1}, trials=99)).notes)
    assert "p99 needs 100, p99.9 needs 1000; some size has 99" in notes and "p90" not in notes
    assert "Left out" not in " ".join(analyse(made({40: 0.1}, trials=1000)).notes)


def test_nothing_measured_is_an_error():
    with pytest.raises(DataError, match="no sample"):
        analyse(results(from_sizes([4]), []))


# The distribution and its band


def test_the_band_is_that_of_massart():
    found = spread.distribution(np.array([3.0, 1.0, 2.0, 4.0]))
    assert found.band == pytest.approx(math.sqrt(math.log(2 / 0.05) / 8))
    assert list(found.values) == [1, 2, 3, 4] and list(found.shares) == [0.25, 0.5, 0.75, 1]
    assert found.low.min() == 0 and found.high.max() == 1


def test_the_band_holds_the_true_distribution_as_often_as_it_says():
    rng, held = np.random.default_rng(1), 0
    for _ in range(400):
        found = spread.distribution(rng.random(50))
        above = (found.shares - found.values).max()
        below = (found.values - (found.shares - 1 / 50)).max()
        held += max(above, below) <= found.band
    assert 0.93 <= held / 400 <= 0.985


# Intervals


@pytest.mark.parametrize("n", [1, 2, 5, 8, 31], ids=str)
def test_fast_resampling_has_the_distribution_of_plain_resampling(n):
    values = np.random.default_rng(2).random(n)
    fast = np.sort(intervals.resampled_medians(values, np.random.default_rng(3)))
    plain = np.sort(np.median(np.random.default_rng(4).choice(values, (intervals.RESAMPLES, n)), axis=1))
    points = np.unique(np.concatenate([fast, plain]))
    apart = np.searchsorted(fast, points, "right") / len(fast) - np.searchsorted(plain, points, "right") / len(plain)
    assert np.abs(apart).max() < 1.9 * math.sqrt(2 / len(fast))  # Kolmogorov-Smirnov, 0.1 %


def test_intervals_of_medians_hold_what_they_say():
    rng, held = np.random.default_rng(5), 0
    for _ in range(300):
        found = intervals.median(np.exp(rng.normal(0, 1, 40)), rng)
        held += found.low <= 1 <= found.high
    assert 0.9 <= held / 300 <= 0.995


def test_the_same_samples_give_the_same_numbers():
    assert analyse(made({40: 0.1}, noise=0.3)) == analyse(made({40: 0.1}, noise=0.3))


# Ranks and outliers


def test_ranks_are_told_apart():
    steps = from_sizes([40])
    samples = [sample(t, 0, 40, [0.3, 0.3, 0.1] if t else [0.1, 0.2, 0.3], skew=0.2) for t in range(4)]
    ranks = analyse(results(steps, samples, ranks=3)).ranks
    assert [one.slowest for one in ranks] == [0.75, 0, 0.25]
    assert [one.latest for one in ranks] == [0.25, 0, 0.75]
    assert ranks[1].own.max == 0.3


def test_waiting_for_a_late_rank_is_said_with_its_number():
    steps = from_sizes([40])
    samples = [sample(t, 0, 40, [0.3, 0.3, 0.01], skew=0.29) for t in range(9)]
    (note,) = [note for note in analyse(results(steps, samples, ranks=3)).notes if "waiting for late ranks" in note]
    assert "rank 2 comes last most often, in 100%" in note
    assert not any("waiting" in note for note in analyse(made({40: 0.1})).notes)


def test_outliers_are_named_with_trial_collective_and_rank():
    steps = from_sizes([40, 80], names=["fc2", "fc1"])
    samples = [sample(t, i, s, [0.020 + 0.0001 * t, 0.02]) for t in range(20) for i, s in enumerate((40, 80))]
    samples[7] = sample(3, 1, 80, [0.02, 4.0])
    samples[20] = sample(10, 0, 40, [12.0, 0.01], skew=11.9)
    first, second = analyse(results(steps, samples, ranks=2)).outliers
    assert (first.trial, first.name, first.nbytes, first.slowest_rank, first.latest_rank) == (10, "fc2", 40, 0, 1)
    assert (second.trial, second.name, second.index, second.slowest_rank, second.latest_rank) == (3, "fc1", 1, 1, None)
    assert first.times_median == pytest.approx(12 / 0.021, rel=0.01)


def test_the_rule_for_outliers_is_tukeys():
    values = np.array([1.0, 2, 3, 4, 5, 6, 7, 8, 9])
    assert spread.fence(values) == 7 + 3 * 4
    assert spread.fence(values[:7]) == math.inf
    assert "Tukey" in analysis.RULE


def test_few_samples_have_no_outliers_and_that_is_said():
    samples = [sample(t, 0, 40, [0.1 if t else 9.0]) for t in range(7)]
    found = analyse(results(from_sizes([40]), samples))
    assert found.outliers == () and any("No outlier" in note for note in found.notes)


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
    assert row["slowest_s"]["p50"]["value"] == pytest.approx(0.1)
    rates = row["algbw_bytes_per_s"]["value"], row["busbw_bytes_per_s"]["value"]
    assert rates == (pytest.approx(4e6 / 0.09), pytest.approx(1.5 * 4e6 / 0.09))
    assert row["slowest_s"]["p99"] is None


# compare


def write(name, *args, **kwargs):
    files.write(Path(name), made(*args, **kwargs), None)


def compared(*words):
    return cli.run(["emulate", "compare", "a.json", "b.json", *words])


@pytest.mark.parametrize(
    ("second", "noise", "status", "said"),
    [
        ({40: 0.1, 80: 0.2}, 0.02, 0, "No speed is below 0.95"),
        ({40: 0.1, 80: 0.3}, 0.02, 1, "80 bytes: speed"),
        ({40: 0.05, 80: 0.1}, 0.02, 0, "No speed is below 0.95"),
    ],
    ids=["the same", "slower at one size", "faster"],
)
def test_it_fails_when_the_second_is_slower_beyond_noise(capsys, second, noise, status, said):
    write("a.json", {40: 0.1, 80: 0.2}, 30, noise)
    write("b.json", second, 30, noise, seed=1)
    assert compared("--fail-below", "0.95") == status
    assert said in capsys.readouterr().out


def test_slower_within_noise_does_not_fail(capsys):
    write("a.json", {40: 0.1}, 12, 0.5)
    write("b.json", {40: 0.105}, 12, 0.5)
    assert compared("--fail-below", "0.99", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0]["speed"]["value"] < 0.99 < rows[0]["speed"]["high"]
    assert compared("--fail-below", "0.99") == 0
    assert "not sure enough to fail" in capsys.readouterr().out


def test_whole_steps_are_compared_where_the_plans_are_the_same(capsys):
    write("a.json", {40: 0.1, 80: 0.3})
    write("b.json", {40: 0.1, 80: 0.1})
    assert compared("--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["size"] for row in rows] == [40, 80, None]
    assert rows[-1]["speed"]["value"] == pytest.approx(2) and rows[1]["speed"]["value"] == pytest.approx(3)
    write("b.json", {80: 0.1, 160: 1.0})
    assert compared("--json") == 0
    assert [row["size"] for row in json.loads(capsys.readouterr().out)["rows"]] == [80]


def test_transfer_can_be_compared_alone(capsys):
    steps = from_sizes([40])
    for name, skew in (("a.json", 0.1), ("b.json", 0.3)):
        files.write(
            Path(name), results(steps, [sample(t, 0, 40, [0.2 + skew, 0.2], skew) for t in range(9)], ranks=2), None
        )
    for by, speed in (("slowest", 0.6), ("transfer", 1.0)):
        assert compared("--by", by, "--json") == 0
        assert json.loads(capsys.readouterr().out)["rows"][0]["speed"]["value"] == pytest.approx(speed)


def test_what_else_is_different_is_said(capsys):
    write("a.json", {40: 0.1})
    write("b.json", {40: 0.1}, engine="mpi", environment=replace(ENVIRONMENT, cores=8))
    assert compared() == 0
    out = capsys.readouterr().out
    assert "Different engine: ring before, mpi after." in out and "Different cores: 4 before, 8 after." in out
    assert "Different python" not in out and "Different types" not in out and "noise within each run" in out


def test_the_same_bytes_of_another_type_are_said(capsys):
    for name, dtype in (("a.json", "float32"), ("b.json", "float64")):
        steps = from_sizes([40], dtype)
        files.write(Path(name), results(steps, [sample(t, 0, 40, [0.2, 0.2]) for t in range(9)], ranks=2), None)
    assert compared() == 0
    assert "Different types: float32 before, float64 after." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [({"seconds": {80: 0.1}}, "no size in common"), ({"collective": "broadcast"}, "of broadcast")],
    ids=str,
)
def test_results_that_cannot_be_compared_are_refused(capsys, change, said):
    write("a.json", {40: 0.1})
    write("b.json", **{"seconds": {40: 0.1}, **change})
    assert compared() == 2
    assert said in capsys.readouterr().err


def test_a_limit_is_a_ratio(capsys):
    write("a.json", {40: 0.1})
    write("b.json", {40: 0.1})
    assert compared("--fail-below", "0") == 2
    assert "number above 0" in capsys.readouterr().err


# Collectives of a step that overlap


def test_a_step_whose_collectives_overlap_takes_as_long_as_the_longest():
    steps = from_sizes([40, 80])
    samples = [sample(t, i, s, [0.1 + 0.2 * i]) for t in range(3) for i, s in enumerate((40, 80))]
    found = analyse(results(steps, samples, fusion=True))
    assert found.step.max == pytest.approx(0.3) and "overlap" in found.step_is
    assert found.overall.algbw.value == pytest.approx(120 / 0.3)
    apart = analyse(results(steps, samples, fusion=False))
    assert apart.step.max == pytest.approx(0.4) and apart.overall.algbw.value == pytest.approx(120 / 0.4)


def test_collectives_that_overlap_are_not_independent_samples():
    steps = from_sizes([4 * size for size in range(1, 11)])
    samples = [sample(t, i, 4 * (i + 1), [0.1 + t]) for t in range(10) for i in range(10)]
    fused, apart = (analyse(results(steps, samples, fusion=fusion, ranks=1)) for fusion in (True, False))
    assert fused.cdf_band == pytest.approx(math.sqrt(math.log(40) / 20)) and apart.cdf_band < fused.cdf_band / 3
    assert fused.overall.slowest.p99 is None and apart.overall.slowest.p99 is not None
    assert fused.overall.slowest.p50.low is None and apart.overall.slowest.p50.low is not None
