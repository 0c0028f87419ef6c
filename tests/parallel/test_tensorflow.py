"""hvdkit.tensorflow on real ranks: two over MPI, others forked and over Gloo, since TensorFlow takes long to load."""

import importlib.util
import re

import pytest

MISSING = [name for name in ("tensorflow", "horovod") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (`make test` installs all)"),
]

PROGRAM = "programs_tensorflow.py"
TRAININGS = [
    "keras, eager",
    "keras, tf.function",
    "module, eager",
    "module, tf.function",
    "embedding, eager",
    "embedding, tf.function",
    "embedding, dense",
    "optimizer, eager",
    "optimizer, tf.function",
]


@pytest.fixture
def together(once):
    return once("together", 3)


@pytest.fixture
def alone(once):
    return once("alone", 1)[0]


@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize(("n", "controller"), [(2, "mpi"), (3, "gloo")])
def test_n_ranks_end_with_the_weights_of_one_process(once, training, n, controller):
    (plain,) = once("train_all", 1, global_batch=12)
    ranks = once("train_all", n, global_batch=12, controller=controller)
    expected = plain["trainings"][training]
    for rank in ranks:
        assert rank["trainings"][training]["steps"] == expected["steps"] == 20
        assert rank["trainings"][training]["weights"] == pytest.approx(expected["weights"], rel=1e-10, abs=1e-12)
        assert rank["trainings"][training]["weights"] == ranks[0]["trainings"][training]["weights"]


def test_adasum_lies_between_mean_and_sum_of_nearly_parallel_gradients(once):
    first, second = (rank["adasum"] for rank in once("train_all", 2, global_batch=12, controller="mpi"))
    assert first == second
    assert 10.0 <= first[1] < 20.0


def test_adasum_without_mpi_is_refused(once):
    for rank in once("train_all", 3, global_batch=12, controller="gloo"):
        assert "needs MPI" in rank["adasum"]


def test_horovods_own_tape_fails_on_keras_3_variables(alone):
    assert "has no attribute 'ref'" in alone["horovod's own tape"]["message"]


def test_topology_without_a_launcher(alone):
    assert alone["world"] == [0, 1, "none"]


def test_a_launcher_that_horovod_does_not_see_is_refused(alone):
    for part in ("srun started rank 2 of 4", "rank 0 of 1", "hvdkit launch"):
        assert part in alone["refused"]


def test_each_rank_takes_one_gpu_and_its_memory_as_needed(alone):
    gpus = alone["gpus"]
    assert gpus["device"] == "/GPU:0"
    assert gpus["visible"] == [[["GPU 2"], "GPU"], [[], "GPU"]]
    assert gpus["growth"] == [["GPU 2", True]]
    assert "local rank 4 has no accelerator of its own" in gpus["crowded"]


def test_a_rank_without_gpu_takes_its_threads_once(alone):
    assert alone["device"] == alone["pinned again"] == "/CPU:0"
    assert alone["threads"] == 1  # OMP_NUM_THREADS of the test's ranks


def test_pinning_too_late_warns(alone):
    (warning,) = alone["too late"]
    assert warning.startswith("RuntimeWarning: TensorFlow has started already")


def test_broadcast_copies_everything_bit_for_bit(together):
    first = together[0]["broadcast"]
    for rank in together:
        assert rank["broadcast"] == first
    assert first["extra"] == [[0, 1, 2], [1, 1], [0.0, 0.1, 0.2]]
    assert first["signs"] == [True, False]
    assert first["lr"] == pytest.approx(0.01)
    assert first["iterations"] == 1
    assert first["slot"] > 0


def test_broadcast_takes_no_step_of_its_own(together):
    for rank in together:
        assert rank["fresh"] == {"unchanged": True, "iterations": 0, "built": True}


def test_broadcast_of_different_models_is_one_error_on_every_rank(together):
    for number, rank in enumerate(together):
        assert f"rank {number} has last/kernel float32 (3, {3 + number})" in rank["layouts"]


def test_agreement_passes_and_fails_on_every_rank(together):
    for rank in together:
        agreed, weight, rate, layout = rank["agreement"]
        assert agreed == ""
        assert "/kernel differs between ranks 0-1 and rank 2, by at most 0.0001" in weight
        assert "/learning_rate differs between ranks 0-1 and rank 2, by at most 0.1" in rate
        assert "different models" in layout


def test_metrics_are_means_over_ranks_and_over_counts(together):
    for rank in together:
        assert rank["metrics"]["means"] == pytest.approx({"loss": 1.0, "accuracy": 30 / 60})
        assert "different metrics" in rank["metrics"]["message"]


def test_checkpoints_restore_every_rank(together):
    for found in (rank["checkpoints"] for rank in together):
        assert found["nothing"] and found["back"] and found["same_again"] and found["without hvdkit"]
        stem = ("model", "optimizer")
        data = [f"{name}.{end}" for name in stem for end in ("data-00000-of-00001", "index")]
        assert found["files"] == ["manifest.json", *data, "random.npy"]
        assert found["metadata"]["epoch"] == 1 and found["metadata"]["size"] == 3
        assert "does not fit this Sequential: 00002_sequential_dense_kernel is in the file alone" in found["small"]
        assert "is float64 (6, 8), not float32 (6, 9)" in found["wide"]
        assert "does not fit this Lion" in found["optimizer"]


