"""What staging an environment takes, beside each host reading the archive from its source over the source's one link.

    python benchmarks/stage.py                       2, 3 and 4 hosts at 200 Mbit/s (needs root)
    python benchmarks/stage.py --sizes 8,32,64 --rate 400mbit --rounds 5 --json stage.json
    python benchmarks/stage.py --model               1,000 hosts, modelled: no measurement

Needs root, for the hosts are network namespaces of this machine on a bridge, each with a limited rate for what it
receives (``tests/parallel/namespaces.py``) and for what it sends. "staged": the workers of ``hvdkit launch --stage``,
one on each host, with a disk of its own each; the time is what they print, from their meeting to the last copy in its
place. "read": the archive lies on the first host, and all others read it at once over TCP and unpack it: a file server
without the cost of finding and opening files, which favours it. The ratio read / staged is formed within each round.
"""

import argparse
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "parallel"))
PORT = 7077
SERVE = """
import socket, sys, threading
server = socket.create_server(("", int(sys.argv[1])))
print("ready", flush=True)
while True:
    connection, _ = server.accept()
    threading.Thread(target=lambda to: (to.sendfile(open(sys.argv[2], "rb")), to.close()), args=(connection,)).start()
"""
READ = """
import socket, sys
from pathlib import Path
from hvdkit.run.launch.stage import copy
Path(sys.argv[3]).mkdir()
copy.unpack(socket.create_connection((sys.argv[1], int(sys.argv[2]))).makefile("rb"), Path(sys.argv[3]))
"""
FILE_BYTES = 64 << 10
MODEL = {
    "hosts": 1000,
    "ranks on each host": 4,
    "environment, bytes": 3.4e9,
    "environment, files": 46_000,
    "calls to the file system of one rank that imports": 29_000,
    "bytes that one host reads to import": 1.5e9,
    "file system, calls a second, all clients": 100_000,
    "file system, bytes a second, all clients": 100e9,
    "one client, files a second": 2_000,
    "one client, bytes a second": 1.5e9,
    "link of a host, bytes a second": 10e9,
    "local disk, files a second": 10_000,
    "local disk, bytes a second": 1e9,
    "copies that a host sends on": 1,
    "piece, bytes": 1 << 20,
    "starting the workers, seconds": 10,
}


def model(given):
    """Seconds until the ranks have imported, by part, from ``MODEL``'s numbers."""
    (hosts, ppn, size, files, calls, loaded, fs_calls, fs_rate, one_files, one_rate, link, disk_files, disk_rate,
     fan_out, piece, start) = given.values()  # fmt: skip
    depth = hosts - 1 if fan_out == 1 else math.ceil(math.log2(hosts))
    shared = max(hosts * ppn * calls / fs_calls, hosts * loaded / fs_rate)
    looking = 2 * files / fs_calls + 2 * files / one_files  # two looks at every file, by one client
    stages = {
        "packing": max(files / one_files, size / one_rate),
        "sending": fan_out * size / link,
        "unpacking": max(files / disk_files, size / disk_rate),
    }
    staged = start + looking + max(stages.values()) + depth * fan_out * piece / link
    return {"from the shared file system": shared, "staged": staged, "tree depth": depth, "looking": looking, **stages}


