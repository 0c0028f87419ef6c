"""Step 2: one accelerator for each process."""

import pytest

from hvdkit import InvalidArgumentError, LauncherError
from hvdkit.steps.device import cpu_threads, device_index, threads_asked, visible_gpus


def test_each_local_rank_has_its_own_device():
    assert [device_index(rank, 4) for rank in range(4)] == [0, 1, 2, 3]


def test_the_one_visible_device_is_index_zero_for_every_local_rank():
    assert [device_index(rank, 1) for rank in range(4)] == [0, 0, 0, 0]


def test_more_ranks_than_devices_is_an_error_with_a_fix():
    with pytest.raises(LauncherError, match=r"local rank 2 .* shows 2; start at most 2 processes"):
        device_index(2, 2)


@pytest.mark.parametrize(("local_rank", "visible"), [(-1, 2), (0, 0), (0, -1)])
def test_impossible_numbers_are_refused(local_rank, visible):
    with pytest.raises(InvalidArgumentError):
        device_index(local_rank, visible)


@pytest.mark.parametrize(
    ("local_size", "usable", "installed", "threads"),
    [(1, 8, 8, 8), (4, 8, 8, 2), (3, 8, 8, 2), (4, 2, 2, 1), (4, 16, 64, 16), (4, 1, 64, 1)],
    ids=["alone", "divided", "rounded down", "at least one", "bound by the launcher", "bound to one core"],
)
def test_ranks_share_the_cores_unless_the_launcher_divided_them(local_size, usable, installed, threads):
    assert cpu_threads(local_size, usable, installed) == threads


def test_no_ranks_or_no_cores_is_refused():
    for bad in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(InvalidArgumentError):
            cpu_threads(*bad)


@pytest.mark.parametrize(
    ("named", "visible"),
    [
        ("0,1", ["0", "1"]),
        ("3", ["3"]),
        (" 2 , 0 ", ["2", "0"]),
        ("", []),
        (" ", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2,-1,3", ["2"]),
        ("1,x,3", ["1"]),
        ("0,", ["0"]),
        ("GPU-a, GPU-b", ["GPU-a", "GPU-b"]),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", ["GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"]),
        ("MIG-a,MIG-b", ["MIG-a", "MIG-b"]),
        ("MIG-GPU-a/1/0,MIG-GPU-a/2/0", ["MIG-GPU-a/1/0", "MIG-GPU-a/2/0"]),
    ],
)
def test_visible_gpus_are_those_that_cuda_would_see(named, visible):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": named}) == visible


def test_without_the_variable_the_driver_is_asked(tmp_path):
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / bus).mkdir()
    assert visible_gpus({}, tmp_path) == ["0", "1"]
    assert visible_gpus({}, tmp_path / "none") == []


@pytest.mark.parametrize(
    ("given", "threads"),
    [(None, None), ("", None), ("0", None), ("-1", None), ("many", None), ("3", 3), ("4,2", 4), (" 4 , 2", 4)],
)
def test_the_first_number_of_omp_num_threads_counts(given, threads):
    """The others are of nested loops (OpenMP specification)."""
    assert threads_asked({} if given is None else {"OMP_NUM_THREADS": given}) == threads
