"""Each check of the doctor on facts made by hand: when it speaks, at which level, and that its fix is the right one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from hvdkit.common.programs import identify_mpi, same_mpi_family
from hvdkit.prepare.doctor.checks import CHECKS
from hvdkit.prepare.doctor.facts import Devices, DoctorFacts, Extension, Failure, Package, TwoRanks
from hvdkit.prepare.doctor.facts import Tested as Said
from hvdkit.prepare.doctor.finding import LEVELS, Found, examine
from hvdkit.prepare.doctor.host import DoctorHost, MpiLauncher, MpiLibrary
from hvdkit.prepare.install.record import BuildRecord, MpiRecord

OPEN_MPI = MpiLibrary("/env/lib/libmpi.so.40", "Open MPI", "5.0.11")
MPICH = MpiLibrary("/usr/lib/libmpich.so.12", "MPICH", "4.2.0")
CRASH = Failure("signal", "killed by SIGSEGV")
TRAINS = TwoRanks((Said("torch allreduce", True, "1 + 2 = 3"), Said("torch training", True, "same")), "MPI")
NOT_LOADED: dict[str, Any] = {"loaded": False, "built": (), "mpi": None}


def package(name: str, version: str, **changes: Any) -> Package:
    plain = Package(
        name=name,
        present=True,
        location=f"/env/lib/{name}",
        distribution=name,
        distribution_version=version,
        version=version,
    )
    return replace(plain, **changes)


def extension(framework: str, **changes: Any) -> Extension:
    plain = Extension(
        framework=framework,
        file=f"/env/horovod/{framework}/mpi_lib.so",
        loaded=True,
        built=("MPI", "Gloo"),
        mpi=OPEN_MPI,
    )
    return replace(plain, **changes)


RECORD = BuildRecord(
    horovod="0.28.1",
    python="cp311",
    torch="2.13.0+cpu",
    tensorflow="2.21.0",
    mpi=MpiRecord("Open MPI", "5.0.11", "bin", wheel=True),
    gloo=True,
    gpu="none",
    compiler="GCC 12",
    adjustments=(),
    key="0",
)
SOUND = DoctorFacts(
    python="3.11.7",
    prefix="/env",
    host=DoctorHost("Linux 6.1 x86_64", cores=8, affinity=8, shm_bytes=2**30),
    packages={
        "torch": package("torch", "2.13.0+cpu"),
        "tensorflow": package("tensorflow", "2.21.0", distribution="tensorflow-cpu"),
        "keras": package("keras", "3.15.1"),
        "mpi4py": package("mpi4py", "4.1.2"),
        "horovod": package("horovod", "0.28.1"),
    },
    tensorflow_keras="2.21.0",
    devices={"torch": Devices(), "tensorflow": Devices()},
    extensions={"torch": extension("torch"), "tensorflow": extension("tensorflow")},
    record=RECORD,
    mpi4py_mpi=OPEN_MPI,
    mpi_launchers=(MpiLauncher("/env/bin/mpirun", "Open MPI", "5.0.11", first_on_path=True),),
    trained={"torch": TRAINS, "tensorflow": TRAINS},
)


def with_package(name: str, facts: DoctorFacts = SOUND, **changes: Any) -> DoctorFacts:
    changed = replace(facts.packages[name], **changes)
    return replace(facts, packages={**facts.packages, name: changed})


def without_package(name: str, facts: DoctorFacts = SOUND) -> DoctorFacts:
    return replace(facts, packages={**facts.packages, name: Package(name)})


def with_extension(framework: str, facts: DoctorFacts = SOUND, **changes: Any) -> DoctorFacts:
    changed = replace(facts.extensions[framework], **changes)
    return replace(facts, extensions={**facts.extensions, framework: changed})


def with_host(**changes: Any) -> DoctorFacts:
    return replace(SOUND, host=replace(SOUND.host, **changes))


def with_environ(**environ: str) -> DoctorFacts:
    return replace(SOUND, environ=environ)


def with_launchers(*launchers: MpiLauncher, **changes: Any) -> DoctorFacts:
    return replace(SOUND, mpi_launchers=launchers, **changes)


def built_for(
    facts: DoctorFacts = SOUND, torch: str = "2.13.0+cpu", mpi: str = "Open MPI", version: str = "5.0.11"
) -> DoctorFacts:
    """With a record of another build."""
    built = MpiRecord(mpi, version, "bin", wheel=True)
    return replace(facts, record=structs.replace(RECORD, torch=torch, mpi=built))


def not_loading(message: str, facts: DoctorFacts = SOUND) -> DoctorFacts:
    """Horovod's extension for PyTorch fails in this way."""
    trained = {"tensorflow": TRAINS}
    return replace(with_extension("torch", facts, failure=Failure("raised", message), **NOT_LOADED), trained=trained)


