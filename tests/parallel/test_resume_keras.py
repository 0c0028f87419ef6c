"""A Keras training that was interrupted, also in mid-epoch, goes on, on as many ranks as before or on others.

On each backend ``train`` of programs_resume_keras.py starts on two ranks and is killed. Then ``resume`` starts once on
two, goes on, trains anew without interruption and, on tensorflow, tries ``stores``; a test asks for what each of them
found (see checks_of_ranks.py). On other numbers of ranks ``train`` goes on in starts of its own.
"""

import importlib.util
import random
import shutil

import pytest
from checks_of_ranks import StartOnce, environment_of

from hvdkit import Topology
from hvdkit.steps.shards import Shard

NEEDED = {"tensorflow": ("tensorflow",), "torch": ("torch",), "jax": ("jax", "torch")}
MISSING = [name for name in ("keras", "horovod", "sklearn") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (`make test` installs all)"),
]

PROGRAM = "programs_resume_keras.py"
SAMPLES, BATCH = 1437, 24
STEPS = -(-SAMPLES // (2 * BATCH))
EPOCHS = {"tensorflow": 4, "torch": 3, "jax": 3}  # two of warmup, and on tensorflow it may be killed after them, too
_killed = {}


@pytest.fixture
def killed(run_ranks, monkeypatch, tmp_path_factory):
    """On a backend: the step after which a training was killed, and where n ranks can go on with it."""

    def on(backend):
        lacking = [name for name in NEEDED[backend] if importlib.util.find_spec(name) is None]
        if lacking:
            pytest.skip(f"needs {', '.join(lacking)}")
        for name, value in environment_of(backend).items():
            monkeypatch.setenv(name, value)
        if backend not in _killed:
            epochs = EPOCHS[backend]
            step = random.randrange(STEPS + 2, (epochs - 1) * STEPS)  # noqa: S311
            directory = tmp_path_factory.mktemp(backend) / "killed"
            run_ranks(PROGRAM, "train", 2, fails=True, directory=str(directory), killed_at=step, epochs=epochs)
            copies = {n: shutil.copytree(directory, directory.with_name(f"on-{n}")) for n in (1, 2, 3)}
            _killed[backend] = step, copies
        return _killed[backend]

    return on


@pytest.fixture
def resumed(killed, ranks_command, tmp_path_factory):
    """The two ranks on a backend that go on with what was killed."""

    def on(backend):
        _, copies = killed(backend)
        start_once = StartOnce(ranks_command, tmp_path_factory)
        return start_once(PROGRAM, "resume", 2, backend, interrupted=str(copies[2]), epochs=EPOCHS[backend])

    return on


@pytest.mark.parametrize(("backend", "sizes"), [("tensorflow", (2, 3)), ("torch", (1, 2)), ("jax", (2,))])
def test_killed_at_a_random_step_and_resumed(killed, resumed, run_ranks, backend, sizes):
    (step, copies), epochs = killed(backend), EPOCHS[backend]
    print(f"killed after step {step}")
    whole = resumed(backend)("whole")
    for n in sizes:
        if n == 2:
            ranks = resumed(backend)("resumed")
        else:
            ranks = run_ranks(PROGRAM, "train", n, directory=str(copies[n]), epochs=epochs)
        epoch, batch = ranks[0]["began"]
        steps = -(-SAMPLES // (n * BATCH))
        # Killed after the last step of an epoch, whose save comes with the end of the epoch: three steps back.
        assert (step - 3) / STEPS - 1 / steps <= epoch + batch / steps <= step / STEPS + 1 / steps
        assert ranks[0]["epochs"] == list(range(epoch, epochs))
        assert ranks[0]["batches"] == [*range(batch, steps), *list(range(steps)) * (epochs - epoch - 1)]
        seen = [sum(counts) for counts in zip(*(rank["seen"] for rank in ranks), strict=True)]
        taken = SAMPLES - sum(seen)
        before = Shard(SAMPLES, Topology(0, 1), BATCH, "exact", seed=2).order(epoch)[:taken].tolist()
        assert set(seen) <= {0, 1} and [index for index, count in enumerate(seen) if not count] == sorted(before)
        assert (taken % (2 * BATCH) == 0 and taken > 0) or batch == 0
        full = 0.01 * n**0.5
        progress = min(1.0, (epoch + batch / steps) / 2)
        assert ranks[0]["first rate"] == pytest.approx(0.01 + (full - 0.01) * progress, rel=0.001)
        assert ranks[0]["last rate"] == pytest.approx(full)
        for rank, uninterrupted in zip(ranks, [*whole, whole[0]][:n], strict=True):
            assert rank["accuracy"] > whole[0]["accuracy"] - 0.04
            assert rank["weights"] == ranks[0]["weights"]
            assert (rank["weights"] == uninterrupted["weights"]) == (n == 2)
            assert (rank["drawn"] == uninterrupted["drawn"]) == (n == 2)
            assert rank["data"]["epoch"] == epochs and rank["data"]["position"] == 0
    assert whole[0]["accuracy"] > 0.9 and whole[0]["batches"] == list(range(STEPS)) * epochs


def test_best_and_newest_monitors_and_what_does_not_fit(resumed):
    start = resumed("tensorflow")
    for rank in start("stores"):
        assert rank["best"] == [2, 0.9, True]
        assert rank["newest"] == [4, True, STEPS - 4]
        facts = {"framework": "keras", "backend": "tensorflow", "size": 2, "seed": 1, "note": "x"}
        assert facts.items() <= rank["metadata"].items()
        expected = {"epoch": 0, "position": 192, "samples": 192, "n_samples": SAMPLES, "seed": 2}
        assert rank["metadata"]["data"] == expected
        assert rank["score"][0] == pytest.approx(rank["score"][1])
        assert rank["elastic without a launch"] == [[4], 5, 1 + STEPS // 7 + 1]
        assert rank["fit"] == [1, 2, 0]
        parts = (
            "which must be latest or best, got 'oldest'",
            "CheckpointError: the checkpoint's data had seed=2, this loader has 3",
            "got list",
            "schedule must be from warmup, and needs the loader",
            "score must be a finite number, got nan",
            "every must be None or an integer >= 1, got 0",
            "keep_best=1 needs monitor",
            "mode must be max or min, got 'up'",
            "Checkpoint(every=) needs data that can go on in mid-epoch",
            "monitor must be one of the logs loss, ",
            "loader must be what shard returned, got list",
            "schedule must be from warmup, got int",
            "rule must be one of linear, sqrt, none",
            "state must be an ElasticState, got ShardedData",
            "every must be an integer >= 1, got 0",
            "ElasticCommit needs fit to train on the state's loader",
        )
        for error, part in zip(rank["errors"], parts, strict=True):
            assert part in error
    names = sorted(path.name for path in (start.directory / "run").iterdir())
    assert names == ["step-0000000002", "step-0000000003", "step-0000000004"]
