"""The ranks of a job of ``hvdkit emulate`` of which one computes a wrong element; see test_emulate_real.py."""

import os
import sys
from dataclasses import replace
from pathlib import Path

from hvdkit.measure.emulate import engines, worker


def faulty(asked, folder):
    """MPI whose rank 1 gets one wrong element in the third time that it is asked for the second tensor."""
    connected = connect(asked, folder)
    made = connected.operation

    def operation(index, *arguments):
        one = made(index, *arguments)
        return spoilt(one) if connected.rank == 1 and index == 1 else one

    connected.operation = operation
    return connected


def spoilt(operation):
    times = []

    def wrong(handle):
        result = operation.finish(handle)
        times.append(1)
        if len(times) == 3:
            result[17] += 1
        return result

    return replace(operation, finish=wrong)


if __name__ == "__main__":
    connect, engines.connect = engines.connect, faulty
    status = worker.main(Path(sys.argv[1]))
    sys.stderr.flush()
    os._exit(status)
