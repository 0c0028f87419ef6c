"""The optimizer's state divided among the ranks (``distribute(shard_state=True)``) in Keras and TensorFlow.

Frameworks and hvdkit are imported within, on the ranks.
"""

from typing import Any

import numpy as np
import pytest
from ranks import on_ranks

STEPS, ROWS, FEATURES, CLASSES = 6, 4, 7, 3

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "Adagrad": {},
    "Adadelta": {},
    "Adamax": {},
    "Nadam": {},
    "Lion": {},
    "Ftrl": {},
    "Lamb": {},
    "Adafactor": {},
    "Muon": {},
}


def data(world: Any) -> tuple[Any, Any]:
    """This rank's rows of the global batches, in order."""
    generator = np.random.default_rng(7)
    x = generator.normal(size=(STEPS, ROWS * world.size, FEATURES))
    y = np.argmax(x[:, :, :CLASSES], axis=2)
    return x[:, world.rank :: world.size], y[:, world.rank :: world.size]


def model_of(seed: int = 1) -> Any:
    import keras

    keras.config.set_floatx("float64")
    layers = [keras.layers.Dense(11, activation="tanh"), keras.layers.Dense(5), keras.layers.Dense(CLASSES)]
    model = keras.Sequential([keras.Input((FEATURES,)), *layers])
    generator = np.random.default_rng(seed)
    model.set_weights([generator.normal(size=one.shape) * 0.3 for one in model.weights])
    return model


def optimizer_of(name: str, **settings: Any) -> Any:
    import keras

    return getattr(keras.optimizers, name)(0.02, **{**OPTIMIZERS[name], **settings})


def weights_of(model: Any) -> Any:
    return np.concatenate([one.reshape(-1) for one in model.get_weights()])


def trained(
    hk: Any,
    world: Any,
    optimizer: Any,
    *,
    run_eagerly: bool = False,
    epochs: int = 1,
    model: Any = None,
    several: int = 1,
    **options: Any,
) -> tuple[Any, Any]:
    """The weights after ``fit``, and the distributed optimizer."""
    import keras

    try:
        keras.config.set_floatx("float64")
        model = model or model_of()
        optimizer = hk.distribute(optimizer, **options)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, run_eagerly=run_eagerly, steps_per_execution=several)
        x, y = data(world)
        rows = x.reshape(-1, FEATURES), y.reshape(-1)
        model.fit(*rows, batch_size=ROWS, epochs=epochs, shuffle=False, verbose=0, callbacks=[hk.BroadcastState()])
        hk.check_agreement(model, optimizer, world)
        return weights_of(model), optimizer
    finally:
        keras.config.set_floatx("float32")


def slot_bytes(optimizer: Any) -> int:
    from hvdkit.tf_shared.keras_sharded import leaves_of, slot_variables

    return sum(8 * int(np.prod(one.shape)) for leaf in leaves_of(optimizer) for one in slot_variables(leaf))


def require_equal(hk: Any, world: Any, everyone: Any, name: str) -> None:
    whole, before = trained(hk, world, optimizer_of(name))
    found, optimizer = trained(hk, world, optimizer_of(name), shard_state=True)
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-10)
    spare = 3 * 8 * len(everyone(0))
    assert sum(everyone(slot_bytes(optimizer))) <= slot_bytes(before) + spare
    assert type(optimizer).__name__ == type(before).__name__


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks("keras", n=(2, 3))
def test_weights_are_those_of_an_unsharded_training(hk, world, everyone, name):
    require_equal(hk, world, everyone, name)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Nadam", "Lamb"])
@on_ranks("keras-torch", "keras-jax")
def test_on_other_backends_too(hk, world, everyone, name):
    require_equal(hk, world, everyone, name)


# Checkpoints ----------------------------------------------------------------------------------------------------------


def on_from(hk: Any, world: Any, directory: Any, steps: tuple[int, int], name: str, sharded: bool) -> Any:
    """Train on from what is in the directory; what the weights become, and the bytes of slots that a rank keeps."""
    import keras

    keras.config.set_floatx("float64")
    model = model_of()
    optimizer = hk.distribute(optimizer_of(name), shard_state=sharded)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    loops = hk.__name__ == "hvdkit.tensorflow"
    if not loops:
        model.compile(optimizer, loss)
    hk.broadcast_state(model, optimizer)
    checkpoints = hk.Checkpoints(directory)
    checkpoints.restore(model, optimizer)
    generator = np.random.default_rng(7)
    x = generator.normal(size=(10, 12, FEATURES))
    y = np.argmax(x[:, :, :CLASSES], axis=2)
    for step in range(*steps):
        mine = x[step, world.rank :: world.size], y[step, world.rank :: world.size]
        if loops:
            loop_step(model, optimizer, loss, *mine)
        else:
            model.train_on_batch(*mine)
        checkpoints.save(model, optimizer, step=step + 1)
    hk.check_agreement(model, optimizer, world)
    return weights_of(model), slot_bytes(optimizer)


