"""Gradients that travel packed (``compression="int8"``); packed on the host, by ``hvdkit.core.compression``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from horovod.torch.mpi_ops import poll, synchronize

from hvdkit.core import layout
from hvdkit.core.compression import AT_ONCE, Packing, new_packing


def packings_of(names: Sequence[str], sizes: Sequence[int], process_set: Any) -> list[Packing]:
    """How gradients that lie one after another are packed: in parts, of which one is packed while another travels."""
    pieces = [
        (f"{name}.{first}", min(AT_ONCE, size - first))
        for name, size in zip(names, sizes, strict=True)
        for first in range(0, size, AT_ONCE)
    ]
    together = layout.in_buckets([0] * len(pieces), [size for _, size in pieces], AT_ONCE)
    rank, ranks, saves = process_set.rank(), process_set.size(), process_set.process_set_id == 0
    return [new_packing("int8", [pieces[place] for place in places], rank, ranks, saves=saves) for places in together]


class PackedMean:
    """A flat tensor whose gradients travel packed, beside the control word as it is; see ``buckets.FlatMean``."""

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
        """See ``buckets.FlatMean.wait``."""
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
