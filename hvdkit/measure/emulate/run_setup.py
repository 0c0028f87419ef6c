"""From what is typed to a job: what the ranks do, how they are launched, and what the file of results says of both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from hvdkit.errors import InvalidArgumentError
from hvdkit.measure.bench import subject as bench
from hvdkit.measure.emulate import run
from hvdkit.measure.emulate.results import EmulateResults, WithLaunch
from hvdkit.measure.emulate.run_job import Delay, EmulateAsked, ReplayJob
from hvdkit.measure.emulate.sizes import plan_of
from hvdkit.run.launch import tuned as tuned_settings
from hvdkit.run.launch.tuned import Tuned
from hvdkit.run.trials import here
from hvdkit.run.trials.here import Here, Wish

ENGINES: dict[str, tuple[str, str, str | None]] = {
    "horovod": ("horovod", "library", None),
    "mpi": ("mpi", "library", None),
    "ring": ("mpi", "ring", None),
    "torch": ("torch", "library", None),
    "gloo": ("torch", "library", "gloo"),
    "nccl": ("torch", "library", "nccl"),
}
"""Name that is typed to engine, algorithm and backend."""
_SETTINGS = ("cycle_time_ms", "fusion_threshold_mb", "cache_capacity", "hierarchical_allreduce")
_WHERE = ("launcher", "hosts", "hostfile", "ppn", "threads", "variables")
_ASKED = ("collective", "warmup_trials", "check", "seed", "compute")


@dataclass(frozen=True, slots=True)
class Setup:
    """A job that is ready to run.

    Attributes:
        job: what the ranks do; its folder is made when it runs.
        options: of ``hvdkit launch``.
        tuned: Horovod's settings.
        here: how it is launched.
        beside: where the ranks write for the while, None for the system's place for temporary files.
    """

    job: ReplayJob
    options: tuple[str, ...]
    tuned: Tuned
    here: Here
    beside: Path | None

    def results(self, joined: run.Joined) -> EmulateResults:
        """For the file of results, before it is analysed; without names of hosts.

        Where the ranks ran and whether they overlapped they say. What is asked for may come otherwise: a launcher fills
        one host before the next, or a binding cannot fuse.
        """
        asked, placed = self.job.asked, joined.placed
        if placed:
            asked = structs.replace(asked, hosts=len(placed), ppn=placed[0] if len(set(placed)) == 1 else None)
        asked = structs.replace(asked, fusion=asked.fusion and joined.overlapped is not False)
        where, launches = bench.look_around([self.here])
        return EmulateResults(
            asked=asked,
            environment=WithLaunch(**structs.asdict(where), launch=launches[0]),
            notes=[*self.here.notes(), *_notes(asked, len(placed), len(self.here.plan.hosts)), *joined.notes],
            plan=self.job.plan,
            summary=None,
            samples=joined.samples,
        )


def _notes(asked: EmulateAsked, hosts: int, meant: int) -> list[str]:
    """What a reader of the numbers should know, full sentences; ``hosts``: 0 where they are not known."""
    notes = []
    if 0 < hosts < meant:
        notes.append(
            f"The launcher put all {asked.ranks} ranks on {hosts} of the {meant} hosts; give hosts as many slots as "
            "they are to run ranks, such as --hosts h1:1,h2:1, or --ppn."
        )
    if asked.fusion:
        notes.append(
            "Horovod was given all tensors of a step before the first was waited for, and may have sent several as "
            "one (--fusion on): a time is from giving a tensor to seeing it done, that of a tensor that is fused "
            "is the time of all of them, and bandwidths by size say nothing; --fusion off measures each alone."
        )
    return notes


def prepare(
    n: int, *, engine: str, fusion: str | None, algorithm: str | None, json: Path | None, **wanted: Any
) -> Setup:
    """Make a job of the options of ``hvdkit emulate``, which are given by their names.

    Args:
        n: how many ranks.
        engine: a key of ``ENGINES``.
        fusion: "on", "off", or None for Horovod's own way.
        algorithm: "library", "ring", or None for what the engine's name says.
        json: where the results are to go, None for nowhere.
        wanted: Horovod's settings, where the ranks run, fields of ``EmulateAsked``; the others choose the plan.
    Raises:
        InvalidArgumentError: options that do not go together.
        DataError: a file of the plan cannot be used.
        LaunchError: there is nothing to launch with.
    """
    settings, where, asked = ({name: wanted.pop(name) for name in names} for names in (_SETTINGS, _WHERE, _ASKED))
    late, delay = _stragglers(wanted.pop("straggler")), _delay(wanted.pop("delay"))
    if wanted["begin"] is not None and engine == "horovod" and settings["fusion_threshold_mb"] is None:
        fusion = fusion or "off"  # else Horovod makes one of them all
    plan = plan_of(**wanted)
    name, own, backend = ENGINES[engine]
    if engine == "ring" and algorithm == "library":
        raise InvalidArgumentError("--engine ring is --algorithm ring, got --algorithm library; leave one of them out.")
    tuned = _horovod_settings(name, engine, settings, fusion)
    wish = Wish(n, run.WORKER, depth=None, **where)
    looked = here.look(wish)
    if name == "mpi" and wish.launcher == "auto" and looked.plan.launcher_name == "horovodrun":
        wish = replace(wish, launcher="mpirun")  # Horovod here has no MPI, but the engine needs it
        looked = here.look(wish)
    apart = looked.plan.direct
    how = EmulateAsked(
        name,
        algorithm=algorithm or own,
        ranks=n,
        hosts=max(1, len(looked.plan.hosts)),
        ppn=looked.request.ppn,
        backend=backend,
        fusion=name == "horovod" and fusion != "off",
        settings=tuned.variables(),
        straggler_s=late,
        delay=delay,
        **asked,
    )
    made = ReplayJob(Path(), plan, how, apart)
    run.check(made, looked)
    beside = json.absolute().parent if json is not None else Path.cwd() if apart else None
    return Setup(made, tuple(wish.options()), tuned, looked, beside)


def _horovod_settings(name: str, engine: str, settings: Mapping[str, Any], fusion: str | None) -> Tuned:
    tuned, _, _ = tuned_settings.choose(None, **settings)
    if name != "horovod" and (fusion is not None or tuned.variables()):
        given = "--fusion" if fusion is not None else ", ".join(tuned.variables())
        raise InvalidArgumentError(f"{given} is a setting of Horovod, got --engine {engine}; use --engine horovod.")
    if fusion == "off":
        if tuned.fusion_threshold_bytes:
            raise InvalidArgumentError("--fusion off and --fusion-threshold-mb contradict each other; give one.")
        return structs.replace(tuned, fusion_threshold_bytes=0)
    return tuned


def _stragglers(texts: tuple[str, ...]) -> dict[int, float]:
    """Seconds by rank, of ``RANK:MS`` words."""
    found: dict[int, float] = {}
    for text in texts:
        rank, colon, late = text.partition(":")
        milliseconds = _number(late)
        if not colon or not rank.isdecimal() or milliseconds is None or milliseconds <= 0 or int(rank) in found:
            raise InvalidArgumentError(
                f"--straggler is {text!r}; expected RANK:MS, each rank once, such as 2:50 for rank 2 that comes 50 ms "
                "late to every collective."
            )
        found[int(rank)] = milliseconds / 1000
    return found


def _delay(text: str | None) -> Delay | None:
    """The random delays of ``MS[:RANK[:P]]``."""
    if text is None:
        return None
    words = [*text.split(":"), "", ""]
    mean, probability = _number(words[0]), _number(words[2]) if words[2] else 1.0
    everyone = words[1] in ("", "*")
    if (
        len(words) > 5
        or not (mean is not None and mean > 0)
        or not (everyone or words[1].isdecimal())
        or not (probability is not None and 0 < probability <= 1)
    ):
        raise InvalidArgumentError(
            f"--delay is {text!r}; expected MS[:RANK[:P]], such as 20:1:0.1 for delays of 20 ms on average on rank 1 "
            "before one collective in ten (RANK * for every rank)."
        )
    return Delay(mean / 1000, None if everyone else int(words[1]), probability)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
