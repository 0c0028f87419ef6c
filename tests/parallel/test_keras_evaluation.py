"""What ``shard`` made in ``evaluate``, ``predict`` and ``validation_data``; metrics of all ranks."""

import inspect
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ranks import on_ranks

SAMPLES, CLASSES = 23, 3


def two_outputs(keras: Any) -> Any:
    """A model of two outputs, losses of several kinds, and metrics with and without weights."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    inputs = keras.Input((4,))
    hidden = layers.Dense(5, activation="relu", kernel_regularizer="l2")(inputs)
    hidden = layers.ActivityRegularization(0.1)(hidden)
    outputs = [layers.Dense(1, name="number")(hidden), layers.Dense(CLASSES, activation="softmax", name="kind")(hidden)]
    return keras.Model(inputs, outputs)


@on_ranks("keras", "keras-torch", smoke=("keras-jax",), n=3)
@pytest.mark.parametrize("samples", [5, SAMPLES])
def test_sharded_data_are_evaluated_and_predicted_as_in_one_process(hk, world, everyone, samples):
    """Each sample once, the loss included, whatever the remainder; and a rank without a batch."""
    import keras

    draws, batch_size = np.random.default_rng(0), 4
    x = draws.random((samples, 4), np.float32)
    y = (9 * draws.random((samples, 1), np.float32) ** 3, draws.integers(0, CLASSES, samples))
    w = np.linspace(0, 2, samples).astype("float32")
    model = two_outputs(keras)
    sums = keras.losses.SparseCategoricalCrossentropy(reduction="sum")
    model.compile(
        hk.distribute(keras.optimizers.SGD(0.0)),
        loss=["mse", sums if samples > 5 else "sparse_categorical_crossentropy"],
        metrics=[["mae"], ["accuracy"]],
        weighted_metrics=[["mse"], [keras.metrics.SparseCategoricalCrossentropy(name="ce")]],
    )
    hk.broadcast_state(model)
    for weights in ((), ((w, w[::-1].copy()),))[: 2 if samples > 5 else 1]:
        named = {"sample_weight": list(weights[0])} if weights else {}
        alone = model.evaluate(x, list(y), batch_size=batch_size, verbose=0, return_dict=True, **named)
        for remainder in ("drop", "pad", "exact"):
            if remainder == "drop" and samples < batch_size * world.size:
                continue
            data = hk.shard((x, y, *weights), world, batch_size, remainder=remainder)
            found = model.evaluate(data, verbose=0, return_dict=True)
            assert found == pytest.approx(alone, rel=1e-5), (samples, remainder, bool(weights))
            assert data.epoch == 0 and everyone(found) == [found] * 3
    in_order = model.evaluate(x, list(y), batch_size=batch_size, verbose=0, **named)
    assert model.evaluate(data, verbose=0) == pytest.approx(in_order, rel=1e-5)
    train = hk.shard((x, y), world, 1)
    logged = model.fit(train, verbose=0, epochs=2, validation_data=data, validation_steps=9).history
    validated = {name.removeprefix("val_"): value for name, value in logged.items() if "val_" in name}
    assert validated == {name: pytest.approx([value] * 2, rel=1e-5) for name, value in alone.items()}
    for found, expected in zip(model.predict(data, verbose=0), model.predict(x, verbose=0), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    least = model.predict(hk.shard((x, y), world, 2, remainder="exact"), steps=1, verbose=0)
    assert len(least[0]) == min(6, samples)


@on_ranks("keras-torch", n=3)
def test_predictions_that_are_no_rows_are_an_error_on_every_rank(hk, world):
    """Also on the rank that has no sample, and so too few of nothing: it must not wait for the others."""
    import keras

    from hvdkit.errors import HvdkitError

    class Halves(keras.Model):
        def call(self, x: Any) -> Any:
            return x[:1]

    model = Halves()
    data = hk.shard(np.ones((5, 4), np.float32), world, 4, remainder="exact")
    with pytest.raises(HvdkitError, match="one row for each of this rank's 4 samples"):
        model.predict(data, verbose=0)


@on_ranks("keras", "keras-torch")
def test_a_stream_is_evaluated_and_predicted_as_in_one_process(hk, world, monkeypatch):
    """In the stream's own order, maps included; a look moves nothing; and files have no order to predict in."""
    import keras
    import tensorflow as tf

    import hvdkit.tf_shared.tf_streams as streams
    from hvdkit.errors import InvalidArgumentError

    monkeypatch.setattr(streams, "IN_MEMORY", 0)
    draws = np.random.default_rng(0)
    x, y = draws.random((SAMPLES, 4), np.float32), draws.random((SAMPLES, 1), np.float32)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(hk.distribute(keras.optimizers.SGD(0.0)), "mse", metrics=["mae"])
    hk.broadcast_state(model)
    alone = model.evaluate(2 * x, y, verbose=0, return_dict=True)
    for few in (SAMPLES, 3):
        source = tf.data.Dataset.range(few).map(lambda i: (tf.gather(x, i), tf.gather(y, i)))
        data = hk.shard(source, world, 4, remainder="exact").map(lambda x, y, w: (2 * x, y, w))
        assert type(data).__name__ == "ShardedStream"
        if few == SAMPLES:
            assert model.evaluate(data, verbose=0, return_dict=True) == pytest.approx(alone, rel=1e-5)
            train = hk.shard((x, y), world, 4)
            logged = model.fit(train, verbose=0, epochs=2, validation_data=data).history
            assert logged["val_loss"] == pytest.approx([alone["loss"]] * 2, rel=1e-5)
        np.testing.assert_allclose(model.predict(data, verbose=0), model.predict(2 * x[:few], verbose=0), rtol=1e-5)
    if world.is_root:  # no other rank is asked
        looks = [[batch[0].numpy() for batch in data.take(1)] for _ in range(2)]
        assert [len(look) for look in looks] == [1, 1] and data.epoch == 0
    files = hk.shard(hk.shard_files(["a", "b", "c"], world).map(tf.strings.length), world, 1, remainder="exact")
    with pytest.raises(InvalidArgumentError, match="no order of all ranks"):
        model.predict(files)


