"""DDP with processes that the script starts itself."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets
from torchvision.transforms import ToTensor


class Trainer:
    def __init__(self, model, loader, optimizer, gpu_id):
        self.gpu_id = gpu_id
        self.loader = loader
        self.optimizer = optimizer
        self.model = nn.parallel.DistributedDataParallel(model.to(gpu_id), device_ids=[gpu_id])

    def _run_epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        for source, targets in self.loader:
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(source.to(self.gpu_id)), targets.to(self.gpu_id))
            loss.backward()
            self.optimizer.step()

    def _save(self, epoch):
        torch.save(self.model.module.state_dict(), "checkpoint.pt")
        print(f"epoch {epoch} saved")

    def train(self, epochs):
        for epoch in range(epochs):
            self._run_epoch(epoch)
            if self.gpu_id == 0 and epoch % 5 == 0:
                self._save(epoch)


def ddp_setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group(backend="nccl", rank=rank, world_size=world_size)
    torch.cuda.set_device(rank)


def main(rank, world_size, epochs, batch_size):
    ddp_setup(rank, world_size)
    if rank == 0:
        datasets.MNIST("data", download=True)
    dist.barrier()
    dataset = datasets.MNIST("data", transform=ToTensor())
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=False, sampler=DistributedSampler(dataset))
    Trainer(model, loader, optimizer, rank).train(epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    world_size = torch.cuda.device_count()
    mp.spawn(main, args=(world_size, 10, 32), nprocs=world_size)
