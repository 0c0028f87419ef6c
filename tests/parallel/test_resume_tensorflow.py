"""A TensorFlow training that was interrupted goes on, on as many ranks as before or on others."""

import importlib.util
import random
import shutil

import forked
import numpy as np
import pytest

from hvdkit import Topology
from hvdkit.steps.shards import Shard

MISSING = [name for name in ("tensorflow", "horovod", "sklearn") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (`make test` installs all)"),
]

PROGRAM = "programs_resume_tensorflow.py"
SAMPLES, BATCH, EPOCHS = 1437, 24, 5
STEPS = -(-SAMPLES // (2 * BATCH))


def test_killed_at_a_random_step_and_resumed_on_as_many_or_other_ranks(run_ranks, tmp_path):
    """Two ranks over MPI are killed; those that go on, and those that nothing interrupts, are over Gloo."""
    fork_ranks = forked.starter(forked.TENSORFLOW, tmp_path)
    step = random.randrange(STEPS + 2, 3 * STEPS)  # noqa: S311
    print(f"killed after step {step}")
    killed = tmp_path / "killed"
    run_ranks(PROGRAM, "train", 2, fails=True, directory=str(killed), killed_at=step)
    (whole, _) = both = fork_ranks(PROGRAM, "train", 2, directory=str(tmp_path / "whole"))
    for n in (2, 3):
        directory = shutil.copytree(killed, tmp_path / f"on-{n}")
        ranks = fork_ranks(PROGRAM, "train", n, directory=str(directory))
        epoch, position = ranks[0]["began"]
        assert step - 6 <= epoch * STEPS + position // (2 * BATCH) <= step
        seen = sorted(index for rank in ranks for index in rank["first epoch"])
        before = Shard(SAMPLES, Topology(0, 1), BATCH, "exact", seed=2).order(epoch)[:position]
        assert sorted([*seen, *before.tolist()]) == list(range(SAMPLES))
        facts = ranks[0]["metadata"]
        assert (facts["size"], facts["seed"], facts["framework"]) == (2, 1, "tensorflow")
        full = 0.02 * n**0.5
        progress = min(1.0, (epoch * SAMPLES + position) / (2 * SAMPLES))
        assert ranks[0]["first rate"] == pytest.approx(0.02 + (full - 0.02) * progress, rel=0.02)
        assert ranks[0]["last rate"] == pytest.approx(full)
        for rank in ranks:
            assert rank["accuracy"] > whole["accuracy"] - 0.04
            assert rank["weights"] == ranks[0]["weights"]
            assert (rank["weights"] == whole["weights"]) == (n == 2)
    assert whole["accuracy"] > 0.93 and whole["step"] == EPOCHS * STEPS
    stored_and_refused(both, tmp_path / "whole" / "stores")


def stored_and_refused(ranks, directory):
    for rank in ranks:
        assert rank["best"] == [2, 0.9, True]
        assert rank["newest"] == [4, True, STEPS - 4]
        expected = {"epoch": 0, "position": 192, "samples": 192, "n_samples": SAMPLES, "seed": 2}
        assert rank["position"] == expected
        assert rank["known"] == 2 * BATCH
        unknown = "the position in this data set is unknown"
        parts = (
            "CheckpointError: could not write the checkpoint of step 1",
            "which must be latest or best, got 'oldest'",
            "CheckpointError: the checkpoint's data had seed=2, this loader has 3",
            "got list",
            "schedule must be from warmup, and needs the loader",
            "score must be a finite number, got nan",
            unknown,
            unknown,
        )
        for error, part in zip(rank["errors"], parts, strict=True):
            assert part in error
        (two, _), (next_two, after), (none, same) = rank["fits"]
        assert [two, next_two, none] == [2, 2, 0]
        assert after == same == ranks[0]["fits"][1][1]
    (fitted, *names) = sorted(path.name for path in directory.iterdir())
    assert fitted == "fit" and len(names) == 3
    assert np.load(directory / names[0] / "random.npy").shape[0] == 2
