"""cnn_deepspeed.py on two ranks: all stages of ZeRO compute what one process does with the two-fold batch."""

import importlib.util
import re

import pytest

MISSING = [name for name in ("torch", "horovod", "sklearn", "deepspeed") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (pip install 'hvdkit[deepspeed]')"),
]
PROGRAM = "programs_course.py"
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
CONFIGURATIONS = {"list": "[1, 2]", "wrong": '{"gradient_accumulation_steps": "many"}', "missing": None}


def steps(run):
    """Epoch, step and loss of the lines of an output that show them."""
    found = [re.fullmatch(r"epoch (\d)/\d step (\d+)/\d+ loss ([\d.]+)", line) for line in run["lines"]]
    return [(int(match[1]), int(match[2]), float(match[3])) for match in found if match]


def accuracy(run):
    (found,) = [float(line.split()[2]) for line in run["lines"] if line.startswith("Test accuracy:")]
    return found


@pytest.fixture(scope="module")
def kept():
    """What the ranks printed, so that the tests share two jobs."""
    return {}


@pytest.fixture
def both(run_ranks, kept):
    if "both" not in kept:
        ranks = run_ranks(PROGRAM, "deepspeed", 2, runs=list(RUNS.values()))
        kept["both"] = [dict(zip(RUNS, runs, strict=True)) for runs in ranks]
    return kept["both"]


@pytest.fixture
def alone(run_ranks, kept, tmp_path):
    """The twin of two ranks, and one run for each configuration."""
    if "alone" not in kept:
        files = {name: tmp_path / f"{name}.json" for name in CONFIGURATIONS}
        for name, text in CONFIGURATIONS.items():
            if text is not None:
                files[name].write_text(text)
        refused = [["--deepspeed_config", str(file)] for file in files.values()]
        (kept["alone"],) = run_ranks(PROGRAM, "deepspeed", 1, runs=[[*TWIN, *WHOLE], *refused])
    return kept["alone"]


def test_every_stage_trains_the_same(both):
    root, other = both
    assert [run["status"] for run in [*root.values(), *other.values()]] == [0] * 10, (root, other)
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
    expected, found = alone[0]["weights"], both[0]["stage 2"]["weights"]
    assert len(expected) == 8  # of four layers
    for one, other in zip(expected, found, strict=True):
        assert other == pytest.approx(one, abs=1e-4)


def test_a_configuration_that_is_none_is_one_sentence(alone):
    for run, name in zip(alone[1:], CONFIGURATIONS, strict=True):
        (sentence,) = [line for line in run["said"].splitlines() if line.startswith("cnn_deepspeed.py: ")]
        assert run["status"] == 1 and f"{name}.json" in sentence
