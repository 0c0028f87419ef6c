"""How well `hvdkit plan scale` predicts.

    python benchmarks/plan_scale.py                       4 ranks from 2 and 3, on 4 namespaces at 1 Gbit/s (needs root)
    python benchmarks/plan_scale.py --engine mpi --rounds 5 --keep measured
    python benchmarks/plan_scale.py --from measured       the same table from the kept files, without measuring
    python benchmarks/plan_scale.py --published           efficiencies that were published

Each round runs `hvdkit emulate` on 2, 3 and 4 hosts, one rank each, in random order. The model is fitted on 2 and 3 and
predicts the median of 4 at each size; the error is predicted / measured - 1. Four ranks that share two cores also
measure how they contend for cores: run it on an idle machine.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from hvdkit.common import json_files
from hvdkit.measure.emulate.plan import Collective, ReplayPlan
from hvdkit.measure.emulate.results import EmulateResults
from hvdkit.measure.plan import network as model
from hvdkit.measure.plan.scale import predict
from hvdkit.measure.plan.step_time import Fusion, Workload, gradients, measured

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "tests" / "data" / "plan_scale" / "published.toml"
SIZES = [2**power for power in range(16, 25)]
FITTED, PREDICTED = (2, 3), 4
LIMIT = 0.10


@dataclass(frozen=True)
class Published:
    """One published efficiency and what is predicted for it, with its interval."""

    model: str
    ranks: int
    published: float
    predicted: float
    low: float
    high: float
    communication_s: float
    compute_s: float


def published(path=PUBLISHED):
    """Every published number of the file with its prediction."""
    found = []
    for system in tomllib.loads(path.read_text())["system"]:
        costs = model.CostModel(ppn=system["gpus_per_server"]).with_network(
            system["alpha_us"] * 1e-6, system["gbit"] * 1e9 / 8
        )
        fusion = Fusion(system["threshold_mib"] * 2**20, system["cycle_ms"] / 1000)
        for one in system["model"]:
            layers = one.get("layers") or [[one["parameters"] // one["tensors"], 1.0]] * one["tensors"]
            collectives = [Collective(f"layer{number}", *layer) for number, layer in enumerate(_gaps(layers))]
            compute = one["batch"] / one["images_per_s"]
            work = Workload(gradients(ReplayPlan(tuple(reversed(collectives)))), compute, fusion)
            rows = predict(costs, measured([]), work, [int(ranks) for ranks in one["published"]])
            for row, efficiency in zip(rows, one["published"].values(), strict=True):
                known = row.efficiency
                ends = known.value, known.low, known.high
                found.append(Published(one["name"], row.ranks, efficiency, *ends, row.communication.value, compute))
    return found


def _gaps(layers):
    return [(parameters, "float32", work * 1e-6) for parameters, work in layers]


def print_published():
    print("| model | GPUs | published | predicted | error, points | communication ms | compute ms |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for one in published():
        print(f"{row_of(one)} {1000 * one.communication_s:.0f} | {1000 * one.compute_s:.0f} |")


def row_of(one):
    """A row of the table, up to the error."""
    predicted = f"{100 * one.predicted:.0f} % [{100 * one.low:.0f}, {100 * one.high:.0f}]"
    error = 100 * (one.predicted - one.published)
    return f"| {one.model} | {one.ranks} | {100 * one.published:.0f} % | {predicted} | {error:+.1f} |"


def measure(directory, engine, rounds, trials):
    """Files n-ROUND.json in the directory."""
    sys.path.insert(0, str(ROOT / "tests" / "parallel"))
    import namespaces

    lacking = namespaces.missing()
    if lacking:
        sys.exit(f"this machine has no {', '.join(lacking)}, which hosts on one machine need")
    with tempfile.TemporaryDirectory() as bin_directory:
        hosts = namespaces.Hosts(Path(bin_directory))
        try:
            hosts.start()
            for number in range(rounds):
                for n in random.sample([*FITTED, PREDICTED], len(FITTED) + 1):
                    print(f"round {number + 1}/{rounds}: {n} ranks", file=sys.stderr)
                    _emulate(hosts, n, engine, trials, directory / f"{n}-{number}.json")
        finally:
            hosts.stop()


def _emulate(hosts, n, engine, trials, file):
    placed = ["-n", str(n), "--hosts", ",".join(f"{name}:1" for name in hosts.names[:n])]
    sizes = ["--sizes", ",".join(map(str, SIZES[::-1])), "--trials", str(trials)]
    argv = [sys.executable, "-m", "hvdkit.cli", "emulate", "--engine", engine, *placed, *sizes, "--json", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment["PATH"] = os.pathsep.join([str(hosts.bin), str(Path(sys.executable).parent), environment["PATH"]])
    done = subprocess.run([*hosts.inside(0), *argv], env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(argv)} ended with status {done.returncode}:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")


def compare(directory):
    """Fits on 2 and 3 ranks, prints the table for 4 and returns the median error."""
    files = {n: sorted(directory.glob(f"{n}-*.json")) for n in (*FITTED, PREDICTED)}
    found = {n: [json_files.read(path, EmulateResults) for path in paths] for n, paths in files.items()}
    if not all(found.values()):
        sys.exit(f"{directory} has no files for 2, 3 and 4 ranks")
    costs = model.fit([one for n in FITTED for one in found[n]])
    print("| bytes | measured ms | predicted ms | error | in its interval |")
    print("|---:|---:|---:|---:|---|")
    errors = []
    for size in SIZES:
        times = [one.transfer_s for run in found[PREDICTED] for one in run.samples if one.nbytes == size]
        taken, predicted = statistics.median(times), model.estimated(costs.draws_s(size, PREDICTED))
        errors.append(predicted.value / taken - 1)
        held = "yes" if predicted.low <= taken <= predicted.high else "no"
        text = f"{1000 * predicted.value:.3f} [{1000 * predicted.low:.3f}, {1000 * predicted.high:.3f}]"
        print(f"| {size} | {1000 * taken:.3f} | {text} | {100 * errors[-1]:+.1f} % | {held} |")
    for note in costs.notes:
        print(f"- {note}")
    middle = statistics.median(map(abs, errors))
    print(f"median error {100 * middle:.1f} % (at most {100 * LIMIT:.0f} % is wanted)")
    return middle


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", action="store_true", help="the published figures, nothing is measured")
    parser.add_argument("--engine", default="ring", help="of hvdkit emulate (default ring)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trials", type=int, default=20, help="of each job (default 20)")
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="keep what was measured here")
    parser.add_argument("--from", dest="kept", type=Path, metavar="DIRECTORY", help="read what --keep kept")
    args = parser.parse_args()
    if args.published:
        return print_published()
    if args.kept:
        return 0 if compare(args.kept) <= LIMIT else 1
    with tempfile.TemporaryDirectory() as directory:
        where = args.keep or Path(directory)
        where.mkdir(parents=True, exist_ok=True)
        measure(where, args.engine, args.rounds, args.trials)
        return 0 if compare(where) <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
