"""The settings to try. A setting is a ``Tuned``; the empty one is what ``hvdkit launch`` does by itself."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdkit.run.launch.tuned import MIB, Tuned

DEFAULT = Tuned()
CYCLE_TIMES_MS = (0.1, 0.5, 5.0)
"""Around Horovod's own 1 ms: quicker answers for small models, fewer interruptions and more fusion for large ones."""
FUSION_THRESHOLDS_BYTES = (4 * MIB, 32 * MIB)
"""Below Horovod's own 128 MiB: less copying, and the first allreduce begins while gradients are still computed."""


_NAMES = Tuned.__struct_fields__[:4]


@dataclass(frozen=True, slots=True)
class Space:
    """What to try beside the default, setting by setting.

    Attributes:
        launchers: "mpirun", "horovodrun".
        threads: compute threads per rank, > 0.
        cycle_times_ms: milliseconds, >= 0.
        fusion_thresholds_bytes: bytes, >= 0.
    """

    launchers: tuple[str, ...] = ()
    threads: tuple[int, ...] = ()
    cycle_times_ms: tuple[float, ...] = CYCLE_TIMES_MS
    fusion_thresholds_bytes: tuple[int, ...] = FUSION_THRESHOLDS_BYTES

    def candidates(self, limit: int, rng: np.random.Generator) -> list[Tuned]:
        """The settings to try: each change alone, then random combinations of several until there are ``limit``.

        Args:
            limit: the most to return, >= 1; the default is not counted and not among them.
            rng: draws what does not fit all together.
        """
        cycles_s = [time_ms / 1000 for time_ms in self.cycle_times_ms]
        values: tuple[Sequence[Any], ...] = (self.launchers, self.threads, cycles_s, self.fusion_thresholds_bytes)
        axes: list[list[Any]] = [[None, *dict.fromkeys(axis)] for axis in values]
        alone = [Tuned(**{name: value}) for name, axis in zip(_NAMES, axes, strict=True) for value in axis[1:]]
        combined = [Tuned(*several) for several in itertools.product(*axes)]
        combined = [setting for setting in combined if setting != DEFAULT and setting not in alone]
        shuffled = [combined[index] for index in rng.permutation(len(combined))]
        if len(alone) > limit:
            return [alone[index] for index in sorted(rng.permutation(len(alone))[:limit])]
        return [*alone, *shuffled][:limit]


def thread_choices(share: int | None, current: int | None) -> tuple[int, ...]:
    """Thread counts worth trying: the whole share of a rank, one less (for Horovod's own thread) and the half.

    Args:
        share: cores of a rank, None where they are not known.
        current: threads that a rank has by default, None where that is not known.
    """
    if share is None:
        return ()
    return tuple(sorted({threads for threads in (share, share - 1, share // 2) if threads >= 1} - {current}))


def label(setting: Tuned) -> str:
    """The setting for a reader: ``horovodrun, cycle 5 ms``."""
    words = [
        setting.launcher,
        None if setting.threads is None else f"{setting.threads} thread{'s' if setting.threads > 1 else ''}",
        None if setting.cycle_time_ms is None else f"cycle {setting.cycle_time_ms:g} ms",
        None if setting.fusion_threshold_bytes is None else f"fusion {setting.fusion_threshold_bytes / MIB:g} MiB",
    ]
    return ", ".join(word for word in words if word is not None) or "default"


def launch_words(setting: Tuned) -> list[str]:
    """The options of ``hvdkit launch`` that say the same."""
    words = [] if setting.launcher is None else ["--launcher", setting.launcher]
    words += [] if setting.threads is None else ["--threads", str(setting.threads)]
    for name, value in setting.variables().items():
        words += ["--env", f"{name}={value}"]
    return words
