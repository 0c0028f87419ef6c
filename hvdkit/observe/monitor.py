"""Sees a training while it runs: what each rank does in a window of steps, told to all ranks, written by the root.

A step leaves a few marks of time. At the end of a window this rank's row, 37 numbers, goes to a second thread
(``monitor_thread``), which gives it to all ranks in one collective while the training goes on. The root alone keeps
the history (``history``) and tells trackers.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import math
import os
import sys
import time
from abc import ABC
from collections.abc import Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, TypeVar

from hvdkit.core import listeners
from hvdkit.core.communicator import ALLGATHER, Communicator
from hvdkit.errors import InvalidArgumentError, whole
from hvdkit.observe import step_files
from hvdkit.observe.monitor_thread import MOST_LOGS, MonitorThread, Window, samples_of
from hvdkit.observe.trackers import RootSinks, checked_trackers
from hvdkit.steps.launchers import is_elastic
from hvdkit.steps.topology import Topology

EVERY = "HVDKIT_MONITOR_EVERY"
"""Environment variable with the steps of a window, for a monitor that ``hvdkit launch`` asks for."""
_CLOSING_S = 10.0
"""Seconds that the end of a training waits for the last window: another rank may have failed."""
_NUMBERS = itertools.count()
_T = TypeVar("_T")


class Monitor(ABC):
    """Watches a training from within: its progress, its history on disk, slow ranks, its health.

    ::

        with hk.Monitor("runs/digits", world) as monitor:
            for x, y in monitor(loader):
                ...
                monitor.log(loss=loss)

    Every rank makes one with the same arguments, takes the same number of steps, and logs the same names. Once in
    ``every`` steps each rank tells the others 296 bytes, in a second thread, while the training goes on. The root
    writes ``metrics.jsonl`` (docs/monitor.md).

    Args:
        directory: of the history, on the root's disk; a training that is resumed goes on in the same. None for
            none but what ``hvdkit launch --monitor`` asks for.
        world: the job.
        every: steps of a window, >= 1.
        trackers: names of libraries that track experiments ("tensorboard", "mlflow", ...), or objects with
            ``log(step, values)``, ``report(text)`` and ``close()``, and where they want to know, ``begin(step, steps)``
            and ``fail()`` before ``close``; the root alone uses them. One that cannot be made is a warning.
        step: steps that were done before; default: those of the checkpoint that was restored, else 0.
        steps, epochs: of the whole training, where they are known: for those who want to see the time left.
    Raises:
        InvalidArgumentError: a number out of range, or a tracker that is none.
    """

    automatic = False

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        world: Topology,
        every: int = 50,
        trackers: Sequence[Any] = (),
        *,
        step: int | None = None,
        steps: int | None = None,
        epochs: int | None = None,
    ) -> None:
        every = whole("every", every, 1)
        optional = {"step": step, "steps": steps, "epochs": epochs}
        step, steps, epochs = (one if one is None else whole(name, one, 0) for name, one in optional.items())
        asked = directory or os.environ.get(listeners.MONITOR)
        where = Path(asked) if asked else None
        named = checked_trackers(trackers, where)
        self._every, self._start, self._steps, self._epochs = every, step, steps, epochs
        self._new_sinks = functools.partial(RootSinks, where, named)
        self._sinks: RootSinks | None = None
        self._thread: MonitorThread | None = None
        self._open = self._iterating = self._by_steps = self._closed = False
        self._asked = self._given = 0.0
        self._waits: float | None = None
        self.step, self.epoch = step or 0, 0
        self._name = _name()
        self._place(world)
        if (other := automatic()) is not None:
            other.close()
        listeners.MONITORS.append(self)
        atexit.register(self._at_exit)

    def _place(self, world: Topology) -> None:
        """Begin to watch these ranks, with the next step."""
        if self._sinks is not None and not world.is_root:
            self._sinks.close(None)
        if self._sinks is None or not world.is_root:
            self._sinks = self._new_sinks() if world.is_root else None
        self._world, self._thread = world, None
        self._window, self._wait_before = Window(time.perf_counter()), 0.0
        self._open = False

    # What a framework binding says in its framework's terms ----------------------------------------------------------

    _ranks: Communicator
    """Between all ranks."""

    def _held(self, value: Any) -> Any:
        """A logged value to keep until the window's end: a number, or what ``float`` makes one of without much ado."""
        return float(value)

    def _parameters(self) -> Mapping[str, str]:
        """What ``looked`` calls parameters, and what their user does; called between steps."""
        return {}

    def _device_bytes(self) -> float:
        """Memory of the accelerator that this process uses; NaN without one."""
        return math.nan

    # What the training says ------------------------------------------------------------------------------------------

    def __call__(self, batches: Iterable[_T]) -> step_files.RecordedSteps[_T]:
        """The batches of an epoch, each of which is a step; the loop over them is what is watched."""
        if self._steps is None and self._epochs is not None and isinstance(batches, Sized):
            self._steps = self._epochs * len(batches)
        return step_files.RecordedSteps(step_files.record_steps(batches), self)

    def log(self, **values: Any) -> None:
        """Numbers of this step, the same names on every rank; the history has their mean, weighted by samples.

        Raises:
            InvalidArgumentError: more than 16 names, or what is no number.
        """
        for name, value in values.items():
            try:
                held = self._held(value)
            except (TypeError, ValueError):
                raise InvalidArgumentError(f"log takes numbers, got {name}={value!r}.") from None
            if len(self._window.logs) >= MOST_LOGS and name not in self._window.logs:
                raise InvalidArgumentError(f"log takes {MOST_LOGS} names at most, got {name!r} beyond them.")
            number = self.step + self._open
            self._window.logs.setdefault(name, []).append((number, self._weight, held))

    _weight = 1.0

    def asked(self, steps: int = 1) -> None:
        """The next batch is asked for; ``steps`` steps that are open end here."""
        now = time.perf_counter()
        if self._thread is None:
            self._begin(now)
        self._end(now, steps)
        self._asked, self._iterating = now, True

    def given(self, batch: Any = None) -> None:
        """The batch is there: the step begins to work."""
        if self._thread is None:
            self._begin(time.perf_counter())
        samples = samples_of(batch)
        self._window.samples += samples
        self._weight = samples if samples > 0 else 1.0
        self._given, self._waits, self._open = time.perf_counter(), None, True

    def taken(self) -> None:
        """Within a step: its batch is only there now."""
        if self._open and self._waits is None:
            self._given = time.perf_counter()

    def ready(self) -> None:
        """This rank's gradients are there, and it waits for the others."""
        if self._open:
            self._window.was_ready = True
            if self._waits is None:
                self._waits = time.perf_counter()

    def arrived(self) -> None:
        """Those of all ranks are there."""
        if self._open and self._waits is not None:
            self._window.wait += time.perf_counter() - self._waits
            self._waits = None

    def finished(self) -> None:
        """The end of an epoch, or of a loop that was left: by ``break``, or by an error on this rank alone.

        So the window is told with the next step, or by ``close``: an error must not wait here for the other ranks.
        """
        self._end(time.perf_counter(), 1, told=False)
        self._iterating = False
        self.epoch += 1

    def stepped(self) -> None:
        """A step of the optimizer, where nobody says when a batch is asked for; what lies between two is a step."""
        if self._iterating:
            return
        now = time.perf_counter()
        if self._thread is None:
            self._begin(now)
            self._asked, self._given, self._open = now, now, True
        self._window.apart, self._by_steps = False, True
        self._end(now, 1)
        self._asked = self._given = now
        self._waits, self._open = None, True

    def saved(self, step: int) -> None:
        """The root has written a checkpoint."""
        if self._world.is_root and self._thread is not None:
            self._thread.tell(step)

    def wants_norm(self) -> bool:
        """Whether the norm of this step's gradient is to be told."""
        return self._open and self._window.steps == self._every - 1

    def norm(self, value: Any) -> None:
        """The norm of the mean gradient, a number or what ``float`` makes one of."""
        self._window.norm = value

    def looked(self, parameter: str, norm: Any) -> None:
        """The norm of this rank's own gradient of a parameter, which may not be finite."""
        if self._open:
            self._window.looks.append((self.step + 1, parameter, norm))

    def _begin(self, now: float) -> None:
        self.step = self._start = listeners.restored_step if self._start is None else self._start
        self._window.begun = now
        self._processor = step_files.Processor()  # of this thread, which trains
        self._used = self._processor.spent()
        gather = self._ranks.background(ALLGATHER, self._name)
        facts = {"world_size": self._world.size, "steps": self._steps, "epochs": self._epochs}
        self._thread = MonitorThread(self._world.size, gather, self._device_bytes, self._sinks, self.step, facts)
        self._thread.start()

    def _end(self, now: float, steps: int, *, told: bool = True) -> None:
        if not self._open:
            return
        window = self._window
        window.step += now - self._asked
        window.input += self._given - self._asked
        if self._waits is not None:
            window.wait += now - self._waits
        window.own += [max(0.0, now - self._asked - window.wait + self._wait_before) / steps] * steps
        self._wait_before = window.wait
        window.steps += steps
        window.epoch = self.epoch
        self.step += steps
        self._open = False
        if told and window.steps >= self._every and self._thread is not None:
            self._give(self._thread, now)

    def _give(self, thread: MonitorThread, now: float) -> None:
        """Give the window to the second thread."""
        window, self._window = self._window, Window(now)
        before, self._used, self._wait_before = self._used, self._processor.spent(), 0.0
        window.used = tuple(end - begin for begin, end in zip(before, self._used, strict=True))  # type: ignore[assignment]
        window.seconds, window.last = now - window.begun, self.step
        window.parameters = dict(self._parameters())
        thread.tell(window)

    # Elastic trainings -----------------------------------------------------------------------------------------------

    def done(self) -> int | None:
        """Steps that are done, with one that is about to end; None where that is not known yet."""
        return self._start if self._thread is None else self.step + self._open

    def go_to(self, step: int | None, epoch: int) -> None:
        """Go on after so many steps; None: where it began."""
        self.step = (self._start or 0) if step is None else step
        self._start, self.epoch, self._open = self._start if step is None else step, epoch, False

    def follow(self, world: Topology) -> None:
        """The ranks are others now: what was on its way is lost, and the history goes on."""
        if self._thread is not None:
            self._thread.end(_CLOSING_S)
        self._place(world)

    def __enter__(self) -> Any:
        """The monitor itself."""
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        """Close it."""
        self.close(failed=kind is not None)

    def _at_exit(self) -> None:
        self.close(failed=hasattr(sys, "last_value"))

    def close(self, failed: bool = False) -> None:
        """Tell what is left, and write no more; happens by itself when the process ends.

        Args:
            failed: the training ended by an error, and other ranks may not tell anything any more.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        listeners.MONITORS.remove(self)
        thread, end = self._thread, None
        if thread is not None:
            if not self._by_steps:
                self._end(time.perf_counter(), 1, told=False)
            if self._window.steps and not failed:
                self._give(thread, time.perf_counter())
            if thread.end(_CLOSING_S) and not failed:
                end = self.step
        if self._sinks is not None:  # trackers may hold files, or a run that counts as running
            self._sinks.close(end, failed=failed)


def _name() -> str:
    """Of a monitor's collectives, the same on every rank, and of no other monitor that is open.

    A rank that joins an elastic training has made none before.
    """
    names = (f"hvdkit.monitor.{number}" for number in itertools.count())
    taken = {one._name for one in listeners.MONITORS}
    return next(name for name in names if name not in taken) if is_elastic() else f"hvdkit.monitor.{next(_NUMBERS)}"


def begin_if_asked(kind: type[Monitor], world: Topology) -> None:
    """The monitor that ``hvdkit launch --monitor`` asks for, where there is none yet; ends for one of the script's.

    Raises:
        InvalidArgumentError: HVDKIT_MONITOR_EVERY is no number of steps.
    """
    directory = os.environ.get(listeners.MONITOR)
    if not directory or listeners.MONITORS:
        return
    text = os.environ.get(EVERY, "50")
    if not text.isdecimal():
        raise InvalidArgumentError(f"{EVERY} must be a number of steps, got {text!r}.")
    kind(directory, world, int(text)).automatic = True


def automatic() -> Monitor | None:
    """The monitor that ``hvdkit launch --monitor`` has asked for."""
    return next((one for one in listeners.MONITORS if one.automatic), None)
