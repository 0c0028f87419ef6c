"""hvdkit.keras proves that the ranks agree: desynchronised ranks, seeds, evaluation, on each backend of Keras 3."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REQUIRED = ("keras", "horovod", "tensorflow", "torch", "jax")
MISSING = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (`make test` installs all)"),
]

PROGRAM = "programs_proof_keras.py"
BACKENDS = ("tensorflow", "torch", "jax")
BETWEEN = "differs between rank 0 and rank 1, by at most"
_answers: dict[str, list[Any]] = {}


@pytest.fixture(params=BACKENDS)
def ranks(request, run_ranks, monkeypatch):
    """What two ranks found on one backend; they start once for all tests of this file."""
    if request.param not in _answers:
        monkeypatch.setenv("KERAS_BACKEND", request.param)
        _answers[request.param] = run_ranks(PROGRAM, "together", 2)
    return _answers[request.param]


def test_a_nudged_weight_is_reported_on_every_rank_at_the_next_check(ranks):
    for rank in ranks:
        found = rank["raise"]
        assert found["error"].startswith(
            f"AgreementError: after step 4, the ranks disagree: net/out/kernel {BETWEEN} 0.0001; broadcast before"
        )
        assert found["steps"] == 4 and found["warned"] == []


def test_a_disagreement_can_be_a_warning_until_fit_ends(ranks):
    for rank in ranks:
        found = rank["warn"]
        after_four, after_six = found["warned"]
        assert f"after step 4, the ranks disagree: net/out/kernel {BETWEEN} 0.0001" in after_four
        assert "after step 6, the ranks disagree" in after_six
        assert found["steps"] == 6 and "AgreementError: at the end of fit" in found["error"]


def test_batch_normalization_raises_no_false_alarm(ranks):
    for rank in ranks:
        found = rank["statistics"]
        assert found["after fit"] == found["left out"] == ""
        assert f"after step 2, the ranks disagree: net/normal/moving_mean {BETWEEN}" in found["within"]
        assert f"net/normal/moving_mean {BETWEEN} 1" in found["differ"]


def test_everything_that_can_differ_is_named(ranks):
    for rank in ranks:
        found = rank["disagreements"]
        assert found["nothing"] == ""
        assert f"net/hidden/kernel {BETWEEN} 0.0001" in found["weight"]
        assert f"net/hidden/kernel {BETWEEN} 0.0001" in found["frozen"]
        assert f"momentum {BETWEEN} 0.0001" in found["slot"]
        assert f"/learning_rate {BETWEEN} 0.01" in found["rate"]
        assert f"loader.epoch {BETWEEN} 7; shard the same data set" in found["epoch"]
        assert f"seed_everything's seed {BETWEEN} 1; call seed_everything" in found["seed"]


def test_a_digest_is_the_same_on_every_device(ranks):
    assert all(all(rank["digests"]) for rank in ranks)


def test_evaluation_is_that_of_one_process(ranks):
    for rank in ranks:
        for case, results in rank["evaluated"].items():
            assert {"loss", "accuracy", "auc", "f1", "mse"} <= set(results)
            for name, (mine, alone) in results.items():
                if name == "samples":  # the mean of the ranks' 23 and 22, or 1 and none
                    expected = (23 * 23 + 22 * 22) / 45 if case.endswith("45") else 1
                    assert mine == pytest.approx(expected)
                else:
                    assert mine == pytest.approx(alone, rel=1e-6), (case, name)
            assert case.startswith("one") or results["accuracy"][0] == results["accuracy"][1]
    assert [rank["evaluated"] for rank in ranks] == [ranks[0]["evaluated"]] * 2


def test_a_filler_is_not_in_the_logs_and_its_weight_cannot_be_undone(ranks):
    for rank in ranks:
        found = rank["exact"]
        trained, validated = found["whole"]
        assert found["logged"] == [pytest.approx([trained] * 2), pytest.approx([validated] * 2)]
        assert found["few"] in ([0.0], [1.0])
        for name, error in zip(("sum", "mean_with_sample_weight"), found["refused"], strict=True):
            assert (
                f"InvalidArgumentError: fit got data with remainder='exact' and a loss with reduction='{name}'" in error
            )
        assert found["allowed"] == ""


def test_synchronized_batch_normalization_is_one_warning(ranks, request):
    for rank in ranks:
        assert len(rank["synchronised"]) == (request.node.callspec.params["ranks"] == "tensorflow")
        assert all("not over Horovod's ranks" in text for text in rank["synchronised"])


def test_arguments_that_cannot_be_right(ranks):
    expected = ("got 0.", "got 'stop'.", "got list.", "got 0.", "length 0.", "got list", "got -1.")
    for rank in ranks:
        for error, part in zip(rank["arguments"], expected, strict=True):
            assert error.startswith("InvalidArgumentError") and part in error


def test_seeds_give_the_same_model_and_different_streams_again_in_every_run(ranks):
    runs = [rank["seeds"] for rank in ranks]
    for first, again, _ in runs:
        assert first == again
    firsts, others = [run[0] for run in runs], [run[2] for run in runs]
    assert firsts[0]["initial"] == firsts[1]["initial"] != others[0]["initial"] == others[1]["initial"]
    different = [*firsts, *others]
    assert len({number for run in different for number in run["drawn"]}) == 4 * 4
    assert len({tuple(mask) for run in different for mask in run["masks"]}) == 4 * 2
    assert len({number for run in different for number in run["losses"]}) == 4 * 3


@pytest.mark.parametrize("ranks", ["torch"], indirect=True)
def test_a_process_alone_draws_what_rank_0_draws(run_ranks, monkeypatch, ranks):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    (alone,) = run_ranks(PROGRAM, "seeds", 1)
    for name in ("initial", "masks", "drawn"):
        assert alone[0][name] == ranks[0]["seeds"][0][name]


def test_warmup_makes_the_large_batch_converge(tmp_path):
    checkout = Path(__file__).parents[2]
    script = checkout / "examples" / "keras" / "large_batch.py"
    backend = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        [sys.executable, str(script), "--epochs", "4", "--device", "cpu"],
        env={**os.environ, **backend, "PYTHONPATH": str(checkout)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    titles, _, *rows = [line for line in done.stdout.splitlines() if "|" in line]
    assert "no warmup" in titles and "3 epochs of warmup" in titles
    _, without, warmed = (column.split() for column in rows[-1].split("|"))
    assert len(rows) == 4 and float(without[1]) < 0.3 and float(warmed[1]) > 0.8
    assert (tmp_path / "large_batch.png").read_bytes().startswith(b"\x89PNG")
