"""What the ranks of test_keras_edges.py do, on the backend of KERAS_BACKEND; each check returns JSON values."""

import contextlib
import functools
import importlib
import io
import os
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

if "HIDE_HOROVOD" in os.environ:
    sys.modules["horovod"] = None

import keras
import numpy as np
from programs_checks import run_checks
from programs_keras_lacking import LACKING  # before hvdkit

import hvdkit
import hvdkit.keras as hk
from hvdkit.common import keras_optimizer
from hvdkit.keras.trainer import private
from hvdkit.keras.transport import TRANSPORT

FEATURES = 6
generator = np.random.default_rng(5)
X = generator.normal(size=(48, FEATURES)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int64")
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
BACKEND = keras.backend.backend()


def make_model(seed: int = 0, *extra: Any) -> Any:
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(8, activation="tanh"), *extra, layers.Dense(3)])


def compiled(optimizer: Any, *extra: Any, **options: Any) -> Any:
    model = make_model(0, *extra)
    model.compile(optimizer, LOSS, **options)
    return model


def weights(model: Any) -> list[float]:
    return np.concatenate([np.asarray(value, "float64").reshape(-1) for value in model.get_weights()]).tolist()


def refused(attempt: Callable[[], Any]) -> str:
    """The error of an attempt, "" where there was none."""
    try:
        attempt()
    except hvdkit.HvdkitError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class At(keras.callbacks.Callback):
    """Does something to the model on one rank only, at one moment."""

    def __init__(self, rank: int, moment: str, action: Callable[[Any], None]) -> None:
        super().__init__()
        setattr(self, moment, lambda *_, **__: action(self.model) if hk.state.world().rank == rank else None)


def nudge(model: Any) -> None:
    kernel = model.trainable_variables[0]
    kernel.assign(kernel + 1e-3)


def options(world: Any, _: Path) -> dict[str, Any]:
    updates = []
    for chosen in ({}, {"op": "sum"}, {"compression": "fp16"}, {"gradient_predivide_factor": 2.0}):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        optimizer = hk.distribute(keras.optimizers.SGD(1.0), **chosen)
        model.compile(optimizer, lambda _, output: keras.ops.mean(output, axis=-1))
        model.fit(np.array([[1.0 + world.rank, 10.0]], "float32"), np.zeros((1, 1), "float32"), verbose=0)
        updates.append([-value for value in weights(model)])
    bad = ({"op": "adasum"}, {"backward_passes_per_step": 2}, {"compression": "zip"})
    return {
        "updates": updates,
        "bad": [refused(lambda chosen=chosen: hk.distribute(keras.optimizers.SGD(), **chosen)) for chosen in bad],
        "text": refused(lambda: hk.distribute("sgd")),
        "nested": refused(
            lambda: hk.distribute(keras.optimizers.LossScaleOptimizer(hk.distribute(keras.optimizers.SGD())))
        ),
    }


def apart(world: Any, _: Path) -> dict[str, str]:
    """One rank does what the other does not."""

    def error(moment: str, action: Callable[[Any], None]) -> str:
        model = compiled(hk.distribute(keras.optimizers.SGD(0.1)))
        data = hk.shard((X, Y), world, 4)
        return refused(lambda: model.fit(data, epochs=3, verbose=0, callbacks=[At(1, moment, action)]))

    return {
        "first step": error("on_train_batch_end", nudge),
        "end": error("on_train_end", nudge),
        "rate": error("on_epoch_end", lambda model: setattr(model.optimizer, "learning_rate", 0.01)),
        "stop": error("on_epoch_end", lambda model: setattr(model, "stop_training", True)),
    }


def kinds_of_data(world: Any, _: Path) -> dict[str, str]:
    def endless() -> Any:
        while True:
            yield X[:4], Y[:4]

    def fit(*data: Any, **settings: Any) -> str:
        model = compiled(hk.distribute(keras.optimizers.SGD(0.1)), keras.layers.BatchNormalization())
        found = refused(lambda: model.fit(*data, verbose=0, **settings))
        return found or refused(lambda: hk.check_agreement(model, model.optimizer, world))

    validation = {"validation_data": (X, Y)} if world.is_root else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras: shuffle=True is ignored for generators
        return {
            "unknown length": fit(endless()),
            "known length": fit(endless(), steps_per_epoch=3, epochs=2),
            "epochs": fit(X, Y, epochs=1 + world.rank),
            "root validates": fit(hk.shard((X, Y), world, 4), epochs=2, **validation),
            "root averages": fit(hk.shard((X, Y), world, 4), callbacks=[hk.AverageMetrics(world)], **validation),
        }


