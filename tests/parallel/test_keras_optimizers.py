"""hvdkit.keras with models as people publish them: several optimizers, no ``call``, layers yet to be built, real ranks.

Frameworks and hvdkit are imported within, on the ranks.
"""

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs_checks import message
from ranks import KERAS, on_ranks

NOISE, PIXELS, SAMPLES = 3, 6, 48
IMAGES = np.random.default_rng(8).normal(size=(SAMPLES, PIXELS)).astype("float32")
LATENT = np.random.default_rng(9).normal(size=(SAMPLES, NOISE)).astype("float32")


@functools.cache
def gan_class() -> type:
    """A GAN as in Keras' guides: optimizers set in a ``compile`` of its own, two updates in ``train_step``.

    The noise is part of the data, so that any number of ranks sees the same.
    """
    import keras

    class Gan(keras.Model):
        def __init__(self, discriminator: Any, generator: Any) -> None:
            super().__init__()
            self.discriminator, self.generator = discriminator, generator
            self.d_loss, self.g_loss = keras.metrics.Mean("d_loss"), keras.metrics.Mean("g_loss")
            if keras.backend.backend() == "torch":
                self.built = True  # what Keras' guide for PyTorch does

        def compile(self, d_optimizer: Any, g_optimizer: Any, loss: Any) -> None:
            super().compile()
            self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss

        @property
        def metrics(self) -> list[Any]:
            return [self.d_loss, self.g_loss]

        def train_step(self, data: Any) -> dict[str, Any]:
            real, noise = data
            ops = keras.ops

            def of_discriminator() -> Any:
                images = ops.concatenate([self.generator(noise), real], axis=0)
                labels = ops.concatenate([ops.ones_like(real[:, :1]), ops.zeros_like(real[:, :1])], axis=0)
                return self.loss_fn(labels, self.discriminator(images))

            def of_generator() -> Any:
                return self.loss_fn(ops.zeros_like(real[:, :1]), self.discriminator(self.generator(noise)))

            for part, loss_of, optimizer, metric in (
                (self.discriminator, of_discriminator, self.d_optimizer, self.d_loss),
                (self.generator, of_generator, self.g_optimizer, self.g_loss),
            ):
                metric.update_state(step(self, part, loss_of, optimizer))
            return {metric.name: metric.result() for metric in self.metrics}

    return Gan


def step(model: Any, part: Any, loss_of: Callable[[], Any], optimizer: Any) -> Any:
    """One update of a part of the model in the backend's own way."""
    import keras

    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = loss_of()
            scaled = optimizer.scale_loss(loss)
        weights = part.trainable_weights
        optimizer.apply_gradients(zip(tape.gradient(scaled, weights), weights, strict=True))
        return loss
    import torch

    model.zero_grad()
    loss = loss_of()
    optimizer.scale_loss(loss).backward()
    weights = list(part.trainable_weights)
    with torch.no_grad():
        optimizer.apply([weight.value.grad for weight in weights], weights)
    return loss.detach()


def make_gan(hk: Any, seed: int, late: bool = False, distribute: str = "dg", **rates: float) -> Any:
    import keras

    keras.utils.set_random_seed(seed)
    layers = keras.layers
    discriminator = [layers.Dense(8), layers.LeakyReLU(0.2), layers.Dense(1)]
    generator = [layers.Dense(8, activation="tanh"), layers.Dense(PIXELS)]
    inputs = [] if late else [keras.Input((PIXELS,))], [] if late else [keras.Input((NOISE,))]
    gan = gan_class()(keras.Sequential([*inputs[0], *discriminator]), keras.Sequential([*inputs[1], *generator]))
    optimizers = {
        "d": keras.optimizers.Adam(rates.get("d", 0.02), beta_1=0.5),
        "g": keras.optimizers.Adam(rates.get("g", 0.01), beta_1=0.5),
    }
    made = [hk.distribute(one) if name in distribute else one for name, one in optimizers.items()]
    gan.compile(*made, keras.losses.BinaryCrossentropy(from_logits=True))
    return gan


