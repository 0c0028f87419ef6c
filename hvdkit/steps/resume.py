"""Step 6 in every framework: what is saved beside the state, and how a training goes on, also on other ranks.

A framework binding's ``Checkpoints`` says how its framework's state is written, read and broadcast; all else is here.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from hvdkit.core import compression, listeners
from hvdkit.core.communicator import Alone, Communicator
from hvdkit.errors import CheckpointError, InvalidArgumentError
from hvdkit.steps import launchers, manifest, outer, passes, shard_state
from hvdkit.steps.checkpoint import CheckpointDirectory, Saved, checked
from hvdkit.steps.lock import PATIENCE_S

Written = TypeVar("Written")
Write = Callable[[Path], None]


class CheckpointsBase(ABC):
    """The part of a framework binding's ``Checkpoints`` that knows no framework, and not what a state is made of.

    Args:
        directory, keep, keep_best, wait: see ``CheckpointDirectory``.
    """

    def __init__(
        self, directory: str | os.PathLike[str], keep: int = 3, *, keep_best: int = 0, wait: float = PATIENCE_S
    ) -> None:
        self._directory = CheckpointDirectory(directory, keep, keep_best, wait=wait)

    def latest(self) -> Saved | None:
        """The newest valid checkpoint: its path, step, score and metadata; None when there is none. A collective.

        Raises:
            CheckpointError: there are checkpoints, but not one of them is valid.
        """
        found: Saved | None = self._ranks().on_root(self._directory.latest)
        return found

    def best(self) -> Saved | None:
        """The same of the valid checkpoint with the highest score; None when none has a score."""
        found: Saved | None = self._ranks().on_root(self._directory.best)
        return found

    def _ranks(self) -> Communicator:
        """Between whom the checkpoints are: this process alone where nothing was started, as for inference.

        Raises:
            InvalidArgumentError: a launcher started several ranks, and they are not connected yet.
        """
        if self._is_started():
            return self._all_ranks()
        launched = launchers.detect(os.environ)
        if launched is not None and launched.size != 1:
            raise InvalidArgumentError(
                f"{launched.launcher} started this process as rank {launched.rank}, and the ranks are not connected "
                "yet; call init() before Checkpoints are used."
            )
        return Alone()

    @abstractmethod
    def _is_started(self) -> bool:
        """Whether ``init`` was called."""

    @abstractmethod
    def _all_ranks(self) -> Communicator:
        """Between the ranks of the job, once it was."""

    @abstractmethod
    def _facts(self, optimizer: Any) -> dict[str, Any]:
        """Versions, the seed, and of an optimizer, where there is one, its learning rates."""

    @abstractmethod
    def _require_loader(self, loader: Any) -> Any:
        """The loader of ``shard``, or an InvalidArgumentError."""

    @abstractmethod
    def _random_states(self, model: Any) -> Any:
        """The states of all ranks' generators, by rank; a collective."""

    @abstractmethod
    def _write(self, directory: Path, model: Any, optimizer: Any) -> None:
        """On the root: write the state into files."""

    @abstractmethod
    def _read(self, saved: Saved, model: Any, optimizer: Any, **options: Any) -> Callable[[], Any]:
        """On the root: read what ``_write`` wrote, or raise CheckpointError. What is returned makes the state that.

        That may return attributes of ``Saved``. The options are a framework binding's own.
        """

    def _write_own(self, optimizer: Any) -> Callable[[Path], Path] | None:  # noqa: ARG002
        """What writes the state that this rank alone keeps (``shard_state=True``) into a file of a directory.

        It returns the file. None: every rank keeps the same.
        """
        return None

    def _read_own(self, saved: Saved, optimizer: Any) -> Callable[[], None]:
        """Where ``_write_own`` writes: read what of the state this rank keeps, or raise CheckpointError.

        What is returned puts it.
        """
        raise NotImplementedError

    def _read_extra(self, directory: Path) -> Any:  # noqa: ARG002
        """On the root: what was saved besides."""
        return {}

    def _broadcast_extra(self, extra: Any) -> Any:  # noqa: ARG002
        """The root's; a collective."""
        return {}

    @abstractmethod
    def _set_random_state(self, saved: Saved, model: Any, own: Any) -> None:
        """Draw the numbers that this rank would have drawn."""

    @abstractmethod
    def _branch(self, model: Any, step: int) -> None:
        """Draw other numbers than the training drew that was saved at ``step`` on another number of ranks."""

    def _write_random(self, directory: Path, states: Any) -> None:
        np.save(directory / "random.npy", states, allow_pickle=False)

    def _read_random(self, directory: Path) -> Any:
        """By rank; None where there is no file."""
        return read_arrays(directory / "random.npy")

    def _position(self, loader: Any) -> dict[str, Any]:
        return {} if loader is None else {"data": self._require_loader(loader).state()}

    def _put(self, on_disk: Callable[[Write], Saved], model: Any, optimizer: Any, *more: Any) -> Any:
        """On the root: have the state written, and what else a framework binding saves."""
        return on_disk(lambda directory: self._write(directory, model, optimizer, *more))

    @listeners.during("saving")
    def _save(
        self,
        model: Any,
        optimizer: Any,
        step: int,
        loader: Any,
        score: float | None,
        metadata: dict[str, Any],
        *more: Any,
    ) -> Any:
        """Collect what each rank has, and have the root write it all with the model, for which all ranks wait.

        An error is raised on every rank.
        """
        passes.wait_for_steps()
        of_outer_steps = outer.to_save()  # before anything else for which ranks wait that may be steps apart
        ranks = self._ranks()
        facts = {"size": ranks.size(), **self._facts(optimizer), **self._position(loader), **metadata}
        states, kept = self._random_states(model), compression.to_save(ranks)

        def require_valid() -> None:
            _require_free(metadata)
            checked(step, facts, score)
            self._directory.claim()  # a thread that writes would say it later

        write_own = self._write_own(optimizer)
        collected = None if write_own is None else self._collect(ranks, require_valid, write_own)

        def on_disk(write: Write) -> Saved:
            def write_all(directory: Path) -> None:
                if collected is not None:
                    for file in collected.iterdir():
                        file.rename(directory / file.name)
                    collected.rmdir()
                self._write_random(directory, states)
                for name, contents in ((_KEPT, kept), (_OUTER, of_outer_steps)):
                    if contents:
                        np.savez(directory / name, allow_pickle=False, **contents)
                write(directory)

            return self._directory.save(step, write_all, facts, score)

        def on_root() -> Any:
            require_valid()
            return self._put(on_disk, model, optimizer, *more)

        return ranks.on_root(on_root)

    def _collect(
        self, ranks: Communicator, require_valid: Callable[[], None], write_own: Callable[[Path], Path]
    ) -> Path:
        """Have every rank write the state that it alone keeps; returns where, beside the checkpoints."""

        def begin() -> str:
            require_valid()
            return str(self._directory.temporary().absolute())

        directory = Path(ranks.on_root(begin))

        def write() -> None:
            try:
                manifest.fsync(write_own(directory))
            except OSError as error:
                raise CheckpointError(
                    f"rank {ranks.rank()} could not write the state that it keeps into {directory.parent}: "
                    f"{error.strerror or error}; free some space (earlier checkpoints are intact)."
                ) from error

        try:
            shard_state.require_shared(ranks, str(directory), "writes")
            ranks.together(write)
        except BaseException:
            if ranks.rank() == 0:
                shutil.rmtree(directory, ignore_errors=True)
            raise
        return directory

    def _load(
        self, model: Any, optimizer: Any, which: str, loader: Any, schedule: Any = None, **options: Any
    ) -> tuple[Saved | None, Any]:
        """Make the root's state that of a checkpoint; on all ranks: what was found, and the ranks' random states.

        On whatever rank something does not fit, nothing is changed on any.
        """
        if which not in ("latest", "best"):
            raise InvalidArgumentError(f"which must be latest or best, got {which!r}.")
        ranks = self._ranks()
        held: dict[str, Any] = {}

        def read() -> tuple[Saved | None, Any]:
            if optimizer is not None or loader is not None:  # a training that goes on, and will save
                self._directory.claim()
            saved = self._directory.latest() if which == "latest" else self._directory.best()
            if saved is None:
                return None, None
            held.update(put=self._read(saved, model, optimizer, **options), extra=self._read_extra(saved.path))
            held.update(kept=read_arrays(saved.path / _KEPT), outer=read_arrays(saved.path / _OUTER))
            return saved, self._read_random(saved.path)

        saved, states = ranks.on_root(read)
        if saved is None:
            return None, None

        def require_fit() -> None:
            for one in several(schedule) or [None]:
                self._require_fit(saved, states, optimizer, loader, one)

        ranks.together(require_fit)
        put_own = None
        if self._write_own(optimizer) is not None:
            shard_state.require_shared(ranks, str(saved.path), "reads")
            put_own = ranks.together(lambda: self._read_own(saved, optimizer))
        found = ranks.on_root(lambda: held["put"]()) or {}
        if put_own is not None:
            put_own()
        if optimizer is not None:
            outer.restore(held.get("outer") or {})  # the root gives it to all when they begin
            compression.restore(ranks.on_root(lambda: held["kept"]) or {})  # after what kept some before is gone
        if optimizer is not None or loader is not None:
            listeners.restored(saved.step)
        return replace(saved, extra=self._broadcast_extra(held.get("extra")), **found), states

    def _require_fit(self, saved: Saved, states: Any, optimizer: Any, loader: Any, schedule: Any) -> None:  # noqa: ARG002
        """Raise CheckpointError or InvalidArgumentError where a checkpoint does not fit this rank; change nothing."""
        if loader is not None:
            data = saved.metadata.get("data")
            if not isinstance(data, dict):
                raise CheckpointError(
                    f"{saved.path} holds no position in the data; save with loader=, or restore without."
                )
            self._require_loader(loader).require_state(data)
        if states is not None and self._has_this_size(saved) and len(states) != self._ranks().size():
            raise CheckpointError(f"{saved.path} holds random states of {len(states)} ranks.")

    def _has_this_size(self, saved: Saved) -> bool:
        return bool(saved.metadata.get("size") == self._ranks().size())

    def _go_on_in_data(self, saved: Saved, loader: Any) -> None:
        passes.go_on_elsewhere()
        if loader is not None:
            loader.load_state(saved.metadata["data"])

    def _go_on_drawing(self, saved: Saved, states: Any, model: Any) -> None:
        if not self._has_this_size(saved):
            self._branch(model, saved.step)
        elif states is not None:
            self._set_random_state(saved, model, states[self._ranks().rank()])


