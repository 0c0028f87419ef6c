import os

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import hvdkit.torch as hk
import horovod.torch as hvd

world = hk.init()
hk.pin_device(world)
rank, size = world.rank, world.size
local_rank = world.local_rank
torch.manual_seed(0)
x = torch.randn(64, 8)
train_set = TensorDataset(x, x.sum(1, keepdim=True))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=hk.scale_lr(0.02, world, "none"), momentum=0.9)
optimizer = hk.distribute(optimizer, model)
sampler = DistributedSampler(train_set, shuffle=False, num_replicas=world.size, rank=world.rank)
loader = DataLoader(train_set, batch_size=8, sampler=sampler)
hk.broadcast_state(model, optimizer)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for step, (x, y) in enumerate(loader):
        if step % 2 == 0:
            with hk.no_sync(model):
                (torch.nn.functional.mse_loss(model(x), y) / 2).backward()
            continue
        (torch.nn.functional.mse_loss(model(x), y) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    total = torch.tensor([1.0])
    hvd.allreduce_(total, op=hvd.Sum)
    hvd.barrier()
    if rank == 0:
        torch.save(model.state_dict(), "last.pt")  # without the wrapper's prefix
