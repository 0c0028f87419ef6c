"""Train a CNN on handwritten digits on N processes with Horovod: single.py and the eight steps, numbered."""

import time

import torch
from torch import nn

import hvdkit.torch as hk
from hvdkit import datasets, flags


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
    world = hk.init()  # 1
    device = hk.pin_device(world, args.device, args.num_threads)  # 2
    hk.seed_everything(args.seed, world)

    data = datasets.load(args.data, directory=args.data_dir, download=args.download, seed=args.seed)
    train_set, test_set = tensors(data.x_train, data.y_train), tensors(data.x_test, data.y_test)
    model = Net(*data.x_train.shape[1:], data.classes).to(device)
    loss_of = nn.CrossEntropyLoss()

    optimizer = torch.optim.SGD(model.parameters(), lr=hk.scale_lr(args.lr, world), momentum=0.9)  # 3
    optimizer = hk.distribute(optimizer, model, compression="fp16" if args.fp16_allreduce else "none")  # 4
    hk.broadcast_state(model, optimizer)  # 5
    checkpoints = hk.Checkpoints(args.checkpoint_dir, wait=args.wait) if args.checkpoint_dir else None  # 6
    loader = hk.shard(train_set, world, args.batch_size, seed=args.seed)  # 7
    test_loader = hk.shard(test_set, world, args.batch_size, remainder="exact", shuffle=False)
    steps = hk.steps_per_epoch(len(train_set), args.batch_size, world)  # 8
    schedule = hk.warmup(optimizer, world, steps, args.warmup_epochs)

    if args.resume:
        checkpoints.restore(model, optimizer, loader=loader, schedule=schedule)
    first_epoch = loader.epoch
    monitor = hk.Monitor(None, world, args.log_interval, ["progress"], epochs=args.epochs)

    start = time.perf_counter()
    for epoch in range(first_epoch, args.epochs):
        model.train()
        for x, y in monitor(loader):
            optimizer.zero_grad()
            loss = loss_of(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            schedule.step()
            monitor.log(loss=loss)
        if checkpoints:
            checkpoints.save(model, optimizer, step=(epoch + 1) * steps, loader=loader)
    monitor.close()
    seconds = time.perf_counter() - start

    model.eval()
    correct = count = 0
    with torch.no_grad():
        for x, y, w in test_loader:
            hits = model(x.to(device)).argmax(dim=1) == y.to(device)
            correct, count = correct + hits[w > 0].sum().item(), count + (w > 0).sum().item()
    accuracy = hk.average_metrics({"accuracy": (correct, count)}, world)["accuracy"]
    hk.check_agreement(model, optimizer, world)

    if world.is_root:
        print(f"All {world.size} ranks hold identical weights and optimizer state.")
        images = (args.epochs - first_epoch) * steps * world.size * args.batch_size
        print(f"Training: {images / seconds:.0f} images/s")
        print(f"Test accuracy: {100 * accuracy:.2f} %")
        print(f"Hvd Procs {world.size} Total time: {seconds} second")


if __name__ == "__main__":
    flags.run(main, __doc__)
