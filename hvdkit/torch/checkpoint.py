"""Checkpoints of a PyTorch training (step 6): what they hold, and how it is put back."""

from __future__ import annotations

import os
import pickle
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import horovod.torch as hvd
import numpy as np
import torch

from hvdkit import __version__
from hvdkit.errors import CheckpointError, InvalidArgumentError
from hvdkit.steps import random_state
from hvdkit.steps.checkpoint import CheckpointDirectory, Saved, checked
from hvdkit.torch import seeds
from hvdkit.torch.data import ShardedLoader
from hvdkit.torch.schedule import Warmup
from hvdkit.torch.state import HostCopies, broadcast, on_root

_RANDOM = "random.npy"


class Checkpoints:
    """Checkpoints that only the root writes and that every rank restores alike (step 6).

    Every method is a collective: call it on all ranks. An error is raised on every rank, not on the root alone.

    Args:
        directory: where they live, on a file system that the root can write.
        keep: how many of the newest stay.
        keep_best: how many with the highest scores stay beside them.
        asynchronous: write while the training goes on: ``save`` then only copies the state to the host's memory and
            returns None; the write is complete, or its error raised, at the next ``save`` or ``wait``.
    """

    def __init__(
        self, directory: str | os.PathLike[str], keep: int = 3, *, keep_best: int = 0, asynchronous: bool = False
    ) -> None:
        self._directory = CheckpointDirectory(directory, keep, keep_best)
        self._writer = ThreadPoolExecutor(1, "hvdkit-checkpoint") if asynchronous else None
        self._writing: Future[Saved] | None = None
        self._copies = HostCopies()

    def save(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        step: int,
        loader: Any = None,
        score: float | None = None,
        **metadata: Any,
    ) -> Saved | None:
        """Write model, optimizer and the ranks' random states as the checkpoint of ``step``.

        Args:
            step: optimizer steps completed.
            loader: from ``shard``; its position, counted in samples, is saved too.
            score: how good it is, the higher the better, for ``keep_best`` and ``restore(which="best")``.
            metadata: JSON values to find again in ``Saved.metadata``, for example ``accuracy=0.93``.
        Returns:
            The checkpoint, complete on disk; None when it is written asynchronously.
        Raises:
            InvalidArgumentError: a bad step or score, or metadata that is not JSON.
            CheckpointError: it, or the asynchronous one before, could not be written; earlier ones are intact.
        """
        states = _random_states()
        facts = {**_facts(optimizer, loader), **metadata}

        def on_disk(model_state: Any, optimizer_state: Any) -> Saved:
            write = partial(_write, states=states, model_state=model_state, optimizer_state=optimizer_state)
            return self._directory.save(step, write, facts, score)

        def start() -> Saved | None:
            checked(step, facts, score)
            state = model.state_dict(), None if optimizer is None else optimizer.state_dict()
            if self._writer is None:
                return on_disk(*state)
            self._finish()
            self._writing = self._writer.submit(on_disk, *(self._copies.of(f"{i}", one) for i, one in enumerate(state)))
            return None

        return cast("Saved | None", on_root(start))

    def wait(self) -> Saved | None:
        """Wait until the asynchronous write is on disk, and return what was written; None when there was none.

        Raises:
            CheckpointError: it could not be written.
        """
        return cast("Saved | None", on_root(self._finish))

    def _finish(self) -> Saved | None:
        writing, self._writing = self._writing, None
        return writing.result() if writing is not None else None

    def restore(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        loader: Any = None,
        schedule: Any = None,
        which: str = "latest",
    ) -> Saved | None:
        """Load a valid checkpoint on the root and broadcast it; None, and nothing changed, when there is none.

        The number of ranks may be another one than when it was saved: the loader goes on at the same sample of the
        same order, the schedule at the same sample of its warmup, and the optimizer keeps the learning rates that it
        was made with. On as many ranks as before everything continues bit for bit (on CPUs), random numbers included.

        Args:
            loader: from ``shard``, over the same data with the same seed; goes on where it was.
            schedule: from ``warmup``; needs the loader.
            which: "latest" or "best" (the highest score).
        Returns:
            Where it was, its step and metadata, and which newer ones were skipped and why.
        Raises:
            CheckpointError: checkpoints exist but none is valid, or it belongs to another model, optimizer or data.
            InvalidArgumentError: a loader or schedule that is not hvdkit's, or an unknown ``which``.
        """
        rates = [] if optimizer is None else [group["lr"] for group in optimizer.param_groups]
        saved, states = self._read(model, optimizer, which)
        if saved is not None:
            broadcast(model, optimizer)
            _resume(saved, states, optimizer, loader, schedule, rates)
        return cast("Saved | None", saved)

    def _read(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, which: str) -> Any:
        """On the root: load the files; on all ranks: what was found, and the ranks' random states."""
        if which not in ("latest", "best"):
            raise InvalidArgumentError(f"which must be latest or best, got {which!r}.")
        self.wait()

        def load() -> Any:
            saved = self._directory.latest() if which == "latest" else self._directory.best()
            if saved is None:
                return None, None
            _load_into(saved.path / "model.pt", model)
            if optimizer is not None:
                _load_into(saved.path / "optimizer.pt", optimizer)
            return saved, _read_random(saved.path / _RANDOM)

        return on_root(load)


