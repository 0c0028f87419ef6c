import argparse

import horovod.torch as hvd
import torch
from torch import optim
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--adam", action="store_true")


def make_optimizer(params, args):
    if args.adam:
        return optim.Adam(params, lr=args.lr)  # finds: learning-rate-unscaled
    return optim.SGD(params, args.lr, momentum=0.9)  # finds: learning-rate-unscaled


def main():
    args = parser.parse_args()
    hvd.init()
    dataset = TensorDataset(torch.load("x.pt"), torch.load("y.pt"))
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    model = torch.nn.Linear(8, 1)
    optimizer = make_optimizer(model.parameters(), args)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10 * len(loader))
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            schedule.step()


if __name__ == "__main__":
    main()
