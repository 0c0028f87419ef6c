"""What the ranks of test_hosts_real.py do."""

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
