"""The ranks of a job of ``hvdkit emulate`` of which one computes a wrong element; see test_emulate_real.py."""

import os
import sys
from pathlib import Path

from hvdkit.measure.emulate import engines_mpi, worker


def faulty(job):
    """MPI whose rank 1 gets one wrong element in the third time that it is asked for the second tensor."""
    connected = connect(job)
    made = connected.operation

    def operation(index, *arguments):
        one = made(index, *arguments)
        if connected.rank == 1 and index == 1:
            spoil(one)
        return one

    connected.operation = operation
    return connected


def spoil(operation):
    finish, times = operation.finish, []

    def wrong():
        finish()
        times.append(1)
        if len(times) == 3:
            operation.result()[17] += 1

    operation.finish = wrong


if __name__ == "__main__":
    connect, engines_mpi.connect = engines_mpi.connect, faulty
    status = worker.main(Path(sys.argv[1]))
    sys.stderr.flush()
    os._exit(status)
