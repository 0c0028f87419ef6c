"""What the ranks of test_proof_tensorflow.py do; each function returns JSON values."""

import random
import warnings
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from programs_checks import message, signs

import hvdkit
import hvdkit.tensorflow as hk
from hvdkit.tensorflow import agreement

FEATURES, CLASSES = 4, 3


def make_data(samples: int = 24) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(1).normal(size=(samples, FEATURES)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int64)


def make_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(8, name="first"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Activation("tanh"),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(CLASSES, name="last"),
        ]
    )


def flat(variables: Any) -> list[float]:
    return np.concatenate([np.asarray(variable).astype(float).ravel() for variable in variables]).tolist()


class Training:
    """One training on all ranks, step by step."""

    def __init__(self, world: hvdkit.Topology, make_optimizer: Any = keras.optimizers.Adam, **options: Any) -> None:
        self.model = make_model()
        self.optimizer = make_optimizer(0.01, **options)
        hk.broadcast_state(self.model, self.optimizer)
        self.loader = hk.shard(make_data(), world, 4)
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._step = tf.function(self._train, reduce_retracing=True)

    def _train(self, x: Any, y: Any) -> None:
        with hk.distribute(tf.GradientTape()) as tape:
            loss = self.loss(y, self.model(x, training=True))
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)

    def step(self) -> None:
        self._step(*next(iter(self.loader)))


def nudge(variable: Any, place: Any, by: float = 1e-4) -> None:
    value = np.array(variable)
    value[place] += by
    variable.assign(value)


def injected(world: hvdkit.Topology, reaction: str) -> dict[str, Any]:
    """After step 3, one element of a weight on rank 1 is 1e-4 larger; checked every second step."""
    training = Training(world)
    check = hk.CheckAgreement(training.model, training.optimizer, world, every=2, on_disagreement=reaction)
    error, step = "", 0
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(1, 7):
            training.step()
            if step == 3 and world.rank == 1:
                nudge(training.model.get_layer("last").kernel, (5, 2))
            error = message(check.step)
            if error:
                break
    found = [str(one.message) for one in warned if "after step" in str(one.message)]
    return {"error": error, "steps": step, "warned": found}


def plant(training: Training, kind: str, world: hvdkit.Topology) -> None:
    if kind == "slot":
        (slot,) = [one for one in training.optimizer.variables if one.path.endswith("first_kernel_velocity")]
        nudge(slot, (0, 0))
    elif kind == "rate":
        training.optimizer.learning_rate = 0.02
    elif kind == "setting":
        training.optimizer.beta_1 = 0.8
    elif kind == "epoch":
        training.loader.set_epoch(7)
    elif kind == "gamma":
        nudge(training.model.get_layer("norm").gamma, 3)
    elif kind == "seed":
        hk.seed_everything(4, world)
    elif kind == "seeded anew":
        keras.utils.set_random_seed(0)


def disagreements(world: hvdkit.Topology) -> dict[str, str]:
    """For each thing that only the last rank changes: what check_agreement says."""
    found = {}
    hk.seed_everything(3, world)
    training = Training(world)
    training.step()
    for kind in ("nothing", "slot", "rate", "setting", "epoch", "gamma", "seed", "seeded anew"):
        if world.rank == world.size - 1:
            plant(training, kind, world)
        found[kind] = message(
            lambda: hk.check_agreement(training.model, training.optimizer, world, loader=training.loader)
        )
        training.optimizer.beta_1 = 0.9
        training.loader.set_epoch(1)
        hk.seed_everything(3, world)
        hk.broadcast_state(training.model, training.optimizer)
    tf.random.set_seed(5)
    found["all seeded anew"] = message(lambda: hk.check_agreement(training.model, None, world))
    hk.seed_everything(3, world)
    decay = keras.optimizers.schedules.ExponentialDecay(0.1 + 0.1 * world.rank, 10, 0.9)
    scheduled = keras.optimizers.SGD(decay)
    found["schedule"] = message(lambda: hk.check_agreement(training.model, scheduled, world))
    values = [0.0, -0.0] if world.is_root else [0.0, 0.0]
    zero = tf.Variable(values, dtype=tf.bfloat16, name="zero")
    found["sign of zero"] = message(lambda: hk.check_agreement([zero], None, world))
    for kind, values in signs(world.rank).items():
        flipped = tf.Variable(values, name="signs")
        found[kind] = message(lambda flipped=flipped: hk.check_agreement([flipped], None, world))
    return found


