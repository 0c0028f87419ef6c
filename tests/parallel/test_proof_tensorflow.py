"""hvdkit.tensorflow proves that ranks agree: desynchronised ranks, seeds, statistics, uneven work, on real ranks."""

import random
from typing import Any

import numpy as np
import pytest
from programs_checks import message, signs
from ranks import on_ranks

import hvdkit

FEATURES, CLASSES = 4, 3
OVER_MPI = {("tensorflow", 2)}
LAST = {2: "between rank 0 and rank 1", 3: "between ranks 0-1 and rank 2"}


def make_data(samples: int = 24) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(1).normal(size=(samples, FEATURES)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int64)


def make_model() -> Any:
    import keras

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

    def __init__(self, hk: Any, world: hvdkit.Topology, optimizer: str = "Adam", **options: Any) -> None:
        import keras
        import tensorflow as tf

        self._hk = hk
        self.model = make_model()
        self.optimizer = getattr(keras.optimizers, optimizer)(0.01, **options)
        hk.broadcast_state(self.model, self.optimizer)
        self.loader = hk.shard(make_data(), world, 4)
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._step = tf.function(self._train, reduce_retracing=True)

    def _train(self, x: Any, y: Any) -> None:
        import tensorflow as tf

        with self._hk.distribute(tf.GradientTape()) as tape:
            loss = self.loss(y, self.model(x, training=True))
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)

    def step(self) -> None:
        self._step(*next(iter(self.loader)))


def nudge(variable: Any, place: Any, by: float = 1e-4) -> None:
    value = np.array(variable)
    value[place] += by
    variable.assign(value)


INJECTED = {
    "slot": "first_kernel_velocity {between} 0.0001",
    "setting": "optimizer.beta_1 {between} 0.1",
    "gamma": "norm/gamma {between} 0.0001",
    "seeded anew": "TensorFlow seeded anew {between} 1",
}


def inject(hk: Any, world: hvdkit.Topology, training: Training, kind: str) -> None:
    import keras

    if kind == "slot":
        (slot,) = [one for one in training.optimizer.variables if one.path.endswith("first_kernel_velocity")]
        nudge(slot, (0, 0))
    elif kind == "setting":
        training.optimizer.beta_1 = 0.8
    elif kind == "gamma":
        nudge(training.model.get_layer("norm").gamma, 3)
    elif kind == "seeded anew":
        keras.utils.set_random_seed(0)


@on_ranks("tensorflow", n=3)
def test_what_only_the_last_rank_changes_is_named(hk, world):
    hk.seed_everything(3, world)
    training = Training(hk, world)
    training.step()
    for kind, said in INJECTED.items():
        if world.rank == world.size - 1:
            inject(hk, world, training, kind)
        error = message(lambda: hk.check_agreement(training.model, training.optimizer, world, loader=training.loader))
        assert said.format(between=f"differs {LAST[world.size]}, by at most") in error
        training.optimizer.beta_1 = 0.9
        hk.seed_everything(3, world)
        hk.broadcast_state(training.model, training.optimizer)


@on_ranks("tensorflow", n=3)
def test_seeds_schedules_signs_and_zeros_that_differ_are_named(hk, world):
    import keras
    import tensorflow as tf

    hk.seed_everything(3, world)
    training = Training(hk, world)
    tf.random.set_seed(5)
    error = message(lambda: hk.check_agreement(training.model, None, world))
    assert "seeded with 5 after seed_everything" in error
    hk.seed_everything(3, world)
    decay = keras.optimizers.schedules.ExponentialDecay(0.1 + 0.1 * world.rank, 10, 0.9)
    scheduled = keras.optimizers.SGD(decay)
    error = message(lambda: hk.check_agreement(training.model, scheduled, world))
    assert "optimizer.learning_rate.initial_learning_rate differs" in error
    zero = tf.Variable([0.0, -0.0] if world.is_root else [0.0, 0.0], dtype=tf.bfloat16, name="zero")
    error = message(lambda: hk.check_agreement([zero], None, world))
    assert "zero differs" in error and "by at most 0;" in error
    for values in signs(world.rank).values():
        flipped = tf.Variable(values, name="signs")
        error = message(lambda flipped=flipped: hk.check_agreement([flipped], None, world))
        assert "signs differs" in error and "by at most 2;" in error


