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
TRAININGS = [(2, "numpy"), (2, "mlx"), (3, "numpy"), (3, "mlx"), (3, "jax")]  # jax takes seconds to start: once
_answers: dict[int, list[Any]] = {}


@pytest.fixture
def trained(run_ranks):
    """What n ranks ended with; they start once for all tests."""

    def ranks(n: int) -> list[Any]:
        if n not in _answers:
            here = [name for name in FRAMEWORKS if n == 1 or (n, name) in TRAININGS]
            _answers[n] = run_ranks(PROGRAM, "everything", n, frameworks=here)
        return _answers[n]

    return ranks


@pytest.mark.parametrize("by", ["weights", "samples"])
@pytest.mark.parametrize(("n", "framework"), TRAININGS)
def test_n_ranks_end_with_the_weights_of_one_process(trained, framework, n, by):
    """53 samples in global batches of 12: the last step has 5, split 3 and 2, or 2, 2 and 1."""
    if framework not in FRAMEWORKS:
        pytest.skip(f"needs {' and '.join(NEEDS[framework])}")
    (alone,) = trained(1)
    tolerance = {"rel": 1e-4, "abs": 1e-6} if framework == "mlx" else {"rel": 1e-10, "abs": 1e-12}
    for rank in trained(n):
        assert rank[framework][by] == pytest.approx(alone[framework][by], **tolerance)
        assert rank[framework][by] == trained(n)[0][framework][by]


