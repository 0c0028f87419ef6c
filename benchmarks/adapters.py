"""What hvdkit's adapters cost over the same calls to Horovod by hand, in the same processes, in turn.

    python benchmarks/adapters.py
    python benchmarks/adapters.py --frameworks torch --models mlp,deep --jobs 10 --json adapters.json

Each job is one ``hvdkit launch -n 2`` of ``peers/side_by_side.py``, which trains two copies of a model on each rank,
one through the adapter and one by hand (the variants *hvdkit* and *by-hand* of ``peers.py``), in blocks of steps whose
order is drawn anew in every round. A block takes as long as on its slower rank. A job's ratio is the median over its
rounds of time(hvdkit) / time(by hand) in the same round; which copy is made first alternates between jobs. Printed is
the geometric mean over the jobs with its 95 % interval by Student's t on their logarithms: 1.01 is one per cent dearer.
Keras is left to ``peers.py``: where hvdkit runs, it refuses a ``fit`` with an optimizer that is not its own.
Run it on a machine that does nothing else; Ctrl-C ends with the jobs that are complete.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from launch import ratio
from peers import SCRIPTS, STEPS, beside, environment

FRAMEWORKS = ("torch", "tensorflow")
BLOCK_S = 0.25
"""About so long is a block."""
STEP_S = {"cnn": 0.09, "mlp": 0.002, "deep": 0.035, "wide": 0.2}
BY_HAND = "horovod"


def job(framework, model, rounds, number, n):
    """Seconds per step of both variants by round, of the slower rank."""
    first = ("hvdkit", BY_HAND)[number % 2]
    steps = max(2, round(BLOCK_S / STEP_S[model]))
    with tempfile.TemporaryDirectory(prefix="adapters-") as directory:
        launch = [beside(sys.executable, "hvdkit"), "launch", "-n", str(n), "--no-tag", "--", sys.executable]
        train = [str(SCRIPTS / "side_by_side.py"), framework, model, str(steps), str(rounds), first, directory]
        done = subprocess.run([*launch, *train], env=environment(), capture_output=True, text=True)
        ranks = [json.loads(path.read_text()) for path in Path(directory).glob("rank-*.json")]
    if done.returncode or len(ranks) != n or any(rank["size"] != n for rank in ranks):
        sys.exit(f"{' '.join([*launch, *train])} ended with status {done.returncode}:\n{done.stderr[-3000:]}")
    each = [rank["step_seconds"] for rank in ranks]
    return {name: [max(times) for times in zip(*(rank[name] for rank in each), strict=True)] for name in each[0]}


def middle(found):
    """The median over the rounds of a job of time(hvdkit) / time(by hand)."""
    return statistics.median(ours / theirs for ours, theirs in zip(found["hvdkit"], found[BY_HAND], strict=True))


def row(framework, model, jobs):
    ratios = [middle(found) for found in jobs]
    value, low, high = ratio(ratios, [1.0] * len(ratios))
    hand = 1e3 * statistics.median(statistics.median(found[BY_HAND]) for found in jobs)
    print(f"| {framework} | {model} | {hand:.2f} | {value:.3f} [{low:.3f}, {high:.3f}] | {len(jobs)} |", flush=True)
    return {"framework": framework, "model": model, "by_hand_ms": hand, "ratio": [value, low, high], "jobs": jobs}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frameworks", default=",".join(FRAMEWORKS), help="default %(default)s")
    parser.add_argument("--models", default="mlp,deep,cnn", help=f"of {', '.join(STEPS)}; default %(default)s")
    parser.add_argument("--jobs", type=int, default=6, help="of each model, at least 2 (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="of each job (default %(default)s)")
    parser.add_argument("-n", type=int, default=2, help="ranks (default 2)")
    parser.add_argument("--json", help="write the numbers to this file, too")
    args = parser.parse_args()
    if args.jobs < 2:
        parser.error(f"--jobs is {args.jobs}; an interval needs 2 or more")
    if unknown := set(args.models.split(",")) - set(STEPS) | set(args.frameworks.split(",")) - set(FRAMEWORKS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; see --help")
    print("| framework | model | by hand, ms per step | time / by hand [95 % interval] | jobs |\n|---|---|---|---|---|")
    kept = []
    with contextlib.suppress(KeyboardInterrupt):
        for framework in args.frameworks.split(","):
            for model in args.models.split(","):
                jobs = []
                try:
                    for number in range(args.jobs):
                        print(f"{framework} {model}: job {number + 1} of {args.jobs}", file=sys.stderr, flush=True)
                        jobs.append(job(framework, model, args.rounds, number, args.n))
                finally:
                    if len(jobs) > 1:
                        kept.append(row(framework, model, jobs))
    if args.json:
        Path(args.json).write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
