"""Outer steps (DiLoCo) of parameters in arrays of any framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvdkit.arrays import mpi, tree
from hvdkit.errors import InvalidArgumentError
from hvdkit.steps.outer import Array, OuterLoop, OuterOptions, Weights


class _Leaves(Weights):
    """Floating-point arrays of a tree, for the duration of a call."""

    def __init__(self, named: Sequence[tuple[str, Array]]) -> None:
        self.rows = [f"{path} {array.dtype} {array.shape}" for path, array in named]
        self.sizes = [array.size for _, array in named]
        self.held = [array for _, array in named]

    def get(self, places: Sequence[int]) -> list[Array]:
        return [np.asarray(self.held[place], np.result_type(np.float32, self.held[place])) for place in places]

    def put(self, places: Sequence[int], values: Sequence[Array]) -> None:
        for place, value in zip(places, values, strict=True):
            self.held[place] = value.reshape(self.held[place].shape).astype(self.held[place].dtype)

    def average_slots(self, mean: Callable[[Array], Array]) -> None:
        """The state of the caller's optimizer is the caller's."""


class OuterSteps:
    """Averages what parameters have become over all ranks, every so many steps: ``parameters = outer(parameters)``.

    Call it after every update of the parameters. In between nothing is exchanged: update with this rank's own
    gradients, or with the mean over a host's ranks (``distribute(parameters, comm=host)``). For what it guarantees
    see docs/slow_networks.md.

    Args:
        parameters: before the first update, the same on all ranks: containers of arrays. Integers among them stay.
        every, outer, outer_lr, outer_momentum, outer_overlap, compression: see ``hvdkit.steps.outer.OuterOptions``.
    Raises:
        InvalidArgumentError: a bad option, no floating-point array, or several ranks and an MPI without
            MPI_THREAD_MULTIPLE.
        AgreementError: the ranks' parameters or options differ; raised on every rank. (All make it, as a collective.)
    """

    def __init__(
        self,
        parameters: Any,
        *,
        every: int,
        outer: str = "nesterov",
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        outer_overlap: int = 0,
        compression: str = "none",
    ) -> None:
        options = OuterOptions(every, outer, outer_lr, outer_momentum, outer_overlap, compression)
        if mpi.ranks().size() > 1 and not mpi.threads_may_call():
            raise InvalidArgumentError("outer steps send in a second thread; use an MPI with MPI_THREAD_MULTIPLE.")
        self._steps = OuterLoop(options, mpi.ranks(), is_saved=False)
        self._steps.begin(self._weights(parameters))

    def _weights(self, parameters: Any) -> _Leaves:
        named = [(path, tree.to_host(leaf, path)) for path, leaf in tree.flatten(parameters) if leaf is not None]
        floating = [(path, array) for path, array in named if np.issubdtype(array.dtype, np.floating)]
        if not floating:
            raise InvalidArgumentError("there is no floating-point array in these parameters.")
        weights = _Leaves(floating)
        if self._steps.weights is not None and self._steps.weights.rows != weights.rows:
            raise InvalidArgumentError(
                f"outer steps began with other parameters, {len(self._steps.weights.rows)} of them ("
                f"{self._steps.weights.rows[0]}, ...); got {len(weights.rows)} ({weights.rows[0]}, ...)."
            )
        return weights

    def __call__(self, parameters: Any) -> Any:
        """Count an update, and take the outer step that is due; a collective then.

        Returns:
            The parameters: these, or after an outer step new ones in the same containers and frameworks.
        """
        number, due = self._steps.tick()
        return self._with(parameters, lambda: self._steps.take(number)) if due else parameters

    def average_weights(self, parameters: Any) -> Any:
        """End the window now: the mean of all ranks' parameters, bit for bit the same on each. A collective.

        Call it before they are saved, evaluated or used, and at the end. A rank that has updated fewer times than
        others waits here, and takes part in their outer steps.
        """
        return self._with(parameters, self._steps.finish)

    def _with(self, parameters: Any, action: Callable[[], None]) -> Any:
        weights = self._steps.weights = self._weights(parameters)
        action()
        changed = dict(zip((row.split(" ")[0] for row in weights.rows), weights.held, strict=True))
        leaves = (
            tree.maker(leaf)(changed[path]) if path in changed else leaf for path, leaf in tree.flatten(parameters)
        )
        return tree.rebuild(parameters, leaves)

    def state(self) -> dict[str, Array]:
        """The outer momentum of each parameter by its path, for a checkpoint, after ``average_weights``."""
        return self._steps.velocity()

    def load_state(self, parameters: Any, state: Mapping[str, Array]) -> None:
        """Go on from restored parameters with what ``state`` returned; a collective. Only rank 0 needs to have it."""
        self._steps.forget(dict(state))
        self._steps.begin(self._weights(parameters))
