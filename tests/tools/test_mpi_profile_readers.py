"""Three formats of MPI profiles read into one, and what is said of files that are not whole."""

import json
import os

import pytest
from mpi_profile_files import DATA, HOROVOD, MPITRACE, group, record, write

from hvdkit.errors import CorruptDataError, DataError, DataNotFoundError
from hvdkit.read.mpi_profile import reading, results

RANK_0 = MPITRACE[0].read_text()


def totals(rank, routine):
    return results.total(row for row in rank.calls if row.routine == routine)


# mpitrace


def test_a_directory_of_real_files_of_mpitrace(tmp_path):
    for file in MPITRACE:
        (tmp_path / file.name).write_text(file.read_text())
    profile = reading.read([tmp_path])
    assert (profile.source, profile.size, profile.missing) == ("mpitrace", 8, (2, 3, 6, 7))
    assert [rank.rank for rank in profile.ranks] == [0, 1, 4, 5]
    assert profile.ranks[0].seconds == 128.903
    assert reading.read(MPITRACE) == profile


def test_the_sizes_of_each_routine_are_all_of_its_calls_bytes_and_seconds():
    profile = reading.read(MPITRACE)
    for rank, file in zip(profile.ranks, MPITRACE, strict=True):
        table = [line.split() for line in file.read_text().splitlines() if line.startswith("MPI_") and "#" not in line]
        assert {row.routine for row in rank.calls} == {words[0] for words in table}
        for routine, calls, average, seconds in table:
            whole = totals(rank, routine)
            assert whole.calls == int(calls)
            assert whole.average_bytes == pytest.approx(float(average), abs=0.2)
            assert whole.seconds == pytest.approx(float(seconds), abs=0.006)
        assert rank.mpi_seconds == pytest.approx(profile.mpi_seconds[rank.rank], abs=0.02)


def test_the_allreduces_of_rank_0_by_size():
    sizes = {row.average_bytes: row for row in reading.read(MPITRACE).ranks[0].calls if row.routine == "MPI_Allreduce"}
    assert len(sizes) == 11
    assert (sizes[16.0].calls, sizes[16.0].seconds) == (72893, 86.606)
    assert (sizes[4718824.9].calls, sizes[4718824.9].seconds) == (714, 18.844)


def test_the_file_of_rank_0_tells_the_time_of_every_rank():
    profile = reading.read([MPITRACE[0]])
    assert list(profile.mpi_seconds) == list(range(8))
    assert profile.mpi_seconds[5] == 109.12
    assert profile.missing == tuple(range(1, 8))


def test_a_file_of_mpitrace_that_is_cut_off_is_never_taken_for_whole():
    """Cut after any byte, it is refused or says the same of every routine with bytes."""
    whole = reading.read([MPITRACE[1]]).ranks[0]
    text = MPITRACE[1].read_text()
    last = text.rindex("MPI_Allgather") + len("MPI_Allgather             #calls    avg. bytes      time(sec)\n")
    refused = 0
    for end in range(1, len(text), 7):
        file = DATA / "cut"
        try:
            (one,) = reading.READERS["mpitrace"]([(file, text[:end])]).ranks
        except CorruptDataError as error:
            assert str(file) in str(error)
            refused += 1
        else:
            assert end > last
            assert [(row.calls, row.bytes) for row in one.calls] == [(row.calls, row.bytes) for row in whole.calls]
    assert refused > 300


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("72893", "72892", "77339 calls, and there were 77340"),
        ("MPI_Allreduce                       77340", "MPI_Allreduce                       -7340", "-7340"),
        ("rank 0 of 8", "rank 9 of 8", "line 1"),
        ("0 of 8", "0 of 999999999999999999", "0 of 9"),
        (
            "total elapsed time       = 128",
            "total elapsed time       = 1.2.8",
            "expected seconds such as 105.816, got ",
        ),
        ("thetagpu23     107.65 ", "thetagpu23     105.816.017 ", "expected seconds such as 105.816, got "),
    ],
)
def test_parts_of_a_file_of_mpitrace_that_disagree(tmp_path, old, new, said):
    file = tmp_path / "mpi_profile.1.0"
    file.write_text(RANK_0.replace(old, new))
    with pytest.raises(CorruptDataError, match=said) as caught:
        reading.read([file])
    assert str(file) in str(caught.value)


