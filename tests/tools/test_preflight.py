"""A preflight's findings on reports made by hand, its JSON, and what CUDA_VISIBLE_DEVICES leaves."""

import json
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from hvdkit.common import json_files
from hvdkit.prepare.preflight import exchange, show
from hvdkit.prepare.preflight.findings import examine
from hvdkit.prepare.preflight.report import Place, RankReport, look, visible

VERSIONS = {"Python": "3.11.7", "torch": "2.13.0", "horovod": "0.28.1"}


def job(n=4, hosts=("a", "b"), **changes):
    """A sound job of n ranks, dealt out to hosts in blocks."""
    per_host = n // len(hosts)
    return [
        RankReport(
            host=hosts[rank // per_host],
            pid=100 + rank,
            launcher="srun",
            launched=Place(rank, n),
            horovod=Place(rank, n),
            mpi=Place(rank, n),
            local_rank=rank % per_host,
            library="Open MPI 5.0.11",
            cores=tuple(range(8)),
            threads=4,
            devices=("GPU-1", "GPU-2"),
            versions=VERSIONS,
            free_bytes={"/scratch": 2**40},
            clock=1e9 + rank * 1e-3,
            **changes,
        )
        for rank in range(n)
    ]


def changed(reports, rank, **changes):
    return [replace(report, **changes) if report.rank == rank else report for report in reports]


def test_a_sound_job_has_no_findings():
    assert examine(job()) == []


@pytest.mark.parametrize(
    ("reports", "check", "level", "part"),
    [
        (
            [replace(report, horovod=Place(0, 1)) for report in job()[:1]],
            "singleton",
            "error",
            "srun started 4 ranks, but Horovod over Open MPI 5.0.11 sees rank 0 of 1 on rank 0",
        ),
        (
            changed(changed(job(), 2, horovod=Place(3, 4), mpi=Place(3, 4)), 3, horovod=Place(2, 4), mpi=Place(2, 4)),
            "places",
            "error",
            "srun started rank 2 of 4, which Horovod sees as rank 3 of 4",
        ),
        (
            [replace(one, mpi=Place(0, 1)) for one in job()],
            "places",
            "warning",
            "mpi4py sees rank 0 of 1, Horovod rank 0 of 4",
        ),
        (job()[:3], "missing-ranks", "error", "no report from rank 3 of 4"),
        (
            changed(job(), 1, horovod=Place(error="torch: no extension")),
            "horovod",
            "error",
            "on rank 1: torch: no extension",
        ),
        (
            changed(job(), 0, launched=Place(error="SLURM_PROCID is not set"), horovod=Place(0, 4)),
            "environment",
            "error",
            "SLURM_PROCID",
        ),
        (
            [replace(one, devices=("GPU-1",)) for one in job()],
            "gpus",
            "error",
            "ranks 0-1 on a would use the same GPU, GPU-1",
        ),
        (
            [replace(one, devices=("GPU-1", "GPU-2")) for one in job(6)],
            "gpus",
            "error",
            "rank 2 on a have no GPU of their own: 2 visible for 3 ranks",
        ),
        (changed(job(), 3, devices=()), "gpus", "error", "rank 3 see no GPU"),
        (
            changed(job(), 3, versions={**VERSIONS, "torch": "2.12.0"}),
            "versions",
            "error",
            "torch is not the same on all ranks: 2.13.0 on ranks 0-2; 2.12.0 on rank 3",
        ),
        (
            changed(job(), 2, versions={"Python": "3.11.7", "torch": "2.13.0"}),
            "versions",
            "error",
            "horovod is missing on rank 2 (b)",
        ),
        ([replace(one, cores=(0,), threads=1) for one in job()], "cores", "warning", "2 ranks share 1 cores on a"),
        ([replace(one, threads=8) for one in job()], "cores", "warning", "would run 16 threads on 8 cores"),
        (changed(job(), 1, free_bytes={"/scratch": 5 * 2**20}), "disk", "warning", "/scratch on a has 5 MiB left"),
        (changed(job(), 2, clock=1e9 + 3.5), "clocks", "warning", "a and b are 3.5 s apart"),
    ],
)
def test_each_fault_is_found(reports, check, level, part):
    found = examine(reports)
    assert (check, level) in [(finding.check, finding.level) for finding in found]
    assert any(part in finding.what for finding in found if finding.check == check)
    assert [finding.level for finding in found] == sorted(finding.level for finding in found)
    assert all(finding.why and finding.fix for finding in found)


def test_one_fault_is_one_finding():
    assert len(examine(job()[:3])) == 1
    assert len(examine([replace(report, horovod=Place(0, 1), mpi=Place(0, 1)) for report in job()[:1]])) == 1


def test_reports_travel_as_files(tmp_path):
    for report in job():
        exchange.write(tmp_path, report)
    assert exchange.read(tmp_path) == job()


def test_json_and_text_say_the_same():
    reports = job()[:3]
    found = examine(reports)
    parsed = json.loads(json_files.encode(show.seen(reports, found)))
    assert not parsed["ok"] and [one["check"] for one in parsed["findings"]] == ["missing-ranks"]
    assert [rank["device"] for rank in parsed["ranks"]] == ["GPU-1", "GPU-2", "GPU-1"]
    written = StringIO()
    show.page(reports, found).show(Console(file=written, width=100))
    assert "error [missing-ranks]" in written.getvalue() and "2 of 4" in written.getvalue()
    assert "The job would not train as it is: 3 of 4 ranks, 1 findings." in written.getvalue()
    assert "[red]" not in json_files.encode(show.seen(changed(job(), 0, host="[red]x"), [])).replace("[red]x", "")


@pytest.mark.parametrize(
    ("chosen", "left"),
    [(None, ("GPU-a", "GPU-b")), ("1", ("GPU-b",)), ("1,0", ("GPU-b", "GPU-a")), ("", ()), ("0,7,1", ("GPU-a",)),
     ("GPU-b", ("GPU-b",)), ("-1", ())],
)  # fmt: skip
def test_visible_devices(chosen, left):
    assert visible(["GPU-a", "GPU-b"], chosen) == left


def test_a_process_without_a_launcher_and_one_with_half_an_environment():
    own = look({"PATH": ""})
    assert (own.launcher, own.rank, own.size, own.devices) == ("none", 0, 1, ())
    assert own.versions["numpy"] and own.cores and min(own.free_bytes.values()) > 0
    assert "PMI_SIZE is not set" in look({"PATH": "", "PMI_RANK": "1", "MPI_LOCALRANKID": "1"}).launched.error
    assert look({"PATH": "", "OMP_NUM_THREADS": "3"}).threads == 3
