"""Checkpoints of a PyTorch training (step 6): what they hold, and how it is put back."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import horovod.torch as hvd
import numpy as np
import torch

from hvdkit import __version__
from hvdkit.core.communicator import Communicator
from hvdkit.errors import CheckpointError, InvalidArgumentError
from hvdkit.steps import shard_state
from hvdkit.steps.checkpoint import Saved
from hvdkit.steps.lock import PATIENCE_S
from hvdkit.steps.manifest import require_stored
from hvdkit.steps.resume import ModelCheckpoints, Write
from hvdkit.steps.seeds import STATE_BYTES, capture_state, restore_state
from hvdkit.torch import seeds, sharded, state
from hvdkit.torch.data import require_sharded
from hvdkit.torch.schedule import Warmup, set_rate

_CUDA_STATE = 16  # bytes of a GPU's generator
_TRAINABLE = "trainable_only"  # in the manifest
_UNFIT = (RuntimeError, ValueError, LookupError, OSError, EOFError, TypeError, AttributeError, pickle.UnpicklingError)


class Checkpoints(ModelCheckpoints["Saved | None"]):
    """Checkpoints that only the root writes and that every rank restores alike (step 6).

    Every method is a collective: call it on all ranks. An error is raised on every rank, not on the root alone.

    Args:
        directory: where they live, on a file system that the root can write.
        keep: how many of the newest stay.
        keep_best: how many with the highest scores stay beside them.
        wait: seconds to wait for another job that writes there, before an error; 2 for one that is just ending.
        asynchronous: write while the training goes on: ``save`` then only copies the state to the host's memory and
            returns None; the write is complete, or its error raised, at the next ``save`` or ``wait``.
    """

    _warmup = Warmup
    _require_loader = staticmethod(require_sharded)
    _broadcast = staticmethod(state.broadcast)

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int = 3,
        *,
        keep_best: int = 0,
        wait: float = PATIENCE_S,
        asynchronous: bool = False,
    ) -> None:
        super().__init__(directory, keep, keep_best=keep_best, wait=wait)
        self._writer = ThreadPoolExecutor(1, "hvdkit-checkpoint") if asynchronous else None
        self._writing: Future[Saved] | None = None
        self._copies = state.HostCopies()

    def save(
        self,
        model: Any,
        optimizer: Any | None = None,
        *,
        step: int,
        loader: Any = None,
        schedule: Any = None,
        score: float | None = None,
        extra: dict[str, Any] | None = None,
        trainable_only: bool = False,
        **metadata: Any,
    ) -> Saved | None:
        """Write model, optimizer and the ranks' random states as the checkpoint of ``step``.

        Args:
            model, optimizer: as for ``broadcast_state``. Names are those of the model before it is compiled.
            step: optimizer steps completed.
            loader: from ``shard``; its position, counted in samples, is saved too.
            schedule: from ``warmup``, or a list of such: the loader's position says where they are.
            score: how good it is, the higher the better, for ``keep_best`` and ``restore(which="best")``.
            extra: what else to save, the root's, by name: ``{"ema": ema.state_dict(), "scaler": scaler.state_dict()}``.
                Tensors, numbers (inf and nan, too) and strings in dicts, lists and tuples, to find again in
                ``Saved.extra`` of ``restore``, on every rank.
            trainable_only: of the model save what training changes: parameters with ``requires_grad``, such as those of
                adapters (LoRA), and persistent buffers.
            metadata: JSON values to find again in ``Saved.metadata``, for example ``accuracy=0.93``.
        Returns:
            The checkpoint, complete on disk; None when it is written asynchronously.
        Raises:
            InvalidArgumentError: a bad step or score, metadata that is not JSON, an extra that is not of such values,
                several models or optimizers, or a model that is not built.
            CheckpointError: it, or the asynchronous one before, could not be written, or another job writes into the
                directory; earlier ones are intact.
        """
        optimizer = self._optimizers(model, optimizer)
        self._require_warmup(schedule, loader)
        if trainable_only:
            metadata = {**metadata, _TRAINABLE: True}
        written: Saved | None = self._save(model, optimizer, step, loader, score, metadata, (extra, trainable_only))
        return written

    def restore(
        self,
        model: Any,
        optimizer: Any | None = None,
        *,
        loader: Any = None,
        schedule: Any = None,
        which: str = "latest",
        strict: bool = True,
        trainable_only: bool = False,
    ) -> Saved | None:
        """Load a valid checkpoint on the root and broadcast it; None, and nothing changed, when there is none.

        With an optimizer or a loader it is a training that goes on: then no other job may write into the directory.
        Whether it fits on every rank is checked before anything is changed. The number of ranks may be another one than
        when it was saved: the loader goes on at the same sample of the same order, the schedule at the same sample of
        its warmup, and the optimizer keeps the learning rates that it was made with. On as many ranks as before
        everything continues bit for bit (on CPUs), random numbers included.

        Args:
            model: compiled, in a DistributedDataParallel, or neither, whatever it was when it was saved.
            optimizer: takes over its whole state; None restores the model alone.
            loader: from ``shard``, over the same data in the same order; goes on where it was.
            schedule: from ``warmup``, or a list of such; needs the loader.
            which: "latest" or "best" (the highest score).
            strict: False loads what has the same name and shape in both, and names the rest in ``Saved.missing`` and
                ``Saved.unexpected``; without optimizer, whose state belongs to all parameters.
            trainable_only: load only what ``save(trainable_only=True)`` would save of this model, and leave the rest.
        Returns:
            Where it was, its step, metadata and extra, and which newer ones were skipped and why.
        Raises:
            CheckpointError: checkpoints exist but none is valid, it belongs to another model, optimizer or data, types
                differ (a model in bfloat16 does not take float32), or another job writes into the directory.
            InvalidArgumentError: a loader or schedule that is not hvdkit's, an unknown ``which``, or ``strict=False``
                with an optimizer.
            AgreementError: it does not fit on another rank.
        """
        if not strict and optimizer is not None:
            raise InvalidArgumentError(
                "strict=False restores a part of a model, and an optimizer's state belongs to all of it; leave the "
                "optimizer out."
            )
        return self._restore(model, optimizer, loader, schedule, which, strict=strict, trainable_only=trainable_only)

    def wait(self) -> Saved | None:
        """Wait until the asynchronous write is on disk, and return what was written; None when there was none.

        Raises:
            CheckpointError: it could not be written.
        """
        return cast("Saved | None", self._ranks().on_root(self._finish))

    def _finish(self) -> Saved | None:
        writing, self._writing = self._writing, None
        return writing.result() if writing is not None else None

    def _optimizers(self, model: Any, optimizer: Any) -> Any:
        state.require_torch(model, optimizer)
        return optimizer

    def _is_started(self) -> bool:
        return bool(hvd.is_initialized())

    def _all_ranks(self) -> Communicator:
        return state.RANKS

    def _facts(self, optimizer: Any) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "hvdkit": __version__,
            "framework": "torch",
            "torch": str(torch.__version__),
            "seed": seeds.CURRENT.seed(),
        }
        if optimizer is None:
            return facts
        return {**facts, "optimizer": type(optimizer).__name__, "learning_rates": self._rates(optimizer)}

    def _rates(self, optimizer: Any) -> list[float]:
        return [float(group["lr"]) for group in optimizer.param_groups]

    def _built_rates(self, optimizer: Any) -> list[tuple[float, float | None]]:
        """Of each group the rate, and the one that a scheduler of PyTorch began with, None without a scheduler."""
        groups = optimizer.param_groups
        return list(zip(self._rates(optimizer), [group.get("initial_lr") for group in groups], strict=True))

    def _set_rates(self, optimizer: Any, rates: list[tuple[float, float | None]]) -> None:
        """The rates that were built; a scheduler's are where they were, as a part of the one that it began with."""
        for group, (rate, initial) in zip(optimizer.param_groups, rates, strict=True):
            began = group.get("initial_lr")
            if initial is not None and began:
                rate = float(group["lr"]) / float(began) * float(initial)
                group["initial_lr"] = initial
            set_rate(group, rate)

    def _put(self, on_disk: Callable[[Write], Saved], model: Any, optimizer: Any, *more: Any) -> Saved | None:
        ((extra, trainable_only),) = more
        if extra is not None and not isinstance(extra, dict):
            raise InvalidArgumentError(f"extra must be a dict of what to save by name, got {type(extra).__name__}.")
        slots = None if optimizer is None else state.state_of(optimizer)
        states = state.model_state(model, trainable_only), slots, extra
        if self._writer is None:
            written: Saved = super()._put(on_disk, *(state.rebuilt(one, state.plain_number) for one in states))
            return written
        self._finish()
        copies = (self._copies.of(f"{number}", one) for number, one in enumerate(states))
        self._writing = self._writer.submit(super()._put, on_disk, *copies)
        return None

    def _write(self, directory: Path, model: Any, optimizer: Any, extra: Any = None) -> None:
        """Write the state dicts of model and optimizer, and what else is to be saved."""
        for name, contents in (("model", model), ("optimizer", optimizer), ("extra", extra)):
            if contents is not None:
                _write_readable(directory / f"{name}.pt", contents)

    def _load(self, model: Any, optimizer: Any, *arguments: Any, **options: Any) -> tuple[Saved | None, Any]:
        self.wait()
        if self._is_started():
            state.require_same_training(model, optimizer)
        return super()._load(model, optimizer, *arguments, **options)

    def _read(self, saved: Saved, model: Any, optimizer: Any, **options: Any) -> Callable[[], dict[str, Any]]:
        """Read both state dicts. Where putting them fails, the model is as before; see ``_of_this_model``."""
        file, other_file = saved.path / "model.pt", saved.path / sharded.FILE
        partly = saved.metadata.get(_TRAINABLE) is True
        contents, left = _of_this_model(file, _read_file(file, model), model, partly, **options)
        slots: Any = None if optimizer is None else _read_file(other_file, optimizer)
        if hasattr(optimizer, state.SHARDED):
            slots = {**slots, "state": {}}  # each rank reads its own
        elif optimizer is not None and shard_state.files_in(saved.path, sharded.FILE):
            whole = self._saved_state(saved, optimizer).whole(state.parameters_of(optimizer))
            slots = {**slots, "state": whole}

        def put() -> dict[str, Any]:
            before = state.HostCopies().of("", state.model_state(model))
            try:
                with _fitting(file, model):
                    state.load_model(model, contents, strict=False)
                if slots is not None:
                    with _fitting(other_file, optimizer):
                        state.load_optimizer(optimizer, slots)
            except BaseException:
                state.load_model(model, before)
                raise
            return left

        return put

    def _write_own(self, optimizer: Any) -> Callable[[Path], Path] | None:
        divided = getattr(optimizer, state.SHARDED, None)
        if divided is None:
            return None
        self.wait()  # its end removes what was begun

        def write(directory: Path) -> Path:
            ranks = self._ranks()
            file = directory / shard_state.file_of(sharded.FILE, ranks.rank(), ranks.size())
            _write_readable(file, divided.own_state(optimizer))
            return file

        return write

    def _read_own(self, saved: Saved, optimizer: Any) -> Callable[[], None]:
        divided: sharded.ShardedOptimizer = getattr(optimizer, state.SHARDED)
        return divided.loading(optimizer, self._saved_state(saved, optimizer))

    def _saved_state(self, saved: Saved, optimizer: Any) -> sharded.SavedState:
        return sharded.saved_state(saved.path, lambda file: _read_file(file, optimizer, mmap=True))

    def _read_extra(self, directory: Path) -> Any:
        file = directory / "extra.pt"
        return _read_file(file, {}) if file.exists() else {}

    def _broadcast_extra(self, extra: Any) -> Any:
        return state.broadcast_nested(extra, 0, "hvdkit.checkpoint_extra") if self._is_started() else extra

    def _require_fit(self, saved: Saved, states: Any, optimizer: Any, loader: Any, schedule: Any) -> None:
        super()._require_fit(saved, states, optimizer, loader, schedule)
        if schedule is not None and len(schedule.base_lrs) != len(schedule.optimizer.param_groups):
            raise InvalidArgumentError(
                f"the schedule knows {len(schedule.base_lrs)} parameter groups, its optimizer has "
                f"{len(schedule.optimizer.param_groups)}; make it after the last add_param_group."
            )
        if optimizer is None:
            return
        theirs, mine = saved.metadata.get("optimizer"), type(optimizer).__name__
        if theirs not in (None, mine):
            raise CheckpointError(
                f"{saved.path} holds the state of {theirs}, this optimizer is {mine}; restore into the same, or "
                "without the optimizer."
            )
        if states is not None and self._has_this_size(saved):
            usual = STATE_BYTES + torch.get_rng_state().numel()
            if len(states[self._ranks().rank()]) - usual not in (0, _CUDA_STATE):
                raise CheckpointError(f"{saved.path} holds random states of another PyTorch.")

    def _random_states(self, model: Any) -> Any:  # noqa: ARG002
        """uint8 (size, length)."""
        parts = [torch.from_numpy(capture_state()), torch.get_rng_state()]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            parts.append(torch.cuda.get_rng_state())
        return np.stack(self._ranks().allgather(torch.cat(parts).numpy(), "hvdkit.random_states"))

    def _set_random_state(self, saved: Saved, model: Any, own: Any) -> None:  # noqa: ARG002
        python_and_numpy, rest = np.split(own, [STATE_BYTES])
        cpu, cuda = np.split(rest, [torch.get_rng_state().numel()])
        restore_state(python_and_numpy)
        torch.set_rng_state(torch.from_numpy(cpu.copy()))
        if len(cuda) and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.set_rng_state(torch.from_numpy(cuda.copy()))
        seeds.accept()

    def _branch(self, model: Any, step: int) -> None:  # noqa: ARG002
        seeds.branch(step)


