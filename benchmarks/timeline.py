"""How fast ``hvdkit.read.timeline.summarize`` reads a large file, in seconds and memory, next to ``json.load``.

    python benchmarks/timeline.py [--megabytes 1000] [--json-megabytes 200]

The file is generated in a temporary directory: a model of 160 tensors, in four fused batches per step, on 8 ranks,
with marks of cycles. Each measurement runs in a process of its own. ``json.load`` needs several times the size of the
file in memory, so it gets a smaller one, and its numbers are multiplied by the ratio of sizes; it only parses.
"""

import argparse
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TextIO

TENSORS = 160
BATCHES = 4
RANKS = 8

PROGRAM = """
import json, resource, sys, time
start = time.perf_counter()
if sys.argv[1] == "json":
    with open(sys.argv[2]) as file:
        count = len(json.load(file))
else:
    from hvdkit.read import timeline
    count = timeline.summarize(sys.argv[2]).operations
usage = resource.getrusage(resource.RUSAGE_SELF)
print(time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, count)
"""


def write(path: Path, megabytes: float) -> int:
    """Writes a timeline of at least this size; returns how many operations it has."""
    source = random.Random(1)  # noqa: S311
    steps = 0
    with path.open("w") as file:
        file.write(
            '[\n{"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros":1}},\n'
        )
        for pid in range(1, TENSORS + 1):
            name = f"DistributedAdam_Allreduce/cond_{pid}/HorovodAllreduce_grads_{pid}_0"
            file.write(f'{{"name": "process_name", "ph": "M", "pid": {pid}, "args": {{"name": "{name}"}}}},\n')
        now = 1000
        while file.tell() < megabytes * 1e6:
            now = _write_step(file, now, source, first=steps == 0)
            steps += 1
        file.write(_cycle(now) + "]")
    return steps * TENSORS


def _begin(name: str, now: int, pid: int) -> str:
    return f'{{"ph": "B", "name": "{name}", "ts": {now}, "pid": {pid}}}'


def _end(now: int, pid: int, extra: str = "") -> str:
    return f'{{"ph": "E", "ts": {now}, "pid": {pid}{extra}}}'


def _cycle(now: int) -> str:
    return f'{{"ph": "i", "name": "CYCLE_START", "ts": {now}, "s": "g"}}'


def _ticks(now: int, pid: int) -> list[str]:
    return [f'{{"ph": "X", "name": "{rank}", "ts": {now + rank}, "pid": {pid}, "dur": 0}}' for rank in range(RANKS)]


def _write_step(file: TextIO, now: int, source: random.Random, *, first: bool) -> int:
    events: list[str] = []
    for batch in range(BATCHES):
        pids = range(1 + batch * TENSORS // BATCHES, 1 + (batch + 1) * TENSORS // BATCHES)
        events.append(_cycle(now))
        for pid in pids:
            events.append(_begin("NEGOTIATE_ALLREDUCE", now, pid))
            events += _ticks(now, pid) if first else []
        now += source.randint(500, 2000)
        events += [_end(now, pid) for pid in pids]
        events += [_begin("ALLREDUCE", now + 9, pid) for pid in pids]
        for name in ("MEMCPY_IN_FUSION_BUFFER", "MPI_ALLREDUCE", "MEMCPY_OUT_FUSION_BUFFER"):
            now += 20
            events += [_begin(name, now, pid) for pid in pids]
            now += source.randint(50, 3000)
            events += [_end(now, pid) for pid in pids]
        shape = ', "args": {"dtype": "float32", "shape": "[3, 3, 64, 64]"}'
        events += [_end(now + 5, pid, shape) for pid in pids]
        now += 50
    file.write(",".join(events) + ",")
    return now + source.randint(5_000, 50_000)


def measure(what: str, path: Path) -> tuple[float, float, float, int]:
    """Seconds, processor seconds, MB of peak memory and operations (events for json) of one process."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, what, str(path)], capture_output=True, text=True, check=True)
    seconds, busy, memory, count = done.stdout.split()
    return float(seconds), float(busy), float(memory), int(count)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=1000)
    parser.add_argument("--json-megabytes", type=float, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path, small = Path(directory, "large.json"), Path(directory, "small.json")
        operations = write(path, options.megabytes)
        size = path.stat().st_size / 1e6
        seconds, busy, memory, count = measure("hvdkit", path)
        if count != operations:
            sys.exit(f"{count} operations read, {operations} written")
        speed = f"{seconds:.1f} s ({busy:.1f} s of processor), {size / seconds:.0f} MB/s, {memory:.0f} MB peak"
        print(f"summarize, {size:.0f} MB: {count} operations, {speed}", flush=True)
        path.unlink()
        write(small, options.json_megabytes)
        small_size = small.stat().st_size / 1e6
        json_seconds, json_busy, json_memory, _ = measure("json", small)
    factor = size / small_size
    scaled = f"{json_seconds * factor:.0f} s ({json_busy * factor:.0f} s), {json_memory * factor:.0f} MB"
    print(f"json.load, {small_size:.0f} MB: {json_seconds:.1f} s ({json_busy:.1f} s), {json_memory:.0f} MB peak")
    print(f"  times {factor:.2f}: {scaled}")
    ratios = f"{busy / json_busy / factor:.2f} of its processor time, {memory / json_memory / factor:.3f} of its memory"
    print(f"ratio: {ratios}")


if __name__ == "__main__":
    main()
