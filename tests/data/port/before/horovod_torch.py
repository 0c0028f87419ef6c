import argparse
import os

import torch
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument('--fp16-allreduce', action='store_true', default=False)
args = parser.parse_args([])

# Horovod: initialize library.
hvd.init()
torch.manual_seed(42)

if torch.cuda.is_available():
    # Horovod: pin GPU to local rank.
    torch.cuda.set_device(hvd.local_rank())

x = torch.randn(64, 8)
dataset = TensorDataset(x, x.sum(1, keepdim=True))
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
loader = DataLoader(dataset, batch_size=int(os.environ.get("BATCH", 8)), sampler=sampler)

model = torch.nn.Linear(8, 1)
optimizer = optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.9)

hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

# Horovod: (optional) compression algorithm.
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(optimizer,
                                     named_parameters=model.named_parameters(),
                                     compression=compression,
                                     op=hvd.Average)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for data, target in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(data), target)
        loss.backward()
        optimizer.synchronize()
        # one norm for all
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
    mean = hvd.allreduce(loss.detach(), name='loss').item()
    if hvd.rank() == 0:
        print('epoch', epoch, 'loss', mean)
        torch.save(model.state_dict(), 'net.pt')
