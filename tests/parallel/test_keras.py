"""hvdkit.keras on real ranks, on each backend of Keras 3. Frameworks and hvdkit are imported within, on the ranks."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import KERAS, on_ranks

SAMPLES, FEATURES, STEPS, GLOBAL_BATCH = 80, 6, 18, 12


def make_data() -> tuple[Any, Any]:
    generator = np.random.default_rng(5)
    x = generator.normal(size=(SAMPLES, FEATURES)).astype("float32")
    return x, (x.sum(axis=1) > 0).astype("int64") + (x[:, 0] > 1)


def make_model(seed: int = 0) -> Any:
    import keras

    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(8, activation="tanh"), layers.Dense(3)])


def make_loss() -> Any:
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_optimizer(name: str) -> Any:
    from keras import optimizers

    return {
        "sgd": lambda: optimizers.SGD(0.1, momentum=0.9),
        "adam": lambda: optimizers.Adam(0.01, clipnorm=0.05),
        "adamw": lambda: optimizers.AdamW(0.01, gradient_accumulation_steps=2),
        "loss scale": lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1, momentum=0.9), initial_scale=1024.0),
    }[name]()


def weights(model: Any) -> list[float]:
    return np.concatenate([np.asarray(value, "float64").reshape(-1) for value in model.get_weights()]).tolist()


def train(hk: Any, world: Any, optimizer: str) -> list[float]:
    """18 steps of fit; every rank starts with other weights, the root's count."""
    model = make_model(seed=world.rank)
    model.compile(hk.distribute(make_optimizer(optimizer)), make_loss())
    data = hk.shard(make_data(), world, GLOBAL_BATCH // world.size, seed=3)
    model.fit(data, epochs=STEPS // len(data), verbose=0, callbacks=[hk.BroadcastState()])
    hk.check_agreement(model, model.optimizer, world)
    return weights(model)


@on_ranks(*KERAS, n=3)
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "loss scale"])
def test_the_ranks_end_with_the_weights_of_one_process(hk, world, everyone, alone, optimizer):
    found = train(hk, world, optimizer)
    assert everyone(found) == [found] * 3
    assert found == pytest.approx(alone(train, optimizer=optimizer), rel=1e-5, abs=1e-6)


@on_ranks("keras-torch", n=2, mpi=True)
def test_mpi_gives_the_same(hk, world, everyone, alone):
    """On TensorFlow's backend test_equivalence.py meets over MPI, on jax' test_keras_edges.py."""
    found = train(hk, world, "sgd")
    assert everyone(found) == [found] * 2
    assert found == pytest.approx(alone(train, optimizer="sgd"), rel=1e-5, abs=1e-6)


