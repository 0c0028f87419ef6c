"""hvdkit.keras proves that the ranks agree: desynchronised ranks, seeds, evaluation, on each backend of Keras 3.

Frameworks and hvdkit are imported within, on the ranks.
"""

import contextlib
import io
import random
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs_checks import message, signs
from ranks import KERAS, on_ranks

EXAMPLES = Path(__file__).parents[2] / "examples" / "keras"
BETWEEN = "differs between rank 0 and rank 1, by at most"
FEATURES, CLASSES, SAMPLES = 6, 3, 48
X = np.random.default_rng(5).normal(size=(SAMPLES, FEATURES)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int64")


def make_loss(**options: Any) -> Any:
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def make_model(**normalisation: Any) -> Any:
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(8, name="hidden"),
            layers.BatchNormalization(name="normal", **normalisation),
            layers.Activation("tanh"),
            layers.Dropout(0.5, name="dropout"),
            layers.Dense(CLASSES, name="out"),
        ],
        name="net",
    )


def compiled(hk: Any, loss: Any = None, **normalisation: Any) -> Any:
    import keras

    keras.utils.set_random_seed(0)
    model = make_model(**normalisation)
    optimizer = hk.distribute(keras.optimizers.SGD(0.01, momentum=0.9))
    model.compile(optimizer, loss or make_loss(), metrics=["accuracy"])
    return model


def nudge(variable: Any) -> None:
    import keras

    value = np.array(keras.ops.convert_to_numpy(variable))
    value[2, 1] += 1e-4
    variable.assign(value)


def injected(hk: Any, world: Any, reaction: str) -> tuple[str, int, list[str]]:
    """The error, the steps and the warnings where after step 3 an element of a weight on rank 1 is 1e-4 larger."""
    import keras

    model, steps = compiled(hk), []

    class Nudge(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            steps.append(batch)
            if len(steps) == 3 and world.rank == 1:
                nudge(self.model.get_layer("out").kernel)

    callbacks = [hk.BroadcastState(), Nudge(), hk.CheckAgreement(world, every=2, on_disagreement=reaction)]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        error = message(lambda: model.fit(hk.shard((X, Y), world, 4), epochs=1, verbose=0, callbacks=callbacks))
    said = [str(one.message) for one in warned]
    return error, len(steps), [text for text in said if "disagree" in text]


@on_ranks(*KERAS)
def test_a_nudged_weight_is_reported_on_every_rank_at_the_next_check(hk, world):
    error, steps, warned = injected(hk, world, "raise")
    assert error.startswith(
        f"AgreementError: after step 4, the ranks disagree: net/out/kernel {BETWEEN} 0.0001; broadcast before"
    )
    assert steps == 4 and warned == []


@on_ranks("keras-torch")
def test_a_disagreement_can_be_a_warning_until_fit_ends(hk, world):
    error, steps, (after_four, after_six) = injected(hk, world, "warn")
    assert f"after step 4, the ranks disagree: net/out/kernel {BETWEEN} 0.0001" in after_four
    assert "after step 6, the ranks disagree" in after_six
    assert steps == 6 and "AgreementError: at the end of fit" in error


@on_ranks("keras", "keras-jax")
def test_batch_normalization_raises_no_false_alarm(hk, world):
    """BatchNormalization's moving statistics differ within an epoch and agree after it."""
    import keras

    def fit(**settings: Any) -> Any:
        model = compiled(hk)
        checking = [hk.BroadcastState(), hk.CheckAgreement(world, every=2, **settings)]
        model.fit(hk.shard((X, Y), world, 4), epochs=2, verbose=0, callbacks=checking)
        return model

    model = fit()
    hk.check_agreement(model, model.optimizer, world)
    moving = model.get_layer("normal").moving_mean
    moving.assign(keras.ops.convert_to_numpy(moving) + world.rank)
    within = message(lambda: fit(statistics=True))
    assert f"after step 2, the ranks disagree: net/normal/moving_mean {BETWEEN}" in within
    differ = message(lambda: hk.check_agreement(model, model.optimizer, world))
    assert f"net/normal/moving_mean {BETWEEN} 1" in differ
    hk.check_agreement(model, model.optimizer, world, statistics=False)


@on_ranks("keras-torch", smoke=("keras", "keras-jax"))
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("frozen", f"net/hidden/kernel {BETWEEN} 0.0001"),
        ("slot", f"momentum {BETWEEN} 0.0001"),
    ],
)
def test_everything_that_can_differ_is_named(hk, world, kind, told):
    """Only the last rank changes it."""
    import keras

    hk.seed_everything(3, world)
    model = make_model()
    optimizer = hk.distribute(keras.optimizers.SGD(0.01, momentum=0.9))
    hk.broadcast_state(model, optimizer)
    loader = hk.shard((X, Y), world, 4)
    model.trainable = kind != "frozen"
    if world.rank == world.size - 1:
        if kind == "frozen":
            nudge(model.get_layer("hidden").kernel)
        elif kind == "slot":
            nudge(next(one for one in optimizer.variables if "momentum" in one.path and len(one.shape) == 2))
    said = message(lambda: hk.check_agreement(model, optimizer, world, loader=loader, statistics=False))
    assert told in said


