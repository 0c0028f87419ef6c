"""One rank of ``adapters.py``: hvdkit's adapter and Horovod by hand, both in this process, in turn."""

import argparse
import importlib
import json
import random
import time
from pathlib import Path

from rank import SHAPES, Job

WARM_UP = 10
"""Steps of each variant that are not timed."""


def seconds_per_step(train, steps):
    ends = []
    train(steps + 1, lambda: ends.append(time.perf_counter()))
    return (ends[-1] - ends[0]) / steps


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=("torch", "tensorflow"))
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("steps", type=int)
    parser.add_argument("rounds", type=int)
    parser.add_argument("first", choices=("hvdkit", "horovod"))
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    script = importlib.import_module(f"train_{args.framework}")
    job = Job("", args.model, args.steps, WARM_UP, args.directory)
    trains = {}
    for variant in sorted(("hvdkit", "horovod"), key=lambda name: name != args.first):
        rank, size, *parts = script.VARIANTS[variant](args.model)
        trains[variant] = script.steps_of(job, rank, *parts)
        trains[variant](WARM_UP, lambda: None)
    found = {variant: [] for variant in trains}
    order = random.Random(0)  # noqa: S311  the same on all ranks
    for _ in range(args.rounds):
        for variant in order.sample(sorted(trains), len(trains)):
            found[variant].append(seconds_per_step(trains[variant], args.steps))
    (args.directory / f"rank-{rank}.json").write_text(json.dumps({"size": size, "step_seconds": found}))


if __name__ == "__main__":
    main()
