"""What a checkpoint of a Keras training holds, and how it is put back; the inside of ``hvdkit.keras.Checkpoints``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import keras
import numpy as np

from hvdkit import __version__
from hvdkit.common.keras_optimizer import taking_part
from hvdkit.errors import CheckpointError, InvalidArgumentError
from hvdkit.keras import random_state, seeds, state
from hvdkit.keras import schedule as keras_schedule
from hvdkit.keras.data import ShardedData, require_sharded, trained_on
from hvdkit.keras.trainer.callbacks import Callback, broadcast_state
from hvdkit.keras.transport import TRANSPORT
from hvdkit.steps.checkpoint import CheckpointDirectory, Saved, checked

_RANDOM = "random.npz"


class Store:
    """Saves and restores; every method is a collective.

    Args:
        directory, keep, keep_best: see ``CheckpointDirectory``.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int, keep_best: int) -> None:
        self._directory = CheckpointDirectory(directory, keep, keep_best)

    def save(
        self,
        model: Any,
        optimizer: Any | None,
        step: int,
        loader: Any,
        score: float | None,
        metadata: dict[str, Any],
    ) -> Saved:
        state.model_variables(model)
        facts = {**_facts(optimizer, loader), **metadata}
        states = TRANSPORT.gather(random_state.capture(model), "hvdkit.random_states")

        def write(directory: Path) -> None:
            np.savez(directory / _RANDOM, *states)
            state.write_model(directory, model)
            if optimizer is not None:
                state.write_optimizer(directory / "optimizer.npz", optimizer, model)

        def on_disk() -> Saved:
            checked(step, facts, score)
            return self._directory.save(step, write, facts, score)

        return cast(Saved, state.on_root(on_disk))

    def restore(
        self, model: Any, optimizer: Any | None, loader: Any = None, schedule: Any = None, which: str = "latest"
    ) -> Saved | None:
        rates = keras_schedule.rates(optimizer) if optimizer is not None else []
        saved, states = self._read(model, optimizer, which)
        if saved is not None:
            broadcast_state(model, optimizer, 0)
            _resume(saved, states, model, optimizer, loader, schedule, rates)
        return saved

    def _read(self, model: Any, optimizer: Any | None, which: str) -> tuple[Saved | None, Any]:
        """On the root: load the files; on all ranks: what was found, and the ranks' random states."""
        if which not in ("latest", "best"):
            raise InvalidArgumentError(f"which must be latest or best, got {which!r}.")

        def load() -> Any:
            saved = self._directory.latest() if which == "latest" else self._directory.best()
            if saved is None:
                return None, None
            slots = state.read_optimizer(saved.path / "optimizer.npz", optimizer, model) if optimizer else []
            state.read_model(saved.path, model)
            for variable, value in slots:
                variable.assign(value)
            return saved, _read_random(saved.path / _RANDOM)

        return cast("tuple[Saved | None, Any]", state.on_root(load))


def _facts(optimizer: Any | None, loader: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "hvdkit": __version__,
        "framework": "keras",
        "keras": keras.__version__,
        "backend": keras.backend.backend(),
        "size": state.world().size,
        "seed": seeds.seed(),
    }
    if optimizer is not None:
        facts["learning_rates"] = keras_schedule.rates(optimizer)
    if loader is not None:
        facts["data"] = require_sharded(loader).state()
    return facts


def _resume(
    saved: Saved, states: Any, model: Any, optimizer: Any | None, loader: Any, schedule: Any, rates: list[float]
) -> None:
    """Put a training on all ranks where the checkpoint was, also when their number is another one.

    Args:
        rates: the learning rates that the optimizer was made with for this number of ranks.
    """
    world = state.world()
    same_size = saved.metadata.get("size") == world.size
    if optimizer is not None and not same_size:
        keras_schedule.set_rates(optimizer, rates)
    if loader is not None:
        data = saved.metadata.get("data")
        if data is None:
            raise CheckpointError(f"{saved.path} holds no position in the data; save with loader=, or restore without.")
        require_sharded(loader).load_state(data)
    if schedule is not None:
        if not isinstance(schedule, keras_schedule.Warmup) or loader is None:
            raise InvalidArgumentError("schedule must be from warmup, and needs the loader, which says how far it is.")
        schedule.go_to(loader.position.steps(loader.share))
    same_backend = saved.metadata.get("backend") == keras.backend.backend()
    if optimizer is not None and states is not None and same_size and same_backend:
        random_state.restore(model, states[world.rank])
    elif optimizer is not None and not same_size:
        seeds.branch(model, saved.step)


