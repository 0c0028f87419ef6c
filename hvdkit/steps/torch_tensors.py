"""What PyTorch's tensors are, bit by bit, and the memory that they take: for ``hvdkit.torch`` and Keras on PyTorch.

Keras stands on no framework binding for PyTorch. PyTorch is imported by who asks for it alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdkit.steps import agreement
from hvdkit.steps.gradients import BFLOAT16_RANKS

_CHUNK = 2**20  # words; few kernels count more than the cache there


def device_bytes() -> float:
    """Memory of all accelerators, NaN without one: which one is pinned is known to the first thread alone."""
    import torch

    if not torch.cuda.is_available():
        return math.nan
    return float(sum(map(torch.cuda.memory_allocated, range(torch.cuda.device_count()))))


class LaterNumber:
    """A number that a GPU's current stream still computes, for another thread, whose own stream waits for no other."""

    def __init__(self, value: Any) -> None:
        import torch

        self._value, self._there = value, torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._there.record(torch.cuda.current_stream(value.device))

    def __float__(self) -> float:
        self._there.synchronize()
        return float(self._value)


@functools.cache
def sends_bfloat16(device: str, ranks: int) -> bool:
    """Whether Horovod adds up PyTorch's bfloat16 on "cpu" or "cuda" over so many ranks; else it goes as float32.

    ``hvdkit install`` builds functions for it in. One of ``--plain``, or built elsewhere, does not have them.
    """
    from horovod.torch.mpi_ops import mpi_lib

    place = "" if device == "cpu" else f"{device}_"
    return ranks <= BFLOAT16_RANKS and hasattr(mpi_lib, f"horovod_torch_allreduce_async_torch_{place}BFloat16Tensor")


def digests(tensors: Sequence[Any]) -> agreement.Digests:
    """A digest of each tensor's bits, int64 (len(tensors),); made on its device, fetched together."""
    import torch

    result = np.zeros(len(tensors), dtype=np.int64)
    elsewhere: dict[Any, list[int]] = {}
    for position, tensor in enumerate(tensors):
        if tensor.device.type == "cpu":  # NumPy mixes faster there
            result[position] = agreement.array_digests([_words(tensor).numpy()]).item()
        else:
            elsewhere.setdefault(tensor.device, []).append(position)
    for positions in elsewhere.values():
        result[positions] = torch.stack([digest_on_device(tensors[at]) for at in positions]).cpu().numpy()
    return result


def digest_on_device(tensor: Any, chunk: int = _CHUNK) -> Any:
    """The same of one by PyTorch's operations, int64 (), on ``chunk`` words at once; another number, another digest."""
    import torch

    salts = _salts(chunk, tensor.device)
    sums = (agreement.salted(part.long(), salts[: len(part)]).sum() for part in _words(tensor).split(chunk))
    return torch.as_tensor(agreement.join_chunks(sums), device=tensor.device)


def _words(tensor: Any) -> Any:
    """A tensor's bits as integers: eight bytes in each where that comes out even."""
    import torch

    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = real.contiguous().reshape(-1)
    size = flat.element_size()
    if len(flat) == 0 or len(flat) * size % 8:
        return flat.view(kinds[size])
    return (flat.clone() if flat.storage_offset() * size % 8 else flat).view(torch.int64)


@functools.cache
def _salts(count: int, device: Any) -> Any:
    import torch

    return torch.from_numpy(agreement.salts(count)).to(device)


def start_sharing(
    hvd: Any, pieces: list[Any], owner: int, name: str, copy: Callable[[list[Any], list[Any]], Any] | None = None
) -> Callable[[], None]:
    """Begin to give every rank the owner's pieces, in place; a collective. What is returned waits for it.

    Args:
        hvd: ``horovod.torch``.
        pieces: tensors of one type on one device, of the same shapes on all ranks.
        owner: the rank that has them. A lone one travels out of its own memory.
        copy: puts the values of many tensors into others; default: one by one.
    """
    import torch

    pieces = [one.detach() for one in pieces]
    has_them = hvd.rank() == owner
    if in_place := len(pieces) == 1 and pieces[0].is_contiguous():
        message = pieces[0].view(-1)
    elif has_them:
        message = torch.cat([piece.reshape(-1) for piece in pieces])
    else:
        message = pieces[0].new_empty(sum(map(torch.Tensor.numel, pieces)))
    handle = hvd.broadcast_async_(message.view(torch.uint8), owner, name=name)

    def wait() -> None:
        hvd.synchronize(handle)
        if not (in_place or has_them):
            got: Any = torch.split(message, list(map(torch.Tensor.numel, pieces)))
            values = [one.view(piece.shape) for one, piece in zip(got, pieces, strict=True)]
            if copy is not None:
                copy(pieces, values)
                return
            for piece, value in zip(pieces, values, strict=True):
                piece.copy_(value)

    return wait
