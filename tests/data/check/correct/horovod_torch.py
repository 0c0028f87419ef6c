"""Everything in main, arguments from the command line, a checkpoint to go on from, test accuracy over all ranks."""

import argparse
import math
import os

import torch
import torch.nn.functional as F
from filelock import FileLock
from torch import nn, optim
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torch.utils.tensorboard import SummaryWriter
from torchvision import datasets, transforms
from tqdm import tqdm

import horovod.torch as hvd


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 32, 3)
        self.fc = nn.Linear(32 * 26 * 26, 10)

    def forward(self, x):
        return self.fc(torch.flatten(F.relu(self.conv(x)), 1))


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--warmup-epochs", type=float, default=5)
    parser.add_argument("--no-cuda", action="store_true")
    parser.add_argument("--resume", default="checkpoint.pt")
    return parser.parse_args()


def make_loaders(args):
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    with FileLock(os.path.expanduser("~/.mnist.lock")):
        train_set = datasets.MNIST("data", train=True, download=True, transform=transform)
    test_set = datasets.MNIST("data", train=False, transform=transform)
    kwargs = {"num_workers": 2, "pin_memory": True} if args.cuda else {}
    train_sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    test_sampler = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler, **kwargs)
    test_loader = DataLoader(test_set, batch_size=1000, sampler=test_sampler, **kwargs)
    return train_loader, train_sampler, test_loader, test_sampler


def adjust_learning_rate(optimizer, args, epoch, batch, batches):
    if epoch >= args.warmup_epochs:
        return
    progress = epoch + float(batch + 1) / batches
    factor = 1.0 / hvd.size() * (progress * (hvd.size() - 1) / args.warmup_epochs + 1)
    for group in optimizer.param_groups:
        group["lr"] = args.lr * hvd.size() * factor


def train(model, optimizer, loader, sampler, args, epoch):
    model.train()
    sampler.set_epoch(epoch)
    for batch, (data, target) in enumerate(tqdm(loader, disable=hvd.rank() != 0)):
        adjust_learning_rate(optimizer, args, epoch, batch, len(loader))
        if args.cuda:
            data, target = data.cuda(), target.cuda()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        if batch % 100 == 0:
            print(f"[{hvd.rank()}] epoch {epoch} batch {batch} loss {loss.item():.4f}")


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


@torch.no_grad()
def test(model, loader, sampler, args):
    model.eval()
    loss, correct = 0.0, 0.0
    for data, target in loader:
        if args.cuda:
            data, target = data.cuda(), target.cuda()
        output = model(data)
        loss += F.cross_entropy(output, target, reduction="sum").item()
        correct += output.argmax(1).eq(target).sum().item()
    loss = metric_average(loss / len(sampler), "loss")
    accuracy = metric_average(correct / len(sampler), "accuracy")
    if hvd.rank() == 0:
        print(f"test loss {loss:.4f} accuracy {100 * accuracy:.2f} %")
    return accuracy


def save(model, optimizer, epoch, path):
    if hvd.rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, path)


def main():
    args = get_args()
    args.cuda = not args.no_cuda and torch.cuda.is_available()
    hvd.init()
    torch.manual_seed(42)
    if args.cuda:
        torch.cuda.set_device(hvd.local_rank())
        torch.cuda.manual_seed(42)
    torch.set_num_threads(1)

    train_loader, train_sampler, test_loader, test_sampler = make_loaders(args)
    model = Net()
    if args.cuda:
        model.cuda()
    optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
    start = 0
    if hvd.rank() == 0 and os.path.exists(args.resume):
        state = torch.load(args.resume)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["epoch"]
    start = hvd.broadcast(torch.tensor(start), root_rank=0, name="start").item()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    writer = SummaryWriter("logs") if hvd.rank() == 0 else None
    best = -math.inf
    for epoch in range(start, args.epochs):
        train(model, optimizer, train_loader, train_sampler, args, epoch)
        accuracy = test(model, test_loader, test_sampler, args)
        if writer:
            writer.add_scalar("accuracy", accuracy, epoch)
        if accuracy > best:
            best = accuracy
            save(model, optimizer, epoch + 1, args.resume)


if __name__ == "__main__":
    main()