def loop_step(model: Any, optimizer: Any, loss: Any, x: Any, y: Any) -> None:
    import tensorflow as tf

    with tf.GradientTape() as tape:
        value = loss(y, model(x))
    optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("framework", "name"),
    [("keras", "Nadam"), ("keras-torch", "AdamW"), ("keras-jax", "Adafactor"), ("tensorflow", "AdamW")],
)
def test_it_goes_on_on_any_number_of_ranks_divided_or_not(run_job, tmp_path, framework, name):
    whole = run_job(framework, on_from, 1, directory=tmp_path / "whole", steps=(0, 10), name=name, sharded=False)
    directory = tmp_path / "moving"
    for start, (n, sharded) in enumerate([(2, True), (3, True), (1, True), (2, False), (3, True)]):
        steps = (2 * start, 2 * start + 2)
        found = run_job(framework, on_from, n, directory=directory, steps=steps, name=name, sharded=sharded)
    # Keras computes in float32 on jax, and the loss on torch, and other numbers of ranks round otherwise.
    tolerance = 1e-6 if framework in ("keras-torch", "keras-jax") else 1e-10
    for values, _ in found:
        np.testing.assert_allclose(values, whole[0][0], rtol=0, atol=tolerance)
    newest = max(directory.iterdir())
    assert {f"optimizer-{rank}-of-3.npz" for rank in range(3)} <= {one.name for one in newest.iterdir()}


# Settings -------------------------------------------------------------------------------------------------------------


def settings_of(name: str) -> Any:
    import keras

    optimizers = keras.optimizers
    made = {
        "global_clipnorm": lambda: optimizer_of("Adam", global_clipnorm=0.05),
        "clipnorm": lambda: optimizer_of("SGD", clipnorm=0.02),
        "accumulates": lambda: optimizer_of("Nadam", gradient_accumulation_steps=3, clipvalue=0.01),
        "average": lambda: optimizer_of("Adam", use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=4),
        "average_at_the_end": lambda: optimizer_of("SGD", use_ema=True, ema_momentum=0.5),
        "schedule": lambda: optimizers.RMSprop(optimizers.schedules.PolynomialDecay(0.02, 4, 0.001)),
        "scaled": lambda: optimizer_of("AdamW", loss_scale_factor=128.0),
        "loss_scale": lambda: optimizers.LossScaleOptimizer(optimizer_of("Adam"), dynamic_growth_steps=2),
        "several": lambda: optimizers.MultiOptimizer(
            optimizers.OptimizerMap(optimizers.SGD(0.02, momentum=0.9), {".*kernel": optimizers.Adam(0.02)})
        ),
    }
    return made[name]()


SETTINGS = (
    *("global_clipnorm", "clipnorm", "accumulates", "average", "average_at_the_end", "schedule", "scaled"),
    *("loss_scale", "several"),
)


@pytest.mark.parametrize("name", SETTINGS)
@on_ranks("keras", "keras-torch", "keras-jax")
def test_what_an_optimizer_can_do_besides_is_as_unsharded(hk, world, everyone, name):
    import keras

    several = 2 if name == "average" and keras.backend.backend() != "torch" else 1
    whole, before = trained(hk, world, settings_of(name), several=several)
    found, optimizer = trained(hk, world, settings_of(name), several=several, shard_state=True)
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-10)
    assert 0.3 * slot_bytes(before) < slot_bytes(optimizer) < 0.7 * slot_bytes(before)
    assert len({one.tobytes() for one in everyone(found)}) == 1


@on_ranks("keras", "keras-torch", "keras-jax")
def test_weight_decay_leaves_out_what_it_is_told(hk, world):
    def made(by: str, model: Any) -> Any:
        optimizer = optimizer_of("AdamW", weight_decay=5.0)
        optimizer.exclude_from_weight_decay(
            **({"var_names": ["bias"]} if by == "name" else {"var_list": model.layers[0].weights})
        )
        return optimizer

    for by in ("name", "variable"):
        models = model_of(), model_of()
        plain, sharded = (made(by, model) for model in models)
        whole, _ = trained(hk, world, plain, model=models[0])
        found, _ = trained(hk, world, sharded, model=models[1], shard_state=True)
        np.testing.assert_allclose(found, whole, rtol=0, atol=1e-10)


