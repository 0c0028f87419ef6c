"""The second thread of a monitor: it gives each window of this rank, 37 numbers, to all; the root writes them."""

from __future__ import annotations

import math
import os
import queue
import socket
import threading
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hvdkit.core.communicator import Words, text_of, words_of
from hvdkit.observe.lateness import Floats, lower_median
from hvdkit.observe.stragglers import LASTING, Scores, summary
from hvdkit.observe.trackers import RootSinks
from hvdkit.steps.launchers import is_elastic

WORDS = 37
"""Numbers that a rank tells in a window: 296 bytes."""
FACTS = (
    "step", "epoch", "steps", "seconds", "samples", "step_s", "input", "compute", "wait", "rss", "device",
    "grad_norm", "bad_gradient", "bad_parameter", "bad_loss", "names", "ran", "queued", "of_all", "typical", "stalls",
)  # fmt: skip
_OF_RANKS = ("input", "compute", "wait", "rss", "device")
MOST_LOGS = WORDS - len(FACTS)


@dataclass(slots=True)
class Window:
    """What this rank has seen since the last one.

    Attributes:
        parameters: what ``looks`` calls them, and what their user does.
        own: seconds of each step that this rank did not wait for others.
        used: seconds in which the thread that trains ran, in which others had its core, and which all threads ran.
    """

    begun: float
    steps: int = 0
    samples: float = 0.0
    step: float = 0.0
    input: float = 0.0
    wait: float = 0.0
    was_ready: bool = False
    apart: bool = True
    seconds: float = 0.0
    last: int = 0
    epoch: int = 0
    logs: dict[str, list[tuple[int, float, Any]]] = field(default_factory=dict)
    norm: Any = math.nan
    looks: list[tuple[int, str, Any]] = field(default_factory=list)
    parameters: dict[str, str] = field(default_factory=dict)
    own: list[float] = field(default_factory=list)
    used: tuple[float, float, float] = (math.nan, math.nan, math.nan)


class MonitorThread(threading.Thread):
    """Takes windows and checkpoints from the first thread; one for as long as the ranks are the same.

    Args:
        size: number of ranks.
        gather: every rank's words, int64 (size, n), of this one's (1, n); a collective.
        device_bytes: memory of the accelerator that this process uses; NaN without one.
        sinks: the root's; None elsewhere.
        step: steps that were done before.
        facts: of the training, for the history's first line.
    """

    def __init__(
        self,
        size: int,
        gather: Callable[[Words], Words],
        device_bytes: Callable[[], float],
        sinks: RootSinks | None,
        step: int,
        facts: Mapping[str, Any],
    ) -> None:
        super().__init__(name="hvdkit monitor", daemon=True)
        self._size, self._gather, self._device_bytes = size, gather, device_bytes
        self._sinks, self._first, self._facts = sinks, step, facts
        self._bad_gradients = BadGradients()
        self._items: queue.SimpleQueue[Window | int | None] = queue.SimpleQueue()
        self._ends = self._warned = False

    # In the first thread ---------------------------------------------------------------------------------------------

    def tell(self, item: Window | int) -> None:
        """Tell a window, or of which step a checkpoint is complete."""
        self._items.put(item)

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
            scores = Scores([text_of(row) for row in self._everyone(words_of(socket.gethostname(), WORDS))])
            while (item := self._items.get()) is not None:
                if isinstance(item, Window):
                    bad = self._bad_gradients.window(item)
                    row = row_of(item, bad, self._device_bytes(), alone=self._size == 1)
                    table = self._everyone(row.view(np.int64)).view(np.float64)
                    if self._sinks is not None:
                        self._write(self._sinks, item, table, scores)
                elif self._sinks is not None:
                    self._sinks.checkpoint(item)
        except Exception as error:  # a training goes on without
            if not self._ends:
                said = "rests until the ranks have met again" if is_elastic() else "has ended"
                warnings.warn(f"the monitor {said}: {type(error).__name__}: {error}", stacklevel=1)

    def _everyone(self, words: Words) -> Words:
        return self._gather(words[None]) if self._size > 1 else words[None]

    def _write(self, sinks: RootSinks, window: Window, table: Floats, scores: Scores) -> None:
        """On the root: write what all ranks said of a window, (ranks, 37), and report what is wrong by it."""
        names = sorted(window.logs)
        facts: dict[str, Floats] = dict(zip(FACTS, table.T, strict=False))
        logs = table[:, len(FACTS) : len(FACTS) + len(names)]
        same = bool((facts["names"] == facts["names"][0]).all())
        if not same and not self._warned:
            self._warned = True
            warnings.warn("the ranks log different names, and their means are left out; log alike.", stacklevel=1)
        weights = np.where(facts["samples"] > 0, facts["samples"], facts["steps"])
        means = dict(zip(names, (weights @ logs / weights.sum()).tolist(), strict=True)) if same else {}
        ranks = {"step": facts["step_s"]} | {name: facts[name] for name in _OF_RANKS}
        known = (facts["samples"] > 0).all()
        speed = float((facts["samples"] / facts["seconds"]).sum()) if known else math.nan
        norm = float(facts["grad_norm"][0])
        line: dict[str, Any] = {"step": window.last, "epoch": window.epoch, "steps": window.steps}
        line |= {"samples_per_s": speed, "logs": means, "ranks": summary(ranks), "grad_norm": norm}
        values = {**means, "samples_per_s": speed, "grad_norm": norm, "step_s": float(lower_median(ranks["step"]))}
        sinks.window(line, {name: one for name, one in values.items() if math.isfinite(one)})
        told = ranks | {name: facts[name] for name in ("ran", "queued", "of_all", "typical", "stalls")}
        if same and "loss" in names:
            told["loss"] = logs[:, names.index("loss")]
        reports = []
        if np.isfinite(facts["bad_gradient"]).any():
            first = int(np.nanargmin(facts["bad_gradient"]))
            parameters = {number_of(key): shown for key, shown in window.parameters.items()}
            name = parameters.get(int(facts["bad_parameter"][first]), "a parameter")
            reports = scores.nonfinite(window.last, "gradient", facts["bad_gradient"], f"the gradient of {name}")
        reports += scores.nonfinite(window.last, "loss", facts["bad_loss"], "a logged value")
        for report in [*reports, *scores.window(window.last, window.steps, told)]:
            sinks.report(report)