def _write_readable(file: Path, contents: Any) -> None:
    """Write what ``_read_file`` will be able to read."""
    try:
        with file.open("wb") as opened:  # Python's own file says what went wrong, PyTorch's "unexpected pos"
            torch.save(contents, opened)
        with contextlib.suppress(RuntimeError, OSError):  # where files cannot be mapped
            torch.load(str(file), map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:  # PyTorch's writer ends with one of its own
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        raise cause or OSError(str(error).splitlines()[0]) from error
    except (pickle.PickleError, AttributeError, TypeError) as error:
        reason = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
        raise InvalidArgumentError(
            f"{file.stem} holds what cannot be saved and read again: {reason.splitlines()[0]}; give tensors, numbers, "
            "strings, and dicts, lists and tuples of them."
        ) from error


def _read_file(file: Path, target: Any, *, mmap: bool = False) -> Any:
    """The state dict in a file; with ``mmap`` tensors are read when they are used."""
    require_stored(file)
    with _fitting(file, target):
        return torch.load(str(file), map_location="cpu", weights_only=True, mmap=mmap)


def _of_this_model(
    file: Path, saved: dict[str, Any], model: Any, partly: bool, strict: bool, trainable_only: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What of a saved model is to be loaded, and the attributes of ``Saved`` that name what is not.

    Where ``partly`` it was saved with ``trainable_only``.
    """
    if not isinstance(saved, dict):
        raise CheckpointError(f"{file} holds no state dict.")
    kind = type(model).__name__
    mine, current = state.bare_names(model.state_dict()), model.state_dict()
    theirs = state.bare_names(saved)
    wanted = state.trained_names(model) if trainable_only else mine.keys()
    if partly and strict and not trainable_only and wanted - theirs.keys():
        raise CheckpointError(
            f"{file} holds what was trained alone (trainable_only); restore(trainable_only=True) leaves the rest of "
            f"this {kind} as it is."
        )
    other = {name for name in wanted & theirs.keys() if _shape(current[mine[name]]) != _shape(saved[theirs[name]])}
    missing = sorted((wanted - theirs.keys()) | other)
    unexpected = sorted((theirs.keys() - (mine.keys() if trainable_only and not partly else wanted)) | other)
    loaded = [name for name in theirs if name in wanted and name not in other]
    if strict and (missing or unexpected):
        shapes = [f"{one} is {_shape(saved[theirs[one]])}, not {_shape(current[mine[one]])}" for one in sorted(other)]
        lacks = [f"it lacks {one}" for one in missing if one not in other]
        alone = [f"it holds {one}, which the model has not" for one in unexpected if one not in other]
        said = [*shapes, *lacks, *alone]
        raise CheckpointError(
            f"{file} does not fit this {kind}: {'; '.join(said[:3])}{'; ...' if len(said) > 3 else ''} ({len(said)} in "
            "all). restore(strict=False) without optimizer loads what fits, and names the rest."
        )
    if not loaded:
        raise CheckpointError(f"{file} does not fit this {kind}: no name and shape is in both.")
    for name in loaded:
        here, there = (getattr(one, "dtype", None) for one in (current[mine[name]], saved[theirs[name]]))
        if here != there:
            raise CheckpointError(
                f"{file} does not fit this {kind}: {name} is {_typed(there)}, the model has {_typed(here)}; restore "
                f"into a model of {_typed(there)}, and convert it then (model.to({here}))."
            )
    kept = type(saved)((full, value) for full, value in saved.items() if full in {theirs[name] for name in loaded})
    if hasattr(saved, "_metadata"):
        kept._metadata = saved._metadata  # type: ignore[attr-defined]
    return kept, {} if strict else {"missing": tuple(missing), "unexpected": tuple(unexpected)}


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _typed(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def _fitting(file: Path, target: Any) -> Iterator[None]:
    try:
        yield
    except _UNFIT as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{file} does not fit this {type(target).__name__}: {reason}") from error