@on_ranks("keras", "keras-torch", "keras-jax", n=(2, 3))
def test_each_rank_keeps_its_share(hk, world, everyone):
    import keras

    def made(**options: Any) -> Any:
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(301), keras.layers.Dense(10)])
        optimizer = hk.distribute(keras.optimizers.Adam(), **options)
        hk.broadcast_state(model, optimizer)
        return slot_bytes(optimizer)

    whole = made()
    kept = everyone(made(shard_state=True))
    assert all(abs(one - whole / world.size) < 0.05 * whole / world.size for one in kept)


# A state that is there already ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Nadam", "Muon"])
@on_ranks("keras", "keras-torch", "keras-jax")
def test_an_optimizer_that_has_trained_is_divided_with_its_state(hk, world, name):
    def made(shards: bool) -> Any:
        model, plain = model_of(), optimizer_of(name)
        trained(hk, world, plain, model=model)
        model = copy_of(model)
        again = optimizer_of(name)
        again.build(model.trainable_variables)
        for variable, value in zip(again.variables, plain.variables, strict=True):
            variable.assign(value)
        return trained(hk, world, again, model=model, shard_state=shards)

    whole, _ = made(False)
    found, optimizer = made(True)
    np.testing.assert_allclose(found, whole, rtol=0, atol=1e-10)
    assert int(optimizer.iterations) == 2 * STEPS


def copy_of(model: Any) -> Any:
    other = model_of()
    other.set_weights(model.get_weights())
    return other


# Loops of TensorFlow of one's own -------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
@on_ranks("tensorflow", n=(2, 3))
def test_a_loop_of_ones_own_with_rows_of_an_embedding(hk, world, everyone, graph):
    import keras
    import tensorflow as tf

    def train(name: str, **options: Any) -> Any:
        keras.config.set_floatx("float64")
        try:
            layers = [keras.layers.Embedding(29, 3), keras.layers.Flatten(), keras.layers.Dense(2)]
            model = keras.Sequential([keras.Input((4,), dtype="int32"), *layers])
            generator = np.random.default_rng(1)
            model.set_weights([generator.normal(size=one.shape) * 0.3 for one in model.weights])
            optimizer = hk.distribute(optimizer_of(name, global_clipnorm=0.5), **options)
            hk.broadcast_state(model, optimizer)

            def step(x: Any, y: Any) -> None:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x)))
                optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

            step = tf.function(step) if graph else step
            x = np.random.default_rng(4).integers(0, 29, size=(STEPS, ROWS * world.size, 4))[
                :, world.rank :: world.size
            ]
            for rows in x:
                step(tf.constant(rows), tf.constant(rows[:, 0] % 2))
            hk.check_agreement(model, optimizer, world)
            return weights_of(model)
        finally:
            keras.config.set_floatx("float32")

    for name in ("Adam", "Adafactor"):
        found = train(name, shard_state=True)
        np.testing.assert_allclose(found, train(name), rtol=0, atol=1e-10)
        assert len({one.tobytes() for one in everyone(found)}) == 1


