"""Train a CNN on N processes in mixed precision: autocast, a GradScaler for float16, clipping; as on one process."""

import torch
from torch import nn

import hvdkit.torch as hk
from hvdkit import datasets, flags

FLAGS = ["epochs", "batch_size", "lr", "warmup_epochs", "device", "num_threads", "seed", "data", "data_dir", "download"]
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def tensors(x, y):
    """Images (n, height, width, channels) as PyTorch wants them, (n, channels, height, width), and their labels."""
    return torch.utils.data.TensorDataset(torch.from_numpy(x).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(y))


def net(height, width, channels, classes):
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * (height // 2) * (width // 2), 128), nn.ReLU(), nn.Linear(128, classes),
    )  # fmt: skip


def main(args):
    world = hk.init()  # 1
    device = hk.pin_device(world, args.device, args.num_threads)  # 2
    hk.seed_everything(args.seed, world)
    data = datasets.load(args.data, directory=args.data_dir, download=args.download, seed=args.seed)
    train_set, test_set = tensors(data.x_train, data.y_train), tensors(data.x_test, data.y_test)
    model = net(*data.x_train.shape[1:], data.classes).to(device)
    loss_of = nn.CrossEntropyLoss()

    optimizer = torch.optim.SGD(model.parameters(), lr=hk.scale_lr(args.lr, world), momentum=0.9)  # 3
    optimizer = hk.distribute(optimizer, model)  # 4
    hk.broadcast_state(model, optimizer)  # 5
    loader = hk.shard(train_set, world, args.batch_size, seed=args.seed)  # 7
    test_loader = hk.shard(test_set, world, args.batch_size, remainder="exact", shuffle=False)
    steps = hk.steps_per_epoch(len(train_set), args.batch_size, world)  # 8
    schedule = hk.warmup(optimizer, world, steps, args.warmup_epochs)

    autocast = torch.autocast(device.type, TYPES.get(args.precision), enabled=args.precision != "fp32")
    # All ranks see the same gradients: where one has an inf, all skip the step, and their scales stay equal.
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    for epoch in range(args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with autocast:
                loss = loss_of(model(x.to(device)), y.to(device))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)  # of the mean over all ranks
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
        if world.is_root:
            print(f"epoch {epoch + 1}/{args.epochs} loss {loss.item():.4f} scale {scaler.get_scale():.0f}", flush=True)

    correct = count = 0
    with torch.no_grad(), autocast:
        for x, y, w in test_loader:
            hits = model(x.to(device)).argmax(dim=1) == y.to(device)
            correct, count = correct + hits[w > 0].sum().item(), count + (w > 0).sum().item()
    accuracy = hk.average_metrics({"accuracy": (correct, count)}, world)["accuracy"]
    hk.check_agreement(model, optimizer, world)
    if world.is_root:
        print(f"All {world.size} ranks hold identical weights and optimizer state.")
        print(f"Test accuracy in {args.precision}: {100 * accuracy:.2f} %")


def add_flags(add):
    add("--precision", choices=("fp32", "bf16", "fp16"), default="bf16", help="what the model computes in")
    add("--clip", type=flags.positive, default=1.0, help="largest norm of the gradients")


if __name__ == "__main__":
    flags.run(main, __doc__, only=FLAGS, add=add_flags)
