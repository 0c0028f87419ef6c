"""hvdkit.arrays beside the raw MPI_Allreduce of the same bytes, on this machine, in turn.

    python benchmarks/arrays.py
    python benchmarks/arrays.py -n 4 --sizes 4096,1000000 --rounds 40 --json arrays.json

It starts itself under ``hvdkit launch -n 2``. For each size, all variants run once in every round, in random order, as
often as fills about 50 ms. A variant's time is that of the slower rank. The ratios are medians over the rounds of time
/ time(raw) of the same round, with 95 % intervals by the bootstrap: below 1, hvdkit is faster.

raw        MPI_Allreduce of a float32 NumPy buffer in place (mpi4py): the sum, nothing else
raw mean   the same, and then the division by the number of ranks, as one writes it by hand
sum        hvdkit.arrays, op="sum", gradients in reduce.buffers
mean       hvdkit.arrays, op="average", gradients in reduce.buffers
packed     hvdkit.arrays, op="average", 16 gradients of the caller's, which are copied into the buffer
start      hvdkit.arrays, op="average", start() and then wait()

Ranks that share cores measure contention.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

SIZES = (4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20, 80_000_000)
ROUND_S = 0.05
MEASURING = "HVDKIT_BENCHMARK_ARRAYS"


def variants(values, world):
    """What is timed, by name, for ``values`` float32 numbers."""
    from mpi4py import MPI

    import hvdkit.arrays as hk

    raw = np.zeros(values, np.float32)
    raw.fill(0)
    comm = MPI.COMM_WORLD.Dup()
    total, mean = hk.distribute(raw, op="sum"), hk.distribute(raw)
    to_sum, to_average = total.buffers, mean.buffers
    parts = np.array_split(np.zeros(values, np.float32), min(16, values))
    packed = hk.distribute(parts)

    def raw_mean():
        comm.Allreduce(MPI.IN_PLACE, raw)
        np.divide(raw, world.size, out=raw)

    return {
        "raw": lambda: comm.Allreduce(MPI.IN_PLACE, raw),
        "raw mean": raw_mean,
        "sum": lambda: total(to_sum),
        "mean": lambda: mean(to_average),
        "packed": lambda: packed(parts),
        "start": lambda: mean.start(to_average).wait(),
    }


def seconds(action, times, comm):
    """Of one call, on the slowest rank."""
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(times):
        action()
    return comm.allreduce(time.perf_counter() - start, max_of()) / times


def max_of():
    from mpi4py import MPI

    return MPI.MAX


def measure(sizes, rounds):
    """On every rank: seconds by size, variant and round."""
    from mpi4py import MPI

    import hvdkit.arrays as hk

    world = hk.init()
    comm, order, found = MPI.COMM_WORLD.Dup(), random.Random(1), {}  # noqa: S311
    for size in sizes:
        actions = variants(size // 4, world)
        times = {}
        for name, action in actions.items():
            seconds(action, 3, comm)
            times[name] = comm.bcast(max(1, min(5000, int(ROUND_S / seconds(action, 3, comm)))))
        taken = {name: [] for name in actions}
        for _ in range(rounds):
            for name in order.sample(list(actions), len(actions)):
                taken[name].append(seconds(actions[name], times[name], comm))
        found[size] = taken
        if world.is_root:
            print(f"{size} bytes: raw {1e6 * np.median(taken['raw']):.1f} us", file=sys.stderr, flush=True)
    return world, MPI.Get_library_version().split(",")[0], found


def report(world, library, found):
    from hvdkit.common import intervals

    rng = np.random.default_rng(1)
    names = next(iter(found.values()))
    print(f"{world.size} ranks on {os.cpu_count()} cores, {library}; time / raw of the same round [95 % interval]\n")
    print(f"| bytes | raw, us | {' | '.join(name for name in names if name != 'raw')} |")
    print("|---|---|" + "---|" * (len(names) - 1))
    ratios = {}
    for size, taken in found.items():
        raw = np.array(taken["raw"])
        ratios[size] = {
            name: intervals.median((np.array(times) / raw).tolist(), rng)
            for name, times in taken.items()
            if name != "raw"
        }
        cells = [f"{one.value:.2f} [{one.low:.2f}, {one.high:.2f}]" for one in ratios[size].values()]
        print(f"| {size:,} | {1e6 * np.median(raw):.1f} | {' | '.join(cells)} |")
    return {size: {name: [one.value, one.low, one.high] for name, one in row.items()} for size, row in ratios.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=2, help="ranks (default 2)")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=30, help="rounds that are measured (default 30, at least 2)")
    parser.add_argument("--json", help="write the numbers to this file, too")
    args = parser.parse_args()
    if MEASURING not in os.environ:
        launch = [str(Path(sys.executable).parent / "hvdkit"), "launch", "-n", str(args.n), "--no-tag", "--"]
        environment = {
            **os.environ,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            MEASURING: "1",
        }
        sys.exit(subprocess.run([*launch, sys.executable, *sys.argv], env=environment).returncode)
    world, library, found = measure([int(size) for size in args.sizes.split(",")], args.rounds)
    if world.is_root:
        ratios = report(world, library, found)
        if args.json:
            result = {"times_s": found, "ratios": ratios, "ranks": world.size, "cores": os.cpu_count()}
            Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
