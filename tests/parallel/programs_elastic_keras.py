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
    import keras
    import numpy as np

    import hvdkit.keras as hk
    from hvdkit.keras.transport import TRANSPORT

SAMPLES, BATCH, EPOCHS, COMMIT_EVERY = 210, 8, 4, 3


class Loss(keras.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.sparse_categorical_crossentropy(y_true[:, 0], y_pred, from_logits=True)


class Seen(keras.metrics.Metric):
    """How often each sample was trained on in this ``fit``'s epoch; fillers have no weight."""

    def __init__(self) -> None:
        super().__init__(name="seen")
        self.counts = self.add_variable((SAMPLES,), "zeros", "int32", name="counts")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        counted = keras.ops.cast(keras.ops.reshape(sample_weight, (-1,)) > 0, "int32")
        numbers = keras.ops.cast(y_true[:, 1], "int32")
        self.counts.assign(self.counts + keras.ops.segment_sum(counted, numbers, SAMPLES))

    def result(self) -> Any:
        return keras.ops.sum(self.counts)


def main(out: Path, killed_at: int) -> None:
    world = hk.init()
    hk.seed_everything(1, world)
    x = np.random.default_rng(5).normal(size=(SAMPLES, 6)).astype("float32")
    y = np.stack([x.sum(axis=1) > 0, np.arange(SAMPLES)], axis=1).astype("int64")
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(2)])
    optimizer = hk.distribute(keras.optimizers.Adam(hk.scale_lr(0.01, world)))
    seen = Seen()
    model.compile(optimizer, Loss(), weighted_metrics=[seen])
    loader = hk.shard((x, y), world, BATCH, remainder="exact", seed=3)
    steps = hk.steps_per_epoch(SAMPLES, BATCH, world, "exact")
    schedule = hk.warmup(optimizer, world, steps, epochs=1)
    state = hk.ElasticState(model, optimizer, loader=loader, schedule=schedule, step=0, seen=[], sizes=[])
    monitor = hk.Monitor(out / "seen", world, every=2)
    first = out / "killed"

    def note(event: str) -> None:
        with (out / "events").open("a") as file:
            file.write(json.dumps([event, time.time(), state.world.size, state.step]) + "\n")

    class Record(keras.callbacks.Callback):
        """Notes in the state what all ranks trained on, and kills one of them."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch, self.counts = epoch, np.zeros(SAMPLES)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            before, self.counts = self.counts, keras.ops.convert_to_numpy(seen.counts).copy()
            mine = np.flatnonzero(self.counts - before).tolist()
            state.step += 1
            for indices in TRANSPORT.hvd.allgather_object(mine):
                state.seen.append([self.epoch, indices])
            state.sizes.append(state.world.size)
            if state.step == killed_at and state.world.rank == 1 and not first.exists():
                first.touch()
                note("killed")
                os.kill(os.getpid(), signal.SIGKILL)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            while epoch == EPOCHS - 2 and state.world.size == 1:  # the last epoch is that of the rank that joins
                time.sleep(0.2)
                state.commit()

    def train(state: hk.ElasticState) -> None:
        note("enter")
        callbacks = [schedule, monitor, Record(), hk.ElasticCommit(state, every=COMMIT_EVERY)]
        model.fit(state.loader, initial_epoch=state.loader.epoch, epochs=EPOCHS, verbose=0, callbacks=callbacks)
        hk.check_agreement(model, optimizer, state.world, loader=state.loader)

    hk.run_elastic(train, state)
    monitor.close()
    result = {
        "weights": np.concatenate([value.reshape(-1) for value in model.get_weights()]).tolist(),
        "seen": state.seen,
        "sizes": state.sizes,
        "rate": float(optimizer.learning_rate),
        "step": state.step,
    }
    (out / f"rank-{state.world.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
