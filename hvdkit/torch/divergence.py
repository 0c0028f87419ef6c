"""What ``exchange`` looks at to see whether the ranks train apart."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable

import horovod.torch as hvd
import numpy as np
import numpy.typing as npt
import torch

from hvdkit.errors import InvalidArgumentError
from hvdkit.torch import private
from hvdkit.torch.buckets import Named, Parameter, total_norm
from hvdkit.torch.state import parameters_of

_PART = 1 << 22
"""Numbers that are looked at together: PyTorch copies them to float64."""
_MOVES, _LOOKS = 3, 50
"""How often what nobody averages has moved when that is told; how often one looks: inner loops need not move it."""
_ALIKE = 0.7
"""Cosine above which gradients were copied from others; clipping by value turns them a little."""
_PADDED = 1.05
"""How many numbers flat memory may have for each of the gradients in it."""
_AT_LIMIT = 2e-5
"""How near a clipped norm is to its limit: ``clip_grad_norm_`` adds 1e-6 to it."""
_ALONE = 100
"""Steps of an optimizer after which it is no inner loop, though nothing has been averaged in between."""


def fingerprints(parameters: Iterable[torch.Tensor]) -> npt.NDArray[np.float64]:
    """What shows whether two ranks' parameters differ, float64 (n, 2): of each its norm, and a sum of that size."""
    computed = []
    for one in parameters:
        flat = (torch.view_as_real(one.detach()) if one.is_complex() else one.detach()).reshape(-1)
        flat = flat if flat.element_size() > 1 else flat.float()
        parts = [flat[at : at + _PART] for at in range(0, max(len(flat), 1), _PART)]
        norm = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]).norm()
        whole = torch.stack([part.sum(dtype=torch.float64) for part in parts]).sum()
        computed.append(torch.stack([norm, whole / max(len(flat), 1) ** 0.5]))
    return np.array([one.tolist() for one in computed]).reshape(-1, 2)


def own(named: Named, optimizer: torch.optim.Optimizer | None) -> list[tuple[str, Parameter]]:
    """What of the named parameters is the optimizer's: only that has to be the same on every rank."""
    mine = set() if optimizer is None else set(map(id, parameters_of(optimizer)))
    return [(name, one) for name, one in named if id(one) in mine]


def can_look() -> bool:
    """Not while a step is captured as a CUDA graph, which no number may leave."""
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def rounding_of(parameter: torch.Tensor) -> float:
    """The machine epsilon of its type; 1 where that has 8 bits."""
    return 1.0 if parameter.element_size() == 1 else torch.finfo(parameter.dtype).eps


def is_other(parameter: Parameter | None, gradient: torch.Tensor, version: int) -> bool:
    """Whether a parameter's gradient is there and is not what it was."""
    now = None if parameter is None else parameter.grad
    return now is not None and (now is not gradient or now._version != version)


class Clipped:
    """Warns of gradients that came from no backward and that a program clips, by this rank's own norm.

    Clipping changes them in place, as ``copy_`` and ``add_`` do, and leaves their norm or their largest number at the
    limit, a round number and the same one in the next step.
    """

    def __init__(self) -> None:
        self._looks, self._limit = _LOOKS, math.nan

    def look(self, gradients: list[torch.Tensor]) -> None:
        """Of all parameters, before they are averaged."""
        if not self._looks or not gradients or not all(gradient._version for gradient in gradients) or not can_look():
            return
        self._looks -= 1
        dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
        largest = max(float(gradient.abs().max()) for gradient in dense if gradient.numel())
        limit = next(filter(_is_round, (float(total_norm(dense)), largest)), math.nan)
        if math.isclose(limit, self._limit, rel_tol=_AT_LIMIT):
            self._looks = 0
            warnings.warn(
                f"step() averages gradients that came from no backward(), and they look clipped to {limit:.2g}: each "
                "rank clips by its own norm. Give .grad the mean over ranks by hvd.allreduce, and clip then.",
                stacklevel=5,
            )
        self._limit = limit


def _is_round(number: float) -> bool:
    """Whether somebody chose it: it has two digits, such as 0.5, 40 or 0.25."""
    return 0 < number < math.inf and math.isclose(number, float(f"{number:.1e}"), rel_tol=_AT_LIMIT)


def warn_of_clipping_hooks(named: Named) -> None:
    """Of hooks that clip a parameter's gradient before it is averaged; by their names, and by those that they use."""
    for name, one in named:
        for hooks in (private.hooks_before(one), private.gradient_hooks(one)):
            if any(map(private.names_clipping, (hooks or {}).values())):
                warnings.warn(
                    f"a hook on {name} clips this rank's own gradient, and the mean of what is clipped is not what one "
                    "process clips. Clip after backward(): torch.nn.utils.clip_grad_value_(model.parameters(), limit).",
                    stacklevel=11,
                )
                return