def not_training(why: str, facts: DoctorFacts = SOUND) -> DoctorFacts:
    """``hvdkit launch`` says this of 2 ranks in PyTorch."""
    failed = TwoRanks((Said("torch allreduce", False, f"{why}.", "'--timeout 600' if it is only slow; else look"),))
    return replace(facts, trained={**facts.trained, "torch": failed})


def found(facts: DoctorFacts) -> dict[str, Found]:
    return {one.check: one for one in examine(CHECKS, facts)}


FAILED = with_package("torch", version=None, failure=CRASH)
SLOW = with_package("torch", version=None, failure=Failure("timeout", "did not end within 60 s"))
NO_BACKEND = with_package("keras", version=None, failure=Failure("raised", "No module named 'jax'"))
TORCH_2_12 = with_package("torch", version="2.12.0", distribution_version="2.12.0")
GLOO_ALONE = with_extension("torch", built=("Gloo",), mpi=None)
GLOO_ALONE = replace(with_extension("tensorflow", GLOO_ALONE, built=("Gloo",), mpi=None), mpi4py_mpi=MPICH)
WRONG, RIGHT = MpiLauncher("/usr/bin/mpirun", "MPICH", "4.2.0", first_on_path=True), SOUND.mpi_launchers[0]
OLD = MpiLauncher("/usr/bin/mpirun", "Open MPI", "4.1.4", first_on_path=True)
GPU = with_host(gpus=("NVIDIA H200", "NVIDIA H200"))
CPU_BUILD, HIDDEN = (replace(GPU, devices={"torch": devices}) for devices in (Devices(), Devices("CUDA 13.0")))
SEEN = replace(GPU, devices={"torch": Devices("CUDA 13.0", GPU.host.gpus)})
UNANSWERED = replace(GPU, devices={"torch": Devices(failure=Failure("raised", "RuntimeError: no driver"))})

