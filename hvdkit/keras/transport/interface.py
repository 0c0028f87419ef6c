"""What ``hvdkit.keras`` needs of a communication library, beside what every framework binding needs."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdkit.core.communicator import ALLREDUCE, Communicator
from hvdkit.steps.gradients import GradientOptions
from hvdkit.steps.streams import Total
from hvdkit.steps.topology import Topology
from hvdkit.tf_shared.keras_optimizer import Reduce

Ranks = tuple[int, ...] | None
AHEAD_S = 0.001
"""Pause between two looks for what other ranks say ahead of a step."""


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


class Transport(Communicator):
    """How a process of one Keras backend reaches the other ranks.

    Attributes:
        in_step: whether a backward that runs now is a step's: not in callbacks of ``fit``, and not after it.
    """

    in_step = True

    @abstractmethod
    def start_library(self) -> Topology:
        """Start the library and say who this process is; a collective."""

    def before_shutdown(self, action: Callable[[], None]) -> None:
        """Have ``action`` called before the program ends the library itself, where it can."""

    @abstractmethod
    def digests(self, variables: Sequence[Any]) -> npt.NDArray[np.int64]:
        """A digest of each variable's bits, int64 (len(variables),), made where they are; not collective."""

    def total(self, name: str) -> Total:
        """A sum over the ranks in a second thread; each use of what is returned is a collective of this name."""
        return self.background(ALLREDUCE, name, AHEAD_S)

    @abstractmethod
    def has_background(self) -> bool:
        """Whether ``background`` can be used, the same on all ranks."""

    @abstractmethod
    def end(self, why: str) -> None:
        """Have every call that waits for other ranks fail, here and on the others; they cannot communicate again."""

    @abstractmethod
    def reducer(self, options: GradientOptions, process_set: Any) -> tuple[Reduce, Ranks]:
        """What combines gradients, and over which ranks (None: all)."""
