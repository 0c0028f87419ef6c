"""What each rank runs: ``python -m hvdkit.measure.emulate.worker FOLDER``, started by ``hvdkit launch``.

Trial after trial: gap, arrival, collective, completion; then the check, outside of what is measured.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hvdkit.common import json_files
from hvdkit.errors import DataError, DataNotFoundError, HvdkitError, InvalidArgumentError
from hvdkit.measure.emulate import engines
from hvdkit.measure.emulate.check import Values
from hvdkit.measure.emulate.engines import Engine
from hvdkit.measure.emulate.plan import ReplayPlan
from hvdkit.measure.emulate.results import JOB, EmulateAsked, EmulateResults, RankFiles
from hvdkit.steps import launchers

_BUSY_SIZE = 48


class WrongResultError(HvdkitError):
    """A collective gave a rank something else than what the ranks' numbers make."""


def main(folder: Path) -> int:
    """Replay the job of a folder on this rank; the status to exit with.

    A mistake or a wrong result is left in the rank's file, where ``hvdkit emulate`` finds it.
    """
    files = None
    try:
        try:
            job = json_files.read(folder / JOB, EmulateResults)
        except DataNotFoundError as error:
            raise DataError(
                f"{folder} is not there on this host: start hvdkit emulate in a directory that all hosts share, or "
                "give --json a file in one."
            ) from error
        engine = engines.connect(job.asked, folder)
        files = RankFiles(folder, engine.rank, engine.notes)
        replay(job.asked, job.plan, engine, files.trial)
        engine.barrier()
    except HvdkitError as error:
        sys.stderr.write(f"hvdkit emulate: {error}\n")
        if files is None and folder.is_dir():
            launched = launchers.detect(os.environ)  # the engine did not say which rank this is
            files = RankFiles(folder, launched.rank if launched else 0)
        if files is not None:
            files.error(str(error), error.exit_code, wrong=isinstance(error, WrongResultError))
        return 1
    engine.close()
    return 0


def replay(
    asked: EmulateAsked, plan: ReplayPlan, engine: Engine, keep: Callable[[list[float], list[float]], None]
) -> None:
    """Do all trials of a job on this rank.

    ``keep`` is given of every trial, but those of the warm-up, when this rank came to each collective and when it had
    its result.

    Raises:
        InvalidArgumentError: the engine cannot do what is asked, or the sizes do not fit into memory.
        WrongResultError: a result is not what it must be.
    """
    collectives = plan.collectives
    try:
        values = [Values(asked.collective, one.elements, one.dtype, asked.ranks) for one in collectives]
        rounds = {
            "none": [
                engine.operation(index, asked.collective, one.elements, one.dtype)
                for index, one in enumerate(collectives)
            ]
        }
        if asked.compression != "none":
            rounds[asked.compression] = [
                engine.compressed(index, asked.compression, one.elements, one.dtype)
                for index, one in enumerate(collectives)
            ]
    except MemoryError as error:
        raise InvalidArgumentError(
            f"Rank {engine.rank} has no memory for the {plan.nbytes} bytes of a step ({error}); replay smaller "
            "sizes, or have fewer ranks on a host."
        ) from error
    always = asked.straggler_s.get(engine.rank, 0.0)
    delay = asked.delay if asked.delay is not None and asked.delay.rank in (None, engine.rank) else None
    rng = np.random.default_rng([0, engine.rank])
    for trial in range(-asked.warmup_trials, plan.trials):
        number = trial + asked.warmup_trials
        arrived, done = list[float](), list[float]()
        for compression, operations in rounds.items():
            for operation, own in zip(operations, values, strict=True):
                operation.load(own.given(engine.rank, number))
            started, results = [], []
            engine.barrier()
            for operation, one in zip(operations, collectives, strict=True):
                late_s = always
                if delay is not None and rng.random() < delay.probability:
                    late_s += float(rng.exponential(delay.mean_s))
                if one.gap_s > 0:
                    _compute(one.gap_s)
                if late_s > 0:
                    time.sleep(late_s)
                arrived.append(time.monotonic())
                started.append(operation.start())
                if not engine.overlaps:
                    results.append(operation.finish(started[-1]))
                    done.append(time.monotonic())
            if engine.overlaps:  # as in a training: all is given away before the first is waited for
                for operation, handle in zip(operations, started, strict=True):
                    results.append(operation.finish(handle))
                    done.append(time.monotonic())
            for index, own in enumerate(values if asked.check else ()):
                got = operations[index].as_array(results[index])
                wrong = own.wrong(got, engine.rank, number, compression)
                if wrong is not None:
                    one, sent = collectives[index], "" if compression == "none" else f" with {compression}"
                    when = f"trial {trial}" if trial >= 0 else "the warm-up"
                    raise WrongResultError(
                        f"Rank {engine.rank} got a wrong result of {asked.collective} {index} ({one.name}, "
                        f"{one.nbytes} bytes of {one.dtype}){sent} in {when}: {wrong}. Engine {asked.engine} cannot "
                        "be trusted here."
                    )
        if trial >= 0:
            keep(arrived, done)


def _compute(seconds: float) -> None:
    """Multiply matrices for so long, which keeps a core busy."""
    end = time.monotonic() + seconds
    work = np.full((_BUSY_SIZE, _BUSY_SIZE), 1 / _BUSY_SIZE, np.float32)
    while time.monotonic() < end:
        work = work @ work


if __name__ == "__main__":
    # Leave at once: a rank that failed must not wait in MPI_Finalize for the others, nor for a framework's threads.
    try:
        status = main(Path(sys.argv[1]))
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
