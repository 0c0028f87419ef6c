"""The state of an optimizer in a checkpoint, as ranks wrote it that each kept a part; see ``sharded``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from hvdkit.errors import CheckpointError
from hvdkit.steps import shard_state

FILE = "optimizer.pt"
"""The state_dict, without the state where that was divided."""


class SavedState:
    """The state of all parameters, from the pieces that ranks have saved, or from a whole state_dict."""

    def __init__(self, pieces: Iterable[dict[str, Any]]) -> None:
        self._pieces: dict[int, list[dict[str, Any]]] = {}
        for piece in pieces:
            self._pieces.setdefault(piece["place"], []).append(piece)

    def of(self, place: int, start: int, stop: int, shape: Sequence[int]) -> dict[str, Any]:
        """The state of the numbers ``start .. stop`` of a parameter of this shape, flat if they are a part of it.

        Raises:
            CheckpointError: it was saved of another shape, or incompletely.
        """
        pieces = self._pieces.get(place, [])
        if not pieces or not pieces[0]["state"]:
            return {}
        whole = stop - start == math.prod(shape)
        for piece in pieces:
            if piece["shape"] is not None and piece["shape"] != list(shape):
                raise CheckpointError(
                    f"the optimizer's state of parameter {place} is one of shape {piece['shape']}, and the parameter's "
                    f"is {list(shape)}; restore into the model that was saved."
                )
            piece.setdefault("stop", math.prod(shape))
        parts = shard_state.span([(one["start"], one["stop"]) for one in pieces], start, stop, f"parameter {place}")
        first = pieces[parts[0][0]]
        if len(parts) == 1 and parts[0][1:] == (0, stop - start) == (0, first["stop"] - first["start"]):
            state: dict[str, Any] = first["state"]
            return state
        found = {}
        for key, value in first["state"].items():
            if isinstance(value, torch.Tensor) and value.dim() and value.numel() == first["stop"] - first["start"]:
                values = [pieces[number]["state"][key].reshape(-1)[begin:end] for number, begin, end in parts]
                value = torch.cat(values).reshape(shape if whole else -1)
            found[key] = value
        return found

    def whole(self, parameters: Sequence[torch.Tensor]) -> dict[int, dict[str, Any]]:
        """The state of a state_dict of an optimizer with these parameters."""
        states = {place: self.of(place, 0, one.numel(), one.shape) for place, one in enumerate(parameters)}
        return {place: state for place, state in states.items() if state}


def saved_pieces(directory: Path, read: Callable[[Path], Any]) -> list[dict[str, Any]]:
    """What all ranks saved of an optimizer's state; or the whole of one that was not divided, as pieces.

    Raises:
        CheckpointError: it is incomplete, or not of pieces.
    """
    files = shard_state.files_in(directory, FILE)
    if not files:
        states = read(directory / FILE)["state"]
        return [{"place": place, "start": 0, "shape": None, "state": state} for place, state in states.items()]
    pieces = [piece for file in files for piece in read(file)]
    if not all(
        isinstance(piece, dict) and {"place", "start", "stop", "shape", "state"} <= piece.keys() for piece in pieces
    ):
        raise CheckpointError(f"{files[0]} does not hold the pieces of an optimizer's state.")
    return pieces
