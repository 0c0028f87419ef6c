"""What this machine and this command leave to choose: the default job, and the settings worth trying beside it.

A setting is a ``Tuned``; the empty one is what ``hvdkit launch`` does by itself.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdkit.common.units import count_text
from hvdkit.errors import InvalidArgumentError
from hvdkit.run.launch import batch, facts, placement, plan
from hvdkit.run.launch.model import LaunchFacts, LaunchPlan
from hvdkit.run.launch.options import Request, as_words
from hvdkit.run.launch.tuned import MIB, Tuned

DEFAULT = Tuned()
CYCLE_TIMES_MS = (0.1, 0.5, 5.0)
"""Around Horovod's own 1 ms: quicker answers for small models, fewer interruptions and more fusion for large ones."""
FUSION_THRESHOLDS_BYTES = (4 * MIB, 32 * MIB)
"""Below Horovod's own 128 MiB: less copying, and the first allreduce begins while gradients are still computed."""
_NAMES = Tuned.__struct_fields__[:4]
WITH_A_CONTROLLER = ("mpirun", "horovodrun")
"""Launchers that stand for Horovod's two controllers, MPI and Gloo."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What is passed on to every ``hvdkit launch``; None and "auto" leave it to that.

    Attributes:
        n: number of ranks, > 0.
        command: what each rank runs.
        launcher, ppn, depth, hosts, hostfile, variables, threads: see ``hvdkit launch``.
    """

    n: int
    command: tuple[str, ...]
    launcher: str
    ppn: int | None
    depth: int | None
    hosts: str | None
    hostfile: Path | None
    variables: Mapping[str, str]
    threads: int | None = None

    def options(self) -> list[str]:
        """The options of ``hvdkit launch`` that say so."""
        names = ("launcher", "ppn", "depth", "hosts", "hostfile", "threads", "variables")
        return as_words({name: getattr(self, name) for name in names})

    def request(self, environ: Mapping[str, str]) -> Request:
        """The default job.

        Raises:
            InvalidArgumentError: hosts are named twice, or do not fit.
        """
        anywhere = self.launcher in batch.LINES
        placed = placement.asked(self.n, self.ppn, self.hosts, self.hostfile, environ, anywhere=anywhere)
        return Request(
            self.n, self.command, self.launcher, self.threads, variables=self.variables, ppn=self.ppn or placed.ppn,
            depth=self.depth, hosts=placed.hosts, hosts_chosen=placed.chosen,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Here:
    """The default job as it would be started here.

    Attributes:
        request: what is asked for.
        facts: what there is to launch with.
        plan: how ``hvdkit launch`` would start it.
    """

    request: Request
    facts: LaunchFacts
    plan: LaunchPlan

    def launchers(self) -> tuple[str, ...]:
        """The other one of mpirun and horovodrun, where the launcher is open and Horovod was built for both."""
        horovod = self.facts.horovod
        name = self.plan.launcher_name
        if self.request.launcher != "auto" or name not in WITH_A_CONTROLLER or horovod is None:
            return ()
        works = {
            "mpirun": horovod.mpi and self.facts.mpi is not None,
            "horovodrun": horovod.gloo and self.facts.horovodrun is not None,
        }
        return tuple(launcher for launcher in WITH_A_CONTROLLER if works[launcher] and launcher != name)

    def threads(self) -> tuple[int, ...]:
        """Thread counts to try; none where the cores of a rank are not known."""
        default = self.plan.environment.get("OMP_NUM_THREADS", "")
        together = plan.ranks_on_a_host(self.plan.launcher_name, self.request)
        share = None if together is None else max(1, self.facts.cores // together)
        return thread_choices(self.request.depth or share, int(default) if default.isdecimal() else None)

    def describe(self) -> str:
        """The default settings, for a reader."""
        threads = self.plan.environment.get("OMP_NUM_THREADS")
        words = [self.plan.launcher_name, f"OMP_NUM_THREADS={threads}" if threads else "OMP_NUM_THREADS unset"]
        set_before = [
            f"{name}={self.plan.environment[name]}"
            for name in ("HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD")
            if self.plan.environment.get(name)
        ]
        return ", ".join([*words, *set_before])

    def notes(self) -> tuple[str, ...]:
        """What a reader of the numbers should know."""
        if self.plan.direct or self.request.n <= self.facts.cores:
            return ()
        return (
            f"{self.request.n} ranks share {count_text(self.facts.cores, 'core')}: what is measured is how they "
            "contend for them, and what is fast here may be slow where each rank has cores of its own.",
        )


def look(wish: Wish, environ: Mapping[str, str] | None = None) -> Here:
    """Plan the default job, so that a mistake is found before anything runs.

    Args:
        wish: what is asked for.
        environ: the environment; default: that of this process.
    Raises:
        InvalidArgumentError: no such command, launcher or host, or Horovod's autotuner is on.
        LaunchError: there is nothing to launch with.
    """
    if not wish.command:
        raise InvalidArgumentError("No command to run was given; write it last: hvdkit tune -n 2 -- python train.py")
    environ = dict(os.environ) if environ is None else dict(environ)
    autotune = {**environ, **wish.variables}.get("HOROVOD_AUTOTUNE", "")
    if autotune not in ("", "0"):
        raise InvalidArgumentError(
            f"HOROVOD_AUTOTUNE={autotune} has Horovod change the settings while they are measured; unset it, or use "
            "'hvdkit launch --autotune-log', and '--tuned' afterwards."
        )
    request = wish.request(environ)
    return Here(request, *facts.planned(request, environ))


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
