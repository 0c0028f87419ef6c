"""``python -m hvdkit.measure.emulate.model_process QUESTION REPLY``: its gradients' sizes, in order.

QUESTION is JSON (see ``sizes.of_model``), REPLY the file to write. The frameworks are imported here and nowhere else in
the room, and only after the user's module has imported its own.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.model_factory import framework_of, make, reply


@dataclass(frozen=True)
class ModelGradient:
    """One parameter's gradient.

    Attributes:
        name: of the parameter.
        layer: of the module that holds it.
        elements: how many numbers.
        dtype: their type, as NumPy names it.
    """

    name: str
    layer: str
    elements: int
    dtype: str


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The gradients of a model.

    Returns:
        framework, order (in words), and gradients: a list of name, elements and dtype.
    Raises:
        InvalidArgumentError: the factory cannot be found, fails, or gives no model of the framework.
    """
    made = make(question["module"], question["factory"], question["input_shape"])
    framework = framework_of(made.model, question["framework"])
    gradients, order = importlib.import_module(f"hvdkit.measure.emulate.model_{framework}").gradients(made)
    found: list[ModelGradient] = [one for one in gradients if one.elements > 0]
    if not found:
        raise InvalidArgumentError(
            "the model has no parameter that is trained; expected at least one (a model that makes them in its first "
            "call needs --input-shape, or a factory that returns (model, inputs))."
        )
    if question["per"] == "layer":
        found = by_layer(found)
    return {
        "framework": framework,
        "order": order,
        "gradients": [{key: value for key, value in asdict(one).items() if key != "layer"} for one in found],
    }


def by_layer(gradients: Sequence[ModelGradient]) -> list[ModelGradient]:
    """One for each layer, ready when the last of its gradients is.

    A layer whose gradients have several types gives one for each type: a collective has one type.
    """
    groups: dict[tuple[str, str], list[ModelGradient]] = {}
    for one in gradients:
        key = (one.layer, one.dtype)
        groups[key] = [*groups.pop(key, []), one]
    kinds = [layer for layer, _ in groups]
    return [
        ModelGradient(
            layer if kinds.count(layer) == 1 else f"{layer} ({dtype})", layer, sum(one.elements for one in group), dtype
        )
        for (layer, dtype), group in groups.items()
    ]


if __name__ == "__main__":
    reply(answer, sys.argv[1:])
