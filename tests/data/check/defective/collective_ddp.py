import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def worker(rank, world_size):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "29500"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    dataset = TensorDataset(torch.load("x.pt"), torch.load("y.pt"))
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    model = DDP(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * world_size)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for x, y in DataLoader(dataset, 32, sampler=sampler):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        if rank == 0:
            dist.all_reduce(total)  # finds: collective-on-some-ranks
            print("loss", total.item() / world_size)
            torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(worker, args=(2,), nprocs=2, join=True)