def _write(directory: Path, states: Any, model_state: Any, optimizer_state: Any) -> None:
    try:
        np.save(directory / _RANDOM, states, allow_pickle=False)
        torch.save(model_state, directory / "model.pt")
        if optimizer_state is not None:
            torch.save(optimizer_state, directory / "optimizer.pt")
    except RuntimeError as error:  # PyTorch's writer turns a full disk into one
        raise OSError(str(error).splitlines()[0]) from error


def _facts(optimizer: torch.optim.Optimizer | None, loader: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "hvdkit": __version__,
        "framework": "torch",
        "torch": str(torch.__version__),
        "size": hvd.size(),
        "seed": seeds.seed(),
    }
    if optimizer is not None:
        facts["learning_rates"] = [float(group["lr"]) for group in optimizer.param_groups]
    if loader is not None:
        facts["data"] = require_loader(loader).state()
    return facts


def require_loader(loader: Any) -> ShardedLoader:
    """The loader of ``shard``.

    Raises:
        InvalidArgumentError: something else; a stream of unknown length has no position.
    """
    if not isinstance(loader, ShardedLoader):
        raise InvalidArgumentError(
            f"loader must be what shard made of a map-style data set, got {type(loader).__name__}."
        )
    return loader


def _resume(saved: Saved, states: Any, optimizer: Any, loader: Any, schedule: Any, rates: list[float]) -> None:
    """Put a training on all ranks where the checkpoint was, also when their number is another one.

    Args:
        saved, states: from ``Checkpoints._read``.
        rates: the learning rates that the optimizer was made with for this number of ranks.
    """
    same_size = saved.metadata.get("size") == hvd.size()
    if optimizer is not None and not same_size:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    if loader is not None:
        data = saved.metadata.get("data")
        if data is None:
            raise CheckpointError(f"{saved.path} holds no position in the data; save with loader=, or restore without.")
        require_loader(loader).load_state(data)
    if schedule is not None:
        if not isinstance(schedule, Warmup) or loader is None:
            raise InvalidArgumentError("schedule must be from warmup, and needs the loader, which says how far it is.")
        schedule.go_to(loader.position.steps(loader.share))
    if optimizer is not None and states is not None and same_size:
        _set_random_state(states[hvd.rank()])
    elif optimizer is not None and not same_size:
        seeds.branch(saved.step)


def _random_states() -> Any:
    """The states of all ranks' generators, uint8 (size, length); a collective."""
    parts = [torch.from_numpy(random_state.capture()), torch.get_rng_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        parts.append(torch.cuda.get_rng_state())
    return hvd.allgather(torch.cat(parts).unsqueeze(0), name="hvdkit.random_states").numpy()


def _set_random_state(state: Any) -> None:
    python_and_numpy, rest = np.split(state, [random_state.BYTES])
    cpu, cuda = np.split(rest, [torch.get_rng_state().numel()])
    random_state.restore(python_and_numpy)
    torch.set_rng_state(torch.from_numpy(cpu.copy()))
    if len(cuda) and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state(torch.from_numpy(cuda.copy()))
    seeds.accept()


def _read_random(file: Path) -> Any:
    try:
        return np.load(file, allow_pickle=False) if file.exists() else None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _load_into(file: Path, target: torch.nn.Module | torch.optim.Optimizer) -> None:
    try:
        target.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    except (RuntimeError, ValueError, KeyError, OSError, pickle.UnpicklingError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{file} does not fit this {type(target).__name__}: {reason}") from error