_KEPT, _OUTER = "compression.npz", "outer.npz"


def read_arrays(file: Path) -> Any:
    """The array of a file of NumPy's, or those of an archive by name; None where there is no file."""
    try:
        if not file.exists():
            return None
        found = np.load(file, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return found
        with found:
            return dict(found)
    except (OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile) as error:  # a header can promise any size
        raise CheckpointError(f"{file} cannot be read: {error}") from error


_READ_BACK = ("backend", "data", "optimizer", "size")
"""What ``restore`` reads of a checkpoint's metadata."""


def _require_free(metadata: dict[str, Any]) -> None:
    taken = [name for name in _READ_BACK if name in metadata]
    if taken:
        raise InvalidArgumentError(
            f"metadata named {' and '.join(taken)} would replace what hvdkit saves by that name, and restore reads; "
            f"give it another name, such as my_{taken[0]}=."
        )


def several(schedule: Any) -> list[Any]:
    """The schedules of a caller: none, one or a list."""
    return list(schedule) if isinstance(schedule, (list, tuple)) else [] if schedule is None else [schedule]


class ModelCheckpoints(CheckpointsBase, Generic[Written]):
    """What ``Checkpoints`` is where a training is a model and an optimizer. ``Written`` is what ``save`` returns."""

    _warmup: Any
    """The class of what ``warmup`` returns."""

    @abstractmethod
    def _rates(self, optimizer: Any) -> list[float]:
        """An optimizer's learning rates, those that can be set."""

    def _built_rates(self, optimizer: Any) -> list[Any]:
        """What ``_set_rates`` takes: the rates of an optimizer before a checkpoint's come."""
        return self._rates(optimizer)

    @abstractmethod
    def _set_rates(self, optimizer: Any, rates: list[Any]) -> None:
        """Set what ``_built_rates`` returned, where the checkpoint is that of another number of ranks."""

    def _optimizers(self, model: Any, optimizer: Any) -> Any:  # noqa: ARG002
        """What the caller's ``optimizer`` stands for, in the terms of all other methods; None for none."""
        return optimizer

    @abstractmethod
    def _broadcast(self, model: Any, optimizer: Any) -> None:
        """Give every rank the root's state; a collective."""

    def _require_fit(self, saved: Saved, states: Any, optimizer: Any, loader: Any, schedule: Any) -> None:
        super()._require_fit(saved, states, optimizer, loader, schedule)
        self._require_warmup(schedule, loader)

    def _require_warmup(self, schedule: Any, loader: Any) -> None:
        for one in several(schedule):
            if not isinstance(one, self._warmup) or loader is None:
                found = f"{type(one).__name__}{'' if loader is not None else ' without loader='}"
                raise InvalidArgumentError(
                    f"schedule must be from warmup, and needs the loader, which says how far it is; got {found}. In "
                    "PyTorch save the state of another in extra={'schedule': schedule.state_dict()}."
                )

    def save(
        self,
        model: Any,
        optimizer: Any | None = None,
        *,
        step: int,
        loader: Any = None,
        schedule: Any = None,
        score: float | None = None,
        **metadata: Any,
    ) -> Written:
        """Write model, optimizer and the ranks' random states as the checkpoint of ``step``.

        Args:
            model, optimizer: as for ``broadcast_state``.
            step: optimizer steps completed.
            loader: from ``shard``; its position, counted in samples, is saved too.
            schedule: from ``warmup``, or a list of such: the loader's position says where they are.
            score: how good it is, the higher the better, for ``keep_best`` and ``restore(which="best")``.
            metadata: JSON values to find again in ``Saved.metadata``, for example ``accuracy=0.93``.
        Returns:
            The checkpoint, complete on disk; None when it is written asynchronously.
        Raises:
            InvalidArgumentError: a bad step or score, metadata that is not JSON, or a model that is not built; with
                TensorFlow also a call inside ``tf.function``, or a loader whose position is unknown because it was
                iterated there or behind ``.map()``.
            CheckpointError: it, or the asynchronous one before, could not be written, or another job writes into the
                directory; earlier ones are intact.
        """
        optimizer = self._optimizers(model, optimizer)
        self._require_warmup(schedule, loader)
        written: Written = self._save(model, optimizer, step, loader, score, metadata)
        return written

    def restore(
        self,
        model: Any,
        optimizer: Any | None = None,
        *,
        loader: Any = None,
        schedule: Any = None,
        which: str = "latest",
    ) -> Saved | None:
        """Load a valid checkpoint on the root and broadcast it; None, and nothing changed, when there is none.

        With an optimizer or a loader it is a training that goes on: then no other job may write into the directory.

        Whether it fits (the model, optimizer, loader, schedule and random states of every rank) is checked before
        anything is changed.

        The number of ranks may be another one than when it was saved: the loader goes on at the same sample of the
        same order, the schedule at the same sample of its warmup, and the optimizer keeps the learning rates that it
        was made with. On as many ranks as before everything continues bit for bit (on CPUs), random numbers included;
        only TensorFlow's ``tf.random`` operations inside a ``tf.function``, whose count cannot be read, begin anew.

        Args:
            loader: from ``shard``, over the same data in the same order; goes on where it was. In Keras that is the
                next ``fit``, with ``initial_epoch=loader.epoch``, or the next loop over it.
            schedule: from ``warmup``, or a list of such; needs the loader. In Keras only for loops of your own: ``fit``
                sees to it.
            which: "latest" or "best" (the highest score).
        Returns:
            Where it was, its step, metadata and (PyTorch) extra, and which newer ones were skipped and why.
        Raises:
            CheckpointError: checkpoints exist but none is valid, it belongs to another model, optimizer or data, or
                another job writes into the directory.
            InvalidArgumentError: a loader or schedule that is not hvdkit's, an unknown ``which``, or with TensorFlow a
                call inside ``tf.function``.
            AgreementError: it does not fit on another rank.
        """
        return self._restore(model, optimizer, loader, schedule, which)

    def _restore(
        self, model: Any, optimizer: Any, loader: Any, schedule: Any, which: str, **options: Any
    ) -> Saved | None:
        optimizer = self._optimizers(model, optimizer)
        built = [] if optimizer is None else self._built_rates(optimizer)  # those for this number of ranks
        saved, states = self._load(model, optimizer, which, loader, schedule, **options)
        if saved is None:
            return None
        if self._is_started():
            self._broadcast(model, optimizer)
        if optimizer is not None and not self._has_this_size(saved):
            self._set_rates(optimizer, built)
        self._go_on_in_data(saved, loader)
        for one in several(schedule):
            one.go_to(loader.position.steps(loader.share))
        if optimizer is not None:
            self._go_on_drawing(saved, states, model)
        return saved