@keras.saving.register_keras_serializable("tests")
class Constant(keras.metrics.Metric):
    """A metric of the user's own whose states must not be added up."""

    def __init__(self, name: str = "constant") -> None:
        super().__init__(name=name)
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(keras.ops.cast(0.25, "float32"))

    def result(self) -> Any:
        return self.value + 0.0


def metrics(world: Any, _: Path) -> dict[str, list[float]]:
    """Each metric as the ranks' fit logs it, and as one evaluation of all samples gives it."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1, activation="sigmoid")])
    measured = ["accuracy", keras.metrics.AUC(name="auc"), keras.metrics.RootMeanSquaredError(name="rmse"), Constant()]
    model.compile(hk.distribute(keras.optimizers.SGD(0.0)), "binary_crossentropy", metrics=measured)
    y = Y.astype("float32")[:, None]
    mine, validation = ((slice(0, 10), slice(16, 40)), (slice(10, 16), slice(40, 48)))[world.rank]
    history = model.fit(
        X[mine],
        y[mine],
        batch_size=(5, 3)[world.rank],
        epochs=2,
        verbose=0,
        validation_data=(X[validation], y[validation]),
        callbacks=[hk.AverageMetrics(world)],
    ).history
    whole = model.evaluate(X[:16], y[:16], verbose=0, return_dict=True)
    whole.update({f"val_{k}": v for k, v in model.evaluate(X[16:], y[16:], verbose=0, return_dict=True).items()})
    return {name: [values[-1], whole[name]] for name, values in history.items()}


def resumed(world: Any, directory: Path) -> dict[str, Any]:
    """Four epochs at once, and two and two, with a warmup under way and another model to begin with."""

    def run(epochs: int, name: str, seed: int) -> tuple[Any, Any]:
        model = make_model(seed)
        model.compile(hk.distribute(keras.optimizers.Adam(0.02)), LOSS)
        callbacks = [hk.BroadcastState(), hk.Warmup(world, epochs=3), hk.Checkpoint(directory / name, keep=2)]
        history = model.fit(hk.shard((X, Y), world, 4), epochs=epochs, verbose=0, callbacks=callbacks)
        return model, history

    whole, _ = run(4, "whole", 0)
    run(2, "parts", 0)
    parts, history = run(4, "parts", 7 + world.rank)
    return {
        "same": weights(parts) == weights(whole),
        "epochs": history.epoch,
        "rates": history.history["learning_rate"],
        "left": sorted(path.name for path in (directory / "parts").iterdir()),
        "files": sorted(path.name for path in (directory / "parts" / "step-0000000024").iterdir()),
    }


def stores(world: Any, directory: Path) -> dict[str, str]:
    if world.is_root:
        (directory / "file").write_text("not a directory")
    layers = keras.layers
    store = hk.Checkpoints(directory / "store")
    model = compiled(hk.distribute(keras.optimizers.Adam(0.01)))
    store.save(model, model.optimizer, step=1)
    smaller = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(8, activation="tanh")])
    return {
        "unwritable": refused(lambda: hk.Checkpoints(directory / "file" / "run").save(model, step=1)),
        "smaller model": refused(lambda: store.restore(smaller)),
        "other optimizer": refused(lambda: store.restore(make_model(), keras.optimizers.SGD(0.1))),
        "fits": refused(lambda: store.restore(make_model(), keras.optimizers.Adam(0.5))),
    }


@keras.saving.register_keras_serializable("tests")
class Own(keras.optimizers.SGD):
    """An optimizer of the user's own."""


