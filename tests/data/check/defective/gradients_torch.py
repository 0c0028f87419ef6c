import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(model, optimizer, loader, scaler):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = torch.nn.functional.mse_loss(model(x.cuda()), y.cuda())
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # finds: optimizer-not-distributed
        scaler.update()


def main():
    hvd.init()
    torch.cuda.set_device(hvd.local_rank())
    dataset = TensorDataset(torch.load("x.pt"), torch.load("y.pt"))
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    model = torch.nn.Linear(8, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
    distributed = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(distributed, root_rank=0)
    scaler = torch.cuda.amp.GradScaler()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        train(model, optimizer, DataLoader(dataset, 32, sampler=sampler), scaler)


main()
