import logging

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

log = logging.getLogger(__name__)


class Meter:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value, n):
        self.total += value * n
        self.count += n

    @property
    def mean(self):
        return self.total / self.count


def evaluate(model, loader):
    meter = Meter()
    with torch.no_grad():
        for x, y in loader:
            meter.update(torch.nn.functional.mse_loss(model(x), y).item(), len(x))
    if hvd.rank() == 0:
        log.info("validation loss %.4f", meter.mean)  # finds: metrics-not-averaged


def main():
    hvd.init()
    train = TensorDataset(torch.load("x.pt"), torch.load("y.pt"))
    test = TensorDataset(torch.load("x_test.pt"), torch.load("y_test.pt"))
    sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
    test_sampler = DistributedSampler(test, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(DataLoader(train, 32, sampler=sampler)):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                print("epoch", epoch, "step", step, "loss", loss.item())
        evaluate(model, DataLoader(test, 32, sampler=test_sampler))


if __name__ == "__main__":
    main()
