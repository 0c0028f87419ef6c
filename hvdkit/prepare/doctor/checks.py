"""The table of checks: facts in, findings out, worst first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hvdkit.prepare.doctor import check_frameworks, check_horovod, check_host, check_mpi
from hvdkit.prepare.doctor.facts import CONTROLLERS, FRAMEWORKS, DoctorFacts
from hvdkit.prepare.doctor.finding import Finding, Found, worst_first

Check = Callable[[DoctorFacts], Finding | None]
"""Comes to a finding, or None when all is well."""


def _each(name: str, check: Callable[..., Finding | None], *more: str) -> dict[str, Check]:
    """A check of each framework, and of these packages."""
    return {f"{name}-{one}": partial(check, name=one) for one in (*FRAMEWORKS, *more)}


CHECKS: dict[str, Check] = {
    "python": check_frameworks.python_version,
    "no-framework": check_frameworks.no_framework,
    **_each("import", check_frameworks.import_fails, "keras", "jax"),
    **_each("two-versions", check_frameworks.two_versions, "keras"),
    "keras-backend": check_frameworks.keras_backend_missing,
    "legacy-keras": check_frameworks.legacy_keras,
    "horovod-missing": check_horovod.horovod_missing,
    "import-horovod": check_horovod.horovod_import_fails,
    "drift-python": check_horovod.python_drift,
    **_each("extension-missing", check_horovod.extension_missing),
    **_each("framework-gone", check_horovod.framework_gone),
    **_each("drift", check_horovod.drift),
    **_each("extension", check_horovod.extension_fails),
    **{
        f"run-{name}-{controller.lower()}": partial(check_horovod.run_fails, name=name, controller=controller)
        for name in FRAMEWORKS
        for controller in CONTROLLERS
    },
    "drift-mpi": check_mpi.mpi_drift,
    "record-unreadable": check_horovod.record_unreadable,
    "no-record": check_horovod.no_record,
    "horovod-on-keras-3": check_frameworks.horovod_on_keras3,
    "mpi4py-missing": check_mpi.mpi4py_missing,
    "import-mpi4py": check_mpi.mpi4py_import_fails,
    "run-mpi4py": check_mpi.mpi4py_run_fails,
    "two-mpis": check_mpi.mpi4py_uses_another_mpi,
    "mpirun": check_mpi.mpirun_of_another_mpi,
    "no-mpirun": check_mpi.no_mpirun,
    **_each("no-gpu-build", check_host.framework_without_gpu_support),
    **_each("hidden-gpus", check_host.devices_hidden),
    **_each("devices", check_host.devices_fail),
    **_each("no-nccl", check_host.horovod_without_nccl),
    "one-core": check_host.one_core,
    "omp-threads": check_host.omp_threads,
    "shared-memory": check_host.small_shared_memory,
    "compiler": check_host.no_compiler,
    "fusion-threshold": check_host.fusion_threshold,
    "controller": partial(check_host.unbuilt_choice, variable="HOROVOD_CONTROLLER"),
    "cpu-operations": partial(check_host.unbuilt_choice, variable="HOROVOD_CPU_OPERATIONS"),
    "timeline": check_host.timeline,
}
"""Name to check, in the order in which findings of one level are shown."""


def examine(facts: DoctorFacts) -> list[Found]:
    """What all checks find, errors first."""
    return worst_first((name, finding) for name, check in CHECKS.items() if (finding := check(facts)) is not None)