ONE_FINDING = [
    (FAILED, "import-torch", "error", "SIGSEGV"),
    (SLOW, "import-torch", "error", "--timeout 300"),
    (with_package("keras", version=None, failure=CRASH), "import-keras", "error", "SIGSEGV"),
    (NO_BACKEND, "import-keras", "warning", "KERAS_BACKEND"),
    (with_package("tensorflow", version=None, failure=CRASH), "import-tensorflow", "error", "reinstall tensorflow-cpu"),
    (built_for(torch="2.12.1+cpu"), "drift-torch", "warning", "PyTorch 2.13.0+cpu is installed, and Horovod was built"),
    (built_for(torch="2.13.0+cu130"), "drift-torch", "warning", "for PyTorch 2.13.0+cu130 (hvdkit-build.json)"),
    (built_for(torch="2.13.0rc1"), "drift-torch", "warning", "pip install torch==2.13.0rc1"),
    (not_loading("OSError: undefined symbol", TORCH_2_12), "drift-torch", "error", "fails: OSError: undefined symbol"),
    (not_training("no interface", TORCH_2_12), "drift-torch", "error", "training of 2 ranks fails: no interface."),
    (not_loading("OSError: mpi_lib.so: undefined symbol: _ZN3c10"), "extension-torch", "error", "Drift: "),
    (
        not_loading("libmpi.so.40: cannot open shared object file"),
        "extension-torch",
        "error",
        "Bring libmpi.so.40 back",
    ),
    (not_loading("ModuleNotFoundError: No module named 'psutil'"), "extension-torch", "error", "pip install psutil"),
    (with_extension("tensorflow", file=None, **NOT_LOADED), "extension-missing-tensorflow", "warning", "built without"),
    (not_training("mpirun exited with status 213"), "launch", "error", "2 ranks in PyTorch fails: mpirun exited with"),
    (replace(SOUND, tensorflow_keras="3.15.1"), "horovod-on-keras-3", "info", "hvdkit.keras"),
    (replace(SOUND, mpi4py_mpi=MPICH), "two-mpis", "warning", "Horovod uses Open MPI 5.0.11 (/env/lib/libmpi.so.40)"),
    (replace(SOUND, mpi4py_mpi=replace(OPEN_MPI, path="/x", version="4.1.4")), "two-mpis", "warning", "Open MPI 4.1.4"),
    (with_launchers(WRONG, replace(RIGHT, first_on_path=False)), "mpirun", "warning", "or with /env/bin/mpirun"),
    (with_launchers(WRONG), "mpirun", "warning", "the MPI of /usr/bin/mpirun"),
    (with_launchers(OLD), "mpirun", "warning", "Open MPI 4.1.4"),
    (GLOO_ALONE, "mpirun", "warning", "mpi4py uses MPICH"),
    (CPU_BUILD, "unseen-gpus-torch", "warning", "2.13.0+cpu (CPU) sees none of this machine's 2 GPUs (NVIDIA H200)"),
    (HIDDEN, "unseen-gpus-torch", "warning", "nvidia-smi"),
    (replace(HIDDEN, environ={"CUDA_VISIBLE_DEVICES": ""}), "unseen-gpus-torch", "info", "Unset CUDA_VISIBLE_DEVICES"),
    (UNANSWERED, "devices-torch", "warning", "cannot say which devices it sees: RuntimeError: no driver"),
    (SEEN, "no-nccl-torch", "warning", "--gpu nccl"),
    (with_host(affinity=1), "one-core", "warning", "affinity"),
    (with_host(cpu_quota=1.5), "one-core", "warning", "quota of 1.5"),
    *((with_environ(OMP_NUM_THREADS=text), "omp-threads", "warning", text) for text in ("9", "0", "many", "16,2")),
    (with_host(shm_bytes=None), "shared-memory", "warning", "There is no /dev/shm"),
    (with_host(shm_bytes=2**20), "shared-memory", "warning", "1 MiB"),
]


@pytest.mark.parametrize(("facts", "check", "level", "words"), ONE_FINDING)
def test_one_fault_is_one_finding(facts: DoctorFacts, check: str, level: str, words: str) -> None:
    (finding,) = examine(CHECKS, facts)
    assert (finding.check, finding.level) == (check, level)
    texts = (finding.what, finding.why, finding.fix)
    assert words in " ".join(texts)
    assert all(text.strip().endswith(".") for text in texts)


