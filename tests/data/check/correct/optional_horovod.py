"""Horovod where it is installed, one process where it is not."""

import argparse

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

try:
    import horovod.torch as hvd

    with_hvd = True
except ImportError:
    with_hvd = False

    class Alone:
        def init(self):
            return None

        def rank(self):
            return 0

        def size(self):
            return 1

    hvd = Alone()

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()

hvd.init()
torch.manual_seed(1)
data = TensorDataset(torch.randn(1000, 8), torch.randn(1000, 1))
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank()) if with_hvd else None
loader = DataLoader(data, batch_size=10, sampler=sampler, shuffle=sampler is None)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * (hvd.size() if with_hvd else 1))
if with_hvd:
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for epoch in range(3):
    if sampler is not None:
        sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    if not with_hvd or hvd.rank() == 0:
        torch.save(model.state_dict(), "model.pt")