def train_exact(hk: Any, world: Any) -> tuple[list[float], list[float]]:
    """Three epochs with a last partial batch, and metrics of all samples."""
    import keras

    model = make_model()
    model.compile(hk.distribute(keras.optimizers.SGD(0.1, momentum=0.9)), make_loss(), metrics=["accuracy"])
    x, y = make_data()
    data = hk.shard((x[:77], y[:77]), world, GLOBAL_BATCH // world.size, remainder="exact", seed=3)
    history = model.fit(data, epochs=3, verbose=0, callbacks=[hk.BroadcastState(), hk.AverageMetrics(world)]).history
    return weights(model), history["accuracy"]


@on_ranks(*KERAS, n=3)
def test_a_ragged_end_is_exact_and_metrics_are_those_of_all_samples(hk, world, alone):
    (found, accuracy), (expected, accuracy_alone) = train_exact(hk, world), alone(train_exact)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert accuracy == pytest.approx(accuracy_alone)


@on_ranks("keras-torch", n=3)
def test_each_mistake_is_one_error_on_every_rank(hk, world):
    import keras

    from hvdkit import HvdkitError

    x, y = make_data()

    def fit(optimizer: Any, seed: int = 0, samples: int = SAMPLES, batch_size: int = 32) -> None:
        model = make_model(seed)
        model.compile(optimizer, make_loss())
        model.fit(x[:samples], y[:samples], batch_size=batch_size, verbose=0)

    def nudged() -> None:
        model = make_model()
        if world.rank == 1:
            kernel = np.array(model.layers[1].kernel)
            kernel[2, 1] += 1e-4
            model.layers[1].kernel.assign(kernel)
        hk.check_agreement(model, None, world)

    def sgd() -> Any:
        return hk.distribute(keras.optimizers.SGD(0.1))

    once = sgd()
    for attempt, part in (
        (lambda: hk.distribute(once), "InvalidArgumentError: this optimizer"),
        (
            lambda: fit(keras.optimizers.SGD(0.1)),
            f"fit was called on rank {world.rank} of 3 with an optimizer (SGD)",
        ),
        (
            lambda: fit(sgd(), samples=40 + 8 * world.rank, batch_size=8),
            "different numbers of steps per epoch (5 on rank 0, 6 on rank 1, 7 on rank 2)",
        ),
        (lambda: fit(sgd(), seed=world.rank), "before the first step of fit, the ranks disagree"),
        (lambda: hk.broadcast_state(keras.Sequential([keras.layers.Dense(3)])), "is not built yet"),
        (nudged, "differs between ranks 0, 2 and rank 1, by at most 0.0001"),
    ):
        with pytest.raises(HvdkitError) as refused:
            attempt()
        assert part in f"{type(refused.value).__name__}: {refused.value}"


@on_ranks("keras", n=3)
def test_a_saved_model_loads_with_and_without_hvdkit(hk, world, everyone, alone, tmp_path):
    """And trains on as the model that was saved."""
    import keras

    model = make_model()
    model.compile(hk.distribute(keras.optimizers.Adam(0.01)), make_loss())
    model.fit(hk.shard(make_data(), world, 5, seed=3), epochs=1, verbose=0, callbacks=[hk.BroadcastState()])
    file = tmp_path / f"rank-{world.rank}.keras"
    model.save(file)
    loaded = keras.models.load_model(file)
    assert int(loaded.optimizer.iterations) == 5
    loaded.compile(hk.distribute(loaded.optimizer), make_loss())
    for one in (model, loaded):
        one.fit(hk.shard(make_data(), world, 5, seed=4), epochs=1, verbose=0)
    assert type(loaded.optimizer).__name__ == "Adam" and weights(loaded) == weights(model)
    assert everyone(weights(model)) == [weights(model)] * 3
    assert alone(load_without_hvdkit, fresh=True, models=tmp_path) == [[True, 5]] * 3


def load_without_hvdkit(models: Path) -> list[Any]:
    """For each model file of a directory: whether its optimizer is Keras' own, and its number of steps."""
    import keras

    assert "hvdkit" not in sys.modules
    for name in [name for name in sys.modules if name.split(".")[0] == "horovod"]:
        del sys.modules[name]
    sys.modules["hvdkit"] = sys.modules["horovod"] = None
    loaded = [keras.models.load_model(file) for file in sorted(models.glob("*.keras"))]
    return [[isinstance(one.optimizer, keras.optimizers.Adam), int(one.optimizer.iterations.numpy())] for one in loaded]


@on_ranks("keras", "keras-torch", n=3)
def test_callbacks_resume_and_average(hk, world, everyone, tmp_path):
    """Checkpoints that resume, and metrics of all ranks."""
    import keras

    x, y = make_data()

    def run(epochs: int) -> tuple[Any, Any, Any]:
        model = make_model(seed=world.rank)
        model.compile(hk.distribute(keras.optimizers.Adam(0.01)), make_loss(), metrics=["accuracy"])
        saving = hk.Checkpoint(tmp_path / "run")
        mine = (x[world.rank :: world.size], y[world.rank :: world.size])
        callbacks = [hk.BroadcastState(), saving, hk.AverageMetrics(world)]
        data = hk.shard((x, y), world, 4, seed=3)
        return model, saving, model.fit(data, epochs=epochs, verbose=0, validation_data=mine, callbacks=callbacks)

    run(2)
    model, saving, history = run(4)
    assert saving.initial_epoch == 2 and history.epoch == [2, 3]
    of_all_samples = float((keras.ops.convert_to_numpy(model(x)).argmax(axis=1) == y).mean())
    found = [history.history["val_accuracy"][-1], history.history["loss"], of_all_samples]
    assert found[0] == pytest.approx(of_all_samples)
    assert everyone(found) == [found] * 3


@on_ranks("keras-jax", n=3)
def test_fit_in_one_call(hk, world, everyone):
    import keras

    model = make_model()
    options = {"epochs": 3, "batch_size": 4, "base_lr": 0.1, "warmup_epochs": 1}
    losses = [epoch["loss"] for epoch in hk.fit(model, keras.optimizers.SGD, make_loss(), make_data(), **options)]
    assert everyone((losses, weights(model))) == [(losses, weights(model))] * 3
    assert losses[-1] < losses[0]


@on_ranks(*KERAS, n=3, fresh=True)
def test_process_set_averages_within_the_set(hk, everyone):
    """Ranks 0 and 1 average among themselves; rank 2 is alone."""
    import importlib

    import keras

    library = "tensorflow" if keras.backend.backend() == "tensorflow" else "torch"
    hvd = importlib.import_module(f"horovod.{library}")
    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    world = hk.init()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    optimizer = hk.distribute(keras.optimizers.SGD(1.0), process_set=pair)
    model.compile(optimizer, lambda _, output: keras.ops.mean(output, axis=-1))
    model.fit(np.array([[2.0 + 2.0 * world.rank]], "float32"), np.zeros((1, 1), "float32"), verbose=0)
    assert everyone([-value for value in weights(model)]) == [[3.0], [3.0], [6.0]]
