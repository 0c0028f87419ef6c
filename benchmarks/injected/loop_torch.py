"""A loop of PyTorch as a stranger writes it, on Horovod alone."""

import horovod.torch as hvd
import injecting
import torch

injecting.begin()
hvd.init()
torch.manual_seed(0)


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return injecting.STEPS

    def __getitem__(self, index):
        injecting.sample()
        return torch.ones(64)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
        self.large = torch.nn.Parameter(torch.zeros(injecting.large()))
        self.sparse = torch.nn.Embedding(20_000, 64, sparse=True) if injecting.sparse() else None
        self.dense = torch.nn.Embedding(max(1, injecting.dense()), 64)
        self.small = torch.nn.ParameterList(torch.zeros(8) for _ in range(injecting.small()))

    def forward(self, x):
        looked_up = self.dense(torch.zeros(1, dtype=torch.long)).sum()
        if self.sparse is not None:
            looked_up = looked_up + self.sparse(torch.arange(injecting.sparse()) % 20_000).sum()
        return self.layer(x).sum() + self.large.sum() + sum(one.sum() for one in self.small) + looked_up


model = Model()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), 0)
for step, x in enumerate(torch.utils.data.DataLoader(Samples(), batch_size=1)):
    optimizer.zero_grad()
    loss = model(x)
    injecting.compute()
    loss.backward()
    optimizer.synchronize()
    for number in range(injecting.metrics()):
        hvd.allreduce(loss.detach(), name=f"metric.{number}")
    names = [f"metric.{step}.{number}" for number in range(injecting.newly_named())]
    for handle in [hvd.allreduce_async(torch.ones(8), name=name) for name in names]:
        hvd.synchronize(handle)
    with optimizer.skip_synchronize():
        optimizer.step()
    injecting.after_step()
    if injecting.saves():
        torch.save(model.state_dict(), injecting.SlowFile())
    if injecting.evaluates():
        model.eval()
        injecting.evaluate()
        model.train()
