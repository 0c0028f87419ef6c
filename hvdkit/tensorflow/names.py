"""What a variable is called on every rank, and the ``tf.Variable`` in it."""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf


def canonical_name(variable: Any) -> str:
    """The path of a variable without automatic numbers: equal on ranks that have built other layers before."""
    path = getattr(variable, "path", None) or variable.name.removesuffix(":0")
    return re.sub(r"_\d+(?=[/_]|$)", "", path)


def native(variable: Any) -> Any:
    """The ``tf.Variable`` inside a Keras 3 variable; anything else as it is."""
    inner = getattr(variable, "value", None)
    return inner if isinstance(inner, tf.Variable) else variable
