"""hvdkit/keras/private.py: each use of what Keras does not promise, on each backend; real ranks.

Keras and hvdkit are imported within, on the ranks.
"""

from typing import Any

import numpy as np
from ranks import KERAS, on_ranks

X, Y = np.ones((8, 4), "float32"), np.ones((8, 3), "float32")


def make_model() -> Any:
    import keras

    layers = keras.layers
    inner = keras.Sequential(
        [keras.Input((4,)), layers.Dense(4, name="inside"), layers.BatchNormalization(name="norm")]
    )
    return keras.Sequential([keras.Input((4,)), inner, layers.Dropout(0.5), layers.Dense(3, name="out")])


@on_ranks(*KERAS)
def test_layers_and_what_they_never_train(hk):
    from hvdkit.keras import private
    from hvdkit.tf_shared.keras_layers import layers_of, untrained_of

    model = make_model()
    names = [layer.name for layer in layers_of(model, include_self=False)]
    assert {"inside", "norm", "out"} <= set(names) and model.name not in names
    assert private.unbuilt_layers(model) == []
    by_name = {layer.name: layer for layer in layers_of(model)}
    by_name["inside"].trainable = False
    assert untrained_of(by_name["inside"]) == []
    assert [one.name for one in untrained_of(by_name["norm"])] == ["moving_mean", "moving_variance"]


@on_ranks(*KERAS)
def test_metrics_of_compile_and_the_order_of_results(hk):
    import keras

    from hvdkit.keras import private

    own, model = keras.metrics.MeanAbsoluteError(name="mae"), make_model()
    assert private.own_metrics_of(model) == []
    model.compile("sgd", "mse", metrics=[own])
    assert own in keras.tree.flatten(private.own_metrics_of(model))
    results = keras.Model.evaluate(model, X, Y, verbose=0, return_dict=True)
    assert private.in_order(model, results) == [results["loss"], results["mae"]]


@on_ranks(*KERAS)
def test_fit_begins_where_a_callback_says(hk, world):
    import keras

    from hvdkit.keras import private

    def begin(logs: Any = None) -> None:
        private.set_first_epoch(model, 2)
        assert private.first_epoch_of(model) == 2

    model = make_model()
    model.compile(hk.distribute(keras.optimizers.SGD(0.0)), "mse")
    hk.broadcast_state(model, model.optimizer)
    beginning = keras.callbacks.LambdaCallback(on_train_begin=begin)
    assert model.fit(X, Y, epochs=4, verbose=0, callbacks=[beginning]).epoch == [2, 3]


@on_ranks(*KERAS)
def test_random_states_are_read_and_put_back(hk):
    import keras

    from hvdkit.keras import private
    from hvdkit.tf_shared.keras_layers import keras_generator

    def draw() -> list[Any]:
        numbers = [keras.random.uniform(())]
        if keras.backend.backend() == "torch":
            import torch

            numbers.append(torch.rand(()))
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            numbers.append(tf.random.get_global_generator().uniform(()))
        return [float(keras.ops.convert_to_numpy(one)) for one in numbers]

    generator = keras_generator() or keras_generator(make=True)
    draw()
    before, backend = np.array(keras.ops.convert_to_numpy(generator.state)), private.backend_state().copy()
    first = draw()
    assert draw() != first
    generator.state.assign(before)
    private.set_backend_state(backend)
    assert keras_generator() is generator and draw() == first


@on_ranks(*KERAS)
def test_keras_calls_what_is_replaced(hk, world, monkeypatch):
    """Each of them, in the training and evaluation of what shard made."""
    import keras

    from hvdkit.keras import private

    called = set()

    def watching(point: Any) -> Any:
        plain = getattr(point.holder(), point.name)

        def call(*args: Any, **kwargs: Any) -> Any:
            called.add(point)
            return plain(*args, **kwargs)

        return call

    replaced = set(private._replaced)
    if keras.backend.backend() == "tensorflow":
        replaced.add(private.TF_ITERATOR)
    for point in replaced:
        monkeypatch.setattr(point.holder(), point.name, watching(point))
    model = make_model()
    model.compile(hk.distribute(keras.optimizers.SGD(0.1)), "mse")
    hk.broadcast_state(model, model.optimizer)
    data = hk.shard((X, Y), world, 4)
    model.fit(data, verbose=0)
    model.evaluate(data, verbose=0)
    model.predict(data, verbose=0)
    model.train_on_batch(X, Y)
    keras.optimizers.SGD(0.1).apply([keras.ops.ones(())], [keras.Variable(1.0)])
    missed = sorted(map(str, replaced - called))
    assert not missed, missed
    assert len(replaced) >= 7
