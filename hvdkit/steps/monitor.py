"""Sees a training while it runs: what each rank does in a window of steps, told to all ranks, written by the root.

A step leaves a few marks of time. At the end of a window this rank's row, 32 numbers, goes to a second thread, which
gives it to all ranks in one collective while the training goes on. So every rank has the same table and finds the same
(``stragglers``); the root alone keeps the history (``history``) and tells trackers.
"""

from __future__ import annotations

import atexit
import itertools
import math
import os
import queue
import socket
import sys
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from hvdkit.errors import InvalidArgumentError
from hvdkit.steps import step_times
from hvdkit.steps.outlets import Outlets, checked_command, checked_trackers
from hvdkit.steps.stragglers import Floats, Report, Scores, summary
from hvdkit.steps.topology import Topology
from hvdkit.steps.windows import FACTS, MOST_LOGS, WORDS, BadGradients, Window, number_of, row_of, samples_of

EVERY = "HVDKIT_MONITOR_EVERY"
"""Environment variable with the steps of a window, for a monitor that ``hvdkit launch`` asks for."""
_HOST_BYTES = 8 * WORDS
_CLOSING_S = 10.0
"""Seconds that the end of a training waits for the last window: another rank may have failed."""
_REPORT_S = 60.0
_T = TypeVar("_T")
OnReport = Callable[[Report], None] | str | Sequence[str]