def test_a_checkpoint_that_cannot_be_written_fails_on_every_rank(together):
    for rank in together:
        assert "step 1 in file/run" in rank["blocked"]["message"]


def test_gradient_options_reach_horovod(together):
    mean, total = [2.0, 10.0], [6.0, 30.0]
    for rank in together:
        assert rank["gradients"] == [pytest.approx(value) for value in (mean, total, mean, mean, mean, mean)]


def test_process_set_averages_within_the_set(together):
    assert [rank["process set"] for rank in together] == [[1.5, 10.0], [1.5, 10.0], [3.0, 10.0]]


def test_the_distributed_tape_is_used_like_a_tape(together):
    for rank in together:
        assert rank["tape"] == {
            "output_gradients": [9.0, None, 9.0],
            "unconnected zero": [3.0, 0.0, 3.0],
            "tf.function": [9.0, None, 0.0],
            "inside its context, two types": [3.0, 10.0],
            "nothing connected": [None],
        }


def test_shards_are_those_of_the_plan_for_arrays_and_datasets(together):
    for rank in together:
        assert rank["shards"]["as planned"] == [True] * 18
    parts = {name: [rank["shards"]["samples"][name] for rank in together] for name in ("drop 7 False", "exact 7 False")}
    assert parts["drop 7 False"] == [[[0, 1]], [[2, 3]], [[4, 5]]]
    assert parts["exact 7 False"] == [[[0, 1], [6]], [[2, 3]], [[4, 5]]]
    everything = [index for rank in together for batch in rank["shards"]["samples"]["exact 53 True"] for index in batch]
    assert sorted(everything) == list(range(53))


def test_a_shard_is_a_dataset_for_functions_and_fit(together):
    forms = [rank["shards"] for rank in together]
    for epoch in (0, 1):
        assert sum(form["tf.function sums"][epoch] for form in forms) == sum(range(12))
        assert sum(form["fit"][epoch] for form in forms) / 3 == pytest.approx(sum(range(12)) / 12)
    for form in forms:
        assert form["tf.function sums"][0] != form["tf.function sums"][1]  # another order
        assert form["epochs after fit and a break"] == 3
        assert form["weights"] == "float32"
        assert form["spec"] == "(None, 2, 2)"
        assert form["auto shard off"] == "OFF"


def test_fit_trains_all_ranks_alike(together):
    first = together[0]["fit"]
    assert all(rank["fit"] == first for rank in together)
    losses = [epoch["loss"] for epoch in first["history"]]
    assert len(losses) == 4 and losses[-1] < losses[0]


def test_warmup_rises_per_step_and_resumes_by_the_optimizers_count(alone):
    rising = [0.01 + 0.07 * step / 6 for step in range(7)]
    assert alone["rates"]["seen"] == pytest.approx([*rising, 0.04, 0.02])
    assert alone["rates"]["resumed"] == pytest.approx(rising[3])


@pytest.mark.parametrize(
    ("mistake", "answer"),
    [
        ("tape twice", "distributed already"),
        ("optimizer twice", "distributed already"),
        ("both", "distribute the tape or the optimizer, not both"),
        ("neither", "got 'adam'"),
        ("passes", "a tape holds one backward pass, got backward_passes_per_step=2"),
        ("groups", "groups must be an integer >= 1, got 0"),
        ("unbuilt", "the Sequential is not built yet"),
        ("unbuilt inside", "the Dense is not built yet"),
        ("text", "holds strings"),
        ("optimizer", "must be a Keras 3 optimizer, got str"),
        ("root", "root must be a rank in 0 .. 0, got 9"),
        ("in a function", "broadcast_state cannot run inside tf.function"),
        ("threads", "call pin_device right after init()"),
        ("gpu", "TensorFlow sees none"),
        ("endless", "endless"),
        ("two lengths", "one length, got 3, 4"),
        ("lists", "np.asarray"),
        ("batched", "leave .batch() out"),
        ("schedule", "follows a schedule of its own"),
    ],
)
def test_mistakes_are_single_errors(alone, mistake, answer):
    assert answer in alone["mistakes"][mistake]
    assert "\n" not in alone["mistakes"][mistake]


def test_the_examples_learn_the_digits_on_one_process_and_on_two(once):
    flags = ["--fp16-allreduce", "--checkpoint_dir", "checkpoints"]
    (single,) = once("example", 1, script="single.py")
    root, other = once("example", 2, script="cnn.py", flags=tuple(flags))
    assert single["status"] == root["status"] == other["status"] == 0
    assert other["lines"] == []
    assert "All 2 ranks hold identical weights and optimizer state." in root["lines"]
    assert re.fullmatch(r"Hvd Procs 2 Total time: [\d.]+ second", root["lines"][-1])
    for lines in (single["lines"], root["lines"]):
        (accuracy,) = (float(line.split()[2]) for line in lines if line.startswith("Test accuracy:"))
        assert accuracy >= 97
