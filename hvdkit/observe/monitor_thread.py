"""The second thread of a monitor: it gives each window of this rank to all ranks, and the root writes what they say.

Every rank has the same table then, and finds the same in it (``stragglers``).
"""

from __future__ import annotations

import math
import queue
import socket
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hvdkit.core.communicator import Words, text_of, words_of
from hvdkit.observe.lateness import Floats, lower_median
from hvdkit.observe.root_sinks import RootSinks
from hvdkit.observe.stragglers import Report, Scores, summary
from hvdkit.observe.windows import FACTS, WORDS, BadGradients, Window, number_of, row_of
from hvdkit.steps.launchers import is_elastic


class MonitorThread(threading.Thread):
    """Takes windows and checkpoints from the first thread; one for as long as the ranks are the same.

    Args:
        size: number of ranks.
        gather: every rank's words, int64 (size, n), of this one's (1, n); a collective.
        device_bytes: memory of the accelerator that this process uses; NaN without one.
        sinks: the root's; None elsewhere.
        keeps: whether reports are kept for ``reports``.
    Attributes:
        logs: what was logged in the last window, means of all ranks.
    """

    def __init__(
        self,
        size: int,
        gather: Callable[[Words], Words],
        device_bytes: Callable[[], float],
        sinks: RootSinks | None,
        *,
        keeps: bool,
    ) -> None:
        super().__init__(name="hvdkit monitor", daemon=True)
        self._size, self._gather, self._device_bytes = size, gather, device_bytes
        self._sinks, self._keeps = sinks, keeps
        self.logs: dict[str, float] = {}
        self._bad_gradients = BadGradients()
        self._items: queue.SimpleQueue[Window | int | None] = queue.SimpleQueue()
        self._progress = threading.Condition()
        self._seen, self._reports = 0, list[tuple[int, Report]]()
        self._given, self._ends, self._warned = 0, False, False

    # In the first thread ---------------------------------------------------------------------------------------------

    def begin(self, step: int, facts: Mapping[str, Any]) -> None:
        """Start; ``step`` steps were done before."""
        self._first, self._facts = step, facts
        self.start()

    def window(self, window: Window) -> int:
        """Tell a window; its number."""
        self._items.put(window)
        self._given += 1
        return self._given

    def checkpoint(self, step: int) -> None:
        """Say that one is complete."""
        self._items.put(step)

    def reports(self, windows: int, wait_s: float) -> list[Report]:
        """Those of the first so many windows that were not had before, waited for up to ``wait_s`` seconds."""
        deadline = time.monotonic() + wait_s
        with self._progress:
            while self._seen < windows and self.is_alive() and time.monotonic() < deadline:
                self._progress.wait(0.1)
            known = [one for number, one in self._reports if number <= windows]
            self._reports = [one for one in self._reports if one[0] > windows]
        return known

    def end(self, wait_s: float) -> bool:
        """Tell what was given, and no more; whether that was done after ``wait_s`` seconds."""
        self._ends = True
        self._items.put(None)
        self.join(wait_s)
        return not self.is_alive()

    # In the second one -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Tell until the end, or until the ranks cannot be told."""
        try:
            if self._sinks is not None:
                self._sinks.begin(self._first, self._facts)
            self._listen()
        except Exception as error:  # a training goes on without
            if not self._ends:
                said = "rests until the ranks have met again" if is_elastic() else "has ended"
                warnings.warn(f"the monitor {said}: {type(error).__name__}: {error}", stacklevel=1)
        finally:
            with self._progress:
                self._progress.notify_all()

    def _listen(self) -> None:
        scores = Scores(self._hosts())
        while (item := self._items.get()) is not None:
            if isinstance(item, int):
                if self._sinks is not None:
                    self._sinks.checkpoint(item)
                continue
            reports = self._note(item, scores)
            with self._progress:
                self._seen += 1
                self._reports += [(self._seen, one) for one in reports] if self._keeps else []
                self._progress.notify_all()

    def _everyone(self, words: Words) -> Words:
        return self._gather(words[None]) if self._size > 1 else words[None]

    def _hosts(self) -> list[str]:
        return [text_of(row) for row in self._everyone(words_of(socket.gethostname(), WORDS))]

    def _note(self, window: Window, scores: Scores) -> list[Report]:
        """Exchange a window's facts with all ranks; what is wrong by them. The root also writes and reports."""
        names = sorted(window.logs)
        bad = self._bad_gradients.window(window)
        row = row_of(window, bad, self._device_bytes(), alone=self._size == 1)
        table = self._everyone(row.view(np.int64)).view(np.float64)
        facts: dict[str, Floats] = dict(zip(FACTS, table.T, strict=False))
        logs = table[:, len(FACTS) : len(FACTS) + len(names)]
        ranks = {name: facts[name] for name in ("input", "compute", "wait", "rss", "device")}
        ranks = {"step": facts["step_s"], **ranks}
        same = bool((facts["names"] == facts["names"][0]).all())
        weights = np.where(facts["samples"] > 0, facts["samples"], facts["steps"])
        means = (weights @ logs / weights.sum()).tolist() if same and names else []
        self.logs = dict(zip(names, means, strict=False))
        seen = {name: facts[name] for name in ("ran", "queued", "of_all", "typical", "stalls")}
        told = {**ranks, **seen, **({"loss": logs[:, names.index("loss")]} if same and "loss" in names else {})}
        reports = _unhealthy(window, scores, facts)
        reports += scores.window(window.last, window.steps, float(facts["seconds"][0]), told)
        if self._sinks is not None:
            if not same and not self._warned:
                self._warned = True
                warnings.warn("the ranks log different names, and their means are left out; log alike.", stacklevel=1)
            self._write(self._sinks, window, facts, ranks)
            for report in reports:
                self._sinks.report(report)
        return reports

    def _write(
        self, sinks: RootSinks, window: Window, facts: Mapping[str, Floats], ranks: Mapping[str, Floats]
    ) -> None:
        known = (facts["samples"] > 0).all()
        speed = float((facts["samples"] / facts["seconds"]).sum()) if known else math.nan
        norm = float(facts["grad_norm"][0])
        line: dict[str, Any] = {"step": window.last, "epoch": window.epoch, "steps": window.steps}
        line |= {"samples_per_s": speed, "logs": self.logs, "ranks": summary(ranks), "grad_norm": norm}
        values = {**self.logs, "samples_per_s": speed, "grad_norm": norm, "step_s": float(lower_median(ranks["step"]))}
        sinks.window(line, {name: one for name, one in values.items() if math.isfinite(one)})


def _unhealthy(window: Window, scores: Scores, facts: Mapping[str, Floats]) -> list[Report]:
    reports = []
    seen = {rank: int(one) for rank, one in enumerate(facts["bad_gradient"]) if np.isfinite(one)}
    if seen:
        first = min(seen, key=lambda rank: seen[rank])
        names = {number_of(key): shown for key, shown in window.parameters.items()}
        name = names.get(int(facts["bad_parameter"][first]), "a parameter")
        reports += scores.nonfinite(window.last, "gradient", seen, f"the gradient of {name}")
    seen = {rank: int(one) for rank, one in enumerate(facts["bad_loss"]) if np.isfinite(one)}
    return reports + scores.nonfinite(window.last, "loss", seen, "a logged value")
