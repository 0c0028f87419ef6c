"""What this machine and this command leave to choose: the default job, and the settings worth trying beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdkit.common.units import count_text
from hvdkit.errors import InvalidArgumentError
from hvdkit.run.launch import batch, facts, placement, plan
from hvdkit.run.launch.model import LaunchFacts, LaunchPlan, Request
from hvdkit.run.trials.space import thread_choices

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
        words = ["--launcher", self.launcher] if self.launcher != "auto" else []
        named = {"--ppn": self.ppn, "--depth": self.depth, "--hosts": self.hosts, "--hostfile": self.hostfile}
        named["--threads"] = self.threads
        for option, value in named.items():
            words += [] if value is None else [option, str(value)]
        for name, value in self.variables.items():
            words += ["--env", f"{name}={value}"]
        return words

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
        return thread_choices(self._cores_of_a_rank(), self._default_threads())

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

    def _default_threads(self) -> int | None:
        threads = self.plan.environment.get("OMP_NUM_THREADS", "")
        return int(threads) if threads.isdecimal() else None

    def _cores_of_a_rank(self) -> int | None:
        if self.request.depth is not None:
            return self.request.depth
        together = plan.ranks_on_a_host(self.plan.launcher_name, self.request)
        return None if together is None else max(1, self.facts.cores // together)


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
