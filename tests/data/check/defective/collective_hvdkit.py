import torch
from torchvision import datasets, transforms

import hvdkit.torch as hk


def train(epochs=3):
    world = hk.init()
    device = hk.pin_device(world)
    train_set = datasets.MNIST("data", transform=transforms.ToTensor())
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10)).to(device)
    optimizer = hk.distribute(torch.optim.SGD(model.parameters(), lr=hk.scale_lr(0.01, world)), model)
    hk.broadcast_state(model, optimizer)
    checkpoints = hk.Checkpoints("runs")
    loader = hk.shard(train_set, world, 64)
    for epoch in range(epochs):
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            total += loss.item()
        if world.is_root:
            checkpoints.save(model, optimizer, step=epoch)  # finds: collective-on-some-ranks
            mean = hk.average_metrics({"loss": total / len(loader)}, world)  # finds: collective-on-some-ranks
            print(epoch, mean)


train()
