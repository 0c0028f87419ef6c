"""``hvdkit plan steps``: the numbers that the training itself will get."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit import cli
from hvdkit.measure.plan import steps as model
from hvdkit.steps.shards import Shard
from hvdkit.steps.topology import Topology

TUTORIAL = ["--samples", "60000", "--batch-size", "512", "--lr", "0.01", "--epochs", "50", "--warmup-epochs", "3"]


def planned(capsys, *words):
    assert cli.run(["plan", "steps", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@given(st.integers(1, 500), st.integers(1, 40), st.integers(1, 9), st.sampled_from(["drop", "pad", "exact"]))
def test_steps_and_samples_are_those_of_shard(samples, batch_size, ranks, remainder):
    row = model.row(model.PlannedTraining(samples, batch_size, 0.1, 3, remainder=remainder), ranks)
    policy = next(one for one in row.policies if one.remainder == remainder)
    assert row.steps_per_epoch == policy.steps
    if policy.steps is None:
        assert remainder == "drop" and samples < batch_size * ranks
        return
    shards = [Shard(samples, Topology(rank, ranks), batch_size, remainder, shuffle=False) for rank in range(ranks)]
    assert policy.steps == len(shards[0])
    used = [index for shard in shards for batch in shard.batches(0) if batch.weight for index in batch.indices]
    assert len(set(used)) == samples - policy.dropped
    assert len(used) - len(set(used)) == policy.padded
    assert row.steps == 3 * policy.steps


def test_the_rates_of_the_tutorials_warmup(capsys):
    (row,) = planned(capsys, *TUTORIAL, "-n", "8")["rows"]
    assert (row["global_batch"], row["steps_per_epoch"], row["steps"], row["lr"]) == (4096, 14, 700, 0.08)
    assert row["warmup_lr"] == pytest.approx([0.1 / 3, 0.17 / 3, 0.08])
    assert row["checkpoints"] == 50


def test_a_rate_that_is_not_scaled_may_be_any_number(capsys):
    (row,) = planned(capsys, "--samples", "100", "--batch-size", "1", "--lr", "1e307", "-n", "64", "--rule", "none")[
        "rows"
    ]
    assert row["lr"] == 1e307


@pytest.mark.parametrize(("rule", "lr"), [("linear", 0.04), ("sqrt", 0.02), ("none", 0.01)])
def test_the_rule_decides_the_rate_and_whether_there_is_a_warmup(capsys, rule, lr):
    (row,) = planned(capsys, *TUTORIAL, "-n", "4", "--rule", rule)["rows"]
    assert row["lr"] == pytest.approx(lr)
    assert row["warmup_steps"] == (0 if rule == "none" else 3 * row["steps_per_epoch"])


def test_what_is_left_out_and_batches_that_are_too_large_are_said(capsys):
    found = planned(capsys, *TUTORIAL, "-n", "1,64,200")
    notes = " ".join(found["notes"])
    assert "On 64 ranks: 'drop' leaves out 27232 samples of every epoch (45%" in notes
    assert "global batch of 32768 is above 8192" in notes
    assert "On 200 ranks: 60000 samples are fewer than one global batch of 102400" in notes
    assert "On 1 rank:" not in notes
    assert found["rows"][2]["steps"] is None


def test_a_training_that_ends_within_its_warmup_is_said(capsys):
    few = ["--samples", "600", "--batch-size", "10", "--lr", "0.1", "--epochs", "2", "-n", "4"]
    assert "ends within its warmup" in " ".join(planned(capsys, *few)["notes"])
    assert "ends within" not in " ".join(planned(capsys, *few, "--warmup-epochs", "0")["notes"])


def test_checkpoints_are_counted(capsys):
    assert planned(capsys, *TUTORIAL, "-n", "2", "--checkpoint-epochs", "20")["rows"][0]["checkpoints"] == 3


def test_the_plot_has_a_curve_for_each_number_of_ranks(tmp_path, capsys):
    lines = {}
    for ranks in ("8", "1,8"):
        file = tmp_path / f"{ranks}.svg"
        assert cli.run(["plan", "steps", *TUTORIAL, "-n", ranks, "--plot", str(file)]) == 0
        lines[ranks] = file.read_text().count('id="line2d')
    assert lines["1,8"] == lines["8"] + 2  # the curve, and its line in the legend
    assert cli.run(["plan", "steps", *TUTORIAL, "-n", "1", "--plot", str(tmp_path / "rates.SVG")]) == 0
    assert "<svg" in (tmp_path / "rates.SVG").read_text()
    assert cli.run(["plan", "steps", *TUTORIAL, "-n", "1", "--plot", str(tmp_path / "rates.doc")]) == 2
    assert "rates.doc" in capsys.readouterr().err
    assert not (tmp_path / "rates.doc").exists()


def test_a_training_of_a_million_epochs_is_planned(capsys, monkeypatch):
    """With a table of ten epochs."""
    monkeypatch.setenv("COLUMNS", "250")
    words = ["--samples", "4000", "--batch-size", "2", "--lr", "0.1", "--epochs", "1000000", "-n", "2"]
    assert cli.run(["plan", "steps", *words, "--warmup-epochs", "50000"]) == 0
    (heading,) = [line for line in capsys.readouterr().out.splitlines() if "epoch 1 " in line]
    assert heading.rstrip().endswith("epoch 50000") and heading.count("epoch") == 10


def test_all_policies_of_an_end_that_is_ragged(capsys):
    for remainder, steps in (("drop", 3), ("pad", 4), ("exact", 4)):
        words = ["--samples", "100", "--batch-size", "10", "--lr", "1", "-n", "3", "--remainder", remainder]
        (row,) = planned(capsys, *words)["rows"]
        assert row["steps_per_epoch"] == steps
        assert [(one["dropped"], one["padded"]) for one in row["policies"]] == [(10, 0), (0, 20), (0, 0)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lr", "1e308", "-n", "64"], "1e+308"),
        (["--lr", "0.1", "-n", "1" + 400 * "0"], "-n"),
        (["--lr", "nan", "-n", "1"], "nan"),
        (["--lr", "-0.1", "-n", "1"], "-0.1"),
        (["--lr", "0.1", "-n", "1,x"], "1,x"),
        (["--lr", "0.1", "-n", "0"], "'0'"),
        (["--lr", "0.1", "-n", "1", "--warmup-epochs", "inf"], "inf"),
        (["--lr", "0.1", "-n", "2", "--warmup-epochs", "1e308"], "1e+308"),
        (["--lr", "0.1", "-n", "1", "--rule", "cubic"], "cubic"),
    ],
)
def test_mistakes_are_one_sentence_with_status_2(capsys, words, said):
    assert cli.run(["plan", "steps", "--samples", "100", "--batch-size", "4", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_numbers_are_read_as_people_write_them(capsys):
    words = ["--batch-size", "100", "--lr", "1", "-n", "2", "--samples"]
    for written, count in (("25.557032M", 25_557_032), ("7B", 7 * 10**9), ("1e12", 10**12)):
        assert planned(capsys, *words, written)["training"]["samples"] == count
    for written in ("1.5", "7X", "B", "1e19"):
        assert cli.run(["plan", "steps", *words, written]) == 2
        assert "like 25557032, 1e12 or 7B" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "now"), [(["predict", "x"], "plan scale"), (["memory"], "plan memory")], ids=str)
def test_what_moved_says_where_to(capsys, words, now):
    assert cli.run(words) == 2
    assert f"hvdkit {now}" in capsys.readouterr().err
