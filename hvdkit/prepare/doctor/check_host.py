"""Checks of the machine and of environment variables: accelerators, cores, memory, HOROVOD_*."""

from __future__ import annotations

from collections.abc import Iterator

from hvdkit.common.units import count_text
from hvdkit.prepare.doctor.facts import CONTROLLERS, FRAMEWORKS, Devices, DoctorFacts
from hvdkit.prepare.doctor.finding import Found, info, warning

_SHM_NEEDED = 64 * 2**20
_FUSION_MINIMUM = 1024  # bytes; less is a number of MB taken for bytes
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def gpus(facts: DoctorFacts, name: str) -> Iterator[Found]:
    """Accelerators that are there and that the framework does not see, or cannot be asked for."""
    devices, here = facts.devices.get(name), facts.host.gpus
    if devices and here and not devices.build and not devices.failure:
        yield warning(
            f"no-gpu-build-{name}",
            f"This machine has {_counted(here)}, and {FRAMEWORKS[name]} {facts.packages[name].installed_version} is a "
            "build without GPU support.",
            "Training runs on the CPU.",
            f"Install a build of {FRAMEWORKS[name]} for the GPU, then Horovod for it: 'hvdkit install --gpu nccl "
            "--force'.",
        )
    elif devices and here and devices.build and not devices.gpus:
        yield _hidden(facts, name, devices)
    elif devices and devices.failure and not (here and devices.build):
        yield warning(
            f"devices-{name}",
            f"{FRAMEWORKS[name]} cannot say which devices it sees: {devices.failure.message}.",
            "A script that chooses its device the usual way stops the same way.",
            f"Reinstall {FRAMEWORKS[name]}, or the GPU driver it was built for.",
        )


def _hidden(facts: DoctorFacts, name: str, devices: Devices) -> Found:
    """The build could use accelerators, and none is visible."""
    hiding = next((variable for variable in _VISIBLE if facts.environ.get(variable) in ("", "-1")), None)
    if hiding:
        reason, fix = f"{hiding}={facts.environ[hiding]!r} hides them all.", f"Unset {hiding}, if that is not meant."
    else:
        said = f": {devices.failure.message}" if devices.failure else ""
        reason = f"The driver may be too old for {devices.build}, or this process may not use the devices{said}."
        fix = "Compare the driver's version ('nvidia-smi', 'rocm-smi') with the framework's; in a container, pass the "
        fix += "devices through."
    return Found(
        f"hidden-gpus-{name}",
        "info" if hiding else "warning",
        f"{FRAMEWORKS[name]} ({devices.build}) sees none of this machine's {_counted(facts.host.gpus)}.",
        reason + " Training runs on the CPU.",
        fix,
    )


def no_nccl(facts: DoctorFacts, name: str) -> Iterator[Found]:
    """GPUs are visible and Horovod reduces through the host's memory."""
    devices, extension = facts.devices.get(name), facts.extensions.get(name)
    if devices and devices.gpus and extension and extension.loaded and "NCCL" not in extension.built:
        yield warning(
            f"no-nccl-{name}",
            f"{FRAMEWORKS[name]} sees {_counted(devices.gpus)}, and Horovod was built without NCCL.",
            "Every gradient is copied to the host's memory and back; training on several GPUs is slow.",
            "'hvdkit install --gpu nccl --force' (or --gpu mpi, if your MPI takes GPU memory).",
        )


def _counted(gpus: tuple[str, ...]) -> str:
    return f"{count_text(len(gpus), 'GPU')} ({', '.join(dict.fromkeys(gpus))})"


