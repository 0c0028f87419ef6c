"""hvdkit.arrays on real ranks, in NumPy, JAX and MLX."""

import importlib.util
from typing import Any

import numpy as np
import pytest

MISSING = [name for name in ("mpi4py", "ml_dtypes") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (`make test` installs all)"),
]

PROGRAM = "programs_arrays.py"
NEEDS = {"numpy": ("numpy",), "jax": ("jax", "optax"), "mlx": ("mlx",)}
FRAMEWORKS = [name for name, needs in NEEDS.items() if all(importlib.util.find_spec(one) for one in needs)]
TRAININGS = [(2, "numpy"), (2, "mlx"), (2, "jax"), (3, "numpy"), (3, "mlx")]  # jax takes seconds to start: once


def frameworks(n: int) -> dict[str, Any]:
    return {"frameworks": [name for name in FRAMEWORKS if n == 1 or (n, name) in TRAININGS]}


WHOLE, EXACT = {"directory": "", "epochs": 3}, {"directory": "", "epochs": 2, "exact": True}
JOBS: dict[tuple[int, str], dict[str, tuple[str, dict[str, Any]]]] = {
    (1, "begin"): {"topology": ("topology", {}), "trained": ("everything", frameworks(1)), "exact": ("fit", EXACT)},
    (2, "begin"): {
        "topology": ("topology", {}),
        "trained": ("everything", frameworks(2)),
        "overlaps": ("overlaps", {"sizes": [100, 1000, 300_000]}),
        "unwritable": ("unwritable", {"directory": "file/run"}),
        "whole": ("fit", WHOLE),
        "exact": ("fit", EXACT),
        "first epochs": ("fit", {"directory": "fit", "epochs": 2}),
        "saved": ("checkpoints", {"directory": "run", "go_on": False}),
    },
    (2, "go on"): {
        "last epoch": ("fit", {"directory": "fit", "epochs": 3}),
        "restored": ("checkpoints", {"directory": "run", "go_on": True}),
        "ended": ("ends_later", {"directory": "."}),
    },
    (1, "go on"): {"restored": ("checkpoints", {"directory": "run", "go_on": True})},
    (3, "begin"): {
        "trained": ("everything", frameworks(3)),
        "steps": ("many_steps", {"sizes": [1, 500, 1000, 4000, 5000, 70_000], "steps": 300}),
        "errors": ("errors", {}),
        "state": ("state_and_metrics", {}),
        "subset": ("subset", {}),
    },
}
"""The calls of each job, by the number of its ranks; those that go on are processes of their own."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Where all jobs read and write."""
    made = tmp_path_factory.mktemp("arrays")
    (made / "file").write_text("not a directory")
    return made


@pytest.fixture(scope="module")
def answers():
    return {}


@pytest.fixture
def found(run_ranks, directory, answers):
    """What each of n ranks found in a call of ``JOBS``; a job starts once for all tests."""

    def ranks(n: int, name: str, part: str = "begin") -> list[Any]:
        if part == "go on":
            ranks(2, "saved")
        if (n, part) not in answers:
            answers[n, part] = run_ranks(PROGRAM, "several", n, calls=JOBS[n, part], directory=str(directory))
        return [rank[name] for rank in answers[n, part]]

    return ranks


@pytest.mark.parametrize("by", ["weights", "samples"])
@pytest.mark.parametrize(("n", "framework"), TRAININGS)
def test_n_ranks_end_with_the_weights_of_one_process(found, framework, n, by):
    """53 samples in global batches of 12: the last step has 5, split 3 and 2, or 2, 2 and 1."""
    if framework not in FRAMEWORKS:
        pytest.skip(f"needs {' and '.join(NEEDS[framework])}")
    (alone,) = found(1, "trained")
    tolerance = {"rel": 1e-4, "abs": 1e-6} if framework == "mlx" else {"rel": 1e-10, "abs": 1e-12}
    for rank in found(n, "trained"):
        assert rank[framework][by] == pytest.approx(alone[framework][by], **tolerance)
        assert rank[framework][by] == found(n, "trained")[0][framework][by]


