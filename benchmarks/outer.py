"""The rate of a training with outer steps (``distribute(every=H)``) over a slow network, beside that of ranks alone.

Two hosts are network namespaces of this machine with one rank each (root, Linux), as in compression.py. In each round
each variant trains for two windows of H steps after one that warms up; the rate is that of the two, of the slower rank.
The clock starts and stops in mid-training: a barrier would wait for weights that training leaves on their way.

    python benchmarks/outer.py [--mbit 100] [--delay-ms 10] [--every 30] [--overlap 20] [--rounds 3]
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from compression import model_of, on_two_hosts, step_of

SYNCHRONOUS_STEPS = 4  # each takes seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=100, help="rate of each host's link (default %(default)s)")
    parser.add_argument("--delay-ms", type=float, default=10, help="of a packet each way (default %(default)s)")
    parser.add_argument("--every", type=int, default=30, help="steps in a window (default %(default)s)")
    parser.add_argument("--overlap", type=int, default=20, help="steps that a fragment travels (default %(default)s)")
    parser.add_argument("--batch", type=int, default=128, help="samples of a step on a rank (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="default %(default)s")
    parser.set_defaults(launcher="horovodrun")
    options = parser.parse_args()
    if "HVDKIT_OUTER_RANK" in os.environ:
        measure(options)
        return
    times = on_two_hosts(Path(__file__), options, "HVDKIT_OUTER_RANK")
    print(f"2 hosts of one rank, {options.mbit:g} Mbit/s, {options.delay_ms:g} ms each way, Gloo,")
    print(f"80 MB of weights, batch {options.batch}")
    print(f"{'':<44}{'step ms':>9}  share of the rate without communication, median [lowest, highest]")
    for name, own in times.items():
        shares = [alone / mine for alone, mine in zip(times["alone"], own, strict=True)]
        spread = f"[{min(shares):.3f}, {max(shares):.3f}]"
        print(f"{name:<44}{1e3 * statistics.median(own):>9.1f}  {statistics.median(shares):.3f} {spread}")


def measure(options: argparse.Namespace) -> None:
    import torch

    import hvdkit.torch as hk

    world = hk.init()
    overlap = {"every": options.every, "outer_overlap": options.overlap, "process_set": "rank"}
    variants: dict[str, dict[str, Any] | None] = {"alone": None, "synchronous": {}}
    for given in (overlap, {**overlap, "compression": "int8"}):
        variants[", ".join(f"{key}={value}" for key, value in given.items() if key != "process_set")] = given
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(options.rounds):
        for name, given in variants.items():
            model = model_of(torch, (4096, 4096, 800))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            if given is not None:
                optimizer = hk.distribute(optimizer, model, **given)
            step = step_of(torch, model, optimizer, 4096, options.batch)
            steps = SYNCHRONOUS_STEPS if name == "synchronous" else 2 * options.every
            before = steps // 2 + steps // 6  # so far into a window that weights are on their way
            for _ in range(before):
                step()
            start = time.perf_counter()
            for _ in range(steps):
                step()
            mine = (time.perf_counter() - start) / steps
            for _ in range(steps // 6):  # beside a slower rank's last steps
                step()
            of_rank = hk.average_metrics({str(rank): mine * (rank == world.rank) for rank in range(world.size)}, world)
            times[name].append(max(of_rank.values()) * world.size)
            if world.is_root:
                print(f"{name}: {1e3 * times[name][-1]:.1f} ms a step", file=sys.stderr, flush=True)
            if given and "every" in given:
                hk.average_weights()
    if world.is_root:
        Path(os.environ["HVDKIT_OUTER_RANK"]).write_text(json.dumps(times))


if __name__ == "__main__":
    main()