@pytest.mark.parametrize("n", [2, 3])
def test_calls_that_move_gradients_on_give_the_same(trained, n):
    (alone,) = trained(1)
    for rank in trained(n):
        assert rank["numpy"]["calls"] == pytest.approx(alone["numpy"]["weights"], rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("n", [2, 3])
def test_fp16_gradients_stay_within_their_rounding(trained, n):
    (alone,) = trained(1)
    exact = np.array(alone["numpy"]["samples"])
    begin = np.random.default_rng(0).normal(size=exact.shape)
    for rank in trained(n):
        off = np.linalg.norm(rank["numpy"]["fp16"] - exact) / np.linalg.norm(exact - begin)
        assert 1e-7 < off < 2 * 2**-11


def test_topology(run_ranks):
    one_host = {"size": 2, "local_size": 2, "cross_rank": 0, "cross_size": 1, "launcher": "Open MPI"}
    for rank, world in enumerate(run_ranks(PROGRAM, "topology", 2)):
        assert world == {"rank": rank, "local_rank": rank, **one_host}


def test_without_a_launcher_it_is_one_process(run_ranks):
    (world,) = run_ranks(PROGRAM, "topology", 1)
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


def test_a_started_exchange_goes_on_while_the_caller_does_not_wait(run_ranks):
    """In one message, by copies and in shared memory; moved on by a thread and by calls."""
    first, second = run_ranks(PROGRAM, "overlaps", 2, sizes=[100, 1000, 300_000])
    names = [f"{progress} {values}" for progress in ("thread", "calls") for values in (100, 1000, 300_000)]
    assert list(first) == list(second) == names
    assert all(found == {"early": False, "done": True, "mean": [2.0, 2.0]} for found in first.values())
    assert all(found == {"mean": [2.0, 2.0]} for found in second.values())


def test_each_of_many_steps_gives_its_own_sum_at_every_length(run_ranks):
    """Lengths for one message, for copies and for shared memory; ranks that come and go at other times."""
    for wrong in run_ranks(PROGRAM, "many_steps", 3, sizes=[1, 500, 1000, 4000, 5000, 70_000], steps=300):
        assert wrong == []


def test_a_mistake_on_one_rank_is_an_error_on_every_rank_and_no_hang(run_ranks):
    well, ill, other = run_ranks(PROGRAM, "errors", 3)
    for found in (well, ill, other):
        for name in ("model", "names", "options", "broadcast"):
            assert found[name].startswith("AgreementError: the ranks hold different models: rank"), name
        assert found["weight"].startswith("AgreementError: 1 of 3 ranks gave a weight")
        assert "different metrics" in found["metrics"]
        assert "a differs between ranks 0, 2 and rank 1, by at most 0.5" in found["agreement"]
        assert "a.b (1) differs" in found["same path"] or "a.b differs" in found["same path"]
        assert "by at most 1;" in found["large"]
        assert all("by at most 2;" in said for said in found["signs"])
        assert found["no communicator"].startswith("InvalidArgumentError: comm must be an mpi4py communicator")
        assert found["root"].startswith("InvalidArgumentError: root must be a rank in 0 .. 2, got 9")
        assert found["overflow"] == "[inf, inf]"
        assert "a differs between ranks 0, 2 and rank 1, by at most nan" in found["infinite"]
        assert found["after"] == "30000.0"
    assert "a float64 (4,)" in ill["model"] and "a float64 (3,)" in other["model"]
    parts = {
        "shape": "has the shape (4,)",
        "started": "dict of a",
        "no array": "a is of type str",
        "metric": "must be a number",
    }
    for name, part in parts.items():
        assert ill[name].startswith("InvalidArgumentError: ") and part in ill[name]
        for found in (well, other):
            assert found[name].startswith("AgreementError: rank 1 failed") and part in found[name]


def test_a_state_is_broadcast_bit_for_bit(run_ranks):
    for number, rank in enumerate(run_ranks(PROGRAM, "state_and_metrics", 3)):
        assert rank["same object"] and rank["kept"] == [0, 1, 2]
        assert rank["frozen"] == [0, 0]
        assert rank["nested"] == [0, 0.5] and rank["empty"] == [0, 3]
        assert rank["turned"] == [[0, 3], [1, 4], [2, 5]]
        assert rank["flag"] == [True] and rank["negative zero"]
        assert rank["means"] == pytest.approx({"loss": 1.0, "accuracy": 30 / 60}), number
        assert rank["second"].startswith("AgreementError: after step 2, the ranks disagree: a differs between")


@pytest.mark.parametrize("n", [1, 2])
def test_checkpoints_go_on_on_another_number_of_ranks(run_ranks, tmp_path, n):
    directory = str(tmp_path / "run")
    saved = run_ranks(PROGRAM, "checkpoints", 2, directory=directory, go_on=False)
    for rank in saved:
        assert rank["nothing"] and rank["files"] == ["manifest.json", "random.npy", "state.json", "state.npz"]
    ranks = run_ranks(PROGRAM, "checkpoints", n, directory=directory, go_on=True)
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


def test_a_checkpoint_that_cannot_be_written_fails_on_every_rank(run_ranks, tmp_path):
    (tmp_path / "file").write_text("not a directory")
    for error in run_ranks(PROGRAM, "unwritable", 2, directory=str(tmp_path / "file" / "run")):
        assert error.startswith("CheckpointError: could not write the checkpoint of step 1")


def test_a_communicator_averages_among_its_ranks(run_ranks):
    assert run_ranks(PROGRAM, "subset", 3) == [[3.0], [3.0], [6.0]]


def test_fit_trains_all_ranks_alike_and_goes_on_where_it_stopped(run_ranks, tmp_path):
    whole = run_ranks(PROGRAM, "fit", 2, directory="", epochs=3)
    assert whole[0] == whole[1] and len(whole[0]["losses"]) == 3
    assert whole[0]["losses"][2] < whole[0]["losses"][0]
    run_ranks(PROGRAM, "fit", 2, directory=str(tmp_path / "run"), epochs=2)
    for rank in run_ranks(PROGRAM, "fit", 2, directory=str(tmp_path / "run"), epochs=3):
        assert rank == {"w": whole[0]["w"], "losses": whole[0]["losses"][2:]}


def test_fit_on_every_sample_is_that_of_one_process(run_ranks):
    (alone,) = run_ranks(PROGRAM, "fit", 1, directory="", epochs=2, exact=True)
    for rank in run_ranks(PROGRAM, "fit", 2, directory="", epochs=2, exact=True):
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


def test_a_rank_may_end_later_than_the_others(run_ranks, tmp_path):
    assert run_ranks(PROGRAM, "ends_later", 2, directory=str(tmp_path)) == ["ended", "ended"]
    assert (tmp_path / "alone").read_text() == "done"
