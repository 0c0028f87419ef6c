"""What the ranks of tests/parallel/test_tensorflow.py do; each function returns JSON values."""

import contextlib
import io
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import hvdkit
import hvdkit.tensorflow as hk
from hvdkit.steps.shards import Shard

SAMPLES, FEATURES, CLASSES = 53, 6, 3  # 53 is no multiple of any n * batch
WORDS = 5


def make_data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(5).normal(size=(SAMPLES, FEATURES))
    return x, (x.sum(axis=1) > 0).astype(np.int64) + (x[:, 0] > 1)


class Affine(tf.Module):
    """A model of plain tf.Variables around a Keras layer."""

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


def make_keras(seed: int = 0) -> keras.Model:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(8, "tanh", dtype="float64"), keras.layers.Dense(CLASSES, dtype="float64")]
    return keras.Sequential([keras.Input((FEATURES,), dtype="float64"), *layers])


def make_module(seed: int = 0) -> Affine:
    keras.utils.set_random_seed(seed)
    return Affine()


def make_embedding(seed: int = 0) -> keras.Model:
    """Averages word vectors; words repeat within samples and across ranks."""
    keras.utils.set_random_seed(seed)
    words = keras.layers.Embedding(WORDS, 4, dtype="float64")
    sort = keras.layers.Lambda(lambda x: keras.ops.cast(keras.ops.abs(x) * 2, "int32") % WORDS)
    mean = keras.layers.GlobalAveragePooling1D(dtype="float64")
    return keras.Sequential(
        [keras.Input((FEATURES,), dtype="float64"), sort, words, mean, keras.layers.Dense(CLASSES, dtype="float64")]
    )


def sgd() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def adam() -> Any:
    return keras.optimizers.Adam(0.01)


def clipped() -> Any:
    return keras.optimizers.Adam(0.01, global_clipnorm=0.1)


# name: model, optimizer, whether the step is a tf.function, what is distributed, options
TRAININGS: dict[str, tuple[Callable[[int], Any], Callable[[], Any], bool, str, dict[str, Any]]] = {
    "keras, eager": (make_keras, sgd, False, "tape", {}),
    "keras, tf.function": (make_keras, adam, True, "tape", {"groups": 3}),
    "module, eager": (make_module, adam, False, "tape", {}),
    "module, tf.function": (make_module, sgd, True, "tape", {}),
    "embedding, eager": (make_embedding, adam, False, "tape", {}),
    "embedding, tf.function": (make_embedding, adam, True, "tape", {}),
    "embedding, dense": (make_embedding, adam, True, "tape", {"sparse_as_dense": True}),
    "optimizer, eager": (make_keras, sgd, False, "optimizer", {}),
    "optimizer, tf.function": (make_keras, clipped, True, "optimizer", {}),
}


def weights(model: Any) -> list[float]:
    return np.concatenate([np.ravel(variable.numpy()) for variable in model.trainable_variables]).tolist()


def start(**pinning: Any) -> hvdkit.Topology:
    world = hk.init()
    hk.pin_device(world, "cpu", **pinning)
    return world


def train_all(global_batch: int) -> dict[str, Any]:
    world = start()
    results = {name: train(world, global_batch, *how) for name, how in TRAININGS.items()}
    if world.size == 3:  # over Gloo
        return {
            "trainings": results,
            "adasum": error_of(hvdkit.InvalidArgumentError, lambda: one_gradient(world, op="adasum")),
        }
    return {"trainings": results, "adasum": one_gradient(world, op="adasum")}