@pytest.mark.parametrize(
    "facts",
    [
        SOUND,
        # PyPI's PyTorch, and TensorFlow's own spelling
        built_for(with_package("torch", version="2.13.0+cu130", distribution_version="2.13.0"), "2.13.0+cu130"),
        built_for(with_package("torch", version="2.13.0+cu130", distribution_version="2.13.0"), "2.13.0"),
        built_for(with_package("torch", version="2.21.0-rc1", distribution_version="2.21.0rc1"), "2.21.0-rc1"),
        replace(SOUND, tensorflow_keras="3.15.1", extensions={"torch": extension("torch")}),
        replace(SOUND, mpi4py_mpi=replace(OPEN_MPI, path="/usr/lib/libmpi.so.40")),
        replace(SOUND, tensorflow_keras="3.15.1", record=structs.replace(RECORD, adjustments=("keras-3-optimizer",))),
        with_launchers(replace(RIGHT, first_on_path=False)),  # an environment that is not activated
        with_launchers(
            MpiLauncher("/opt/pals/bin/mpiexec", "", "", first_on_path=True)
        ),  # unknown: nothing can be said
        with_launchers(replace(RIGHT, version="5.0.3")),
        with_launchers(),
        with_extension("torch", SEEN, built=("MPI", "Gloo", "NCCL", "CUDA")),
        with_host(cores=1, affinity=1),
        with_host(cpu_quota=2.0),
        *(with_environ(OMP_NUM_THREADS=value) for value in ("1", "8", "4,2")),
    ],
)
def test_what_is_sound_has_no_finding(facts: DoctorFacts) -> None:
    assert examine(CHECKS, facts) == []


def test_errors_come_first() -> None:
    damaged = not_loading("OSError: no", replace(SOUND, mpi4py_mpi=MPICH, tensorflow_keras="3.15.1"))
    assert [finding.level for finding in examine(CHECKS, damaged)] == list(LEVELS)


def test_horovods_own_metadata_tells_drift_when_there_is_no_record() -> None:
    findings = found(replace(SOUND, record=None, metadata={"tensorflow": "2.20.0"}))
    assert "metadata.json" in findings["drift-tensorflow"].what


def test_a_launch_that_fails_in_both_frameworks_is_one_finding() -> None:
    failed = not_training("too few open files")
    (finding,) = examine(CHECKS, replace(failed, trained=dict.fromkeys(failed.trained, failed.trained["torch"])))
    assert finding.what == "A training of 2 ranks in PyTorch and TensorFlow fails: too few open files."
    assert finding.fix.startswith("'--timeout 600' if it is only slow; else look. 'hvdkit launch --explain")


def test_an_extension_for_the_only_framework_missing_is_an_error() -> None:
    facts = with_extension("torch", without_package("tensorflow"), file=None, **NOT_LOADED)
    assert found(facts)["extension-missing-torch"].level == "error"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Open MPI v5.0.11, package: Open MPI u@h Distribution, ident: 5.0.11", ("Open MPI", "5.0.11")),
        ("Open MPI v5.1.0rc1, package: x", ("Open MPI", "5.1.0rc1")),
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to x", ("Open MPI", "5.0.11")),
        ("mpiexec (OpenRTE) 4.1.4\n", ("Open MPI", "4.1.4")),
        ("MPICH Version:      4.2.0\nMPICH Release date: x", ("MPICH", "4.2.0")),
        ("HYDRA build details:\n    Version:                                 4.0\n", ("MPICH", "4.0")),
        ("MPI VERSION    : CRAY MPICH version 8.1.28.15 (ANL base 3.4a2)", ("Cray MPICH", "8.1.28.15")),
        ("Intel(R) MPI Library 2021.9 for Linux* OS", ("Intel MPI", "2021.9")),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 2", ("Intel MPI", "2021.11")),
        ("MVAPICH2 Version      :\t2.3.7\nMVAPICH2 Release date : x", ("MVAPICH", "2.3.7")),
        ("IBM Spectrum MPI Version 10.4.0.3", ("IBM Spectrum MPI", "10.4.0.3")),
        ("something else 1.0", ("", "")),
        ("", ("", "")),
    ],
)
def test_an_mpi_is_known_by_its_version_text(text: str, expected: tuple[str, str]) -> None:
    assert identify_mpi(text) == expected


def test_families_of_mpi() -> None:
    assert same_mpi_family("Cray MPICH", "MPICH")
    assert same_mpi_family("", "MPICH")
    assert same_mpi_family("unknown MPI", "Open MPI")
    assert not same_mpi_family("Open MPI", "Intel MPI")
