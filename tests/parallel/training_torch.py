"""A small training in PyTorch for tests that are the same in all frameworks; imported by ranks alone.

The other ``training_*.py`` have the same names. What a framework has not is missing in its OPTIONS.
"""

import random
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from torch import nn

import hvdkit.torch as hk

FEATURES, CLASSES = 6, 3
BASE_LR, WARMUP = 0.02, 2
OPTIONS = {"one bucket": {"bucket_mb": 1}, "small buckets": {"bucket_mb": 1e-4}}
"""How gradients can travel besides one by one."""
GLOBAL_BATCH_NORM = True


def over_mpi() -> bool:
    return bool(hvd.mpi_enabled())


def set_precision(dtype: str) -> None:
    torch.set_default_dtype(getattr(torch, dtype))


def dataset(x: np.ndarray, y: np.ndarray) -> Any:
    return torch.utils.data.TensorDataset(torch.from_numpy(x).to(torch.get_default_dtype()), torch.from_numpy(y))


class Training:
    """A classifier with hvdkit's eight steps in it, as a user would write it.

    Args:
        seed: of the weights.
        optimizer: "sgd" or "adam".
        batch_norm: "", "local" or "global".
        passes: backward passes of one step.
        averages, broadcasts: without, the mistakes of leaving out these steps.
        options: of ``distribute``.
    """

    def __init__(
        self,
        seed: int,
        optimizer: str = "sgd",
        *,
        batch_norm: str = "",
        passes: int = 1,
        averages: bool = True,
        broadcasts: bool = True,
        **options: Any,
    ) -> None:
        torch.manual_seed(seed)
        middle = [nn.BatchNorm1d(8)] if batch_norm else []
        self.model = nn.Sequential(nn.Linear(FEATURES, 8), *middle, nn.Tanh(), nn.Linear(8, CLASSES))
        if batch_norm == "global":
            hk.sync_batch_norm(self.model)
        parameters = self.model.parameters()
        if optimizer == "sgd":
            self.optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)
        else:
            self.optimizer = torch.optim.Adam(parameters, lr=0.01, weight_decay=0.01)
        if averages:
            self.optimizer = hk.distribute(self.optimizer, self.model, backward_passes_per_step=passes, **options)
        if broadcasts:
            hk.broadcast_state(self.model, self.optimizer)
        self._passes, self._taken = passes, 0
        self._loss = hk.weighted_loss(nn.CrossEntropyLoss())

    def train(self, loader: Any, epochs: int, *, equal_weights: bool = False) -> None:
        """With ``equal_weights`` the mistake: samples count the same on their rank, however few the rank has."""
        for _ in range(epochs):
            for x, y, w in loader:
                self.step(x, y, torch.ones_like(w) if equal_weights else w)

    def step(self, x: Any, y: Any, w: Any) -> None:
        if self._taken % self._passes == 0:
            self.optimizer.zero_grad()
        (self._loss(self.model(x), y, w) / self._passes).backward()
        self._taken += 1
        if self._taken % self._passes == 0:
            self.optimizer.step()

    def step_in_parts(self, batches: list[tuple[np.ndarray, np.ndarray, float]]) -> None:
        """One step of one process on the parts that as many ranks would have, each with its samples' weight."""
        self.optimizer.zero_grad()
        for x, y, weight in batches:
            x, y = torch.from_numpy(x).to(torch.get_default_dtype()), torch.from_numpy(y)
            (self._loss(self.model(x), y, torch.full((len(y),), weight)) / len(batches)).backward()
        self.optimizer.step()

    def weights(self) -> list[float]:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()]).tolist()


def nudge(training: Training) -> None:
    with torch.no_grad():
        training.model[-1].weight[2, 5] += 2**-10


def set_rate(optimizer: Any, rate: float) -> None:
    optimizer.param_groups[0]["lr"] = rate


def accuracy(training: Training, data: Any, world: Any, batch_size: int) -> float:
    """Of every sample once."""
    hits = samples = 0
    loader = hk.shard(data, world, batch_size)
    for x, y in loader.evaluation():
        hits, samples = hits + int((training.model(x).argmax(dim=1) == y).sum()), samples + len(y)
    assert (loader.epoch, loader.position.samples) == (0, 0)
    return hk.average_metrics({"accuracy": (hits, samples)}, world)["accuracy"]


def numbered(x: np.ndarray, y: np.ndarray) -> Any:
    """The images, each with its number."""
    return torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y), torch.arange(len(y)))


class Resumable:
    """A training that can be interrupted anywhere and go on on any number of ranks: dropout, warmup, checkpoints.

    Args:
        data: images (n, 64) and their classes.
        batch_size: of a rank.
        compression, shard_state: of ``distribute``.
        checkpointing: options of ``Checkpoints``.
    """

    def __init__(
        self,
        data: Any,
        batch_size: int,
        directory: Any,
        compression: str = "none",
        shard_state: bool = False,
        **checkpointing: Any,
    ) -> None:
        self.world = hk.init()
        hk.seed_everything(1, self.world)
        self.model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 10))
        optimizer = torch.optim.Adam(self.model.parameters(), lr=hk.scale_lr(BASE_LR, self.world, "sqrt"))
        self.optimizer = hk.distribute(optimizer, self.model, compression=compression, shard_state=shard_state)
        hk.broadcast_state(self.model, self.optimizer)
        self.loader = hk.shard(numbered(*data), self.world, batch_size, remainder="exact", seed=2)
        steps = hk.steps_per_epoch(len(data[1]), batch_size, self.world, "exact")
        self.schedule = hk.warmup(self.optimizer, self.world, steps, WARMUP, rule="sqrt")
        self.checkpoints = hk.Checkpoints(directory, keep=2, **checkpointing)
        self.saved = self.checkpoints.restore(self.model, self.optimizer, loader=self.loader, schedule=self.schedule)
        self.step = self.saved.step if self.saved else 0

    def train_step(self, x: Any, y: Any, index: Any, w: Any) -> list[int]:
        """With random numbers from everything that is saved; the numbers of the images, without fillers."""
        noise = random.gauss(0, 0.01) + np.random.normal(0, 0.01)
        self.optimizer.zero_grad()
        hk.weighted_loss(nn.CrossEntropyLoss())(self.model(x + noise), y, w).backward()
        self.optimizer.step()
        self.schedule.step()
        self.step += 1
        return index[w > 0].tolist()

    def rate(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    def weights(self) -> list[float]:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()]).tolist()

    def accuracy(self, x: np.ndarray, y: np.ndarray) -> float:
        self.model.eval()
        return float((self.model(torch.from_numpy(x)).argmax(1).numpy() == y).mean())
