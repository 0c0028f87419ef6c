"""Checkpoints of containers of arrays (step 6): what they hold, and how it is put back.

``state.npz`` holds the arrays in their order, as NumPy writes them (types that NumPy's format does not know, as bytes);
``state.json`` their names, types and shapes. Nothing in it is pickled. What each rank keeps alone
(``tree.OwnState``) is in a file of each rank, by the array's number and the numbers of it, "7-100-200".
"""

from __future__ import annotations

import contextlib
import json
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from hvdkit import __version__
from hvdkit.arrays import mpi, seeds
from hvdkit.arrays import state as arrays_state
from hvdkit.arrays.data import require_sharded
from hvdkit.arrays.tree import Array, OwnPart
from hvdkit.core.communicator import Communicator
from hvdkit.errors import CheckpointError
from hvdkit.steps.checkpoint import Saved
from hvdkit.steps.manifest import require_stored
from hvdkit.steps.resume import CheckpointsBase
from hvdkit.steps.seeds import capture_state, restore_state
from hvdkit.steps.shard_state import file_of, files_in, span

_ARRAYS, _ROWS = "state.npz", "state.json"
_Row = tuple[str, Any, Array | None]  # of ``state.read``


class Checkpoints(CheckpointsBase):
    """Checkpoints that only the root writes and that every rank restores alike (step 6).

    Every method is a collective: call it on all ranks. An error is raised on every rank, not on the root alone.

    Args:
        directory: where they live, on a file system that the root can write.
        keep: how many of the newest stay.
        keep_best: how many with the highest scores stay beside them.
        wait: seconds to wait for another job that writes there, before an error; 2 for one that is just ending.
    """

    _require_loader = staticmethod(require_sharded)

    def save(self, state: Any, *, step: int, loader: Any = None, score: float | None = None, **metadata: Any) -> Saved:
        """Write a state and the states of the ranks' random generators as the checkpoint of ``step``.

        Args:
            state: containers of arrays and numbers.
            step: optimizer steps completed.
            loader: from ``shard``; its position, counted in samples, is saved too.
            score: how good it is, the higher the better, for ``keep_best`` and ``restore(which="best")``.
            metadata: JSON values to find again in ``Saved.metadata``, for example ``accuracy=0.93``.
        Returns:
            The checkpoint, complete on disk.
        Raises:
            InvalidArgumentError: a bad step or score, metadata that is not JSON, or a state that is not of arrays.
            CheckpointError: it could not be written, or another job writes into the directory; earlier ones are intact.
        """
        found = self._ranks().together(lambda: arrays_state.read(state))
        return cast(Saved, self._save(found, _owned(found), step, loader, score, metadata))

    def restore(self, state: Any, *, loader: Any = None, which: str = "latest") -> tuple[Any, Saved | None]:
        """Load a valid checkpoint on the root and broadcast it: ``state, saved = checkpoints.restore(state)``.

        The number of ranks may be another one than when it was saved: the loader goes on at the same sample of the same
        order. On as many ranks as before Python's and NumPy's global random numbers go on, too.

        Args:
            state: one of the same containers, shapes and types; see ``broadcast_state`` for what becomes of it.
            loader: from ``shard``, over the same data with the same seed; goes on where it was.
            which: "latest" or "best" (the highest score).
        Returns:
            The restored state, and where it was, its step and metadata, and which newer checkpoints were skipped and
            why; the state as given and None when there is no checkpoint.
        Raises:
            CheckpointError: checkpoints exist but none is valid, it belongs to another state or data, or (with a
                loader: a training that goes on) another job writes into the directory.
            InvalidArgumentError: a loader that is not hvdkit's, or an unknown ``which``.
        """
        found = self._ranks().together(lambda: arrays_state.read(state))
        leaves, owned = [leaf for _, leaf, _ in found], _owned(found)
        saved, randoms = self._load(found, owned, which, loader)
        if saved is None:
            return state, None
        for number, row in (owned or {}).items():
            found[number] = row
        if owned or self._ranks().rank() == 0:
            state = arrays_state.remade(state, leaves, [array for _, _, array in found])
        if self._is_started():
            state = arrays_state.broadcast_state(state)
        self._go_on_in_data(saved, loader)
        self._go_on_drawing(saved, randoms, state)
        return state, saved

    def _is_started(self) -> bool:
        return mpi.is_started()

    def _all_ranks(self) -> Communicator:
        return mpi.ranks()

    def _facts(self, optimizer: Any) -> dict[str, Any]:  # noqa: ARG002
        return {"hvdkit": __version__, "framework": "arrays", "seed": seeds.CURRENT.seed()}

    def _position(self, loader: Any) -> dict[str, Any]:
        return cast("dict[str, Any]", self._ranks().together(partial(super()._position, loader)))

    def _random_states(self, model: Any) -> Any:  # noqa: ARG002
        return np.stack(self._ranks().allgather(capture_state(), "hvdkit.random_states"))

    def _set_random_state(self, saved: Saved, model: Any, own: Any) -> None:  # noqa: ARG002
        restore_state(own)

    def _branch(self, model: Any, step: int) -> None:  # noqa: ARG002
        seeds.branch(step)

    def _write(self, directory: Path, model: Any, optimizer: Any) -> None:
        """Write what ``state.read`` found."""
        rows = [arrays_state.row(*one) for one in model]
        (directory / _ROWS).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        shared = {str(number): array for number, (*_, array) in enumerate(model) if number not in (optimizer or {})}
        _save(directory / _ARRAYS, shared)

    def _write_own(self, optimizer: Any) -> Callable[[Path], Path] | None:
        if not optimizer:
            return None
        ranks = self._ranks()

        def write(directory: Path) -> Path:
            file = directory / file_of(_ARRAYS, ranks.rank(), ranks.size())
            parts = optimizer.items()
            _save(file, {f"{n}-{part.start}-{part.stop}": array for n, (_, part, array) in parts if part.stop})
            return file

        return write

    def _read_own(self, saved: Saved, optimizer: Any) -> Callable[[], None]:
        arrays = _load(saved.path, optimizer)

        def put() -> None:
            optimizer.update(
                (number, (path, leaf, array))
                for (number, (path, leaf, _)), array in zip(optimizer.items(), arrays, strict=True)
            )

        return put

    def _read(self, saved: Saved, model: Any, optimizer: Any, **options: Any) -> Callable[[], None]:  # noqa: ARG002
        """What puts the saved arrays in the place of what ``state.read`` found."""
        _require_fit(saved.path, model)
        shared = {number: row for number, row in enumerate(model) if number not in (optimizer or {})}
        arrays = _load(saved.path, shared)

        def put() -> None:
            for (number, (path, leaf, _)), array in zip(shared.items(), arrays, strict=True):
                model[number] = (path, leaf, array)

        return put


