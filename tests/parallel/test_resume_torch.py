"""A PyTorch training that was interrupted goes on, on as many ranks as before or on others."""

import importlib.util
import random
from typing import Any

import forked
import numpy as np
import pytest

from hvdkit import Topology
from hvdkit.steps.shards import Shard

MISSING = [name for name in ("torch", "horovod", "sklearn") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (`make test` installs all)"),
]

PROGRAM = "programs_resume_torch.py"
SAMPLES, BATCH = 1437, 24
STEPS = -(-SAMPLES // (2 * BATCH))
_answers: dict[str, list[Any]] = {}


@pytest.fixture
def fork_ranks(tmp_path):
    return forked.starter(forked.TORCH, tmp_path)


@pytest.fixture
def whole(fork_ranks, tmp_path):
    """What two ranks that nothing interrupts end with; they train once for all tests of this file."""
    if not _answers:
        _answers["whole"] = fork_ranks(PROGRAM, "train", 2, directory=str(tmp_path / "whole"))
    return _answers["whole"]


@pytest.mark.parametrize(("asynchronous", "sizes"), [(False, (1, 2, 3)), (True, (2,))])
def test_killed_at_a_random_step_and_resumed_on_as_many_or_other_ranks(
    run_ranks, fork_ranks, whole, tmp_path, asynchronous, sizes
):
    """Two ranks over MPI are killed; those that go on are over Gloo."""
    step = random.randrange(STEPS + 2, 5 * STEPS)  # noqa: S311
    print(f"killed after step {step}")
    killed = tmp_path / "killed"
    run_ranks(PROGRAM, "train", 2, fails=True, directory=str(killed), killed_at=step, asynchronous=asynchronous)
    copies = {n: tmp_path / f"on-{n}" for n in sizes}
    for copy in copies.values():
        copy.mkdir()
        for source in killed.glob("step-*"):
            (copy / source.name).mkdir()
            [(copy / source.name / file.name).write_bytes(file.read_bytes()) for file in source.iterdir()]
    for n, directory in copies.items():
        ranks = fork_ranks(PROGRAM, "train", n, directory=str(directory))
        epoch, position = ranks[0]["began"]
        assert step - 6 <= epoch * STEPS + position // (2 * BATCH) <= step
        seen = sorted(index for rank in ranks for index in rank["first epoch"])
        before = Shard(SAMPLES, Topology(0, 1), BATCH, "exact", seed=2).order(epoch)[:position]
        assert sorted([*seen, *before.tolist()]) == list(range(SAMPLES))
        assert ranks[0]["metadata"]["size"] == 2 and ranks[0]["metadata"]["seed"] == 1
        full = 0.02 * n**0.5
        progress = min(1.0, (epoch * SAMPLES + position) / (2 * SAMPLES))
        assert ranks[0]["first rate"] == pytest.approx(0.02 + (full - 0.02) * progress, rel=0.02)
        assert ranks[0]["last rate"] == pytest.approx(full)
        for rank in ranks:
            assert rank["accuracy"] > whole[0]["accuracy"] - 0.04
            assert rank["weights"] == ranks[0]["weights"]
            assert (rank["weights"] == whole[0]["weights"]) == (n == 2)
    assert whole[0]["accuracy"] > 0.93 and whole[0]["step"] == 8 * STEPS


def test_best_and_newest_asynchronous_writes_and_what_does_not_fit(fork_ranks, tmp_path):
    (tmp_path / "file").write_text("not a directory")
    for rank in fork_ranks(PROGRAM, "stores", 2, directory=str(tmp_path)):
        assert rank["written"] == 4 and rank["nothing"]
        assert rank["best"] == [2, 0.9, True]
        assert rank["newest"] == [4, True, 4 * 2 * BATCH]
        expected = {"epoch": 0, "position": 192, "samples": 192, "n_samples": SAMPLES, "seed": 2}
        assert rank["position"] == expected
        parts = (
            "CheckpointError: could not write the checkpoint of step 1",
            "which must be latest or best, got 'oldest'",
            "CheckpointError: the checkpoint's data had seed=2, this loader has 3",
            "got list",
            "schedule must be from warmup, and needs the loader",
            "score must be a finite number, got nan",
        )
        for error, part in zip(rank["errors"], parts, strict=True):
            assert part in error
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["step-0000000002", "step-0000000003", "step-0000000004"]
    assert np.load(tmp_path / "run" / names[0] / "random.npy").shape[0] == 2
