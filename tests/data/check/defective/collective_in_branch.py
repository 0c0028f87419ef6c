import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def mean(value):
    return hvd.allreduce(torch.tensor(value), name="mean").item()


def evaluate(model, loader):
    losses = [torch.nn.functional.mse_loss(model(x), y).item() for x, y in loader]
    return mean(sum(losses) / len(losses))


def main():
    hvd.init()
    is_root = hvd.rank() == 0
    train = TensorDataset(torch.load("x.pt"), torch.load("y.pt"))
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(train, 32, sampler=sampler)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        if is_root:
            print("epoch", epoch, "loss", evaluate(model, loader))  # finds: collective-on-some-ranks
    if hvd.rank() != 0:
        return
    torch.save(model.state_dict(), "model.pt")
    hvd.barrier()  # finds: collective-on-some-ranks


main()