@pytest.mark.parametrize("n", [2, 3])
def test_calls_that_move_gradients_on_give_the_same(found, n):
    (alone,) = found(1, "trained")
    for rank in found(n, "trained"):
        assert rank["numpy"]["calls"] == pytest.approx(alone["numpy"]["weights"], rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("n", [2, 3])
def test_fp16_gradients_stay_within_their_rounding(found, n):
    (alone,) = found(1, "trained")
    exact = np.array(alone["numpy"]["samples"])
    begin = np.random.default_rng(0).normal(size=exact.shape)
    for rank in found(n, "trained"):
        off = np.linalg.norm(rank["numpy"]["fp16"] - exact) / np.linalg.norm(exact - begin)
        assert 1e-7 < off < 2 * 2**-11


def test_topology(found):
    one_host = {"size": 2, "local_size": 2, "cross_rank": 0, "cross_size": 1, "launcher": "Open MPI"}
    for rank, world in enumerate(found(2, "topology")):
        assert world == {"rank": rank, "local_rank": rank, **one_host}


def test_without_a_launcher_it_is_one_process(found):
    (world,) = found(1, "topology")
    assert (world["rank"], world["size"], world["launcher"]) == (0, 1, "none")


def test_a_launcher_that_mpi_does_not_see_is_refused(run_ranks):
    variables = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}
    (refused,) = run_ranks(PROGRAM, "mismatched", 1, variables=variables)
    for part in (
        "TopologyMismatchError: srun started rank 2 of 4",
        "rank 0 of 1",
        "Open MPI",
        "hvdkit launch",
        "mpi4py",
    ):
        assert part in refused


def test_a_started_exchange_goes_on_while_the_caller_does_not_wait(found):
    """In one message, by copies and in shared memory; moved on by a thread and by calls."""
    first, second = found(2, "overlaps")
    names = [f"{progress} {values}" for progress in ("thread", "calls") for values in (100, 1000, 300_000)]
    assert list(first) == list(second) == names
    assert all(one == {"early": False, "done": True, "mean": [2.0, 2.0]} for one in first.values())
    assert all(one == {"mean": [2.0, 2.0]} for one in second.values())


def test_each_of_many_steps_gives_its_own_sum_at_every_length(found):
    """Lengths for one message, for copies and for shared memory; ranks that come and go at other times."""
    for wrong in found(3, "steps"):
        assert wrong == []


def test_a_mistake_on_one_rank_is_an_error_on_every_rank_and_no_hang(found):
    well, ill, other = found(3, "errors")
    for said in (well, ill, other):
        for name in ("model", "names", "options", "broadcast"):
            assert said[name].startswith("AgreementError: the ranks hold different models: rank"), name
        assert said["weight"].startswith("AgreementError: 1 of 3 ranks gave a weight")
        assert "different metrics" in said["metrics"]
        assert "a differs between ranks 0, 2 and rank 1, by at most 0.5" in said["agreement"]
        assert "a.b (1) differs" in said["same path"] or "a.b differs" in said["same path"]
        assert "by at most 1;" in said["large"]
        assert all("by at most 2;" in one for one in said["signs"])
        assert said["no communicator"].startswith("InvalidArgumentError: comm must be an mpi4py communicator")
        assert said["root"].startswith("InvalidArgumentError: root must be a rank in 0 .. 2, got 9")
        assert said["overflow"] == "[inf, inf]"
        assert "a differs between ranks 0, 2 and rank 1, by at most nan" in said["infinite"]
        assert said["after"] == "30000.0"
    assert "a float64 (4,)" in ill["model"] and "a float64 (3,)" in other["model"]
    parts = {
        "shape": "has the shape (4,)",
        "started": "dict of a",
        "no array": "a is of type str",
        "metric": "must be a number",
    }
    for name, part in parts.items():
        assert ill[name].startswith("InvalidArgumentError: ") and part in ill[name]
        for said in (well, other):
            assert said[name].startswith("AgreementError: rank 1 failed") and part in said[name]


