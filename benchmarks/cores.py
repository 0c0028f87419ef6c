"""How far this machine's first two cores are from each other: the time of a byte there and back, in nanoseconds.

    python benchmarks/cores.py

The cores of a virtual machine may lie on one chip of the host or on two, and the host may move them while a program
runs. Python waits for the byte, which is a part of the time; compare it with that of another minute. The answer is the
lowest decile of many turns, or nothing where there is one core or no way to stay on it.
"""

import mmap
import os
import subprocess
import sys
import time

TURNS = 10_000
VALUES = 200
"""Of the byte, an even number; that it differs from turn to turn is what the two wait for."""


def round_trip():
    """Nanoseconds, found by another process, since it is tied to a core; None where they cannot be found."""
    try:
        found = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return int(found.stdout) if found.stdout.strip() else None


def answer(shared, core):
    os.sched_setaffinity(0, {core})
    for turn in range(TURNS):
        value = 2 * turn % VALUES + 1
        while shared[0] != value:
            pass
        shared[0] = value + 1


def ask(shared, core):
    os.sched_setaffinity(0, {core})
    seen = []
    for turn in range(TURNS):
        value = 2 * turn % VALUES + 1
        began = time.perf_counter_ns()
        shared[0] = value
        while shared[0] == value:
            pass
        seen.append(time.perf_counter_ns() - began)
    return sorted(seen)[TURNS // 10]


def main():
    cores = sorted(os.sched_getaffinity(0))[:2] if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        return
    shared = mmap.mmap(-1, 1)
    if not os.fork():
        answer(shared, cores[1])
        os._exit(0)
    print(ask(shared, cores[0]))


if __name__ == "__main__":
    main()