@on_ranks("keras-torch", smoke=("keras", "keras-jax"))
@pytest.mark.parametrize("kind", ["float64", "float32"])
def test_top_bits_that_differ_are_found(hk, world, kind):
    import keras

    values = signs(world.rank)[kind]
    dense = keras.layers.Dense(1, use_bias=False, dtype=kind, name=kind)
    flipped = keras.Sequential([keras.Input((len(values),)), dense])
    flipped.set_weights([values[:, None]])
    assert f"{kind}/kernel {BETWEEN} 2;" in message(lambda: hk.check_agreement(flipped, None, world))


@on_ranks(*KERAS)
def test_a_variable_is_digested_as_numpy_digests_it(hk):
    """On each backend, of each type and some shapes."""
    import keras

    from hvdkit.keras.transport import TRANSPORT
    from hvdkit.steps import agreement

    generator = np.random.default_rng(6)
    types = ("float16", "float32", "int32", "uint8", "bool", "complex64")
    shapes = ((), (0,), (3, 5), (8,), (70000, 3))
    arrays = [generator.normal(size=shape).astype(kind) for shape in shapes for kind in types]
    variables = [keras.Variable(one, dtype=one.dtype.name, trainable=False) for one in arrays]
    chunk = agreement.CHUNK * (4 if keras.backend.backend() == "tensorflow" else 1)
    same = (TRANSPORT.digests(variables) == agreement.array_digests(arrays, chunk)).tolist()
    assert all(same) and len(same) == 30


def samples_seen() -> Any:
    """A metric of the user's own: the number of samples, which is not the sum of the ranks' results."""
    import keras

    class Samples(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="samples")
            self.seen = self.add_weight(name="seen", initializer="zeros")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.seen.assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], "float32"))

        def result(self) -> Any:
            return self.seen + 0.0

    return Samples()


@on_ranks("keras-jax", smoke=("keras", "keras-torch"))
@pytest.mark.parametrize("own", [False, True])
def test_evaluation_is_that_of_one_process(hk, world, everyone, own):
    """The metrics on all ranks together, and in this process alone; also with a metric of the user's own."""
    import keras

    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((FEATURES,)), layers.Dense(1, activation="sigmoid", kernel_regularizer="l2"), layers.Dropout(0.5)]
    )
    measured = ["accuracy", keras.metrics.AUC(name="auc"), keras.metrics.F1Score(name="f1")]
    measured += [samples_seen()] if own else []
    model.compile(loss="binary_crossentropy", metrics=measured, weighted_metrics=["mse"])
    for samples in (45, 1):
        y = Y[:samples].astype("float32")[:, None]
        weights = np.linspace(0.5, 1.5, samples).astype("float32")
        mine = hk.evaluate(model, (X[:samples], y, weights), world, 4)
        alone = model.evaluate(X[:samples], y, 16, verbose=0, sample_weight=weights, return_dict=True)
        mine, alone = ({name: np.asarray(one[name]).tolist() for name in alone} for one in (mine, alone))
        assert everyone(mine) == [mine] * 2
        assert {"loss", "accuracy", "auc", "f1", "mse"} <= set(mine)
        for name, value in mine.items():
            assert value == pytest.approx(alone[name], rel=1e-6), (samples, name)
        assert samples == 1 or mine["accuracy"] == alone["accuracy"]


@on_ranks("keras", "keras-torch")
def test_a_filler_is_not_in_the_logs_and_its_weight_cannot_be_undone(hk, world):
    """A last partial batch with a filler on rank 1; and losses that would undo the weights."""
    import keras

    odd = (X[:33], Y[:33])

    def fit(loss: Any, remainder: str) -> Any:
        model = compiled(hk, loss)
        model.optimizer.learning_rate = 0.0
        model.get_layer("normal").trainable = False
        data = hk.shard(odd, world, 4, remainder=remainder)
        held = (X[world.rank :: 2], Y[world.rank :: 2])
        averaging = [hk.BroadcastState(), hk.AverageMetrics(world)]
        return model, model.fit(data, epochs=2, verbose=0, validation_data=held, callbacks=averaging).history

    keras.layers.Dropout.call, dropout = lambda _, inputs, training=False: inputs, keras.layers.Dropout.call
    try:
        model, history = fit(make_loss(), "exact")
        tiny, averaging = compiled(hk), [hk.AverageMetrics(world)]
        one = hk.shard((X[:1], Y[:1]), world, 4, remainder="exact")
        few = tiny.fit(one, verbose=0, callbacks=averaging).history
    finally:
        keras.layers.Dropout.call = dropout
    for name, part in (("accuracy", odd), ("val_accuracy", (X, Y))):
        assert history[name] == pytest.approx([hk.evaluate(model, part, world, 4)["accuracy"]] * 2)
    assert few["accuracy"] in ([0.0], [1.0])
    by_weight = make_loss(reduction="mean_with_sample_weight")
    for name, loss in (("sum", make_loss(reduction="sum")), ("mean_with_sample_weight", {"out": by_weight})):
        error = message(lambda loss=loss: fit(loss, "exact"))
        assert f"InvalidArgumentError: fit got data with remainder='exact' and a loss with reduction='{name}'" in error
    fit(make_loss(reduction="sum"), "drop")


