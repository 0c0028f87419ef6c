"""hvdkit's names one by one, and the root by its flag."""

import torch
from torchvision import datasets, transforms

from hvdkit.torch import (
    Checkpoints,
    average_metrics,
    broadcast_state,
    check_agreement,
    distribute,
    init,
    pin_device,
    scale_lr,
    shard,
    steps_per_epoch,
    warmup,
)

BATCH = 64


def train(model, optimizer, loader, device, schedule):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        schedule.step()
    return loss.item()


def accuracy(model, loader, device, world):
    correct = count = 0
    for x, y in loader:
        correct += (model(x.to(device)).argmax(1) == y.to(device)).sum().item()
        count += len(y)
    return average_metrics({"accuracy": (correct, count)}, world)["accuracy"]


def main(*, epochs: int = 5, lr: float = 0.01):
    world = init()
    device = pin_device(world)
    train_set = datasets.MNIST("data", transform=transforms.ToTensor())
    test_set = datasets.MNIST("data", train=False, transform=transforms.ToTensor())
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=scale_lr(lr, world))
    optimizer = distribute(optimizer, model)
    broadcast_state(model, optimizer)
    checkpoints = Checkpoints("runs", keep=2)
    checkpoints.restore(model, optimizer)
    loader = shard(train_set, world, BATCH, num_workers=2)
    test_loader = shard(test_set, world, BATCH, shuffle=False)
    steps = steps_per_epoch(len(train_set), BATCH, world)
    schedule = warmup(optimizer, world, steps)
    for epoch in range(epochs):
        loss = train(model, optimizer, loader, device, schedule)
        checkpoints.save(model, optimizer, step=(epoch + 1) * steps)
        share = accuracy(model, test_loader, device, world)
        check_agreement(model, optimizer, world)
        if world.is_root:
            print(f"epoch {epoch} loss {loss} accuracy {share}")
    if world.rank == 0:
        torch.save(model.state_dict(), "final.pt")


if __name__ == "__main__":
    main()
