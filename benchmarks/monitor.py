"""What hk.Monitor costs a step of 3 ms, what it reports of real jobs, and how often it is wrong about healthy ranks.

    hvdkit launch -n 2 -- python benchmarks/monitor.py [--rounds 40]
    python benchmarks/monitor.py --injected [--minutes 30]
    python benchmarks/monitor.py --simulate [--windows 1000]

The cost: rounds of 200 steps with and without a monitor take turns on every rank, so that the machine's moods meet both
alike; the median of the pairs' differences counts. Windows have 50 steps.
What is injected: in jobs of two ranks of each framework, steps of 30 ms, 20 ms of input, 20 % of computation, or a
program on a rank's core; and jobs with nothing wrong, which share the minutes. Run it on a quiet machine.
The false alarms: windows of 50 steps of 1,000 ranks, whose steps last 100 ms and have stalls of a distribution with
heavy tails; none of them is worth a report.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

STEP_S, STEPS = 0.003, 200
INJECTED = {"input": 0.4, "compute": 1 / 6, "host": 0.6}
"""The shares of a step that causes take, of injected/injecting.py."""
INJECTED_S = 25


def cost(rounds: int) -> None:
    """Print what a step takes with and without."""
    import torch

    import hvdkit.torch as hk

    world = hk.init()
    hk.pin_device(world)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = hk.distribute(torch.optim.SGD(model.parameters(), 0.001), model)
    hk.broadcast_state(model, optimizer)
    x, y = torch.randn(64, 256), torch.randint(10, (64,))

    def steps(watched: bool, folder: str) -> float:
        monitor = hk.Monitor(folder, world) if watched else None
        begin = time.perf_counter()
        for _ in monitor(itertools.repeat((x, y), STEPS)) if monitor else itertools.repeat((x, y), STEPS):
            until = time.perf_counter() + STEP_S
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if monitor:
                monitor.log(loss=loss)
            while time.perf_counter() < until:
                pass
        taken = time.perf_counter() - begin
        if monitor:
            monitor.close()
        return taken / STEPS

    with tempfile.TemporaryDirectory() as folder:
        steps(True, folder)
        pairs = [(steps(False, folder), steps(True, folder)) for _ in range(rounds)]
    if world.is_root:
        plain = statistics.median(one for one, _ in pairs)
        more = statistics.median(watched - one for one, watched in pairs)
        print(f"step {1e3 * plain:.3f} ms, with a monitor {1e6 * more:+.1f} us ({more / plain:+.2%}), {rounds} pairs")


def injected(minutes: float, only: list[str]) -> None:
    """Print, of each job, what was reported and in which window."""
    from hvdkit.observe.history import read

    print("| injected | framework | windows | reported, in window |\n|---|---|---|---|")
    frameworks = ("torch", "tensorflow", "keras")
    jobs = [(cause, INJECTED[cause], framework, INJECTED_S) for cause in INJECTED for framework in frameworks]
    jobs += [("none", 0.0, framework, 60 * minutes / len(frameworks)) for framework in frameworks]
    for cause, share, framework, seconds in [job for job in jobs if job[0] in only]:
        with tempfile.TemporaryDirectory() as folder:
            program = str(Path(__file__).parent / "injected" / "watched.py")
            launch = [sys.executable, "-m", "hvdkit", "launch", "-n", "2", "--threads", "1", "--", program]
            said = [cause, str(share), framework, str(seconds), folder]
            subprocess.run([*launch, *said], check=True, capture_output=True)
            lines = read(Path(folder, "metrics.jsonl"))
        ends = [line["step"] for line in lines if line["kind"] == "window"]
        reports = [line for line in lines if line["kind"] == "report"]
        told = [f"{one['text']} ({ends.index(one['step']) + 1})" for one in reports]
        print(f"| {cause} | {framework} | {len(ends)} | {' '.join(told) or 'nothing'} |", flush=True)


def simulate(windows: int) -> None:
    """Print the false alarms per 1,000 windows of 1,000 ranks."""
    from hvdkit.observe.stragglers import Scores

    ranks, steps = 1000, 50
    noise = np.random.default_rng(1)
    tails = {
        "normal, 2 % of a step": lambda: noise.normal(0, 0.002, (ranks, steps)),
        "lognormal, sigma 1.5": lambda: 0.002 * noise.lognormal(0, 1.5, (ranks, steps)),
        "Pareto, 2.5 (has a variance)": lambda: 0.005 * noise.pareto(2.5, (ranks, steps)),
        "Pareto, 1.5 (has a mean only)": lambda: 0.005 * noise.pareto(1.5, (ranks, steps)),
        "Pareto, 1.5, stalls of a minute of whole hosts": None,
    }
    print("| noise of each step | reports per 1,000 windows |")
    print("|---|---|")
    for name, draw in tails.items():
        scores, reports = Scores([f"n{rank // 8}" for rank in range(ranks)]), 0
        constant = noise.normal(1, 0.02, ranks)  # ranks are never quite alike
        for window in range(windows):
            more = (draw or tails["Pareto, 1.5 (has a mean only)"])().mean(axis=1)
            if draw is None and window % 10 == 0:
                host = noise.integers(ranks // 8)
                more[8 * host : 8 * host + 8] += 60 / steps
            work, zeros = 0.1 * constant + more, np.zeros(ranks)
            wait = work.max() - work
            said = {"step": work + wait, "input": zeros, "compute": work, "wait": wait}
            reports += len(scores.window((window + 1) * steps, steps, said))
        print(f"| {name} | {1000 * reports / windows:.3g} |", flush=True)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=40)
    arguments.add_argument("--injected", action="store_true")
    arguments.add_argument("--only", default=",".join([*INJECTED, "none"]), help="what is injected: of %(default)s")
    arguments.add_argument("--minutes", type=float, default=30, help="that the jobs with nothing wrong take together")
    arguments.add_argument("--simulate", action="store_true")
    arguments.add_argument("--windows", type=int, default=1000)
    given = arguments.parse_args()
    if given.simulate:
        simulate(given.windows)
    elif given.injected:
        injected(given.minutes, given.only.split(","))
    else:
        cost(given.rounds)