def data(hk: Any, world: Any, batch: int = 12) -> Any:
    return hk.shard((IMAGES, LATENT), world, batch // world.size, seed=4)


def everything(model: Any) -> dict[str, list[float]]:
    """Weights, and by name the states of a model's optimizers."""
    import keras

    from hvdkit.keras.optimizer import held_by

    owners = {"weights": model.weights, **{name: one.variables for name, one in held_by(model).items()}}
    values = {name: [np.ravel(keras.ops.convert_to_numpy(one)) for one in owned] for name, owned in owners.items()}
    return {name: np.concatenate(value).astype(float).tolist() for name, value in values.items()}


def train_gan(hk: Any, world: Any) -> dict[str, list[float]]:
    gan = make_gan(hk, world.rank)
    callbacks = [hk.BroadcastState(), hk.CheckAgreement(world, every=3)]
    gan.fit(data(hk, world), epochs=2, verbose=0, callbacks=callbacks)
    return everything(gan)


@on_ranks("keras", "keras-torch", n=3)
def test_a_gan_ends_as_in_one_process(hk, world, everyone, alone):
    found = train_gan(hk, world)
    assert everyone(found) == [found] * world.size
    expected = alone(train_gan)
    assert found.keys() == expected.keys() == {"weights", "optimizer", "d_optimizer", "g_optimizer"}
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=2e-4, abs=2e-5), name
    assert found["d_optimizer"][0] == 8  # steps


@functools.cache
def jax_gan_class() -> type:
    """The same for jax: two optimizers in a ``train_step`` without side effects, which get their states of the user."""
    import jax
    import keras

    class Gan(gan_class()):  # type: ignore[misc]
        def train_step(self, state: Any, data: Any) -> Any:
            trainable, fixed, optimizer_state, metrics_state = state
            (real, noise), ops = data, keras.ops
            split = len(self.discriminator.trainable_variables)
            d, g = list(trainable[:split]), list(trainable[split:])

            def of_discriminator(d: Any) -> Any:
                images = ops.concatenate([self.generator.stateless_call(g, [], noise)[0], real], axis=0)
                labels = ops.concatenate([ops.ones_like(real[:, :1]), ops.zeros_like(real[:, :1])], axis=0)
                return self.loss_fn(labels, self.discriminator.stateless_call(d, [], images)[0])

            def of_generator(g: Any) -> Any:
                made = self.generator.stateless_call(g, [], noise)[0]
                return self.loss_fn(ops.zeros_like(real[:, :1]), self.discriminator.stateless_call(d, [], made)[0])

            d, _ = self.d_optimizer.stateless_apply(self.d_state, jax.grad(of_discriminator)(d), d)
            g, _ = self.g_optimizer.stateless_apply(self.g_state, jax.grad(of_generator)(g), g)
            return {}, ([*d, *g], fixed, optimizer_state, metrics_state)

    return Gan


def train_jax_gan(hk: Any, world: Any) -> list[float]:
    import keras

    keras.utils.set_random_seed(world.rank)
    layers = keras.layers
    discriminator = [keras.Input((PIXELS,)), layers.Dense(8), layers.LeakyReLU(0.2), layers.Dense(1)]
    generator = [keras.Input((NOISE,)), layers.Dense(8, activation="tanh"), layers.Dense(PIXELS)]
    gan = jax_gan_class()(keras.Sequential(discriminator), keras.Sequential(generator))
    optimizers = [hk.distribute(keras.optimizers.SGD(rate)) for rate in (0.2, 0.1)]
    for optimizer, part in zip(optimizers, (gan.discriminator, gan.generator), strict=True):
        optimizer.build(part.trainable_variables)
    gan.compile(*optimizers, keras.losses.BinaryCrossentropy(from_logits=True))
    gan.built = True
    gan.d_state, gan.g_state = ([variable.value for variable in one.variables] for one in optimizers)
    gan.fit(data(hk, world), epochs=2, verbose=0, callbacks=[hk.BroadcastState(), hk.CheckAgreement(world, every=3)])
    return everything(gan)["weights"]


@on_ranks("keras-jax")
def test_a_gan_on_jax_ends_as_in_one_process(hk, world, everyone, alone):
    found = train_jax_gan(hk, world)
    assert everyone(found) == [found] * world.size
    assert found == pytest.approx(alone(train_jax_gan), rel=2e-4, abs=2e-5)


