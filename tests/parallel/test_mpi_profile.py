"""``hvdkit launch --mpi-profile`` with real ranks: every count and byte is known beforehand."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hvdkit.read.mpi_profile import reading, results

pytestmark = pytest.mark.parallel

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
SEARCH_PATH = f"{BIN}{os.pathsep}{os.environ['PATH']}"
TIMEOUT_S = 120
HAS_MPI = all(shutil.which(name, path=SEARCH_PATH) for name in ("mpirun", "mpicc", "cc"))
needs_mpi4py = pytest.mark.skipif(
    not (HAS_MPI and importlib.util.find_spec("mpi4py")), reason="no MPI with a compiler, or no mpi4py"
)
needs_horovod = pytest.mark.skipif(
    not (HAS_MPI and all(map(importlib.util.find_spec, ("horovod", "torch")))), reason="no Horovod or no PyTorch"
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of its own, so that the recorder is compiled from the sources as they are."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def launch(tmp_path, cache):
    """Run a program on n ranks with a profile; the profile, and what the job said."""

    def run(program, *arguments, n=2, options=(), status=0, **environ):
        outer = ("HOROVOD_", "OMPI_", "PMIX_", "PMI_", "SLURM_", "HVDKIT_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
        environment |= {"PYTHONPATH": str(HERE.parent.parent), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache)}
        options = ["--launcher", "mpirun", "--mpi-profile", str(tmp_path / "profile"), *options]
        words = [sys.executable, "-m", "hvdkit.cli", "launch", "-n", str(n), *options, "--", HERE / program, *arguments]
        done = subprocess.run(
            list(map(str, words)),
            env=environment | environ,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            cwd=tmp_path,
        )
        assert (done.returncode == 0) == (status == 0), done.stdout + done.stderr
        return reading.read([tmp_path / "profile"]), done

    return run


def called(rank, caller="mpi4py"):
    """Calls and bytes of each routine, as one caller made them."""
    names = {row.routine for row in rank.calls if row.caller == caller}
    sums = {
        name: results.total(row for row in rank.calls if (row.routine, row.caller) == (name, caller)) for name in names
    }
    return {name: (one.calls, one.bytes) for name, one in sums.items()}


@needs_mpi4py
def test_collectives_and_messages_are_counted_exactly_and_a_receive_by_what_came(launch):
    profile, done = launch("programs_mpi_profile.py", "collectives", "messages", n=3)
    assert profile.missing == () and "MPI profile of 3 ranks" in done.stderr
    for rank in profile.ranks:
        mine = called(rank)
        expected = {
            "MPI_Allreduce": (7 + 5 + 1, 12 * 4000 + 4),
            "MPI_Iallreduce": (3, 3 * 40),
            "MPI_Wait": (3, 0),
            "MPI_Bcast": (4, 4 * 1000),
            "MPI_Allgather": (2, 2 * 800),
            "MPI_Allgatherv": (1, 8 * (rank.rank + 1)),
            "MPI_Gather": (1, 12),
            "MPI_Reduce": (1, 200),
            "MPI_Reduce_scatter": (1, 6 * 8),
            "MPI_Alltoall": (1, 2 * 3 * 8),
            "MPI_Barrier": (1, 0),
        }
        assert {name: mine[name] for name in expected} == expected
        assert rank.state == "finalized" and rank.seconds > rank.mpi_seconds > 0
        by_op = {(row.op, row.processes): row.calls for row in rank.calls if row.routine == "MPI_Allreduce"}
        assert by_op == {("MPI_SUM", 3): 7, ("MPI_MAX", 3): 5, ("MPI_SUM", 1 if rank.rank == 1 else 2): 1}
        assert {row.datatype for row in rank.calls if row.routine == "MPI_Allreduce"} == {"MPI_FLOAT"}
    first, second, third = map(called, profile.ranks)
    for mine in (first, second, third):
        assert (mine["MPI_Isend"], mine["MPI_Irecv"], mine["MPI_Waitall"]) == ((6, 24000), (6, 24000), (6, 0))
        assert mine["MPI_Sendrecv"] == (1, 80)
    assert first["MPI_Send"] == (1, 40) and "MPI_Recv" not in first
    assert second["MPI_Recv"] == (1, 40) and "MPI_Send" not in second
    assert "MPI_Send" not in third and "MPI_Recv" not in third


@needs_mpi4py
def test_no_call_of_several_threads_is_lost(launch):
    profile, _ = launch("programs_mpi_profile.py", "threads", n=2)
    for rank in profile.ranks:
        assert called(rank)["MPI_Allreduce"] == (2000, 2000 * 32)


THREADS = """
#include <mpi.h>
#include <pthread.h>
#include <stddef.h>

