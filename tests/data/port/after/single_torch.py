"""A training loop on one process, as it stands in a tutorial."""

import argparse
import os

import torch
import torch.nn as nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
import hvdkit.torch as hk


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x):
        return self.layers(x)


def train(args, model, device, loader, optimizer):
    model.train()
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def test(model, device, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in loader:
            correct += (model(x.to(device)).argmax(1) == y.to(device)).sum().item()
    if world.is_root:
        print(f"accuracy {correct / len(loader.dataset):.3f}")


def main():
    global world
    world = hk.init()
    hk.pin_device(world)
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=int(os.environ.get("BATCH", 16)))
    parser.add_argument("--lr", type=float, default=float(os.environ.get("LR", 0.05)))
    args = parser.parse_args([])
    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(96, 8)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    kwargs = {"batch_size": args.batch_size}
    train_loader = hk.shard(data, world,  **{"shuffle": False, **kwargs})  # in the order of the file
    test_loader = DataLoader(data, batch_size=32)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=hk.scale_lr(args.lr, world), momentum=0.9)
    hk.sync_batch_norm(model)
    optimizer = hk.distribute(optimizer, model)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    hk.seed_everything(1, world)
    hk.broadcast_state(model, optimizer)
    for epoch in range(2):
        train(args, model, device, train_loader, optimizer)
        test(model, device, test_loader)
        scheduler.step()

    # the last weights
    if world.is_root:
        torch.save(model.state_dict(), "net.pt")
    return model


if __name__ == "__main__":
    model = main()