class Interruption(Exception):  # noqa: N818
    """What ends a training in mid-epoch."""


def interrupt_after(steps: int) -> Any:
    import keras

    left = [steps]

    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            left[0] -= 1
            if not left[0]:
                raise Interruption

    return Interrupt()


@on_ranks("keras", smoke=("keras-torch",))
@pytest.mark.parametrize("late", [False, True])
def test_a_gan_goes_on_in_mid_epoch_with_the_same_bits(hk, world, everyone, tmp_path, late):
    """All its optimizers' steps and slots included, whatever the other process begins with; late: TensorFlow alone."""

    def run(name: str, seed: int, *more: Any) -> Any:
        gan = make_gan(hk, seed, late)
        schedules = [hk.warmup(gan.d_optimizer, world, 4, epochs=2), hk.warmup(gan.g_optimizer, world, 4, epochs=3)]
        saving = hk.Checkpoint(tmp_path / name, every=2)
        gan.fit(data(hk, world), epochs=3, verbose=0, callbacks=[saving, hk.BroadcastState(), *schedules, *more])
        return gan

    whole = run("whole", 0)
    with pytest.raises(Interruption):
        run("parts", 0, interrupt_after(7))
    everyone("interrupted")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*variable loading")  # Keras', of optimizers that it leaves out
        parts = run("parts", 7 + world.rank)
    assert everything(parts) == everything(whole)
    assert int(parts.d_optimizer.iterations) == int(parts.g_optimizer.iterations) == 12
    assert everyone(everything(parts)) == [everything(parts)] * 2


@on_ranks("keras-torch")
def test_warmup_works_on_the_optimizer_it_was_given(hk, world):
    import keras

    def rates(gan: Any, *callbacks: Any) -> dict[str, list[float]]:
        history = gan.fit(data(hk, world), epochs=2, verbose=0, callbacks=list(callbacks)).history
        return {name: [round(float(one), 5) for one in history[name]] for name in history if "rate" in name}

    gan = make_gan(hk, 0, d=0.08, g=0.04)
    assert rates(gan, hk.warmup(gan.d_optimizer, world, 4, epochs=2)) == {"d_optimizer_learning_rate": [0.06, 0.08]}
    assert float(gan.g_optimizer.learning_rate) == pytest.approx(0.04)
    gan = make_gan(hk, 0, d=0.08, g=0.04)
    both = hk.warmup(gan.d_optimizer, world, 4, epochs=2), hk.warmup(gan.g_optimizer, world, 4, epochs=4)
    assert rates(gan, *both) == {
        "d_optimizer_learning_rate": [0.06, 0.08],
        "g_optimizer_learning_rate": [0.025, 0.03],
    }
    gan = make_gan(hk, 0, d=0.08, g=0.04)
    found = rates(gan, hk.Warmup(world, epochs=2))
    assert found.pop("learning_rate")[1] == 0.001  # of the one that compile() made
    assert found == {"d_optimizer_learning_rate": [0.06, 0.08], "g_optimizer_learning_rate": [0.03, 0.04]}
    other = hk.warmup(keras.optimizers.SGD(0.1, name="mine"), world, 4)
    error = message(lambda: gan.fit(data(hk, world), verbose=0, callbacks=[other]))
    assert "Warmup was made for 'mine' (SGD)" in error and "d_optimizer (Adam), g_optimizer (Adam)" in error
    decaying = keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9))
    gan.compile(hk.distribute(decaying), gan.g_optimizer, gan.loss_fn)
    error = message(lambda: gan.fit(data(hk, world), verbose=0, callbacks=[hk.Warmup(world, 4)]))
    assert "Warmup cannot set the learning rate of d_optimizer (Adam)" in error


