"""Models for test_memory.py, as a user would write them."""

import torch
from torch import nn


def mlp():
    widths = [784, 256, 128, 64]
    hidden = [layer for i in range(3) for layer in (nn.Linear(widths[i], widths[i + 1]), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(64, 10)), torch.randn(8, 784)


def cnn():
    features = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)]
    classifier = [nn.Flatten(), nn.Linear(64 * 144, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)]
    return nn.Sequential(*features, *classifier), torch.randn(8, 1, 28, 28), lambda out: out.logsumexp(dim=1).sum()


class _Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.Transformer(128, 8, 2, 2, 256, batch_first=True)

    def forward(self, source, target):
        return self.transformer(source, target)


def transformer():
    return _Translator(), (torch.randn(8, 10, 128), torch.randn(8, 20, 128))


def without_inputs():
    return nn.Linear(1000, 500)


def fixed_batch():
    return nn.Linear(4, 2), torch.randn(8, 4), lambda out: (out - torch.zeros(8, 2)[: len(out) * 0 + 8]).sum()


def keras_net():
    import keras

    layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Flatten(), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((8,)), *layers])