@on_ranks("keras", fresh=True)
def test_synchronized_batch_normalization_is_one_warning(hk, world):
    """Of two fits."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            compiled(hk, synchronized=True).fit(hk.shard((X[:8], Y[:8]), world, 4), verbose=0)
    (said,) = [str(one.message) for one in warned if "synchronized" in str(one.message)]
    assert "not over Horovod's ranks" in said


@on_ranks("keras-torch")
def test_arguments_that_cannot_be_right(hk, world):
    model = compiled(hk)
    for attempt, told in (
        (lambda: hk.CheckAgreement(world, every=0), "got 0."),
        (lambda: hk.CheckAgreement(world, on_disagreement="stop"), "got 'stop'."),
        (lambda: hk.check_agreement(model, None, world, loader=[1]), "got list."),
        (lambda: hk.evaluate(model, (X, Y), world, 0), "got 0."),
        (lambda: hk.evaluate(model, (X[:0], Y[:0]), world, 4), "length 0."),
        (lambda: hk.evaluate(model, [[1.0], [0]], world, 4), "give lists as np.asarray"),
        (lambda: hk.seed_everything(-1, world), "got -1."),
    ):
        error = message(attempt)
        assert error.startswith("InvalidArgumentError") and told in error


def seeded(hk: Any, world: Any, seed: int) -> dict[str, Any]:
    import keras

    streams = hk.seed_everything(seed, world)
    model = make_model()
    initial = np.concatenate([value.reshape(-1) for value in model.get_weights()])
    model.compile(hk.distribute(keras.optimizers.SGD(0.01)), make_loss())
    same = (X[:4], Y[:4])  # each rank's step is on the same samples: its loss differs by dropout alone
    losses: list[float] = []
    noting = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: losses.append(float(logs["loss"])))
    keras.Model.fit(model, *same, epochs=3, verbose=0, shuffle=False, callbacks=[hk.BroadcastState(), noting])
    dropout = model.get_layer("dropout")
    masks = [dropout(np.ones((1, 64), "float32"), training=True) for _ in range(2)]
    drawn = [np.random.random(), random.random(), streams.generator(1).random()]  # noqa: S311
    return {
        "initial": initial.tolist(),
        "losses": losses,
        "masks": [keras.ops.convert_to_numpy(mask).reshape(-1).tolist() for mask in masks],
        "drawn": [*drawn, float(keras.ops.convert_to_numpy(keras.random.uniform(())))],
    }


@on_ranks(*KERAS)
def test_seeds_give_the_same_model_and_different_streams_again_in_every_run(hk, world, everyone, alone):
    """Nothing that was drawn before matters; and a process alone draws what rank 0 draws."""
    import keras

    first, again, other = (seeded(hk, world, seed) for seed in (11, 11, 12))
    assert first == again
    firsts, others = everyone(first), everyone(other)
    assert firsts[0]["initial"] == firsts[1]["initial"] != others[0]["initial"] == others[1]["initial"]
    different = [*firsts, *others]
    assert len({number for run in different for number in run["drawn"]}) == 4 * 4
    assert len({tuple(mask) for run in different for mask in run["masks"]}) == 4 * 2
    assert len({number for run in different for number in run["losses"]}) == 4 * 3
    if keras.backend.backend() == "torch":
        by_itself = alone(seeded, seed=11)
        for name in ("initial", "masks", "drawn"):
            assert by_itself[name] == firsts[0][name]


def large_batch(script: str) -> str:
    """What the example prints."""
    sys.argv = [script, "--epochs", "4", "--device", "cpu"]
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    assert ended.value.code == 0
    return printed.getvalue()


@pytest.mark.parallel
def test_warmup_makes_the_large_batch_converge(run_job, tmp_path):
    (printed,) = run_job("keras", large_batch, n=1, script=str(EXAMPLES / "large_batch.py"))
    titles, _, *rows = [line for line in printed.splitlines() if "|" in line]
    assert "no warmup" in titles and "3 epochs of warmup" in titles
    _, without, warmed = (column.split() for column in rows[-1].split("|"))
    assert len(rows) == 4 and float(without[1]) < 0.3 and float(warmed[1]) > 0.8
    assert (tmp_path / "large_batch.png").read_bytes().startswith(b"\x89PNG")