@on_ranks("tensorflow")
def test_two_optimizers_in_one_graph_do_not_mix_up(hk, world):
    import keras
    import tensorflow as tf

    def train(**options: Any) -> Any:
        models = [keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(9)]) for _ in range(2)]
        for seed, model in enumerate(models):
            generator = np.random.default_rng(seed)
            model.set_weights([generator.normal(size=one.shape) for one in model.weights])
        optimizers = [hk.distribute(keras.optimizers.Adam(0.1), **options) for _ in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            hk.broadcast_state(model, optimizer)

        @tf.function
        def step(x: Any) -> None:
            with tf.GradientTape(persistent=True) as tape:
                losses = [tf.reduce_mean(tf.square(model(x) - place)) for place, model in enumerate(models)]
            for model, optimizer, loss in zip(models, optimizers, losses, strict=True):
                optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        for x in data(world)[0]:
            step(tf.constant(x, tf.float32))
        return np.concatenate([weights_of(model) for model in models])

    np.testing.assert_allclose(train(shard_state=True), train(), rtol=0, atol=1e-6)


# What is refused ------------------------------------------------------------------------------------------------------


@on_ranks("keras", "keras-torch", "keras-jax")
def test_what_cannot_be_divided_is_refused_by_name(hk, world):
    import keras

    from hvdkit.errors import InvalidArgumentError

    class Normed(keras.optimizers.Lamb):
        """Divides by the norm of all gradients."""

        def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
            norm = keras.ops.sqrt(sum(keras.ops.sum(keras.ops.square(one)) for one in grads))
            super()._backend_update_step([one / norm for one in grads], trainable_variables, learning_rate)

    class LearnsItsRate(keras.optimizers.SGD):
        """By what it sees of all variables, and shows it later than in the first steps."""

        def build(self, variables: Any) -> None:
            super().build(variables)
            self.seen = keras.Variable(0.0, name="seen", trainable=False)
            self._track_variable(self.seen)

        def _backend_update_step(self, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
            self.seen.assign_add(sum(keras.ops.sum(keras.ops.abs(one)) for one in grads))
            super()._backend_update_step(grads, trainable_variables, learning_rate)

    class Own(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            for gradient, variable in zip(grads, trainable_variables, strict=True):
                variable.assign_sub(0.1 * gradient)

    optimizers = keras.optimizers
    refused = [
        (Normed(0.1), {}, "cannot divide the state of Normed: it updates a variable by what it knows of others"),
        (LearnsItsRate(0.1), {}, "LearnsItsRate: it updates a variable by what it knows of others"),
        (Own(0.1), {}, "and Own has one of its own"),
        (optimizers.ScheduleFreeAdamW(0.1), {}, "ScheduleFreeAdamW, which begins as a copy of the weights"),
        (optimizers.MultiOptimizer(lambda variable: optimizers.SGD()), {}, "makes its optimizers later"),
        (optimizers.SGD(0.1, global_clipnorm=1.0, gradient_accumulation_steps=2), {}, "cannot clip by a norm what SGD"),
        (optimizers.SGD(0.1), {"every": 4}, "leave every=4 out"),
        (optimizers.SGD(0.1), {"op": "adasum"}, "leave op='adasum' out"),
        (optimizers.SGD(0.1), {"process_set": "rank"}, "leave process_set='rank' out"),
        (optimizers.SGD(0.1), {"shard_state": 1}, "shard_state must be True or False, got 1"),
    ]
    for optimizer, options, message in refused:
        kind = type(optimizer)
        with pytest.raises(InvalidArgumentError, match=message):
            hk.distribute(optimizer, **{"shard_state": True, **options})
        assert type(optimizer) is kind


@on_ranks("tensorflow")
def test_a_tape_is_refused(hk, world):
    import tensorflow as tf

    from hvdkit.errors import InvalidArgumentError

    with pytest.raises(InvalidArgumentError, match="which a tape has not; distribute the optimizer"):
        hk.distribute(tf.GradientTape(), shard_state=True)


@on_ranks("keras", "keras-torch")
def test_an_elastic_training_is_refused(hk, world):
    import keras

    from hvdkit.errors import InvalidArgumentError

    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(2)])
    optimizer = hk.distribute(keras.optimizers.Adam(), shard_state=True)
    with pytest.raises(InvalidArgumentError, match="go on from Checkpoints"):
        hk.ElasticState(model, optimizer, loader=None)


@on_ranks("keras")
def test_a_callback_that_swaps_weights_and_their_averages_is_refused(hk, world):
    import keras

    from hvdkit.errors import InvalidArgumentError

    model = model_of()
    model.compile(hk.distribute(keras.optimizers.SGD(0.1, use_ema=True), shard_state=True), "mse")
    hk.broadcast_state(model, model.optimizer)
    with pytest.raises(InvalidArgumentError, match="of which each rank has a part"):
        model.fit(np.ones((4, FEATURES)), np.ones((4, CLASSES)), callbacks=[keras.callbacks.SwapEMAWeights()])


@on_ranks("keras", "keras-torch", "keras-jax")
def test_a_model_that_keras_saves_says_that_its_optimizer_begins_anew(hk, world, everyone, tmp_path):
    import keras

    from hvdkit.errors import InvalidArgumentError

    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(2)])
    model.compile(hk.distribute(keras.optimizers.Adam(), shard_state=True), "mse")
    model.optimizer.build(model.trainable_variables)
    with pytest.warns(UserWarning, match="Keras saves no state of this Adam"):
        model.save(tmp_path / f"{world.rank}.keras")
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer 'adam"):
        loaded = keras.models.load_model(tmp_path / f"{world.rank}.keras")
    np.testing.assert_array_equal(weights_of(loaded), weights_of(model))
    assert type(loaded.optimizer) is type(keras.optimizers.Adam())
    loaded.save_weights(tmp_path / f"{world.rank}.weights.h5")
    with pytest.raises((InvalidArgumentError, ValueError), match="holds the whole state of a Adam"):  # or within Keras'
        model.load_weights(tmp_path / f"{world.rank}.weights.h5")
