import torch

import hvdkit.torch as hk

world = hk.init()
hk.pin_device(world)
x, y = torch.load("x.pt"), torch.load("y.pt")
loader = hk.shard(torch.utils.data.TensorDataset(x, y), world, batch_size=32)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=hk.scale_lr(0.1, world))
optimizer = hk.distribute(optimizer, model)
hk.broadcast_state(model, optimizer)
hk.seed_everything(0, world)  # finds: seeded-too-late

for inputs, targets in loader:
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
