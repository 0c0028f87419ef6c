"""State of Keras 3 optimizers that is divided among the ranks (``shard_state=True``), in checkpoints.

Each rank writes the slots of its own pieces, the root what all share. A training puts together what it keeps itself,
whole or divided, from the files of any number of ranks, or from one of a training whose state was whole.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdkit.core.communicator import Communicator
from hvdkit.errors import CheckpointError
from hvdkit.steps.manifest import require_stored
from hvdkit.steps.shard_state import file_of, files_in, span
from hvdkit.tf_shared.keras_layers import on_host
from hvdkit.tf_shared.keras_optimizer import require_slots
from hvdkit.tf_shared.keras_sharded import leaves_of, shards_in, shards_of, slot_variables, slots_of

Array = npt.NDArray[Any]
Key = tuple[str, int, str, int]
"""A slot of a variable: the optimizer's name, its place among those inside, the attribute, the variable's place."""
NAME = "optimizer.npz"


@dataclass(frozen=True, slots=True)
class SavedPiece:
    """Numbers of a slot that were saved.

    Attributes:
        start, stop: of the variable, counted in C order.
        load: reads the slot.
    """

    start: int
    stop: int
    load: Callable[[], Array]


Saved = dict[Key, list[SavedPiece]]


def are_divided(optimizers: Mapping[str, Any] | None) -> bool:
    """Whether the state of any of these is divided among the ranks."""
    return any(shards_in(one) for one in (optimizers or {}).values())


def prepare(optimizers: Mapping[str, Any] | None, variables: Callable[[], Sequence[Any]]) -> None:
    """Before state that is divided is saved or restored: have every rank know its pieces.

    Args:
        variables: those that a single optimizer trains.
    Raises:
        InvalidArgumentError: there are several optimizers, and one has not been built.
    """
    if optimizers and are_divided(optimizers):
        require_slots(optimizers, "shard_state=True")
        for one in optimizers.values():
            if not one.built:
                one.build(list(variables()))


def _kept(optimizers: Mapping[str, Any]) -> Iterator[tuple[Key, int, int, Any]]:
    """The slots that this process keeps, with start and stop of the variable's numbers that each belongs to."""
    for name, optimizer in optimizers.items():
        for number, leaf in enumerate(leaves_of(optimizer)):
            shards = shards_of(leaf)
            pieces = [(place, 0, _size(one)) for place, one in enumerate(leaf._trainable_variables)]
            if shards is not None:
                pieces = [(one.place, one.start, one.stop) if one else (-1, 0, 0) for one, _ in shards.own]
            for attribute, slots in slots_of(leaf).items():
                for (place, start, stop), slot in zip(pieces, slots, strict=True):
                    if slot is not None and place >= 0:
                        yield (name, number, attribute, place), start, stop, slot


def _size(variable: Any) -> int:
    return int(np.prod(variable.shape))


def _plain(value: Any) -> Array:
    """NumPy's file format does not know bfloat16 and its like (kind V); float32 holds them exactly."""
    array = on_host(value)
    return array.astype(np.float32) if array.dtype.kind == "V" else array


def writer(optimizers: Mapping[str, Any] | None, ranks: Communicator) -> Callable[[Path], Path] | None:
    """What writes the slots of this rank's pieces into a file of a directory, which it returns; None: all have all."""
    if optimizers is None or not are_divided(optimizers):
        return None

    def write(directory: Path) -> Path:
        kept = list(_kept(optimizers))
        rows = [json.dumps([*key, start, stop]) for key, start, stop, _ in kept]
        file = directory / file_of(NAME, ranks.rank(), ranks.size())
        np.savez(file, *(_plain(slot) for *_, slot in kept), pieces=np.array(rows or [""]))
        return file

    return write


def read_pieces(directory: Path) -> Saved | None:
    """What all ranks wrote; None where the state was not divided.

    Raises:
        CheckpointError: a file is missing or cannot be read.
    """
    files, saved = files_in(directory, NAME), Saved()
    for file in files:
        require_stored(file)
        try:
            with np.load(file, allow_pickle=False) as archive:
                rows = [json.loads(row) for row in archive["pieces"].tolist() if row]
                for place, (name, number, attribute, variable, start, stop) in enumerate(rows):
                    piece = SavedPiece(int(start), int(stop), _loader(file, f"arr_{place}"))
                    saved.setdefault((name, number, attribute, variable), []).append(piece)
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
    return saved if files else None


