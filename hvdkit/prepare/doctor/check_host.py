"""Checks of the machine and of environment variables: accelerators, cores, memory, HOROVOD_*."""

from __future__ import annotations

from hvdkit.prepare.doctor.facts import CONTROLLERS, FRAMEWORKS, DoctorFacts
from hvdkit.prepare.doctor.finding import Finding

_SHM_NEEDED = 64 * 2**20
_FUSION_MINIMUM = 1024  # bytes; less is a number of MB taken for bytes
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def framework_without_gpu_support(facts: DoctorFacts, name: str) -> Finding | None:
    """There are accelerators and the framework's build cannot use them."""
    devices = facts.devices.get(name)
    if devices is None or devices.build or devices.failure or not facts.host.gpus:
        return None
    return Finding(
        "warning",
        f"This machine has {_counted(facts.host.gpus)}, and {FRAMEWORKS[name]} "
        f"{facts.packages[name].installed_version} is a build without GPU support.",
        "Training runs on the CPU.",
        f"Install a build of {FRAMEWORKS[name]} for the GPU, then Horovod for it: 'hvdkit install --gpu nccl --force'.",
    )


def devices_hidden(facts: DoctorFacts, name: str) -> Finding | None:
    """There are accelerators, the build could use them, and none is visible."""
    devices = facts.devices.get(name)
    if devices is None or not devices.build or devices.gpus or not facts.host.gpus:
        return None
    hiding = next((variable for variable in _VISIBLE if facts.environ.get(variable) in ("", "-1")), None)
    if hiding:
        reason, fix = f"{hiding}={facts.environ[hiding]!r} hides them all.", f"Unset {hiding}, if that is not meant."
    else:
        said = f": {devices.failure.message}" if devices.failure else ""
        reason = f"The driver may be too old for {devices.build}, or this process may not use the devices{said}."
        fix = "Compare the driver's version ('nvidia-smi', 'rocm-smi') with the framework's; in a container, pass the "
        fix += "devices through."
    return Finding(
        "info" if hiding else "warning",
        f"{FRAMEWORKS[name]} ({devices.build}) sees none of this machine's {_counted(facts.host.gpus)}.",
        reason + " Training runs on the CPU.",
        fix,
    )


def devices_fail(facts: DoctorFacts, name: str) -> Finding | None:
    """Asking the framework for its devices fails."""
    devices = facts.devices.get(name)
    if devices is None or devices.failure is None or (devices.build and facts.host.gpus):
        return None
    return Finding(
        "warning",
        f"{FRAMEWORKS[name]} cannot say which devices it sees: {devices.failure.message}.",
        "A script that chooses its device the usual way stops the same way.",
        f"Reinstall {FRAMEWORKS[name]}, or the GPU driver it was built for.",
    )


def horovod_without_nccl(facts: DoctorFacts, name: str) -> Finding | None:
    """GPUs are visible and Horovod reduces through the host's memory."""
    devices, extension = facts.devices.get(name), facts.extensions.get(name)
    if devices is None or extension is None or not devices.gpus or not extension.loaded:
        return None
    if "NCCL" in extension.built:
        return None
    return Finding(
        "warning",
        f"{FRAMEWORKS[name]} sees {_counted(devices.gpus)}, and Horovod was built without NCCL.",
        "Every gradient is copied to the host's memory and back; training on several GPUs is slow.",
        "'hvdkit install --gpu nccl --force' (or --gpu mpi, if your MPI takes GPU memory).",
    )


def _counted(gpus: tuple[str, ...]) -> str:
    return f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''} ({', '.join(dict.fromkeys(gpus))})"


def one_core(facts: DoctorFacts) -> Finding | None:
    """This process may use one core of several."""
    host = facts.host
    if host.usable_cores > 1 or host.cores == 1:
        return None
    limit = "its CPU affinity" if host.affinity == 1 else f"a control group (quota of {host.cpu_quota:g} CPUs)"
    return Finding(
        "warning",
        f"This process may use 1 of {host.cores} cores: {limit} says so.",
        "Horovod's background thread and the training thread take turns on it; a step can take twice as long.",
        "Start without binding to one core ('hvdkit launch' does; 'mpirun --bind-to none', 'srun --cpu-bind=none'), or "
        "ask the batch system for more cores for each process.",
    )


