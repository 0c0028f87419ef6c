"""``hvdkit bench synthetic --framework torch``: one rank of it, and its models in PyTorch."""

from __future__ import annotations

import itertools
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from hvdkit.synthetic.benchmark import EXPANSION, HIDDEN, RESNET50, BenchmarkSettings, Stopwatch, bottlenecks, projected


def run(settings: BenchmarkSettings) -> tuple[Any, Any]:
    """Train on one random batch and print how fast that is.

    Returns:
        The model and its optimizer, trained.
    Raises:
        MissingFrameworkError: PyTorch, or Horovod for it, is missing.
    """
    import hvdkit.torch as hk  # needs Horovod, which the models do not

    world = hk.init()
    device = hk.pin_device(world, "auto" if settings.cuda else "cpu")
    torch.backends.cudnn.benchmark = True
    model = make_model(settings).to(device).train()
    rate = hk.scale_lr(0.01, world)
    plain = torch.optim.SGD(model.parameters(), lr=rate)
    optimizer = hk.distribute(plain, model, compression=settings.compression)
    hk.broadcast_state(model, optimizer)

    x, y = (torch.from_numpy(array).to(device) for array in settings.data(world.rank))
    if x.dim() == 4:
        x = x.permute(0, 3, 1, 2).contiguous()
    loss_of = torch.nn.CrossEntropyLoss()
    sizes = [parameter.numel() for parameter in model.parameters()]
    on_gpu = device.type == "cuda"
    watch = Stopwatch(settings, world, "GPU" if on_gpu else "CPU", len(sizes), sum(sizes))
    watch.begin()
    for images, labels in hk.record_steps(itertools.repeat((x, y), settings.batches)):
        optimizer.zero_grad()
        loss_of(model(images), labels).backward()
        optimizer.step()
        watch.batch_ended(torch.cuda.synchronize if on_gpu else lambda: None)
    watch.end()
    return model, optimizer


def make_model(settings: BenchmarkSettings) -> nn.Module:
    """The model with random weights; takes (batch, channels, height, width), or (batch, features)."""
    torch.manual_seed(0)
    if settings.model == RESNET50:
        return _resnet50(settings.classes)
    if settings.model == "cnn":
        return nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
            nn.Flatten(), nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, settings.classes),
        )  # fmt: skip
    layers: list[nn.Module] = []
    for before, after in pairwise([*settings.shape, *HIDDEN[settings.model]]):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(HIDDEN[settings.model][-1], settings.classes))


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """Without bias, since batch normalization has one."""
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


class _Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions, added to what came in."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        outer = EXPANSION * inner
        self.body = nn.Sequential(
            _convolution(channels, inner, 1), nn.ReLU(), _convolution(inner, inner, 3, stride), nn.ReLU(),
            _convolution(inner, outer, 1),
        )  # fmt: skip
        self.beside = _convolution(channels, outer, 1, stride) if projected(channels, inner, stride) else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.beside(x))


def _resnet50(classes: int) -> nn.Module:
    blocks = [_Bottleneck(channels, inner, stride) for channels, inner, stride in bottlenecks()]
    return nn.Sequential(
        _convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(EXPANSION * bottlenecks()[-1][1], classes),
    )  # fmt: skip