class Undistributed:
    """Warns of an optimizer that steps, beside distributed ones, with gradients that nobody averages.

    Inner loops may have such an optimizer: it steps some times between two exchanges, and is then another one.
    Gradients that no backward gave its parameters may be copies of averaged ones: master weights of another type, or in
    one flat tensor.

    Attributes:
        exchanges: how many backwards have reached what a distributed optimizer trains; the caller counts.
    """

    def __init__(self) -> None:
        self.exchanges = 0
        self._seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int, int]]
        self._seen = weakref.WeakKeyDictionary()
        self._by_backward: set[int] = set()  # the parameters, by id, that a backward reached

    def look(self, optimizer: torch.optim.Optimizer, averaged: Callable[[], Named]) -> None:
        """An optimizer that was not distributed is about to step; ``averaged``: the parameters of those that were."""
        if optimizer not in self._seen:
            for one in parameters_of(optimizer):
                if one.requires_grad and one.is_leaf:
                    self._by_backward.discard(id(one))
                    one.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                        lambda reached: self._by_backward.add(id(reached))
                    )
        last, times, alone = self._seen.setdefault(optimizer, (0, 0, 0))
        if times == _MOVES or type(optimizer).__module__.startswith("horovod."):
            return
        if last == self.exchanges and alone + 1 < _ALONE:
            self._seen[optimizer] = last, times, alone + 1
            return
        theirs = averaged()
        held = {id(one) for _, one in theirs}
        mine = [one for one in parameters_of(optimizer) if one.grad is not None and id(one) not in held]
        assigned = [one for one in mine if id(one) not in self._by_backward]
        own = len(mine) - (len(assigned) if _are_copies(assigned, theirs) else 0)
        if not own or (last == self.exchanges and not (hvd.is_initialized() and hvd.size() > 1)):
            return
        times = _MOVES if last == self.exchanges else times + 1
        self._seen[optimizer] = self.exchanges, times, 0
        if times == _MOVES:
            warnings.warn(
                f"an optimizer ({type(optimizer).__name__}) that distribute has not got steps beside one that it has: "
                f"{own} of its parameters have this rank's own gradients, and the ranks train apart. Distribute it, "
                "too, and broadcast its model, unless every rank is to train these parameters for itself.",
                stacklevel=4,
            )


def _are_copies(assigned: list[Parameter], averaged: Named) -> bool:
    """Whether most gradients look like averaged ones, of another type, or are as many numbers in flat tensors.

    Where the averaged ones are gone, nothing tells: they were what could be copied.
    """
    there = [one.grad.detach() for _, one in averaged if one.grad is not None and not one.grad.is_sparse]
    mine = [one.grad.detach() for one in assigned if one.grad is not None and not one.grad.is_sparse]
    numbers, theirs = sum(one.numel() for one in mine), sum(one.numel() for one in there)
    if not mine or not there or (len(mine) < len(there) and theirs <= numbers <= _PADDED * theirs):
        return True

    def is_copy(one: torch.Tensor) -> bool:
        flat = one.reshape(-1).double()
        same = (other.reshape(-1).to(flat) for other in there if other.numel() == len(flat))
        return not flat.any() or any(torch.cosine_similarity(flat, other, dim=0) > _ALIKE for other in same)

    return 2 * sum(map(is_copy, mine)) > len(mine)


UNDISTRIBUTED = Undistributed()


class Within:
    """Refuses parameters that move while backward computes: a hook steps by hand, with this rank's own gradients.

    Attributes:
        watched: what it looks at in this backward.
    """

    def __init__(self) -> None:
        self.watched: list[weakref.ref[Parameter]] = []
        self._fingerprints = fingerprints([])

    def begin(self, trained: Named) -> None:
        """A backward has reached these parameters."""
        self.watched = [weakref.ref(parameter) for _, parameter in trained] if can_look() else []
        self._fingerprints = self._look()

    def end(self) -> None:
        """It has ended.

        Raises:
            InvalidArgumentError: they are not what they were.
        """
        now = self._look()
        self.watched = []
        if not np.array_equal(now, self._fingerprints, equal_nan=True):
            raise InvalidArgumentError(
                "parameters moved within backward(), where gradients are this rank's own and the mean is not there "
                "yet: a hook changes them; step after backward()."
            )

    def _look(self) -> npt.NDArray[np.float64]:
        return fingerprints(parameter for weak in self.watched if (parameter := weak()) is not None)


class ByHand:
    """Warns where parameters move between gradients of ``torch.autograd.grad``, which nobody averages."""

    def __init__(self) -> None:
        self._looks, self._moved = _LOOKS, 0
        self._fingerprints: npt.NDArray[np.float64] | None = None

    def look(self, parameter: Parameter | None, *, first: bool) -> None:
        """A gradient that no backward averages; ``first``: since gradients were averaged."""
        if first:
            self._moved, self._fingerprints = 0, None
        if parameter is None or not self._looks or not can_look():
            return
        self._looks -= 1
        now = fingerprints([parameter])
        self._moved += self._fingerprints is not None and not np.array_equal(now, self._fingerprints)
        self._fingerprints = now
        if self._moved == _MOVES:
            self._looks = 0
            warnings.warn(
                "the parameters move between gradients of torch.autograd.grad, which hvdkit does not average: only "
                "backward() and step() do. Assign these gradients to .grad and call step(), or average them by "
                "hvd.allreduce.",
                stacklevel=6,
            )
