"""What a profile says in numbers and in sentences."""

from pathlib import Path

import pytest
from mpi_profile_files import HOROVOD, MPITRACE, group, record, write

from hvdkit.cli import run
from hvdkit.read.causes import by_cost
from hvdkit.read.mpi_profile import cli as tables
from hvdkit.read.mpi_profile import reading, results
from hvdkit.read.mpi_profile.model import MPITRACE as MPITRACE_FORMAT
from hvdkit.read.mpi_profile.model import Calls, RankProfile, of_ranks
from hvdkit.read.mpi_profile.results import causes, otherwise


def shown(profile, number=0):
    return next(rank for rank in profile.ranks if rank.rank == number)


def costly(profile, number=0):
    return by_cost(causes(profile, shown(profile, number)))


# The real files


def test_the_real_files_say_what_the_timeline_of_the_same_job_says(capsys):
    """Large tensors are 15 % here and 16 % there; the cycles and the ranks (105.9 to 109.1 s) are no cause."""
    (found,) = costly(reading.read(MPITRACE))
    assert found.kind == "large-tensors" and found.share == pytest.approx(0.148, abs=0.001)
    assert "714 MPI_Allreduce of 4.72 MB took 26.4 ms each, 313 MB/s" in found.evidence
    assert run(["mpi-profile", "show", *map(str, MPITRACE)]) == 0
    out = capsys.readouterr().out
    assert (
        out.startswith("Verdict: MPI moves data in calls of at least 64 KiB")
        and "cycle" not in out.split("Routines on")[0]
    )
    assert "does not show: record hvdkit launch --explain-job" in out.split("Rank 0 of")[0]


def test_a_job_over_nccl_says_that_its_gradients_are_not_seen():
    """With sizes alone: 102 allreduces of 4 bytes are no gradients, 112 lengths no payload."""

    def calls(routine, number, size, seconds):
        return Calls(routine, number, seconds, number * size)

    rows = (
        calls("MPI_Allreduce", 102, 4, 0.001), calls("MPI_Allreduce", 72893, 16, 86.6),
        calls("MPI_Bcast", 112, 4, 0.001), calls("MPI_Bcast", 50, 406, 0.001),
        calls("MPI_Gather", 50, 4, 0.003), calls("MPI_Gatherv", 50, 0, 0.001),
    )  # fmt: skip
    rank = RankProfile(0, "finalized", 128.9, 86.607, rows)
    profile = of_ranks(MPITRACE_FORMAT, [(Path("mpi_profile.1.0"), 1, rank)], {}, ())
    assert costly(profile) == []
    assert [row.purpose for row in shown(profile).calls if row.calls == 112] == ["control"]
    first, *_ = tables.page(profile, shown(profile), results.shown_as(profile, shown(profile))).parts
    assert first.startswith("Verdict: The gradients are not in this profile") and "hvdkit launch --timeline" in first
    assert "--cycle-time" not in first


def test_causes_are_weighed_against_the_time_of_the_job(tmp_path):
    data = group("MPI_Allreduce", (100, 1_000_000, 1e-2), (5000, 64, 5e-4), op="MPI_SUM", type="MPI_FLOAT")
    calls, directory = (HOROVOD[0], data), tmp_path / "job"
    found = costly(reading.read([write(directory, record(0, 1, calls, seconds=10.0))]))
    assert [(cause.kind, cause.share) for cause in found] == [
        ("small-tensors", pytest.approx(0.25)), ("large-tensors", pytest.approx(0.1)),
    ]  # fmt: skip
    assert costly(reading.read([write(directory, record(0, 1, calls, seconds=1000.0))])) == []
    waiting = group("MPI_Allreduce", (100, 1_000_000, 1e-2, 6e-3), op="MPI_SUM", type="MPI_FLOAT")
    found = costly(reading.read([write(directory, record(0, 1, [waiting], wait_measured=True))]))
    assert [cause.kind for cause in found] == ["late", "large-tensors"] and "--skew" in found[0].advice


def test_the_spread_of_the_real_files_is_that_of_all_eight_ranks():
    over = results.spread(dict(reading.read(MPITRACE).mpi_seconds))
    assert (over.least, over.least_rank, over.most, over.most_rank) == (105.85, 4, 109.12, 5)
    assert over.median == pytest.approx((107.65 + 107.69) / 2)
    mean = sum((106.69, 107.65, 108.69, 109.09, 105.85, 109.12, 107.05, 107.69)) / 8
    assert over.imbalance == pytest.approx(109.12 / mean - 1)


# Numbers


@pytest.mark.parametrize(
    ("routine", "factor"),
    [
        ("MPI_Allreduce", 2 * 3 / 4), ("MPI_Allgather", 3), ("MPI_Allgatherv", 3), ("MPI_Reduce_scatter", 3 / 4),
        ("MPI_Alltoall", 3 / 4), ("MPI_Bcast", 1), ("MPI_Reduce", 1), ("MPI_Gather", None), ("MPI_Iallreduce", None),
        ("MPI_Send", None),
    ],
)  # fmt: skip
def test_bus_bandwidth(routine, factor):
    speed = results.bus_bandwidth(routine, 8e9, 2.0, 4, ours=True)
    assert speed == (None if factor is None else pytest.approx(factor * 4e9))


