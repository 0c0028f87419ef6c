"""The ring of ``hvdkit emulate`` over four hosts with a link of known rate: which part of the link does it use?

    python benchmarks/emulate.py
    python benchmarks/emulate.py --sizes 65536,1048576,40000000 --trials 20 --engines ring,mpi

Needs root, for the hosts are network namespaces of this machine on a bridge, each with a rate of 1 Gbit/s
(``tests/parallel/namespaces.py``). Printed for each engine and size: the median of the transfers, the bus bandwidth (as
in nccl-tests), and its part of the link's rate. The aim is at least 0.85 at 40 MB. The four hosts share this machine's
cores: with few of them it is they that small messages measure.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "parallel"))
LINK = 1e9 / 8


def measure(hosts, engine, sizes, trials, directory):
    """The samples of one engine, by size."""
    placed = ["-n", str(len(hosts.names)), "--hosts", ",".join(f"{name}:1" for name in hosts.names)]
    argv = [sys.executable, "-m", "hvdkit.cli", "emulate", *placed, "--launcher", "mpirun", "--engine", engine]
    argv += ["--sizes", sizes, "--trials", str(trials), "--json", "results.json"]
    path = os.pathsep.join([str(hosts.bin), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path}
    environment.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    environment.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    done = subprocess.run([*hosts.inside(0), *argv], cwd=directory, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"--engine {engine} ended with status {done.returncode}:\n{done.stderr[-4000:]}")
    by_size = {}
    for sample in json.loads((directory / "results.json").read_text())["samples"]:
        by_size.setdefault(sample["size"], []).append(sample["transfer_s"])
    return by_size


def main():
    import namespaces

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="40000000", help="bytes, with commas between them (default 40000000)")
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--engines", default="ring,mpi", help="engines of MPI, with commas between them")
    parser.add_argument("--json", help="write the numbers to this file, too")
    args = parser.parse_args()
    lacking = namespaces.missing()
    if lacking:
        sys.exit(f"four hosts on this machine need {', '.join(lacking)}")
    kept = []
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "bin").mkdir()
        hosts = namespaces.Hosts(directory / "bin")
        try:
            hosts.start()
            for engine in args.engines.split(","):
                for size, times in sorted(measure(hosts, engine, args.sizes, args.trials, directory).items()):
                    n, seconds = len(hosts.names), statistics.median(times)
                    busbw = 2 * (n - 1) / n * size / seconds
                    kept.append({"engine": engine, "bytes": size, "seconds": seconds, "busbw": busbw})
                    print(
                        f"{engine:5} {size:>10} bytes, {n} hosts, {len(times)} trials: {1e3 * seconds:.2f} ms, busbw "
                        f"{busbw / 1e6:.1f} MB/s, {busbw / LINK:.3f} of the link"
                    )
        finally:
            hosts.stop()
    if args.json:
        Path(args.json).write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
