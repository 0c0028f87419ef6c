"""A trainer class, names imported one by one, a root flag, one download per host."""

import os
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils import data as torch_data
from torchvision.datasets import CIFAR10
from torchvision.models import resnet18
from torchvision.transforms import ToTensor

from horovod import torch as hvd
from horovod.torch import local_rank, rank, size


@dataclass
class Config:
    lr: float = 0.1
    batch_size: int = 32
    epochs: int = 5
    folder: str = "runs"


class Trainer:
    def __init__(self, config, device):
        self.config = config
        self.device = device
        self.is_root = rank() == 0
        self.model = resnet18(num_classes=10).to(device)
        self.sampler = None
        self.loader = self._loader()
        scaled = config.lr * size()
        base = torch.optim.SGD(self.model.parameters(), scaled, momentum=0.9)
        self.optimizer = hvd.DistributedOptimizer(base, named_parameters=self.model.named_parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=30)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(base, root_rank=0)

    def _loader(self):
        if local_rank() == 0:
            CIFAR10("data", download=True)
        hvd.barrier()
        dataset = CIFAR10("data", transform=ToTensor())
        self.sampler = torch_data.DistributedSampler(dataset, size(), rank())
        return torch_data.DataLoader(dataset, self.config.batch_size, sampler=self.sampler)

    def run_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        losses = []
        for x, y in self.loader:
            self.optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(self.model(x.to(self.device)), y.to(self.device))
            loss.backward()
            with torch.no_grad():
                losses.append(loss.item())
            self.optimizer.step()
        self.schedule.step()
        return float(hvd.allreduce(torch.tensor(np.mean(losses))))

    def save(self, epoch):
        path = os.path.join(self.config.folder, f"{epoch}.pt")
        torch.save(self.model.state_dict(), path)

    def train(self):
        for epoch in range(self.config.epochs):
            loss = self.run_epoch(epoch)
            if not self.is_root:
                continue
            print("epoch", epoch, "loss", loss)
            self.save(epoch)


def pick_device():
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(local_rank())
    return torch.device("cuda")


if __name__ == "__main__":
    hvd.init()
    torch.manual_seed(0)
    trainer = Trainer(Config(), pick_device())
    trainer.train()
