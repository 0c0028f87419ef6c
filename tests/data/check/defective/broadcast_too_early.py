import os

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def resume(model, optimizer, path):
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def main(path="last.pt"):
    hvd.init()
    dataset = TensorDataset(torch.load("x.pt"), torch.load("y.pt"))
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    net = torch.nn.Linear(8, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1 * hvd.size())
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)  # finds: broadcast-too-early
    hvd.broadcast_optimizer_state(opt, root_rank=0)  # finds: broadcast-too-early
    if hvd.rank() == 0 and os.path.exists(path):
        resume(net, opt, path)
    opt = hvd.DistributedOptimizer(opt, named_parameters=net.named_parameters())
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(dataset, 32, sampler=sampler):
            opt.zero_grad()
            torch.nn.functional.mse_loss(net(x), y).backward()
            opt.step()
        if hvd.rank() == 0:
            torch.save({"model": net.state_dict(), "optimizer": opt.state_dict()}, path)


main()
