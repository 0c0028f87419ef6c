"""Which GPU and how many threads a process of arrays has."""

import pytest

from hvdkit.arrays import device as arrays_device
from hvdkit.errors import InvalidArgumentError, LauncherError
from hvdkit.steps.topology import Topology

WORLD = Topology(rank=1, size=4, local_rank=1, local_size=2)


def test_a_process_sees_its_own_gpu_alone():
    environ = {"CUDA_VISIBLE_DEVICES": "5,7", "OMP_NUM_THREADS": "1"}
    assert arrays_device.pin(WORLD, "auto", None, environ) == "cuda:0"
    assert environ["CUDA_VISIBLE_DEVICES"] == "7"
    assert arrays_device.pin(WORLD, "cpu", None, environ) == "cpu"


def test_threads_are_set_for_what_is_loaded_later():
    environ = {"CUDA_VISIBLE_DEVICES": ""}
    assert arrays_device.pin(WORLD, "auto", 3, environ) == "cpu"
    assert {environ[name] for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")} == {"3"}
    kept = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "5"}
    arrays_device.pin(WORLD, "auto", None, kept)
    assert kept["OMP_NUM_THREADS"] == "5"


@pytest.mark.parametrize(
    ("kind", "threads", "visible", "error", "message"),
    [
        ("tpu", None, "0", InvalidArgumentError, "auto, gpu or cpu"),
        ("cpu", 0, "0", InvalidArgumentError, "at least 1"),
        ("gpu", None, "", InvalidArgumentError, "sees none"),
    ],
)
def test_mistakes_are_named(kind, threads, visible, error, message):
    with pytest.raises(error, match=message):
        arrays_device.pin(WORLD, kind, threads, {"CUDA_VISIBLE_DEVICES": visible, "OMP_NUM_THREADS": "1"})


def test_more_ranks_than_gpus_are_refused():
    third = Topology(rank=2, size=3, local_rank=2, local_size=3)
    with pytest.raises(LauncherError, match="no accelerator of its own"):
        arrays_device.pin(third, "auto", None, {"CUDA_VISIBLE_DEVICES": "0,1", "OMP_NUM_THREADS": "1"})
