"""hvdkit.torch on real ranks."""

import importlib.util

import pytest

MISSING = [name for name in ("torch", "horovod") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (`make test` installs all)"),
]

PROGRAM = "programs_torch.py"


@pytest.mark.parametrize(("controller", "launcher"), [("mpi", "Open MPI"), ("gloo", "horovodrun")])
def test_topology_under_each_launcher(run_ranks, controller, launcher):
    one_host = {"size": 3, "local_size": 3, "cross_rank": 0, "cross_size": 1, "launcher": launcher}
    for rank, world in enumerate(run_ranks(PROGRAM, "topology", 3, controller=controller)):
        assert world == {"rank": rank, "local_rank": rank, **one_host}


def test_topology_without_a_launcher(run_ranks):
    (world,) = run_ranks(PROGRAM, "topology", 1)
    assert (world["rank"], world["size"], world["launcher"]) == (0, 1, "none")


def test_a_launcher_that_horovod_does_not_see_is_refused(run_ranks):
    variables = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}
    (refused,) = run_ranks(PROGRAM, "mismatched", 1, variables=variables)
    assert refused["error"] == "TopologyMismatchError"
    for part in ("srun started rank 2 of 4", "rank 0 of 1", "Open MPI", "hvdkit launch"):
        assert part in refused["message"]


def test_broadcast_copies_everything_bit_for_bit(run_ranks):
    ranks = run_ranks(PROGRAM, "broadcast_after_root_stepped", 3)
    assert ranks[1] == ranks[0] and ranks[2] == ranks[0]
    assert ranks[0]["step"] == 1.0
    assert ranks[2]["odd"] == [0.0, 1.0, 2.0]
    assert ranks[2]["lr"] == 0.01


def test_broadcast_takes_no_step_of_its_own(run_ranks):
    for rank in run_ranks(PROGRAM, "broadcast_leaves_fresh_optimizer_alone", 2):
        assert rank == {"unchanged": True, "slots": 0}


def test_broadcast_of_different_models_is_one_error_on_every_rank(run_ranks):
    for number, rank in enumerate(run_ranks(PROGRAM, "broadcast_different_models", 2)):
        assert f"rank {number} has weight float32 ({3 + number}, 3)" in rank["message"]


def test_metrics_are_means_over_ranks_and_over_counts(run_ranks):
    for rank in run_ranks(PROGRAM, "metrics", 3):
        assert rank["means"] == pytest.approx({"loss": 1.0, "accuracy": 30 / 60})
        assert "different metrics" in rank["message"]


def test_checkpoints_restore_every_rank(run_ranks, tmp_path):
    for rank in run_ranks(PROGRAM, "checkpoints", 2, directory=str(tmp_path / "run")):
        assert rank["nothing"] and rank["back"] and rank["same_again"]
        assert rank["writer"] == ["manifest.json", "model.pt", "optimizer.pt", "random.npy"]
        assert rank["metadata"]["epoch"] == 1 and rank["metadata"]["size"] == 2
        assert "does not fit this Linear" in rank["other"]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-0000000001"]


def test_a_checkpoint_that_cannot_be_written_fails_on_every_rank(run_ranks, tmp_path):
    blocked = tmp_path / "file" / "run"
    (tmp_path / "file").write_text("not a directory")
    for rank in run_ranks(PROGRAM, "unwritable_checkpoint", 2, directory=str(blocked)):
        assert rank["error"] == "CheckpointError"
        assert "step 1" in rank["message"] and str(blocked) in rank["message"]


def test_gradient_options_reach_horovod(run_ranks):
    expected = [
        ({}, [1.5, 10.0]),
        ({"op": "sum"}, [3.0, 20.0]),
        ({"compression": "fp16"}, [1.5, 10.0]),
        ({"gradient_predivide_factor": 2.0}, [1.5, 10.0]),
        ({"groups": 1}, [1.5, 10.0]),
        ({"backward_passes_per_step": 2}, [3.0, 30.0]),
    ]
    ranks = run_ranks(PROGRAM, "gradients", 2, variants=[*(options for options, _ in expected), {"op": "adasum"}])
    for updates in ranks:
        for update, (options, value) in zip(updates, expected, strict=False):
            assert update == pytest.approx(value), options
    # Adasum lies between the mean and the sum of nearly parallel gradients, the same on both ranks.
    assert ranks[0][-1] == ranks[1][-1]
    assert 10.0 <= ranks[0][-1][1] < 20.0


def test_process_set_averages_within_the_set(run_ranks):
    updates = [rank["update"] for rank in run_ranks(PROGRAM, "process_set_gradients", 3)]
    assert updates == pytest.approx([3.0, 3.0, 6.0])


def test_mistakes_are_single_errors(run_ranks):
    (found,) = run_ranks(PROGRAM, "mistakes", 1)
    assert "distributed already" in found["twice"]
    assert "4 parameters, 0 of them in the model" in found["other model"]
    assert "not built yet" in found["unbuilt"]
    assert "root must be a rank" in found["root"]


def test_fit_trains_all_ranks_alike(run_ranks):
    first, second = run_ranks(PROGRAM, "fit", 2, batch_size=4, base_lr=0.1, warmup_epochs=1)
    assert first == second
    losses = [epoch["loss"] for epoch in first["history"]]
    assert len(losses) == 4 and losses[-1] < losses[0]


def test_fit_goes_on_where_it_was_interrupted(run_ranks, tmp_path):
    settings = {"batch_size": 4, "base_lr": 0.1, "warmup_epochs": 3, "checkpoint_dir": str(tmp_path / "run")}
    whole, _ = run_ranks(PROGRAM, "fit", 2, **{**settings, "checkpoint_dir": str(tmp_path / "whole")})
    run_ranks(PROGRAM, "fit", 2, epochs=2, **settings)
    for rank in run_ranks(PROGRAM, "fit", 2, **settings):
        assert rank == {"history": whole["history"][2:], "weights": whole["weights"]}


def test_fit_on_every_sample_is_that_of_one_process(run_ranks):
    (alone,) = run_ranks(PROGRAM, "fit", 1, batch_size=8, base_lr=0.2, remainder="exact")
    for rank in run_ranks(PROGRAM, "fit", 2, batch_size=4, base_lr=0.1, remainder="exact"):
        assert rank["weights"] == pytest.approx(alone["weights"], rel=1e-10, abs=1e-12)


def test_gradients_in_buckets_at_the_edges(run_ranks):
    for rank in run_ranks(PROGRAM, "buckets", 2):
        assert rank["missing on a rank"] == [3.0, 3.0, 2.0, 2.0, 0.0, 0.0]
        assert rank["zeroed in place"] == [3.0, 3.0, 3.0, 3.0, 0.0, 0.0]
        assert rank["state loaded in mid-step"] == [1.5, 1.5, 1.5, 1.5, 0.0, 0.0]
        assert sum(part**2 for part in rank["clipped"]) == pytest.approx(4.0)
        for name in ("sparse", "adasum", "groups", "size"):
            assert "bucket" in rank[name]