class Monitor(ABC):
    """Watches a training from within: its progress, its history on disk, slow ranks, its health.

    ::

        with hk.Monitor("runs/digits", world) as monitor:
            for x, y in monitor(loader):
                ...
                monitor.log(loss=loss)

    Every rank makes one with the same arguments, takes the same number of steps, and logs the same names. Once in
    ``every`` steps each rank tells the others 256 bytes, in a second thread, while the training goes on. The root
    writes ``metrics.jsonl`` and ``metrics.csv`` (docs/monitor.md).

    Args:
        directory: of the history, on the root's disk; a training that is resumed goes on in the same.
        world: the job.
        every: steps of a window, >= 1.
        trackers: names of libraries that track experiments ("tensorboard", "mlflow", ...), or objects with
            ``log(step, values)``, ``report(text)`` and ``close()``, and where they want to know, ``begin(step, steps)``
            and ``fail()`` before ``close``; the root alone uses them. One that cannot be made is a warning.
        step: steps that were done before; default: those of the checkpoint that was restored, else 0.
        steps, epochs: of the whole training, where they are known: for those who want to see the time left.
        on_report: what is done with a ``Report``: a function, called on every rank after the same step, so that it may
            save a checkpoint or stop the training; or a command, which the root starts, with the report as JSON in the
            variable HVDKIT_REPORT.
        check: called on every rank every ``check_every`` windows, such as ``lambda: hk.check_agreement(...)``.
    Raises:
        InvalidArgumentError: a number out of range, or an ``on_report`` or tracker that is none.
    """

    _numbers = itertools.count()
    automatic = False

    def __init__(
        self,
        directory: str | os.PathLike[str],
        world: Topology,
        every: int = 50,
        trackers: Sequence[Any] = (),
        *,
        step: int | None = None,
        steps: int | None = None,
        epochs: int | None = None,
        on_report: OnReport | None = None,
        check: Callable[[], None] | None = None,
        check_every: int = 10,
    ) -> None:
        numbers = (("every", every, 1), ("check_every", check_every, 1))
        optional = (("step", step), ("steps", steps), ("epochs", epochs))
        for name, value, least in (*numbers, *((name, one, 0) for name, one in optional if one is not None)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InvalidArgumentError(f"{name} must be an integer >= {least}, got {value!r}.")
        command, named = checked_command(on_report), checked_trackers(trackers)
        self._on_report = on_report if callable(on_report) else None
        self._world, self._every = world, every
        self._outlets = Outlets(Path(directory), named, command) if world.is_root else None
        self._start, self._steps, self._epochs = step, steps, epochs
        self._check, self._check_every = check, check_every
        self._begun = self._open = self._iterating = self._by_steps = False
        self._asked = self._given = 0.0
        self._waits: float | None = None
        self.step, self.epoch, self.logs = step or 0, 0, dict[str, float]()
        self._bad_gradients = BadGradients()
        self._window = Window(time.perf_counter())
        self._windows = itertools.count(1)
        self._items: queue.SimpleQueue[Window | int | None] = queue.SimpleQueue()
        self._progress = threading.Condition()
        self._seen, self._reports = 0, list[tuple[int, Report]]()
        self._closed = self._failed = self._warned = False
        # A rank that joins an elastic training has made no monitor before.
        number = 0 if os.environ.get("HOROVOD_ELASTIC") == "1" else next(self._numbers)
        self._name = f"hvdkit.monitor.{number}"
        self._thread = threading.Thread(target=self._run, name="hvdkit monitor", daemon=True)
        for one in [one for one in step_times.MONITORS if one.automatic]:
            one.close()
        step_times.MONITORS.append(self)
        atexit.register(self._at_exit)

    # What an adapter says in its framework's terms -------------------------------------------------------------------

    @abstractmethod
    def _gather(self, words: npt.NDArray[np.int64], name: str) -> npt.NDArray[np.int64]:
        """Every rank's words, int64 (size, n), called in the second thread; a collective."""

    def _held(self, value: Any) -> Any:
        """A logged value to keep until the window's end: a number, or what ``float`` makes one of without much ado."""
        return float(value)

    def _parameters(self) -> Mapping[str, str]:
        """What ``looked`` calls parameters, and what their user does."""
        return {}

    def _device_bytes(self) -> float:
        """Memory of the accelerator that this process uses; NaN without one."""
        return math.nan

    # What the training says ------------------------------------------------------------------------------------------

    def __call__(self, batches: Iterable[_T]) -> step_times.RecordedSteps[_T]:
        """The batches of an epoch, each of which is a step; the loop over them is what is watched."""
        if self._steps is None and self._epochs is not None and isinstance(batches, Sized):
            self._steps = self._epochs * len(batches)
        return step_times.RecordedSteps(batches, self)

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
        if not self._begun:
            self._begin(now)
        self._end(now, steps)
        self._asked, self._iterating = now, True

    def given(self, batch: Any = None) -> None:
        """The batch is there: the step begins to work."""
        if not self._begun:
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
            self._window.said_ready = True
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
        if not self._begun:
            self._begin(now)
            self._asked, self._given, self._open = now, now, True
        self._window.apart, self._by_steps = False, True
        self._end(now, 1)
        self._asked = self._given = now
        self._waits, self._open = None, True

    def saved(self, step: int) -> None:
        """The root has written a checkpoint."""
        if self._world.is_root and self._begun:
            self._items.put(step)

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
        self._begun = True
        self.step = self._first = step_times.restored_step if self._start is None else self._start
        self._window.begun = now
        self._thread.start()

    def _end(self, now: float, steps: int, *, told: bool = True) -> None:
        if not self._open:
            return
        window = self._window
        window.step += now - self._asked
        window.input += self._given - self._asked
        if self._waits is not None:
            window.wait += now - self._waits
        window.steps += steps
        window.epoch = self.epoch
        self.step += steps
        self._open = False
        if told and window.steps >= self._every:
            self._hand_over(now)

    def _give(self, now: float) -> int:
        """Give the window to the second thread; its number."""
        window, self._window = self._window, Window(now)
        window.seconds, window.last = now - window.begun, self.step
        self._items.put(window)
        return next(self._windows)

    def _hand_over(self, now: float) -> None:
        number = self._give(now)
        if self._on_report is not None:
            self._tell(self._on_report, number - 1)
        if self._check is not None and number % self._check_every == 0:
            self._check()

    def _tell(self, call: Callable[[Report], None], window: int) -> None:
        """Give reports of the windows up to this one, on every rank after the same step."""
        deadline = time.monotonic() + _REPORT_S
        with self._progress:
            while self._seen < window and self._thread.is_alive() and time.monotonic() < deadline:
                self._progress.wait(0.1)
            known = [one for number, one in self._reports if number <= window]
            self._reports = [one for one in self._reports if one[0] > window]
        for report in known:
            call(report)

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
        step_times.MONITORS.remove(self)
        if not self._begun:
            if self._outlets is not None:  # trackers may hold files, or a run that counts as running
                self._outlets.close(None, failed=failed)
            return
        if not self._by_steps:
            self._end(time.perf_counter(), 1, told=False)
        if self._window.steps and not failed:
            self._give(time.perf_counter())  # no check, which would wait for ranks that may train on
        self._failed = failed
        self._items.put(None)
        self._thread.join(_CLOSING_S)
        if self._on_report is not None and not failed and not self._thread.is_alive():
            self._tell(self._on_report, next(self._windows) - 1)

    # In the second thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._outlets is not None:
            facts = {"world_size": self._world.size, "steps": self._steps, "epochs": self._epochs}
            self._outlets.begin(self._first, facts)
        try:
            self._listen()
        except Exception as error:  # a training goes on without
            if not self._closed:
                warnings.warn(f"the monitor has ended: {type(error).__name__}: {error}", stacklevel=1)
        finally:
            with self._progress:
                self._progress.notify_all()
            if self._outlets is not None:
                end = self.step if self._closed and not self._failed else None
                self._outlets.close(end, failed=self._failed)

    def _listen(self) -> None:
        scores = Scores(self._hosts())
        while (item := self._items.get()) is not None:
            if isinstance(item, int):
                if self._outlets is not None:
                    self._outlets.checkpoint(item)
                continue
            reports = self._note(item, scores)
            with self._progress:
                self._seen += 1
                self._reports += [(self._seen, one) for one in reports] if self._on_report is not None else []
                self._progress.notify_all()

    def _everyone(self, words: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return self._gather(words, self._name) if self._world.size > 1 else words[None]

    def _hosts(self) -> list[str]:
        padded = socket.gethostname().encode()[:_HOST_BYTES].ljust(_HOST_BYTES, b"\0")
        table = self._everyone(np.frombuffer(padded, dtype=np.int64).copy())
        return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in table]

    def _note(self, window: Window, scores: Scores) -> list[Report]:
        names = sorted(window.logs)
        bad = self._bad_gradients.window(window)
        row = row_of(window, bad, self._device_bytes(), alone=self._world.size == 1)
        table = self._everyone(row.view(np.int64)).view(np.float64)
        facts: dict[str, Floats] = dict(zip(FACTS, table.T, strict=False))
        logs = table[:, len(FACTS) : len(FACTS) + len(names)]
        step, steps, seconds = window.last, window.steps, float(facts["seconds"][0])
        ranks = {name: facts[name] for name in ("input", "compute", "wait", "rss", "device")}
        ranks = {"step": facts["step_s"], **ranks}
        same = bool((facts["names"] == facts["names"][0]).all())
        rates = facts["samples"] / facts["seconds"]
        weights = np.where(facts["samples"] > 0, facts["samples"], facts["steps"])
        means = (weights @ logs / weights.sum()).tolist() if same and names else []
        self.logs = dict(zip(names, means, strict=False))
        loss = logs[:, names.index("loss")] if same and "loss" in names else None
        told = {**ranks, **({} if loss is None else {"loss": loss})}
        reports = self._unhealthy(step, scores, facts) + scores.window(step, steps, seconds, told)
        if self._outlets is not None:
            if not same:
                self._warn_of_names()
            speed = float(rates.sum()) if (facts["samples"] > 0).all() else math.nan
            norm = float(facts["grad_norm"][0])
            line = {"step": step, "epoch": window.epoch, "steps": steps, "samples_per_s": speed, "logs": self.logs}
            line |= {"ranks": summary(ranks), "grad_norm": norm}
            values = {**self.logs, "samples_per_s": speed, "grad_norm": norm}
            values["step_s"] = float(ranks["step"].mean())
            self._outlets.window(line, {name: one for name, one in values.items() if math.isfinite(one)})
            for report in reports:
                self._outlets.report(report)
        return reports

    def _warn_of_names(self) -> None:
        if not self._warned:
            warnings.warn("the ranks log different names, and their means are left out; log alike.", stacklevel=1)
        self._warned = True

    def _unhealthy(self, step: int, scores: Scores, facts: Mapping[str, Floats]) -> list[Report]:
        reports = []
        seen = {rank: int(one) for rank, one in enumerate(facts["bad_gradient"]) if np.isfinite(one)}
        if seen:
            first = min(seen, key=lambda rank: seen[rank])
            names = {number_of(key): shown for key, shown in self._parameters().items()}
            name = names.get(int(facts["bad_parameter"][first]), "a parameter")
            reports += scores.nonfinite(step, "gradient", seen, f"the gradient of {name}")
        seen = {rank: int(one) for rank, one in enumerate(facts["bad_loss"]) if np.isfinite(one)}
        return reports + scores.nonfinite(step, "loss", seen, "a logged value")


def begin_if_asked(kind: type[Monitor], world: Topology) -> None:
    """The monitor that ``hvdkit launch --monitor`` asks for, where there is none yet; ends for one of the script's.

    Raises:
        InvalidArgumentError: HVDKIT_MONITOR_EVERY is no number of steps.
    """
    directory = os.environ.get(step_times.MONITOR)
    if not directory or step_times.MONITORS:
        return
    text = os.environ.get(EVERY, "50")
    if not text.isdecimal():
        raise InvalidArgumentError(f"{EVERY} must be a number of steps, got {text!r}.")
    kind(directory, world, int(text)).automatic = True


def automatic() -> Monitor | None:
    """The monitor that ``hvdkit launch --monitor`` has asked for."""
    return next((one for one in step_times.MONITORS if one.automatic), None)
