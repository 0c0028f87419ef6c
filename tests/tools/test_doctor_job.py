"""``hvdkit doctor --job``: findings on reports made by hand, its JSON, and what CUDA_VISIBLE_DEVICES leaves."""

import json
import sys
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console

from hvdkit.common import json_files
from hvdkit.prepare.doctor import job as ranks
from hvdkit.prepare.doctor.finding import LEVELS, examine
from hvdkit.prepare.doctor.job import CHECKS, JobReport, Place, RankReport, look

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
            local_rank=rank % per_host,
            library="Open MPI 5.0.11",
            cores=tuple(range(8)),
            threads=4,
            device=f"cuda:{rank % per_host}",
            versions=VERSIONS,
            **changes,
        )
        for rank in range(n)
    ]


def changed(reports, rank, **changes):
    return [replace(report, **changes) if report.rank == rank else report for report in reports]


def test_a_sound_job_has_no_findings():
    assert examine(CHECKS, job()) == []
    assert examine(CHECKS, [replace(one, device="cpu") for one in job()]) == []


ALONE = "srun started rank 0 of 4, but Horovod (over Open MPI) sees rank 0 of 1"


TWO_FAIL = changed(changed(job(), 2, problem="no extension"), 3, problem="no extension")
OTHER_TORCH = changed(job(), 3, versions={**VERSIONS, "torch": "2.12.0"})
NO_HOROVOD = changed(job(), 2, versions={"Python": "3.11.7", "torch": "2.13.0"})
ONE_CORE = [replace(one, cores=(0,), threads=1) for one in job()]
MANY_THREADS = [replace(one, threads=8) for one in job()]


@pytest.mark.parametrize(
    ("reports", "check", "level", "part"),
    [
        ([replace(job()[0], problem=ALONE)], "start", "error", f"on rank 0 (a): {ALONE}"),
        (TWO_FAIL, "start", "error", "on ranks 2-3 (b): no extension"),
        (job()[:3], "missing-ranks", "error", "no report from rank 3 of 4"),
        (changed(job(), 3, device="cpu"), "gpus", "error", "rank 3: on the CPU, the other ranks on GPUs"),
        (
            OTHER_TORCH,
            "versions",
            "warning",
            "not the same on all ranks: 2.13.0 on ranks 0-2; 2.12.0 on rank 3",
        ),
        (NO_HOROVOD, "versions", "warning", "all ranks: 0.28.1 on ranks 0-1, 3; missing on rank 2"),
        (ONE_CORE, "cores", "warning", "2 ranks on a would run 2 threads on 1 core."),
        (MANY_THREADS, "cores", "warning", "2 ranks on b would run 16 threads on 8 cores"),
    ],
)
def test_each_fault_is_found_and_nothing_else(reports, check, level, part):
    found = examine(CHECKS, reports)
    assert {(finding.check, finding.level) for finding in found} == {(check, level)}
    assert any(part in finding.what for finding in found)
    assert all(finding.why and finding.fix for finding in found)


def test_errors_come_first():
    levels = [one.level for one in examine(CHECKS, changed(job()[:3], 1, threads=99))]
    assert levels == sorted(levels, key=list(LEVELS).index) == ["error", "warning"]


def test_reports_travel_as_files_and_say_whether_the_job_can_train(tmp_path, capsys):
    assert ranks.arguments(str(tmp_path))[:2] == ("-P", "-m"), "a click.py where the job starts is not hvdkit's"
    assert not ranks.could_train(tmp_path)
    for report in job():
        ranks.write(tmp_path, report)
    assert ranks.could_train(tmp_path)
    assert "The job can train: 4 of 4 ranks" in capsys.readouterr().err
    ranks.write(tmp_path, replace(job()[2], problem="init has not returned."))
    assert not ranks.could_train(tmp_path)
    assert "on rank 2 (b): init has not returned." in capsys.readouterr().err


def test_a_rank_that_meets_no_other_says_why(monkeypatch, capsys):
    """Rank 0 waits for it in vain."""
    own = job()[1]
    monkeypatch.setattr(ranks, "look", lambda _: own)
    monkeypatch.setattr(ranks, "meet", lambda own: [replace(own, problem="no extension")])
    assert ranks.examine_job(60.0, as_json=True, report_to=None) == 1
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", "hvdkit doctor: rank 1 of 4 (a): no extension\n")


def test_json_and_text_say_the_same():
    reports = job()[:3]
    found = examine(CHECKS, reports)
    parsed = json.loads(json_files.encode(JobReport(False, tuple(found), tuple(reports))))
    assert not parsed["ok"] and [one["check"] for one in parsed["findings"]] == ["missing-ranks"]
    assert [rank["device"] for rank in parsed["ranks"]] == ["cuda:0", "cuda:1", "cuda:0"]
    written = StringIO()
    ranks.page(changed(reports, 0, host="[red]x", device=""), found).show(Console(file=written, width=100))
    assert "error [missing-ranks]" in written.getvalue() and "2 of 4" in written.getvalue()
    assert "The job cannot train as it is: 3 of 4 ranks, 1 finding." in written.getvalue()
    assert "0 [red]x 0 of 4 0 of 4 - 8 4" in " ".join(written.getvalue().split())


def refused(*_, **__):
    raise RuntimeError("NCCL refuses\nmore lines")


@pytest.mark.parametrize(
    ("allreduce", "others", "problem"),
    [
        (lambda ones, **_: [2 * one for one in ones], "", ""),
        (lambda ones, **_: ones, "", "an allreduce of a one from each of 2 ranks gives 1."),
        (refused, "", "NCCL refuses"),
        (refused, "no driver", ""),
    ],
    ids=["sums", "does not sum", "fails", "is not tried where another rank will not come"],
)
def test_a_rank_has_started_when_the_ones_of_all_add_up_on_its_device(monkeypatch, allreduce, others, problem):
    made = []
    world = SimpleNamespace(local_rank=0)
    gather = lambda own, name: [own, others] if name.endswith("problem") else [own]  # noqa: E731
    modules = {
        "hvdkit.torch": SimpleNamespace(init=lambda: world, pin_device=lambda _: "cpu"),
        "torch": SimpleNamespace(from_numpy=None, ones=lambda n, device: made.append(device) or [1.0] * n),
        "horovod.torch": SimpleNamespace(
            is_initialized=lambda: True, rank=lambda: 0, size=lambda: 2, local_rank=lambda: 0,
            mpi_enabled=lambda: False, allreduce=allreduce, Sum=None, allgather_object=gather,
        ),
    }  # fmt: skip
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    (started,) = ranks.meet(look({"PATH": ""}))
    assert (started.problem, started.device) == (problem, "cpu")
    assert made == (["cpu"] if not others else [])


def test_a_process_without_a_launcher_and_one_with_half_an_environment():
    own = look({"PATH": ""})
    assert (own.launcher, own.rank, own.size) == ("none", 0, 1)
    assert own.versions["numpy"] and own.cores
    assert "PMI_SIZE is not set" in look({"PATH": "", "PMI_RANK": "1", "MPI_LOCALRANKID": "1"}).launched.error
    assert look({"PATH": "", "OMP_NUM_THREADS": "3"}).threads == 3
    assert look({"PATH": "", "OMP_NUM_THREADS": "1000,2"}).threads == 1000
