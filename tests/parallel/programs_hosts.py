"""What the ranks of test_hosts_real.py do."""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hvdkit.torch as hk


def train() -> dict[str, Any]:
    world = hk.init()
    torch.manual_seed(world.rank)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer = hk.distribute(torch.optim.Adam(model.parameters(), lr=0.01), model)
    hk.broadcast_state(model, optimizer)
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    data = torch.utils.data.TensorDataset(x, (x.sum(dim=1) > 0).long())
    loss_of = hk.weighted_loss(nn.CrossEntropyLoss())
    loader = hk.shard(data, world, 4, remainder="exact")
    for _ in range(2):
        for inputs, targets, weights in loader:
            optimizer.zero_grad()
            loss_of(model(inputs), targets, weights).backward()
            optimizer.step()
    hk.check_agreement(model, optimizer, world, loader=loader)
    values = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).tolist()
    return {"weights": values, "hosts": world.cross_size, "local": world.local_size}


def go_on(marker: str, ranks: int, directory: str = "") -> None:
    """Train far longer than a test may take; ``marker`` appears when it has begun.

    Before that, ``train`` where there is a directory for what each rank ended with.

    Horovod is started when all have come: Gloo's limit, which a test makes short, holds for the start as well.
    """
    with tempfile.NamedTemporaryFile(dir=Path(marker).parent, prefix="came-", delete=False):
        deadline = time.monotonic() + 120
        while len(list(Path(marker).parent.glob("came-*"))) < ranks and time.monotonic() < deadline:
            time.sleep(0.1)
    world = hk.init()
    if directory:
        Path(directory, f"rank-{world.rank}.json").write_text(json.dumps(train()))
    model = nn.Linear(6, 2)
    optimizer = hk.distribute(torch.optim.SGD(model.parameters(), lr=0.01), model)
    hk.broadcast_state(model, optimizer)
    for step in range(30_000):
        optimizer.zero_grad()
        model(torch.ones(4, 6)).sum().backward()
        optimizer.step()
        if step == 5 and world.is_root:
            Path(marker).touch()
        time.sleep(0.01)
