import os

import horovod.torch as hvd
import torch
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

hvd.init()
dataset = TensorDataset(torch.load("x.pt"), torch.load("y.pt"))
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size(), momentum=0.9)
schedule = StepLR(optimizer, step_size=10)  # finds: schedule-of-replaced-optimizer
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
if hvd.rank() == 0 and os.path.exists("last.pt"):
    saved = torch.load("last.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for epoch in range(30):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(dataset, 32, sampler=sampler):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    schedule.step()