def test_files_of_mpitrace_of_two_jobs(tmp_path):
    (tmp_path / "mpi_profile.1.0").write_text(RANK_0)
    (tmp_path / "mpi_profile.2.0").write_text(RANK_0)
    with pytest.raises(CorruptDataError, match="Rank 0 is in two files"):
        reading.read([tmp_path])
    (tmp_path / "mpi_profile.2.0").write_text(MPITRACE[1].read_text().replace("rank 1 of 8", "rank 1 of 4"))
    with pytest.raises(CorruptDataError, match=r"is of 8 ranks and .* of 4"):
        reading.read([tmp_path])


# Ours


def test_our_files(tmp_path):
    profile = reading.read([write(tmp_path, *(record(rank) for rank in (1, 0, 3, 2)))])
    assert (profile.source, profile.size, profile.missing, profile.notes) == ("hvdkit", 4, (), ())
    assert [rank.rank for rank in profile.ranks] == [0, 1, 2, 3]
    first = profile.ranks[2].calls[0]
    assert (first.routine, first.caller, first.op, first.datatype) == (
        "MPI_Allreduce", "horovod", "MPI_BAND", "MPI_LONG_LONG_INT",
    )  # fmt: skip
    assert (first.calls, first.bytes, first.least_bytes, first.processes, first.wait_s) == (1000, 8000, 8, 4, None)
    assert (first.seconds, first.fastest_s) == (pytest.approx(1.0), 5e-4)
    assert profile.library == "Open MPI v5.0.11"


def test_waiting_is_known_only_where_it_was_measured(tmp_path):
    calls = [group("MPI_Allreduce", (10, 8, 1.0, 0.25))]
    profile = reading.read([write(tmp_path, record(0, 1, calls, wait_measured=True))])
    assert profile.ranks[0].calls[0].wait_s == 2.5
    assert reading.read([write(tmp_path, record(0, 1, calls))]).ranks[0].calls[0].wait_s is None


def test_ranks_that_left_nothing_and_ranks_that_did_not_end_well(tmp_path):
    profile = reading.read([write(tmp_path, record(0, state="running"), record(2, state="aborted", lost=3))])
    assert profile.missing == (1, 3)
    notes = " ".join(profile.notes)
    for words in ("Rank 0 was killed", "Rank 2 called MPI_Abort", "3 calls were not recorded"):
        assert words in notes


def test_files_of_an_earlier_job_are_left_out_and_said(tmp_path):
    write(tmp_path, *(record(rank, job="0000000000000001") for rank in range(4)))
    for file in tmp_path.iterdir():
        os.utime(file, (1, 1))
    write(tmp_path, record(0, 2), record(1, 2))
    profile = reading.read([tmp_path])
    assert (profile.size, len(profile.ranks), profile.missing) == (2, 2, ())
    assert profile.notes == ("2 files of an earlier job in the same directory left out.",)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.7, 0.999])
def test_one_of_our_files_that_is_cut_off(tmp_path, share):
    write(tmp_path, record(0), record(1))
    file = tmp_path / "mpi_profile.1.json"
    file.write_text(file.read_text()[: int(share * file.stat().st_size)])
    with pytest.raises(CorruptDataError, match="cut off"):
        reading.read([tmp_path])


@pytest.mark.parametrize(
    "change",
    [
        {"rank": -1}, {"size": 0}, {"seconds": None}, {"state": "asleep"}, {"schema": 2}, {"calls": [1]}, {"rank": 4},
        {"calls": [{**HOROVOD[0], "routine": "rm -rf"}]}, {"calls": [{**HOROVOD[0], "bins": [{}]}]},
        {"calls": [{**HOROVOD[0], "bins": [{**HOROVOD[0]["bins"][0], "seconds": float("nan")}]}]},
    ],
)  # fmt: skip
def test_our_files_with_what_cannot_be(tmp_path, change):
    content = {**record(0), **change}
    (tmp_path / "mpi_profile.0.json").write_text(json.dumps(content))
    with pytest.raises(CorruptDataError, match=r"\.$"):
        reading.read([tmp_path])


@pytest.mark.parametrize("text", ['{"a":' * 100_000, '{"calls": %s}' % ("9" * 5000)], ids=["nested", "digits"])
def test_json_that_no_program_can_read(tmp_path, text):
    (tmp_path / "mpi_profile.0.json").write_text(text)
    with pytest.raises(CorruptDataError, match="not a file of 'hvdkit launch --mpi-profile'"):
        reading.read([tmp_path])