def train(
    world: hvdkit.Topology,
    global_batch: int,
    make: Callable[[int], Any],
    make_optimizer: Callable[[], Any],
    in_function: bool,
    what: str,
    options: dict[str, Any],
) -> dict[str, Any]:
    """20 steps: exact data parallelism on several ranks, plain TensorFlow with dense gradients in one process."""
    for _ in range(world.rank):  # what a rank built before must not matter; nor its weights, the root's count
        keras.layers.Dense(2).build((None, 2))
    model, optimizer = make(world.rank), make_optimizer()
    if what == "optimizer" and world.size > 1:
        optimizer = hk.distribute(optimizer, **options)
    hk.broadcast_state(model, optimizer)
    dataset = hk.shard(make_data(), world, global_batch // world.size, remainder="exact", seed=3)

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
    return {"weights": weights(model), "steps": int(optimizer.iterations)}


def together() -> dict[str, Any]:
    """What needs several ranks, in one start of them."""
    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    world = start()
    checks = {
        "broadcast": broadcast_after_root_stepped,
        "fresh": broadcast_takes_no_step,
        "layouts": broadcast_different_models,
        "agreement": agreement,
        "metrics": metrics,
        "checkpoints": checkpoints,
        "blocked": unwritable_checkpoint,
        "process set": lambda world: one_gradient(world, process_set=pair),
        "gradients": gradients,
        "tape": tape_forms,
        "shards": shards,
        "fit": fit,
    }
    return {name: check(world) for name, check in checks.items()}


def broadcast_after_root_stepped(world: hvdkit.Topology) -> dict[str, Any]:
    """The root has an optimizer with slots, the others have none; types that Horovod cannot add up."""
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
        step_alone(model, optimizer)
    hk.broadcast_state([model, extra], optimizer)
    hk.check_agreement([model, extra], optimizer, world)
    return {
        "weights": weights(model),
        "extra": [variable.numpy().astype(float).round(2).tolist() for variable in extra[:3]],
        "signs": np.signbit(extra[4].numpy()).tolist()[1:],
        "lr": float(optimizer.learning_rate),
        "iterations": int(optimizer.iterations),
        "slot": float(np.abs(optimizer.variables[2].numpy()).sum()),
    }


def step_alone(model: Any, optimizer: Any) -> None:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(tf.ones((2, FEATURES), tf.float64)) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


def broadcast_takes_no_step(world: hvdkit.Topology) -> dict[str, Any]:
    model = make_keras()
    before = weights(model)
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    hk.broadcast_state(model, optimizer)
    return {"unchanged": weights(model) == before, "iterations": int(optimizer.iterations), "built": optimizer.built}


def broadcast_different_models(world: hvdkit.Topology) -> str:
    layer = keras.layers.Dense(3 + world.rank, name="last")
    layer.build((None, 3))
    return error_of(hvdkit.AgreementError, lambda: hk.broadcast_state(layer))


def error_of(kind: type[Exception], attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except kind as error:
        return str(error)
    return ""


def agreement(world: hvdkit.Topology) -> list[str]:
    """For each kind of disagreement, planted on the last rank: the message of check_agreement on this rank."""
    return [disagreement(kind, world) for kind in ("none", "weight", "lr", "layout")]


def disagreement(kind: str, world: hvdkit.Topology) -> str:
    model, optimizer = make_keras(), sgd()
    variables = list(model.weights)
    if world.rank == world.size - 1:
        if kind == "weight":
            kernel = variables[2].numpy()
            kernel[3, 1] += 1e-4
            variables[2].assign(kernel)
        if kind == "lr":
            optimizer.learning_rate = 0.2
        if kind == "layout":
            variables.append(tf.Variable(1.0, name="extra"))
    return error_of(hvdkit.AgreementError, lambda: hk.check_agreement(variables, optimizer, world))


def metrics(world: hvdkit.Topology) -> dict[str, Any]:
    values = {"loss": float(world.rank), "accuracy": (world.rank * 10, 10 + 10 * world.rank)}
    return {
        "means": hk.average_metrics(values, world),
        "message": error_of(hvdkit.AgreementError, lambda: hk.average_metrics({f"loss{world.rank}": 1.0}, world)),
    }


def checkpoints(world: hvdkit.Topology) -> dict[str, Any]:
    """Save, train on, restore, also into a model with other automatic names: every rank is back where it was."""
    model, optimizer = make_keras(), hk.distribute(adam())
    hk.broadcast_state(model, optimizer)

    def step(model: Any, optimizer: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.fill((2, FEATURES), tf.cast(world.rank + 1, tf.float64))) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    store = hk.Checkpoints("run", keep=2)
    nothing = store.restore(model, optimizer)
    step(model, optimizer)
    saved = store.save(model, optimizer, step=1, epoch=1)
    kept = weights(model)
    step(model, optimizer)
    after_two = weights(model)
    other, other_optimizer = make_keras(seed=7), hk.distribute(adam())
    restored = store.restore(other, other_optimizer)
    back = weights(other)
    step(other, other_optimizer)
    small = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    wide = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(9), keras.layers.Dense(CLASSES)])
    reader = tf.train.load_checkpoint(str(saved.path / "model"))
    return {
        "nothing": nothing is None,
        "files": sorted(file.name for file in saved.path.iterdir()),
        "metadata": restored.metadata,
        "back": back == kept,
        "same_again": weights(other) == after_two,
        "small": error_of(hvdkit.CheckpointError, lambda: store.restore(small)),
        "wide": error_of(hvdkit.CheckpointError, lambda: store.restore(wide)),
        "optimizer": error_of(hvdkit.CheckpointError, lambda: store.restore(other, keras.optimizers.Lion(0.1))),
        "without hvdkit": "variables/00000_sequential_dense_kernel" in str(reader.get_variable_to_shape_map()),
    }