def special_optimizers(world: Any, _: Path) -> dict[str, Any]:
    mine = slice(world.rank, None, 2)
    one_overflows = X[mine].copy()
    if world.rank == 1:
        one_overflows[5] = np.inf
    scaled = compiled(hk.distribute(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0)))
    scaled.fit(one_overflows, Y[mine], batch_size=4, shuffle=False, verbose=0)
    keras.mixed_precision.set_global_policy("mixed_float16")
    mixed = compiled(hk.distribute(keras.optimizers.SGD(0.1)))
    keras.mixed_precision.set_global_policy("float32")
    mixed.fit(hk.shard((X, Y), world, 4), verbose=0)
    own = hk.distribute(Own(0.1))
    saved = keras.saving.serialize_keras_object(own)
    return {
        "scale": float(keras.ops.convert_to_numpy(scaled.optimizer.dynamic_scale)),
        "steps": int(scaled.optimizer.iterations),
        "overflow": weights(scaled),
        "mixed": [type(mixed.optimizer).__name__, keras_optimizer.is_distributed(mixed.optimizer), weights(mixed)],
        "own": [saved["class_name"], saved["registered_name"], isinstance(own, Own)],
        "loaded": type(keras.saving.deserialize_keras_object(saved)) is Own,
        "remade": keras_optimizer.is_distributed(type(own).from_config(own.get_config())),
    }


def settings(world: Any, _: Path) -> dict[str, Any]:
    """How fit is called: jit_compile, steps_per_execution, the progress bar, a model that Keras builds late."""
    on_torch = BACKEND == "torch"
    model = compiled(hk.distribute(keras.optimizers.SGD(0.1)), jit_compile=not on_torch)
    with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stdout(io.StringIO()) as printed:
        warnings.simplefilter("always")
        model.fit(hk.shard((X, Y), world, 4), epochs=2)
    together = compiled(hk.distribute(keras.optimizers.SGD(0.1)), steps_per_execution=1 if on_torch else 4)
    together.fit(hk.shard((X, Y), world, 4), epochs=2, verbose=0)
    keras.utils.set_random_seed(world.rank)
    late = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)])
    late.compile(hk.distribute(keras.optimizers.SGD(0.1)), LOSS)
    return {
        "warned": [str(one.message) for one in warned if "hvdkit" in str(one.message)],
        "jit": weights(model),
        "steps per execution": weights(together),
        "prints": bool(printed.getvalue()),
        "late": refused(lambda: late.fit(hk.shard((X, Y), world, 4), verbose=0, callbacks=[hk.BroadcastState()])),
    }


def replaced(world: Any, _: Path) -> dict[str, Any]:
    """What hvdkit puts into Keras' place, without it, and with it again; and what a Keras without it would be told."""

    def kinds() -> list[bool]:
        holders = [(one.holder(), one.name) for one in (private.FIT, private.REST)]
        return [hasattr(getattr(*one), "_hvdkit_plain") for one in holders]

    def trains() -> str:
        return refused(lambda: compiled(keras.optimizers.SGD(0.1)).fit(X, Y, verbose=0))

    def told(version: str) -> tuple[str, list[str]]:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            error = refused(lambda: private.check(version))
        return error, [str(one.message) for one in warned]

    before, own, guarded = kinds(), "fit" in vars(keras.Model), trains()
    private.undo()
    undone, left, alone = kinds(), "fit" in vars(keras.Model), trains()
    hk.init()
    keras.Model.fit = somebodys = functools.wraps(keras.Model.fit)(lambda *args, **kwargs: None)
    private.undo()
    kept = keras.Model.fit is somebodys
    del keras.Model.fit
    hk.init()
    iterators = private.REST.holder()
    enumerate_rest = iterators._enumerate_iterator
    del iterators._enumerate_iterator
    lacking = told("3.2.1")
    iterators._enumerate_iterator = enumerate_rest
    return {
        "kinds": [before, undone, kinds()],
        "own": [own, left],
        "fit": [guarded, alone, trains()],
        "kept": kept,
        "tested": told(f"{private.TESTED[1]}.7"),
        "untested": [told("3.1.0"), told("3.999.0rc1")],
        "lacking": lacking,
    }