def row_of(window: Window, bad: tuple[float, float], device_bytes: float, *, alone: bool) -> Floats:
    """What a rank tells of a window, (37,): ``FACTS``, then the means of what was logged by name.

    ``bad``: see ``BadGradients``; ``alone``: it never waits for other ranks.
    """
    names = sorted(window.logs)
    row = np.full(WORDS, np.nan)
    means: list[float] = []
    wrong: list[int] = []
    for name in names:
        values = [(number, weight, float(value)) for number, weight, value in window.logs[name]]
        wrong += [number for number, _, value in values if not math.isfinite(value)]
        means.append(sum(weight * value for _, weight, value in values) / sum(weight for _, weight, _ in values))
    busy, wait = window.step - window.input, window.wait
    known = window.was_ready or alone
    typical, stalls = stalls_of(window.own) if known else (math.nan, math.nan)
    row[: len(FACTS)] = (
        window.last, window.epoch, window.steps, window.seconds, window.samples,
        window.step / window.steps,
        window.input / window.steps if window.apart else math.nan,
        (busy - wait) / window.steps if known else math.nan,
        wait / window.steps if known else math.nan,
        own_memory(), device_bytes, float(window.norm), *bad, min(wrong, default=math.nan),
        number_of("\0".join(names)),
        *(seconds / window.steps for seconds in window.used), typical, stalls,
    )  # fmt: skip
    row[len(FACTS) : len(FACTS) + len(names)] = means
    return row


def stalls_of(own: list[float]) -> tuple[float, float]:
    """Median seconds of the steps of a window, and in how many of them the rest of their time lies; 0: in all of them.

    A stall in every 20th step is no slow step.
    """
    if not own:
        return math.nan, math.nan
    seconds = np.array(own)
    median = float(np.median(seconds))
    more = np.maximum(0.0, seconds - median)
    heavy = more > 0.3 * more.max(initial=0.0)
    few = heavy.sum() <= len(own) / 4 and more[heavy].sum() >= 0.5 * more.sum() > 0
    return median, float(heavy.sum()) if few else 0.0


class BadGradients:
    """Since when this rank's own gradients have not been finite.

    Up to two such steps in a row are those that a scaler of half precision leaves out.
    """

    def __init__(self) -> None:
        self._since: tuple[int, str] | None = None

    def window(self, window: Window) -> tuple[float, float]:
        """The first of these steps and a number for the parameter; NaN where the last ones are well."""
        bad: dict[int, str] = {}
        for number, parameter, norm in window.looks:
            if not math.isfinite(float(norm)):
                bad.setdefault(number, parameter)
        since = window.last + 1
        while since - 1 in bad:
            since -= 1
        if since > window.last:
            self._since = None
        elif self._since is None or since > window.last - window.steps + 1:
            self._since = since, bad[since]
        if self._since is None or window.last - self._since[0] < LASTING - 1:
            return math.nan, math.nan
        return self._since[0], number_of(self._since[1])


def number_of(name: str) -> int:
    """What is told of a name, which every rank knows."""
    return zlib.crc32(name.encode())


def own_memory() -> float:
    """Bytes of memory that are this process's own, not shared and not a file's; NaN where the system does not say."""
    try:
        resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    except (OSError, ValueError):
        return math.nan
    return float((resident - shared) * os.sysconf("SC_PAGE_SIZE"))


def samples_of(batch: Any) -> float:
    """The length of the first axis of a batch's first array; 0 where it has none."""
    while isinstance(batch, (tuple, list, Mapping)) and len(batch):
        batch = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    try:
        shape = getattr(batch, "shape", None)
        return float(shape[0]) if shape is not None and len(shape) and shape[0] is not None else 0.0
    except (TypeError, ValueError):  # of a rank that is not known, or no shape of an array
        return 0.0
