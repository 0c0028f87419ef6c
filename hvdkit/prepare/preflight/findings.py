"""Compares the ranks' reports: what is wrong with the job, before it trains."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

from hvdkit.prepare.doctor.finding import Found, error, warning, worst_first
from hvdkit.prepare.preflight.report import PACKAGES, Place, RankReport
from hvdkit.steps.ranks import name_ranks

ENOUGH_DISK = 2**30
"""Bytes below which a checkpoint may not fit."""
CLOCK_SKEW_S = 1.0
"""Seconds beyond which logs and timelines of two hosts cannot be read side by side."""
_MUST_BE_EQUAL = ("Python", *PACKAGES)

Reports = Sequence[RankReport]
Key = TypeVar("Key", bound=Hashable)


def examine(reports: Reports) -> list[Found]:
    """What all checks find, errors first.

    Args:
        reports: at least one, by rank.
    """
    return worst_first(finding for check in CHECKS for finding in check(reports))


def _ranks(reports: Reports) -> str:
    return name_ranks(sorted(report.rank for report in reports))


def _environment(reports: Reports) -> Iterator[Found]:
    for report in (report for report in reports if report.launched.error):
        yield error(
            "environment",
            f"A process on {report.host} cannot tell its rank: {report.launched.error}",
            "Without a rank it might take itself for the root, and write its checkpoints.",
            "Pass the launcher's whole environment on.",
        )


def _horovod(reports: Reports) -> Iterator[Found]:
    failed = [report for report in reports if report.horovod.size is None]
    if failed:
        yield error(
            "horovod",
            f"Horovod does not start on {_ranks(failed)}: {failed[0].horovod.error}",
            "No rank of the job could train.",
            f"Run `hvdkit doctor` on {failed[0].host}, in the environment of the job.",
        )


def _alone(reports: Reports) -> Iterator[Found]:
    alone = [report for report in reports if report.size > 1 and report.horovod.size == 1]
    if alone:
        one = alone[0]
        yield error(
            "singleton",
            f"{one.launcher} started {one.size} ranks, but Horovod over {one.library} sees rank 0 of 1 on "
            f"{_ranks(alone)}.",
            "Every process would train a model of its own and write the same checkpoints (singleton MPI).",
            f"Start the job with the mpirun of {one.library} or with `hvdkit launch`, or build Horovod with the "
            "launcher's MPI: `hvdkit install --force`.",
        )


def _places(reports: Reports) -> Iterator[Found]:
    """Ranks that Horovod or mpi4py numbers otherwise than the launcher."""

    def elsewhere(report: RankReport, place: Place) -> bool:
        return place.size not in (None, 1) and (place.rank, place.size) != (report.rank, report.size)

    moved = [report for report in reports if elsewhere(report, report.horovod)]
    if moved:
        one = moved[0]
        yield error(
            "places",
            f"{one.launcher} started rank {one.rank} of {one.size}, which Horovod sees as rank {one.horovod.rank} of "
            f"{one.horovod.size}.",
            "Shards, checkpoints and logs would belong to another rank than the scheduler's.",
            "Two launchers are nested, or variables of an outer job were inherited: unset them.",
        )
    apart = [
        report
        for report in reports
        if report.mpi.size is not None and report.horovod.size is not None and report.mpi != report.horovod
    ]
    if apart:
        one = apart[0]
        yield warning(
            "places",
            f"mpi4py sees rank {one.mpi.rank} of {one.mpi.size}, Horovod rank {one.horovod.rank} of "
            f"{one.horovod.size} ({_ranks(apart)}).",
            "They use two MPI libraries; what a script does with mpi4py does not reach the other ranks.",
            "Build mpi4py with the MPI of Horovod: `pip install --force-reinstall --no-binary mpi4py mpi4py`.",
        )


def _missing(reports: Reports) -> Iterator[Found]:
    size = max(report.size for report in reports)
    absent = sorted(set(range(size)) - {report.rank for report in reports})
    if absent and not any(report.horovod.size == 1 for report in reports):
        yield error(
            "missing-ranks",
            f"There is no report from {name_ranks(absent)} of {size}.",
            "They did not start, or cannot be reached from the others.",
            "Look for their errors above; on several hosts check that each has this Python environment.",
        )


def _grouped(reports: Reports, keys: Iterable[Key]) -> dict[Key, list[RankReport]]:
    groups: dict[Key, list[RankReport]] = {}
    for key, report in zip(keys, reports, strict=True):
        groups.setdefault(key, []).append(report)
    return groups


def _devices(reports: Reports) -> Iterator[Found]:
    """Ranks that share a GPU, have none of their own, or see none where others do."""
    for host, here in _grouped(reports, (report.host for report in reports)).items():
        for device, sharing in _grouped(here, (report.device for report in here)).items():
            if device is not None and len(sharing) > 1:
                yield error(
                    "gpus",
                    f"{_ranks(sharing)} on {host} would use the same GPU, {device}.",
                    "They would take each other's memory and time, and NCCL refuses two ranks on one GPU.",
                    "Show each rank a GPU of its own (--gpus-per-task=1, --gpu-bind), or all of them to each rank.",
                )
        without = [report for report in here if report.devices and report.device is None]
        if without:
            yield error(
                "gpus",
                f"{_ranks(without)} on {host} have no GPU of their own: {len(without[0].devices)} visible for "
                f"{len(here)} ranks.",
                "Step 2, pin_device, would refuse to start them.",
                f"Start at most {len(without[0].devices)} ranks on a host (--ppn).",
            )
    counts = {len(report.devices) > 0 for report in reports}
    if len(counts) > 1:
        blind = [report for report in reports if not report.devices]
        yield error(
            "gpus",
            f"{_ranks(blind)} see no GPU, the other ranks do.",
            "They would train on the CPU and every step would wait for them.",
            "Ask the scheduler for GPUs on every node, and check CUDA_VISIBLE_DEVICES and the driver there.",
        )


def _versions(reports: Reports) -> Iterator[Found]:
    """Packages that some ranks lack, or have in another version."""
    for name in _MUST_BE_EQUAL:
        by_version = _grouped(reports, (report.versions.get(name) for report in reports))
        if len(by_version) == 1:
            continue
        absent = by_version.pop(None, [])
        if absent:
            yield error(
                "versions",
                f"{name} is missing on {_ranks(absent)} ({', '.join(sorted({report.host for report in absent}))}).",
                "These ranks would fail at their first import, and the others wait for them.",
                "Use the same environment on every host: a shared file system, or install it there too.",
            )
        if len(by_version) > 1:
            shown = "; ".join(f"{version} on {_ranks(those)}" for version, those in by_version.items())
            yield error(
                "versions",
                f"{name} is not the same on all ranks: {shown}.",
                "Ranks with different versions may compute different gradients, or not understand each other.",
                "Use the same environment on every host.",
            )


def _cores(reports: Reports) -> Iterator[Found]:
    for host, here in _grouped(reports, (report.host for report in reports)).items():
        usable = {core for report in here for core in report.cores}
        threads = sum(report.threads for report in here)
        if len(here) > len(usable):
            yield warning(
                "cores",
                f"{len(here)} ranks share {len(usable)} cores on {host}.",
                "They take turns: times measure contention, not scaling.",
                "Start fewer ranks on a host (--ppn), or ask for more cores.",
            )
        elif threads > len(usable):
            yield warning(
                "cores",
                f"{len(here)} ranks on {host} would run {threads} threads on {len(usable)} cores.",
                "Threads that wait for a core slow every rank down.",
                f"Set OMP_NUM_THREADS={max(1, len(usable) // len(here))} (hvdkit launch --threads).",
            )


def _disk(reports: Reports) -> Iterator[Found]:
    for host, here in _grouped(reports, (report.host for report in reports)).items():
        least: dict[str, int] = {}
        for report in here:
            for directory, free in report.free_bytes.items():
                least[directory] = min(free, least.get(directory, free))
        for directory, free in least.items():
            if free < ENOUGH_DISK:
                yield warning(
                    "disk",
                    f"{directory} on {host} has {free / 2**20:.0f} MiB left.",
                    "Checkpoints, logs and shared memory files may not fit.",
                    "Free some space, or work in another directory.",
                )


def _clocks(reports: Reports) -> Iterator[Found]:
    clocks = [report.clock for report in reports if report.clock]
    if clocks and max(clocks) - min(clocks) > CLOCK_SKEW_S:
        first, last = (choose(reports, key=lambda report: report.clock) for choose in (min, max))
        yield warning(
            "clocks",
            f"The clocks of {first.host} and {last.host} are {last.clock - first.clock:.1f} s apart.",
            "Times in logs, timelines and checkpoints of two hosts cannot be compared.",
            "Have the hosts' clocks set (chrony, ntpd).",
        )


CHECKS: tuple[Callable[[Reports], Iterator[Found]], ...] = (
    _environment, _horovod, _alone, _places, _missing, _devices, _versions, _cores, _disk, _clocks,
)  # fmt: skip
"""The checks, in the order in which findings of one level are shown."""
