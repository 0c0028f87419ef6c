import argparse

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def save_checkpoint(state, is_best, filename="checkpoint.pt"):
    torch.save(state, filename)  # finds: checkpoint-on-every-rank
    if is_best and hvd.rank() == 0:
        torch.save(state, "best.pt")


def validate(model, loader):
    total = 0.0
    for x, y in loader:
        total += torch.nn.functional.mse_loss(model(x), y).item()
    return hvd.allreduce(torch.tensor(total), name="validation").item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    hvd.init()
    dataset = TensorDataset(torch.load("x.pt"), torch.load("y.pt"))
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(dataset, 32, sampler=sampler)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    best = float("inf")
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        loss = validate(model, loader)
        is_best = loss < best
        best = min(best, loss)
        if hvd.rank() == 0:
            print("epoch", epoch, "loss", loss)
        if args.save and epoch % 2 == 0:
            save_checkpoint({"model": model.state_dict(), "best": best}, is_best)


if __name__ == "__main__":
    main()