def unwritable_checkpoint(world: hvdkit.Topology) -> dict[str, str]:
    Path("file").write_text("not a directory")
    attempt = hk.Checkpoints("file/run").save
    return {"message": error_of(hvdkit.CheckpointError, lambda: attempt(make_keras(), step=1))}


def one_gradient(world: hvdkit.Topology, dtype: str = "float32", **options: Any) -> list[float]:
    variable = tf.Variable([0.0, 0.0], dtype=dtype)
    with hk.distribute(tf.GradientTape(), **options) as tape:
        loss = tf.reduce_sum(variable * tf.cast([1.0 + world.rank, 10.0], dtype))
    return tf.cast(tape.gradient(loss, variable), tf.float64).numpy().tolist()


def gradients(world: hvdkit.Topology) -> list[list[float]]:
    """The gradient for each set of options, of [1 + rank, 10]."""
    variants: list[dict[str, Any]] = [
        {},
        {"op": "sum"},
        {"compression": "fp16"},
        {"gradient_predivide_factor": 2.0},
        {"dtype": "bfloat16"},
        {"dtype": "float64", "compression": "fp16"},
    ]
    return [one_gradient(world, **options) for options in variants]


def tape_forms(world: hvdkit.Topology) -> dict[str, Any]:
    """Ways to use a tape; the gradient of ``mine`` is 2 + rank, its mean 3 on three ranks."""
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

    (first, second), (first_graph, second_graph) = nested(), tf.function(nested)()
    with tf.GradientTape() as recorded:
        loss = factor * mine + 10 * tf.cast(other.value, tf.float32)
        single = hk.distribute(recorded).gradient(loss, [mine, other])

    return {
        "output_gradients": [float(first["a"]), first["b"][0], float(first["b"][1][0])],
        "unconnected zero": [float(second["a"]), float(second["b"][0]), float(second["b"][1][0])],
        "tf.function": [float(first_graph["a"]), first_graph["b"][0], float(second_graph["b"][0])],
        "inside its context, two types": [float(gradient) for gradient in single],
        "nothing connected": hk.distribute(recorded_nothing()).gradient(tf.constant(1.0), [mine]),
    }


def recorded_nothing() -> tf.GradientTape:
    with tf.GradientTape() as tape:
        tf.constant(1.0)
    return tape


def shards(world: hvdkit.Topology) -> dict[str, Any]:
    """Whether batches are those of ``Shard``, for arrays and tf.data.Dataset, and this rank's samples by policy."""
    result: dict[str, Any] = {"as planned": [], "samples": {}}
    for remainder in ("drop", "pad", "exact"):
        for samples, batch_size, shuffle in ((53, 4, True), (7, 2, True), (7, 2, False)):
            x = np.arange(samples, dtype=np.float64)
            pairs = (x[:, None] * np.ones(3), x.astype(np.int64))
            plan = Shard(samples, world, batch_size, remainder, shuffle, seed=1)
            options = {"remainder": remainder, "shuffle": shuffle, "seed": 1}
            for given in (pairs, tf.data.Dataset.from_tensor_slices(pairs)):
                dataset = hk.shard(given, world, batch_size, **options)
                result["as planned"].append(follows(dataset, plan))
            result["samples"][f"{remainder} {samples} {shuffle}"] = [
                batch.indices.tolist() for batch in plan.batches(0) if batch.weight > 0
            ]
    return {**result, **shard_forms(world)}


