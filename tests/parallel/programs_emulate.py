"""What the ranks of test_emulate_real.py do."""

import atexit
import os
import sys
from pathlib import Path

from hvdkit.measure.emulate import engines, engines_mpi, worker
from hvdkit.measure.emulate.plan import Collective, ReplayPlan
from hvdkit.measure.emulate.run_job import EmulateAsked, ReplayJob
from hvdkit.measure.emulate.worker_replay import Replay

SIZES = (1, 3, 650, 200_001)
"""Elements: fewer than there are ranks, and more than divide evenly."""


def collectives(engine, ranks, todo, folder, algorithm="library", fusion=False, backend="", without=()):
    """Replay every (collective, dtype) of ``todo``, checked; what was verified. Modules ``without`` are not there."""
    sys.modules.update(dict.fromkeys(without))
    plan = ReplayPlan(tuple(Collective(f"t{count}", count, "float32") for count in SIZES), trials=2)

    def job(collective, plan):
        asked = EmulateAsked(engine, collective, algorithm, ranks, hosts=1, check=True, backend=backend, fusion=fusion)
        return ReplayJob(Path(folder), plan, asked)

    connected = engines.connect(job("allreduce", plan))
    verified = []
    for collective, dtype in todo:
        plan = ReplayPlan(tuple(Collective(f"t{count}", count, dtype) for count in SIZES), trials=2)
        own, kept = job(collective, plan), []
        Replay(own, Renamed(connected, len(verified)), lambda *times, kept=kept: kept.append(times)).run()
        verified.append([collective, dtype, len(kept)])
    connected.close()
    atexit.register(os._exit, 0)  # not through the threads of the frameworks, which are none of this test's business
    return {"overlaps": connected.overlaps, "verified": verified, "notes": connected.notes}


class Renamed:
    """An engine whose operations have other numbers in each replay: Horovod knows tensors by their names."""

    def __init__(self, engine, number):
        self._engine, self._number = engine, number

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def operation(self, index, *arguments):
        return self._engine.operation(1000 * self._number + index, *arguments)


def faulty(job):
    """MPI whose rank 1 gets one wrong element in the third time that it is asked for the second tensor."""
    connected = engines_mpi.connect(job)
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
    engines.ENGINES["mpi"] = "programs_emulate:faulty"
    status = worker.main(Path(sys.argv[1]))
    sys.stderr.flush()
    os._exit(status)