def statistics(world: hvdkit.Topology) -> dict[str, Any]:
    """BatchNormalization's moving statistics of each rank, then averaged."""
    training = Training(world)
    norm = training.model.get_layer("norm")
    check = hk.CheckAgreement(training.model, training.optimizer, world, every=1, loader=training.loader)
    checked = []
    for _ in range(3):
        training.step()
        checked.append(message(check.step))
    local = flat([norm.moving_mean, norm.moving_variance])
    whole = message(lambda: hk.check_agreement(training.model, None, world, statistics=True))
    norm.trainable = False  # its gamma is then among the weights that are not trained, too
    if world.is_root:
        nudge(norm.gamma, 0)
    frozen_gamma = message(lambda: hk.check_agreement({"a": [training.model]}, None, world))
    hk.broadcast_state([norm.gamma])
    hk.average_statistics(training.model)
    hk.average_statistics(keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)]))  # nothing to do
    return {
        "checked": checked,
        "local": local,
        "with statistics": whole,
        "frozen gamma": frozen_gamma,
        "averaged": flat([norm.moving_mean, norm.moving_variance]),
        "after averaging": message(lambda: hk.check_agreement(training.model, None, world, statistics=True)),
    }


def joined(world: hvdkit.Topology) -> dict[str, Any]:
    """Rank r takes 2 + r steps."""
    training = Training(world, keras.optimizers.SGD, momentum=0.9)
    for _ in range(2 + world.rank):
        training.step()
    last = hk.join(training.model, training.optimizer, world)
    hk.check_agreement(training.model, training.optimizer, world, statistics=True)
    training.step()  # all together again
    hk.check_agreement(training.model, training.optimizer, world)
    steps = int(training.optimizer.iterations)
    return {"last": last, "steps": steps, "weights": flat(training.model.trainable_variables)}


def together() -> dict[str, Any]:
    """What needs several ranks, in one start of them."""
    world = hk.init()
    hk.pin_device(world, "cpu")
    return {
        "raised": injected(world, "raise"),
        "warned": injected(world, "warn"),
        "statistics": statistics(world),
        "joined": joined(world),
        "disagreements": disagreements(world),
        "fit": fit_exactly(world),
        "seeds": seeds(11),  # last: nothing that was drawn before may matter
    }


