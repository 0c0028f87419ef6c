"""The CNN example under ``hvdkit launch`` beside what people type today, on this machine, in turn.

    python benchmarks/launch.py
    python benchmarks/launch.py --rounds 12 --epochs 4 --data synthetic --json launch.json

Each round starts every variant once, as a whole job, in random order. A variant's time is the training time that the
script prints (``Hvd Procs N Total time``), so that starting up is left out. The ratios are geometric means over the
rounds of time(variant) / time(hvdkit launch), with 95 % intervals by Student's t on their logarithms: above 1, hvdkit
launch is faster.
Ranks that share cores measure contention, not scaling.
"""

import argparse
import json
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from scipy import stats

BIN = Path(sys.executable).parent
EXAMPLES = Path(__file__).parents[1] / "examples" / "pytorch"
CLOSING_LINE = re.compile(r"Hvd Procs \d+ Total time: ([\d.]+) second")
OURS = "hvdkit launch"


def variants(n):
    cnn, ddp = str(EXAMPLES / "cnn.py"), str(EXAMPLES / "cnn_ddp.py")
    launch = [str(BIN / "hvdkit"), "launch", "-n", str(n), "--no-tag", "--", sys.executable]
    return {
        OURS: [*launch, cnn],
        "horovodrun --gloo": [str(BIN / "horovodrun"), "--gloo", "-np", str(n), sys.executable, cnn],
        "mpirun": [str(BIN / "mpirun"), "-np", str(n), sys.executable, cnn],
        "hvdkit launch, DDP over gloo": [*launch, ddp],
    }


def seconds(command, flags, environment):
    done = subprocess.run([*command, *flags], env=environment, capture_output=True, text=True)
    found = CLOSING_LINE.search(done.stdout)
    if done.returncode or not found:
        sys.exit(
            f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout[-1000:]}{done.stderr[-2000:]}"
        )
    return float(found[1])


def ratio(theirs, ours):
    """Geometric mean of theirs / ours and its 95 % interval."""
    logs = np.log(theirs) - np.log(ours)
    mean, half = logs.mean(), stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs))
    return [float(math.exp(value)) for value in (mean, mean - half, mean + half)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=2, help="ranks (default 2)")
    parser.add_argument("--rounds", type=int, default=8, help="rounds that are measured (default 8, at least 2)")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--json", help="write the numbers to this file, too")
    args = parser.parse_args()
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment.pop("OMP_NUM_THREADS", None)
    flags = ["--epochs", str(args.epochs), "--data", args.data]
    commands = variants(args.n)
    times = {name: [] for name in commands}
    for number in range(-1, args.rounds):  # the first round warms the files up
        for name in random.sample(list(commands), len(commands)):
            taken = seconds(commands[name], flags, environment)
            print(f"round {number + 1}/{args.rounds} {name}: {taken:.2f} s", file=sys.stderr)
            if number >= 0:
                times[name].append(taken)
    print(f"{args.n} ranks on {os.cpu_count()} cores, {args.rounds} rounds, {' '.join(flags)}")
    ratios = {name: ratio(np.array(times[name]), np.array(times[OURS])) for name in commands if name != OURS}
    print(f"{OURS}: median {np.median(times[OURS]):.2f} s")
    for name, (mean, low, high) in ratios.items():
        print(f"{name}: median {np.median(times[name]):.2f} s, ratio {mean:.2f} [{low:.2f}, {high:.2f}]")
    if args.json:
        Path(args.json).write_text(json.dumps({"times_s": times, "ratios": ratios, "cores": os.cpu_count()}, indent=1))


if __name__ == "__main__":
    main()
