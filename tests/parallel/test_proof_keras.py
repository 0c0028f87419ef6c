"""hvdkit.keras proves that the ranks agree: desynchronised ranks, seeds, evaluation, on each backend of Keras 3.

The checks of programs_proof_keras.py run on the two ranks that test_keras_edges.py starts on each backend, whichever of
the two files comes first; a test asks for what a function found, by its name (see checks_of_ranks.py).
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checks_of_ranks import Start, StartOnce

REQUIRED = ("keras", "horovod", "tensorflow", "torch", "jax", "mpi4py")
MISSING = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (`make test` installs all)"),
]

BACKENDS = ("tensorflow", "torch", "jax")
BETWEEN = "differs between rank 0 and rank 1, by at most"


@pytest.fixture(params=BACKENDS)
def ranks(request, ranks_command, tmp_path_factory) -> Start:
    """Two ranks on each backend."""
    return StartOnce(ranks_command, tmp_path_factory)("programs_keras_edges.py", "together", 2, request.param)


def test_a_nudged_weight_is_reported_on_every_rank_at_the_next_check(ranks):
    for found in ranks("raise"):
        assert found["error"].startswith(
            f"AgreementError: after step 4, the ranks disagree: net/out/kernel {BETWEEN} 0.0001; broadcast before"
        )
        assert found["steps"] == 4 and found["warned"] == []


def test_a_disagreement_can_be_a_warning_until_fit_ends(ranks):
    for found in ranks("warn"):
        after_four, after_six = found["warned"]
        assert f"after step 4, the ranks disagree: net/out/kernel {BETWEEN} 0.0001" in after_four
        assert "after step 6, the ranks disagree" in after_six
        assert found["steps"] == 6 and "AgreementError: at the end of fit" in found["error"]


def test_batch_normalization_raises_no_false_alarm(ranks):
    for found in ranks("statistics"):
        assert found["after fit"] == found["left out"] == ""
        assert f"after step 2, the ranks disagree: net/normal/moving_mean {BETWEEN}" in found["within"]
        assert f"net/normal/moving_mean {BETWEEN} 1" in found["differ"]


def test_everything_that_can_differ_is_named(ranks):
    for found in ranks("disagreements"):
        assert found["nothing"] == ""
        assert f"net/hidden/kernel {BETWEEN} 0.0001" in found["weight"]
        assert f"net/hidden/kernel {BETWEEN} 0.0001" in found["frozen"]
        assert f"momentum {BETWEEN} 0.0001" in found["slot"]
        assert f"/learning_rate {BETWEEN} 0.01" in found["rate"]
        assert f"loader.epoch {BETWEEN} 7; shard the same data set" in found["epoch"]
        assert f"seed_everything's seed {BETWEEN} 1; call seed_everything" in found["seed"]
        assert all(f"{kind}/kernel {BETWEEN} 2;" in found[kind] for kind in ("float64", "float32"))


def test_a_digest_is_the_same_on_every_device(ranks):
    assert all(all(found) and len(found) == 40 for found in ranks("digests"))


def test_evaluation_is_that_of_one_process(ranks):
    found = ranks("evaluated")
    assert found[1] == found[0] and len(found[0]) == 4
    for rank in found:
        for case, results in rank.items():
            assert {"loss", "accuracy", "auc", "f1", "mse"} <= set(results)
            for name, (mine, alone) in results.items():
                if name == "samples":  # the mean of the ranks' 23 and 22, or 1 and none
                    expected = (23 * 23 + 22 * 22) / 45 if case.endswith("45") else 1
                    assert mine == pytest.approx(expected)
                else:
                    assert mine == pytest.approx(alone, rel=1e-6), (case, name)
            assert case.startswith("one") or results["accuracy"][0] == results["accuracy"][1]


def test_a_filler_is_not_in_the_logs_and_its_weight_cannot_be_undone(ranks):
    for found in ranks("exact"):
        trained, validated = found["whole"]
        assert found["logged"] == [pytest.approx([trained] * 2), pytest.approx([validated] * 2)]
        assert found["few"] in ([0.0], [1.0])
        for name, error in zip(("sum", "mean_with_sample_weight"), found["refused"], strict=True):
            assert (
                f"InvalidArgumentError: fit got data with remainder='exact' and a loss with reduction='{name}'" in error
            )
        assert found["allowed"] == ""


@pytest.mark.parametrize("ranks", ["tensorflow"], indirect=True)
def test_synchronized_batch_normalization_is_one_warning(ranks):
    for warned in ranks("synchronised"):
        assert len(warned) == 1 and "not over Horovod's ranks" in warned[0]


def test_arguments_that_cannot_be_right(ranks):
    expected = ("got 0.", "got 'stop'.", "got list.", "got 0.", "length 0.", "got list", "got -1.")
    for errors in ranks("arguments"):
        for error, part in zip(errors, expected, strict=True):
            assert error.startswith("InvalidArgumentError") and part in error


def test_seeds_give_the_same_model_and_different_streams_again_in_every_run(ranks):
    runs = ranks("seeds")
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
    (alone,) = run_ranks("programs_proof_keras.py", "seeds", 1)
    for name in ("initial", "masks", "drawn"):
        assert alone[0][name] == ranks("seeds")[0][0][name]


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
