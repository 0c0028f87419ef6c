"""hvdkit.tensorflow in a loop of one's own with several optimizers, on real ranks."""

import warnings
from typing import Any

import numpy as np
import pytest
from pages import blocks, run
from programs_checks import message
from programs_pages import TARGETS
from ranks import on_ranks
from test_keras_optimizers import IMAGES, LATENT, NOISE, PIXELS, SAMPLES

BATCH, STEPS = 12, 4


class Gan:
    """Two models, two optimizers, two tapes, as in TensorFlow's tutorial."""

    def __init__(self, hk: Any, world: Any, seed: int, loss: Any = None) -> None:
        import keras
        import tensorflow as tf

        keras.utils.set_random_seed(seed)
        layers = keras.layers
        self.discriminator = keras.Sequential([keras.Input((PIXELS,)), layers.Dense(8), layers.Dense(1)])
        self.generator = keras.Sequential([keras.Input((NOISE,)), layers.Dense(8, "tanh"), layers.Dense(PIXELS)])
        self.models = [self.discriminator, self.generator]
        self.d, self.g = keras.optimizers.Adam(0.02), keras.optimizers.Adam(0.01)
        self.optimizers = {"d_optimizer": self.d, "g_optimizer": self.g}
        self.loader = hk.shard((IMAGES, LATENT), world, BATCH // world.size, seed=4)
        self.schedules = [hk.warmup(self.d, world, STEPS, 2, "none"), hk.warmup(self.g, world, STEPS, 3, "none")]
        loss = loss or keras.losses.BinaryCrossentropy(from_logits=True)

        @tf.function
        def step(real: Any, noise: Any) -> None:
            with hk.distribute(tf.GradientTape()) as d_tape, hk.distribute(tf.GradientTape()) as g_tape:
                made = self.generator(noise)
                of_real, of_made = self.discriminator(real), self.discriminator(made)
                d_loss = loss(tf.ones_like(of_real), of_real) + loss(tf.zeros_like(of_made), of_made)
                g_loss = loss(tf.ones_like(of_made), of_made)
            for tape, value, model, optimizer in (
                (d_tape, d_loss, self.discriminator, self.d),
                (g_tape, g_loss, self.generator, self.g),
            ):
                weights = model.trainable_variables
                optimizer.apply_gradients(zip(tape.gradient(value, weights), weights, strict=True))

        self.step = step

    def everything(self) -> list[float]:
        owned = [*self.discriminator.weights, *self.generator.weights, *self.d.variables, *self.g.variables]
        return np.concatenate([np.ravel(one.numpy()) for one in owned]).astype(float).tolist()

    def train(self, epochs: int, stop_after: int = 0, saves: Any = None) -> None:
        for _ in range(self.loader.epoch, epochs):
            for real, noise in self.loader:
                self.step(real, noise)
                for schedule in self.schedules:
                    schedule.step()
                if stop_after and int(self.d.iterations) == stop_after:
                    saves.save(self.models, self.optimizers, step=stop_after, loader=self.loader)
                    return


def train(hk: Any, world: Any) -> list[float]:
    gan = Gan(hk, world, world.rank)
    hk.broadcast_state(gan.models, gan.optimizers)
    gan.train(2)
    hk.check_agreement(gan.models, gan.optimizers, world)
    return gan.everything()


@on_ranks("tensorflow", n=2)
def test_two_tapes_and_two_optimizers_end_as_in_one_process(hk, world, everyone, alone):
    found = train(hk, world)
    assert everyone(found) == [found] * world.size
    assert found == pytest.approx(alone(train), rel=2e-4, abs=2e-5)


def softplus(labels: Any, logits: Any) -> Any:
    """Binary cross-entropy without TensorFlow's sum of four gradients, whose order two tapes leave to chance."""
    import tensorflow as tf

    return tf.reduce_mean(tf.nn.softplus((1 - 2 * labels) * logits))


@on_ranks("tensorflow")
def test_both_go_on_in_mid_epoch_with_the_same_bits(hk, world, everyone, tmp_path):
    whole = Gan(hk, world, 0, softplus)
    whole.train(3)
    store = hk.Checkpoints(tmp_path / "run")
    Gan(hk, world, 0, softplus).train(3, stop_after=6, saves=store)
    parts = Gan(hk, world, 7 + world.rank, softplus)
    backwards = dict(reversed(parts.optimizers.items()))
    saved = store.restore(parts.models, backwards, loader=parts.loader, schedule=parts.schedules)
    assert saved.step == int(parts.d.iterations) == int(parts.g.iterations) == 6
    parts.train(3)
    assert parts.everything() == whole.everything() and int(parts.g.iterations) == 3 * SAMPLES // BATCH
    assert everyone(parts.everything()) == [parts.everything()] * 2


@on_ranks("tensorflow")
def test_errors_name_the_optimizer(hk, world, tmp_path):
    gan = Gan(hk, world, 0)
    gan.train(1)
    hk.broadcast_state(gan.models, gan.optimizers)
    store = hk.Checkpoints(tmp_path / "run")
    store.save(gan.models, gan.optimizers, step=4)
    error = message(lambda: store.restore(gan.models, {"d_optimizer": gan.d, "other": gan.g}))
    assert "CheckpointError" in error and "does not fit this Adam and Adam: " in error and "is in" in error
    slot = gan.g.variables[-1]
    slot.assign(slot + float(world.rank))
    error = message(lambda: hk.check_agreement(gan.models, gan.optimizers, world))
    assert "the ranks disagree: g_optimizer: adam" in error


@on_ranks("tensorflow")
def test_an_optimizer_distributed_on_one_rank_alone_is_an_error_on_all(hk, world):
    import keras

    model = keras.Sequential([keras.Input((PIXELS,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)
    if world.rank == 1:
        hk.distribute(optimizer)
    error = message(lambda: hk.broadcast_state(model, optimizer))
    assert f"rank {world.rank} has optimizer (SGD) {'' if world.rank == 1 else 'not '}distributed" in error


@on_ranks("tensorflow")
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("what", ["tape", "optimizer"])
def test_a_loss_for_each_sample_is_one_warning(hk, world, what, graph):
    import keras
    import tensorflow as tf

    from hvdkit.tensorflow import private

    weight = keras.Variable(np.ones((3, 1)), dtype="float32")
    optimizer = keras.optimizers.SGD(0.1)
    optimizer = hk.distribute(optimizer) if what == "optimizer" else optimizer

    def step(x: Any, mean: bool, weights: Any = None) -> None:
        with tf.GradientTape() as local:
            losses = tf.reduce_sum(x @ weight.value, axis=1)
            loss = tf.reduce_mean(losses) if mean else losses
        tape = hk.distribute(local) if what == "tape" else local
        optimizer.apply([tape.gradient(loss, [weight.value], weights)[0]], [weight])

    step = tf.function(step) if graph else step
    counts = []
    for mean, weights in ((True, None), (False, tf.fill([4], 0.25)), (False, None), (False, None)):
        private.WARNED.clear() if not counts else None
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            step(tf.ones((4, 3)), mean, weights)
        counts.append(len([one for one in said if "a tape was given a loss of shape (4,)" in str(one.message)]))
    assert counts == [0, 0, 1, 0]


@on_ranks("tensorflow", n=3)
def test_gradients_add_up_in_a_loop_of_a_graph(hk: Any, world: Any) -> None:
    """Accumulation: no turn needs the gradients of the one before, and TensorFlow runs turns side by side."""
    import tensorflow as tf

    turns, mean = 12, (world.size + 1) / 2
    weights = [tf.Variable(np.ones(300 + number)) for number in range(4)]
    table = tf.Variable(np.ones((turns + world.size, 4)))

    @tf.function
    def accumulated(x: Any) -> Any:
        sums, rows = [tf.zeros_like(one) for one in weights], tf.zeros_like(table)
        for turn in tf.range(turns):
            with hk.distribute(tf.GradientTape()) as tape:
                loss = tf.add_n([tf.reduce_sum(x * tf.cast(turn, tf.float64) * one**2) for one in weights])
                loss += tf.reduce_sum(x * tf.gather(table, [turn, turn + world.rank]))
            *dense, sparse = tape.gradient(loss, [*weights, table])
            sums = [total + one for total, one in zip(sums, dense, strict=True)]
            rows += tf.convert_to_tensor(sparse)
        return sums, rows

    for _ in range(10):
        sums, rows = accumulated(tf.constant(float(world.rank + 1), tf.float64))
    for total in sums:
        np.testing.assert_allclose(total, mean * turns * (turns - 1), rtol=1e-12)
    np.testing.assert_allclose(tf.reduce_sum(rows), mean * turns * 2 * 4, rtol=1e-12)


def masked(hk: Any, world: Any, compiled: bool) -> list[float]:
    """Trains on a mean over the targets that are not 0, by the block of the page."""
    import keras
    import tensorflow as tf

    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(53, 4)), rng.integers(-4, 7, 53).clip(0)
    weights, optimizer = [tf.Variable(rng.normal(size=(4, 7)))], keras.optimizers.Adam(0.05)

    loss_of = run(blocks(TARGETS.page)[TARGETS.heading][0], {"keras": keras, "tf": tf})["loss_of"]

    def step(x: Any, y: Any) -> None:
        with hk.distribute(tf.GradientTape()) as tape:
            loss = loss_of(y, x @ weights[0])
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    optimizer.build(weights)
    take = tf.function(step, reduce_retracing=True, autograph=False) if compiled else step
    for _ in range(2):
        for x_part, y_part, _ in hk.shard((x, y), world, BATCH // world.size, remainder="exact", shuffle=False):
            take(x_part, y_part)
    return np.ravel(weights[0].numpy()).tolist()


@pytest.mark.parametrize("compiled", [False, True])
@on_ranks("tensorflow", n=3)
def test_a_mean_over_targets_is_that_of_one_process(hk, world, everyone, alone, compiled):
    found = masked(hk, world, compiled)
    assert everyone(found) == [found] * world.size
    np.testing.assert_allclose(found, alone(masked, compiled=compiled), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("how", ["clipped", "an integer", "twice"])
@on_ranks("tensorflow", n=3)
def test_a_gradient_that_one_rank_cannot_average_is_an_error_on_all_and_the_next_step_is_right(hk, world, how, sparse):
    """Eagerly; in ``tf.function`` no rank says anything in a step."""
    import keras
    import tensorflow as tf

    weights = [keras.Variable(np.ones((3, 2), np.float32)), keras.Variable(np.ones(4, np.float32))]
    optimizer = hk.distribute(keras.optimizers.SGD(1.0))

    def gradients(of_rank: float) -> list[Any]:
        dense = tf.fill([3, 2], of_rank)
        first = tf.IndexedSlices(dense, tf.constant([0, 1, 2]), tf.constant([3, 2])) if sparse else dense
        return [first, tf.fill([4], of_rank)]

    given = gradients(float(world.rank))
    if world.rank == 1:
        if how == "clipped":
            given[1] = tf.clip_by_norm(given[1], 0.1)
        elif how == "an integer":
            given[1] = tf.fill([4], 1)
        else:
            given[1]._hvdkit_reduced = True
    said = message(lambda: optimizer.apply(given, weights))
    if world.rank == 1:
        wanted = {"clipped": "was clipped", "an integer": "must be floating point", "twice": "has averaged these"}
        assert said.startswith("InvalidArgumentError") and wanted[how] in said
    else:
        assert said.startswith("AgreementError: rank 1 failed, and the others stop with it: ")
    optimizer.apply(gradients(float(world.rank)), weights)
    mean = (world.size - 1) / 2
    assert all(np.allclose(one.numpy(), 1 - mean) for one in weights)


@on_ranks("tensorflow")
def test_checkpoints_of_an_optimizer_that_holds_several(hk, world, tmp_path):
    import keras

    several = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.25, momentum=0.9))
    several[".*kernel"] = keras.optimizers.Adam(0.5)
    optimizer = keras.optimizers.MultiOptimizer(several)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    hk.broadcast_state(model, optimizer)
    checkpoints = hk.Checkpoints(tmp_path)
    saved = checkpoints.save(model, optimizer, step=3)
    assert sorted(saved.metadata["learning_rates"]) == [0.25, 0.5]
    for one in optimizer.optimizers:
        one.learning_rate = 1.0
    assert checkpoints.restore(model, optimizer).step == 3
    assert sorted(float(one.learning_rate) for one in optimizer.optimizers) == [0.25, 0.5]


@pytest.mark.parametrize("options", [{}, {"shard_state": True}, {"every": 1, "outer": "nesterov"}])
@on_ranks("tensorflow")
def test_where_warnings_are_errors_a_training_is_saved_and_goes_on(hk, world, tmp_path, options):
    import keras
    import tensorflow as tf

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.25)
    optimizer.build(model.trainable_variables)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hk.seed_everything(3, world)
        optimizer = hk.distribute(optimizer, **options)
        hk.broadcast_state(model, optimizer)
        optimizer.apply([tf.ones_like(one) for one in model.trainable_variables])
        checkpoints = hk.Checkpoints(tmp_path)
        checkpoints.save(model, optimizer, step=3)
        assert checkpoints.restore(model, optimizer).step == 3


@on_ranks("tensorflow")
def test_restore_within_a_function_says_so_with_an_optimizer_too(hk, world, tmp_path):
    import keras
    import tensorflow as tf

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    checkpoints, optimizer = hk.Checkpoints(tmp_path), keras.optimizers.Adam(0.25)
    said = message(lambda: tf.function(lambda: checkpoints.restore(model, optimizer), autograph=False)())
    assert said.startswith("InvalidArgumentError: Checkpoints.restore cannot run inside tf.function")
