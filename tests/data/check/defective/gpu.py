import argparse

import horovod.torch as hvd
import torch
from torch.utils import data


def main():
    args = argparse.ArgumentParser().parse_args()
    hvd.init()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # finds: gpu-not-pinned
    dataset = data.TensorDataset(torch.load("x.pt"), torch.load("y.pt"))
    sampler = data.DistributedSampler(dataset, hvd.size(), hvd.rank())
    loader = data.DataLoader(dataset, args.batch_size, sampler=sampler)
    model = torch.nn.Linear(8, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x.to(device)), y.to(device)).backward()
            optimizer.step()


main()
