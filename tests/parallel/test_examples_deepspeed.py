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
FLAGS = ["--epochs", "2", "--warmup_epochs", "1", "--num_threads", "1", "--log_interval", "22"]


def steps(run):
    """Epoch, step and loss of the lines of an output that show them."""
    found = [re.fullmatch(r"epoch (\d)/\d step (\d+)/\d+ loss ([\d.]+)", line) for line in run["lines"]]
    return [(int(match[1]), int(match[2]), float(match[3])) for match in found if match]


def accuracy(run):
    (found,) = [float(line.split()[2]) for line in run["lines"] if line.startswith("Test accuracy:")]
    return found


@pytest.fixture(scope="module")
def kept():
    """What the ranks printed, so that the tests share one job."""
    return {}


@pytest.fixture
def both(run_ranks, kept):
    if not kept:
        stages = [["--zero_stage", stage, *FLAGS] for stage in "012"]
        saved = ["--zero_stage", "1", *FLAGS, "--checkpoint_dir", "saved"]
        runs = [*stages, [*saved, "--epochs", "1"], [*saved, "--resume"], twin(batch_size=32, lr=0.03)]
        kept["ranks"] = run_ranks(PROGRAM, "deepspeed", 2, runs=runs)
    return kept["ranks"]


def twin(batch_size, lr):
    """Flags for one process and for two; without warmup, since one process has no other rate to warm up to."""
    numbers = ["--batch_size", str(batch_size), "--lr", str(lr), "--warmup_epochs", "0"]
    return ["--zero_stage", "2", *FLAGS, *numbers, "--checkpoint_dir", "twin"]


def test_every_stage_trains_the_same(both):
    root, other = both
    assert [run["status"] for run in [*root, *other]] == [0] * 12, (root, other)
    expected = steps(root[0])
    assert [(epoch, step) for epoch, step, _ in expected] == [(1, 22), (2, 22)]
    for run in root[1:3]:
        assert [loss for *_, loss in steps(run)] == pytest.approx([loss for *_, loss in expected], abs=0.0005)
        assert accuracy(run) == pytest.approx(accuracy(root[0]), abs=0.3)  # a sample of 360
    assert all(run["lines"] == [] for run in other)
    assert all(re.fullmatch(r"Hvd Procs 2 Total time: [\d.]+ second", run["lines"][-1]) for run in root)


def test_it_goes_on_where_it_was(both):
    root, _ = both
    whole, first, again = root[1], root[3], root[4]
    assert steps(first) == steps(whole)[:1]
    assert [(epoch, step) for epoch, step, _ in steps(again)] == [(2, 22)]
    assert steps(again)[0][2] == pytest.approx(steps(whole)[1][2], abs=0.0005)
    assert accuracy(again) == pytest.approx(accuracy(whole), abs=0.3)


def test_two_ranks_are_one_with_the_double_batch(both, run_ranks):
    (alone,) = run_ranks(PROGRAM, "deepspeed", 1, runs=[twin(batch_size=64, lr=0.06)])
    expected, found = alone[0]["weights"], both[0][5]["weights"]
    assert len(expected) == 8  # of four layers
    for one, other in zip(expected, found, strict=True):
        assert other == pytest.approx(one, abs=1e-4)


def test_a_configuration_that_is_none_is_one_sentence(run_ranks, tmp_path):
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "wrong.json").write_text('{"gradient_accumulation_steps": "many"}')
    flags = [["--deepspeed_config", str(tmp_path / f"{name}.json")] for name in ("missing", "list", "wrong")]
    (runs,) = run_ranks(PROGRAM, "deepspeed", 1, runs=flags)
    for run, name in zip(runs, ("missing", "list", "wrong"), strict=True):
        (sentence,) = [line for line in run["said"].splitlines() if line.startswith("cnn_deepspeed.py: ")]
        assert run["status"] == 1 and f"{name}.json" in sentence