@on_ranks("keras-torch", smoke=("keras",))
@pytest.mark.parametrize("fault", ["undistributed", "one undistributed", "slot", "rate"])
def test_errors_name_the_user_s_optimizer(hk, world, fault):
    import keras

    gan = make_gan(hk, 0, distribute={"undistributed": "", "one undistributed": "d"}.get(fault, "dg"))
    at = keras.callbacks.Callback()

    def go_apart(epoch: int, logs: Any = None) -> None:
        if world.rank == 1 and fault == "slot" and epoch == 1:
            slot = gan.g_optimizer.variables[-1]
            slot.assign(slot + 1.0)
        elif world.rank == 1 and fault == "rate":
            gan.g_optimizer.learning_rate = 0.5

    at.on_epoch_end = go_apart
    callbacks = [at, hk.CheckAgreement(world, every=5)]
    error = message(lambda: gan.fit(data(hk, world), epochs=2, verbose=0, callbacks=callbacks))
    expected = {
        "undistributed": "with d_optimizer (Adam), g_optimizer (Adam) that hvdkit has not distributed",
        "one undistributed": "with g_optimizer (Adam) that hvdkit has not distributed",
        "slot": "at the end of fit, the ranks disagree: g_optimizer: adam",
        "rate": "the ranks use different learning rates in optimizer or d_optimizer or g_optimizer",
    }
    assert expected[fault] in error, error
    if "undistributed" in fault:
        assert "hvdkit.keras.distribute(g_optimizer)." in error


@on_ranks(*KERAS)
def test_a_distribute_on_one_rank_alone(hk, world, everyone):
    """One that trains is an error on every rank, one that does not is harmless: it shifts no name."""
    import keras

    model = keras.Sequential([keras.Input((PIXELS,)), keras.layers.Dense(1)])
    alone = keras.optimizers.SGD(0.1)
    if world.rank == 1:
        hk.distribute(alone)
    error = message(lambda: hk.broadcast_state(model, alone))
    assert f"rank {world.rank} has optimizer (SGD) {'' if world.rank == 1 else 'not '}distributed" in error
    model.compile(hk.distribute(keras.optimizers.Adam(0.01)), "mse")
    model.fit(hk.shard((IMAGES, IMAGES[:, :1]), world, 8), verbose=0, callbacks=[hk.BroadcastState()])
    assert len({str(one) for one in everyone(everything(model))}) == 1


@on_ranks("keras-torch")
def test_checkpoints_hold_optimizers_by_name_and_older_ones_stay_readable(hk, world, everyone, tmp_path):
    gan = make_gan(hk, 0)
    gan.fit(data(hk, world), verbose=0)
    hk.Checkpoints(tmp_path / "held").save(gan, gan.d_optimizer, step=4)
    hk.Checkpoints(tmp_path / "named").save(gan, {"d": gan.d_optimizer, "g": gan.g_optimizer}, step=4)
    other = make_gan(hk, 5 + world.rank)
    assert hk.Checkpoints(tmp_path / "held").restore(other, other.g_optimizer).step == 4
    assert everything(other) == everything(gan)
    other = make_gan(hk, 5 + world.rank)
    hk.Checkpoints(tmp_path / "named").restore(other, {"g": other.g_optimizer, "d": other.d_optimizer})
    assert everything(other)["d_optimizer"] == everything(gan)["d_optimizer"]
    hk.Checkpoints(tmp_path / "old").save(gan, {"optimizer": gan.optimizer}, step=4)  # as if there were no others
    other = make_gan(hk, 5 + world.rank)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        hk.Checkpoints(tmp_path / "old").restore(other, other.optimizer)
    told = [str(one.message) for one in warned if "begin anew" in str(one.message)]
    assert ["d_optimizer (Adam), g_optimizer (Adam) begin anew" in text for text in told] == [True] * world.is_root
    assert everything(other)["weights"] == everything(gan)["weights"]
    assert [int(one.iterations) for one in (other.d_optimizer, other.g_optimizer)] == [0, 0]
    error = message(lambda: hk.Checkpoints(tmp_path / "named").restore(other, other.d_optimizer))
    assert "holds the states of d, g, and this training has" in error and "d_optimizer (Adam)" in error


@functools.cache
def subclassed() -> type:
    import keras

    class Classifier(keras.Model):
        """A subclassed model as in Keras' guides, whose layers know no input shape."""

        def __init__(self) -> None:
            super().__init__()
            self.hidden = keras.layers.Dense(8, activation="relu")
            self.normal = keras.layers.BatchNormalization()
            self.out = keras.layers.Dense(PIXELS)
            self.unused = keras.layers.Dense(3)

        def call(self, x: Any, training: bool = False) -> Any:
            return self.out(self.normal(self.hidden(x), training=training))

    return Classifier


