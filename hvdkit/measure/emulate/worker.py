"""What each rank runs: ``python -m hvdkit.measure.emulate.worker FOLDER``, started by ``hvdkit launch``."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from pathlib import Path

from hvdkit.errors import HvdkitError
from hvdkit.measure.emulate import clock, engines, run_job, worker_files
from hvdkit.measure.emulate.engines import Engine
from hvdkit.measure.emulate.run_job import ReplayJob
from hvdkit.measure.emulate.worker_files import Writer
from hvdkit.measure.emulate.worker_replay import Replay, WrongResultError
from hvdkit.steps import launchers


def main(folder: Path) -> int:
    """Replay the job of a folder on this rank; the status to exit with.

    A mistake or a wrong result is left in the rank's file, where ``hvdkit emulate`` finds it.
    """
    try:
        job = run_job.read(folder)
        engine = engines.connect(job)
    except HvdkitError as error:
        sys.stderr.write(f"hvdkit emulate: {error}\n")
        _leave_error(folder, error)
        return 1
    server = clock.Server() if job.apart and engine.rank == 0 else None
    with Writer(folder, engine.rank, _head(engine, server)) as writer:
        try:
            _run(job, engine, writer, server)
        except HvdkitError as error:
            sys.stderr.write(f"hvdkit emulate: {error}\n")
            writer.error(str(error), error.exit_code, wrong=isinstance(error, WrongResultError))
            return 1
    engine.close()
    return 0


def _head(engine: Engine, server: clock.Server | None) -> dict[str, object]:
    asked = None if server is None else [socket.gethostname(), server.port, server.key]
    return {
        "machine": clock.machine(),
        "host": socket.gethostname(),
        "overlaps": engine.overlaps,
        "notes": list(engine.notes),
        "clock_server": asked,
    }


def _run(job: ReplayJob, engine: Engine, writer: Writer, server: clock.Server | None) -> None:
    """Replay the job, and compare clocks before and after it where it is on several machines."""
    visitor = _visitor(job, engine, server) if job.apart else None

    def compare() -> None:
        if server is not None:
            server.answer()
        if visitor is not None:
            writer.clock(visitor.read())

    compare()
    Replay(job, engine, writer.trial).run()
    engine.barrier()
    compare()
    for one in (server, visitor):
        if one is not None:
            one.close()


def _visitor(job: ReplayJob, engine: Engine, server: clock.Server | None) -> clock.Visitor | None:
    """This rank as a visitor of rank 0 on another machine; rank 0 waits for all of them."""
    own = clock.machine()
    if server is not None:
        heads = [worker_files.head_of(job.folder, rank) for rank in range(1, engine.size)]
        server.admit(sum(head["machine"] != own for head in heads))
        return None
    root = worker_files.head_of(job.folder, 0)
    return clock.Visitor(*root["clock_server"]) if root["machine"] != own else None


def _leave_error(folder: Path, error: HvdkitError) -> None:
    """Say it in the file of this rank, which it may not have learnt from the engine."""
    launched = launchers.detect(os.environ)
    if folder.is_dir():
        with Writer(folder, launched.rank if launched else 0, {"machine": clock.machine(), "notes": []}) as writer:
            writer.error(str(error), error.exit_code, wrong=False)


def _run_and_leave() -> None:
    """Leave at once: a rank that failed must not wait in MPI_Finalize for the others, nor for a framework's threads."""
    try:
        status = main(Path(sys.argv[1]))
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _run_and_leave()
