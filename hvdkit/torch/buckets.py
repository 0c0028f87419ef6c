"""How PyTorch's gradients lie side by side in memory and travel between ranks; used by ``exchange``.

A bucket is one flat tensor: gradients, whose ``.grad`` lie in its memory, and behind them this rank's control word
(``hvdkit.core.layout``). A step looks at all gradients of a bucket at once, by loops that run in C.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import operator
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, repeat
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from horovod.torch.mpi_ops import poll, synchronize  # that of ``hvd`` is a range of its own where a profile is made

from hvdkit.core import layout as core_layout
from hvdkit.core import listeners
from hvdkit.core.compression import AT_ONCE, Packing, new_packing
from hvdkit.core.layout import NO_FLAGS, ControlWord, Flags, is_held, read_flags
from hvdkit.errors import InvalidArgumentError
from hvdkit.steps.gradients import obstacle_of_type
from hvdkit.steps.torch_tensors import LaterNumber, sends_bfloat16
from hvdkit.torch import private

Parameter = torch.nn.Parameter
Named = Sequence[tuple[str, Parameter]]
FUSION_BYTES = 4 * 2**20
"""Of Horovod's fusion buffer. Two full buckets do not fit into it, so that Horovod copies neither."""
REDUCED = (torch.float16, torch.float32, torch.float64)  # what every Horovod adds up, and NumPy knows
_WIDE = (torch.float32, torch.float64)  # what compression="bf16" sends in half of the bytes, or a quarter
_HUGE_PAGE = 2**21
_REQUIRES_GRAD, _VERSION = operator.attrgetter("requires_grad"), operator.attrgetter("_version")
_LAYOUT = operator.attrgetter("layout")


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """How gradients are put into buckets; see ``hvdkit.torch.distribute``."""

    bucket_mb: float = 4
    groups: int | None = None
    sparse_as_dense: bool = False

    def __post_init__(self) -> None:
        size = self.bucket_mb
        if isinstance(size, bool) or not (isinstance(size, int | float) and math.isfinite(size) and size > 0):
            raise InvalidArgumentError(f"bucket_mb must be a positive, finite number of MB, got {size!r}.")
        groups = self.groups
        if groups is not None and (isinstance(groups, bool) or not isinstance(groups, int) or groups < 1):
            got = repr(groups) if isinstance(groups, int | float | str) else f"a {type(groups).__name__}"
            raise InvalidArgumentError(
                f"groups must be an integer >= 1, got {got}; lists of parameters are not taken: leave it out."
            )

    def split(self, named: Named) -> Iterable[Named]:
        """The members of each bucket, in their order."""
        kinds = [(parameter.dtype, parameter.device) for _, parameter in named]
        sizes = [parameter.numel() * parameter.element_size() for _, parameter in named]
        limit = 1e6 * self.bucket_mb if self.groups is None else sum(sizes) / self.groups
        found = core_layout.in_buckets(kinds, sizes, limit)
        return [[named[place] for place in places] for places in found]


