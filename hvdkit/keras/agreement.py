"""Do all ranks hold the same Keras training? The inside of ``hvdkit.keras``'s ``check_agreement``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdkit.keras import seeds as keras_seeds
from hvdkit.keras import state
from hvdkit.keras.data import require_sharded, trained_on
from hvdkit.keras.optimizer import meant_by
from hvdkit.keras.trainer.callbacks import Callback
from hvdkit.keras.transport import TRANSPORT
from hvdkit.steps import agreement
from hvdkit.steps.topology import Topology
from hvdkit.tf_shared.keras_layers import layers_of, untrained_of
from hvdkit.tf_shared.keras_sharded import shared_variables


def check_agreement(
    model: Any, optimizer: Any | None, world: Topology, *, loader: Any = None, statistics: bool = True
) -> None:
    """Check that all ranks hold bit-identical weights, statistics and optimizer state; a collective.

    Variables are digested on the device where they are (on jax on the host, where its gradients pass too), and one
    allreduce of 16 bytes compares the digests; only when they differ is more sent, to say where. After
    ``seed_everything`` its seed is compared too.

    Args:
        model: built; its weights are compared.
        optimizer: its slots, step counter and learning rate are compared; see ``broadcast_state`` for several.
        world: the job.
        loader: from ``shard``: its epoch, seed and sizes are compared. Not within ``fit``, where TensorFlow reads
            ahead: there ``fit`` itself compares the epochs.
        statistics: compare what layers keep that is not trained (BatchNormalization's moving statistics) as well.
            ``fit`` sets it to the mean over the ranks at the end of each epoch; until then, and in a loop of your own,
            it is each rank's own: False.
    Raises:
        AgreementError: on every rank; names the first differing variable, the ranks on each side and, where the
            layouts match, the largest difference.
        InvalidArgumentError: a loader that is not from ``shard``, or a model that is not built yet.
    """
    loaders = require_sharded(loader).share.facts(loader.epoch) if loader is not None else {}
    variables = state.model_variables(model)
    if not statistics:
        # What is never trained; a frozen layer's weights are not among it.
        local = {id(one) for layer in layers_of(model) for one in untrained_of(layer)}
        variables = [variable for variable in variables if id(variable) not in local]
    seeds = keras_seeds.CURRENT.facts()
    fixes = {**dict.fromkeys(loaders, agreement.ITERATE_ALIKE), **dict.fromkeys(seeds, agreement.SEED_ALIKE)}
    if world.size > 1:
        compare(variables, meant_by(optimizer, model), {**loaders, **seeds}, fixes)


class CheckAgreement(Callback):
    """``check_agreement`` of the model that ``fit`` trains and its optimizer, after every ``every`` steps.

    Args:
        world: the job.
        every: steps from one check to the next, the same on every rank.
        on_disagreement: "raise" (on every rank, none waits for another) or "warn" and train on; at its end ``fit``
            raises all the same.
        statistics: see ``check_agreement``; they differ between ranks within an epoch.
    Raises:
        InvalidArgumentError: ``every`` below 1, or an unknown reaction.
        AgreementError: (from ``fit``) the ranks disagree, see ``check_agreement``; names the step.
    """

    def __init__(
        self, world: Topology, every: int = 100, *, on_disagreement: str = "raise", statistics: bool = False
    ) -> None:
        super().__init__()

        def check() -> None:
            model = self.model  # on jax this brings the variables up to date
            check_agreement(model, model.optimizer, world, statistics=statistics)

        self._checks = agreement.EveryFewSteps(check, every, on_disagreement)
        self._last_batch = -1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        data = trained_on(self.model)
        self._last_batch = (data.steps_done if data is not None else 0) - 1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras, with steps_per_execution for several steps at once."""
        for _ in range(batch - self._last_batch):
            self._checks.step()
        self._last_batch = batch


def compare(
    weights: Sequence[Any],
    optimizers: Mapping[str, Any],
    facts: Mapping[str, float] | None = None,
    fixes: Mapping[str, str] | None = None,
    ranks: Sequence[int] | None = None,
) -> None:
    """Raise AgreementError on every rank where weights, or states of optimizers, differ between ranks; a collective.

    Args:
        weights, optimizers: the same ones on every rank.
        facts: numbers that must be the same, by name.
        fixes: what to do where a fact differs, by its name.
        ranks: those that must agree with this one; default: all.
    """
    numbers = {name: np.array(value) for name, value in (facts or {}).items()}
    states = [(name, variable) for name, optimizer in optimizers.items() for variable in shared_variables(optimizer)]
    variables = [*weights, *(variable for _, variable in states)]
    several = [f"{name}: {variable.path}" if len(optimizers) > 1 else variable.path for name, variable in states]
    names = [*(weight.path for weight in weights), *several, *numbers]
    rows = [*map(state.layout, variables), *numbers]
    values = [*TRANSPORT.digests(variables), *map(agreement.digest, numbers.values())]

    def value_at(position: int) -> tuple[str, npt.NDArray[Any]]:
        name = names[position]
        return name, state.value_of(variables[position]) if position < len(variables) else numbers[name]

    agreement.require_same_values(TRANSPORT, rows, values, value_at, fixes, ranks)
