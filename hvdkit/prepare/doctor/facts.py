"""What can be known about an environment, as frozen values; nothing here judges.

A package that is not installed, one whose import crashes and one that works are three different facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hvdkit.common.json_files import Part
from hvdkit.prepare.doctor.host import DoctorHost, MpiLauncher, MpiLibrary
from hvdkit.prepare.install.facts import TITLES
from hvdkit.prepare.install.record import BuildRecord

PACKAGES = {**TITLES, "keras": "Keras", "mpi4py": "mpi4py", "horovod": "Horovod"}
CONTROLLERS = ("MPI", "Gloo")


@dataclass(frozen=True)
class Failure:
    """Why an import or a run failed.

    Attributes:
        how: "raised" an exception, died by a "signal", "exit" (the process ended), "timeout".
        message: one line.
        detail: the end of the exception's text or of stderr, at most 2000 characters.
    """

    how: str
    message: str
    detail: str = ""


@dataclass(frozen=True)
class Package:
    """A Python package of the environment.

    Attributes:
        name: import name.
        present: an import would find it.
        location: directory or file that would be imported.
        distribution: name that pip knows it by ("tensorflow-cpu"), None without package metadata.
        distribution_version: what the package metadata says.
        version: what the imported module says; None when it is absent or its import failed.
        failure: why the import failed.
    """

    name: str
    present: bool = False
    location: str | None = None
    distribution: str | None = None
    distribution_version: str | None = None
    version: str | None = None
    failure: Failure | None = None

    @property
    def installed_version(self) -> str | None:
        """The imported module's version, else that of the metadata."""
        return self.version or self.distribution_version


@dataclass(frozen=True)
class Devices:
    """Accelerators as one framework sees them.

    Attributes:
        build: "CUDA 12.8", "ROCm 6.3", or None for a build without GPU support.
        gpus: a name for each device.
        failure: why it could not be asked.
    """

    build: str | None = None
    gpus: tuple[str, ...] = ()
    failure: Failure | None = None


@dataclass(frozen=True)
class Extension:
    """Horovod's compiled extension for one framework.

    Attributes:
        framework: import name.
        file: the extension for this Python, None when it was not built.
        loaded: its import succeeded; then ``built`` and ``mpi`` are known.
        failure: why it did not.
        built: what it was built with, of "MPI", "Gloo", "NCCL".
        mpi: the MPI library that its process had loaded.
    """

    framework: str
    file: str | None = None
    loaded: bool = False
    failure: Failure | None = None
    built: tuple[str, ...] = ()
    mpi: MpiLibrary | None = None


class Tested(Part, frozen=True):
    """One check.

    Attributes:
        check: "Horovod", "framework", or a framework and what was done in it, such as "torch training".
        ok: it passed.
        what: what was seen, or what is wrong.
        fix: what to do; "" where it passed.
    """

    check: str
    ok: bool
    what: str
    fix: str = ""


class TwoRanks(Part, frozen=True):
    """What 2 ranks, started by ``hvdkit launch``, said in one framework.

    Attributes:
        checks: those that passed, and the first that failed.
        controller: "MPI" or "Gloo", over which they trained; "" where they did not come so far.
    """

    checks: tuple[Tested, ...]
    controller: str = ""

    @property
    def failed(self) -> Tested | None:
        """The check that failed, None where they train."""
        return next((one for one in self.checks if not one.ok), None)

    @property
    def problem(self) -> str | None:
        """Why they do not train, None where they do."""
        return self.failed.what.rstrip(".") if self.failed else None


@dataclass(frozen=True)
class DoctorFacts:
    """Everything that the checks look at.

    Attributes:
        python: its version, such as "3.11.7".
        prefix: the environment's directory.
        host: the machine.
        packages: import name -> package, for every name of PACKAGES.
        tensorflow_keras: version of ``tf.keras``: the Keras that Horovod's own Keras API works on.
        devices, extensions: framework's import name -> what it sees, Horovod's extension for it.
        record: what ``hvdkit install`` noted in the Horovod that it built.
        metadata: Horovod's own note of the versions that it was built for, by the framework's import name.
        mpi4py_mpi: the MPI library that mpi4py loads.
        mpi_launchers: what PATH has first, then those of the environment and of the build record.
        environ: the variables that matter to training (HOROVOD_*, OMP_NUM_THREADS, ...) and are set.
        trained: framework's import name -> what 2 ranks said that ``hvdkit launch`` started, for each that Horovod's
            extension loads in.
        seconds_allowed: time limit of each probe.
    """

    python: str
    prefix: str
    host: DoctorHost
    packages: Mapping[str, Package]
    tensorflow_keras: str | None = None
    devices: Mapping[str, Devices] = field(default_factory=dict)
    extensions: Mapping[str, Extension] = field(default_factory=dict)
    record: BuildRecord | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    mpi4py_mpi: MpiLibrary | None = None
    mpi_launchers: tuple[MpiLauncher, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    trained: Mapping[str, TwoRanks] = field(default_factory=dict)
    seconds_allowed: float = 60.0

    @property
    def horovod(self) -> Package:
        return self.packages["horovod"]

    def loaded_extensions(self) -> tuple[Extension, ...]:
        return tuple(extension for extension in self.extensions.values() if extension.loaded)

    def horovod_mpi(self) -> MpiLibrary | None:
        """The MPI library that Horovod's extensions loaded, that of the first extension that has one."""
        return next((extension.mpi for extension in self.loaded_extensions() if extension.mpi), None)

    def built_with(self, feature: str) -> bool:
        """Whether any extension that loads was built with ``feature`` ("MPI", "NCCL", ...)."""
        return any(feature in extension.built for extension in self.loaded_extensions())

    def launch_problem(self, framework: str) -> str | None:
        """Why a training of 2 ranks, started by ``hvdkit launch``, fails; None where it works or was not tried."""
        return self.trained[framework].problem if framework in self.trained else None
