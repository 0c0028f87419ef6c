import argparse
import os

import torch
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import horovod.torch as hvd
import hvdkit.torch as hk

parser = argparse.ArgumentParser()
parser.add_argument('--fp16-allreduce', action='store_true', default=False)
args = parser.parse_args([])

# Horovod: initialize library.
world = hk.init()
torch.manual_seed(42)

if torch.cuda.is_available():
    # Horovod: pin GPU to local rank.
    hk.pin_device(world)

x = torch.randn(64, 8)
dataset = TensorDataset(x, x.sum(1, keepdim=True))
sampler = DistributedSampler(dataset, num_replicas=world.size, rank=world.rank, shuffle=False)
loader = DataLoader(dataset, batch_size=int(os.environ.get("BATCH", 8)), sampler=sampler)

model = torch.nn.Linear(8, 1)
optimizer = optim.SGD(model.parameters(), lr=0.01 * world.size, momentum=0.9)

hk.broadcast_state(model, optimizer)

# Horovod: (optional) compression algorithm.
compression = "fp16" if args.fp16_allreduce else "none"
optimizer = hk.distribute(optimizer,
                                     model,
                                     compression=compression,
                                     op="average")

for epoch in range(2):
    sampler.set_epoch(epoch)
    for data, target in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(data), target)
        loss.backward()
        # one norm for all
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    mean = hvd.allreduce(loss.detach(), name='loss').item()
    if world.is_root:
        print('epoch', epoch, 'loss', mean)
        torch.save(model.state_dict(), 'net.pt')