def _read_random(file: Path) -> Any:
    if not file.exists():
        return None
    try:
        with np.load(file, allow_pickle=False) as archive:
            return [archive[f"arr_{rank}"] for rank in range(len(archive.files))]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


class Checkpoint(Callback):
    """Saves model and optimizer while ``fit`` trains, on the root, and resumes where the newest ended (step 6).

    ``fit`` goes on by itself, as with ``keras.callbacks.BackupAndRestore``; ``epochs`` stays the number of the last
    one. With data from ``shard`` it goes on at the right sample, also in mid-epoch and on another number of ranks; logs
    and metrics of that epoch are then those of its rest. On another number of ranks the optimizer keeps the learning
    rate that it was made with, and ``Warmup`` goes on at the same sample. On as many ranks as before everything
    continues bit for bit (on CPUs), random numbers included. An error is raised on every rank.

    Args:
        directory: where the checkpoints live, see ``Checkpoints``.
        keep: how many of the newest stay.
        resume: False: start anew whatever is there.
        every: save after so many steps of each epoch, again and again, and at its end; default: at its end only.
            BatchNormalization's moving statistics are set to their mean over the ranks first, as after an epoch.
        keep_best: how many with the best ``monitor`` stay beside the newest; they are saved at an epoch's end.
        monitor: the log whose value is the score, such as "val_accuracy"; put ``AverageMetrics`` before this callback.
        mode: "max" or "min": which values of ``monitor`` are better.
    Attributes:
        initial_epoch: where the last ``fit`` began.
    Raises:
        InvalidArgumentError: a bad number or mode, keep_best without monitor; (from ``fit``) a log that there is not,
            or ``every`` with data that has no position.
        CheckpointError: (from ``fit``) as ``Checkpoints``.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int = 3,
        resume: bool = True,
        *,
        every: int | None = None,
        keep_best: int = 0,
        monitor: str | None = None,
        mode: str = "max",
    ) -> None:
        super().__init__()
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise InvalidArgumentError(f"every must be None or an integer >= 1, got {every!r}.")
        if mode not in ("max", "min"):
            raise InvalidArgumentError(f"mode must be max or min, got {mode!r}.")
        if keep_best and monitor is None:
            raise InvalidArgumentError(f"keep_best={keep_best} needs monitor, the log that says which are the best.")
        self._store = Store(directory, keep, keep_best)
        self._resume, self._every, self._monitor = resume, every, monitor
        self._sign = 1 if mode == "max" else -1
        self._epoch = self._last_batch = 0
        self.initial_epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras."""
        model, data = self.model, self._data()
        if self._every is not None and data is None:
            raise InvalidArgumentError(
                "Checkpoint(every=) needs data that can go on in mid-epoch: from hvdkit.keras.shard, without "
                "steps_per_epoch; give such data, or leave every out."
            )
        saved = self._store.restore(model, model.optimizer) if self._resume else None
        self.initial_epoch = int(saved.metadata.get("epoch", 0)) if saved is not None else 0
        position = saved.metadata.get("data") if saved is not None else None
        if data is not None and position is not None:
            data.load_state(position)
            # Too few samples may be left of an epoch for a step of more ranks.
            self.initial_epoch += data.position.epoch - position["epoch"]
        self.model._initial_epoch = self.initial_epoch or None  # Keras' door for callbacks that resume

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras."""
        self.model._initial_epoch = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras."""
        data = self._data()
        self._epoch, self._last_batch = epoch, (data.steps_done if data is not None else 0) - 1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras, with steps_per_execution for several steps at once."""
        last, self._last_batch = self._last_batch, batch
        if self._every is None or (batch + 1) // self._every == (last + 1) // self._every:
            return
        if batch + 1 < self.params["steps"]:  # the epoch's end has a save of its own
            model = self.model
            if taking_part(model.optimizer) is None and state.world().size > 1:
                state.average_statistics(model.non_trainable_weights)
            self._save(self._epoch, None)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        self._save(epoch + 1, self._score(logs or {}))

    def _save(self, epoch: int, score: float | None) -> None:
        model = self.model
        step = int(state.number(model.optimizer.iterations))
        self._store.save(model, model.optimizer, step, self._data(), score, {"epoch": epoch})

    def _score(self, logs: dict[str, Any]) -> float | None:
        if self._monitor is None:
            return None
        if self._monitor not in logs:
            raise InvalidArgumentError(f"monitor must be one of the logs {', '.join(logs)}, got {self._monitor!r}.")
        return self._sign * float(logs[self._monitor])

    def _data(self) -> ShardedData | None:
        """What ``fit`` trains on, where Keras' epochs are its passes."""
        data = trained_on(self.model)
        return data if data is not None and self.params["steps"] == len(data) else None