@on_ranks("keras", n=2)
def test_validation_data_of_shard_on_the_root_alone_are_refused(hk, world):
    import keras

    from hvdkit.errors import AgreementError

    x, y = np.ones((8, 4), np.float32), np.ones((8, 1), np.float32)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(hk.distribute(keras.optimizers.SGD(0.0)), "mse")
    hk.broadcast_state(model)
    data, held = hk.shard((x, y), world, 2), hk.shard((x, y), world, 2)
    with pytest.raises(AgreementError, match="rank 0 gave fit validation data from shard"):
        model.fit(data, verbose=0, validation_data=held if world.is_root else None)


def metrics_of_keras(keras: Any) -> dict[str, Any]:
    """All public metrics of Keras, made with the fewest arguments."""
    given = {
        "IoU": {"num_classes": CLASSES, "target_class_ids": [0, 2]},
        "MeanIoU": {"num_classes": CLASSES},
        "MeanMetricWrapper": {"fn": keras.losses.mean_squared_error},
        "OneHotIoU": {"num_classes": CLASSES, "target_class_ids": [1]},
        "OneHotMeanIoU": {"num_classes": CLASSES},
        "PrecisionAtRecall": {"recall": 0.5},
        "RecallAtPrecision": {"precision": 0.5},
        "SensitivityAtSpecificity": {"specificity": 0.5},
        "SpecificityAtSensitivity": {"sensitivity": 0.5},
    }
    classes = {name: one for name, one in vars(keras.metrics).items() if inspect.isclass(one)}
    return {
        name: lambda one=one, name=name: one(**given.get(name, {})) for name, one in classes.items() if name != "Metric"
    }


def measured(name: str, y: Any, p: Any) -> tuple[Any, ...]:
    """What a metric of Keras measures."""
    if name in ("Mean", "Sum"):
        return (p,)
    if name.startswith("Sparse"):
        return y[:, None].astype("float32"), p
    if name in ("IoU", "MeanIoU"):
        return y, p.argmax(1)
    if name == "BinaryIoU":
        return (y > 1).astype("float32"), p[:, 0]
    return np.eye(CLASSES, dtype="float32")[y], p