class Reducer:
    """Averages flat tensors over the ranks of a process set, in place; ``compression`` may change between exchanges."""

    def __init__(self, process_set: Any, compression: str, predivide: float) -> None:
        self.process_set, self.compression, self._predivide = process_set, compression, predivide
        self._packed: list[PackedMean] = []

    def carried(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as one that Horovod can send, itself where it can be."""
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if self.compression == "fp16" and real.dtype in (*_WIDE, torch.bfloat16):
            return real.half()
        if self.compression == "bf16" and real.dtype in _WIDE:
            return real.bfloat16()
        if real.dtype == torch.bfloat16 and sends_bfloat16(real.device.type, self.process_set.size()):
            return real
        return real if real.dtype in REDUCED else real.float()

    def start(self, flat: torch.Tensor, numbers: int, name: str, packings: Sequence[Packing]) -> FlatMean | PackedMean:
        """Begin to average ``numbers`` gradients and the control word behind them."""
        if not packings or self.compression != "int8":
            return FlatMean(*self._allreduce(flat, name), flat, numbers)
        self.go_on(wait=False)
        self._packed.append(PackedMean(self.process_set, flat, numbers, name, packings))
        return self._packed[-1]

    def go_on(self, *, wait: bool) -> None:
        """Have packed gradients that have arrived here added up and sent to all; ``wait``: all of them."""
        self._packed = [mean for mean in self._packed if not mean.add_up(wait=wait)]

    def forget(self) -> None:
        """What is on its way will never arrive: Horovod starts anew."""
        self._packed.clear()

    def _allreduce(self, flat: torch.Tensor, name: str) -> tuple[int, torch.Tensor]:
        carried = self.carried(flat)
        before, after = 1.0 / self._predivide, self._predivide / self.process_set.size()
        if carried.dtype != torch.float16 and math.frexp(after)[0] == 0.5:  # exact, and now it is in the cache
            before, after = before * after, 1.0
        handle = hvd.allreduce_async_(
            carried,
            name=f"{name}.bf16" if self.compression == "bf16" else name,  # Horovod remembers a name's type
            op=hvd.Sum,
            prescale_factor=before,
            postscale_factor=after,
            process_set=self.process_set,
        )
        return handle, carried

    def gather(self, rows: torch.Tensor, name: str) -> int:
        """Begin to collect all ranks' rows; returns Horovod's handle."""
        handle: int = hvd.allgather_async(rows, name=name, process_set=self.process_set)
        return handle


class FlatMean:
    """A flat tensor that an allreduce averages: ``numbers`` gradients, and the control word behind them."""

    def __init__(self, handle: int, carried: torch.Tensor, flat: torch.Tensor, numbers: int) -> None:
        self._handle, self._carried, self._flat, self._numbers = handle, carried, flat, numbers

    def wait(self) -> torch.Tensor:
        """Put the mean into the flat tensor; returns that of the control words, real, (n,)."""
        synchronize(self._handle)
        carried, flat = self._carried, self._flat
        if carried is flat:
            return flat[self._numbers :]
        real = torch.view_as_real(flat) if flat.is_complex() else flat
        if carried.data_ptr() != real.data_ptr():
            real.copy_(carried)
        return carried[self._numbers :, 0] if flat.is_complex() else carried[self._numbers :]


class PackedMean:
    """A flat tensor whose gradients travel packed, on the host, beside the control word as it is; see ``FlatMean``."""

    def __init__(
        self, process_set: Any, flat: torch.Tensor, numbers: int, name: str, packings: Sequence[Packing]
    ) -> None:
        real = torch.view_as_real(flat) if flat.is_complex() else flat
        self._mean = real[:numbers].flatten()
        word = (real[numbers:, 0] if flat.is_complex() else real[numbers:]).float().cpu().contiguous()
        self._word = hvd.allreduce_async(word, name=f"{name}.word", op=hvd.Average, process_set=process_set)
        self._host = (self._mean.float() if self._mean.dtype == torch.bfloat16 else self._mean).cpu()
        parts = np.split(self._host.numpy(), np.cumsum([packing.length for packing in packings])[:-1])
        self._parts = [
            _PackedPart(process_set, values, f"{name}.{number}", packing)
            for number, (values, packing) in enumerate(zip(parts, packings, strict=True))
        ]

    def add_up(self, *, wait: bool) -> bool:
        """Add up this rank's share of what has come (``wait``: will come) and send it to all; whether that is done."""
        return all([part.add_up(wait=wait) for part in self._parts])

    def wait(self) -> torch.Tensor:
        """See ``FlatMean.wait``."""
        self.add_up(wait=True)
        for part in self._parts:
            part.wait()
        if self._host.data_ptr() != self._mean.data_ptr():
            self._mean.copy_(self._host)
        word: torch.Tensor = synchronize(self._word)
        return word


class _PackedPart:
    """Some of the gradients of a ``PackedMean`` on their way; ``values`` are this rank's, on the host."""

    def __init__(self, process_set: Any, values: Any, name: str, packing: Packing) -> None:
        self._name, self._among, self._packing = name, {"process_set": process_set}, packing
        self._values = values
        rows = torch.from_numpy(packing.pack(values))
        self._rows = hvd.alltoall_async(rows, name=f"{name}.parts", **self._among)
        self._ranks, self._gathered = len(rows), 0
        self._is_added = False

    def add_up(self, *, wait: bool) -> bool:
        """See ``PackedMean.add_up``."""
        if not self._is_added and (wait or poll(self._rows)):
            received, _ = synchronize(self._rows)  # and how many rows of each rank
            mine = torch.from_numpy(self._packing.add_up(received.numpy(), 1 / self._ranks))
            self._gathered = hvd.allgather_async(mine[None], name=f"{self._name}.mean", **self._among)
            self._is_added = True
        return self._is_added

    def wait(self) -> None:
        """Put the mean in the place of this rank's values, once it was added up."""
        self._packing.unpack(synchronize(self._gathered).numpy(), self._values)


class Bucket:
    """Gradients of one type on one device, side by side in memory.

    Args:
        named: the parameters in the order in which backward is expected to produce their gradients; may be none.
        sparse_as_dense: whether sparse gradients become dense ones.
    Attributes:
        param_ids: the id of each parameter. The hooks of parameters hold buckets, so that these hold parameters weakly.
        arrived: the id of each parameter whose gradient has come in this backward, again where it came again.
        leaves_early: whether it may leave before backward has ended: no gradient of it has come twice in one.
        on_gpu: whether each gradient's stream is to be noted by ``note_stream`` when it comes.
        packings: how they travel where not as they are, one after another.
    """

    packings: Sequence[Packing] = ()

    def __init__(self, named: Named, sparse_as_dense: bool) -> None:
        self.name = " .. ".join(dict.fromkeys([named[0][0], named[-1][0]])) if named else "no dense gradient"
        self._names = [name for name, _ in named]
        self._parameters = [weakref.ref(parameter) for _, parameter in named]
        self.param_ids = [id(parameter) for _, parameter in named]
        self.leaves_early = True
        self._sparse_as_dense = sparse_as_dense
        kind = (named[0][1].dtype, named[0][1].device) if named else (torch.float32, torch.device("cpu"))
        starts = list(accumulate((parameter.numel() for _, parameter in named), initial=0))
        self._numbers, self._control = starts.pop(), ControlWord(len(named))
        self._where = [(each.shape, strides(each), start) for (_, each), start in zip(named, starts, strict=True)]
        self.arrived: list[int] = []
        self.on_gpu, self._streams = kind[1].type == "cuda", set[Any]()
        self._absent: list[int] = []
        self._kept: list[tuple[torch.Tensor, int]] = []  # a gradient in the program's own memory, and its place here
        self._sent: FlatMean | PackedMean | None = None
        self._lie_in(_zeros(self._numbers + len(self._control), *kind))

    def _lie_in(self, flat: torch.Tensor) -> None:
        self._flat, self._storage = flat, private.storage_of(flat)
        self._views = [self._lying(place) for place in range(len(self._where))]
        self._addresses = list(map(torch.Tensor.data_ptr, self._views))
        self._word: Any = flat[self._numbers :]
        self._usual_word: Any = torch.from_numpy(self._control.usual).to(self._word)
        if flat.device.type == "cpu" and flat.dtype in REDUCED:  # a number costs a tenth through NumPy
            self._word, self._usual_word = self._word.numpy(), self._usual_word.numpy()
        self._owners = self._count_owners(repeat(True))

    def _lying(self, place: int) -> torch.Tensor:
        """The part of a gradient: no view to autograd, which would refuse the ``detach_()`` of older programs."""
        shape, strides, start = self._where[place]
        memory = self._flat.untyped_storage()
        return self._flat.new_empty(0).set_(memory, self._flat.storage_offset() + start, shape, strides)

    def _count_owners(self, chosen: Iterable[bool]) -> tuple[int, int]:
        most = max(map(private.python_owners, compress(self._views, chosen)), default=0)
        return most, private.storage_owners(self._storage)

    def _leave_to_holders(self, chosen: Iterable[bool]) -> None:
        """Move, where somebody has kept a last gradient, itself or detached: theirs must not become the next one."""
        if all(map(operator.le, self._count_owners(chosen), self._owners)):
            return
        before = self._views
        self._lie_in(_zeros(self._flat.numel(), self._flat.dtype, self._flat.device).copy_(self._flat))
        for weak, old, new in zip(self._parameters, before, self._views, strict=True):
            parameter = weak()
            if parameter is not None and parameter.grad is old:
                parameter.grad = new

    def begin(self) -> None:
        """As before the first gradient of a backward."""
        self.arrived.clear()
        self._streams.clear()
        self._absent, self._kept, self._sent = [], [], None

    def in_flight(self) -> bool:
        """Whether it is on its way."""
        return self._sent is not None

    def send_empty(self, reducer: Reducer, flags: Flags) -> None:
        """Give the other ranks, which wait for it, no gradient, and what this one says."""
        self._send(reducer, flags, range(len(self._names)))

    def _send(self, reducer: Reducer, flags: Flags, absent: Sequence[int]) -> None:
        if absent or any(flags):
            self._control.write(self._word, flags, absent, self._usual_word)
        else:
            self._word[:] = self._usual_word
        self._ranks = reducer.process_set.size()
        self._sent = reducer.start(self._flat, self._numbers, self.name, self.packings)

    def pack(self, number: int, process_set: Any) -> None:
        """Have its gradients travel in 8 bits, in parts, of which one is packed while another travels.

        ``number``: of the exchange, for names of their own.
        """
        wide = 2 if self._flat.is_complex() else 1
        pieces = [
            (f"{number}.{name}.{first}", min(AT_ONCE, size - first))
            for name, size in zip(self._names, (wide * math.prod(shape) for shape, _, _ in self._where), strict=True)
            for first in range(0, size, AT_ONCE)
        ]
        parts = core_layout.in_buckets([0] * len(pieces), [size for _, size in pieces], AT_ONCE)
        rank, ranks, saves = process_set.rank(), process_set.size(), process_set.process_set_id == 0
        self.packings = [
            new_packing("int8", [pieces[place] for place in places], rank, ranks, saves=saves) for places in parts
        ]

    def is_complete(self) -> bool:
        """As many gradients have come as it has; whether it may leave before the end of backward."""
        if self._sent is not None:
            raise InvalidArgumentError(
                f"the gradient of {self._names[self.param_ids.index(self.arrived[-1])]} grew after it had been sent to "
                "the other ranks; activation checkpointing of shared weights needs use_reentrant=False."
            )
        if len(set(self.arrived)) < len(self.arrived):
            self.leaves_early = False  # only the end of backward tells when it has grown for the last time
        if not self.leaves_early:
            return False
        # Hooks of the program's own may still change a gradient.
        hooks = map(private.gradient_hooks, [weak() for weak in self._parameters])
        return max(map(len, hooks)) == 1

    def note_stream(self) -> None:
        """A gradient has come on the stream that is current, that of its part of the model's forward."""
        self._streams.add(torch.cuda.current_stream(self._flat.device))

    def _wait_for_streams(self) -> bool:
        """Have the current stream wait for those on which gradients came; whether there was another."""
        here = torch.cuda.current_stream(self._flat.device)
        others = self._streams - {here}
        for stream in others:
            here.wait_stream(stream)
        return bool(others)

    def _take(self, flags: Flags) -> None:
        """Put all gradients into their places, with zeros for those that this rank does not have."""
        came_on_others = self.on_gpu and self._wait_for_streams()
        places = range(len(self._views))
        if list(map(torch.Tensor.data_ptr, self._views)) != self._addresses:  # ``.grad.data`` was assigned to
            for place in places:
                if self._views[place].data_ptr() != self._addresses[place]:
                    self._views[place] = self._lying(place)
        parameters: list[Any] = [weak() for weak in self._parameters]
        if flags.changed:
            parameters = list(map(self._fitting, places))
        gradients: list[Any] = [None if parameter is None else parameter.grad for parameter in parameters]
        taken = list(map(operator.is_not, gradients, self._views))
        if not any(taken):
            return  # they were added up where they are
        self._leave_to_holders(taken)
        if any(map(operator.is_, gradients, repeat(None))):
            self._absent = [place for place in places if gradients[place] is None]
            for place in self._absent:
                self._views[place].zero_()
                taken[place] = False
        fresh: list[Any] = list(compress(gradients, taken))
        if any(map(_REQUIRES_GRAD, fresh)) or any(map(operator.is_not, map(_LAYOUT, fresh), repeat(torch.strided))):
            fresh = list(map(self._dense, compress(self._names, taken), fresh))
        if fresh:
            if came_on_others:
                for gradient in fresh:  # whose memory may be given to its own stream again, before it is copied
                    gradient.record_stream(torch.cuda.current_stream(gradient.device))
            private.foreach_copy(list(compress(self._views, taken)), fresh)
        if flags.late or any(map(_VERSION, fresh)):
            # What no backward has just made, and has another holder, is the program's own memory and has to stay; but
            # into what was expanded nothing can be written.
            usual = private.owners_of_new(lists=2)
            for place, gradient, held in zip(compress(places, taken), fresh, private.owners(fresh), strict=True):
                grown = gradient._version or (flags.late and not private.overlaps_itself(gradient))
                if gradient is gradients[place] and grown and held != usual:
                    self._kept.append((gradient, place))
            for _, place in self._kept:
                taken[place] = False
        own: Iterable[Any] = compress(zip(parameters, self._views, strict=True), taken)
        for parameter, view in own:
            parameter.grad = view

    def _dense(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.requires_grad:
            raise InvalidArgumentError(
                f"the gradient of {name} has a graph (backward(create_graph=True)), which no mean over ranks can keep; "
                "take second derivatives of torch.autograd.grad instead."
            )
        if not gradient.is_sparse:
            return gradient
        if not self._sparse_as_dense:
            raise InvalidArgumentError(
                f"the gradient of {name} is sparse, though no module with sparse=True holds it; use "
                "distribute(..., sparse_as_dense=True)."
            )
        return gradient.to_dense()

    def launch(self, reducer: Reducer, flags: Flags) -> None:
        """Begin to travel, if it has not yet."""
        if self._sent is not None:
            return
        self._take(flags)
        if listeners.MONITORS:
            self._look()
        self._send(reducer, flags, self._absent)

    def _look(self) -> None:
        """Say of what this rank's own gradient is not finite, while it can be told from the others'."""
        whole = total_norm([self._flat[: self._numbers]])
        if self._flat.is_cuda:  # which the host does not wait for
            listeners.looked(self._names[0], LaterNumber(whole))
        elif not whole.isfinite():
            each = zip(self._names, self._views, strict=True)
            name = next((name for name, view in each if not view.isfinite().all()), "")
            listeners.looked(name, math.nan if name else 0.0)

    def finish(self) -> Flags:
        """Wait; then every gradient that some rank had is the mean. Returns how many ranks say what."""
        word: Any = self._sent.wait()  # type: ignore[union-attr]
        flags = NO_FLAGS
        if word[0] > 0:
            shares = word.tolist()
            flags = read_flags(shares, self._ranks)
            for place in self._absent:
                if is_held(shares, place) and (parameter := self._fitting(place)) is not None:
                    parameter.grad = self._views[place]
        for gradient, place in self._kept:
            gradient.copy_(self._views[place])
        self.begin()
        return flags

    def _fitting(self, place: int) -> Parameter | None:
        """The parameter, if there still is one and it is what it was when the bucket was made."""
        parameter, flat = self._parameters[place](), self._flat
        was = flat.dtype, flat.device, self._where[place][0]
        fits = parameter is not None and (parameter.dtype, parameter.device, parameter.shape) == was
        return parameter if fits else None


def obstacle_to(parameter: Parameter) -> str | None:
    """Why the parameter's gradient cannot travel, and what to do; None if it can."""
    if torch.nn.parameter.is_lazy(parameter) or parameter.device.type == "meta":
        why, fix = "it has no data yet", "run one batch through the model, or materialize it, before distribute"
    elif parameter.layout != torch.strided or hasattr(parameter, "to_local"):  # a DTensor
        why = f"it is a {'DTensor' if hasattr(parameter, 'to_local') else parameter.layout}"
        fix = "distribute takes plain dense parameters, whole on every rank"
    elif getattr(parameter, "grad_dtype", parameter.dtype) != parameter.dtype:  # since PyTorch 2.10
        why = f"its grad_dtype is {parameter.grad_dtype}, and its own is {parameter.dtype}"
        fix = "leave grad_dtype as it is; parameters in float32 and torch.autocast have gradients in float32"
    elif parameter.requires_grad and (of_type := obstacle_of_type(str(parameter.dtype).removeprefix("torch."))):
        return of_type
    elif parameter.device.type not in ("cpu", "cuda"):
        why = f"it is on {parameter.device}"
        fix = "Horovod reduces on CPUs and on CUDA or ROCm GPUs: move the model there"
    else:
        return None
    return f"{why}; {fix}."


def strides(parameter: Parameter) -> tuple[int, ...]:
    """The parameter's own where they leave no gaps (channels_last), as autograd does it; else those of its shape."""
    if parameter.numel() and _is_dense(parameter):
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order of the axes."""
    steps = sorted((stride, length) for stride, length in zip(tensor.stride(), tensor.shape, strict=True) if length > 1)
    return all(stride == math.prod(length for _, length in steps[:number]) for number, (stride, _) in enumerate(steps))


def _zeros(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory of a bucket, on a CPU in huge pages: ranks of one host copy out of each other's memory, page by page."""
    size = length * dtype.itemsize
    if device.type != "cpu" or size < _HUGE_PAGE // 4 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(length, dtype=dtype, device=device)
    whole = -(-size // _HUGE_PAGE) * _HUGE_PAGE  # the kernel gives no huge page for a part of one
    memory = mmap.mmap(-1, whole + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start).view(dtype)


def total_norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The norm of all numbers in some tensors, float32 ()."""
    half = (torch.float16, torch.bfloat16)
    types = [(one, torch.float32 if one.dtype in half else None) for one in tensors if one.numel()]
    norms = [torch.linalg.vector_norm(one, dtype=dtype).float() for one, dtype in types]
    if not norms:
        return torch.zeros(())
    whole: torch.Tensor = torch.linalg.vector_norm(torch.stack([one.to(norms[0].device) for one in norms]))
    return whole