def fit_exactly(world: hvdkit.Topology) -> dict[str, Any]:
    """Two epochs over 25 samples in global batches of 6, so that the ranks end with unequal parts."""
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    options = {"epochs": 2, "batch_size": 6 // world.size, "base_lr": 0.3 / world.size, "kind": "cpu"}
    history = hk.fit(model, keras.optimizers.SGD, loss, make_data(25), remainder="exact", **options)
    return {"losses": [epoch["loss"] for epoch in history], "weights": flat(model.weights)}


def seeds(seed: int) -> dict[str, Any]:
    world = hk.init()
    hk.pin_device(world, "cpu")
    streams = hk.seed_everything(seed, world)
    model = make_model()
    initial = flat(model.weights)
    generator = keras.random.SeedGenerator()
    hk.broadcast_state(model)
    states = [one for one in model.variables if "seed_generator" in one.path]
    moved = flat(states)
    hk.broadcast_state(model)  # as Checkpoints.restore does; the streams go on where they are
    moved_once = flat(states) == moved
    dropped = [tf.function(lambda x: model.layers[3](x, training=True))(tf.ones((1, 64))) for _ in range(2)]
    return {
        "initial": initial,
        "made before": flat([generator.state]),
        "moved once": moved_once,
        "dropout": [one.numpy().ravel().tolist() for one in dropped],
        "drawn": [
            float(tf.random.uniform(())),
            float(tf.random.get_global_generator().uniform(())),
            float(keras.random.uniform(())),
            float(keras.initializers.GlorotUniform()((3, 3))[0, 0]),
            np.random.random(),
            random.random(),  # noqa: S311
            streams.generator(1).random(),
        ],
        "bad": [message(lambda bad=bad: hk.seed_everything(bad, world)) for bad in (-1, 1.5, True)],
    }


def alone() -> dict[str, Any]:
    """What one process shows."""
    return {
        "losses": losses(),
        "digests": digests(),
        "untouched": untouched(),
        "mistakes": mistakes(),
        "fit": fit_exactly(hk.init()),
        "sync": synchronised(),
    }


def losses() -> dict[str, Any]:
    target, output = np.array([0, 0, 1]), np.array([[2.0, 0.0], [0.0, 1.0], [1.0, 1.0]], np.float32)
    weights = np.array([1.5, 0.5, 0.0])
    loss, plain = keras.losses.SparseCategoricalCrossentropy, keras.losses.sparse_categorical_crossentropy
    each = plain(target, output, from_logits=True).numpy()
    given = loss(from_logits=True)

    def own(y: Any, o: Any) -> Any:
        return plain(y, o, from_logits=True)

    forms = [given, loss(from_logits=True, reduction=None), loss(from_logits=True, reduction="none"), own]
    pixels, truth = np.random.default_rng(0).random((2, 3, 2, 4)).astype(np.float32)
    squares = ((pixels - truth) ** 2).reshape(3, -1).mean(axis=1)
    weighted = hk.weighted_loss(given)
    images = hk.weighted_loss(keras.losses.MeanSquaredError())
    spec = tf.TensorSpec([None, None, None])
    in_function = tf.function(lambda y, o, w: weighted(y, o, w))
    unknown = tf.function(lambda y, o, w: images(y, o, w), input_signature=[spec, spec, tf.TensorSpec([None])])
    masked = keras.Sequential([keras.layers.Embedding(3, 2, mask_zero=True), keras.layers.Dense(2)])
    mean_of_valid = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    ignoring = loss(ignore_class=0, reduction=None)
    return {
        "expected": float((each * weights).mean()),
        "means": [float(hk.weighted_loss(one)(target, output, weights)) for one in forms]
        + [float(in_function(target, output, weights))],
        "unweighted": float(weighted(target, output)) - float(given(target, output)),
        "images": [
            float(one(truth, pixels, weights) - (squares * weights).mean())
            for one in (images, lambda y, o, w: unknown(y, o, w.astype(np.float32)))
        ],
        "reduction": given.reduction,
        "ignored": float(hk.weighted_loss(ignoring)(target, tf.nn.softmax(output), weights)),
        "errors": [
            message(lambda: hk.weighted_loss(loss(reduction="sum"))),
            message(lambda: hk.weighted_loss(mean_of_valid)),
            message(lambda: hk.weighted_loss(loss(ignore_class=0))),
            message(lambda: hk.weighted_loss("mse")),
            message(lambda: weighted(target, output, weights[:2])),
            message(lambda: in_function(target, output, weights[:, None])),
            message(lambda: hk.weighted_loss(lambda y, o: tf.reduce_sum(o))(target, output, weights)),
            message(lambda: images(np.ones((2, 3, 2), np.float32), masked(np.array([[0, 1, 2], [1, 0, 0]])))),
        ],
    }


def digests() -> list[str]:
    """Types and shapes for which check_agreement's digest misses a changed bit, or tells equal tensors apart."""
    failed = []
    generator = np.random.default_rng(0)
    types = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint32"]
    for name in (*types, "uint64", "complex64", "complex128", "bool"):
        dtype = tf.as_dtype(name)
        for shape in ((), (0,), (1,), (7,), (3, 5), (1_100_001,), (8, 270_001)):
            value = np.abs(3 * generator.normal(size=shape)).astype(dtype.as_numpy_dtype)
            variables = [tf.Variable(value), tf.Variable(value)]
            if value.size:
                changed = value.reshape(-1).copy()
                changed[value.size // 2 :][:1].view(np.uint8)[0] ^= 1 if name == "bool" else 64
                variables.append(tf.Variable(changed.reshape(shape)))
            found = agreement.digests(variables).tolist()
            on_device = agreement.digests_on_device([tf.convert_to_tensor(one) for one in variables])
            if on_device.numpy().tolist() != found:
                failed.append(f"{name} {shape} on a device")
            if found[0] != found[1] or len(set(found)) != 1 + bool(value.size):
                failed.append(f"{name} {shape}")
    parts = [tf.Variable(np.arange(6) + offset) for offset in range(3)]
    if agreement.digests(parts[::-1]).tolist() != agreement.digests(parts).tolist()[::-1]:
        failed.append("order")
    if agreement.digests([]).shape != (0,):
        failed.append("none")
    return failed


def untouched() -> bool:
    """Without seed_everything the layers' random streams stay as they are."""
    model = make_model()
    before = flat(model.variables)
    hk.init()
    hk.broadcast_state(model)
    return flat(model.variables) == before


def mistakes() -> list[str]:
    world = hvdkit.Topology(0, 1)
    layer = keras.layers.Dense(2)
    layer.build((None, 2))
    check = hk.CheckAgreement(layer, None, world)
    return [
        message(lambda: hk.CheckAgreement(layer, None, world, every=0)),
        message(lambda: hk.CheckAgreement(layer, None, world, on_disagreement="stop")),
        message(lambda: hk.check_agreement(layer, None, world, loader=[1])),
        message(lambda: hk.check_agreement(layer, "adam", world)),
        message(lambda: tf.function(check.step, autograph=False)()),
        message(lambda: tf.function(lambda: hk.join(layer, None, world), autograph=False)()),
    ]


def synchronised() -> str:
    """Why there is no synchronised batch normalisation here: Horovod's does not know Keras 3."""
    try:
        hvd.SyncBatchNormalization()
    except ValueError as error:
        return str(error)
    return ""
