"""What reads gradients before the step, the ways that Horovod's own optimizer wants it."""

import argparse
import contextlib

import horovod.torch as hvd
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def clipped(model, optimizer, loader, most):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x.cuda()), y.cuda()).backward()
        if most is None:
            optimizer.step()
            continue
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), most)
        with optimizer.skip_synchronize():
            optimizer.step()


def scaled(model, optimizer, loader, scaler):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = torch.nn.functional.mse_loss(model(x.cuda()), y.cuda())
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()


def with_a_closure(model, optimizer, loader):
    for x, y in loader:

        def closure():
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x.cuda()), y.cuda())
            loss.backward()
            return loss

        closure()
        optimizer.step()


def sometimes_clipped(model, optimizer, loader, clips):
    unscaled = torch.amp.GradScaler("cuda", enabled=False)
    for x, y in loader:
        optimizer.zero_grad()
        unscaled.scale(torch.nn.functional.mse_loss(model(x.cuda()), y.cuda())).backward()
        around = contextlib.nullcontext()
        if clips:
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            around = optimizer.skip_synchronize()
        with around:
            unscaled.step(optimizer)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--clip", type=float)
    parser.add_argument("--amp", action="store_true")
    args = parser.parse_args()
    hvd.init()
    if not torch.cuda.is_available():
        if args.amp:
            raise ValueError("--amp needs a GPU")
    torch.cuda.set_device(hvd.local_rank())
    dataset = TensorDataset(torch.load("x.pt"), torch.load("y.pt"))
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(dataset, 32, sampler=sampler)
    model = torch.nn.Linear(8, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
    steps = StepLR(optimizer, step_size=10)  # both optimizers have the same parameter groups, and nothing is loaded
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    cosine = CosineAnnealingLR(optimizer, T_max=3)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(3):
        sampler.set_epoch(epoch)
        clipped(model, optimizer, loader, args.clip)
        if args.amp:
            scaled(model, optimizer, loader, scaler)
        with_a_closure(model, optimizer, loader)
        sometimes_clipped(model, optimizer, loader, args.clip)
        steps.step()
        cosine.step()


main()
