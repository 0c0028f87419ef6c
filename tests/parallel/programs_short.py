"""Trainings in which the last rank makes one allreduce of gradients fewer than the others.

``programs_short.py torch|tensorflow|keras HOW [AFTER]``. HOW: "skip" a step, "break" in the last one, one "micro"-batch
fewer; in TensorFlow also "graph", to skip a step of a ``tf.function``; in PyTorch "alone": it skips none, and the root
shards without the others. AFTER the loop: "check" the agreement, average "metrics", call "plain" Horovod, "exit", leave
a "thread" behind; "slow" skips nothing, and the root comes to its check seconds late.
"""

import importlib
import sys
import threading
import time

from lean_imports import lean_imports

STEPS = 6


def steps_of(rank: int, size: int, how: str, after: str) -> list[int]:
    """The steps, or micro-batches, that a rank takes."""
    short = rank == size - 1 and after != "slow" and how != "alone"
    kept = {"skip": lambda step: step != 3, "graph": lambda step: step != 3}.get(how, lambda step: step < STEPS - 1)
    return [step for step in range(STEPS) if not short or kept(step)]


def main(framework: str, how: str, after: str = "check") -> None:
    with lean_imports():
        hk = importlib.import_module(f"hvdkit.{framework}")
        hvd = importlib.import_module(f"horovod.{'torch' if framework == 'torch' else 'tensorflow'}")
        if framework == "torch":
            import torch
        else:
            import keras
            import tensorflow as tf
    world = hk.init()
    if framework == "torch":
        model = torch.nn.Linear(4, 1)
        optimizer = hk.distribute(torch.optim.SGD(model.parameters(), lr=0.01), model)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(8, 4)).sum().backward()
            optimizer.step()

    else:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.01)
        optimizer = hk.distribute(optimizer) if framework == "keras" else optimizer

        def step() -> None:
            with tf.GradientTape() as plain:
                tape = plain if framework == "keras" else hk.distribute(plain)
                loss = tf.reduce_sum(model(tf.ones((8, 4))) ** 2)  # else its gradient is a constant of the graph
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        step = tf.function(step) if how == "graph" else step
        optimizer.build(model.trainable_variables)
    hk.broadcast_state(model, optimizer)
    for _ in steps_of(world.rank, world.size, how, after):
        step()
    if how == "alone" and world.is_root:
        hk.shard(range(8), world, 4)
    if after == "slow" and world.is_root:
        time.sleep(9)
    if after == "thread" and world.rank:
        threading.Thread(target=time.sleep, args=(600,)).start()
    elif after == "metrics":
        hk.average_metrics({"loss": 1.0}, world)
    elif after == "plain":
        hvd.broadcast_object(1, root_rank=0, name="plain")
    elif after != "exit":
        hk.check_agreement(model, optimizer, world)
    print("ended", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
