"""Trial after trial on one rank: gap, arrival, collective, completion; then the check, outside of what is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.errors import HvdkitError, InvalidArgumentError
from hvdkit.measure.emulate.check import Values
from hvdkit.measure.emulate.engines import Engine, EngineOperation
from hvdkit.measure.emulate.run_job import BUSY, EmulateAsked, ReplayJob

Keep = Callable[[int, list[float], list[float]], None]
"""Is given each trial that counts: its number, when this rank came to each collective and when it had its result."""
_BUSY_SIZE = 48


class WrongResultError(HvdkitError):
    """A collective gave a rank something else than what the ranks' numbers make."""


class Replay:
    """What one rank does.

    Args:
        job: what all ranks were told.
        engine: this rank's connection to the others.
        keep: is given every trial but those of the warm-up.
    Raises:
        InvalidArgumentError: the engine cannot do what is asked, the sums cannot be checked, or the sizes do not fit
            into memory.
    """

    def __init__(self, job: ReplayJob, engine: Engine, keep: Keep) -> None:
        self._job, self._engine, self._keep = job, engine, keep
        asked, collectives = job.asked, job.plan.collectives
        try:
            self._values = [
                Values(asked.collective, one.elements, one.dtype, asked.ranks, check=asked.check) for one in collectives
            ]
            self._operations: list[EngineOperation] = [
                engine.operation(index, asked.collective, one.elements, one.dtype)
                for index, one in enumerate(collectives)
            ]
        except MemoryError as error:
            raise InvalidArgumentError(
                f"Rank {engine.rank} has no memory for the {job.plan.nbytes} bytes of a step ({error}); replay smaller "
                "sizes, or have fewer ranks on a host."
            ) from error
        self._late = _Lateness(asked, engine.rank)
        self._work = np.ones((_BUSY_SIZE, _BUSY_SIZE), np.float32)

    def run(self) -> None:
        """Do all trials.

        Raises:
            WrongResultError: a result is not what it must be.
        """
        asked = self._job.asked
        for trial in range(-asked.warmup_trials, self._job.plan.trials):
            number = trial + asked.warmup_trials
            for operation, values in zip(self._operations, self._values, strict=True):
                operation.load(values.given(self._engine.rank, number))
            self._engine.barrier()
            arrived, done = self._overlapping() if self._engine.overlaps else self._one_by_one()
            if asked.check:
                self._check(number, trial)
            if trial >= 0:
                self._keep(trial, arrived, done)

    def _one_by_one(self) -> tuple[list[float], list[float]]:
        arrived, done = [], []
        for index, operation in enumerate(self._operations):
            arrived.append(self._arrive(index))
            operation.start()
            operation.finish()
            done.append(time.monotonic())
        return arrived, done

    def _overlapping(self) -> tuple[list[float], list[float]]:
        """As a training: what is ready is given away while the rest is computed, and waited for in the same order."""
        arrived, done = [], []
        for index, operation in enumerate(self._operations):
            arrived.append(self._arrive(index))
            operation.start()
        for operation in self._operations:
            operation.finish()
            done.append(time.monotonic())
        return arrived, done

    def _arrive(self, index: int) -> float:
        """Do what comes before a collective, and say when this rank comes to it."""
        gap_s, late_s = self._job.plan.collectives[index].gap_s, self._late.seconds()
        if gap_s > 0:
            self._compute(gap_s)
        if late_s > 0:
            time.sleep(late_s)
        return time.monotonic()

    def _compute(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        if self._job.asked.compute != BUSY:
            time.sleep(seconds)
        while time.monotonic() < end:
            self._work = self._work @ self._work * np.float32(1 / _BUSY_SIZE)

    def _check(self, number: int, trial: int) -> None:
        rank, asked = self._engine.rank, self._job.asked
        for index, (operation, values) in enumerate(zip(self._operations, self._values, strict=True)):
            result: NDArray[Any] = operation.result()
            wrong = values.wrong(result, rank, number)
            if wrong is not None:
                one = self._job.plan.collectives[index]
                when = f"trial {trial}" if trial >= 0 else "the warm-up"
                raise WrongResultError(
                    f"Rank {rank} got a wrong result of {asked.collective} {index} ({one.name}, {one.nbytes} bytes "
                    f"of {one.dtype}) in {when}: {wrong}. Engine {asked.engine} cannot be trusted here."
                )


class _Lateness:
    """By how much a rank comes late to the next collective: as a straggler always, and by chance."""

    def __init__(self, asked: EmulateAsked, rank: int) -> None:
        self._always = asked.straggler_s.get(rank, 0.0)
        self._delay = asked.delay if asked.delay is not None and asked.delay.rank in (None, rank) else None
        self._rng = np.random.default_rng([asked.seed, rank])

    def seconds(self) -> float:
        if self._delay is None or self._rng.random() >= self._delay.probability:
            return self._always
        return self._always + float(self._rng.exponential(self._delay.mean_s))
