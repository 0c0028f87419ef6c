"""What a checkpoint of a PyTorch training holds, and how it is put back; the inside of ``hvdkit.torch.Checkpoints``."""

from __future__ import annotations

import os
import pickle
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import horovod.torch as hvd
import numpy as np
import torch

from hvdkit import __version__, torch_seeds
from hvdkit.errors import CheckpointError, InvalidArgumentError
from hvdkit.steps import random_state
from hvdkit.steps.checkpoint import CheckpointDirectory, Saved, checked
from hvdkit.torch_loader import ShardedLoader
from hvdkit.torch_schedule import Warmup
from hvdkit.torch_state import HostCopies, on_root

_RANDOM = "random.npy"


class Store:
    """Saves and restores; every method is a collective.

    Args:
        directory, keep, keep_best: see ``CheckpointDirectory``.
        asynchronous: write in a thread while the training goes on.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int, keep_best: int, asynchronous: bool) -> None:
        self._directory = CheckpointDirectory(directory, keep, keep_best)
        self._writer = ThreadPoolExecutor(1, "hvdkit-checkpoint") if asynchronous else None
        self._writing: Future[Saved] | None = None
        self._copies = HostCopies()

    def save(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        step: int,
        loader: Any,
        score: float | None,
        metadata: dict[str, Any],
    ) -> Saved | None:
        states = _random_states()
        facts = {**_facts(optimizer, loader), **metadata}

        def write(directory: Path, model_state: Any, optimizer_state: Any) -> None:
            try:
                np.save(directory / _RANDOM, states, allow_pickle=False)
                torch.save(model_state, directory / "model.pt")
                if optimizer_state is not None:
                    torch.save(optimizer_state, directory / "optimizer.pt")
            except RuntimeError as error:  # PyTorch's writer turns a full disk into one
                raise OSError(str(error).splitlines()[0]) from error

        def on_disk(model_state: Any, optimizer_state: Any) -> Saved:
            return self._directory.save(step, lambda path: write(path, model_state, optimizer_state), facts, score)

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
        return cast("Saved | None", on_root(self._finish))

    def _finish(self) -> Saved | None:
        writing, self._writing = self._writing, None
        return writing.result() if writing is not None else None

    def read(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, which: str) -> Any:
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


def _facts(optimizer: torch.optim.Optimizer | None, loader: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "hvdkit": __version__,
        "framework": "torch",
        "torch": str(torch.__version__),
        "size": hvd.size(),
        "seed": torch_seeds.seed(),
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


def resume(saved: Saved, states: Any, optimizer: Any, loader: Any, schedule: Any, rates: list[float]) -> None:
    """Put a training on all ranks where the checkpoint was, also when their number is another one.

    Args:
        saved, states: from ``Store.read``.
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
        torch_seeds.branch(saved.step)


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
    torch_seeds.accept()


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
