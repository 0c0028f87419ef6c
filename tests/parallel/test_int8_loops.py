"""``compression="int8"``: its loops in Horovod as ``hvdkit install`` builds it beside those in NumPy, and its parts."""

from typing import Any

import numpy as np
import pytest
from ranks import on_ranks

LENGTHS = (1, 257, 70_001, 200_000)


def given(kind: str, length: int, rank: int) -> Any:
    draw = np.random.default_rng(rank)
    values = (draw.normal(size=length) * draw.lognormal(-5, 8, length)).astype(np.float32)
    if kind == "not finite":
        values[draw.integers(0, length, 9)] = np.tile([np.nan, np.inf, -np.inf], 3)
    return {"float64": values.astype(np.float64), "subnormal": values * np.float32(1e-38)}.get(kind, values)


def everything(kind: str, length: int, ranks: int) -> list[bytes]:
    """What packing, adding up, unpacking and keeping make in three steps."""
    from hvdkit.core.compression import Int8

    packings = [Int8(length, rank, ranks) for rank in range(ranks)]
    found = []
    for _ in range(3):
        packed = [one.pack(given(kind, length, rank)).copy() for rank, one in enumerate(packings)]
        parts = [one.add_up(np.stack([row[rank] for row in packed]), 1 / ranks) for rank, one in enumerate(packings)]
        mean = np.empty(length, np.float64 if kind == "float64" else np.float32)
        packings[0].unpack(np.stack(parts), mean)
        found += [*packed, *parts, mean, *(packing.kept.copy() for packing in packings)]
    return [one.tobytes() for one in found]


@pytest.mark.parametrize("kind", ["float32", "float64", "not finite", "subnormal"])
@on_ranks("torch")
def test_they_make_the_bits_of_numpy(everyone, kind):
    from hvdkit.core import compression

    compiled_loops = compression._compiled
    assert compiled_loops() is not None
    for length in LENGTHS:
        for ranks in (1, 2, 3):
            compiled = everything(kind, length, ranks)
            compression._compiled = lambda: None
            try:
                assert everything(kind, length, ranks) == compiled, (length, ranks)
            finally:
                compression._compiled = compiled_loops


@on_ranks("tensorflow")
def test_tensorflow_has_them(everyone):
    from hvdkit.core import compression

    assert compression._compiled() is not None


@on_ranks("torch")
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "complex64"])
def test_each_part_of_a_bucket_and_each_type_gets_its_mean(hk, world, everyone, dtype, monkeypatch):
    """The mean lands in the gradients' own memory, or beside it where NumPy has no such type."""
    import torch

    from hvdkit.torch import buckets

    monkeypatch.setattr(buckets, "AT_ONCE", 300)
    model = torch.nn.Linear(1, 1000, bias=False, dtype=getattr(torch, dtype))
    optimizer = hk.distribute(torch.optim.SGD(model.parameters(), 0.0), model, compression="int8")
    hk.broadcast_state(model)
    pulls = [np.random.default_rng(rank).normal(size=1000) for rank in range(world.size)]
    (model.weight[:, 0].real * torch.from_numpy(pulls[world.rank]).to(model.weight.real.dtype)).sum().backward()
    optimizer.step()
    found = model.weight.grad[:, 0].real.double().numpy()
    off = np.abs(found - np.mean(pulls, axis=0)).max()
    assert 1e-4 < off < 5 / 127 * np.abs(pulls).max()
    assert all(one == found.tolist() for one in everyone(found.tolist()))
