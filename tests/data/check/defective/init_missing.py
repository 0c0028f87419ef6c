import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    rank = hvd.rank()  # finds: init-missing
    data = TensorDataset(torch.load("x.pt"), torch.load("y.pt"))
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=rank)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, 32, sampler=sampler):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
