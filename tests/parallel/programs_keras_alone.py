"""What one process without a launcher does for test_keras.py: it loads models without hvdkit, then trains with it."""

import functools
import sys
from pathlib import Path
from typing import Any

import keras
from programs_checks import run_checks


def load_without_hvdkit(models: str) -> list[Any]:
    """For each model file of a directory: whether its optimizer is Keras' own, and its number of steps."""
    assert not {"hvdkit", "horovod"} & set(sys.modules)
    sys.modules["hvdkit"] = sys.modules["horovod"] = None
    try:
        loaded = [keras.models.load_model(file) for file in sorted(Path(models).glob("*.keras"))]
    finally:
        del sys.modules["hvdkit"], sys.modules["horovod"]
    return [[isinstance(one.optimizer, keras.optimizers.Adam), int(one.optimizer.iterations.numpy())] for one in loaded]


def alone(directory: str, models: str) -> None:
    """Load the models of a directory, and train what the ranks together train, to compare with."""
    run_checks({"load": functools.partial(load_without_hvdkit, models)}, directory, 0)
    import programs_keras  # and with it hvdkit

    checks = {"train": programs_keras.train, "train exact": programs_keras.train_exact}
    if programs_keras.BACKEND == "tensorflow":
        checks["warmup"] = programs_keras.tutorial_warmup
    run_checks(checks, directory, 0)
