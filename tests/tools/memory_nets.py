"""Models for test_memory.py, as a user would write them."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


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


class _Attention(nn.Module):
    """Layers of attention that, fused, keeps no matrix of attention; each may be computed again in backward."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.mixed = nn.ModuleList(nn.Linear(64, 192) for _ in range(6))
        self.out = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6))
        self.reentrant = reentrant

    def layer(self, at, x):
        q, k, v = (one.unflatten(2, (4, 16)).transpose(1, 2) for one in self.mixed[at](x).chunk(3, 2))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out[at](mixed.transpose(1, 2).flatten(2))

    def forward(self, x):
        for at in range(6):
            if self.reentrant is None:
                x = self.layer(at, x)
            else:
                x = checkpoint(self.layer, at, x, use_reentrant=self.reentrant)
        return x


def fused():
    return _Attention(), torch.randn(8, 256, 64)


def checkpointed():
    return _Attention(reentrant=False), torch.randn(8, 256, 64)


def checkpointed_again():
    return _Attention(reentrant=True), torch.randn(8, 256, 64).requires_grad_()


def without_inputs():
    return nn.Linear(1000, 500)


def fixed_batch():
    return nn.Linear(4, 2), torch.randn(8, 4), lambda out: (out - torch.zeros(8, 2)[: len(out) * 0 + 8]).sum()


def norm():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), torch.randn(8, 4)


def enormous():
    expected = torch.zeros(8, 10**6)
    return nn.Linear(10**6, 10**6), torch.randn(8, 10**6), lambda out: (out - expected[:1]).square().mean()


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(500, 32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.out = nn.Linear(32, 500, bias=False)
        self.out.weight = self.words.weight

    def forward(self, left, right):
        return self.out(self.frozen(self.words(left) + self.words(right)))


def tied():
    return _Tied(), {"left": torch.randint(500, (8, 6)), "right": torch.randint(500, (8, 6))}


def keras_net():
    import keras

    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
