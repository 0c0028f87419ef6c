"""Programs as one writes them for one process: gradients are the mean when backward returns."""

import torch
from torch.optim.lr_scheduler import StepLR

import hvdkit.torch as hk


def scaled_and_clipped(model, optimizer, loader, scaler):
    for x, y in loader:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda"):
            loss = torch.nn.functional.mse_loss(model(x.cuda()), y.cuda())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        torch.cuda.synchronize()


def with_a_closure(model, optimizer, loader):
    for x, y in loader:

        def closure():
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x.cuda()), y.cuda())
            loss.backward()
            return loss

        optimizer.step(closure)


def accumulated(model, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad()
        with hk.no_sync(model):
            torch.nn.functional.mse_loss(model(x[::2].cuda()), y[::2].cuda()).backward()
        torch.nn.functional.mse_loss(model(x[1::2].cuda()), y[1::2].cuda()).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()


def main():
    world = hk.init()
    device = hk.pin_device(world)
    dataset = torch.utils.data.TensorDataset(torch.load("x.pt"), torch.load("y.pt"))
    model = torch.nn.Linear(8, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=hk.scale_lr(0.1, world))
    newton = torch.optim.LBFGS(model.parameters(), lr=hk.scale_lr(1.0, world, "none"))
    schedule = StepLR(optimizer, step_size=1)
    hk.distribute(optimizer, model)
    hk.distribute(newton, model)
    checkpoints = hk.Checkpoints("runs")
    checkpoints.restore(model, optimizer)
    hk.broadcast_state(model, optimizer)
    hk.broadcast_state(model, newton)
    loader = hk.shard(dataset, world, batch_size=32)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(3):
        scaled_and_clipped(model, optimizer, loader, scaler)
        with_a_closure(model, newton, loader)
        accumulated(model, optimizer, loader)
        schedule.step()
        checkpoints.save(model, optimizer, step=(epoch + 1) * len(loader))


main()
