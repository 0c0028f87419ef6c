"""An elastic training, started by test_elastic.py: python FILE OUT_DIR KILLED_AT [EVERY]."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hvdkit.torch as hk

SAMPLES, BATCH, EPOCHS, COMMIT_EVERY = 210, 8, 4, 3


class Numbered(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        x = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return x, (x.sum() > 0).long(), index


def main(out: Path, killed_at: int, every: int | None = None) -> None:
    world = hk.init()
    hk.seed_everything(1, world)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    outer = {} if every is None else {"every": every, "process_set": "rank", "outer": "average"}
    optimizer = hk.distribute(torch.optim.Adam(model.parameters(), lr=hk.scale_lr(0.01, world)), model, **outer)
    loader = hk.shard(Numbered(), world, BATCH, remainder="exact", seed=3)
    steps = hk.steps_per_epoch(SAMPLES, BATCH, world, "exact")
    schedule = hk.warmup(optimizer, world, steps, epochs=1)
    state = hk.ElasticState(model, optimizer, loader=loader, schedule=schedule, step=0, seen=[], sizes=[])
    loss_of = hk.weighted_loss(nn.CrossEntropyLoss())
    monitor = hk.Monitor(out / "seen", world, every=2)
    checkpoints = hk.Checkpoints(out / "run", wait=0)  # a root that is dead holds nothing
    first = out / "killed"

    def note(event: str) -> None:
        with (out / "events").open("a") as file:
            file.write(json.dumps([event, time.time(), state.world.size, state.step]) + "\n")

    def train(state: hk.ElasticState) -> None:
        note("enter")
        for epoch in range(state.loader.epoch, EPOCHS):
            for x, y, index, w in monitor(state.loader):
                optimizer.zero_grad()
                loss_of(model(x), y, w).backward()
                optimizer.step()
                schedule.step()
                state.step += 1
                for indices in hk.hvd.allgather_object(index[w > 0].tolist()):
                    state.seen.append([epoch, indices])
                state.sizes.append(state.world.size)
                if state.step == killed_at and state.world.is_root and not first.exists():
                    first.touch()
                    note("killed")
                    os.kill(os.getpid(), signal.SIGKILL)
                if state.step % COMMIT_EVERY == 0:
                    if every is None:  # a save ends the window of outer steps
                        checkpoints.save(model, optimizer, step=state.step, size_then=state.world.size)
                    state.commit()
            while epoch == EPOCHS - 2 and state.world.size == 1:  # the last epoch is that of the rank that joins
                time.sleep(0.2)
                state.commit()
        if every is None:
            hk.check_agreement(model, optimizer, state.world, loader=state.loader)
        else:  # what Adam keeps is each rank's own
            hk.average_weights()

    hk.run_elastic(train, state)
    monitor.close()
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).tolist()
    result = {
        "weights": weights,
        "seen": state.seen,
        "sizes": state.sizes,
        "rate": optimizer.param_groups[0]["lr"],
        "step": state.step,
    }
    (out / f"rank-{state.world.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