def test_a_rank_that_is_in_two_files(tmp_path):
    write(tmp_path, record(0), record(1))
    with pytest.raises(CorruptDataError, match="Rank 0 is in two files"):
        (tmp_path / "mpi_profile.1.json").write_text(json.dumps(record(0)))
        reading.read([tmp_path])


# Which format


def test_formats_do_not_mix_and_others_are_refused(tmp_path):
    write(tmp_path, record(0))
    (tmp_path / "mpi_profile.1.0").write_text(RANK_0)
    with pytest.raises(DataError, match=r"different formats: .*mpi_profile.0.json is of hvdkit and .* is of mpitrace"):
        reading.read([tmp_path])
    for text, said in (("", "is empty"), ("PK\x03\x04", "neither"), ("hello", "'hello'")):
        (tmp_path / "other").write_text(text)
        with pytest.raises(CorruptDataError, match=said):
            reading.read([tmp_path / "other"])


def test_nothing_there(tmp_path):
    with pytest.raises(DataNotFoundError, match="holds no MPI profile"):
        reading.read([tmp_path])
    with pytest.raises(DataNotFoundError, match="does not exist"):
        reading.read([tmp_path / "nosuch"])


# Control and payload


def test_what_horovod_negotiates_is_known_by_caller_operation_and_type(tmp_path):
    profile = reading.read([write(tmp_path, record(0))])
    of_rank = profile.ranks[0]
    found = {(row.routine, row.caller, row.op, row.datatype, row.average_bytes): row.purpose for row in of_rank.calls}
    assert found == {
        ("MPI_Allreduce", "horovod", "MPI_BAND", "MPI_LONG_LONG_INT", 8): "control",
        ("MPI_Allreduce", "horovod", "MPI_SUM", "MPI_FLOAT", 1_000_000): "payload",
        ("MPI_Allreduce", "horovod", "MPI_SUM", "MPI_FLOAT", 8): "payload",
        ("MPI_Bcast", "horovod", "", "MPI_INT", 4): "control",
        ("MPI_Bcast", "horovod", "", "MPI_BYTE", 100): "control",
        ("MPI_Bcast", "horovod", "", "MPI_INT32_T", 4): "payload",
        ("MPI_Gather", "horovod", "", "MPI_INT", 4): "control",
        ("MPI_Gatherv", "horovod", "", "MPI_BYTE", 300): "control",
        ("MPI_Barrier", "horovod", "", "", 0): "synchronisation",
        ("MPI_Comm_dup", "horovod", "", "", 0): "management",
        ("MPI_Allreduce", "mpi4py", "MPI_BAND", "MPI_LONG_LONG_INT", 8): "payload",
        ("MPI_Gather", "mpi4py", "", "MPI_INT", 4): "payload",
    }
    assert of_rank.horovod
    assert results.total(of_rank.of("payload", "MPI_Allreduce")).bytes == 100_000_000 + 50 * 8 + 7 * 8


@pytest.mark.parametrize("op", ["MPI_BAND", "MPI_BOR"])
def test_horovods_bit_vectors_are_control(tmp_path, op):
    calls = [group("MPI_Allreduce", (10, 8, 1e-4), op=op, type="MPI_LONG_LONG_INT")]
    (of_rank,) = reading.read([write(tmp_path, record(0, 1, calls))]).ranks
    assert [row.purpose for row in of_rank.calls] == ["control"]


def test_by_size_alone_the_negotiation_of_the_real_files_is_told():
    profile = reading.read(MPITRACE)
    of_rank = profile.ranks[0]
    control = {(row.routine, row.calls): row.average_bytes for row in of_rank.of("control")}
    assert control == {
        ("MPI_Allreduce", 72893): 16.0, ("MPI_Bcast", 50): 4.0, ("MPI_Gather", 50): 4.0, ("MPI_Gatherv", 50): 0.0,
        ("MPI_Allgather", 2): 4.0,
    }  # fmt: skip


def test_a_program_without_horovod_has_no_control_by_size(tmp_path):
    """A solver that reduces 8 bytes all the time does not negotiate."""
    file = tmp_path / "mpi_profile.1.0"
    file.write_text(RANK_0.replace("MPI_Gatherv ", "MPI_Scatterv"))
    of_rank = reading.read([file]).ranks[0]
    assert of_rank.of("control") == [] and not of_rank.horovod