static void *test(void *unused)
{
    for (int call = 0, done; call < 100000; call++) MPI_Testall(0, NULL, &done, MPI_STATUSES_IGNORE);
    return unused;
}

int main(void)
{
    int provided;
    pthread_t threads[4];
    MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &provided);
    for (int i = 0; i < 4; i++) pthread_create(&threads[i], NULL, test, NULL);
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    return MPI_Finalize();
}
"""


@pytest.mark.skipif(not HAS_MPI, reason="no MPI with a compiler")
def test_no_call_of_threads_that_never_wait_for_one_another_is_lost(launch, tmp_path):
    (tmp_path / "threads.c").write_text(THREADS)
    mpicc = shutil.which("mpicc", path=SEARCH_PATH)
    subprocess.run([mpicc, "-o", "threads", "threads.c", "-lpthread"], cwd=tmp_path, check=True)
    profile, _ = launch(tmp_path / "threads", n=1)
    assert called(profile.ranks[0], "threads") == {"MPI_Testall": (400_000, 0)}


@needs_mpi4py
def test_a_job_that_is_killed_leaves_what_it_had_written(launch):
    profile, _ = launch("programs_mpi_profile.py", "killed", status=137, HVDKIT_MPI_PROFILE_EVERY_S="0.05")
    assert [rank.state for rank in profile.ranks][1] == "running"
    assert called(profile.ranks[1])["MPI_Allreduce"][0] >= 51
    assert "Rank 1 was killed" in " ".join(profile.notes) or "ranks 0, 1 was killed" in " ".join(profile.notes)


@needs_mpi4py
def test_recording_pauses_and_children_leave_the_record_alone(launch, tmp_path):
    profile, _ = launch("programs_mpi_profile.py", "paused")
    assert all(called(rank)["MPI_Allreduce"] == (2, 8000) for rank in profile.ranks)
    shutil.rmtree(tmp_path / "profile")
    profile, _ = launch("programs_mpi_profile.py", "child")
    assert all(called(rank)["MPI_Allreduce"] == (2, 8000) and rank.state == "finalized" for rank in profile.ranks)


@needs_mpi4py
def test_waiting_is_told_from_transferring_where_asked(launch):
    profile, _ = launch("programs_mpi_profile.py", "wait", options=["--mpi-profile-wait"])
    late, early = (results.total(row for row in rank.calls if row.routine == "MPI_Allreduce") for rank in profile.ranks)
    assert early.calls == late.calls == 5  # the barriers that measure it are not counted
    assert "MPI_Barrier" not in called(profile.ranks[1])
    assert early.wait_s >= 5 * 0.04 and early.wait_s <= early.seconds
    assert late.wait_s < early.wait_s


@needs_horovod
def test_the_payload_of_a_training_is_its_gradients(launch, tmp_path):
    profile, done = launch("programs_mpi_profile_horovod.py")
    gradients, parameters = (
        int(re.search(rf"\[0\] {what} bytes (\d+)", done.stdout)[1]) for what in ("gradient", "parameter")
    )
    for one in profile.ranks:
        assert results.total(one.of("payload", "MPI_Allreduce")).bytes == gradients
        assert results.total(one.of("payload", "MPI_Bcast")).bytes == parameters
        assert results.total(one.of("payload")).bytes == pytest.approx(gradients + parameters, rel=0.01)
        vectors = one.of("control", "MPI_Allreduce")
        assert {(row.op, row.datatype) for row in vectors} == {("MPI_BAND", "MPI_LONG_LONG_INT")}
        assert results.total(vectors).calls >= 20
    words = [sys.executable, "-m", "hvdkit.cli", "mpi-profile", "show", "--json", str(tmp_path / "profile")]
    shown = subprocess.run(words, capture_output=True, text=True, check=True)
    found = json.loads(shown.stdout)
    assert found["traffic"]["control"]["calls"] >= 20
    assert not any("not in this profile" in note for note in found["notes"])