@on_ranks("tensorflow", n=3)
def test_batch_normalization_keeps_its_own_statistics_until_they_are_averaged(hk, world, everyone):
    import keras

    training = Training(hk, world)
    norm = training.model.get_layer("norm")
    check = hk.CheckAgreement(training.model, training.optimizer, world, every=1, loader=training.loader)
    for _ in range(3):
        training.step()
        check.step()
    local = everyone(flat([norm.moving_mean, norm.moving_variance]))
    assert local[0] != local[1]
    error = message(lambda: hk.check_agreement(training.model, None, world, statistics=True))
    assert "norm/moving_mean differs between" in error
    norm.trainable = False  # its gamma is then among the weights that are not trained, too
    if world.is_root:
        nudge(norm.gamma, 0)
    error = message(lambda: hk.check_agreement({"a": [training.model]}, None, world))
    assert "norm/gamma differs between" in error
    hk.broadcast_state([norm.gamma])
    hk.average_statistics(training.model)
    hk.average_statistics(keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)]))  # nothing to do
    assert flat([norm.moving_mean, norm.moving_variance]) == pytest.approx(np.mean(local, axis=0), rel=1e-6)
    hk.check_agreement(training.model, None, world, statistics=True)


@on_ranks("tensorflow", n=3)
def test_join_waits_for_the_rank_with_the_most_steps(hk, world, everyone):
    """Rank r takes 2 + r steps."""
    training = Training(hk, world, "SGD", momentum=0.9)
    for _ in range(2 + world.rank):
        training.step()
    assert hk.join(training.model, training.optimizer, world) == world.size - 1
    hk.check_agreement(training.model, training.optimizer, world, statistics=True)
    training.step()  # all together again
    hk.check_agreement(training.model, training.optimizer, world)
    assert int(training.optimizer.iterations) == world.size + 2
    weights = everyone(flat(training.model.trainable_variables))
    assert weights == [weights[0]] * world.size


