"""What recording MPI calls costs: a training step with the recorder on over one with it off, in turn in one job.

    hvdkit launch -n 2 --mpi-profile profile -- benchmarks/mpi_profile.py
    ... --width 512 --blocks 60 --steps 10 --json cost.json

Blocks of STEPS training steps alternate: on, off, off, on, ... so that both see the same machine. MPI_Pcontrol switches
the recorder; off, a call still passes through its wrapper, which costs some nanoseconds and is not in the ratio. Ranks
that share cores measure contention: look at the interval. What one call costs, which no other rank disturbs, is
measured by calls of MPI_Testall with nothing to test: the fastest block on less the fastest block off.
"""

import argparse
import ctypes
import json
import os
import statistics
import time
from pathlib import Path

import numpy as np
import torch

import hvdkit.torch as hk
from hvdkit.common import intervals


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512, help="units of the two hidden layers (default 512)")
    parser.add_argument("--blocks", type=int, default=60, help="blocks of each kind (default 60)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a block (default 10)")
    parser.add_argument("--json", help="write the numbers to this file, too")
    args = parser.parse_args()
    if "HVDKIT_MPI_PROFILE" not in os.environ:
        parser.error("start it with 'hvdkit launch -n 2 --mpi-profile DIR --'")
    record = ctypes.CDLL(None).MPI_Pcontrol  # the recorder's, which is preloaded
    world, step = training(args.width)
    times = {0: [], 1: []}
    for block in range(-2, 2 * args.blocks):
        level = (0, 1, 1, 0)[block % 4]
        record(level)
        start = time.perf_counter()
        for _ in range(args.steps):
            step()
        if block >= 0:
            times[level].append((time.perf_counter() - start) / args.steps)
    record(1)
    call_ns = cost_of_a_call(record)
    ratio = intervals.ratio(times[1], times[0], np.random.default_rng(0))
    result = {
        "ranks": world.size,
        "cores": os.cpu_count(),
        "width": args.width,
        "off_ms": 1e3 * statistics.median(times[0]),
        "on_ms": 1e3 * statistics.median(times[1]),
        "call_ns": call_ns,
        "ratio": ratio.value,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
    }
    if world.is_root:
        print(f"{world.size} ranks on {os.cpu_count()} cores, width {args.width}")
        print(f"a call {call_ns:.0f} ns")
        print(f"step {result['off_ms']:.2f} ms off, {result['on_ms']:.2f} ms on")
        change, low, high = (100 * (value - 1) for value in (ratio.value, ratio.low, ratio.high))
        print(f"recording takes {change:+.1f} % of the step [{low:+.1f}, {high:+.1f}]")
        if args.json:
            Path(args.json).write_text(json.dumps(result, indent=1))


def cost_of_a_call(record, blocks=40, calls=5000):
    """Nanoseconds that the recorder adds to a call."""
    test, flag = ctypes.CDLL(None).MPI_Testall, ctypes.byref(ctypes.c_int())
    fastest = {0: float("inf"), 1: float("inf")}
    for block in range(2 * blocks):
        record(block % 2)
        start = time.perf_counter_ns()
        for _ in range(calls):
            test(0, None, flag, None)
        fastest[block % 2] = min(fastest[block % 2], (time.perf_counter_ns() - start) / calls)
    return fastest[1] - fastest[0]


def training(width):
    """The world, and a step of a training."""
    world = hk.init()
    device = hk.pin_device(world)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(),
        torch.nn.Linear(width, 10),
    ).to(device)  # fmt: skip
    optimizer = hk.distribute(torch.optim.SGD(model.parameters(), lr=0.01), model)
    hk.broadcast_state(model, optimizer)
    x, y = torch.randn(64, 64, device=device), torch.zeros(64, dtype=torch.long, device=device)

    def step():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return world, step


if __name__ == "__main__":
    main()