def test_a_state_is_broadcast_bit_for_bit(found):
    for number, rank in enumerate(found(3, "state")):
        assert rank["same object"] and rank["kept"] == [0, 1, 2]
        assert rank["frozen"] == [0, 0]
        assert rank["nested"] == [0, 0.5] and rank["empty"] == [0, 3]
        assert rank["turned"] == [[0, 3], [1, 4], [2, 5]]
        assert rank["flag"] == [True] and rank["negative zero"]
        assert rank["means"] == pytest.approx({"loss": 1.0, "accuracy": 30 / 60}), number
        assert rank["second"].startswith("AgreementError: after step 2, the ranks disagree: a differs between")


@pytest.mark.parametrize("n", [1, 2])
def test_checkpoints_go_on_on_another_number_of_ranks(found, n):
    saved = found(2, "saved")
    for rank in saved:
        assert rank["nothing"] and rank["files"] == ["manifest.json", "random.npy", "state.json", "state.npz"]
    ranks = found(n, "restored", "go on")
    for rank in ranks:
        assert rank["same object"] and rank["w"] == [1.5, 1.5]
        assert rank["half"] == ["bfloat16", 0.25, 0.25, 0.25]
        assert rank["turned"] == [[0, 1, 2], [3, 4, 5]] and rank["step"] == 2
        assert rank["metadata"] == {"accuracy": 0.5, "size": 2, "framework": "arrays", "seed": 7}
        assert "it holds w float64 (2,), the state has w float64 (3,)" in rank["other"]
    order = np.random.default_rng(np.random.SeedSequence([1, 0])).permutation(24)
    assert sorted(one for rank in ranks for one in rank["rest"]) == sorted(order[8:].tolist())
    again = [rank["next"] for rank in ranks] == [rank["next"] for rank in saved]
    assert again == (n == 2)
    assert len({rank["next"] for rank in ranks}) == n
    assert "loader must be what shard returned" in ranks[0]["no loader"]


def test_a_checkpoint_that_cannot_be_written_fails_on_every_rank(found):
    for error in found(2, "unwritable"):
        assert error.startswith("CheckpointError: could not write the checkpoint of step 1")


def test_a_communicator_averages_among_its_ranks(found):
    assert found(3, "subset") == [[3.0], [3.0], [6.0]]


def test_fit_trains_all_ranks_alike_and_goes_on_where_it_stopped(found):
    whole = found(2, "whole")
    assert whole[0] == whole[1] and len(whole[0]["losses"]) == 3
    assert whole[0]["losses"][2] < whole[0]["losses"][0]
    for rank in found(2, "last epoch", "go on"):
        assert rank == {"w": whole[0]["w"], "losses": whole[0]["losses"][2:]}


def test_fit_on_every_sample_is_that_of_one_process(found):
    (alone,) = found(1, "exact")
    for rank in found(2, "exact"):
        assert rank["w"] == pytest.approx(alone["w"], rel=1e-10)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("raises", "ValueError: rank 1 has a bad day"),
        ("exits", "hvdkit: rank 1 ended, and rank"),
        ("fewer steps", "hvdkit: rank 1 ended, and rank"),
    ],
)
@pytest.mark.parametrize("values", [2, 1000])
def test_a_rank_that_ends_early_ends_the_job(run_ranks, how, told, values):
    (stderr,) = run_ranks(PROGRAM, "leaves_early", 3, how=how, values=values, fails=True)
    assert told in stderr


def test_a_rank_may_end_later_than_the_others(found, directory):
    assert found(2, "ended", "go on") == ["ended", "ended"]
    assert (directory / "alone").read_text() == "done"