def states_of(*metrics: Any) -> Any:
    """The states of metrics that belong to a model, as far as ``States`` asks."""
    from hvdkit.keras.trainer.metrics import States

    def results() -> dict[str, Any]:
        return {metric.name: metric.result() for metric in metrics}

    return States(SimpleNamespace(metrics=list(metrics), get_metrics_result=results))


@on_ranks("keras")
def test_each_metric_of_keras_is_that_of_all_samples(hk, world):
    """Unequal parts, of batches as one process has them; and a class of the user's own that is derived from it."""
    import keras

    from hvdkit.keras.trainer import metrics as additive

    draws = np.random.default_rng(0)
    y, p = draws.integers(0, CLASSES, SAMPLES), draws.random((SAMPLES, CLASSES)).astype("float32")
    p /= p.sum(axis=1, keepdims=True)
    batches = np.split(np.arange(SAMPLES), range(4, SAMPLES, 4))
    makers = metrics_of_keras(keras)
    assert len(makers) > 40
    for name, make in makers.items():
        alone, ranks, own = make(), make(), make()
        own.__class__ = type(f"Own{name}", (type(own),), {"__module__": "user"})
        model = SimpleNamespace(_compile_metrics=None, metrics=[own], test_function=None)
        additive.note(model)
        for number, batch in enumerate(batches):
            for metric in (alone, ranks, own):
                if metric is alone or number % world.size == world.rank:
                    metric.update_state(*measured(name, y[batch], p[batch]))
        expected = keras.ops.convert_to_numpy(alone.result())
        for metric in (ranks, own):
            (found,) = states_of(metric).summed_results().values()
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=name)
        assert additive.why_not(own) == "", name


def own_metrics(keras: Any) -> dict[str, Any]:
    """Metrics of the user's own: how they update their variables, and what is right over two ranks."""
    ops = keras.ops

    class Own(keras.metrics.Metric):
        def __init__(self, name: str, update: Any, begin: float = 0.0, **aggregation: Any) -> None:
            super().__init__(name=name)
            self.update, self.begin = update, begin
            self.value = self.add_variable((), "zeros", name="value", **aggregation)
            self.reset_state()

        def update_state(self, y: Any, p: Any = None, sample_weight: Any = None) -> None:
            self.value.assign(self.update(self.value, ops.mean(ops.cast(y, "float32"))))

        def reset_state(self) -> None:
            self.value.assign(self.begin)

        def result(self) -> Any:
            return self.value + 0.0

    return {
        "smoothed": (Own("smoothed", lambda state, y: state + y, begin=1.0), 1 + 2 + 4, ""),
        "root": (Own("root", lambda state, y: y, aggregation="only_first_replica"), 2, ""),
        "most": (Own("most", ops.maximum), 3, "not the sum"),
        "least": (Own("least", ops.minimum, begin=np.inf), 3, "not the sum"),
        "running": (Own("running", lambda state, y: 0.9 * state + 0.1 * y), 0.3, "not the sum"),
        "last": (Own("last", lambda state, y: y), 3, "not the sum"),
        "failing": (
            Own("failing", lambda state, y: state + y if y.shape == () and y > 1 else 1 / 0),
            3,
            "ZeroDivision",
        ),
    }


@on_ranks("keras", n=2)
def test_states_that_do_not_add_up_are_never_added_in_silence(hk, world):
    """Their results are averaged, with one warning on the root where they differ."""
    import keras

    from hvdkit.keras.trainer import metrics as additive
    from hvdkit.keras.trainer.metrics import _warn_of_mean

    for name, (metric, right, reason) in own_metrics(keras).items():
        _warn_of_mean.cache_clear()
        additive.note(SimpleNamespace(_compile_metrics=None, metrics=[metric], test_function=None))
        for differs in (0.0, 2.0):
            metric.reset_state()
            metric.update_state(np.array([2 + differs * world.rank], np.float32))
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                (found,) = states_of(metric).summed_results().values()
        assert found == pytest.approx(right, rel=1e-5), name
        said = [str(one.message) for one in warned if "not added up" in str(one.message)]
        assert len(said) == bool(reason and world.is_root), (name, said)
        assert all(f"metric {name!r}" in one and reason in one for one in said)
