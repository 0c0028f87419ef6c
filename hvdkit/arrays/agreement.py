"""Do all ranks hold the same arrays? The inside of ``hvdkit.arrays``'s ``check_agreement``."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdkit.arrays import mpi, seeds
from hvdkit.arrays.data import require_sharded
from hvdkit.arrays.state import read, row
from hvdkit.arrays.tree import Array, OwnPart
from hvdkit.steps import agreement
from hvdkit.steps.topology import Topology


def check_agreement(state: Any, world: Topology, *, loader: Any = None) -> None:
    """Check that all ranks hold bit-identical arrays and numbers; a collective.

    One allreduce of 16 bytes compares digests; only when they differ is more sent, to say where. After
    ``seed_everything`` its seed is compared too.

    Args:
        state: containers of arrays and numbers.
        world: the job.
        loader: from ``shard``: its epoch, seed and sizes are compared.
    Raises:
        AgreementError: on every rank; names the first differing array, the ranks on each side and, where the layouts
            match, the largest difference.
        InvalidArgumentError: a loader that is not from ``shard``.
    """
    comm = mpi.everyone()
    found = mpi.ranks(comm).together(lambda: read(state))
    arrays: dict[str, Array] = {}
    for position, (path, leaf, array) in enumerate(found):
        if array is not None and not isinstance(leaf, OwnPart):  # {"a.b": x, "a": {"b": y}} has a path twice
            arrays[f"{path} ({position})" if path in arrays else path] = array
    fixes: dict[str, str] = {}
    loaders = {} if loader is None else require_sharded(loader).share.facts(loader.epoch)
    for facts, fix in ((loaders, agreement.ITERATE_ALIKE), (seeds.CURRENT.facts(), agreement.SEED_ALIKE)):
        arrays.update({name: np.array(value, np.float64) for name, value in facts.items()})
        fixes.update(dict.fromkeys(facts, fix))
    if world.size > 1:
        rows = [row(path, None, array) for path, array in arrays.items()]
        digests = [agreement.digest(array) for array in arrays.values()]
        agreement.require_same_values(mpi.ranks(comm), rows, digests, lambda at: list(arrays.items())[at], fixes)


class CheckAgreement:
    """``check_agreement`` every ``every`` steps: call ``step(state)`` after each step of the optimizer, on all ranks.

    Args:
        world, loader: see ``check_agreement``.
        every: steps from one check to the next, the same on every rank.
        on_disagreement: "raise" (on every rank, none waits for another) or "warn" and train on.
    Raises:
        InvalidArgumentError: ``every`` below 1, or an unknown reaction.
    """

    def __init__(
        self, world: Topology, every: int = 100, *, loader: Any = None, on_disagreement: str = "raise"
    ) -> None:
        self._state: Any = None
        self._steps = agreement.EveryFewSteps(
            lambda: check_agreement(self._state, world, loader=loader), every, on_disagreement
        )

    def step(self, state: Any) -> None:
        """Count one step, and check when it is time.

        Raises:
            AgreementError: on every rank, naming the step, unless the reaction is "warn".
        """
        self._state = state
        self._steps.step()
        self._state = None