def cores(facts: DoctorFacts) -> Iterator[Found]:
    """One core of several for this process, or threads that outnumber the cores."""
    host = facts.host
    if host.usable_cores == 1 < host.cores:
        limit = "its CPU affinity" if host.affinity == 1 else f"a control group (quota of {host.cpu_quota:g} CPUs)"
        yield warning(
            "one-core",
            f"This process may use 1 of {host.cores} cores: {limit} says so.",
            "Horovod's background thread and the training thread take turns on it; a step can take twice as long.",
            "Start without binding to one core ('hvdkit launch' does; 'mpirun --bind-to none', 'srun "
            "--cpu-bind=none'), or ask the batch system for more cores for each process.",
        )
    value = facts.environ.get("OMP_NUM_THREADS", "1")
    first = value.split(",")[0].strip()  # one number for each level of nesting; the first counts here
    threads = int(first) if first.isdigit() else 0
    what = f"OMP_NUM_THREADS={value!r} is not a positive number."
    why = "OpenMP ignores it and takes every core, in each of the processes."
    if threads:
        what = f"OMP_NUM_THREADS={value}, and this process may use {host.usable_cores} cores."
        why = "Threads that outnumber the cores wait for each other, in every process."
    if not 0 < threads <= host.usable_cores:
        fix = "Unset it ('hvdkit launch' sets it for each process), or set it to the cores of one process."
        yield warning("omp-threads", what, why, fix)


def machine(facts: DoctorFacts) -> Iterator[Found]:
    """Shared memory for the processes to talk through, and a compiler for a new build of Horovod."""
    free = facts.host.shm_bytes
    if free is None or free < _SHM_NEEDED:
        yield warning(
            "shared-memory",
            "There is no /dev/shm." if free is None else f"/dev/shm has {free / 2**20:.0f} MiB free.",  # noqa: S108
            "MPI, NCCL and the workers of PyTorch's DataLoader keep shared memory there; they fail or die with SIGBUS "
            "when it is full.",
            "In a container, start it with more ('docker run --shm-size=1g', or --ipc=host); else remove what fills "
            "it.",
        )
    if not facts.host.compiler:
        yield info(
            "compiler",
            "There is no C++ compiler on PATH.",
            "'hvdkit install' needs one to build Horovod; from its cache it needs none, nor does training.",
            "Install g++ (Debian: 'apt install g++', conda: 'conda install gxx'), or load the cluster's module.",
        )


def fusion_threshold(facts: DoctorFacts) -> Iterator[Found]:
    """HOROVOD_FUSION_THRESHOLD is in bytes; a small number is one of MB."""
    value = facts.environ.get("HOROVOD_FUSION_THRESHOLD", "0")
    number = value.strip()
    if number != "0" and not (number.isdigit() and int(number) >= _FUSION_MINIMUM):
        in_bytes = int(number) * 2**20 if number.isdigit() else 64 * 2**20
        yield warning(
            "fusion-threshold",
            f"HOROVOD_FUSION_THRESHOLD={value}: it is a number of bytes, and this one fuses no tensors.",
            "Every gradient is reduced on its own, which can be many times slower. The option --fusion-threshold-mb of "
            "horovodrun takes MB, the variable takes bytes.",
            f"HOROVOD_FUSION_THRESHOLD={in_bytes}, or unset it (the default is 128 MiB).",
        )


def unbuilt_choices(facts: DoctorFacts) -> Iterator[Found]:
    """A variable asks for a controller or for operations that this Horovod does not have."""
    for check, allowed in (("controller", CONTROLLERS), ("cpu-operations", (*CONTROLLERS, "CCL"))):
        variable = f"HOROVOD_{check.replace('-', '_').upper()}"
        value, available = facts.environ.get(variable), [name for name in allowed if facts.built_with(name)]
        names = [name.lower() for name in available]
        if value is not None and facts.loaded_extensions() and value.lower() not in names:
            yield Found(
                check,
                "error",
                f"{variable}={value}, and this Horovod has {' and '.join(available)}.",
                "hvd.init() or the first allreduce ends the process.",
                f"Unset {variable}, or set it to {' or '.join(names)}.",
            )


def timeline(facts: DoctorFacts) -> Iterator[Found]:
    """HOROVOD_TIMELINE names a file that cannot be written."""
    if facts.timeline_problem is not None:
        yield warning(
            "timeline",
            f"HOROVOD_TIMELINE={facts.environ.get('HOROVOD_TIMELINE', '')} cannot be written: "
            f"{facts.timeline_problem}.",
            "Horovod only logs that and goes on without a timeline.",
            "Make the directory, or unset HOROVOD_TIMELINE.",
        )
