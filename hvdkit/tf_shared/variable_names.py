"""What TensorFlow's and Keras' variables are called on every rank."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any


def plain_path(variable: Any) -> str:
    """A variable's path without Keras' automatic numbers: equal on ranks that have built other layers before."""
    return re.sub(r"_\d+(?=[/_]|$)", "", getattr(variable, "path", None) or variable.name.removesuffix(":0"))


def common_names(variables: Iterable[Any]) -> list[str]:
    """Names for variables that are equal on all ranks: their plain paths, numbered where several have the same."""
    seen: Counter[str] = Counter()
    names = []
    for path in map(plain_path, variables):
        names.append(f"{path}.{seen[path]}" if seen[path] else path)
        seen[path] += 1
    return names
