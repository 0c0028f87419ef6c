"""Train a CNN on handwritten digits with PyTorch's own DDP on N processes, under any launcher."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hvdkit.torch as hk
from hvdkit import datasets, flags
from hvdkit.steps.checkpoint import CheckpointDirectory


class Net(nn.Module):
    def __init__(self, height, width, channels, classes):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(
            nn.Linear(64 * (height // 2) * (width // 2), 128), nn.ReLU(), nn.Dropout(0.25), nn.Linear(128, classes)
        )

    def forward(self, x):
        return self.classifier(self.features(x))


def tensors(x, y):
    """Images (n, height, width, channels) as PyTorch wants them, (n, channels, height, width), and their labels."""
    return torch.utils.data.TensorDataset(torch.from_numpy(x).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(y))


def main(args):
    world = hk.init_process_group()
    device = hk.pin_device(world, args.device, args.num_threads)
    torch.manual_seed(args.seed)

    data = datasets.load(args.data, directory=args.data_dir, download=args.download, seed=args.seed)
    train_set, test_set = tensors(data.x_train, data.y_train), tensors(data.x_test, data.y_test)
    model = DistributedDataParallel(Net(*data.x_train.shape[1:], data.classes).to(device))
    loss_of = nn.CrossEntropyLoss()
    checkpoints = CheckpointDirectory(args.checkpoint_dir, wait=args.wait) if args.checkpoint_dir else None

    optimizer = torch.optim.SGD(model.parameters(), lr=hk.scale_lr(args.lr, world), momentum=0.9)
    loader = hk.shard(train_set, world, args.batch_size, seed=args.seed)
    test_loader = hk.shard(test_set, world, args.batch_size, remainder="exact", shuffle=False)
    steps = hk.steps_per_epoch(len(train_set), args.batch_size, world)
    schedule = hk.warmup(optimizer, world, steps, args.warmup_epochs)

    saved = checkpoints.latest() if args.resume else None
    if saved:
        states = torch.load(saved.path / "states.pt", map_location=device, weights_only=True)
        model.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optimizer"])
        loader.load_state(saved.metadata)
        schedule.go_to(loader.epoch * steps)
    first_epoch = loader.epoch

    start = time.perf_counter()
    for epoch in range(first_epoch, args.epochs):
        model.train()
        for step, (x, y) in enumerate(loader, start=1):
            optimizer.zero_grad()
            loss = loss_of(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            schedule.step()
            if step % args.log_interval == 0 and world.is_root:
                print(f"epoch {epoch + 1}/{args.epochs} step {step}/{steps} loss {loss.item():.4f}")
        if checkpoints and world.is_root:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            checkpoints.save(
                (epoch + 1) * steps, lambda path, s=states: torch.save(s, path / "states.pt"), loader.state()
            )
    seconds = time.perf_counter() - start

    model.eval()
    counts = torch.zeros(2, device=device)
    with torch.no_grad():
        for x, y, w in test_loader:
            hits = model(x.to(device)).argmax(dim=1) == y.to(device)
            counts += torch.stack([hits[w > 0].sum(), (w > 0).sum()])
    dist.all_reduce(counts)

    if world.is_root:
        images = (args.epochs - first_epoch) * steps * world.size * args.batch_size
        print(f"Training: {images / seconds:.0f} images/s")
        print(f"Test accuracy: {100 * counts[0] / counts[1]:.2f} %")
        print(f"Hvd Procs {world.size} Total time: {seconds} second")
    dist.destroy_process_group()


if __name__ == "__main__":
    flags.run(main, __doc__)
