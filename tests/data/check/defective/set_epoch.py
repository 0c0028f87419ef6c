import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms


def train_one_epoch(model, loader, optimizer, device):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()


def main(epochs=5):
    dist.init_process_group("nccl")
    device = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(device)
    train_set = datasets.CIFAR10("data", transform=transforms.ToTensor())
    test_set = datasets.CIFAR10("data", train=False, transform=transforms.ToTensor())
    sampler = DistributedSampler(train_set, shuffle=True)  # finds: no-set-epoch
    test_sampler = DistributedSampler(test_set)
    loader = DataLoader(train_set, batch_size=64, sampler=sampler)
    test_loader = DataLoader(test_set, batch_size=64, sampler=test_sampler)
    model = DDP(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 10)).to(device), device_ids=[device])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * dist.get_world_size())
    epoch = 0
    while epoch < epochs:
        train_one_epoch(model, loader, optimizer, device)
        test_sampler.set_epoch(epoch)
        for x, _ in test_loader:
            model(x.to(device))
        epoch += 1


if __name__ == "__main__":
    main()
