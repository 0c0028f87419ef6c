"""What the ranks of test_equivalence.py train in PyTorch; each function returns JSON values."""

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import hvdkit
import hvdkit.torch as hk
from hvdkit.steps.shards import Shard

SAMPLES, FEATURES, CLASSES, GLOBAL_BATCH, EPOCHS = 53, 6, 3, 12, 3
TWO_EACH = 56  # leaves a rank of 4 two samples at the end: PyTorch cannot normalise one
LOSS = hk.weighted_loss(nn.CrossEntropyLoss())


def make_data(samples: int = SAMPLES, dtype: torch.dtype = torch.float64) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
    y = (x.sum(dim=1) > 0).long() + (x[:, 0] > 1).long()
    return torch.utils.data.TensorDataset(x.to(dtype), y)


def make_model(seed: int, dtype: torch.dtype, *, normalised: bool) -> nn.Module:
    torch.manual_seed(seed)
    middle = [nn.BatchNorm1d(8)] if normalised else []
    return nn.Sequential(nn.Linear(FEATURES, 8), *middle, nn.Tanh(), nn.Linear(8, CLASSES)).to(dtype)


def weights(model: nn.Module) -> list[float]:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).tolist()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, weight_decay=0.01)


def train(
    world: hvdkit.Topology,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    *,
    dtype: torch.dtype = torch.float64,
    samples: int = SAMPLES,
    batch_norm: str = "",
    wrong: str = "",
    **options: Any,
) -> list[float]:
    """Final weights of a training on GLOBAL_BATCH samples a step; every rank begins with other weights."""
    model = make_model(world.rank, dtype, normalised=bool(batch_norm))
    if batch_norm == "global":
        hk.sync_batch_norm(model)
    optimizer = make_optimizer(model.parameters())
    if wrong != "no average":
        optimizer = hk.distribute(optimizer, model, **options)
    if wrong != "no broadcast":
        hk.broadcast_state(model, optimizer)
    passes = options.get("backward_passes_per_step", 1)
    loader = hk.shard(make_data(samples, dtype), world, GLOBAL_BATCH // world.size, remainder="exact", seed=3)
    for _ in range(EPOCHS * passes):
        for number, (x, y, w) in enumerate(loader):
            if number % passes == 0:
                optimizer.zero_grad()
            weighted = torch.ones_like(w) if wrong == "equal weights" else w
            (LOSS(model(x), y, weighted) / passes).backward()
            if number % passes == passes - 1:
                optimizer.step()
    return weights(model)


def train_in_parts(parts: int) -> list[float]:
    """In one process: BatchNorm over each of ``parts`` parts of the global batch, as that many ranks would."""
    model = make_model(0, torch.float64, normalised=True)
    optimizer = sgd(model.parameters())
    data = make_data(TWO_EACH)
    batch_size = GLOBAL_BATCH // parts
    shares = [
        Shard(TWO_EACH, hvdkit.Topology(rank, parts), batch_size, remainder="exact", seed=3) for rank in range(parts)
    ]
    for epoch in range(EPOCHS):
        for batches in zip(*(share.batches(epoch) for share in shares), strict=True):
            optimizer.zero_grad()
            for batch in batches:
                x, y = data[batch.indices]
                w = torch.full((len(y),), batch.weight, dtype=torch.float64)
                (LOSS(model(x), y, w) / parts).backward()
            optimizer.step()
    return weights(model)


def evaluate(world: hvdkit.Topology) -> dict[str, float]:
    """Every sample once, by a model that is the same on all ranks."""
    model = make_model(0, torch.float64, normalised=False)
    hits = samples = 0
    for x, y, w in hk.shard(make_data(49), world, 4, remainder="exact", shuffle=False):
        right = model(x).argmax(dim=1) == y
        hits, samples = hits + int(right[w > 0].sum()), samples + int((w > 0).sum())
    return hk.average_metrics({"accuracy": (hits, samples)}, world)


def everything() -> dict[str, Any]:
    world = hk.init()
    trained = {
        "sgd": train(world),
        "adam": train(world, adam),
        "float32": train(world, dtype=torch.float32),
        "filler": train(world, samples=49),
        "accumulation": train(world, samples=48, backward_passes_per_step=2),
        "fp16": train(world, compression="fp16"),
        "predivide": train(world, gradient_predivide_factor=2.0),
        "one bucket": train(world, adam, bucket_mb=1),
        "small buckets": train(world, bucket_mb=1e-4, gradient_predivide_factor=2.0),
        "buckets with accumulation": train(world, samples=48, backward_passes_per_step=2, bucket_mb=1e-4),
        "fp16 in buckets": train(world, compression="fp16", bucket_mb=1e-4),
        "global batch norm": train(world, batch_norm="global"),
        "local batch norm": train(world, samples=TWO_EACH, batch_norm="local"),
    }
    wrong = {mistake: train(world, wrong=mistake) for mistake in ("equal weights", "no broadcast", "no average")}
    by_parts = {str(parts): train_in_parts(parts) for parts in (2, 3, 4)} if world.size == 1 else {}
    begin = weights(make_model(0, torch.float64, normalised=False))
    return {
        "trained": trained,
        "wrong": wrong,
        "parts": by_parts,
        "begin": begin,
        "metrics": evaluate(world),
        "over mpi": hvd.mpi_enabled(),
    }
