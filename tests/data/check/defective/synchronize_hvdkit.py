import torch

import hvdkit.torch as hk

world = hk.init()
dataset = torch.utils.data.TensorDataset(torch.load("x.pt"), torch.load("y.pt"))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=hk.scale_lr(0.1, world))
hk.distribute(optimizer, model)
hk.broadcast_state(model, optimizer)
loader = hk.shard(dataset, world, batch_size=32)
for _ in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.synchronize()  # finds: unknown-to-optimizer
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():  # finds: unknown-to-optimizer
            optimizer.step()
