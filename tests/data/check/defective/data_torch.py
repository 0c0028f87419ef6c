import horovod.torch as hvd
import torch
import torchvision
from torch.utils.data import DataLoader
from torchvision.transforms import ToTensor


class Digits(torch.utils.data.Dataset):
    def __init__(self, root, train):
        self.inner = torchvision.datasets.MNIST(root, train=train, transform=ToTensor())

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        return self.inner[index]


def loaders(batch_size):
    train = DataLoader(Digits("data", True), batch_size=batch_size, shuffle=True)  # finds: dataset-not-sharded
    test = DataLoader(Digits("data", False), batch_size=1000)
    return train, test


def main():
    hvd.init()
    train, test = loaders(64)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for epoch in range(5):
        for x, y in train:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        correct = sum((model(x).argmax(1) == y).sum().item() for x, y in test)
        if hvd.rank() == 0:
            print("accuracy", correct / len(test.dataset))


main()