def _loader(file: Path, name: str) -> Callable[[], Array]:
    def load() -> Array:
        try:
            with np.load(file, allow_pickle=False) as archive:
                value: Array = archive[name]
                return value
        except (OSError, ValueError, KeyError, EOFError, MemoryError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error

    return load


def split_whole(optimizers: Mapping[str, Any], values: Sequence[Any], what: str) -> tuple[list[Any], Saved]:
    """Values of all variables of optimizers whose state was whole: those that are shared, and the slots.

    Args:
        values: in the order of the variables of each optimizer, one after another.
        what: where they are from, for the message.
    Raises:
        CheckpointError: there are fewer or more.
    """
    layout = [key for name, one in optimizers.items() for key in _layout(name, one)]
    if len(layout) != len(values):
        kinds = " and ".join(type(one).__name__ for one in optimizers.values())
        raise CheckpointError(
            f"{what} does not fit this {kinds}: it has {len(values)} variables, {len(layout)} are wanted; restore into "
            "the optimizer and model that were saved."
        )
    shared, slots = [], Saved()
    for found, value in zip(layout, values, strict=True):
        if found is None:
            shared.append(value)
        else:
            key, size = found
            slots[key] = [SavedPiece(0, size, lambda value=value: value)]  # type: ignore[misc]
    return shared, slots


def _layout(name: str, optimizer: Any) -> list[tuple[Key, int] | None]:
    """What each variable of an optimizer is where its state is whole: a slot, and its variable's size; None: shared."""
    leaves = leaves_of(optimizer)
    of_the_outer = [None for _ in optimizer._variables] if leaves != [optimizer] else []
    return [*of_the_outer, *(one for number, leaf in enumerate(leaves) for one in _layout_of_leaf(name, number, leaf))]


def _layout_of_leaf(name: str, number: int, optimizer: Any) -> list[tuple[Key, int] | None]:
    shards, whole = shards_of(optimizer), optimizer
    variables = list(optimizer._trainable_variables)
    if shards is not None:
        whole = shards.outline(optimizer)
    keys = {
        id(slot): ((name, number, attribute, place), _size(variables[place]))
        for attribute, slots in slots_of(whole).items()
        for place, slot in enumerate(slots)
        if slot is not None
    }
    return [keys.get(id(one)) for one in whole.variables]


def shared_of(optimizers: Mapping[str, Any]) -> list[Any]:
    """The variables that are no slots: iterations, learning rates and the like."""
    slots = {id(slot) for one in optimizers.values() for leaf in leaves_of(one) for slot in slot_variables(leaf)}
    return [variable for one in optimizers.values() for variable in one.variables if id(variable) not in slots]


def matched(variables: Sequence[Any], values: Sequence[Array], what: str) -> list[tuple[Any, Array]]:
    """Shared variables with their values.

    Raises:
        CheckpointError: their shapes differ.
    """
    mine, theirs = [tuple(one.shape) for one in variables], [tuple(one.shape) for one in values]
    if mine != theirs:
        raise CheckpointError(
            f"{what} does not fit this optimizer: it shares variables of the shapes {theirs}, {mine} are wanted; "
            "restore into the optimizer and model that were saved."
        )
    return list(zip(variables, values, strict=True))


def slot_values(optimizers: Mapping[str, Any], saved: Saved, what: str) -> list[tuple[Any, Array]]:
    """The slots that this process keeps, with their values; nothing is assigned.

    Raises:
        CheckpointError: some were not saved, or for other variables.
    """
    found, wanted = [], set()
    for key, start, stop, slot in _kept(optimizers):
        wanted.add(key)
        name = f"{key[2]} of variable {key[3]} of {key[0]}"
        pieces = saved.get(key)
        if pieces is None:
            raise CheckpointError(f"{what} does not fit this optimizer: it holds no {name}.")
        value = _put_together(pieces, start, stop, name)
        if tuple(value.shape) != tuple(slot.shape):
            if value.size != _size(slot):
                raise CheckpointError(
                    f"{what} does not fit this optimizer: {name} has the shape {value.shape}, not {tuple(slot.shape)}."
                )
            value = value.reshape(tuple(slot.shape))
        found.append((slot, value))
    if not are_divided(optimizers) and (more := saved.keys() - wanted):
        raise CheckpointError(f"{what} does not fit this optimizer, which has no {sorted(more)[0]}.")
    return found


def assign(values: Iterable[tuple[Any, Array]]) -> None:
    """Set variables."""
    for variable, value in values:
        variable.assign(value)


def _put_together(pieces: Sequence[SavedPiece], start: int, stop: int, name: str) -> Array:
    """A slot for some numbers of a variable: theirs, or where it has another size, the one of their first piece."""
    parts = span([(one.start, one.stop) for one in pieces], start, stop, name)
    values = [pieces[place].load() for place, _, _ in parts]
    first = pieces[parts[0][0]]
    if values[0].size != first.stop - first.start or (len(parts) == 1 and (first.start, first.stop) == (start, stop)):
        return values[0]
    return np.concatenate([value.reshape(-1)[a:b] for value, (_, a, b) in zip(values, parts, strict=True)])
