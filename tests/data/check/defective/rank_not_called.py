import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

hvd.init()
torch.cuda.set_device(hvd.local_rank)  # finds: rank-not-called
torch.manual_seed(0)
size = hvd.size  # finds: rank-not-called
data = TensorDataset(torch.randn(1000, 8).cuda(), torch.randn(1000, 1).cuda())
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(data, batch_size=10, sampler=sampler)
model = torch.nn.Linear(8, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * size)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
verbose = 1 if hvd.rank == 0 else 0  # finds: rank-not-called
for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    if verbose:
        print(f"rank {hvd.rank}")  # finds: rank-not-called
    if not hvd.rank:  # finds: rank-not-called
        torch.save(model.state_dict(), "model.pt")