def follows(dataset: Any, plan: Shard) -> bool:
    """Two epochs without a call, then one that was set."""
    assert len(dataset) == len(plan) == int(dataset.cardinality())
    epochs = [list(dataset), list(dataset)]
    dataset.set_epoch(5)
    epochs.append(list(dataset))
    for number, batches in zip((0, 1, 5), epochs, strict=True):
        for (x, y, *w), batch in zip(batches, plan.batches(number), strict=True):
            if not np.array_equal(y, batch.indices) or not np.array_equal(x[:, 0], batch.indices):
                return False
            if [weights.numpy().tolist() for weights in w] != [[batch.weight] * len(y)] * (plan.remainder == "exact"):
                return False
    return bool(dataset.epoch == 6)


def shard_forms(world: hvdkit.Topology) -> dict[str, Any]:
    x = np.arange(12, dtype=np.float32)
    dataset = hk.shard(x, world, 2, remainder="exact")

    @tf.function
    def loop(batches: Any) -> Any:
        total = tf.constant(0.0)
        for values, w in batches:
            total += tf.reduce_sum(values * tf.cast(w > 0, tf.float32))
        return total

    sums = [float(loop(dataset)), float(loop(dataset))]
    fresh = hk.shard((x[:, None], x), world, 2)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Lambda(lambda value: value), keras.layers.Dense(1)])
    model.compile("sgd", lambda y, p: tf.reduce_mean(p) * 0 + tf.reduce_mean(y), jit_compile=False)
    history = model.fit(fresh, epochs=2, verbose=0, shuffle=False).history["loss"]
    for _ in fresh:
        break
    image = hk.shard({"image": np.zeros((12, 2, 2), np.uint8), "id": x.astype(np.float64)}, world, 2, shuffle=False)
    return {
        "tf.function sums": sums,
        "fit": history,
        "epochs after fit and a break": fresh.epoch,
        "weights": str(next(iter(dataset))[1].dtype.name),
        "spec": str(image.element_spec["image"].shape),
        "auto shard off": dataset.options().experimental_distribute.auto_shard_policy.name,
    }


def fit(world: hvdkit.Topology) -> dict[str, Any]:
    model = make_keras(seed=world.rank)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    history = hk.fit(
        model, sgd_at, loss, make_data(), epochs=4, batch_size=4, base_lr=0.03, warmup_epochs=1, kind="cpu"
    )
    return {"history": history, "weights": weights(model)}


def sgd_at(rate: float) -> Any:
    return keras.optimizers.SGD(rate)


def alone() -> dict[str, Any]:
    """What one process shows: pinning, mistakes, the warmup."""
    refused = launched_by_another({"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"})
    world = hk.init()
    gpus = pinned_gpus()
    device = hk.pin_device(world)
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    model = make_keras()
    return {
        "refused": refused,
        "world": [world.rank, world.size, world.launcher],
        "gpus": gpus,
        "device": device,
        "threads": threads,
        "pinned again": hk.pin_device(world),
        "too late": pinned_too_late(world),
        "mistakes": mistakes(world, model),
        "horovod's own tape": horovods_own_tape(model),
        "rates": rates(),
    }


def launched_by_another(variables: dict[str, str]) -> str:
    with mock.patch.dict(os.environ, variables):
        return error_of(hvdkit.TopologyMismatchError, hk.init)


def pinned_gpus() -> dict[str, Any]:
    """Four GPUs that are not there: what TensorFlow would be told on local rank 2."""
    names = [f"GPU {number}" for number in range(4)]
    with (
        mock.patch.object(tf.config, "list_physical_devices", lambda kind: names),
        mock.patch.object(tf.config, "set_visible_devices") as visible,
        mock.patch.object(tf.config.experimental, "set_memory_growth") as growth,
        mock.patch.object(tf.config.threading, "set_intra_op_parallelism_threads"),
        mock.patch.object(tf.config.threading, "set_inter_op_parallelism_threads"),
    ):
        device = hk.pin_device(hvdkit.Topology(2, 4, 2, 4), "gpu")
        hk.pin_device(hvdkit.Topology(2, 4, 2, 4), "cpu")
        crowded = error_of(hvdkit.LauncherError, lambda: hk.pin_device(hvdkit.Topology(4, 5, 4, 5)))
    calls = [call.args for call in visible.call_args_list]
    return {"device": device, "visible": calls, "growth": [c.args for c in growth.call_args_list], "crowded": crowded}