def _owned(found: list[_Row]) -> dict[int, _Row] | None:
    """What this rank alone keeps of what ``state.read`` found, by number; None where the ranks keep the same."""
    return {number: row for number, row in enumerate(found) if isinstance(row[1], OwnPart)} or None


def _is_foreign(dtype: np.dtype[Any]) -> bool:
    """Whether NumPy's file format does not know a type, such as bfloat16."""
    return dtype.kind not in "biufc"


def _save(file: Path, arrays: dict[str, Array | None]) -> None:
    held = {name: array for name, array in arrays.items() if array is not None}
    for name, array in held.items():
        if _is_foreign(array.dtype):
            held[name] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    np.savez(file, allow_pickle=False, **held)


def _require_fit(path: Path, found: list[_Row]) -> None:
    """Raise CheckpointError unless a checkpoint holds the names, types and shapes of what ``state.read`` found."""
    try:
        rows = json.loads((path / _ROWS).read_text(encoding="utf-8"))
        mine = [arrays_state.row(*one) for one in found]
        if rows != mine:
            pairs = zip([*rows, "nothing"], [*mine, "nothing"], strict=False)
            saved, wanted = next(pair for pair in pairs if pair[0] != pair[1])
            raise CheckpointError(f"{path} does not fit this state: it holds {saved}, the state has {wanted}.")
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _load(path: Path, found: dict[int, _Row]) -> list[Array | None]:
    """The arrays of a checkpoint that fits, or what this rank keeps of them, by their numbers in it."""
    arrays: list[Array | None] = []
    try:
        files = [path / _ARRAYS, *files_in(path, _ARRAYS)]
        for file in files:
            require_stored(file)
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(np.load(file, allow_pickle=False)) for file in files]
            pieces: dict[int, list[tuple[int, int, Callable[[], Array]]]] = {}
            for file in opened[1:]:
                for name in file.files:
                    number, start, stop = map(int, name.split("-"))
                    pieces.setdefault(number, []).append((start, stop, partial(file.__getitem__, name)))
            for number, (place, leaf, array) in found.items():
                if array is None:
                    arrays.append(None)
                    continue

                def values(stored: Array, dtype: np.dtype[Any] = array.dtype) -> Array:
                    return stored.reshape(-1).view(dtype) if _is_foreign(dtype) else stored.reshape(-1)

                start, stop = (leaf.start, leaf.stop) if isinstance(leaf, OwnPart) else (0, array.size)
                if start == stop:
                    arrays.append(array)
                elif str(number) in opened[0].files:
                    arrays.append(values(opened[0][str(number)])[start:stop].reshape(array.shape))
                else:
                    held = pieces[number]
                    parts = span([(begin, end) for begin, end, _ in held], start, stop, place)
                    filled = [values(held[piece][2]())[begin:end] for piece, begin, end in parts]
                    arrays.append(np.concatenate(filled).reshape(array.shape))
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return arrays