@on_ranks("keras")
def test_what_is_no_optimizer_is_refused_in_a_sentence(hk, world, tmp_path):
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    checkpoints = hk.Checkpoints(tmp_path)
    for attempt in (
        lambda: checkpoints.save(model, "adam", step=1),
        lambda: checkpoints.restore(model, "adam"),
        lambda: hk.broadcast_state(model, "adam"),
        lambda: hk.check_agreement(model, "adam", world=world),
        lambda: hk.ElasticState(model, "adam", loader=None),
    ):
        assert message(attempt).startswith("InvalidArgumentError: hvdkit.keras needs a keras.Optimizer, got 'adam'")


@pytest.mark.parametrize("options", [{}, {"shard_state": True}, {"every": 1, "outer": "nesterov"}])
@on_ranks("keras", "keras-jax")
def test_where_warnings_are_errors_a_training_is_compared(hk, world, options):
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.25)
    optimizer.build(model.trainable_variables)
    model.compile(hk.distribute(optimizer, **options), loss="mse")  # on jax Keras' own get_config warns
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hk.seed_everything(3, world)
        hk.broadcast_state(model, model.optimizer)
        model.fit(np.ones((2, 2)) * world.rank, np.ones((2, 1)), batch_size=1, shuffle=False, verbose=0)
        hk.check_agreement(model, model.optimizer, world=world)


@on_ranks(*KERAS)
def test_a_model_not_yet_built_waits_for_its_first_batch(hk, world, everyone, tmp_path):
    """Broadcast, compared, saved, gone on with."""
    import keras

    def run(epochs: int, name: str, seed: int, *more: Any) -> Any:
        keras.utils.set_random_seed(seed)
        model = subclassed()()
        model.compile(hk.distribute(keras.optimizers.Adam(0.02)), "mse")
        callbacks = [hk.Checkpoint(tmp_path / name, every=2), hk.BroadcastState(), hk.CheckAgreement(world, every=2)]
        shards = hk.shard((LATENT, IMAGES), world, 6, seed=4)
        model.fit(shards, epochs=epochs, verbose=0, callbacks=[*callbacks, *more])
        return model

    whole = run(3, "whole", world.rank)
    with pytest.raises(Interruption):
        run(3, "parts", world.rank, interrupt_after(7))
    everyone("interrupted")
    parts = run(3, "parts", 7 + world.rank)
    assert everything(parts) == everything(whole)
    assert everyone(everything(parts)) == [everything(parts)] * 2
    assert int(parts.optimizer.iterations) == 12


@on_ranks("keras")
def test_a_model_not_yet_built_may_step_eagerly_and_fails_in_its_own_words(hk, world, everyone):
    """What a step takes as a number no trace can have: it ended with variables that had no values."""
    import keras
    import tensorflow as tf

    class Own(subclassed()):
        def train_step(self, data: Any) -> dict[str, Any]:
            with tf.GradientTape() as tape:
                loss = keras.ops.mean((self(data[0]) - data[1]) ** 2)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss.numpy()}

    def run(eagerly: bool) -> Any:
        keras.utils.set_random_seed(world.rank)
        model = Own()
        model.compile(hk.distribute(keras.optimizers.Adam(0.02)), run_eagerly=eagerly)
        shards = hk.shard((LATENT, IMAGES), world, 6)
        model.fit(shards, verbose=0, callbacks=[hk.BroadcastState()])
        return model

    mine = everything(run(eagerly=True))
    assert everyone(mine) == [mine] * 2
    with pytest.raises(AttributeError, match="no attribute 'numpy'") as failed:
        run(eagerly=False)
    assert "; give it a keras.Input" in failed.value.__notes__[0]


