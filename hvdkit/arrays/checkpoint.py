"""What a checkpoint of containers of arrays holds, and how it is put back; the inside of ``hvdkit.arrays.Checkpoints``.

``state.npz`` holds the arrays in their order, as NumPy writes them (types that NumPy's format does not know, as bytes);
``state.json`` their names, types and shapes. Nothing in it is pickled.
"""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdkit import __version__
from hvdkit.arrays import mpi, seeds
from hvdkit.arrays import state as arrays_state
from hvdkit.arrays.data import ShardedArrays
from hvdkit.errors import CheckpointError, InvalidArgumentError
from hvdkit.steps import random_state
from hvdkit.steps.checkpoint import CheckpointDirectory, Saved, checked

Array = npt.NDArray[Any]
_ARRAYS, _ROWS, _RANDOM = "state.npz", "state.json", "random.npy"


class Store:
    """Saves and restores; every method is a collective.

    Args:
        directory, keep, keep_best: see ``CheckpointDirectory``.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int, keep_best: int) -> None:
        self._directory = CheckpointDirectory(directory, keep, keep_best)

    def save(self, state: Any, step: int, loader: Any, score: float | None, metadata: dict[str, Any]) -> Saved:
        """See ``hvdkit.arrays.Checkpoints.save``."""
        comm = mpi.everyone()
        found = mpi.together(comm, lambda: arrays_state.read(state))
        position = mpi.together(comm, lambda: {} if loader is None else {"data": require_loader(loader).state()})
        randoms = np.stack(comm.allgather(random_state.capture()))
        facts = {
            "hvdkit": __version__,
            "framework": "arrays",
            "size": int(comm.Get_size()),
            "seed": seeds.seed(),
            **position,
            **metadata,
        }

        def write(directory: Path) -> None:
            np.save(directory / _RANDOM, randoms, allow_pickle=False)
            rows = [arrays_state.row(path, array) for path, _, array in found]
            (directory / _ROWS).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            arrays = {str(number): _plain(array) for number, (_, _, array) in enumerate(found) if array is not None}
            np.savez(directory / _ARRAYS, allow_pickle=False, **arrays)

        def on_disk() -> Saved:
            checked(step, facts, score)
            return self._directory.save(step, write, facts, score)

        return mpi.on_root(on_disk)  # type: ignore[no-any-return]

    def restore(self, state: Any, loader: Any, which: str) -> tuple[Any, Saved | None]:
        """See ``hvdkit.arrays.Checkpoints.restore``."""
        if which not in ("latest", "best"):
            raise InvalidArgumentError(f"which must be latest or best, got {which!r}.")
        comm = mpi.everyone()
        found = mpi.together(comm, lambda: arrays_state.read(state))
        arrays: list[Array | None] = []

        def load() -> tuple[Saved | None, Any]:
            saved = self._directory.latest() if which == "latest" else self._directory.best()
            if saved is None:
                return None, None
            arrays.extend(_load(saved.path, found))
            return saved, _load_random(saved.path / _RANDOM)

        saved, randoms = mpi.on_root(load)
        if saved is None:
            return state, None
        if arrays:
            state = arrays_state.remade(state, [leaf for _, leaf, _ in found], arrays)
        state = arrays_state.broadcast(state, 0)
        _resume(saved, randoms, loader, comm)
        return state, saved


def require_loader(loader: Any) -> ShardedArrays:
    """The loader of ``shard``.

    Raises:
        InvalidArgumentError: something else.
    """
    if not isinstance(loader, ShardedArrays):
        raise InvalidArgumentError(f"loader must be what shard returned, got {type(loader).__name__}.")
    return loader


def facts(loader: Any) -> dict[str, float]:
    """What the ranks' loaders must have in common; nothing where there is none."""
    return {} if loader is None else require_loader(loader).share.facts(loader.epoch)


def _resume(saved: Saved, randoms: Any, loader: Any, comm: Any) -> None:
    """Go on at the same sample, and with the same random numbers where the number of ranks is the same."""
    if loader is not None:
        data = saved.metadata.get("data")
        if data is None:
            raise CheckpointError(f"{saved.path} holds no position in the data; save with loader=, or restore without.")
        require_loader(loader).load_state(data)
    if saved.metadata.get("size") != comm.Get_size():
        seeds.branch(saved.step)
    elif randoms is not None:
        random_state.restore(randoms[comm.Get_rank()])


def _is_foreign(dtype: np.dtype[Any]) -> bool:
    """Whether NumPy's file format does not know a type, such as bfloat16."""
    return dtype.kind not in "biufc"


def _plain(array: Array) -> Array:
    contents = np.ascontiguousarray(array)
    return contents.reshape(-1).view(np.uint8) if _is_foreign(array.dtype) else array


def _load(path: Path, found: list[tuple[str, Any, Array | None]]) -> list[Array | None]:
    """The arrays of a checkpoint, which must fit the state that is to be restored."""
    arrays: list[Array | None] = []
    try:
        rows = json.loads((path / _ROWS).read_text(encoding="utf-8"))
        mine = [arrays_state.row(place, array) for place, _, array in found]
        if rows != mine:
            pairs = zip([*rows, "nothing"], [*mine, "nothing"], strict=False)
            saved, wanted = next(pair for pair in pairs if pair[0] != pair[1])
            raise CheckpointError(f"{path} does not fit this state: it holds {saved}, the state has {wanted}.")
        with np.load(path / _ARRAYS, allow_pickle=False) as file:
            for number, (_, _, array) in enumerate(found):
                if array is None:
                    arrays.append(None)
                    continue
                values = file[str(number)]
                arrays.append(values.view(array.dtype) if _is_foreign(array.dtype) else values)
                arrays[-1] = arrays[-1].reshape(array.shape)  # type: ignore[union-attr]
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return arrays


def _load_random(file: Path) -> Any:
    try:
        return np.load(file, allow_pickle=False) if file.exists() else None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
