"""Train an MLP on handwritten digits on N processes: digits_single.py and the eight steps, as in the README."""

import torch
from sklearn.datasets import load_digits

import hvdkit.torch as hk

world = hk.init()  # 1  rank and size, checked against the launcher
device = hk.pin_device(world)  # 2  one GPU for each process, or its share of the cores
x, y = load_digits(return_X_y=True)
data = torch.utils.data.TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=hk.scale_lr(0.1, world))  # 3  for the larger global batch
optimizer = hk.distribute(optimizer, model)  # 4  after backward() the gradients are the mean of all ranks
hk.broadcast_state(model, optimizer)  # 5  every rank starts with the root's state, bit for bit
checkpoints = hk.Checkpoints("runs/digits", keep=3)  # 6  only the root writes; complete or absent
loader = hk.shard(data, world, batch_size=32)  # 7  disjoint, complete, a new order each epoch
steps = hk.steps_per_epoch(len(data), 32, world)  # 8  the same number on every rank

for epoch in range(10):
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    checkpoints.save(model, optimizer, step=(epoch + 1) * steps)
    if world.is_root:
        print(f"epoch {epoch + 1}: loss {loss.item():.3f} after {steps} steps")