@functools.cache
def vae_class() -> type:
    """A VAE as in Keras' examples: an encoder, a decoder, a ``train_step``, three metrics, no ``call``."""
    import keras
    import tensorflow as tf

    class Vae(keras.Model):
        def __init__(self, encoder: Any, decoder: Any) -> None:
            super().__init__()
            self.encoder, self.decoder = encoder, decoder
            names = ("total_loss", "reconstruction_loss", "kl_loss")
            self.trackers = {name: keras.metrics.Mean(name) for name in names}

        @property
        def metrics(self) -> list[Any]:
            return list(self.trackers.values())

        def train_step(self, data: Any) -> dict[str, Any]:
            images, noise = data
            ops = keras.ops
            with tf.GradientTape() as tape:
                mean, log_var = ops.split(self.encoder(images), 2, axis=-1)
                decoded = self.decoder(mean + ops.exp(0.5 * log_var) * noise)
                reconstruction = ops.mean(ops.sum(ops.square(decoded - images), axis=-1))
                kl = ops.mean(ops.sum(-0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var)), axis=-1))
                total = reconstruction + kl
            gradients = tape.gradient(total, self.trainable_weights)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
            for tracker, value in zip(self.metrics, (total, reconstruction, kl), strict=True):
                tracker.update_state(value)
            return {name: tracker.result() for name, tracker in self.trackers.items()}

    return Vae


def train_vae(hk: Any, world: Any, directory: Path | None = None, epochs: int = 3) -> Any:
    import keras

    keras.utils.set_random_seed(world.rank)
    layers = keras.layers
    encoder = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(2 * NOISE)])
    decoder = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(PIXELS)])
    vae = vae_class()(encoder, decoder)
    vae.compile(optimizer=hk.distribute(keras.optimizers.Adam(0.01)))
    saving = [hk.Checkpoint(directory)] if directory is not None else []
    callbacks = [*saving, hk.BroadcastState(), hk.AverageMetrics(world), hk.CheckAgreement(world, every=1)]
    history = vae.fit(data(hk, world), epochs=epochs, verbose=0, callbacks=callbacks).history
    return everything(vae), history["total_loss"]


@on_ranks("keras")
def test_a_vae_of_layers_not_yet_built_ends_as_in_one_process_and_goes_on(hk, world, everyone, alone, tmp_path):
    found, losses = train_vae(hk, world)
    assert everyone((found, losses)) == [(found, losses)] * 2
    expected, one_s_losses = alone(train_vae)
    assert losses == pytest.approx(one_s_losses, rel=1e-4)
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=2e-4, abs=2e-5), name
    train_vae(hk, world, tmp_path, 1)
    assert train_vae(hk, world, tmp_path)[0] == found


def train_in(policy: str, hk: Any, world: Any, overflows: bool) -> tuple[list[float], int, float]:
    """Six steps, of which the third overflows on the last rank; weights, steps taken, and the loss scale."""
    import keras

    keras.mixed_precision.set_global_policy(policy)
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((PIXELS,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1, dtype="float32")]
    )
    model.compile(hk.distribute(keras.optimizers.Adam(0.01)), "mse")
    keras.mixed_precision.set_global_policy("float32")
    x, y = 0.1 * IMAGES, IMAGES[:, :1].copy()
    if overflows:
        y[2 * 8 + 7] = 3e38  # the last sample of the third step's batch: its gradient is infinite
    share = np.arange(SAMPLES).reshape(-1, world.size, 8 // world.size)[:, world.rank].reshape(-1)
    model.fit(x[share], y[share], batch_size=8 // world.size, shuffle=False, verbose=0)
    scale = getattr(model.optimizer, "dynamic_scale", None)
    found = np.concatenate([np.ravel(one) for one in model.get_weights()]).astype(float).tolist()
    return found, int(model.optimizer.iterations), 0.0 if scale is None else float(keras.ops.convert_to_numpy(scale))


@on_ranks(*KERAS)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_is_that_of_one_process(hk, world, everyone, alone, policy):
    """Under a loss scale all ranks leave out the step in which one of them overflows."""
    overflows = policy == "mixed_float16"
    found, steps, scale = train_in(policy, hk, world, overflows)
    expected, one_s_steps, one_s_scale = alone(train_in, policy=policy, overflows=overflows)
    assert (steps, scale) == (one_s_steps, one_s_scale) == ((5, 2.0**14) if overflows else (6, 0.0))
    assert np.isfinite(found).all() and found == pytest.approx(expected, abs=0.004)
    assert everyone(found) == [found] * 2
