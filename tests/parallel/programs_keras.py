"""What the ranks of test_keras.py do, on the backend of KERAS_BACKEND; each check returns JSON values."""

import functools
import importlib
from pathlib import Path
from typing import Any

import keras
import numpy as np
from programs_checks import run_checks

import hvdkit
import hvdkit.keras as hk

BACKEND = keras.backend.backend()
SAMPLES, FEATURES, STEPS, GLOBAL_BATCH = 80, 6, 18, 12


def make_data() -> tuple[Any, Any]:
    generator = np.random.default_rng(5)
    x = generator.normal(size=(SAMPLES, FEATURES)).astype("float32")
    return x, (x.sum(axis=1) > 0).astype("int64") + (x[:, 0] > 1)


def make_model(seed: int = 0) -> Any:
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(8, activation="tanh"), layers.Dense(3)])


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01, clipnorm=0.05),
    "adamw": lambda: keras.optimizers.AdamW(0.01, gradient_accumulation_steps=2),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9), initial_scale=1024.0
    ),
}


def weights(model: Any) -> list[float]:
    return np.concatenate([np.asarray(value, "float64").reshape(-1) for value in model.get_weights()]).tolist()


def train() -> dict[str, list[float]]:
    """18 steps of fit with each optimizer; every rank starts with other weights, the root's count."""
    world = hk.init()
    ended = {}
    for name, make_optimizer in OPTIMIZERS.items():
        model = make_model(seed=world.rank)
        model.compile(hk.distribute(make_optimizer()), LOSS)
        data = hk.shard(make_data(), world, GLOBAL_BATCH // world.size, seed=3)
        model.fit(data, epochs=STEPS // len(data), verbose=0, callbacks=[hk.BroadcastState()])
        hk.check_agreement(model, model.optimizer, world)
        ended[name] = weights(model)
    return ended


def train_exact() -> dict[str, Any]:
    """Three epochs with a ragged end, and metrics of all samples."""
    world = hk.init()
    model = make_model()
    model.compile(hk.distribute(keras.optimizers.SGD(0.1, momentum=0.9)), LOSS, metrics=["accuracy"])
    x, y = make_data()
    data = hk.shard((x[:77], y[:77]), world, GLOBAL_BATCH // world.size, remainder="exact", seed=3)
    history = model.fit(data, epochs=3, verbose=0, callbacks=[hk.BroadcastState(), hk.AverageMetrics(world)]).history
    return {"weights": weights(model), "accuracy": history["accuracy"]}


def train_with_horovods_own_optimizer() -> list[float]:
    """The same training with what Horovod ships for Keras: no error, and no averaging. Not after hvdkit's init."""
    import horovod.tensorflow.keras as hvd

    model = make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), LOSS)
    x, y = make_data()
    model.fit(x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()], batch_size=4, epochs=2, verbose=0)
    return weights(model)


def mistakes() -> dict[str, str]:
    """Each user's mistake and the error that this rank saw."""
    world = hk.init()
    x, y = make_data()
    once = hk.distribute(keras.optimizers.SGD(0.1))

    def fit_undistributed() -> None:
        model = make_model()
        model.compile(keras.optimizers.SGD(0.1), LOSS)
        model.fit(x, y, verbose=0)

    def fit_other_steps() -> None:
        model = make_model()
        model.compile(hk.distribute(keras.optimizers.SGD(0.1)), LOSS)
        mine = slice(0, 40 + 8 * world.rank)
        model.fit(x[mine], y[mine], batch_size=8, verbose=0)

    def fit_without_broadcast() -> None:
        model = make_model(seed=world.rank)
        model.compile(hk.distribute(keras.optimizers.SGD(0.1)), LOSS)
        model.fit(x, y, verbose=0)

    def broadcast_unbuilt() -> None:
        hk.broadcast_state(keras.Sequential([keras.layers.Dense(3)]))

    def nudged() -> None:
        model = make_model()
        if world.rank == 1:
            kernel = np.array(model.layers[1].kernel)
            kernel[2, 1] += 1e-4
            model.layers[1].kernel.assign(kernel)
        hk.check_agreement(model, None, world)

    attempts = {
        "twice": lambda: hk.distribute(once),
        "undistributed": fit_undistributed,
        "steps": fit_other_steps,
        "no broadcast": fit_without_broadcast,
        "unbuilt": broadcast_unbuilt,
        "nudged": nudged,
    }
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except hvdkit.HvdkitError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def round_trip(directory: str) -> dict[str, Any]:
    """Save (programs_keras_alone.py loads it without hvdkit), load with it and train on."""
    world = hk.init()
    model = make_model()
    model.compile(hk.distribute(keras.optimizers.Adam(0.01)), LOSS)
    data = hk.shard(make_data(), world, 5, seed=3)
    model.fit(data, epochs=1, verbose=0, callbacks=[hk.BroadcastState()])
    file = Path(directory) / f"rank-{world.rank}.keras"
    model.save(file)
    loaded = keras.models.load_model(file)
    before = int(loaded.optimizer.iterations)
    loaded.compile(hk.distribute(loaded.optimizer), LOSS)
    for one in (model, loaded):
        again = hk.shard(make_data(), world, 5, seed=4)
        one.fit(again, epochs=1, verbose=0)
    return {
        "before": before,
        "class": type(loaded.optimizer).__name__,
        "same": weights(loaded) == weights(model),
        "weights": weights(model),
    }


