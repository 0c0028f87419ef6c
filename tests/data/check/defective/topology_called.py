import torch
from torchvision import datasets, transforms

import hvdkit.torch as hk

world = hk.init()
device = hk.pin_device(world)
train_set = datasets.MNIST("data", transform=transforms.ToTensor())
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=hk.scale_lr(0.01, world))
optimizer = hk.distribute(optimizer, model)
hk.broadcast_state(model, optimizer)
for x, y in hk.shard(train_set, world, 64):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
    optimizer.step()
if world.rank() == 0:  # finds: value-called
    torch.save(model.state_dict(), "model.pt")
