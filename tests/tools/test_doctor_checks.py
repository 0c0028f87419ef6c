"""Each check of the doctor on facts made by hand: when it speaks, at which level, and that its fix is the right one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hvdkit.common.mpi_names import identify, same_family
from hvdkit.prepare.doctor.cli import examine
from hvdkit.prepare.doctor.facts import (
    Build,
    Devices,
    DoctorFacts,
    DoctorHost,
    Extension,
    Failure,
    MpiLauncher,
    MpiLibrary,
    Package,
)
from hvdkit.prepare.doctor.finding import LEVELS, Found

OPEN_MPI = MpiLibrary("/env/lib/libmpi.so.40", "Open MPI", "5.0.11")
MPICH = MpiLibrary("/usr/lib/libmpich.so.12", "MPICH", "4.2.0")
CRASH = Failure("signal", "killed by SIGSEGV")


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
        runs={"MPI": None, "Gloo": None},
    )
    return replace(plain, **changes)


RECORD = Build(
    source="hvdkit-build.json",
    frameworks={"torch": "2.13.0+cpu", "tensorflow": "2.21.0"},
    mpi_implementation="Open MPI",
    mpi_version="5.0.11",
    mpi_bin="bin",
    python="cp311",
    by_hvdkit=True,
)
SOUND = DoctorFacts(
    python="3.11.7",
    python_tag="cp311",
    prefix="/env",
    host=DoctorHost("Linux 6.1 x86_64", cores=8, affinity=8, shm_bytes=2**30, compiler="/usr/bin/g++"),
    packages={
        "torch": package("torch", "2.13.0+cpu"),
        "tensorflow": package("tensorflow", "2.21.0", distribution="tensorflow-cpu"),
        "keras": package("keras", "3.15.1"),
        "tf_keras": Package("tf_keras"),
        "jax": Package("jax"),
        "mpi4py": package("mpi4py", "4.1.2"),
        "horovod": package("horovod", "0.28.1"),
    },
    tensorflow_keras="2.21.0",
    keras_backend="tensorflow",
    devices={"torch": Devices(), "tensorflow": Devices()},
    extensions={"torch": extension("torch"), "tensorflow": extension("tensorflow")},
    builds=(RECORD, Build("metadata.json", {"torch": "2.13.0+cpu", "tensorflow": "2.21.0"})),
    mpi4py_mpi=OPEN_MPI,
    mpi_launchers=(MpiLauncher("/env/bin/mpirun", True, "Open MPI", "5.0.11"),),
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


def found(facts: DoctorFacts) -> dict[str, Found]:
    return {one.check: one for one in examine(facts)}


def only(facts: DoctorFacts, name: str) -> Found:
    """The one finding there is."""
    findings = found(facts)
    assert list(findings) == [name]
    return findings[name]


def test_a_sound_environment_has_no_finding() -> None:
    assert examine(SOUND) == []


def test_errors_come_first() -> None:
    facts = replace(without_package("mpi4py"), mpi4py_mpi=None, environ={"OMP_NUM_THREADS": "99"})
    facts = with_extension("torch", facts, loaded=False, failure=CRASH, built=(), runs={}, mpi=None)
    levels = [finding.level for finding in examine(facts)]
    assert levels == sorted(levels, key=LEVELS.index)
    assert set(levels) == set(LEVELS)


def test_every_finding_says_what_why_and_fix() -> None:
    damaged = replace(
        SOUND,
        python="3.14.0",
        environ={"HOROVOD_FUSION_THRESHOLD": "64", "HOROVOD_CONTROLLER": "ccl", "HOROVOD_TIMELINE": "x/y"},
        timeline_problem="there is no directory x",
        build_error="The record cannot be read.",
        host=DoctorHost("Linux", cores=8, affinity=1, gpus=("NVIDIA A100",)),
        mpi4py_mpi=MPICH,
        mpi_launchers=(),
    )
    findings = found(with_package("jax", damaged, present=True, failure=CRASH))
    assert len(findings) >= 10
    for finding in findings.values():
        assert all(text.strip().endswith(".") for text in (finding.what, finding.why, finding.fix)), finding


@pytest.mark.parametrize("version", ["3.10.4", "3.14.0", "4.0.0"])
def test_untested_python(version: str) -> None:
    assert only(replace(SOUND, python=version), "python").level == "warning"


@pytest.mark.parametrize("version", ["3.11.0", "3.12.9", "3.13.1"])
def test_tested_python(version: str) -> None:
    assert examine(replace(SOUND, python=version)) == []


@pytest.mark.parametrize(
    ("name", "level"), [("torch", "error"), ("tensorflow", "error"), ("keras", "error"), ("jax", "warning")]
)
def test_a_crashing_import(name: str, level: str) -> None:
    facts = with_package(name, present=True, version=None, failure=CRASH)
    finding = found(facts)[f"import-{name}"]
    assert finding.level == level
    assert "SIGSEGV" in finding.what


def test_a_package_from_outside_the_environment_points_at_pythonpath() -> None:
    facts = with_package("torch", location="/home/me/lib/torch", version=None, failure=CRASH)
    assert "/home/me/lib/torch" in found(facts)["import-torch"].fix
    assert "PYTHONPATH" in found(facts)["import-torch"].fix


def test_a_slow_import_gets_a_longer_limit() -> None:
    facts = with_package("torch", version=None, failure=Failure("timeout", "did not end within 60 s"))
    assert "--timeout 300" in found(facts)["import-torch"].fix


def test_the_fix_for_a_framework_reinstalls_the_package_that_pip_knows() -> None:
    facts = with_package("tensorflow", version=None, failure=CRASH)
    assert "pip install --force-reinstall tensorflow-cpu==2.21.0" in found(facts)["import-tensorflow"].fix


@pytest.mark.parametrize(
    ("built", "installed"),
    [
        ("2.13.0+cpu", "2.12.1+cpu"),
        ("2.13.0+cpu", "2.13.0+cu130"),
        ("2.13.0", "2.13.1"),
        ("2.13.0", "2.13.0rc1"),
    ],
)
def test_drift(built: str, installed: str) -> None:
    facts = with_package("torch", version=installed, distribution_version=installed)
    facts = replace(facts, builds=(replace(RECORD, frameworks={"torch": built, "tensorflow": "2.21.0"}),))
    finding = only(facts, "drift-torch")
    assert finding.level == "warning"
    assert "Drift" in finding.what
    assert built in finding.what
    assert installed in finding.what
    assert "hvdkit install --force" in finding.fix


@pytest.mark.parametrize(
    ("built", "module", "metadata"),
    [
        ("2.13.0+cpu", "2.13.0+cpu", "2.13.0+cpu"),
        ("2.13.0+cu130", "2.13.0+cu130", "2.13.0"),  # PyPI's PyTorch
        ("2.13.0", "2.13.0+cu130", "2.13.0"),
        ("2.21.0-rc1", "2.21.0-rc1", "2.21.0rc1"),  # TensorFlow's own spelling
    ],
)
def test_no_drift(built: str, module: str, metadata: str) -> None:
    facts = with_package("torch", version=module, distribution_version=metadata)
    builds = (replace(RECORD, frameworks={"torch": built, "tensorflow": "2.21.0"}),)
    assert examine(replace(facts, builds=builds)) == []


def test_horovods_own_metadata_tells_drift_when_there_is_no_record() -> None:
    facts = replace(SOUND, builds=(Build("metadata.json", {"tensorflow": "2.20.0"}),))
    findings = found(facts)
    assert "metadata.json" in findings["drift-tensorflow"].what
    assert findings["no-record"].level == "info"


def test_drift_that_breaks_is_one_error() -> None:
    facts = with_package("torch", version="2.12.0", distribution_version="2.12.0")
    facts = with_extension(
        "torch",
        facts,
        loaded=False,
        failure=Failure("raised", "OSError: undefined symbol"),
        built=(),
        runs={},
        mpi=None,
    )
    finding = only(facts, "drift-torch")
    assert finding.level == "error"
    assert "undefined symbol" in finding.why


def test_drift_of_python() -> None:
    gone = {"file": None, "other_files": ("/env/mpi_lib.cpython-310.so",), "loaded": False, "built": (), "runs": {}}
    facts = with_extension("tensorflow", with_extension("torch", **gone), **gone)
    findings = found(replace(facts, builds=(replace(RECORD, python="cp310"),)))
    assert "cp310" in findings["drift-python"].what
    assert "another Python" in findings["extension-missing-torch"].why


def test_an_undefined_symbol_without_a_version_change_is_called_drift() -> None:
    failure = Failure("raised", "OSError: mpi_lib.so: undefined symbol: _ZN3c10", "")
    facts = with_extension("torch", loaded=False, failure=failure, built=(), runs={}, mpi=None)
    finding = only(facts, "extension-torch")
    assert finding.level == "error"
    assert "Drift" in finding.why
    assert "hvdkit install --force" in finding.fix


@pytest.mark.parametrize(
    ("message", "fix"),
    [
        ("OSError: libmpi.so.40: cannot open shared object file", "MPI"),
        ("OSError: libnccl.so.2: cannot open shared object file", "NCCL"),
        ("ModuleNotFoundError: No module named 'psutil'", "pip install psutil"),
    ],
)
def test_what_an_extension_lacks_is_what_the_fix_brings(message: str, fix: str) -> None:
    facts = with_extension("torch", loaded=False, failure=Failure("raised", message), built=(), runs={}, mpi=None)
    assert fix in only(facts, "extension-torch").fix


def test_an_extension_for_one_framework_of_two_is_a_warning() -> None:
    facts = with_extension("tensorflow", file=None, loaded=False, built=(), runs={}, mpi=None)
    assert only(facts, "extension-missing-tensorflow").level == "warning"


def test_an_extension_for_the_only_framework_missing_is_an_error() -> None:
    facts = with_extension("torch", without_package("tensorflow"), file=None, loaded=False, built=(), runs={}, mpi=None)
    assert found(facts)["extension-missing-torch"].level == "error"


def test_a_framework_that_is_gone_is_no_error() -> None:
    facts = with_extension("tensorflow", without_package("tensorflow"), loaded=False, built=(), runs={}, mpi=None)
    assert only(facts, "framework-gone-tensorflow").level == "info"
    assert "2.21.0" in found(facts)["framework-gone-tensorflow"].fix


def test_mpi_that_does_not_start_is_an_error_though_gloo_works() -> None:
    facts = with_extension("torch", runs={"MPI": CRASH, "Gloo": None})
    assert only(facts, "run-torch-mpi").level == "error"


@pytest.mark.parametrize(("runs", "level"), [({"MPI": None}, "warning"), ({}, "error")])
def test_gloo_that_does_not_start_matters_without_mpi(runs: dict[str, None], level: str) -> None:
    facts = with_extension("torch", runs={**runs, "Gloo": CRASH})
    assert only(facts, "run-torch-gloo").level == level


def test_horovods_keras_api_on_keras_3() -> None:
    facts = replace(SOUND, tensorflow_keras="3.15.1")
    assert only(facts, "horovod-on-keras-3").level == "info"
    assert "hvdkit.keras" in found(facts)["horovod-on-keras-3"].fix
    assert examine(replace(facts, extensions={"torch": extension("torch")})) == []


@pytest.mark.parametrize(("value", "speaks"), [("1", True), ("True", True), ("0", False), ("", False)])
def test_legacy_keras_without_its_package(value: str, speaks: bool) -> None:
    failure = Failure("raised", "ImportError: Keras cannot be imported")
    facts = replace(
        SOUND, environ={"TF_USE_LEGACY_KERAS": value}, tensorflow_keras=None, tensorflow_keras_failure=failure
    )
    assert ("legacy-keras" in found(facts)) is speaks
    if speaks:
        assert "pip install tf_keras" in found(facts)["legacy-keras"].fix
        knocked_on = with_extension("tensorflow", facts, loaded=False, failure=failure, built=(), runs={}, mpi=None)
        assert only(knocked_on, "legacy-keras").level == "error"


def test_two_implementations_of_mpi_are_an_error_that_explains_rank_0() -> None:
    finding = only(replace(SOUND, mpi4py_mpi=MPICH), "two-mpis")
    assert finding.level == "error"
    assert "every process is rank 0" in finding.why
    assert "Open MPI 5.0.11" in finding.what
    assert "MPICH 4.2.0" in finding.what
    assert "mpi4py" in finding.fix


def test_two_versions_of_one_mpi_are_a_warning() -> None:
    other = MpiLibrary("/usr/lib/libmpi.so.40", "Open MPI", "4.1.4")
    assert only(replace(SOUND, mpi4py_mpi=other), "two-mpis").level == "warning"


def test_two_copies_of_the_same_mpi_are_fine() -> None:
    assert examine(replace(SOUND, mpi4py_mpi=replace(OPEN_MPI, path="/usr/lib/libmpi.so.40"))) == []


def test_mpirun_of_another_mpi_with_the_right_one_beside_it() -> None:
    wrong = MpiLauncher("/usr/bin/mpirun", True, "MPICH", "4.2.0")
    right = MpiLauncher("/env/bin/mpirun", False, "Open MPI", "5.0.11")
    finding = only(replace(SOUND, mpi_launchers=(wrong, right)), "mpirun")
    assert finding.level == "warning"  # 'hvdkit launch' takes the right one
    assert "every process is rank 0" in finding.why
    assert "/env/bin/mpirun" in finding.fix


def test_mpirun_of_another_mpi_alone_is_an_error() -> None:
    wrong = MpiLauncher("/usr/bin/mpirun", True, "MPICH", "4.2.0")
    finding = only(replace(SOUND, mpi_launchers=(wrong,)), "mpirun")
    assert finding.level == "error"
    assert "/usr/bin/mpirun" in finding.fix
    assert only(replace(with_host(schedulers=("srun",)), mpi_launchers=(wrong,)), "mpirun").level == "warning"
    assert only(replace(SOUND, mpi_launchers=(replace(wrong, first_on_path=False),)), "mpirun").level == "error"


def test_mpirun_of_another_major_version_is_a_warning() -> None:
    old = MpiLauncher("/usr/bin/mpirun", True, "Open MPI", "4.1.4")
    assert only(replace(SOUND, mpi_launchers=(old,)), "mpirun").level == "warning"


@pytest.mark.parametrize(
    "launcher",
    [
        MpiLauncher("/env/bin/mpirun", False, "Open MPI", "5.0.11"),  # an environment that is not activated
        MpiLauncher("/opt/pals/bin/mpiexec", True, "", ""),  # unknown: nothing can be said
        MpiLauncher("/usr/bin/mpirun", True, "Open MPI", "5.0.3"),
    ],
)
def test_launchers_that_are_fine(launcher: MpiLauncher) -> None:
    assert examine(replace(SOUND, mpi_launchers=(launcher,))) == []


def test_mpirun_is_compared_with_mpi4py_where_horovod_has_no_mpi() -> None:
    facts = with_extension("torch", built=("Gloo",), mpi=None, runs={"Gloo": None})
    facts = with_extension("tensorflow", facts, built=("Gloo",), mpi=None, runs={"Gloo": None})
    facts = replace(facts, mpi4py_mpi=MPICH)
    assert "mpi4py" in only(facts, "mpirun").what


def test_no_mpirun_at_all() -> None:
    assert only(replace(SOUND, mpi_launchers=()), "no-mpirun").level == "warning"  # Gloo is there
    assert examine(replace(with_host(schedulers=("srun",)), mpi_launchers=())) == []


def test_drift_of_mpi() -> None:
    facts = replace(SOUND, builds=(replace(RECORD, mpi_version="4.1.4"),))
    assert "4.1.4" in only(facts, "drift-mpi").what
    assert examine(replace(SOUND, builds=(replace(RECORD, mpi_version="5.0.2"),))) == []
    facts = replace(SOUND, builds=(replace(RECORD, mpi_implementation="MPICH", mpi_version="5.0.2"),))
    assert only(facts, "drift-mpi").level == "warning"
    assert examine(replace(SOUND, builds=(replace(RECORD, mpi_implementation="unknown MPI", mpi_version=""),))) == []


def test_mpi4py_missing_broken_or_stopped() -> None:
    assert only(replace(without_package("mpi4py"), mpi4py_mpi=None), "mpi4py-missing").level == "info"
    broken = with_package("mpi4py", version=None, failure=Failure("raised", "cannot load MPI library"))
    assert only(replace(broken, mpi4py_mpi=None), "import-mpi4py").level == "warning"
    stopped = replace(SOUND, mpi4py_run=CRASH)
    assert only(stopped, "run-mpi4py").level == "warning"
    assert "run-mpi4py" not in found(with_extension("torch", stopped, runs={"MPI": CRASH, "Gloo": None}))


def test_a_gpu_that_the_framework_cannot_use() -> None:
    facts = replace(with_host(gpus=("NVIDIA H200",)), devices={"torch": Devices()})
    finding = only(facts, "no-gpu-build-torch")
    assert finding.level == "warning"
    assert "NVIDIA H200" in finding.what


def test_gpus_without_nccl() -> None:
    gpus = ("NVIDIA H200", "NVIDIA H200")
    facts = replace(with_host(gpus=gpus), devices={"torch": Devices("CUDA 13.0", gpus)})
    finding = only(facts, "no-nccl-torch")
    assert "2 GPUs (NVIDIA H200)" in finding.what
    assert "--gpu nccl" in finding.fix
    assert examine(with_extension("torch", facts, built=("MPI", "Gloo", "NCCL", "CUDA"))) == []


def test_gpus_that_are_hidden_on_purpose_are_a_note() -> None:
    facts = replace(with_host(gpus=("NVIDIA H200",)), devices={"torch": Devices("CUDA 13.0")})
    assert only(facts, "hidden-gpus-torch").level == "warning"
    finding = only(replace(facts, environ={"CUDA_VISIBLE_DEVICES": ""}), "hidden-gpus-torch")
    assert finding.level == "info"
    assert "CUDA_VISIBLE_DEVICES" in finding.fix


def test_a_gpu_build_on_a_machine_without_gpu_is_fine() -> None:
    assert examine(replace(SOUND, devices={"torch": Devices("CUDA 13.0")})) == []


def test_one_core_of_many() -> None:
    assert "affinity" in only(with_host(affinity=1), "one-core").what
    assert "quota of 1.5" in only(with_host(cpu_quota=1.5), "one-core").what
    assert examine(with_host(cores=1, affinity=1)) == []
    assert examine(with_host(cpu_quota=2.0)) == []


@pytest.mark.parametrize("value", ["9", "0", "-1", "many", "", "16,2"])
def test_omp_threads_that_do_not_fit(value: str) -> None:
    assert only(with_environ(OMP_NUM_THREADS=value), "omp-threads").level == "warning"


@pytest.mark.parametrize("value", ["1", "8", "4,2"])
def test_omp_threads_that_fit(value: str) -> None:
    assert examine(with_environ(OMP_NUM_THREADS=value)) == []


@pytest.mark.parametrize("free", [None, 0, 2**20])
def test_small_shared_memory(free: int | None) -> None:
    assert only(with_host(shm_bytes=free), "shared-memory").level == "warning"


def test_no_compiler_is_a_note() -> None:
    assert only(with_host(compiler=None), "compiler").level == "info"


@pytest.mark.parametrize(("value", "fix"), [("64", "67108864"), ("64MB", "67108864"), ("1", "1048576")])
def test_a_fusion_threshold_in_megabytes(value: str, fix: str) -> None:
    assert (
        f"HOROVOD_FUSION_THRESHOLD={fix}" in only(with_environ(HOROVOD_FUSION_THRESHOLD=value), "fusion-threshold").fix
    )


@pytest.mark.parametrize("value", ["0", "1024", "67108864"])
def test_a_fusion_threshold_in_bytes(value: str) -> None:
    assert examine(with_environ(HOROVOD_FUSION_THRESHOLD=value)) == []


@pytest.mark.parametrize(
    ("variable", "value", "name"),
    [
        ("HOROVOD_CONTROLLER", "nccl", "controller"),
        ("HOROVOD_CONTROLLER", "ccl", "controller"),
        ("HOROVOD_CPU_OPERATIONS", "CCL", "cpu-operations"),
    ],
)
def test_a_choice_that_was_not_built(variable: str, value: str, name: str) -> None:
    assert only(with_environ(**{variable: value}), name).level == "error"


@pytest.mark.parametrize("value", ["mpi", "MPI", "gloo", "Gloo"])
def test_a_choice_that_was_built(value: str) -> None:
    assert examine(with_environ(HOROVOD_CONTROLLER=value, HOROVOD_CPU_OPERATIONS=value)) == []


def test_a_timeline_that_cannot_be_written() -> None:
    facts = replace(with_environ(HOROVOD_TIMELINE="/nowhere/t.json"), timeline_problem="there is no directory /nowhere")
    assert "/nowhere" in only(facts, "timeline").what


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
    assert identify(text) == expected


def test_families_of_mpi() -> None:
    assert same_family("Cray MPICH", "MPICH")
    assert same_family("", "MPICH")
    assert same_family("unknown MPI", "Open MPI")
    assert not same_family("Open MPI", "Intel MPI")


def test_a_launch_that_fails_is_an_error_whatever_else_works():
    found = only(replace(SOUND, launch_problem="mpirun exited with status 213 before any rank started."), "launch")
    assert found.level == "error"
    assert found.what == "A training of 2 ranks fails: mpirun exited with status 213 before any rank started."
