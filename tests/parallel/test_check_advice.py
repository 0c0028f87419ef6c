"""What `hvdkit check` says of scripts for TensorFlow 1 and Keras 2: each idiom fails so, and what it advises trains.

Frameworks and hvdkit are imported within, on the ranks.
"""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import on_ranks

CORRECT = Path(__file__).parents[1] / "data" / "check" / "correct"


@on_ranks("tensorflow")
def test_each_idiom_that_check_blames_fails_on_keras_3(hk, world):
    import importlib

    import keras
    import tensorflow as tf

    def model() -> Any:
        made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        made.compile("sgd", "mse")
        return made

    def gradients(distribute: Any) -> int:
        trained = model()
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(trained(np.ones((2, 4), "float32")))
        return len(distribute(tape).gradient(loss, trained.trainable_variables))

    def images() -> Any:
        return importlib.import_module("keras.preprocessing.image").ImageDataGenerator

    said = [
        (TypeError, lambda: keras.optimizers.Adam(0.1).variables()),
        (AttributeError, lambda: tf.ConfigProto()),
        (AttributeError, lambda: tf.Session()),
        (AttributeError, lambda: keras.backend.set_session),
        (TypeError, lambda: model().compile("sgd", "mse", experimental_run_tf_function=False)),
        (ValueError, lambda: keras.optimizers.Adadelta(lr=1.0)),
        (AttributeError, lambda: model().fit_generator),
        (AttributeError, images),
    ]
    for error, attempt in said:
        with pytest.raises(error):
            attempt()
    assert gradients(hk.distribute) == 2
    assert tf.keras.preprocessing.image.ImageDataGenerator(rotation_range=8)


@on_ranks("keras", "tensorflow", fresh=True)
def test_what_check_finds_correct_trains(hk, everyone, monkeypatch, tmp_path):
    """The scripts do with hvdkit what Horovod's examples do: every rank ends with the same weights."""
    import keras

    generator = np.random.default_rng(0)
    part = (generator.integers(0, 255, (512, 28, 28)), generator.integers(0, 10, 512))
    monkeypatch.setattr(keras.datasets.mnist, "load_data", lambda *_, **__: (part, part))
    monkeypatch.chdir(tmp_path)
    done = runpy.run_path(str(CORRECT / f"{hk.__name__.replace('.', '_')}.py"), run_name="__main__")
    assert everyone("done") == ["done"] * 2
    if "model" not in done:  # a loop of its own within a function
        assert list((tmp_path / "runs" / "mnist").glob("step-*"))
        return
    weights = [value.tolist() for value in done["model"].get_weights()]
    assert everyone(weights) == [weights] * 2
    assert int(done["optimizer"].iterations) > 0
