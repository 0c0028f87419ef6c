"""An optimizer whose state is divided among the ranks (ZeRO stage 1); the inside of ``distribute(shard_state=True)``.

In a step every rank has the user's optimizer update its own pieces alone, and then gets the others' from their owners.
Its state is that of the pieces: of a parameter itself where a rank has all of it, else of a stand-in.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import itertools
import math
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from hvdkit.core import layout as core_layout
from hvdkit.core import listeners
from hvdkit.errors import CheckpointError, InvalidArgumentError
from hvdkit.steps import shard_state, torch_tensors
from hvdkit.steps.shard_state import Piece
from hvdkit.torch import private
from hvdkit.torch.state import (
    RANKS,
    SHARDED,
    HostCopies,
    broadcast_nested,
    keeps_its_state_itself,
    load_optimizer,
    parameters_of,
)

_NUMBERS = itertools.count()
_HALF = (torch.float16, torch.bfloat16)
MASTER = "master"
FILE = "optimizer.pt"
"""In a checkpoint: the state_dict, without the state where that was divided."""


class _Part:
    """A piece of a parameter; its owner's optimizer updates ``stand_in``.

    That is the parameter, a slice of its memory, or of one in 16 bits the float32 master copy of the piece.
    """

    def __init__(self, parameter: Any, piece: Piece, mine: bool) -> None:
        self.parameter, self.piece, self.stand_in = parameter, piece, None
        self.has_master = parameter.dtype in _HALF
        if mine:
            inside = self.inside().float() if self.has_master else self.inside()
            self.stand_in = torch.nn.Parameter(inside) if piece.cut or self.has_master else parameter

    def inside(self) -> torch.Tensor:
        """Of the parameter's memory, flat where it is cut; a whole one as it is."""
        own: torch.Tensor = self.parameter.detach()
        if self.piece.cut and not own.is_contiguous():
            raise InvalidArgumentError(
                f"the numbers of a parameter of shape {tuple(own.shape)} lie in another order in memory than when "
                "distribute(shard_state=True) divided it; call model.to(memory_format=...) before."
            )
        return own.view(-1)[self.piece.start : self.piece.stop] if self.piece.cut else own

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The piece of a tensor of the parameter's shape."""
        return tensor.reshape(-1)[self.piece.start : self.piece.stop] if self.piece.cut else tensor

    def prepare(self) -> None:
        """Before a step: the stand-in is what the parameter is now, and has its gradient."""
        stand_in: Any = self.stand_in
        if stand_in is self.parameter:
            return
        now, gradient = self.inside(), self.parameter.grad
        if self.has_master:  # the program may have changed some, clamped or loaded them
            now = torch.where(stand_in.detach().to(now.dtype) == now, stand_in.detach(), now.float())
        stand_in.data = now
        stand_in.grad = None if gradient is None else self.of(gradient).to(stand_in.dtype)

    def accept(self) -> None:
        """After a step: the parameter is what the stand-in has become."""
        stand_in: Any = self.stand_in
        if stand_in is not self.parameter:
            stand_in.grad = None
        if self.has_master:
            self.inside().copy_(stand_in.detach())


