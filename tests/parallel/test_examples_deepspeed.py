"""cnn_deepspeed.py on two ranks: all stages of ZeRO compute what one process does with the two-fold batch."""

import importlib.util
import json
import re
from pathlib import Path
from unittest import mock

import pytest
from example_runs import example, one_process_group

MISSING = [name for name in ("torch", "horovod", "sklearn", "deepspeed") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (pip install 'hvdkit[deepspeed]')"),
]
# Without warmup, since one process has no other rate to warm up to.
FLAGS = ["--epochs", "2", "--warmup_epochs", "0", "--num_threads", "1", "--log_interval", "22"]
HALF, WHOLE = ["--batch_size", "32", "--lr", "0.03"], ["--batch_size", "64", "--lr", "0.06"]
SAVED = ["--zero_stage", "1", *FLAGS, *HALF, "--checkpoint_dir", "saved"]
TWIN = ["--zero_stage", "2", *FLAGS, "--checkpoint_dir", "twin"]
RUNS = {
    "stage 0": ["--zero_stage", "0", *FLAGS, *HALF],
    "stage 1": ["--zero_stage", "1", *FLAGS, *HALF],
    "stage 2": [*TWIN, *HALF],
    "first": [*SAVED, "--epochs", "1"],
    "again": [*SAVED, "--resume"],
}
CONFIGURATIONS = {
    "list": "[1, 2]",
    "wrong": '{"gradient_accumulation_steps": "many"}',
    "clipping": '{"gradient_clipping": "much"}',
    "printing": '{"steps_per_print": 0}',
    "offload": '{"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}',
    "missing": None,
}
TUTORIAL = {  # as tutorials have it: a global batch and an optimizer of the file's own; and half precision
    "train_batch_size": 16,
    "steps_per_print": 2000,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
    "bf16": {"enabled": True},
}
ONCE = ["--epochs", "1", "--warmup_epochs", "0", "--log_interval", "22"]


def steps(run):
    """Epoch, step and loss of the lines of an output that show them."""
    found = [re.fullmatch(r"epoch (\d)/\d step (\d+)/\d+ loss ([\d.]+)", line) for line in run["lines"]]
    return [(int(match[1]), int(match[2]), float(match[3])) for match in found if match]


def accuracy(run):
    (found,) = [float(line.split()[2]) for line in run["lines"] if line.startswith("Test accuracy:")]
    return found


def deepspeed(runs):
    """cnn_deepspeed.py several times in one process, without dropout.

    Its masks are each rank's own, so that with them no number of ranks can compute what another one does.
    """
    import torch

    with one_process_group(), mock.patch.object(torch.nn, "Dropout", lambda _: torch.nn.Identity()):
        results = [example("cnn_deepspeed.py", [*flags, "--device", "cpu"]) for flags in runs]
    for flags, result in zip(runs, results, strict=True):
        if "--checkpoint_dir" in flags and result["status"] == 0:
            directory = Path(flags[flags.index("--checkpoint_dir") + 1])
            newest = directory / (directory / "latest").read_text() / "mp_rank_00_model_states.pt"
            weights = torch.load(newest, weights_only=True)["module"]
            result["weights"] = [tensor.flatten()[:20].tolist() for tensor in weights.values()]
    return results


@pytest.fixture(scope="module")
def kept():
    """What the ranks printed, so that the tests share two jobs."""
    return {}


@pytest.fixture
def both(run_ranks, kept):
    if "both" not in kept:
        ranks = run_ranks(deepspeed, 2, runs=list(RUNS.values()))
        kept["both"] = [dict(zip(RUNS, runs, strict=True)) for runs in ranks]
    return kept["both"]


@pytest.fixture
def alone(run_ranks, kept, tmp_path):
    """The twin of two ranks, one run for each configuration, and what users give by mistake."""
    if "alone" not in kept:
        files = {name: tmp_path / f"{name}.json" for name in (*CONFIGURATIONS, "tutorial")}
        for name, text in {**CONFIGURATIONS, "tutorial": json.dumps(TUTORIAL)}.items():
            if text is not None:
                files[name].write_text(text)
        empty = tmp_path / "empty"
        empty.mkdir()
        (empty / "latest").write_text("global_step1")
        runs = {
            "twin": [*TWIN, *WHOLE],
            **{name: ["--deepspeed_config", str(files[name]), *ONCE] for name in files},
            "another stage": [*TWIN, *WHOLE, "--resume", "--zero_stage", "1"],
            "nothing there": ["--checkpoint_dir", str(empty), "--resume", *ONCE],
            "no directory": ["--checkpoint_dir", str(files["tutorial"]), *ONCE],
        }
        (found,) = run_ranks(deepspeed, 1, runs=list(runs.values()))
        kept["alone"] = dict(zip(runs, found, strict=True))
    return kept["alone"]


def test_every_stage_trains_the_same(both):
    root, other = both
    assert [run["status"] for run in [*root.values(), *other.values()]] == [0] * 2 * len(RUNS), (root, other)
    expected = root["stage 0"]
    assert [(epoch, step) for epoch, step, _ in steps(expected)] == [(1, 22), (2, 22)]
    for run in (root["stage 1"], root["stage 2"]):
        assert [loss for *_, loss in steps(run)] == pytest.approx([loss for *_, loss in steps(expected)], abs=0.0005)
        assert accuracy(run) == pytest.approx(accuracy(expected), abs=0.3)  # a sample of 360
    assert all(run["lines"] == [] for run in other.values())
    assert all(re.fullmatch(r"Hvd Procs 2 Total time: [\d.]+ second", run["lines"][-1]) for run in root.values())


def test_it_goes_on_where_it_was(both):
    whole, first, again = (both[0][name] for name in ("stage 1", "first", "again"))
    assert steps(first) == steps(whole)[:1]
    assert [(epoch, step) for epoch, step, _ in steps(again)] == [(2, 22)]
    assert steps(again)[0][2] == pytest.approx(steps(whole)[1][2], abs=0.0005)
    assert accuracy(again) == pytest.approx(accuracy(whole), abs=0.3)


def test_two_ranks_are_one_with_the_double_batch(both, alone):
    expected, found = alone["twin"]["weights"], both[0]["stage 2"]["weights"]
    assert len(expected) == 8  # of four layers
    for one, other in zip(expected, found, strict=True):
        assert other == pytest.approx(one, abs=1e-4)


def sentence(run):
    (found,) = [line for line in run["said"].splitlines() if line.startswith("cnn_deepspeed.py: ")]
    assert run["status"] == 1 and "Traceback" not in run["said"]
    return found


def test_a_configuration_that_is_none_is_one_sentence(alone):
    for name in CONFIGURATIONS:
        assert f"{name}.json" in sentence(alone[name])


def test_a_tutorials_configuration_is_taken_and_the_flags_count_more(alone):
    """Its batch, rate and scheduler would give other losses."""
    run = alone["tutorial"]
    assert run["status"] == 0, run
    assert [(epoch, step) for epoch, step, _ in steps(run)] == [(1, 22), (1, 44)]  # batches of 32
    assert accuracy(run) > 50


def test_checkpoints_that_cannot_be_read_or_written_are_one_sentence(alone):
    assert "and --zero_stage 1: it was saved with 2" in sentence(alone["another stage"])
    assert "empty cannot be loaded with -n 1" in sentence(alone["nothing there"])
    assert "cannot write to --checkpoint_dir" in sentence(alone["no directory"])