def callbacks(directory: str) -> dict[str, Any]:
    """Checkpoints that resume, metrics of all ranks, and who prints."""
    world = hk.init()
    x, y = make_data()

    def run(epochs: int) -> tuple[Any, Any, Any]:
        model = make_model(seed=world.rank)
        model.compile(hk.distribute(keras.optimizers.Adam(0.01)), LOSS, metrics=["accuracy"])
        saving = hk.Checkpoint(directory)
        mine = (x[world.rank :: world.size], y[world.rank :: world.size])
        history = model.fit(
            hk.shard((x, y), world, 4, seed=3),
            epochs=epochs,
            verbose=0,
            validation_data=mine,
            callbacks=[hk.BroadcastState(), saving, hk.AverageMetrics(world)],
        )
        return model, saving, history

    run(2)
    model, saving, history = run(4)
    scores = keras.ops.convert_to_numpy(model(x)).argmax(axis=1) == y
    return {
        "initial_epoch": saving.initial_epoch,
        "epochs": history.epoch,
        "val_accuracy": history.history["val_accuracy"][-1],
        "all_samples": float(scores.mean()),
        "losses": history.history["loss"],
    }


def tutorial_warmup() -> list[float]:
    """Learning rates in the logs for 8 workers, base 0.01, 3 epochs."""
    hk.init()
    world = hvdkit.Topology(0, 8)
    model = make_model()
    optimizer = hk.distribute(keras.optimizers.SGD(hk.scale_lr(0.01, world)))
    model.compile(optimizer, LOSS)
    x, y = make_data()
    warmup = hk.warmup(optimizer, world, 10, epochs=3)
    history = model.fit(x, y, batch_size=8, epochs=5, verbose=0, callbacks=[warmup]).history
    return [round(float(rate), 4) for rate in history["learning_rate"]]


def fit() -> dict[str, Any]:
    hk.init()
    model = make_model()
    history = hk.fit(
        model, keras.optimizers.SGD, LOSS, make_data(), epochs=3, batch_size=4, base_lr=0.1, warmup_epochs=1
    )
    return {"losses": [epoch["loss"] for epoch in history], "weights": weights(model)}


def process_set(pair: Any) -> list[float]:
    """Ranks 0 and 1 average among themselves; rank 2 is alone."""
    world = hk.init()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    optimizer = hk.distribute(keras.optimizers.SGD(1.0), process_set=pair)
    model.compile(optimizer, lambda _, output: keras.ops.mean(output, axis=-1))
    model.fit(np.array([[2.0 + 2.0 * world.rank]], "float32"), np.zeros((1, 1), "float32"), verbose=0)
    return [-value for value in weights(model)]


def together(directory: str) -> None:
    """All checks that need several ranks, on three."""
    hvd = importlib.import_module(f"horovod.{'tensorflow' if BACKEND == 'tensorflow' else 'torch'}")
    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    first = {"horovods own optimizer": train_with_horovods_own_optimizer} if BACKEND == "tensorflow" else {}
    checks = {
        "train": train,
        "train exact": train_exact,
        "mistakes": mistakes,
        "round trip": functools.partial(round_trip, directory),
        "callbacks": functools.partial(callbacks, f"{directory}/run"),
        "fit": fit,
        "process set": functools.partial(process_set, pair),
    }
    run_checks({**first, **checks}, directory, hvd.rank())


def over_gloo(directory: str) -> None:
    """A start over Gloo."""
    run_checks({"train": train}, directory, hk.init().rank)
