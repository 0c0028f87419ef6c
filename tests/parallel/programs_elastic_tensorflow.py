"""An elastic training, started by test_elastic.py: python FILE OUT_DIR KILLED_AT."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from lean_imports import lean_imports

with lean_imports():
    import horovod.tensorflow as hvd
    import keras
    import numpy as np
    import tensorflow as tf

    import hvdkit.tensorflow as hk

SAMPLES, BATCH, EPOCHS, COMMIT_EVERY = 210, 8, 4, 3


def numbered() -> Any:
    x = np.random.default_rng(4).normal(size=(SAMPLES, 6)).astype(np.float32)
    return x, (x.sum(axis=1) > 0).astype(np.int64), np.arange(SAMPLES)


def main(out: Path, killed_at: int) -> None:
    world = hk.init()
    hk.pin_device(world, "cpu")
    hk.seed_everything(1, world)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(2)])
    optimizer = keras.optimizers.Adam(hk.scale_lr(0.01, world))
    loader = hk.shard(numbered(), world, BATCH, remainder="exact", seed=3)
    steps = hk.steps_per_epoch(SAMPLES, BATCH, world, "exact")
    schedule = hk.warmup(optimizer, world, steps, epochs=1)
    state = hk.ElasticState(model, optimizer, loader=loader, schedule=schedule, step=0, seen=[], sizes=[])
    loss_of = hk.weighted_loss(keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    first = out / "killed"

    def note(event: str) -> None:
        with (out / "events").open("a") as file:
            file.write(json.dumps([event, time.time(), state.world.size, state.step]) + "\n")

    def train(state: hk.ElasticState) -> None:
        with hk.Monitor(out / "seen", state.world, every=2) as monitor:
            train_seen(state, monitor)

    def train_seen(state: hk.ElasticState, monitor: Any) -> None:
        @tf.function(reduce_retracing=True)
        def train_step(x: Any, y: Any, w: Any) -> None:
            with hk.distribute(tf.GradientTape()) as tape:
                loss = loss_of(y, model(x, training=True), w)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        note("enter")
        for epoch in range(state.loader.epoch, EPOCHS):
            for x, y, index, w in monitor(state.loader):
                train_step(x, y, w)
                schedule.step()
                state.step += 1
                for indices in hvd.allgather_object(index[w > 0].numpy().tolist()):
                    state.seen.append([epoch, indices])
                state.sizes.append(state.world.size)
                if state.step == killed_at and state.world.rank == 1 and not first.exists():
                    first.touch()
                    note("killed")
                    os.kill(os.getpid(), signal.SIGKILL)
                if state.step % COMMIT_EVERY == 0:
                    state.commit()
            while epoch == EPOCHS - 2 and state.world.size == 1:  # the last epoch is that of the rank that joins
                time.sleep(0.2)
                state.commit()
        hk.check_agreement(model, optimizer, state.world, loader=state.loader)

    hk.run_elastic(train, state)
    result = {
        "weights": np.concatenate([np.ravel(variable.numpy()) for variable in model.trainable_variables]).tolist(),
        "seen": state.seen,
        "sizes": state.sizes,
        "rate": float(optimizer.learning_rate),
        "step": state.step,
    }
    (out / f"rank-{state.world.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
