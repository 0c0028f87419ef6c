"""Whether the ranks train apart: parameters, buffers, other optimizers, copies from before ``broadcast_state``."""

from __future__ import annotations

import contextlib
import math
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import horovod.torch as hvd
import numpy as np
import numpy.typing as npt
import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.optim.swa_utils import AveragedModel

from hvdkit.errors import InvalidArgumentError
from hvdkit.steps import torch_tensors
from hvdkit.steps.divergence import Seen, UntrainedState
from hvdkit.torch.batch_norm import SyncBatchNorm, local_statistics
from hvdkit.torch.buckets import Named, Parameter, total_norm
from hvdkit.torch.private import eagerly, variables_of_callers
from hvdkit.torch.state import broadcast_tensors, buffers_of, flattened, layout, parameters_of, plain_name

_STATES: weakref.WeakKeyDictionary[torch.nn.Module, UntrainedState] = weakref.WeakKeyDictionary()
_EACH_STEP: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()
_OBSERVERS = ("torch.ao.quantization", "torchao.quantization")
_PART, _PART_ON_GPU = 1 << 16, 1 << 22
"""Numbers that are looked at together. PyTorch copies them to float64, on a CPU within its cache."""
_MOVES, _LOOKS = 3, 50
"""How often what nobody averages has moved when that is told; how often one looks: inner loops need not move it."""
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
        parts = flat.split(_PART if flat.device.type == "cpu" else _PART_ON_GPU)  # type: ignore[no-untyped-call]
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


def own_buffers(model: torch.nn.Module) -> set[str]:
    """Plain names of persistent buffers that are each rank's own: statistics, and spectral norm's vectors."""
    found = set(local_statistics(model))
    for prefix, module in model.named_modules():
        names: set[str] = set()
        kinds = [cls.__module__ for cls in type(module).__mro__]
        if isinstance(module, _SpectralNorm) or any(kind.startswith(_OBSERVERS) for kind in kinds):
            names.update(module._buffers)
        elif not isinstance(module, SyncBatchNorm):
            names.update(one for one in module._buffers if one.startswith(("running_", "moving_")))
        if isinstance(module, _NormBase):
            names.add("num_batches_tracked")
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                names.update((f"{hook.name}_u", f"{hook.name}_v"))
        found.update(plain_name(f"{prefix}.{name}" if prefix else name) for name in names)
    return found


def untrained_of(model: torch.nn.Module) -> UntrainedState:
    """What the ranks have seen of this model."""
    if model not in _STATES:
        _STATES[model] = UntrainedState(
            "give every rank the root's by broadcast_state, once or with buffers='each step'",
            "A buffer that each rank is to have for itself is registered with persistent=False.",
            stacklevel=11,
        )
    return _STATES[model]


def look(model: torch.nn.Module | None) -> Seen:
    """This rank's buffers and frozen weights, as far as they are to be those of every rank."""
    if model is None:
        return Seen([], torch_tensors.digests([]))
    own = own_buffers(model)
    held = {} if model in _EACH_STEP else buffers_of(model, persistent=True)
    shared = {name: one for name, one in held.items() if name not in own}
    weights = {plain_name(name): one.detach() for name, one in model.named_parameters() if not one.requires_grad}
    tensors = {layout(name, one): one for name, one in flattened({**shared, **weights}).items() if _is_plain(one)}
    values = {}
    for row in tensors.keys() & untrained_of(model).suspects.keys():  # on the host, with its epsilon
        real = torch.view_as_real(tensors[row]) if tensors[row].is_complex() else tensors[row]
        epsilon = torch.finfo(real.dtype).eps if real.is_floating_point() else 0.0
        values[row] = real.detach().double().cpu().numpy().copy(), epsilon
    frozen = {layout(name, one) for name, one in flattened(weights).items()}
    return Seen(list(tensors), torch_tensors.digests(list(tensors.values())), values, frozen)


def _is_plain(tensor: torch.Tensor) -> bool:
    dense = tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type != "meta"
    return dense and type(tensor) in PLAIN and not torch.nn.parameter.is_lazy(tensor)


def broadcast_each_step(model: torch.nn.Module, root: int) -> None:
    """Give every rank the root's persistent buffers before each forward of the model in training."""
    end_each_step(model)

    @eagerly
    def before_forward(module: torch.nn.Module, args: Any) -> None:  # noqa: ARG001
        if module.training and torch.is_grad_enabled():  # evaluation may be one rank's alone
            broadcast_tensors(buffers_of(module, persistent=True).values(), root)

    _EACH_STEP[model] = model.register_forward_pre_hook(before_forward)


def end_each_step(model: torch.nn.Module) -> None:
    """No longer do what ``broadcast_each_step`` has begun."""
    handle = _EACH_STEP.pop(model, None)
    if handle is not None:
        handle.remove()


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


