"""What a checkpoint of a Keras training holds, and how it is put back; on request and in ``fit`` (step 6)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvdkit import __version__
from hvdkit.core.communicator import Communicator
from hvdkit.errors import CheckpointError, InvalidArgumentError
from hvdkit.keras import private, seeds, state
from hvdkit.keras.data import ShardedData, require_sharded, trained_on
from hvdkit.keras.optimizer import held_by, meant_by
from hvdkit.keras.schedule import Warmup
from hvdkit.keras.trainer.callbacks import Callback, broadcast_state
from hvdkit.keras.transport import TRANSPORT
from hvdkit.steps.checkpoint import Saved
from hvdkit.steps.lock import PATIENCE_S
from hvdkit.steps.manifest import require_stored
from hvdkit.steps.resume import ModelCheckpoints
from hvdkit.tf_shared import keras_sharded_files
from hvdkit.tf_shared.keras_optimizer import rates, set_rates, taking_part


class Checkpoints(ModelCheckpoints[Saved]):
    """Checkpoints that only the root writes and that every rank restores alike (step 6). In ``fit``: ``Checkpoint``.

    Every method is a collective: call it on all ranks. An error is raised on every rank, not on the root alone.
    The weights are a file for ``model.load_weights``, with or without hvdkit, on any backend.

    Args:
        directory: where they live, on a file system that the root can write.
        keep: how many of the newest stay.
        keep_best: how many with the highest scores stay beside them.
        wait: seconds to wait for another job that writes there, before an error; 2 for one that is just ending.
    """

    _warmup = Warmup
    _require_loader = staticmethod(require_sharded)
    _rates = staticmethod(rates)
    _set_rates = staticmethod(set_rates)
    _branch = staticmethod(seeds.branch)
    _broadcast = staticmethod(broadcast_state)

    def _is_started(self) -> bool:
        return state.is_started()

    def _all_ranks(self) -> Communicator:
        return TRANSPORT

    def _optimizers(self, model: Any, optimizer: Any) -> Any:
        meant = meant_by(optimizer, model) or None
        keras_sharded_files.prepare(meant, lambda: model.trainable_variables)
        return meant

    def _facts(self, optimizer: Any) -> dict[str, Any]:
        facts = {
            "hvdkit": __version__,
            "framework": "keras",
            "keras": keras.__version__,
            "backend": keras.backend.backend(),
            "seed": seeds.CURRENT.seed(),
        }
        return facts if optimizer is None else {**facts, "learning_rates": self._rates(optimizer)}

    def _write(self, directory: Path, model: Any, optimizer: Any) -> None:
        state.write_model(directory, model)
        if optimizer is not None:
            state.write_optimizers(directory / "optimizer.npz", optimizer, model)

    def _read(self, saved: Saved, model: Any, optimizer: Any, **options: Any) -> Callable[[], None]:  # noqa: ARG002
        directory = saved.path
        slots = state.read_optimizers(directory / "optimizer.npz", optimizer, model) if optimizer else []

        def put() -> None:
            state.read_model(directory, model)
            keras_sharded_files.assign(slots)

        return put

    def _write_own(self, optimizer: Any) -> Callable[[Path], Path] | None:
        return keras_sharded_files.writer(optimizer, self._ranks())

    def _read_own(self, saved: Saved, optimizer: Any) -> Callable[[], None]:
        slots = state.read_own_slots(saved.path / "optimizer.npz", optimizer)
        return lambda: keras_sharded_files.assign(slots)

    def _random_states(self, model: Any) -> Any:
        state.model_variables(model)
        return self._ranks().allgather(seeds.capture(model), "hvdkit.random_states")

    def _write_random(self, directory: Path, states: Any) -> None:
        np.savez(directory / "random.npz", *states)  # their lengths may differ

    def _read_random(self, directory: Path) -> Any:
        file = directory / "random.npz"
        if not file.exists():
            return None
        require_stored(file)
        try:
            with np.load(file, allow_pickle=False) as archive:
                return [archive[f"arr_{rank}"] for rank in range(len(archive.files))]
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error

    def _set_random_state(self, saved: Saved, model: Any, own: Any) -> None:
        if saved.metadata.get("backend") == keras.backend.backend():
            seeds.restore(model, own)


class Checkpoint(Callback):
    """Saves model and optimizers while ``fit`` trains, on the root, and resumes where the newest ended (step 6).

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
        monitor: the log whose value is the score, such as "val_accuracy".
        mode: "max" or "min": which values of ``monitor`` are better.
        wait: see ``Checkpoints``.
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
        wait: float = PATIENCE_S,
    ) -> None:
        super().__init__()
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise InvalidArgumentError(f"every must be None or an integer >= 1, got {every!r}.")
        if mode not in ("max", "min"):
            raise InvalidArgumentError(f"mode must be max or min, got {mode!r}.")
        if keep_best and monitor is None:
            raise InvalidArgumentError(f"keep_best={keep_best} needs monitor, the log that says which are the best.")
        self._checkpoints = Checkpoints(directory, keep, keep_best=keep_best, wait=wait)
        self._resume, self._every, self._monitor = resume, every, monitor
        self._sign = 1 if mode == "max" else -1
        self._epoch = self._last_batch = 0
        self.initial_epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        model, data = self.model, self._data()
        if self._every is not None and data is None:
            raise InvalidArgumentError(
                "Checkpoint(every=) needs data that can go on in mid-epoch: from hvdkit.keras.shard, without "
                "steps_per_epoch; give such data, or leave every out."
            )
        saved = self._checkpoints.restore(model, model.optimizer) if self._resume else None
        self.initial_epoch = int(saved.metadata.get("epoch", 0)) if saved is not None else 0
        position = saved.metadata.get("data") if saved is not None else None
        if data is not None and position is not None:
            data.load_state(position)
            # Too few samples may be left of an epoch for a step of more ranks.
            self.initial_epoch += data.position.epoch - position["epoch"]
        private.set_first_epoch(self.model, self.initial_epoch or None)

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002
        private.set_first_epoch(self.model, None)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        data = self._data()
        self._epoch, self._last_batch = epoch, (data.steps_done if data is not None else 0) - 1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Called by Keras, with steps_per_execution for several steps at once."""
        last, self._last_batch = self._last_batch, batch
        if self._every is None or (batch + 1) // self._every == (last + 1) // self._every:
            return
        steps = self.params["steps"]
        if self._data().goes_on() if steps is None else batch + 1 < steps:  # the epoch's end has a save of its own
            model = self.model
            if taking_part(held_by(model)) is None and state.world().size > 1:
                state.average_statistics(model.non_trainable_weights)
            self._save(self._epoch, None)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        score, logs = None, logs or {}
        if self._monitor is not None:
            if self._monitor not in logs:
                raise InvalidArgumentError(f"monitor must be one of the logs {', '.join(logs)}, got {self._monitor!r}.")
            score = self._sign * float(logs[self._monitor])
        self._save(epoch + 1, score)

    def _save(self, epoch: int, score: float | None) -> None:
        model = self.model
        step = max(int(state.number(one.iterations)) for one in held_by(model).values())
        self._checkpoints.save(model, model.optimizer, step=step, loader=self._data(), score=score, epoch=epoch)

    def _data(self) -> Any:
        """What ``fit`` trains on, where Keras' epochs are its passes."""
        data = trained_on(self.model)
        steps = len(data) if isinstance(data, ShardedData) else None
        return data if self.params["steps"] == steps else None
