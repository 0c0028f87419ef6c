import torch

from hvdkit.torch import broadcast_state, distribute, init, pin_device, scale_lr, shard

world = init()
device = pin_device(world)
dataset = torch.utils.data.TensorDataset(torch.load("x.pt"), torch.load("y.pt"))
model = torch.nn.Linear(8, 1).to(device)
optimizer = distribute(torch.optim.SGD(model.parameters(), lr=scale_lr(0.1, world)), model)
broadcast_state(model, optimizer)
optimizer = distribute(optimizer, model)  # finds: distributed-twice
for x, y in shard(dataset, world, 32):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x.to(device)), y.to(device)).backward()
    optimizer.step()