class Undistributed:
    """Warns of an optimizer that steps, beside distributed ones, with gradients that nobody averages.

    Inner loops may have such an optimizer: it steps some times between two exchanges, and is then another one. Only
    gradients of backwards count: what a program assigned may be copies of averaged ones (master weights).

    The caller counts ``exchanges``: how many backwards have reached what a distributed optimizer trains.
    """

    def __init__(self) -> None:
        self.exchanges = 0
        self._seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int, int]]
        self._seen = weakref.WeakKeyDictionary()
        self._by_backward: set[int] = set()  # the parameters, by id, that a backward reached

    def look(self, optimizer: torch.optim.Optimizer, averages: Callable[[Parameter], bool]) -> None:
        """An optimizer that was not distributed is about to step; ``averages``: whether another one has a parameter."""
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
        mine = [one for one in parameters_of(optimizer) if one.grad is not None and id(one) in self._by_backward]
        own = sum(not averages(one) for one in mine)
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


# Copies of a model from before broadcast_state: a target network, a teacher, an average of the weights ----------------

_LOOKED_AT = 16
_LONGEST = 1000
_MOST = 20_000
_OWN = str(Path(__file__).parents[1])
_NO_HOLDERS = (type, ModuleType, FunctionType, str, bytes, int, float, type(None))
_OF_MODULES = frozenset(vars(torch.nn.Module()))
PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Classes of tensors without behaviour of their own; ``torch.nn.Buffer`` makes a ``torch.Tensor``."""
SampledValues = tuple[torch.Size, torch.dtype, tuple[Any, ...]]


class Copies:
    """Warns of tensors that still hold what this rank's model was before it got the root's.

    The first backward after ``broadcast_state`` tells: until then a program may give them the root's values, too.

    Attributes:
        found: of each one the name of the parameter, the tensor, and what it held.
    """

    def __init__(self) -> None:
        self.found: list[tuple[str, weakref.ref[torch.Tensor], SampledValues]] = []

    @contextlib.contextmanager
    def found_after(self, model: torch.nn.Module) -> Iterator[None]:
        """In here the model's parameters become those of another rank."""
        before = {name: sample_values(one) for name, one in model.named_parameters()}
        yield
        after = ((name, sample_values(one)) for name, one in model.named_parameters())
        replaced = {old: name for name, new in after if (old := before.get(name)) is not None and old != new}
        if not replaced:
            return
        kinds = {(shape.numel(), dtype) for shape, dtype, _ in replaced}
        for tensor in tensors_in_reach():
            if (tensor.numel(), tensor.dtype) in kinds and (held := sample_values(tensor)) in replaced:
                self.found.append((replaced[held], weakref.ref(tensor), held))

    def tell(self) -> None:
        """A backward has begun, and something was found."""
        found, self.found = self.found, []
        held = [name for name, weak, was in found if (one := weak()) is not None and sample_values(one) == was]
        if held:
            warnings.warn(
                f"a copy of the model was made before broadcast_state: it holds the {held[0]} that this rank began "
                "with, and another rank's copy has other values. Copy the model (for a target network, a teacher, an "
                "average of the weights) after broadcast_state, or give the copy to broadcast_state, too.",
                stacklevel=8,
            )


def tensors_in_reach() -> Iterator[torch.Tensor]:
    """Tensors that the calling program names: its variables, and what these hold, nearest first.

    Neither long containers are looked through, which are data, nor more than ``_MOST`` objects: the heap of a program
    may hold millions. An average of the weights that has had no update counts as not there: it will take the model's.
    """
    near = deque[Any](variables_of_callers(but=_OWN))
    seen, left = set[int](), _MOST
    while near and left:
        value = near.popleft()
        if id(value) in seen or isinstance(value, _NO_HOLDERS):
            continue
        seen.add(id(value))
        left -= 1
        if isinstance(value, torch.Tensor):
            if type(value) in PLAIN:
                yield value
        elif len(near) >= left:
            continue  # what it holds would not be looked at
        elif isinstance(value, torch.nn.Module):
            if not isinstance(value, AveragedModel) or value.n_averaged:
                near += [*value.parameters(), *value.buffers()]
                near += [held for name, held in vars(value).items() if name not in _OF_MODULES]
        elif isinstance(value, dict | list | tuple | set | deque):
            if len(value) <= _LONGEST:
                near += value.values() if isinstance(value, dict) else value
        elif hasattr(value, "__dict__"):
            near += vars(value).values()


@torch.no_grad()
def sample_values(tensor: torch.Tensor) -> SampledValues | None:
    """Some of a tensor's numbers, which tell it from others of its kind; None where all are equal or none is there."""
    if type(tensor) not in PLAIN or tensor.layout != torch.strided or tensor.device.type == "meta":
        return None
    numbers: tuple[Any, ...] = ()
    with contextlib.suppress(RuntimeError):  # any tensor of the process may be asked: nested, freed, of an ended vmap
        flat = tensor.detach().reshape(-1)
        numbers = tuple(flat[:: max(1, len(flat) // _LOOKED_AT)][:_LOOKED_AT].tolist())
    return (tensor.shape, tensor.dtype, numbers) if len(set(numbers)) > 1 else None


COPIES = Copies()
