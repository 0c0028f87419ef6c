"""MPI profiles for the tests of hvdkit mpi-profile."""

import json
from pathlib import Path

DATA = Path(__file__).parent.parent / "data" / "mpi_profiles"
MPITRACE = sorted(DATA.glob("mpi_profile.2500161.*"))


def bins(*rows):
    """Bins of calls: (calls, bytes of each, seconds of each[, seconds of waiting in each])."""
    return [
        {
            "bin": size.bit_length(),
            "calls": calls,
            "bytes": calls * size,
            "least_bytes": size,
            "most_bytes": size,
            "seconds": calls * seconds,
            "least_seconds": seconds / 2,
            "most_seconds": seconds * 2,
            "wait_seconds": calls * sum(wait),
        }
        for calls, size, seconds, *wait in rows
    ]


def group(routine, *rows, caller="horovod", op="", type="", processes=4):
    """Calls of one kind."""
    return {
        "routine": routine, "caller": caller, "op": op, "type": type, "processes": processes, "bins": bins(*rows)
    }  # fmt: skip


HOROVOD = (
    group("MPI_Allreduce", (1000, 8, 1e-3), op="MPI_BAND", type="MPI_LONG_LONG_INT"),
    group("MPI_Allreduce", (100, 1_000_000, 1e-2), (50, 8, 1e-4), op="MPI_SUM", type="MPI_FLOAT"),
    group("MPI_Bcast", (10, 4, 1e-5), type="MPI_INT"),
    group("MPI_Bcast", (10, 100, 1e-5), type="MPI_BYTE"),
    group("MPI_Bcast", (6, 4, 1e-5), type="MPI_INT32_T"),
    group("MPI_Gather", (10, 4, 1e-5), type="MPI_INT"),
    group("MPI_Gatherv", (10, 300, 1e-5), type="MPI_BYTE"),
    group("MPI_Barrier", (3, 0, 1e-5)),
    group("MPI_Comm_dup", (2, 0, 1e-5)),
    group("MPI_Allreduce", (7, 8, 1e-3), caller="mpi4py", op="MPI_BAND", type="MPI_LONG_LONG_INT"),
    group("MPI_Gather", (2, 4, 1e-5), caller="mpi4py", type="MPI_INT"),
)
"""What Horovod calls, and beside it a program through mpi4py."""


def record(rank, size=4, calls=HOROVOD, **changes):
    """The content of one of our files."""
    content = {
        "hvdkit": "1", "kind": "mpi-profile-rank", "schema": 1, "job": "00000000000000aa", "rank": rank, "size": size,
        "state": "finalized", "seconds": 10.0, "library": "Open MPI v5.0.11", "threads": "multiple",
        "wait_measured": False, "lost": 0, "calls": list(calls),
    }  # fmt: skip
    return {**content, **changes}


def write(directory, *records):
    """Files of ranks, as a job leaves them; the directory."""
    directory.mkdir(exist_ok=True)
    for content in records:
        (directory / f"mpi_profile.{content['rank']}.json").write_text(json.dumps(content))
    return directory
