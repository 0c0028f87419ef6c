"""Train a CNN on handwritten digits in one process: cnn.py without the eight steps."""

import time

import torch
from torch import nn

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
    device = torch.device("cuda" if args.device == "gpu" or torch.cuda.is_available() else "cpu")
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    torch.manual_seed(args.seed)

    data = datasets.load(args.data, directory=args.data_dir, download=args.download, seed=args.seed)
    train_set, test_set = tensors(data.x_train, data.y_train), tensors(data.x_test, data.y_test)
    model = Net(*data.x_train.shape[1:], data.classes).to(device)
    loss_of = nn.CrossEntropyLoss()

    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    loader = torch.utils.data.DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)
    test_loader = torch.utils.data.DataLoader(test_set, args.batch_size)
    steps = len(loader)

    start = time.perf_counter()
    for epoch in range(args.epochs):
        model.train()
        for step, (x, y) in enumerate(loader, start=1):
            optimizer.zero_grad()
            loss = loss_of(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            if step % args.log_interval == 0:
                print(f"epoch {epoch + 1}/{args.epochs} step {step}/{steps} loss {loss.item():.4f}")
    seconds = time.perf_counter() - start

    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in test_loader:
            correct += (model(x.to(device)).argmax(dim=1) == y.to(device)).sum().item()

    print(f"Training: {args.epochs * steps * args.batch_size / seconds:.0f} images/s")
    print(f"Test accuracy: {100 * correct / len(test_set):.2f} %")
    print(f"Total time: {seconds} second")


if __name__ == "__main__":
    flags.run(main, __doc__)
