"""The table of checks: facts in, findings out, worst first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from hvdkit.prepare.doctor import check_frameworks, check_horovod, check_host, check_mpi
from hvdkit.prepare.doctor.facts import FRAMEWORKS, DoctorFacts
from hvdkit.prepare.doctor.finding import Found, worst_first

Check = Callable[[DoctorFacts], Iterator[Found]]


def _each(check: Callable[..., Iterator[Found]], *more: str) -> list[Check]:
    """A check of each framework, and of these packages."""
    return [partial(check, name=name) for name in (*FRAMEWORKS, *more)]


CHECKS: tuple[Check, ...] = (
    check_frameworks.something_to_train_with,
    *_each(check_frameworks.import_fails, "keras", "jax"),
    *_each(check_frameworks.two_versions, "keras"),
    check_frameworks.keras,
    check_horovod.installed,
    *_each(check_horovod.extension_missing),
    *_each(check_horovod.framework_gone),
    *_each(check_horovod.drift),
    *_each(check_horovod.extension_fails),
    *_each(check_horovod.run_fails),
    check_mpi.drift,
    check_horovod.record,
    check_frameworks.horovod_on_keras3,
    check_mpi.mpi4py,
    check_mpi.two_mpis,
    check_mpi.mpirun,
    *_each(check_host.gpus),
    *_each(check_host.no_nccl),
    check_host.cores,
    check_host.machine,
    check_host.fusion_threshold,
    check_host.unbuilt_choices,
    check_host.timeline,
)
"""The checks, in the order in which findings of one level are shown."""


def examine(facts: DoctorFacts) -> list[Found]:
    """What all checks find, errors first."""
    return worst_first(finding for check in CHECKS for finding in check(facts))
