"""A step and the memory of a training whose optimizer's state is divided (``shard_state=True``), beside the undivided.

Both train in one run, in turn; a step takes as long as on its slowest rank. Ratios are medians over the turns, with
their quartiles. The memory is what a rank's own pages grow by (Pss of /proc/self/smaps_rollup, Linux) in the first
step of its optimizer.

    python benchmarks/shard_state.py [-n 2] [--models wide,deep] [--optimizer AdamW] [--turns 40] [--steps 5]

Models: wide (two layers of 4096, 80 MB), deep (60 of 256), large (three of 4096, 200 MB). Ranks that share cores
measure contention, not scaling.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

MODELS = {"wide": [784, 4096, 4096, 10], "deep": [256] * 61 + [10], "large": [4096, 4096, 4096, 4096, 10]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=2, help="ranks (default %(default)s)")
    parser.add_argument("--models", default="wide,deep", help="default %(default)s")
    parser.add_argument("--optimizer", default="AdamW", help="of torch.optim (default %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="samples of a step on a rank (default %(default)s)")
    parser.add_argument("--turns", type=int, default=40, help="default %(default)s")
    parser.add_argument("--steps", type=int, default=5, help="in a turn (default %(default)s)")
    options = parser.parse_args()
    if "HVDKIT_SHARD_STATE_RANK" in os.environ:
        for name in options.models.split(","):
            measure(options, name)
        return
    command = [str(Path(sys.executable).parent / "hvdkit"), "launch", "-n", str(options.n), "--threads", "1"]
    environment = {**os.environ, "HVDKIT_SHARD_STATE_RANK": "1"}
    sys.exit(subprocess.run([*command, "--", sys.executable, *sys.argv], env=environment, check=False).returncode)


def own_pages() -> float:
    """Bytes of memory that this process has, shared pages by their share."""
    rows = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return next(1024.0 * int(row.split()[1]) for row in rows if row.startswith("Pss:"))


def measure(options: argparse.Namespace, name: str) -> None:
    import torch

    import hvdkit.torch as hk

    world = hk.init()
    hk.pin_device(world, "cpu", threads=1)
    widths = MODELS[name]
    times: dict[bool, list[float]] = {False: [], True: []}
    kept: dict[bool, tuple[float, float]] = {}
    trainings = {}
    for divided in (False, True):
        torch.manual_seed(0)
        layers = [
            layer
            for before, after in itertools.pairwise(widths)
            for layer in (torch.nn.Linear(before, after), torch.nn.ReLU())
        ]
        model = torch.nn.Sequential(*layers[:-1])
        optimizer = getattr(torch.optim, options.optimizer)(model.parameters(), lr=1e-4)
        hk.distribute(optimizer, model, shard_state=divided)
        hk.broadcast_state(model, optimizer)
        x, y = torch.randn(options.batch, widths[0]), torch.randint(10, (options.batch,))

        def backward(model: torch.nn.Module = model, x: torch.Tensor = x, y: torch.Tensor = y) -> None:
            torch.nn.functional.cross_entropy(model(x), y).backward()

        backward()
        before = own_pages()
        optimizer.step()
        slots = [one for state in optimizer.state.values() for one in state.values() if torch.is_tensor(one)]
        kept[divided] = sum(one.numel() * one.element_size() for one in slots), own_pages() - before
        trainings[divided] = optimizer, backward
    for turn in range(2 * options.turns + 2):
        divided = bool((turn + turn // 2) % 2)  # A B B A
        optimizer, backward = trainings[divided]
        hk.average_metrics({"turn": 0.0}, world)
        begun = time.perf_counter()
        for _ in range(options.steps):
            optimizer.zero_grad()
            backward()
            optimizer.step()
        hk.average_metrics({"turn": 0.0}, world)
        if turn > 1:
            times[divided].append((time.perf_counter() - begun) / options.steps)
    if world.is_root:
        ratios = [mine / other for mine, other in zip(times[True], times[False], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        whole, own = (1e3 * statistics.median(times[divided]) for divided in (False, True))
        print(f"{name}, {options.optimizer}, {world.size} ranks: a step of {whole:.1f} ms takes {own:.1f} ms divided,")
        print(f"  {middle:.3f} times as long [{low:.3f}, {high:.3f}]")
        for divided, (state, resident) in kept.items():
            print(
                f"  {'divided' if divided else 'whole'}: {state / 1e6:.1f} MB of state, {resident / 1e6:.1f} MB grown"
            )


if __name__ == "__main__":
    main()
