"""Checkpoints of a PyTorch training (step 6): what they hold, and how it is put back."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import horovod.torch as hvd
import numpy as np
import torch

from hvdkit import __version__
from hvdkit.errors import CheckpointError
from hvdkit.steps import random_state
from hvdkit.steps.checkpoint import Saved
from hvdkit.steps.collectives import Collectives
from hvdkit.steps.resume import ModelCheckpoints, Write
from hvdkit.torch import seeds
from hvdkit.torch.data import require_sharded
from hvdkit.torch.schedule import Warmup
from hvdkit.torch.state import RANKS, HostCopies, broadcast


class Checkpoints(ModelCheckpoints["Saved | None"]):
    """Checkpoints that only the root writes and that every rank restores alike (step 6).

    Every method is a collective: call it on all ranks. An error is raised on every rank, not on the root alone.

    Args:
        directory: where they live, on a file system that the root can write.
        keep: how many of the newest stay.
        keep_best: how many with the highest scores stay beside them.
        asynchronous: write while the training goes on: ``save`` then only copies the state to the host's memory and
            returns None; the write is complete, or its error raised, at the next ``save`` or ``wait``.
    """

    _warmup = Warmup
    _require_loader = staticmethod(require_sharded)
    _broadcast = staticmethod(broadcast)

    def __init__(
        self, directory: str | os.PathLike[str], keep: int = 3, *, keep_best: int = 0, asynchronous: bool = False
    ) -> None:
        super().__init__(directory, keep, keep_best=keep_best)
        self._writer = ThreadPoolExecutor(1, "hvdkit-checkpoint") if asynchronous else None
        self._writing: Future[Saved] | None = None
        self._copies = HostCopies()

    def wait(self) -> Saved | None:
        """Wait until the asynchronous write is on disk, and return what was written; None when there was none.

        Raises:
            CheckpointError: it could not be written.
        """
        return cast("Saved | None", RANKS.on_root(self._finish))

    def _finish(self) -> Saved | None:
        writing, self._writing = self._writing, None
        return writing.result() if writing is not None else None

    def _ranks(self) -> Collectives:
        return RANKS

    def _facts(self, optimizer: Any) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "hvdkit": __version__,
            "framework": "torch",
            "torch": str(torch.__version__),
            "seed": seeds.CURRENT.seed(),
        }
        return (
            facts
            if optimizer is None
            else {**facts, "learning_rates": [float(rate) for rate in self._rates(optimizer)]}
        )

    def _rates(self, optimizer: Any) -> list[float]:
        return [group["lr"] for group in optimizer.param_groups]

    def _set_rates(self, optimizer: Any, rates: list[float]) -> None:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _put(self, on_disk: Callable[[Write], Saved], model: Any, optimizer: Any) -> Saved | None:
        states = model.state_dict(), None if optimizer is None else optimizer.state_dict()
        if self._writer is None:
            written: Saved = super()._put(on_disk, *states)
            return written
        self._finish()
        copies = (self._copies.of(f"{number}", one) for number, one in enumerate(states))
        self._writing = self._writer.submit(super()._put, on_disk, *copies)
        return None

    def _write(self, directory: Path, model: Any, optimizer: Any) -> None:
        """Write the state dicts of model and optimizer."""
        try:
            torch.save(model, directory / "model.pt")
            if optimizer is not None:
                torch.save(optimizer, directory / "optimizer.pt")
        except RuntimeError as error:  # PyTorch's writer turns a full disk into one
            raise OSError(str(error).splitlines()[0]) from error

    def _load(self, model: Any, optimizer: Any, which: str) -> tuple[Saved | None, Any]:
        self.wait()
        return super()._load(model, optimizer, which)

    def _read(self, directory: Path, model: Any, optimizer: Any) -> None:
        _load_into(directory / "model.pt", model)
        if optimizer is not None:
            _load_into(directory / "optimizer.pt", optimizer)

    def _random_states(self, model: Any) -> Any:  # noqa: ARG002
        """uint8 (size, length)."""
        parts = [torch.from_numpy(random_state.capture()), torch.get_rng_state()]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            parts.append(torch.cuda.get_rng_state())
        return hvd.allgather(torch.cat(parts).unsqueeze(0), name="hvdkit.random_states").numpy()

    def _set_random_state(self, saved: Saved, model: Any, own: Any) -> None:  # noqa: ARG002
        python_and_numpy, rest = np.split(own, [random_state.BYTES])
        cpu, cuda = np.split(rest, [torch.get_rng_state().numel()])
        random_state.restore(python_and_numpy)
        torch.set_rng_state(torch.from_numpy(cpu.copy()))
        if len(cuda) and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.set_rng_state(torch.from_numpy(cuda.copy()))
        seeds.accept()

    def _branch(self, model: Any, step: int) -> None:  # noqa: ARG002
        seeds.branch(step)


def _load_into(file: Path, target: torch.nn.Module | torch.optim.Optimizer) -> None:
    try:
        target.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    except (RuntimeError, ValueError, KeyError, OSError, pickle.UnpicklingError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{file} does not fit this {type(target).__name__}: {reason}") from error