def fit_exactly(hk: Any, world: hvdkit.Topology) -> tuple[list[float], list[float]]:
    """Two epochs over 25 samples in global batches of 6, so that the ranks end with unequal parts."""
    import keras

    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    options = {"epochs": 2, "batch_size": 6 // world.size, "base_lr": 0.3 / world.size, "kind": "cpu"}
    history = hk.fit(model, keras.optimizers.SGD, loss, make_data(25), remainder="exact", **options)
    return [epoch["loss"] for epoch in history], flat(model.weights)


@on_ranks("tensorflow", n=3)
def test_fit_trains_on_every_sample_once_like_one_process(hk, world, alone):
    losses, weights = fit_exactly(hk, world)
    expected = alone(fit_exactly)
    assert losses == pytest.approx(expected[0], rel=1e-5)
    assert weights == pytest.approx(expected[1], rel=1e-5, abs=1e-6)


def seeds(hk: Any, world: hvdkit.Topology, seed: int) -> dict[str, Any]:
    import keras
    import tensorflow as tf

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


@pytest.mark.parallel
def test_seeds_give_the_same_model_and_different_streams_again_in_every_run(run_job):
    first, again = run_job("tensorflow", seeds, mpi=True, seed=11), run_job("tensorflow", seeds, seed=11)
    (other,) = run_job("tensorflow", seeds, n=1, seed=12)
    assert first == again
    for name in ("initial", "made before"):
        assert first[0][name] == first[1][name] != other[name]
    runs = [*first, other]
    numbers = [number for rank in runs for number in rank["drawn"]]
    assert len(set(numbers)) == len(numbers) == 3 * 7
    masks = [tuple(mask) for rank in runs for mask in rank["dropout"]]
    assert len(set(masks)) == len(masks) == 3 * 2
    assert all(rank["moved once"] for rank in runs)
    assert [text.split(",")[0] for text in other["bad"]] == ["InvalidArgumentError: seed must be an integer >= 0"] * 3


@on_ranks("tensorflow", n=1)
def test_weighted_losses(hk):
    import keras
    import tensorflow as tf

    target, output = np.array([0, 0, 1]), np.array([[2.0, 0.0], [0.0, 1.0], [1.0, 1.0]], np.float32)
    weights = np.array([1.5, 0.5, 0.0])
    loss, plain = keras.losses.SparseCategoricalCrossentropy, keras.losses.sparse_categorical_crossentropy
    expected = float((plain(target, output, from_logits=True).numpy() * weights).mean())
    given = loss(from_logits=True)

    def own(y: Any, o: Any) -> Any:
        return plain(y, o, from_logits=True)

    weighted = hk.weighted_loss(given)
    in_function = tf.function(lambda y, o, w: weighted(y, o, w))
    for form in (given, loss(from_logits=True, reduction=None), loss(from_logits=True, reduction="none"), own):
        assert float(hk.weighted_loss(form)(target, output, weights)) == pytest.approx(expected)
    assert float(in_function(target, output, weights)) == pytest.approx(expected)
    assert float(weighted(target, output)) == pytest.approx(float(given(target, output)))
    assert given.reduction == "sum_over_batch_size"
    ignoring = hk.weighted_loss(loss(ignore_class=0, reduction=None))
    assert float(ignoring(target, tf.nn.softmax(output), weights)) == 0  # the only sample of another class has weight 0
    errors = {
        "got 'sum'": lambda: hk.weighted_loss(loss(reduction="sum")),
        "got 'mean_with_sample_weight'": lambda: hk.weighted_loss(
            keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        ),
        "ignore_class=0 divides": lambda: hk.weighted_loss(loss(ignore_class=0)),
        "got 'mse'; for a name use keras.losses.get": lambda: hk.weighted_loss("mse"),
        "got (2,) for (3,)": lambda: weighted(target, output, weights[:2]),
        "got (3, 1) for (3,)": lambda: in_function(target, output, weights[:, None]),
        "a single number": lambda: hk.weighted_loss(lambda y, o: tf.reduce_sum(o))(target, output, weights),
    }
    for part, attempt in errors.items():
        error = message(attempt)
        assert error.startswith("InvalidArgumentError") and part in error


@on_ranks("tensorflow", n=1)
def test_weighted_losses_of_images_and_masks(hk):
    import keras
    import tensorflow as tf

    weights = np.array([1.5, 0.5, 0.0])
    pixels, truth = np.random.default_rng(0).random((2, 3, 2, 4)).astype(np.float32)
    squares = ((pixels - truth) ** 2).reshape(3, -1).mean(axis=1)
    images = hk.weighted_loss(keras.losses.MeanSquaredError())
    spec = tf.TensorSpec([None, None, None])
    unknown = tf.function(lambda y, o, w: images(y, o, w), input_signature=[spec, spec, tf.TensorSpec([None])])
    expected = pytest.approx((squares * weights).mean(), abs=1e-7)
    assert float(images(truth, pixels, weights)) == expected
    assert float(unknown(truth, pixels, weights.astype(np.float32))) == expected
    masked = keras.Sequential([keras.layers.Embedding(3, 2, mask_zero=True), keras.layers.Dense(2)])
    words = np.array([[0, 1, 2], [1, 0, 0]])
    assert "the output has a mask" in message(lambda: images(np.ones((2, 3, 2), np.float32), masked(words)))


@on_ranks("tensorflow", n=1)
@pytest.mark.parametrize(
    "name",
    [
        "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint32", "uint64",
        "complex64", "complex128", "bool",
    ],
)  # fmt: skip
def test_digests_tell_every_shape_of_a_type_apart(name):
    """A changed bit is seen, equal tensors are equal, and TensorFlow's operations give the same digests as NumPy."""
    import tensorflow as tf

    from hvdkit.tensorflow import agreement

    generator, dtype = np.random.default_rng(0), tf.as_dtype(name)
    for shape in ((), (0,), (1,), (7,), (3, 5), (1_100_001,), (8, 270_001)):
        value = np.abs(3 * generator.normal(size=shape)).astype(dtype.as_numpy_dtype)
        variables = [tf.Variable(value), tf.Variable(value)]
        if value.size:
            changed = value.reshape(-1).copy()
            changed[value.size // 2 :][:1].view(np.uint8)[0] ^= 1 if name == "bool" else 64
            variables.append(tf.Variable(changed.reshape(shape)))
        found = agreement.digests(variables).tolist()
        on_device = agreement.digests_on_device([tf.convert_to_tensor(one) for one in variables])
        assert on_device.numpy().tolist() == found, shape
        assert found[0] == found[1] and len(set(found)) == 1 + bool(value.size), shape


@on_ranks("tensorflow", n=1)
def test_digests_are_those_of_their_tensors_in_any_order(hk):
    import tensorflow as tf

    from hvdkit.tensorflow import agreement

    parts = [tf.Variable(np.arange(6) + offset) for offset in range(3)]
    assert agreement.digests(parts[::-1]).tolist() == agreement.digests(parts).tolist()[::-1]
    assert agreement.digests([]).shape == (0,)


@on_ranks("tensorflow", n=1)
def test_without_seed_everything_random_streams_stay_as_they_are(hk, world):
    model = make_model()
    before = flat(model.variables)
    hk.broadcast_state(model)
    assert flat(model.variables) == before


@on_ranks("tensorflow", n=1)
def test_mistakes_are_single_errors(hk, world):
    import keras
    import tensorflow as tf

    layer = keras.layers.Dense(2)
    layer.build((None, 2))
    check = hk.CheckAgreement(layer, None, world)
    for attempt, part in (
        (lambda: hk.CheckAgreement(layer, None, world, every=0), ", got 0."),
        (lambda: hk.CheckAgreement(layer, None, world, on_disagreement="stop"), ", got 'stop'."),
        (lambda: hk.check_agreement(layer, None, world, loader=[1]), ", got list;"),
        (lambda: hk.check_agreement(layer, "adam", world), ", got str."),
        (lambda: tf.function(check.step, autograph=False)(), "CheckAgreement's step cannot run inside tf.function"),
        (
            lambda: tf.function(lambda: hk.join(layer, None, world), autograph=False)(),
            "join cannot run inside tf.function",
        ),
    ):
        assert part in message(attempt)
