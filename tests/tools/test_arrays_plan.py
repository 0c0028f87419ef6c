"""Which way an array takes: decided without a GPU."""

import numpy as np
import pytest

from hvdkit.arrays import device as arrays_device
from hvdkit.arrays.exchange import plan
from hvdkit.arrays.exchange.plan import Machine
from hvdkit.errors import InvalidArgumentError, LauncherError
from hvdkit.steps.topology import Topology

ml_dtypes = pytest.importorskip("ml_dtypes")


@pytest.mark.parametrize(
    ("device", "machine", "path"),
    [
        ("host", Machine(nccl=True, cuda_aware=True), "host"),
        ("cuda", Machine(nccl=True, cuda_aware=True), "nccl"),
        ("cuda", Machine(nccl=True, cuda_aware=True, own_gpus=False), "cuda-aware mpi"),
        ("cuda", Machine(nccl=True, cuda_aware=False, own_gpus=False), "through the host"),
        ("cuda", Machine(nccl=False, cuda_aware=True), "cuda-aware mpi"),
        ("cuda", Machine(), "through the host"),
    ],
)
def test_the_path_follows_from_what_is_there(device, machine, path):
    assert plan.path(device, machine) == path


def test_an_unknown_device_is_refused():
    with pytest.raises(InvalidArgumentError, match="neither the host nor a CUDA GPU"):
        plan.path("other", Machine(nccl=True))


@pytest.mark.parametrize(
    ("query", "environ", "aware"),
    [
        (1, {}, True),
        (0, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, False),
        (None, {}, False),
        (None, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, True),
        (None, {"MPICH_GPU_SUPPORT_ENABLED": "0"}, False),
        (None, {"MV2_USE_CUDA": "1"}, True),
    ],
)
def test_the_library_is_believed_before_the_environment(query, environ, aware):
    assert plan.is_cuda_aware(query, environ) is aware


def test_ranks_that_share_a_gpu_are_found():
    assert plan.own_gpus(["a 0:1", "a 0:2", "b 0:1"])
    assert not plan.own_gpus(["a 0:1", "b 0:1", "a 0:1"])


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("float16", "float32"),
        ("float32", "float32"),
        ("float64", "float64"),
        (">f8", "float64"),
        ("complex64", "complex64"),
        (ml_dtypes.bfloat16, "float32"),
        (ml_dtypes.float8_e4m3fn, "float32"),
        (ml_dtypes.float8_e5m2, "float32"),
    ],
)
def test_half_precisions_are_added_up_in_float32(given, sent):
    assert plan.sent_as(np.dtype(given), "x") == np.dtype(sent)


@pytest.mark.parametrize("given", ["int32", "bool", "uint8", ml_dtypes.int4])
def test_what_has_no_mean_is_refused(given):
    with pytest.raises(InvalidArgumentError, match=r"layers\.0 is of type .* has no mean"):
        plan.sent_as(np.dtype(given), "layers.0")


def test_one_buffer_for_each_path_and_type():
    single, double = np.dtype("f4"), np.dtype("f8")
    keys = [("host", single), ("host", double), ("nccl", single), ("host", single)]
    assert plan.groups(keys) == {("host", single): [0, 3], ("host", double): [1], ("nccl", single): [2]}


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
