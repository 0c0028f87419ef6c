"""A training of a model with 92,510 parameters, which says how many gradient bytes it reduced."""

import horovod.torch as hvd
import torch

STEPS = 20

hvd.init()
torch.manual_seed(0)
layers = (torch.nn.Linear(100, 300), torch.nn.Linear(300, 200), torch.nn.Linear(200, 10))
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for _ in range(STEPS):
    optimizer.zero_grad()
    model(torch.ones(4, 100)).sum().backward()
    optimizer.step()
print("gradient bytes", STEPS * sum(4 * parameter.numel() for parameter in model.parameters()))
print("parameter bytes", sum(4 * parameter.numel() for parameter in model.parameters()))