def data_ends_early() -> str:
    """Rank 1 has less data than it said; the error that each rank saw. Horovod ends with it."""
    world = hk.init()
    model = compiled(hk.distribute(keras.optimizers.SGD(0.1)))
    batches = ((X[:4], Y[:4]) for _ in range(3 if world.rank == 1 else 10))
    try:
        model.fit(batches, steps_per_epoch=10, verbose=0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def over_host_buffers() -> dict[str, Any]:
    """A training with everything that communicates, over what jax finds."""
    world = hk.init()
    model = make_model(world.rank)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01, clipnorm=0.5))
    model.compile(hk.distribute(optimizer, gradient_predivide_factor=2.0), LOSS, metrics=["accuracy"])
    callbacks = [hk.BroadcastState(), hk.AverageMetrics(world), hk.Checkpoint("run")]
    mine = (X[world.rank :: world.size], Y[world.rank :: world.size])
    history = model.fit(hk.shard((X, Y), world, 4), epochs=3, verbose=0, validation_data=mine, callbacks=callbacks)
    return {
        "over": type(TRANSPORT).__name__,
        "topology": [world.rank, world.size, world.local_rank, world.local_size],
        "history": history.history,
        "weights": weights(model),
        "fp16": refused(lambda: hk.distribute(keras.optimizers.SGD(), compression="fp16")),
    }


def schedules() -> dict[str, list[float]]:
    """Logged learning rates of eight workers' trainings of 6 epochs of 4 steps, on every rank alike."""
    hk.init()
    eight = hvdkit.Topology(0, 8)

    def rates(*callbacks: Any) -> list[float]:
        model = compiled(hk.distribute(keras.optimizers.SGD(hk.scale_lr(0.01, eight))))
        history = model.fit(X, Y, batch_size=12, epochs=6, verbose=0, callbacks=list(callbacks))
        return history.history["learning_rate"]

    def half(epoch: float) -> float:
        return 0.5**epoch

    return {
        "decay after": rates(hk.Warmup(eight, epochs=3, after=lambda step: 0.5 ** (step / 4))),
        "staircase": rates(hk.Warmup(eight, epochs=2), hk.LearningRateSchedule(half, start_epoch=3)),
        "smooth": rates(hk.LearningRateSchedule(half, end_epoch=2, staircase=False)),
        "number": rates(hk.LearningRateSchedule(0.1, start_epoch=2, end_epoch=4)),
    }


def legacy() -> dict[str, str]:
    """Keras 2 as the package tf_keras, of which these are the parts that hvdkit can meet."""

    def part(name: str, **members: Any) -> type:
        return type(name, (), {"__module__": f"tf_keras.src.{name.lower()}", **members})

    library = types.ModuleType("tf_keras")
    library.Model = part("Model", fit=lambda self, **_: "trained")
    sys.modules["tf_keras"] = library
    library.__spec__ = importlib.machinery.ModuleSpec("tf_keras", None)
    hk.init()
    model = library.Model()
    model.optimizer = part("SGD")()
    found = {
        "distribute": refused(lambda: hk.distribute(model.optimizer)),
        "broadcast": refused(lambda: hk.broadcast_state(model)),
        "callback": refused(lambda: hk.AverageMetrics(hvdkit.Topology(0, 2)).set_model(model)),
        "fit": refused(lambda: model.fit(x=X)),
    }
    del sys.modules["tf_keras"]
    return found


def together(directory: str) -> None:
    """All checks that need two ranks, and those of test_proof_keras.py."""
    import programs_proof_keras as proof

    world = hk.init()
    both = (options, apart, kinds_of_data, metrics, resumed, stores, special_optimizers, settings, replaced)
    checks = {check.__name__: functools.partial(check, world, Path(directory)) for check in both}
    extra = {"torch": {"schedules": schedules, "legacy": legacy}, "jax": {"over_host_buffers": over_host_buffers}}
    lacking = {"lacking": lambda: LACKING}
    last = {"data_ends_early": data_ends_early}
    run_checks({**lacking, **checks, **proof.checks(world), **extra.get(BACKEND, {}), **last}, directory, world.rank)


def over_mpi4py(directory: str) -> None:
    """A start without Horovod."""
    run_checks({"over_host_buffers": over_host_buffers}, directory, hk.init().rank)
