"""``hvdkit bench compare``: which result is faster, when it fails, what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from hvdkit import cli
from hvdkit.common import intervals
from hvdkit.measure.bench import results
from hvdkit.measure.bench.results import MeasuredJob, ScalingResults
from hvdkit.measure.bench.subject import ScalingAsked, WithCommit

ENVIRONMENT = WithCommit("1", "3.11", "Linux", {}, 4, None)


def write(name, seconds, noise=0.01, repeats=5, mode="strong", environment=ENVIRONMENT, seed=0):
    rng = np.random.default_rng([seed, len(name)])
    asked = ScalingAsked(("train.py",), (), tuple(seconds), mode, repeats)
    jobs = [
        MeasuredJob(n, repeat, 1.0, float(mean * np.exp(rng.normal(0, noise))))
        for n, mean in seconds.items()
        for repeat in range(repeats)
    ]
    results.write(Path(name), ScalingResults(asked, environment, (), (), jobs))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def compared(*words):
    return cli.run(["bench", "compare", "a.json", "b2.json", *words])


@pytest.mark.parametrize(
    ("after", "noise", "status", "said"),
    [
        ({1: 4.0, 2: 2.0}, 0.01, 0, "No speed is below 0.95"),
        ({1: 4.0, 2: 2.5}, 0.01, 1, "is below 0.95, failed"),
        ({1: 4.0, 2: 2.02}, 0.005, 0, "No speed is below 0.95"),
        ({1: 3.0, 2: 1.5}, 0.01, 0, "No speed is below 0.95"),
    ],
    ids=["the same", "slower on 2 ranks", "hardly slower", "faster"],
)
def test_it_fails_when_the_second_is_slower_beyond_noise(capsys, after, noise, status, said):
    write("a.json", {1: 4.0, 2: 2.0}, noise)
    write("b2.json", after, noise)
    assert compared("--fail-below", "0.95") == status
    assert said in capsys.readouterr().out


def test_a_slower_median_within_noise_is_said_and_does_not_fail(capsys):
    write("a.json", {2: 2.0}, 0.15, seed=1)
    write("b2.json", {2: 2.2}, 0.15, seed=1)
    assert compared("--fail-below", "0.98", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["speed"]["value"] < 0.98 < row["speed"]["high"]
    assert compared("--fail-below", "0.98") == 0
    assert "not sure enough to fail" in capsys.readouterr().out


def test_single_repeats_are_compared_by_their_value():
    write("a.json", {2: 2.0}, 0.001, repeats=1)
    write("b2.json", {2: 2.2}, 0.001, repeats=1)
    assert compared("--fail-below", "0.95") == 1


def test_without_a_limit_it_never_fails(capsys):
    write("a.json", {1: 4.0, 2: 2.0})
    write("b2.json", {2: 4.0, 4: 1.0})
    assert compared("--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert [row["ranks"] for row in answer["rows"]] == [2]
    assert answer["rows"][0]["speed"]["value"] == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize(("asked", "status"), [((1, 2), 1), ((1,), 0)], ids=["its jobs failed", "not asked for"])
def test_a_number_of_ranks_that_the_second_does_not_have_is_said_and_fails_where_its_jobs_failed(capsys, asked, status):
    write("a.json", {1: 4.0, 2: 2.0, 4: 1.0})
    write("b2.json", {1: 4.0, 8: 1.0})
    content = json.loads(Path("b2.json").read_text())
    content["asked"]["ranks"] = sorted({*asked, 8})
    Path("b2.json").write_text(json.dumps(content))
    assert compared("--fail-below", "0.95") == status
    out = capsys.readouterr().out
    for n, which in ((2, "first"), (4, "first"), (8, "second")):
        assert f"Not compared: {n} ranks, at which only the {which} has a job that counts." in out
    assert ("On 2 ranks: no job of B counts, failed." in out) == bool(status)
    assert compared() == 0
    capsys.readouterr()
    assert compared("--fail-below", "0.95", "--json") == status
    assert json.loads(capsys.readouterr().out)["unmeasured"] == [2] * status


def test_what_else_is_different_is_said(capsys):
    write("a.json", {2: 2.0})
    write("b2.json", {2: 2.0}, environment=replace(ENVIRONMENT, cores=8, packages={"torch": "9"}))
    assert compared() == 0
    out = capsys.readouterr().out
    assert "Different cores: 4 before, 8 after." in out and "torch" in out
    assert "Different python" not in out


@pytest.mark.parametrize(
    ("second", "said"), [({"mode": "weak"}, "different modes"), ({"seconds": {3: 1.0}}, "in common")], ids=str
)
def test_results_that_cannot_be_compared_are_refused(capsys, second, said):
    write("a.json", {1: 4.0, 2: 2.0})
    write("b2.json", **{"seconds": {1: 4.0}, **second})
    assert compared() == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"hvdkit": "tune", "version": 1}', '{"hvdkit": "bench scaling"}'])
def test_other_files_are_refused(capsys, text):
    write("a.json", {1: 4.0})
    Path("b2.json").write_text(text)
    assert compared() == 1
    assert "b2.json is not a file of 'hvdkit bench scaling'" in capsys.readouterr().err


def test_a_limit_is_a_ratio(capsys):
    write("a.json", {1: 4.0})
    write("b2.json", {1: 4.0})
    assert compared("--fail-below", "-1") == 2
    assert "number above 0" in capsys.readouterr().err


# The intervals


@pytest.mark.parametrize(("repeats", "least"), [(5, 0.88), (9, 0.9), (15, 0.9)])
def test_intervals_of_medians_hold_what_they_say(repeats, least):
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(300):
        found = intervals.median(np.exp(rng.normal(0, 0.1, repeats)), rng)
        held += found.low <= 1 <= found.high
    assert least <= held / 300 <= 0.995


def test_the_interval_of_a_ratio_holds_what_it_says():
    rng = np.random.default_rng(4)
    held = 0
    for _ in range(300):
        found = intervals.ratio(np.exp(rng.normal(0, 0.1, 7)), 2 * np.exp(rng.normal(0, 0.1, 7)), rng)
        held += found.low <= 0.5 <= found.high
    assert 0.9 <= held / 300 <= 0.999


def test_one_outlier_of_five_does_not_move_the_median():
    rng = np.random.default_rng(5)
    assert intervals.median([1.0, 1.0, 1.0, 1.0, 50.0], rng).value == 1.0
