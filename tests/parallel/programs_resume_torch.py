"""What the ranks of test_resume_torch.py do; each function returns JSON values."""

import os
import random
import signal
from typing import Any

import numpy as np
import torch
from torch import nn

import hvdkit
import hvdkit.torch as hk
from hvdkit import datasets

EPOCHS, BATCH, BASE_LR, WARMUP = 8, 24, 0.02, 2
DIGITS = datasets.load("digits")


class Numbered(torch.utils.data.Dataset):
    """The training images, each with its number."""

    def __len__(self) -> int:
        return len(DIGITS.y_train)

    def __getitem__(self, index: int) -> Any:
        return DIGITS.x_train[index].reshape(-1), DIGITS.y_train[index], index


def weights(model: nn.Module) -> list[float]:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).tolist()


def message(attempt: Any) -> str:
    try:
        attempt()
    except hvdkit.HvdkitError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Run:
    """A training that can be interrupted anywhere and resumed on any number of ranks."""

    def __init__(self, directory: str, **options: Any) -> None:
        self.world = hk.init()
        hk.seed_everything(1, self.world)
        self.model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 10))
        optimizer = torch.optim.Adam(self.model.parameters(), lr=hk.scale_lr(BASE_LR, self.world, "sqrt"))
        self.optimizer = hk.distribute(optimizer, self.model)
        hk.broadcast_state(self.model, self.optimizer)
        self.loader = hk.shard(Numbered(), self.world, BATCH, remainder="exact", seed=2)
        steps = hk.steps_per_epoch(len(Numbered()), BATCH, self.world, "exact")
        self.schedule = hk.warmup(self.optimizer, self.world, steps, WARMUP, rule="sqrt")
        self.checkpoints = hk.Checkpoints(directory, keep=2, **options)
        self.saved = self.checkpoints.restore(self.model, self.optimizer, loader=self.loader, schedule=self.schedule)
        self.step = self.saved.step if self.saved else 0

    def train_step(self, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> None:
        noise = random.gauss(0, 0.01) + np.random.normal(0, 0.01)
        self.optimizer.zero_grad()
        hk.weighted_loss(nn.CrossEntropyLoss())(self.model(x + noise), y, w).backward()
        self.optimizer.step()
        self.schedule.step()
        self.step += 1

    def save(self) -> Any:
        return self.checkpoints.save(self.model, self.optimizer, step=self.step, loader=self.loader)

    def accuracy(self) -> float:
        self.model.eval()
        hits = (self.model(torch.from_numpy(DIGITS.x_test.reshape(-1, 64))).argmax(1).numpy() == DIGITS.y_test).sum()
        return float(hits / len(DIGITS.y_test))


def train(directory: str, killed_at: int = 0, asynchronous: bool = False) -> dict[str, Any]:
    """Train to the end, saving every third step; with ``killed_at`` the root kills itself after that step."""
    run = Run(directory, asynchronous=asynchronous)
    began, first_rate = (run.loader.epoch, run.loader.position.samples), run.optimizer.param_groups[0]["lr"]
    first_epoch: list[int] = []
    for epoch in range(run.loader.epoch, EPOCHS):
        for x, y, index, w in run.loader:
            run.train_step(x, y, w)
            first_epoch += index[w > 0].tolist() if epoch == began[0] else []
            if run.step % 3 == 0:
                run.save()
            if run.step == killed_at and run.world.is_root:
                os.kill(os.getpid(), signal.SIGKILL)
    hk.check_agreement(run.model, run.optimizer, run.world, loader=run.loader)
    run.checkpoints.wait()
    return {
        "weights": weights(run.model),
        "accuracy": run.accuracy(),
        "began": began,
        "first rate": first_rate,
        "last rate": run.optimizer.param_groups[0]["lr"],
        "first epoch": first_epoch,
        "step": run.step,
        "metadata": run.saved.metadata if run.saved else None,
    }


def stores(directory: str) -> dict[str, Any]:
    """Best and newest, asynchronous writing and its errors, and what does not fit."""
    run = Run(f"{directory}/run", keep_best=1, asynchronous=True)
    batches = iter(run.loader)
    kept = []
    for score in (0.2, 0.9, 0.3, 0.4):
        x, y, _, w = next(batches)
        run.train_step(x, y, w)
        kept.append(weights(run.model))
        run.checkpoints.save(run.model, run.optimizer, step=run.step, loader=run.loader, score=score, note="x")
    written = run.checkpoints.wait()
    best = run.checkpoints.restore(run.model, which="best")
    back = weights(run.model) == kept[1]
    newest = run.checkpoints.restore(run.model, run.optimizer, loader=run.loader)
    hk.check_agreement(run.model, run.optimizer, run.world, loader=run.loader)
    other = hk.shard(Numbered(), run.world, BATCH, seed=3)
    blocked = hk.Checkpoints(f"{directory}/file/run", asynchronous=True)
    blocked.save(run.model, step=1)
    return {
        "written": written.step,
        "best": [best.step, best.score, back],
        "newest": [newest.step, weights(run.model) == kept[3], run.loader.position.samples],
        "position": newest.metadata["data"],
        "nothing": run.checkpoints.wait() is None,
        "errors": [
            message(blocked.wait),
            message(lambda: run.checkpoints.restore(run.model, which="oldest")),
            message(lambda: run.checkpoints.restore(run.model, run.optimizer, loader=other)),
            message(lambda: run.checkpoints.restore(run.model, run.optimizer, loader=[1])),
            message(lambda: run.checkpoints.restore(run.model, run.optimizer, schedule=run.schedule)),
            message(lambda: run.checkpoints.save(run.model, step=9, score=float("nan"))),
        ],
    }
