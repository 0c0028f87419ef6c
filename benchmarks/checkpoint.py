"""How long saving a checkpoint holds up the training: written at once, and asynchronously, in turn in one run.

    mpirun -n 2 python benchmarks/checkpoint.py          (--megabytes 200 --rounds 10 --json blocked.json)

Each round saves the same model both ways. The ratio is that of the medians of what `save` takes; the asynchronous write
goes on behind it and is waited for before the next round. Ranks that share cores measure contention.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

import hvdkit.torch as hk


def seconds(action):
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200, help="parameters and Adam's slots (default 200)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that are measured (default 7)")
    parser.add_argument("--directory", help="where to write (default: a temporary directory)")
    parser.add_argument("--json", help="write the numbers to this file, too")
    args = parser.parse_args()
    world = hk.init()
    side = int((args.megabytes * 1e6 / 12 / 4) ** 0.5)
    model = torch.nn.Sequential(*(torch.nn.Linear(side, side, bias=False) for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, side)).sum().backward()
    optimizer.step()
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        at_once = hk.Checkpoints(f"{directory}/at-once", keep=1)
        behind = hk.Checkpoints(f"{directory}/behind", keep=1, asynchronous=True)
        rounds = []
        for number in range(args.rounds + 1):
            first = seconds(lambda number=number: at_once.save(model, optimizer, step=number))
            second = seconds(lambda number=number: behind.save(model, optimizer, step=number))
            behind.wait()
            rounds.append((first, second))
    blocked, copied = (statistics.median(times) for times in zip(*rounds[1:], strict=True))
    result = {
        "ranks": world.size,
        "cores": os.cpu_count(),
        "megabytes": args.megabytes,
        "save_ms": 1e3 * blocked,
        "asynchronous_save_ms": 1e3 * copied,
        "ratio": copied / blocked,
    }
    if world.is_root:
        print(f"{world.size} ranks on {os.cpu_count()} cores, {args.megabytes} MB")
        print(f"save {1e3 * blocked:.0f} ms, asynchronous {1e3 * copied:.0f} ms: {100 * copied / blocked:.1f} % of it")
        if args.json:
            Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