def pinned_too_late(world: hvdkit.Topology) -> list[str]:
    """TensorFlow has made a thread for every core before anybody could say how many."""
    late = mock.Mock(side_effect=RuntimeError("too late"))
    with (
        warnings.catch_warnings(record=True) as caught,
        mock.patch.object(tf.config.threading, "get_intra_op_parallelism_threads", lambda: 0),
        mock.patch.object(tf.config.threading, "set_intra_op_parallelism_threads", late),
    ):
        warnings.simplefilter("always")
        hk.pin_device(world)
    return [f"{warning.category.__name__}: {warning.message}" for warning in caught]


def mistakes(world: hvdkit.Topology, model: Any) -> dict[str, str]:
    tape, optimizer = hk.distribute(tf.GradientTape()), hk.distribute(sgd())
    text = tf.Variable("a", trainable=False)
    scheduled = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9))

    def both() -> None:
        with tape:
            loss = tf.reduce_sum(model(tf.ones((1, FEATURES), tf.float64)))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    attempts: dict[str, Callable[[], Any]] = {
        "tape twice": lambda: hk.distribute(tape),
        "optimizer twice": lambda: hk.distribute(optimizer),
        "both": both,
        "neither": lambda: hk.distribute("adam"),
        "passes": lambda: hk.distribute(tf.GradientTape(), backward_passes_per_step=2),
        "groups": lambda: hk.distribute(tf.GradientTape(), groups=0),
        "unbuilt": lambda: hk.broadcast_state(keras.Sequential([keras.layers.Dense(3)])),
        "unbuilt inside": lambda: hk.broadcast_state([model, keras.layers.Dense(3)]),
        "text": lambda: hk.broadcast_state([text]),
        "optimizer": lambda: hk.broadcast_state(model, "adam"),
        "root": lambda: hk.broadcast_state(model, root=9),
        "in a function": lambda: tf.function(lambda: hk.broadcast_state(model), autograph=False)(),
        "threads": lambda: hk.pin_device(world, threads=7),
        "gpu": lambda: hk.pin_device(world, "gpu"),
        "endless": lambda: hk.shard(tf.data.Dataset.range(9).repeat(), world, 2),
        "two lengths": lambda: hk.shard((np.zeros(3), np.zeros(4)), world, 2),
        "lists": lambda: hk.shard(([1, 2, 3], [1, 2, 3]), world, 2),
        "batched": lambda: hk.shard(tf.data.Dataset.range(9).batch(2, drop_remainder=True), world, 2),
        "schedule": lambda: hk.warmup(scheduled, world, 3),
    }
    return {name: error_of(hvdkit.InvalidArgumentError, attempt) for name, attempt in attempts.items()}


def horovods_own_tape(model: Any) -> dict[str, str]:
    """Why hvdkit has a tape of its own: Horovod's does not know Keras 3 variables."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(tf.ones((1, FEATURES), tf.float64)))
    own = hvd.DistributedGradientTape(tape)
    return {"message": error_of(AttributeError, lambda: own.gradient(loss, model.trainable_variables))}


def rates() -> dict[str, Any]:
    """The learning rate before each step, of a job of 8: base 0.01, 2 epochs of 3 steps; then a decay."""
    world = hvdkit.Topology(0, 8)
    optimizer = keras.optimizers.SGD(hk.scale_lr(0.01, world))
    schedule = hk.warmup(optimizer, world, 3, epochs=2, after=lambda step: 0.5**step)
    variable = keras.Variable(1.0)
    seen = []
    for _ in range(9):
        seen.append(float(optimizer.learning_rate))
        optimizer.apply([tf.constant(0.0)], [variable])
        schedule.step()
    optimizer.variables[0].assign(3)  # as after a restored checkpoint
    schedule.step()
    return {"seen": seen, "resumed": float(optimizer.learning_rate)}


def example(script: str, flags: Sequence[str] = ()) -> dict[str, Any]:
    """An example of the repository, run as a user would: its exit status and what it printed."""
    path = Path(__file__).parent.parent.parent / "examples" / "tensorflow" / script
    with contextlib.redirect_stdout(io.StringIO()) as printed, mock.patch.object(sys, "argv", [str(path), *flags]):
        try:
            runpy.run_path(str(path), run_name="__main__")
            status: Any = None
        except SystemExit as end:
            status = end.code
    return {"status": status, "lines": printed.getvalue().splitlines()}
