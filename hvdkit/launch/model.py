"""What is asked for, what is there, and the plan made of both: values without behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

BINDINGS = ("none", "core", "socket", "numa")


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asks for.

    Attributes:
        n: number of processes, > 0.
        command: the program and its arguments, at least one word.
        launcher: "auto" or a name of ``plan.LAUNCHERS``.
        threads: compute threads per rank, > 0, None for an even share of the cores.
        bind: one of ``BINDINGS``: what each rank is tied to.
        variables: further environment variables; they win over every other setting.
        timeline: absolute path of the Horovod timeline to write, None for none.
    """

    n: int
    command: tuple[str, ...]
    launcher: str = "auto"
    threads: int | None = None
    bind: str = "none"
    variables: Mapping[str, str] = field(default_factory=dict)
    timeline: Path | None = None


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
class Facts:
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
    """

    cores: int
    root: bool
    python: Path
    path: str
    horovod: Horovod | None
    mpi: Mpi | None
    horovodrun: Path | None
    mpi4py: bool = False


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
        program: absolute path of the launcher.
        settings: its options and variables, in order.
        rank_variable: the environment variable in which a rank finds its number.
        noisy_start: it writes about itself before the ranks run although nothing is wrong.
    """

    program: Path
    settings: tuple[Setting, ...]
    rank_variable: str
    noisy_start: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """A job ready to start.

    Attributes:
        n: number of processes.
        launcher_name: "mpirun" or "horovodrun".
        launcher: the launcher and its options.
        command: what each rank runs; ``launcher`` followed by ``command`` is the whole command line.
        added: environment variables that the job gets beside those of this process.
        environment: all environment variables of the job.
        rank_variable: see ``LauncherLine``.
        noisy_start: see ``LauncherLine``.
        settings: every decision with its reason.
        notes: what the user should know before the job runs, full sentences.
    """

    n: int
    launcher_name: str
    launcher: tuple[str, ...]
    command: tuple[str, ...]
    added: Mapping[str, str]
    environment: Mapping[str, str]
    rank_variable: str
    noisy_start: bool = False
    settings: tuple[Setting, ...] = ()
    notes: tuple[str, ...] = ()