def make(prefix, size):
    """An environment of so many bytes in files of 64 KiB."""
    prefix.mkdir()
    (prefix / "pyvenv.cfg").touch()
    for number in range(max(1, size // FILE_BYTES)):
        (prefix / f"{number}.bin").write_bytes(os.urandom(FILE_BYTES))


def staged(hosts, count, prefix, environment):
    """Seconds of the workers on the first hosts."""
    from hvdkit.run.launch.stage import copy as staging

    store = hosts.disk / "store"
    key = staging.key(staging.entries(prefix), str(prefix))
    names = ",".join(f"{name}:1" for name in hosts.names[:count])
    words = ["mpirun", "-n", str(count), "--host", names, "--map-by", "ppr:1:node", "--bind-to", "none"]
    words += ["--mca", "mpi_yield_when_idle", "1", "-x", "PYTHONPATH", "-x", "PATH", sys.executable, "-m", "mpi4py"]
    words += ["-m", "hvdkit.run.launch.stage.worker", str(prefix), str(store), key, str(count)]
    done = subprocess.run([*hosts.inside(0), *words], env=environment, capture_output=True, text=True)
    found = re.search(r"hosts in ([\d.]+) s", done.stderr)
    for name in hosts.names:
        shutil.rmtree(hosts.disks / name / "store", ignore_errors=True)
    if done.returncode or found is None:
        sys.exit(f"staging ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return float(found[1])


def read(hosts, count, tar, environment):
    """Seconds until all hosts but the first have read and unpacked what lies on the first."""
    serve = [*hosts.inside(0), sys.executable, "-c", SERVE, str(PORT), str(tar)]
    with subprocess.Popen(serve, stdout=subprocess.PIPE) as server:
        server.stdout.readline()
        began = time.perf_counter()
        readers = []
        for number in range(1, count):
            words = [sys.executable, "-c", READ, hosts.addresses[0], str(PORT), str(hosts.disk / "read")]
            readers.append(subprocess.Popen([*hosts.inside(number), *words], env=environment))
        failed = any([reader.wait() for reader in readers])
        taken = time.perf_counter() - began
        server.kill()
    for name in hosts.names:
        shutil.rmtree(hosts.disks / name / "read", ignore_errors=True)
    hosts.clear()
    if failed:
        sys.exit("a host could not read the archive")
    return taken


def measure(hosts, args, directory):
    """A row for each size and number of hosts."""
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PYTHONPATH": str(ROOT)}
    path = os.pathsep.join([str(hosts.bin), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, **allowed, "PATH": path}
    rows = []
    for size in (int(float(text) * 1e6) for text in args.sizes.split(",")):
        prefix, tar = directory / f"environment-{size}", directory / f"{size}.tar"
        make(prefix, size)
        subprocess.run(
            ["tar", "-cf", str(tar), "-C", str(prefix), *(file.name for file in prefix.iterdir())], check=True
        )
        for count in (int(text) for text in args.hosts.split(",")):
            pairs = []
            for _ in range(args.rounds):
                pairs.append((staged(hosts, count, prefix, environment), read(hosts, count, tar, environment)))
            ours, theirs = (statistics.median(times) for times in zip(*pairs, strict=True))
            ratio = statistics.median(other / own for own, other in pairs)
            rows.append({"bytes": size, "hosts": count, "staged_s": ours, "read_s": theirs, "ratio": ratio})
            print(f"{size / 1e6:g} MB, {count} hosts: staged {ours:.2f} s, read {theirs:.2f} s, ratio {ratio:.2f}")
    return rows


def main():
    import namespaces

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="8,32", help="MB, with commas between them (default 8,32)")
    parser.add_argument("--hosts", default="2,3,4", help="with commas between them (default 2,3,4)")
    parser.add_argument("--rate", default="200mbit", help="of each host's link, in tc's words (default 200mbit)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", action="store_true", help="print the model for 1,000 hosts and measure nothing")
    parser.add_argument("--json", help="write the numbers to this file, too")
    args = parser.parse_args()
    if args.model:
        for name, value in (*MODEL.items(), *model(MODEL).items()):
            print(f"{name}: {value:g}")
        return
    lacking = namespaces.missing()
    if lacking:
        sys.exit(f"hosts on this machine need {', '.join(lacking)}")
    namespaces.RATE = args.rate
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "bin").mkdir()
        hosts = namespaces.Hosts(directory / "bin")
        try:
            hosts.start()
            for name in hosts.names:  # which start has limit what a host receives only
                limit = (
                    f"ip netns exec {name} tc qdisc add dev eth0 root tbf rate {args.rate} burst 262144 latency 50ms"
                )
                subprocess.run(limit.split(), check=True)
            rows = measure(hosts, args, directory)
        finally:
            hosts.stop()
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
