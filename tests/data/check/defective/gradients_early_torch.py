import horovod.torch as hvd
import torch
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def clipped(model, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x.cuda()), y.cuda()).backward()
        clip_grad_norm_(model.parameters(), 1.0)  # finds: gradients-not-averaged-yet
        optimizer.step()


def scaled(model, optimizer, loader, scaler):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = torch.nn.functional.mse_loss(model(x.cuda()), y.cuda())
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # finds: gradients-not-averaged-yet
        scaler.update()


def unscaled_and_clipped(model, optimizer, loader, scaler):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = torch.nn.functional.mse_loss(model(x.cuda()), y.cuda())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # finds: gradients-not-averaged-yet
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)  # finds: optimizer-not-distributed
        scaler.update()


def main():
    hvd.init()
    torch.cuda.set_device(hvd.local_rank())
    dataset = TensorDataset(torch.load("x.pt"), torch.load("y.pt"))
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(dataset, 32, sampler=sampler)
    model = torch.nn.Linear(8, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(3):
        sampler.set_epoch(epoch)
        clipped(model, optimizer, loader)
        scaled(model, optimizer, loader, scaler)
        unscaled_and_clipped(model, optimizer, loader, scaler)


main()
