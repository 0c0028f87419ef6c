"""The models of ``hvdkit bench synthetic`` in Keras 3, for TensorFlow's own loop and for ``fit`` on every backend."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers

from hvdkit.synthetic.benchmark import EXPANSION, HIDDEN, RESNET50, BenchmarkSettings, bottlenecks, projected


def make_model(settings: BenchmarkSettings) -> Any:
    """The model with random weights; takes (batch, height, width, channels), or (batch, features), gives logits."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input(settings.shape)
    if settings.model == RESNET50:
        x = _resnet50(inputs)
    elif settings.model == "cnn":
        x = layers.Conv2D(64, 3, activation="relu")(layers.Conv2D(32, 3, activation="relu")(inputs))
        x = layers.Flatten()(layers.Dropout(0.25)(layers.MaxPooling2D(2)(x)))
        x = layers.Dropout(0.5)(layers.Dense(128, activation="relu")(x))
    else:
        x = inputs
        for width in HIDDEN[settings.model]:
            x = layers.Dense(width, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(settings.classes)(x))


def _convolution(x: Any, outputs: int, size: int, stride: int = 1) -> Any:
    """Without bias, since batch normalization has one."""
    x = layers.Conv2D(outputs, size, stride, padding="same", use_bias=False)(x)
    return layers.BatchNormalization()(x)


def _resnet50(inputs: Any) -> Any:
    x = layers.ReLU()(_convolution(inputs, 64, 7, 2))
    x = layers.MaxPooling2D(3, 2, padding="same")(x)
    for channels, inner, stride in bottlenecks():
        inside = layers.ReLU()(_convolution(x, inner, 1))
        inside = layers.ReLU()(_convolution(inside, inner, 3, stride))
        inside = _convolution(inside, EXPANSION * inner, 1)
        beside = _convolution(x, EXPANSION * inner, 1, stride) if projected(channels, inner, stride) else x
        x = layers.ReLU()(layers.Add()([inside, beside]))
    return layers.GlobalAveragePooling2D()(x)
