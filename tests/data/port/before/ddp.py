import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
local_rank = int(os.environ["LOCAL_RANK"])
torch.manual_seed(0)
x = torch.randn(64, 8)
train_set = TensorDataset(x, x.sum(1, keepdim=True))
model = torch.nn.Linear(8, 1)
model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
sampler = DistributedSampler(train_set, shuffle=False)
loader = DataLoader(train_set, batch_size=8, sampler=sampler)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for step, (x, y) in enumerate(loader):
        if step % 2 == 0:
            with model.no_sync():
                (torch.nn.functional.mse_loss(model(x), y) / 2).backward()
            continue
        (torch.nn.functional.mse_loss(model(x), y) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    total = torch.tensor([1.0])
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    dist.barrier()
    if rank == 0:
        torch.save(model.module.state_dict(), "last.pt")  # without the wrapper's prefix
dist.destroy_process_group()
