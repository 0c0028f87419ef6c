import torch
from torchvision import datasets, transforms

import hvdkit.torch as hk


def get_data(world):
    if world.local_rank == 0:
        datasets.FashionMNIST("data", download=True)  # finds: download-without-barrier
    return datasets.FashionMNIST("data", transform=transforms.ToTensor())


world = hk.init()
device = hk.pin_device(world)
train_set = get_data(world)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10)).to(device)
optimizer = hk.distribute(torch.optim.SGD(model.parameters(), lr=hk.scale_lr(0.1, world)), model)
hk.broadcast_state(model, optimizer)
for x, y in hk.shard(train_set, world, 64):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
    optimizer.step()
