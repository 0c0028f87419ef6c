"""``python -m hvdkit.measure.memory.process QUESTION REPLY``: makes a model and measures what it needs in memory.

QUESTION is JSON (see ``cli``), REPLY the file to write; frameworks are imported in this process only.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.model_factory import framework_of, make, reply


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The measured terms, and with ``question["measure"]`` what the allocator really held.

    Raises:
        InvalidArgumentError: the factory fails, or its model cannot be measured.
    """
    asked = question["module"], question["factory"], question["input_shape"]
    real = make(*asked) if question["measure"] else None
    with _made_on(question["device"]):
        made = make(*asked)
    framework = framework_of(made.model, question["framework"])
    if framework == "tensorflow":
        raise InvalidArgumentError("it gave a tf.Module, whose layers are not known; expected a torch or Keras model.")
    insides = importlib.import_module(f"hvdkit.measure.memory.model_{framework}")
    found: dict[str, Any] = {"framework": framework, **insides.measure(made, question)}
    if real is not None:
        if framework != "torch":
            raise InvalidArgumentError("--measure counts PyTorch's allocations; leave it out for a Keras model.")
        found["measured_peak"] = insides.peak_of_allocator(real, question)
    return found


def _made_on(device: str) -> AbstractContextManager[Any]:
    """Where PyTorch puts new tensors: a model for "meta" never takes the memory of its weights."""
    if device != "meta" or importlib.util.find_spec("torch") is None:
        return nullcontext()
    context: AbstractContextManager[Any] = importlib.import_module("torch").device(device)
    return context


if __name__ == "__main__":
    reply(answer, sys.argv[1:])
