"""The table of checks: facts in, findings out, worst first."""

from __future__ import annotations

from functools import partial

from hvdkit.prepare.doctor import check_frameworks, check_horovod, check_host, check_mpi
from hvdkit.prepare.doctor.facts import CONTROLLERS, FRAMEWORKS, Facts
from hvdkit.prepare.doctor.finding import LEVELS, Check, Finding

CHECKS: tuple[Check, ...] = (
    Check("python", check_frameworks.python_version),
    Check("no-framework", check_frameworks.no_framework),
    *(
        Check(f"import-{name}", partial(check_frameworks.import_fails, name=name))
        for name in (*FRAMEWORKS, "keras", "jax")
    ),
    *(
        Check(f"two-versions-{name}", partial(check_frameworks.two_versions, name=name))
        for name in (*FRAMEWORKS, "keras")
    ),
    Check("keras-backend", check_frameworks.keras_backend_missing),
    Check("legacy-keras", check_frameworks.legacy_keras),
    Check("horovod-missing", check_horovod.horovod_missing),
    Check("import-horovod", check_horovod.horovod_import_fails),
    Check("drift-python", check_horovod.python_drift),
    *(Check(f"extension-missing-{name}", partial(check_horovod.extension_missing, name=name)) for name in FRAMEWORKS),
    *(Check(f"framework-gone-{name}", partial(check_horovod.framework_gone, name=name)) for name in FRAMEWORKS),
    *(Check(f"drift-{name}", partial(check_horovod.drift, name=name)) for name in FRAMEWORKS),
    *(Check(f"extension-{name}", partial(check_horovod.extension_fails, name=name)) for name in FRAMEWORKS),
    *(
        Check(f"run-{name}-{controller.lower()}", partial(check_horovod.run_fails, name=name, controller=controller))
        for name in FRAMEWORKS
        for controller in CONTROLLERS
    ),
    Check("drift-mpi", check_mpi.mpi_drift),
    Check("record-unreadable", check_horovod.record_unreadable),
    Check("no-record", check_horovod.no_record),
    Check("horovod-on-keras-3", check_frameworks.horovod_on_keras3),
    Check("mpi4py-missing", check_mpi.mpi4py_missing),
    Check("import-mpi4py", check_mpi.mpi4py_import_fails),
    Check("run-mpi4py", check_mpi.mpi4py_run_fails),
    Check("two-mpis", check_mpi.mpi4py_uses_another_mpi),
    Check("mpirun", check_mpi.mpirun_of_another_mpi),
    Check("no-mpirun", check_mpi.no_mpirun),
    *(
        Check(f"no-gpu-build-{name}", partial(check_host.framework_without_gpu_support, name=name))
        for name in FRAMEWORKS
    ),
    *(Check(f"hidden-gpus-{name}", partial(check_host.devices_hidden, name=name)) for name in FRAMEWORKS),
    *(Check(f"devices-{name}", partial(check_host.devices_fail, name=name)) for name in FRAMEWORKS),
    *(Check(f"no-nccl-{name}", partial(check_host.horovod_without_nccl, name=name)) for name in FRAMEWORKS),
    Check("one-core", check_host.one_core),
    Check("omp-threads", check_host.omp_threads),
    Check("shared-memory", check_host.small_shared_memory),
    Check("compiler", check_host.no_compiler),
    Check("fusion-threshold", check_host.fusion_threshold),
    Check("controller", partial(check_host.unbuilt_choice, variable="HOROVOD_CONTROLLER")),
    Check("cpu-operations", partial(check_host.unbuilt_choice, variable="HOROVOD_CPU_OPERATIONS")),
    Check("timeline", check_host.timeline),
)


def examine(facts: Facts) -> list[tuple[str, Finding]]:
    """Findings with the names of their checks: errors, then warnings, then the rest."""
    found = [(check.name, finding) for check in CHECKS if (finding := check.function(facts)) is not None]
    return sorted(found, key=lambda pair: LEVELS.index(pair[1].level))
