"""hvdkit.tensorflow on real ranks, two over MPI and three over Gloo: what is not the same in all frameworks."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from programs_checks import message
from ranks import missing, on_ranks

import hvdkit
from hvdkit.steps.shards import Shard

EXAMPLES = Path(__file__).parents[2] / "examples" / "tensorflow"
SAMPLES, FEATURES, CLASSES, GLOBAL_BATCH = 53, 6, 3, 12  # 53 is no multiple of any n * batch
WORDS = 5
MEAN, TOTAL = [2.0, 10.0], [6.0, 30.0]  # of [1 + rank, 10] on three ranks


def make_data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(5).normal(size=(SAMPLES, FEATURES))
    return x, (x.sum(axis=1) > 0).astype(np.int64) + (x[:, 0] > 1)


def make_keras(seed: int = 0) -> Any:
    import keras

    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(8, "tanh", dtype="float64"), keras.layers.Dense(CLASSES, dtype="float64")]
    return keras.Sequential([keras.Input((FEATURES,), dtype="float64"), *layers])


def make_module(seed: int) -> Any:
    """A model of plain tf.Variables around a Keras layer."""
    import keras
    import tensorflow as tf

    class Affine(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = tf.Variable(keras.random.normal((FEATURES, 8), dtype="float64"), name="first")
            self.rest = [tf.Variable(tf.zeros(8, tf.float64)), keras.layers.Dense(CLASSES, dtype="float64")]
            self.rest[1].build((None, 8))

        @property
        def trainable_variables(self) -> list[Any]:
            return [self.first, self.rest[0], *self.rest[1].trainable_variables]

        def __call__(self, x: Any) -> Any:
            return self.rest[1](tf.tanh(x @ self.first + self.rest[0]))

    keras.utils.set_random_seed(seed)
    return Affine()


def make_embedding(seed: int) -> Any:
    """Averages word vectors; words repeat within samples and across ranks."""
    import keras

    keras.utils.set_random_seed(seed)
    words = keras.layers.Embedding(WORDS, 4, dtype="float64")
    sort = keras.layers.Lambda(lambda x: keras.ops.cast(keras.ops.abs(x) * 2, "int32") % WORDS)
    mean = keras.layers.GlobalAveragePooling1D(dtype="float64")
    return keras.Sequential(
        [keras.Input((FEATURES,), dtype="float64"), sort, words, mean, keras.layers.Dense(CLASSES, dtype="float64")]
    )


def make_optimizer(name: str) -> Any:
    import keras

    if name == "sgd":
        return keras.optimizers.SGD(0.1, momentum=0.9)
    return keras.optimizers.Adam(0.01, global_clipnorm=0.1 if name == "clipped" else None)


# name: model, optimizer, whether the step is a tf.function, what is distributed, options
TRAININGS: dict[str, tuple[Callable[[int], Any], str, bool, str, dict[str, Any]]] = {
    "keras, eager": (make_keras, "sgd", False, "tape", {}),
    "keras, tf.function": (make_keras, "adam", True, "tape", {"groups": 3}),
    "module, eager": (make_module, "adam", False, "tape", {}),
    "module, tf.function": (make_module, "sgd", True, "tape", {}),
    "embedding, eager": (make_embedding, "adam", False, "tape", {}),
    "embedding, tf.function": (make_embedding, "adam", True, "tape", {}),
    "embedding, dense": (make_embedding, "adam", True, "tape", {"sparse_as_dense": True}),
    "optimizer, eager": (make_keras, "sgd", False, "optimizer", {}),
    "optimizer, tf.function": (make_keras, "clipped", True, "optimizer", {}),
}


def weights(model: Any) -> list[float]:
    return np.concatenate([np.ravel(variable.numpy()) for variable in model.trainable_variables]).tolist()


def train(hk: Any, world: hvdkit.Topology, training: str) -> tuple[list[float], int]:
    """20 steps: exact data parallelism on several ranks, plain TensorFlow with dense gradients in one process."""
    import keras
    import tensorflow as tf

    make, optimizer_name, in_function, what, options = TRAININGS[training]
    for _ in range(world.rank):  # what a rank built before must not matter; nor its weights, the root's count
        keras.layers.Dense(2).build((None, 2))
    model, optimizer = make(world.rank), make_optimizer(optimizer_name)
    if what == "optimizer" and world.size > 1:
        optimizer = hk.distribute(optimizer, **options)
    hk.broadcast_state(model, optimizer)
    dataset = hk.shard(make_data(), world, GLOBAL_BATCH // world.size, remainder="exact", seed=3)

    def step(x: Any, y: Any, w: Any) -> None:
        tape = tf.GradientTape()
        with tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x))
            loss = tf.reduce_mean(w * losses)
        if what == "tape" and world.size > 1:
            tape = hk.distribute(tape, **options)
        gradients = tape.gradient(loss, model.trainable_variables)
        if world.size == 1:
            gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    if in_function:
        step = tf.function(step, reduce_retracing=True)
    for _ in range(4):
        for x, y, w in dataset:
            step(x, y, w)
    hk.check_agreement(model, optimizer, world)
    return weights(model), int(optimizer.iterations)


@on_ranks("tensorflow", n=3)
@pytest.mark.parametrize("training", TRAININGS)
def test_n_ranks_end_with_the_weights_of_one_process(hk, world, everyone, alone, training):
    found, steps = train(hk, world, training)
    expected, expected_steps = alone(train, training=training)
    assert steps == expected_steps == 20
    assert found == pytest.approx(expected, rel=1e-10, abs=1e-12)
    assert everyone(found) == [found] * world.size


def one_gradient(hk: Any, world: hvdkit.Topology, dtype: str = "float32", **options: Any) -> list[float]:
    """What a distributed tape makes of [1 + rank, 10]."""
    import tensorflow as tf

    variable = tf.Variable([0.0, 0.0], dtype=dtype)
    with hk.distribute(tf.GradientTape(), **options) as tape:
        loss = tf.reduce_sum(variable * tf.cast([1.0 + world.rank, 10.0], dtype))
    return tf.cast(tape.gradient(loss, variable), tf.float64).numpy().tolist()


@on_ranks("tensorflow", n=2, mpi=True)
def test_adasum_lies_between_mean_and_sum_of_nearly_parallel_gradients(hk, world, everyone):
    found = one_gradient(hk, world, op="adasum")
    assert 10.0 <= found[1] < 20.0
    assert everyone(found) == [found] * 2


@on_ranks("tensorflow", n=3)
def test_adasum_without_mpi_is_refused(hk, world):
    assert "needs MPI" in message(lambda: one_gradient(hk, world, op="adasum"))


@on_ranks("tensorflow", n=3)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, MEAN),
        ({"op": "sum"}, TOTAL),
        ({"compression": "fp16"}, MEAN),
        ({"gradient_predivide_factor": 2.0}, MEAN),
        ({"dtype": "bfloat16"}, MEAN),
        ({"dtype": "float64", "compression": "fp16"}, MEAN),
    ],
)
def test_gradient_options_reach_horovod(hk, world, options, expected):
    assert one_gradient(hk, world, **options) == pytest.approx(expected)


@on_ranks("tensorflow", n=3, fresh=True)
def test_process_set_averages_within_the_set(hk, everyone):
    import horovod.tensorflow as hvd

    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    world = hk.init()
    # Rank 2 has nothing to wait for, and its end would end the others' process set.
    assert everyone(one_gradient(hk, world, process_set=pair)) == [[1.5, 10.0], [1.5, 10.0], [3.0, 10.0]]


@on_ranks("tensorflow", n=3)
def test_the_distributed_tape_is_used_like_a_tape(hk, world):
    """The gradient of ``mine`` is 2 + rank, its mean 3."""
    import keras
    import tensorflow as tf

    mine, other = tf.Variable(3.0), keras.Variable(2.0, dtype="float16")
    factor = 2.0 + world.rank

    def nested() -> Any:
        with hk.distribute(tf.GradientTape(persistent=True, watch_accessed_variables=False)) as tape:
            tape.watch(mine)
            loss = factor * mine
        sources = {"a": mine, "b": (other, [mine])}
        first = tape.gradient(loss, sources, output_gradients=tf.constant(3.0))
        second = tape.gradient(loss, sources, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return first, second

    first, second = nested()
    assert [float(first["a"]), first["b"][0], float(first["b"][1][0])] == [9.0, None, 9.0]
    assert [float(second["a"]), float(second["b"][0]), float(second["b"][1][0])] == [3.0, 0.0, 3.0]
    first, second = tf.function(nested)()
    assert [float(first["a"]), first["b"][0], float(second["b"][0])] == [9.0, None, 0.0]
    with tf.GradientTape() as recorded:
        loss = factor * mine + 10 * tf.cast(other.value, tf.float32)
        both = hk.distribute(recorded).gradient(loss, [mine, other])  # inside its context, two types
    assert [float(gradient) for gradient in both] == [3.0, 10.0]
    with tf.GradientTape() as nothing:
        tf.constant(1.0)
    assert hk.distribute(nothing).gradient(tf.constant(1.0), [mine]) == [None]


@on_ranks("tensorflow", n=3)
def test_broadcast_copies_everything_bit_for_bit(hk, world, everyone):
    """The root has an optimizer with slots, the others have none; types that Horovod cannot add up."""
    import keras
    import tensorflow as tf

    model = make_keras(seed=world.rank)
    extra = [
        tf.Variable(tf.range(3) + world.rank, dtype=tf.int32, trainable=False),
        tf.Variable([world.rank == 0, True], trainable=False),
        keras.Variable(np.arange(3) * 0.1 + world.rank, dtype="bfloat16", trainable=False),
        tf.Variable(tf.zeros((0, 2)), trainable=False),
        tf.Variable([float("nan"), -0.0, float(world.rank)], trainable=False),
    ]
    optimizer = keras.optimizers.Adam(0.01 * (world.rank + 1))
    if world.is_root:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.ones((2, FEATURES), tf.float64)) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    hk.broadcast_state([model, extra], optimizer)
    hk.check_agreement([model, extra], optimizer, world)
    assert everyone(weights(model)) == [weights(model)] * 3
    values = [variable.numpy().astype(float).round(2).tolist() for variable in extra[:3]]
    assert values == [[0, 1, 2], [1, 1], [0.0, 0.1, 0.2]]
    assert np.signbit(extra[4].numpy()).tolist()[1:] == [True, False]
    assert float(optimizer.learning_rate) == pytest.approx(0.01) and int(optimizer.iterations) == 1
    assert float(np.abs(optimizer.variables[2].numpy()).sum()) > 0


@on_ranks("tensorflow", n=3)
def test_broadcast_takes_no_step_of_its_own(hk, world):
    import keras

    model = make_keras()
    before = weights(model)
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    hk.broadcast_state(model, optimizer)
    assert weights(model) == before and int(optimizer.iterations) == 0 and optimizer.built


@on_ranks("tensorflow", n=3)
def test_broadcast_of_different_models_is_one_error_on_every_rank(hk, world):
    import keras

    layer = keras.layers.Dense(3 + world.rank, name="last")
    layer.build((None, 3))
    error = message(lambda: hk.broadcast_state(layer))
    assert error.startswith("AgreementError: ")
    assert f"rank {world.rank} has last/kernel float32 (3, {3 + world.rank})" in error


@on_ranks("tensorflow", n=3)
def test_a_variable_that_one_rank_alone_has_is_named_on_every_rank(hk, world):
    import tensorflow as tf

    variables = list(make_keras().weights)
    if world.rank == world.size - 1:
        variables.append(tf.Variable(1.0, name="extra"))
    assert "different models" in message(lambda: hk.check_agreement(variables, None, world))


@on_ranks("tensorflow", n=3)
def test_metrics_are_means_over_ranks_and_over_counts(hk, world):
    values = {"loss": float(world.rank), "accuracy": (world.rank * 10, 10 + 10 * world.rank)}
    assert hk.average_metrics(values, world) == pytest.approx({"loss": 1.0, "accuracy": 30 / 60})
    assert "different metrics" in message(lambda: hk.average_metrics({f"loss{world.rank}": 1.0}, world))


@on_ranks("tensorflow", n=3)
def test_checkpoints_restore_every_rank(hk, world):
    """Save, train on, restore, also into a model with other automatic names: every rank is back where it was."""
    import keras
    import tensorflow as tf

    def step(model: Any, optimizer: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.fill((2, FEATURES), tf.cast(world.rank + 1, tf.float64))) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    model, optimizer = make_keras(), hk.distribute(make_optimizer("adam"))
    hk.broadcast_state(model, optimizer)
    store = hk.Checkpoints("run", keep=2)
    assert store.restore(model, optimizer) is None
    step(model, optimizer)
    saved = store.save(model, optimizer, step=1, epoch=1)
    kept = weights(model)
    step(model, optimizer)
    other, other_optimizer = make_keras(seed=7), hk.distribute(make_optimizer("adam"))
    restored = store.restore(other, other_optimizer)
    assert weights(other) == kept
    step(other, other_optimizer)
    assert weights(other) == weights(model)
    data = [f"{name}.{end}" for name in ("model", "optimizer") for end in ("data-00000-of-00001", "index")]
    assert sorted(file.name for file in saved.path.iterdir()) == ["manifest.json", *data, "random.npy"]
    assert restored.metadata["epoch"] == 1 and restored.metadata["size"] == 3
    reader = tf.train.load_checkpoint(str(saved.path / "model"))  # without hvdkit
    assert any(re.match(r"variables/00000_sequential\w*_dense\w*_kernel", name) for name in
               reader.get_variable_to_shape_map())  # fmt: skip
    small = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    wide = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(9), keras.layers.Dense(CLASSES)])
    assert re.search(
        r"does not fit this Sequential: 00002_sequential\w*_dense\w*_kernel is in the file alone",
        message(lambda: store.restore(small)),
    )
    assert "is float64 (6, 8), not float32 (6, 9)" in message(lambda: store.restore(wide))
    assert "does not fit this Lion" in message(lambda: store.restore(other, keras.optimizers.Lion(0.1)))


def follows(dataset: Any, plan: Shard) -> None:
    """Two epochs without a call, then one that was set."""
    assert len(dataset) == len(plan) == int(dataset.cardinality())
    epochs = [list(dataset), list(dataset)]
    dataset.set_epoch(5)
    epochs.append(list(dataset))
    for number, batches in zip((0, 1, 5), epochs, strict=True):
        for (x, y, *w), batch in zip(batches, plan.batches(number), strict=True):
            assert np.array_equal(y, batch.indices) and np.array_equal(x[:, 0], batch.indices)
            exact = plan.remainder == "exact"
            assert [one.numpy().tolist() for one in w] == [[batch.weight] * len(y)] * exact
    assert dataset.epoch == 6


@on_ranks("tensorflow", n=3)
@pytest.mark.parametrize(("samples", "batch_size", "shuffle"), [(53, 4, True), (7, 2, True), (7, 2, False)])
def test_shards_are_those_of_the_plan_for_arrays_and_datasets(hk, world, samples, batch_size, shuffle):
    import tensorflow as tf

    x = np.arange(samples, dtype=np.float64)
    pairs = (x[:, None] * np.ones(3), x.astype(np.int64))
    for remainder in ("drop", "pad", "exact"):
        plan = Shard(samples, world, batch_size, remainder, shuffle, seed=1)
        for given in (pairs, tf.data.Dataset.from_tensor_slices(pairs)):
            follows(hk.shard(given, world, batch_size, remainder=remainder, shuffle=shuffle, seed=1), plan)


@on_ranks("tensorflow", n=3)
def test_a_shard_is_a_dataset_for_functions_and_fit(hk, world, everyone):
    import keras
    import tensorflow as tf

    x = np.arange(12, dtype=np.float32)
    dataset = hk.shard((x, np.arange(12, dtype=np.int32)), world, 2, remainder="exact")

    @tf.function
    def loop(batches: Any) -> Any:
        total = tf.constant(0.0)
        for values, _, w in batches:
            total += tf.reduce_sum(values * tf.cast(w > 0, tf.float32))
        return total

    sums = [float(loop(dataset)), float(loop(dataset))]
    assert sums[0] != sums[1]  # another order
    assert np.sum(everyone(sums), axis=0).tolist() == [sum(range(12))] * 2
    fresh = hk.shard((x[:, None], x), world, 2)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Lambda(lambda value: value), keras.layers.Dense(1)])
    model.compile("sgd", lambda y, p: tf.reduce_mean(p) * 0 + tf.reduce_mean(y), jit_compile=False)
    history = model.fit(fresh, epochs=2, verbose=0, shuffle=False).history["loss"]
    assert np.mean(everyone(history), axis=0) == pytest.approx([sum(range(12)) / 12] * 2)
    for _ in fresh:
        break
    assert fresh.epoch == 3
    image = hk.shard({"image": np.zeros((12, 2, 2), np.uint8), "id": x.astype(np.float64)}, world, 2, shuffle=False)
    assert str(image.element_spec["image"].shape) == "(None, 2, 2)"
    assert next(iter(dataset))[2].dtype.name == "float32"
    assert dataset.options().experimental_distribute.auto_shard_policy.name == "OFF"


# One process


@on_ranks("tensorflow", n=1, fresh=True)
def test_a_process_without_a_launcher_is_a_job_of_one(hk):
    with mock.patch.dict(os.environ, {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}):
        refused = message(hk.init)
    for part in ("TopologyMismatchError: srun started rank 2 of 4", "rank 0 of 1", "hvdkit launch"):
        assert part in refused
    world = hk.init()
    assert (world.rank, world.size, world.launcher) == (0, 1, "none")


@on_ranks("tensorflow", n=1, fresh=True)
def test_each_rank_takes_one_gpu_and_its_memory_as_needed(hk):
    """Four GPUs that are not there: what TensorFlow would be told on local rank 2."""
    import tensorflow as tf

    names = [f"GPU {number}" for number in range(4)]
    with (
        mock.patch.object(tf.config, "list_physical_devices", lambda kind: names),
        mock.patch.object(tf.config, "set_visible_devices") as visible,
        mock.patch.object(tf.config.experimental, "set_memory_growth") as growth,
        mock.patch.object(tf.config.threading, "set_intra_op_parallelism_threads"),
        mock.patch.object(tf.config.threading, "set_inter_op_parallelism_threads"),
    ):
        assert hk.pin_device(hvdkit.Topology(2, 4, 2, 4), "gpu") == "/GPU:0"
        hk.pin_device(hvdkit.Topology(2, 4, 2, 4), "cpu")
        crowded = message(lambda: hk.pin_device(hvdkit.Topology(4, 5, 4, 5)))
    assert [call.args for call in visible.call_args_list] == [(["GPU 2"], "GPU"), ([], "GPU")]
    assert [call.args for call in growth.call_args_list] == [("GPU 2", True)]
    assert "LauncherError" in crowded and "local rank 4 has no accelerator of its own" in crowded


@on_ranks("tensorflow", n=1, fresh=True)
def test_a_rank_without_gpu_takes_its_threads_once(hk, world):
    import tensorflow as tf

    assert hk.pin_device(world) == hk.pin_device(world) == "/CPU:0"
    assert tf.config.threading.get_intra_op_parallelism_threads() == 1  # OMP_NUM_THREADS of the test's ranks
    late = mock.Mock(side_effect=RuntimeError("too late"))
    with (
        warnings.catch_warnings(record=True) as caught,
        mock.patch.object(tf.config.threading, "get_intra_op_parallelism_threads", lambda: 0),
        mock.patch.object(tf.config.threading, "set_intra_op_parallelism_threads", late),
    ):
        warnings.simplefilter("always")
        hk.pin_device(world)
    (warning,) = caught
    assert warning.category is RuntimeWarning and str(warning.message).startswith("TensorFlow has started already")


@on_ranks("tensorflow", n=1)
def test_warmup_rises_per_step_and_resumes_by_the_optimizers_count(hk):
    """The learning rate before each step, of a job of 8: base 0.01, 2 epochs of 3 steps; then a decay."""
    import keras
    import tensorflow as tf

    world = hvdkit.Topology(0, 8)
    optimizer = keras.optimizers.SGD(hk.scale_lr(0.01, world))
    schedule = hk.warmup(optimizer, world, 3, epochs=2, after=lambda step: 0.5**step)
    variable = keras.Variable(1.0)
    seen = []
    for _ in range(9):
        seen.append(float(optimizer.learning_rate))
        optimizer.apply([tf.constant(0.0)], [variable])
        schedule.step()
    rising = [0.01 + 0.07 * step / 6 for step in range(7)]
    assert seen == pytest.approx([*rising, 0.04, 0.02])
    optimizer.variables[0].assign(3)  # as after a restored checkpoint
    schedule.step()
    assert float(optimizer.learning_rate) == pytest.approx(rising[3])


@on_ranks("tensorflow", n=1)
def test_mistakes_are_single_errors(hk, world):
    import keras
    import tensorflow as tf

    model = make_keras()
    tape, optimizer = hk.distribute(tf.GradientTape()), hk.distribute(make_optimizer("sgd"))
    text = tf.Variable("a", trainable=False)
    scheduled = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9))

    def both() -> None:
        with tape:
            loss = tf.reduce_sum(model(tf.ones((1, FEATURES), tf.float64)))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    attempts: list[tuple[Callable[[], Any], str]] = [
        (lambda: hk.distribute(tape), "distributed already"),
        (lambda: hk.distribute(optimizer), "distributed already"),
        (both, "distribute the tape or the optimizer, not both"),
        (lambda: hk.distribute("adam"), "got 'adam'"),
        (
            lambda: hk.distribute(tf.GradientTape(), backward_passes_per_step=2),
            "a tape holds one backward pass, got backward_passes_per_step=2",
        ),
        (lambda: hk.distribute(tf.GradientTape(), groups=0), "groups must be an integer >= 1, got 0"),
        (lambda: hk.broadcast_state(keras.Sequential([keras.layers.Dense(3)])), "the Sequential is not built yet"),
        (lambda: hk.broadcast_state([model, keras.layers.Dense(3)]), "the Dense is not built yet"),
        (lambda: hk.broadcast_state([text]), "holds strings"),
        (lambda: hk.broadcast_state(model, "adam"), "must be a Keras 3 optimizer, got str"),
        (lambda: hk.broadcast_state(model, root=9), "root must be a rank in 0 .. 0, got 9"),
        (
            lambda: tf.function(lambda: hk.broadcast_state(model), autograph=False)(),
            "broadcast_state cannot run inside tf.function",
        ),
        (lambda: hk.pin_device(world, threads=7), "call pin_device right after init()"),
        (lambda: hk.pin_device(world, "gpu"), "TensorFlow sees none"),
        (lambda: hk.shard(tf.data.Dataset.range(9).repeat(), world, 2), "endless"),
        (lambda: hk.shard((np.zeros(3), np.zeros(4)), world, 2), "one length, got 3, 4"),
        (lambda: hk.shard(([1, 2, 3], [1, 2, 3]), world, 2), "np.asarray"),
        (
            lambda: hk.shard(tf.data.Dataset.range(9).batch(2, drop_remainder=True), world, 2),
            "leave .batch() out",
        ),
        (lambda: hk.warmup(scheduled, world, 3), "follows a schedule of its own"),
    ]
    for attempt, answer in attempts:
        error = message(attempt)
        assert error.startswith("InvalidArgumentError: ") and answer in error and "\n" not in error


@pytest.mark.parallel
@pytest.mark.skipif(bool(missing("tensorflow")), reason="needs TensorFlow (`make test` installs all)")
def test_where_keras_lacks_its_backend_keras_is_named_and_not_horovod(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "openvino")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    code = "import sys; sys.modules['openvino'] = None; import hvdkit.tensorflow"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("hvdkit.errors.MissingFrameworkError: hvdkit.tensorflow needs Keras 3")
    assert "set KERAS_BACKEND=tensorflow" in last


def example(script: str, flags: tuple[str, ...] = ()) -> list[str]:
    """What an example of the repository prints, run as a user would."""
    path = EXAMPLES / script
    with contextlib.redirect_stdout(io.StringIO()) as printed, mock.patch.object(sys, "argv", [str(path), *flags]):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            assert not end.code, end.code
    return printed.getvalue().splitlines()


@on_ranks("tensorflow", n=2, fresh=True)
def test_the_examples_learn_the_digits_on_one_process_and_on_two(everyone, alone):
    single = alone(example, fresh=True, script="single.py")
    root, other = everyone(example("cnn.py", ("--fp16-allreduce", "--checkpoint_dir", "checkpoints")))
    assert other == []
    assert "All 2 ranks hold identical weights and optimizer state." in root
    assert re.fullmatch(r"Hvd Procs 2 Total time: [\d.]+ second", root[-1])
    for lines in (single, root):
        (accuracy,) = (float(line.split()[2]) for line in lines if line.startswith("Test accuracy:"))
        assert accuracy >= 97