class ShardedOptimizer:
    """What ``distribute(shard_state=True)`` adds to an optimizer; what has a sparse gradient (ids) stays whole."""

    def __init__(self, optimizer: torch.optim.Optimizer, may_cut: bool, sparse: Collection[int]) -> None:
        self._may_cut, self._sparse = may_cut, sparse
        self._number = next(_NUMBERS)
        self._parts: dict[int, list[_Part]] = {}  # by the id of the parameter
        self._known: list[int] = []
        self._messages: list[list[_Part]] = []
        self._groups: list[tuple[dict[str, Any], list[Any]]] = []  # during a step, and their parameters
        self._within = 0  # steps: an optimizer's may call that of its base class
        setattr(optimizer, SHARDED, self)
        optimizer.register_step_pre_hook(private.eagerly(self._before))
        private.call_first_after_step(optimizer, private.eagerly(self._after))
        optimizer.register_state_dict_pre_hook(_refuse)
        optimizer.register_load_state_dict_post_hook(self._take_over)
        stepping = optimizer.step

        @functools.wraps(stepping)
        def step(_: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return stepping(*args, **kwargs)
            finally:  # also where an error ended it
                self._put_back()
                self._within = 0

        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        self.follow(optimizer)

    # Division ------------------------------------------------------------------------------------------------------

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide what the optimizer trains now, and did not before."""
        held = parameters_of(optimizer)
        trained = [one for one in held if one.requires_grad and one.numel()]
        if list(map(id, trained)) == self._known:
            return
        self._known = list(map(id, trained))
        for gone in self._parts.keys() - set(map(id, held)):
            for part in self._parts.pop(gone):
                optimizer.state.pop(part.stand_in, None)  # type: ignore[arg-type]
        new = [one for one in trained if id(one) not in self._parts]
        can_cut = [
            self._may_cut and one.is_contiguous() and id(one) not in self._sparse and type(one.data) is torch.Tensor
            for one in new
        ]
        whole = [place for place, can in enumerate(can_cut) if not can]
        for piece in shard_state.divide([one.numel() for one in new], RANKS.size(), whole):
            one = new[piece.place]
            part = _Part(one, piece, piece.owner == RANKS.rank())
            self._parts.setdefault(id(one), []).append(part)
        self._take_over(optimizer)
        parts = [part for parts in self._parts.values() for part in parts]
        kinds = [(part.piece.owner, part.parameter.dtype, part.parameter.device) for part in parts]
        sizes = [(part.piece.stop - part.piece.start) * part.parameter.element_size() for part in parts]
        buckets = core_layout.in_buckets(kinds, sizes, shard_state.MESSAGE_BYTES)
        self._messages = [[parts[place] for place in bucket] for bucket in buckets]

    def _mine(self) -> list[_Part]:
        return [part for parts in self._parts.values() for part in parts if part.stand_in is not None]

    def _take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep of a whole state, from before or loaded, what is this rank's."""
        for parts in self._parts.values():
            parameter = parts[0].parameter
            if all(part.stand_in is parameter for part in parts):
                continue
            whole = optimizer.state.pop(parameter, None)
            for part in parts if whole is not None else ():
                if part.stand_in is not None:
                    optimizer.state[part.stand_in] = {key: _own(part, value) for key, value in whole.items()}

    # A step ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._within += 1
        if self._within > 1:
            return args, kwargs
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:  # it clears and computes the parameters' gradients
            with torch.enable_grad():
                loss = closure()
            args, kwargs = (args[0], lambda: loss, *args[2:]), {**kwargs}
            kwargs.pop("closure", None)
        self.follow(optimizer)
        for part in self._mine():
            part.prepare()
        self._put_in(optimizer)
        return args, kwargs

    @torch.no_grad()
    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        self._within -= 1
        if self._within:
            return
        self._put_back()
        for part in self._mine():
            part.accept()
        self._give()

    def _put_in(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            own = [part.stand_in for one in group["params"] for part in self._parts.get(id(one), ())]
            self._groups.append((group, group["params"]))
            group["params"] = [stand_in for stand_in in own if stand_in is not None]

    def _put_back(self) -> None:
        for group, parameters in self._groups:
            group["params"] = parameters
        self._groups = []

    @listeners.sharing_weights()
    def _give(self) -> None:
        """Have every rank get what the owners have updated."""
        begun = []
        for number, parts in enumerate(self._messages):
            name, own = f"hvdkit.shard_state.{self._number}.{number}", [part.inside() for part in parts]
            begun.append(torch_tensors.start_sharing(hvd, own, parts[0].piece.owner, name, private.foreach_copy))
        for wait in begun:
            wait()

    # In checkpoints -------------------------------------------------------------------------------------------------

    def outline(self, optimizer: Any) -> dict[str, Any]:
        """Its state_dict without the state, which no rank has: the same on every rank."""
        return {"state": {}, "param_groups": _numbered(optimizer.param_groups, parameters_of(optimizer))}

    def own_state(self, optimizer: Any) -> list[dict[str, Any]]:
        """What this rank keeps, for a file: of each piece its place in the state_dict, numbers, shape and state."""
        places = {id(one): place for place, one in enumerate(parameters_of(optimizer))}
        return [
            {
                "place": places[id(part.parameter)],
                "start": part.piece.start,
                "stop": part.piece.stop,
                "shape": list(part.parameter.shape),
                "state": dict(optimizer.state.get(part.stand_in, {})),
                "master": part.stand_in.detach() if part.has_master else None,  # type: ignore[union-attr]
            }
            for part in self._mine()
        ]

    def loading(self, optimizer: Any, saved: SavedState) -> Callable[[], None]:
        """What makes this rank's state that of a checkpoint, once all ranks have found that theirs fits."""
        mine, places = self._mine(), {id(one): place for place, one in enumerate(parameters_of(optimizer))}
        found = [
            saved.of(places[id(part.parameter)], part.piece.start, part.piece.stop, part.parameter.shape)
            for part in mine
        ]

        def load() -> None:
            self._put_in(optimizer)
            try:
                held = parameters_of(optimizer)
                order = {id(one): place for place, one in enumerate(held)}
                groups = _numbered(optimizer.param_groups, held)
                states = {
                    order[id(part.stand_in)]: own
                    for part, state in zip(mine, found, strict=True)
                    if (own := {key: value for key, value in state.items() if key != MASTER})
                }
                load_optimizer(optimizer, {"state": states, "param_groups": groups})
            finally:
                self._put_back()
            for part, state in zip(mine, found, strict=True):
                if part.has_master and MASTER in state:
                    part.stand_in.data.copy_(state[MASTER])  # type: ignore[union-attr]

        return load


class SavedState:
    """The state of all parameters, from the pieces that ranks have saved, or from a whole state_dict."""

    def __init__(self, pieces: Iterable[dict[str, Any]]) -> None:
        self._pieces: dict[int, list[dict[str, Any]]] = {}
        for piece in pieces:
            if piece.get("master") is not None:
                piece = {**piece, "state": {**piece["state"], MASTER: piece["master"]}}
            self._pieces.setdefault(piece["place"], []).append(piece)

    def of(self, place: int, start: int, stop: int, shape: Sequence[int]) -> dict[str, Any]:
        """The state of the numbers ``start .. stop`` of a parameter of this shape, flat if they are a part of it."""
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
        own = {place: {key: one for key, one in state.items() if key != MASTER} for place, state in states.items()}
        return {place: state for place, state in own.items() if state}


def saved_state(directory: Path, read: Callable[[Path], Any]) -> SavedState:
    """What all ranks saved of an optimizer's state, or the whole of one that was not divided."""
    files = shard_state.files_in(directory, FILE)
    if not files:
        states = read(directory / FILE)["state"]
        return SavedState({"place": at, "start": 0, "shape": None, "state": one} for at, one in states.items())
    pieces = [piece for file in files for piece in read(file)]
    keys = {"place", "start", "stop", "shape", "state"}
    if not all(isinstance(piece, dict) and keys <= piece.keys() for piece in pieces):
        raise CheckpointError(f"{files[0]} does not hold the pieces of an optimizer's state.")
    return SavedState(pieces)


def _numbered(groups: Any, parameters: Sequence[Any]) -> list[dict[str, Any]]:
    """Parameter groups as in a state_dict."""
    places = {id(one): place for place, one in enumerate(parameters)}
    return [{**group, "params": [places[id(one)] for one in group["params"]]} for group in groups]


def gather_state(optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """The whole ``state_dict`` of an optimizer whose state is divided among the ranks; a collective.

    Any optimizer of the same class takes it, on one process or many, divided (on every rank) or not; master copies are
    left out. ``Checkpoints`` saves without it, each rank its own.

    Args:
        optimizer: distributed with ``shard_state=True``; of another it is the ``state_dict`` as it is.
    Returns:
        On rank 0 the state_dict, in the host's memory; on the others None.
    """
    sharded: ShardedOptimizer | None = getattr(optimizer, SHARDED, None)
    if sharded is None:
        return optimizer.state_dict() if RANKS.rank() == 0 else None
    pieces: list[dict[str, Any]] = []
    for owner in range(RANKS.size()):
        mine = sharded.own_state(optimizer) if owner == RANKS.rank() else None
        received = broadcast_nested(mine, owner, "hvdkit.gather_state")
        if RANKS.rank() == 0:
            pieces += HostCopies().of("", received)
    if RANKS.rank() != 0:
        return None
    return {**sharded.outline(optimizer), "state": SavedState(pieces).whole(parameters_of(optimizer))}


def _own(part: _Part, value: Any) -> Any:
    """Of a whole state what belongs to a piece: of what has the parameter's shape, its numbers."""
    if not isinstance(value, torch.Tensor) or value.shape != part.parameter.shape:
        return value
    own = part.of(value).clone()
    return own.float() if part.has_master else own


def _refuse(optimizer: Any) -> None:
    raise InvalidArgumentError(
        f"the state of this {type(optimizer).__name__} is divided over {RANKS.size()} ranks (shard_state=True), and no "
        "rank has its state_dict(); save it by Checkpoints, or call gather_state(optimizer) on every rank."
    )


# Whether the work of an optimizer can be divided, found by trying: no list of names could tell of clipping by a global
# norm, block-wise 8-bit states and learned rates, which come by an argument -------------------------------------------

_TRIED = 8192  # numbers of each tensor, more than a block of an 8-bit state
_TRIALS = itertools.count()
_STEPS, _RATE = 3, 0.01
Tensors = Sequence[torch.Tensor]
Settings = list[dict[str, Any]]  # of parameter groups, such as a rate, which an optimizer may learn


def works_on_numbers(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it does with each number what it would do without the others; False: with each parameter.

    Steps the same optimizer, with the same settings, on random tensors, as a whole and in parts.
    """
    name = type(optimizer).__name__
    reasons = {
        "steps another one": any(isinstance(one, torch.optim.Optimizer) for one in vars(optimizer).values()),
        "has a state_dict of its own": keeps_its_state_itself(optimizer),
        "changes parameters by its state in eval() and train()": hasattr(optimizer, "eval"),
    }
    for why in (why for why, holds in reasons.items() if holds):
        raise InvalidArgumentError(f"shard_state=True cannot divide the state of {name}, which {why}; leave it out.")
    settings, tensors = _like_those_of(optimizer)
    try:
        whole, after = _stepped(optimizer, settings, tensors)
    except Exception as error:
        raise InvalidArgumentError(
            f"shard_state=True cannot divide the state of {name}: a step of it on other tensors ends with "
            f"{type(error).__name__}: {error}; leave it out."
        ) from error
    with contextlib.suppress(Exception):  # Muon's, for example, where it is given no matrix
        cut = [[one.reshape(-1).tensor_split((3 * one.numel() // 8 + 1,)) for one in members] for members in tensors]
        halves = [
            _stepped(optimizer, settings, [[pair[side] for pair in members] for members in cut]) for side in (0, 1)
        ]
        joined = [torch.cat(pair) for pair in zip(*(parts for parts, _ in halves), strict=True)]
        if _alike([one.reshape(-1) for one in whole], after, joined, [settings for _, settings in halves]):
            return True
    with contextlib.suppress(Exception):
        alone = [
            _stepped(optimizer, settings, [[one] if members is own else [] for members in tensors])
            for own in tensors
            for one in own
        ]
        if _alike(whole, after, [one for parts, _ in alone for one in parts], [settings for _, settings in alone]):
            return False
    raise InvalidArgumentError(
        f"shard_state=True cannot divide the state of {name}: what it does with one parameter depends on others (it "
        "clips by a norm of all, or learns its rate); clip before the step, or leave it out."
    )


def _like_those_of(optimizer: torch.optim.Optimizer) -> tuple[Settings, list[Tensors]]:
    """The groups that differ in their settings, with a learning rate that shows, and tensors like those of each."""
    found: dict[str, tuple[dict[str, Any], list[torch.Tensor]]] = {}
    for group in optimizer.param_groups:
        kept = {key: value for key, value in group.items() if key != "params" and not key.startswith("param_names")}
        if "lr" in kept:
            kept["lr"] = torch.full_like(kept["lr"], _RATE) if isinstance(kept["lr"], torch.Tensor) else _RATE
        kind = repr({key: value for key, value in kept.items() if key != "initial_lr"})
        found.setdefault(kind, (kept, []))[1].extend(group["params"])
    return [kept for kept, _ in found.values()], [list(_random_like(members)) for _, members in found.values()]


def _random_like(parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Two random tensors for each number of dimensions, type and device; 16 bits would hide small differences."""
    seeded = torch.Generator().manual_seed(0)
    kinds = {(one.dim(), torch.promote_types(one.dtype, torch.float32), one.device): None for one in parameters}
    for dimensions, dtype, device in (*kinds, *kinds):
        shape = [1] * dimensions
        for axis in itertools.cycle(range(dimensions - 1, -1, -1)) if dimensions else ():
            if torch.Size(shape).numel() >= _TRIED:
                break
            shape[axis] *= 2
        yield torch.randn(shape, dtype=dtype, generator=seeded).to(device)


def _stepped(
    optimizer: torch.optim.Optimizer, settings: Settings, tensors: Sequence[Tensors]
) -> tuple[Tensors, Settings]:
    """What the tensors of each group, and its settings, become by an optimizer like this one."""
    stepping: Any = object.__new__(type(optimizer))
    vars(stepping).update(vars(optimizer))
    for name in ("step", "add_param_group"):
        vars(stepping).pop(name, None)
    stepping.state = collections.defaultdict(dict)
    parameters = [[torch.nn.Parameter(one.clone()) for one in members] for members in tensors]
    stepping.param_groups = [{**kept, "params": [*members]} for kept, members in zip(settings, parameters, strict=True)]
    step = inspect.unwrap(type(optimizer).step)  # whose wrapper tells everybody of a step
    trained = [one for members in parameters for one in members]
    with torch.random.fork_rng(devices=list({one.device for one in trained if one.is_cuda})), torch.no_grad():
        torch.manual_seed(next(_TRIALS))  # one that draws does something else in each trial, as on each rank
        for number in range(_STEPS):
            for one in trained:
                one.grad = torch.sin(one * (number + 2)) + one / 3
            step(stepping)
    return [one.detach() for one in trained], stepping.param_groups


def _alike(whole: Tensors, after: Settings, parts: Tensors, after_parts: list[Settings]) -> bool:
    groups = [pair for settings in after_parts for pair in zip(after, settings, strict=True)]
    return all(map(_equal, whole, parts)) and all(
        one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items() if key != "params")
        for one, other in groups
    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        eps = torch.finfo(one.dtype).eps if one.is_floating_point() or one.is_complex() else 0.0
        return torch.allclose(one, other, rtol=100 * eps, atol=100 * eps, equal_nan=True)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-12) or one != one != other
    return bool(one == other)