def omp_threads(facts: DoctorFacts) -> Finding | None:
    """OMP_NUM_THREADS is no number, or more than there are cores."""
    value = facts.environ.get("OMP_NUM_THREADS")
    if value is None:
        return None
    first = value.split(",")[0].strip()  # one number for each level of nesting; the first counts here
    threads = int(first) if first.isdigit() else 0
    if 0 < threads <= facts.host.usable_cores:
        return None
    if threads:
        what = f"OMP_NUM_THREADS={value}, and this process may use {facts.host.usable_cores} cores."
        why = "Threads that outnumber the cores wait for each other, in every process."
    else:
        what = f"OMP_NUM_THREADS={value!r} is not a positive number."
        why = "OpenMP ignores it and takes every core, in each of the processes."
    fix = "Unset it ('hvdkit launch' sets it for each process), or set it to the cores of one process."
    return Finding("warning", what, why, fix)


def small_shared_memory(facts: DoctorFacts) -> Finding | None:
    """Too little /dev/shm for the processes of one machine to talk through."""
    free = facts.host.shm_bytes
    if free is not None and free >= _SHM_NEEDED:
        return None
    size = "There is no /dev/shm." if free is None else f"/dev/shm has {free / 2**20:.0f} MiB free."  # noqa: S108
    return Finding(
        "warning",
        size,
        "MPI, NCCL and the workers of PyTorch's DataLoader keep shared memory there; they fail or die with SIGBUS "
        "when it is full.",
        "In a container, start it with more ('docker run --shm-size=1g', or --ipc=host); else remove what fills it.",
    )


def no_compiler(facts: DoctorFacts) -> Finding | None:
    """No C++ compiler; only a new build of Horovod needs one."""
    if facts.host.compiler:
        return None
    return Finding(
        "info",
        "There is no C++ compiler on PATH.",
        "'hvdkit install' needs one to build Horovod; from its cache it needs none, nor does training.",
        "Install g++ (Debian: 'apt install g++', conda: 'conda install gxx'), or load the cluster's module.",
    )


def fusion_threshold(facts: DoctorFacts) -> Finding | None:
    """HOROVOD_FUSION_THRESHOLD is in bytes; a small number is one of MB."""
    value = facts.environ.get("HOROVOD_FUSION_THRESHOLD")
    if value is None or value.strip() == "0":
        return None
    number = value.strip()
    if number.isdigit() and int(number) >= _FUSION_MINIMUM:
        return None
    in_bytes = int(number) * 2**20 if number.isdigit() else 64 * 2**20
    return Finding(
        "warning",
        f"HOROVOD_FUSION_THRESHOLD={value}: it is a number of bytes, and this one fuses no tensors.",
        "Every gradient is reduced on its own, which can be many times slower. The option --fusion-threshold-mb of "
        "horovodrun takes MB, the variable takes bytes.",
        f"HOROVOD_FUSION_THRESHOLD={in_bytes}, or unset it (the default is 128 MiB).",
    )


def unbuilt_choice(facts: DoctorFacts, variable: str) -> Finding | None:
    """A variable asks for a controller or for operations that this Horovod does not have."""
    value = facts.environ.get(variable)
    if value is None or not facts.loaded_extensions():
        return None
    allowed = CONTROLLERS if variable == "HOROVOD_CONTROLLER" else (*CONTROLLERS, "CCL")
    available = [name for name in allowed if facts.built_with(name)]
    if value.lower() in {name.lower() for name in available}:
        return None
    return Finding(
        "error",
        f"{variable}={value}, and this Horovod has {' and '.join(available)}.",
        "hvd.init() or the first allreduce ends the process.",
        f"Unset {variable}, or set it to {' or '.join(name.lower() for name in available)}.",
    )


def timeline(facts: DoctorFacts) -> Finding | None:
    """HOROVOD_TIMELINE names a file that cannot be written."""
    if facts.timeline_problem is None:
        return None
    return Finding(
        "warning",
        f"HOROVOD_TIMELINE={facts.environ.get('HOROVOD_TIMELINE', '')} cannot be written: {facts.timeline_problem}.",
        "Horovod only logs that and goes on without a timeline.",
        "Make the directory, or unset HOROVOD_TIMELINE.",
    )
