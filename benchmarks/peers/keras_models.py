"""The models of ``peers.py`` in Keras, for TensorFlow's own loop and for ``fit`` on the backend of KERAS_BACKEND."""

import os

import keras
from keras import layers
from rank import CLASSES, LEARNING_RATE, SHAPES


def one_thread():
    """Have the backend compute with one thread; before its first operation."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    elif backend == "torch":
        import torch

        torch.set_num_threads(1)
    else:
        os.environ["PJRT_NPROC"] = "1"  # XLA reads it when it makes its thread pools


def make_model(name):
    keras.utils.set_random_seed(0)
    he = {"activation": "relu", "kernel_initializer": "he_uniform"}
    if name == "cnn":
        hidden = [
            layers.Conv2D(32, 3, **he), layers.Conv2D(64, 3, **he), layers.MaxPooling2D(2), layers.Dropout(0.25),
            layers.Flatten(), layers.Dense(128, **he), layers.Dropout(0.5),
        ]  # fmt: skip
    else:
        widths = {"mlp": [256, 128, 64], "deep": [256] * 60, "wide": [4096, 4096]}[name]
        hidden = [layers.Dense(width, **he) for width in widths]
    return keras.Sequential([keras.Input(SHAPES[name][0]), *hidden, layers.Dense(CLASSES)])


def make_optimizer():
    return keras.optimizers.SGD(LEARNING_RATE, momentum=0.9)


def loss_of():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def weights_of(model):
    """The weights that training changes, as arrays."""
    return [keras.ops.convert_to_numpy(variable) for variable in model.trainable_variables]
