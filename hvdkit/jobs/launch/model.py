"""What is asked for, what is there, and the plan made of both: values without behaviour."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hvdkit.common.files import content

_IMPORTS_MPI4PY = re.compile(rb"^[ \t]*(?:from|import)[ \t]+mpi4py\b", re.MULTILINE)
SECOND_PROGRAM = re.compile(":")
"""The word that parts two programs of one job, under every launcher but horovodrun."""
BESIDE_RANK = (sys.executable, "-I", "-S", str(Path(__file__).with_name("rank.py")))
GRACE_S, BATCH_GRACE_S = 3.0, 30.0
"""Seconds from SIGTERM to SIGKILL for who waits at a terminal, and in a batch job, as Slurm's own KillWait."""
BINDINGS = ("none", "core", "socket", "numa")


@dataclass(frozen=True, slots=True)
class Host:
    """A host and how many ranks it may take, > 0."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


@dataclass(frozen=True, slots=True)
class Command:
    """A command that exists.

    Attributes:
        words: program (an absolute path) and arguments.
        script: index in ``words`` of the Python script that is run, None when it is no Python script.
    """

    words: tuple[str, ...]
    script: int | None = None

    @property
    def imports_mpi4py(self) -> bool:
        """Whether it is a Python script that itself imports mpi4py."""
        if self.script is None:
            return False
        try:
            return _IMPORTS_MPI4PY.search(content(Path(self.words[self.script]))) is not None
        except OSError:  # Python itself will say so
            return False


@dataclass(frozen=True, slots=True)
class Staged:
    """An environment and its copy on the disk of each host.

    Attributes:
        prefix: absolute path of the environment.
        store: absolute path of the directory for copies, the same on every host.
        key: changes with the environment.
        left: names of the files that point to what is not copied, since it lies elsewhere: editable installs.
    """

    prefix: Path
    store: Path
    key: str
    left: tuple[str, ...] = ()

    @property
    def at(self) -> Path:
        """Where the copy lies."""
        return self.store / self.key


@dataclass(frozen=True, slots=True)
class Mpi:
    """An MPI launcher.

    Attributes:
        mpirun: its absolute path.
        implementation: "Open MPI", "MPICH" or "Intel MPI".
        version: such as (5, 0, 11).
    """

    mpirun: Path
    implementation: str
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.implementation} {'.'.join(map(str, self.version))}"


@dataclass(frozen=True, slots=True)
class Horovod:
    """The installed Horovod.

    Attributes:
        mpi: built with MPI.
        gloo: built with Gloo.
        mpi_bin: directory of the mpirun that belongs to it; None when that is not known, or without MPI.
    """

    mpi: bool
    gloo: bool
    mpi_bin: Path | None = None


@dataclass(frozen=True, slots=True)
class LaunchFacts:
    """What there is to launch with.

    Attributes:
        cores: cores that this process may use, >= 1: its affinity and its container's share considered.
        root: run by the superuser.
        python: absolute path of the interpreter that runs hvdkit.
        path: PATH for the job.
        horovod: None when it is not installed, or not known because the launcher was chosen by the user.
        mpi: the MPI launcher to use, None when there is none.
        horovodrun: absolute path, None when there is none.
        mpi4py: the package is installed beside ``python``.
        programs: paths of the launchers of batch systems that are installed, by name: see ``lines.BATCH``.
        batch: launcher that the batch job around this process calls for, and why; None outside, and without one.
        mpi_recorder: the library that records MPI calls, None where none is to be recorded.
        master_port: where rank 0 may listen for ``torch.distributed``, None where that has no place.
    """

    cores: int
    root: bool
    python: Path
    path: str
    horovod: Horovod | None
    mpi: Mpi | None
    horovodrun: Path | None
    mpi4py: bool = False
    programs: Mapping[str, Path] = field(default_factory=dict)
    batch: tuple[str, str] | None = None
    mpi_recorder: Path | None = None
    master_port: int | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """One decision and its reason, for ``--explain``.

    Attributes:
        words: the words it adds to a command line, () for an environment variable or a plain statement.
        variables: the environment variables it sets.
        why: the reason, a sentence without its full stop.
    """

    why: str
    words: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LauncherLine:
    """How one launcher starts the ranks.

    Attributes:
        program: absolute path of the launcher; its bare name when it is not installed and only to be shown.
        settings: its options and variables, in order.
        rank_variable: the environment variable in which a rank finds its number; "" where that depends on the system.
        pass_on: makes the options that carry variables to ranks on other hosts, from those that the job adds and those
            that it inherits; None where the launcher carries all of them by itself.
        taken: words that it takes for its own wherever they stand, also behind the program.
        notes: what the user should know before the job runs, full sentences.
    """

    program: Path
    settings: tuple[Setting, ...]
    rank_variable: str
    pass_on: Callable[[Mapping[str, str], Mapping[str, str]], Setting] | None = None
    taken: re.Pattern[str] = SECOND_PROGRAM
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A job ready to start.

    Attributes:
        n: number of processes.
        cores: cores of this machine that the job may use.
        launcher_name: a name of ``options.LAUNCHERS``.
        launcher: the launcher and its options.
        command: what each rank runs; ``launcher`` followed by ``command`` is the whole command line.
        added: environment variables that the job gets beside those of this process.
        environment: all environment variables of the job.
        rank_variable: see ``LauncherLine``.
        settings: every decision with its reason.
        notes: what the user should know before the job runs, full sentences.
        stall_timeout: see ``Request``.
        stall_dir: see ``Request``.
        elsewhere: ranks are, or may be, on other hosts.
        elastic: ranks come and go, and horovodrun sees to that.
        hosts: where those ranks run, as far as it is known.
        root: see ``rank.settle_place``.
        beside_rank: what starts the process beside each rank, see ``rank``.
        grace_s: seconds from SIGTERM to SIGKILL when the job is told to end.
    """

    n: int
    launcher_name: str
    launcher: tuple[str, ...]
    command: tuple[str, ...]
    added: Mapping[str, str]
    environment: Mapping[str, str]
    rank_variable: str
    settings: tuple[Setting, ...] = ()
    notes: tuple[str, ...] = ()
    stall_timeout: float | None = None
    stall_dir: Path | None = None
    elsewhere: bool = False
    hosts: tuple[Host, ...] = ()
    root: str = ""
    grace_s: float = GRACE_S
    elastic: bool = False
    cores: int = 1
    beside_rank: tuple[str, ...] = BESIDE_RANK
