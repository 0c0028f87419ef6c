"""What one rank sees in a window of steps, and the 37 numbers that it tells all ranks of it."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hvdkit.observe.lateness import Floats
from hvdkit.observe.stragglers import LASTING

WORDS = 37
"""Numbers that a rank tells in a window: 296 bytes."""
FACTS = (
    "step", "epoch", "steps", "seconds", "samples", "step_s", "input", "compute", "wait", "rss", "device",
    "grad_norm", "bad_gradient", "bad_parameter", "bad_loss", "names", "ran", "queued", "of_all", "typical", "stalls",
)  # fmt: skip
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


def row_of(window: Window, bad: tuple[float, float], device_bytes: float, *, alone: bool) -> Floats:
    """What a rank tells of a window, (37,): ``FACTS``, then the means of what was logged by name.

    Args:
        bad: see ``BadGradients``.
        device_bytes: NaN without an accelerator.
        alone: whether it never waits for other ranks.
    """
    names = sorted(window.logs)
    row = np.full(WORDS, np.nan)
    means, bad_loss = [], math.nan
    for name in names:
        values = [(number, weight, float(value)) for number, weight, value in window.logs[name]]
        wrong = [number for number, _, value in values if not math.isfinite(value)]
        bad_loss = min([bad_loss, *wrong]) if wrong and bad_loss == bad_loss else min(wrong, default=bad_loss)
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
        own_memory(), device_bytes, float(window.norm), *bad, bad_loss,
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
