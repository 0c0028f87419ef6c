"""Importing a framework in a rank without what no rank's test is about: a third to a half of the processor time.

Keras and TensorFlow import jax, matplotlib and scikit-learn where these are installed, for their plots, converters and
wrappers, and work without. Here they are missing for Keras and TensorFlow alone: a test's program and hvdkit import
them as ever. ``lean/`` does the same for whole processes.
"""

import contextlib
import gc
import importlib.abc
import os
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

FRAMEWORKS = {"keras", "tensorflow"}
ON_THE_SIDE = {"jax", "matplotlib", "sklearn"}


class Missing(importlib.abc.MetaPathFinder):
    """Finds none of ON_THE_SIDE for a module of FRAMEWORKS; jax is no side matter where Keras computes with it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name not in ON_THE_SIDE or (name == "jax" and os.environ.get("KERAS_BACKEND") == "jax"):
            return
        importer = importing(sys._getframe(1))
        if importer.split(".")[0] in FRAMEWORKS:
            raise ModuleNotFoundError(f"{name} is left out where {importer} imports it (lean_imports.py)", name=name)


def importing(frame: FrameType | None) -> str:
    """The name of the module whose import statement is under way in a frame of the import machinery."""
    while frame is not None and frame.f_globals["__name__"].split(".")[0] == "importlib":
        frame = frame.f_back
    return frame.f_globals["__name__"] if frame is not None else ""


@contextlib.contextmanager
def lean_imports() -> Iterator[None]:
    """Within, what is imported is cheap to import; and what it made is not searched for garbage, now or later."""
    finder = Missing()
    sys.meta_path.insert(0, finder)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        sys.meta_path.remove(finder)
