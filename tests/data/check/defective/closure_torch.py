import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

hvd.init()
dataset = TensorDataset(torch.load("x.pt"), torch.load("y.pt"))
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
model, small = torch.nn.Linear(8, 1), torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
newton = torch.optim.LBFGS(small.parameters(), lr=1.0 * hvd.size())
for one in (model, small):
    hvd.broadcast_parameters(one.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
newton = hvd.DistributedOptimizer(newton, named_parameters=small.named_parameters("small"))
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(dataset, 32, sampler=sampler):

        def closure():
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        def small_closure():
            newton.zero_grad()
            loss = torch.nn.functional.mse_loss(small(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)  # finds: closure-not-averaged
        newton.step(closure=small_closure)  # finds: closure-not-averaged
