import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

hvd.init()
train = TensorDataset(torch.load("x.pt"), torch.load("y.pt"))
test = TensorDataset(torch.load("x_test.pt"), torch.load("y_test.pt"))
sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.local_rank())  # finds: dataset-sharded-wrongly
test_sampler = DistributedSampler(test, shuffle=False)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(train, 32, sampler=sampler):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
loss = torch.zeros(())
for x, y in DataLoader(test, 32, sampler=test_sampler):
    loss += torch.nn.functional.mse_loss(model(x), y)
loss = hvd.allreduce(loss)
if hvd.rank() == 0:
    print("test loss", loss.item())