def test_there_is_no_bus_bandwidth_without_a_bus():
    for data, seconds, processes in ((0, 1, 4), (None, 1, 4), (8, 0, 4), (8, 1, 1)):
        assert results.bus_bandwidth("MPI_Allreduce", data, seconds, processes, ours=True) is None
    assert results.bus_bandwidth("MPI_Alltoall", 8, 1, 4, ours=False) is None


def test_the_bus_bandwidth_of_a_size_leaves_measured_waiting_out(tmp_path):
    calls = [group("MPI_Allreduce", (10, 1_000_000, 0.3, 0.1), op="MPI_SUM", type="MPI_FLOAT")]
    profile = reading.read([write(tmp_path, record(0, 4, calls, wait_measured=True))])
    (line,) = results.sizes(profile, shown(profile))
    assert line.bus_bytes_per_s == pytest.approx(1.5 * 1e7 / 2.0)


def test_control_and_payload_of_one_size_are_two_lines(tmp_path):
    profile = reading.read([write(tmp_path, record(0))])
    lines = [one for one in results.sizes(profile, shown(profile)) if one.routine == "MPI_Allreduce"]
    assert [(one.purpose, one.calls, one.least_bytes, one.most_bytes) for one in lines] == [
        ("payload", 57, 8, 8), ("control", 1000, 8, 8), ("payload", 100, 1_000_000, 1_000_000),
    ]  # fmt: skip
    assert lines[2].processes == 4


def test_routines_and_the_ranks(tmp_path):
    late = [group("MPI_Allreduce", (1, 8, 1.0)), group("MPI_Send", (1, 8, 2.0))]
    early = [group("MPI_Allreduce", (1, 8, 3.0))]
    profile = reading.read([write(tmp_path, record(0, 2, late), record(1, 2, early))])
    first, second = results.routines(profile, shown(profile))
    assert (first.routine, first.ranks.least, first.ranks.least_rank, first.ranks.most) == ("MPI_Send", 0, 1, 2)
    assert (second.ranks.median, second.ranks.imbalance) == (2, 0.5)


# Sentences


def replace_seconds(calls, seconds):
    (one,) = calls["bins"]
    changed = {**one, "seconds": seconds * one["calls"], "least_seconds": seconds / 2, "most_seconds": 2 * seconds}
    return {**calls, "bins": [changed]}


def test_negotiation_without_gradients_says_that_they_went_elsewhere(tmp_path):
    for calls, elsewhere in ((HOROVOD[:1], True), (HOROVOD[:2], False)):
        profile = reading.read([write(tmp_path, *(record(rank, 4, calls, seconds=10.0) for rank in range(4)))])
        assert ("NCCL" in otherwise(shown(profile))) == elsewhere


def test_who_waits_longer_in_the_negotiation_is_no_late_rank(tmp_path):
    """Horovod's thread negotiates in every cycle, whatever the training does."""
    calls = [[replace_seconds(HOROVOD[0], seconds)] for seconds in (1e-3, 2e-3)]
    profile = reading.read([write(tmp_path, *(record(rank, 2, one) for rank, one in enumerate(calls)))])
    assert profile.mpi_seconds[1] > 1.5 * profile.mpi_seconds[0]
    assert costly(profile) == []


@pytest.mark.parametrize(
    ("seconds", "late", "lost"), [((1.0, 0.2, 1.0, 1.1), (1,), 0.8), ((1.0, 1.1, 0.2, 0.2), (2, 3), 0.8)], ids=str
)
def test_the_ranks_with_the_least_time_are_the_ones_that_the_others_wait_for(tmp_path, seconds, late, lost):
    records = [record(rank, calls=[group("MPI_Allreduce", (1, 8, each))]) for rank, each in enumerate(seconds)]
    (cause,) = (one for one in costly(reading.read([write(tmp_path, *records)])) if one.kind == "late")
    assert cause.ranks == late and cause.lost_s == pytest.approx(lost)
    assert f"rank {late[0]} 200 ms" in cause.evidence and "1.10 s" in cause.evidence


def test_what_a_rank_waits_for_a_later_one_is_no_transfer(tmp_path):
    for wait in ((), (0.009,)):
        calls = [[group("MPI_Allreduce", (100, 1 << 20, one, *wait[:at]), caller="mpi4py")]
                 for at, one in ((1, 0.013), (0, 0.004))]  # fmt: skip
        measured = {"wait_measured": bool(wait)}
        records = [record(rank, 2, one, **measured) for rank, one in enumerate(calls)]
        found = costly(reading.read([write(tmp_path, *records)]))
        assert [(one.kind, one.ranks, one.lost_s) for one in found] == [
            ("late", (1,), pytest.approx(0.9)), ("large-tensors", (), pytest.approx(0.4)),
        ]  # fmt: skip
