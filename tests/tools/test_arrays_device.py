"""Which GPU and how many threads a process of arrays has."""

import os

import pytest

from hvdkit.arrays import pin_device
from hvdkit.errors import InvalidArgumentError, LauncherError
from hvdkit.steps.topology import Topology

WORLD = Topology(rank=1, size=4, local_rank=1, local_size=2)


@pytest.fixture
def environ(monkeypatch):
    """This process's environment, in which a test says how it was started."""
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "1"})
    return os.environ


@pytest.mark.parametrize(
    ("named", "local_rank", "left"),
    [("5,7", 1, "7"), ("0,1,2,3", 2, "2"), ("GPU-b", 3, "GPU-b"), ("MIG-a, MIG-b", 1, "MIG-b"), ("2", 0, "2")],
    ids=["launched", "srun without --gpus-per-task", "bound by the launcher", "parts of one card", "PALS --gpu-bind"],
)
def test_a_process_keeps_one_gpu_by_the_name_that_it_has(environ, named, local_rank, left):
    environ["CUDA_VISIBLE_DEVICES"] = named
    world = Topology(local_rank, 4, local_rank, 4, 0, 1, "srun")
    assert pin_device(world) == "cuda:0" and environ["CUDA_VISIBLE_DEVICES"] == left
    assert pin_device(world, "cpu") == "cpu"


@pytest.mark.parametrize(
    ("kind", "threads", "visible", "error", "message"),
    [
        ("tpu", None, "0", InvalidArgumentError, "auto, gpu or cpu"),
        ("cpu", 0, "0", InvalidArgumentError, "at least 1"),
        ("gpu", None, "", InvalidArgumentError, "sees none"),
        ("gpu", None, "NoDevFiles", InvalidArgumentError, "sees none"),
        ("gpu", None, "0,1", LauncherError, "no accelerator of its own"),
        ("auto", None, "0,1", LauncherError, "no accelerator of its own"),
    ],
)
def test_mistakes_are_named_and_change_nothing(environ, kind, threads, visible, error, message):
    environ["CUDA_VISIBLE_DEVICES"] = visible
    with pytest.raises(error, match=message):
        pin_device(Topology(2, 4, 2, 4, 0, 1, "srun"), kind, threads)
    assert environ["CUDA_VISIBLE_DEVICES"] == visible


def test_threads_are_set_for_what_is_loaded_later(environ):
    environ["CUDA_VISIBLE_DEVICES"] = ""
    assert pin_device(WORLD, threads=3) == "cpu"
    assert {environ[name] for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")} == {"3"}
    environ["OMP_NUM_THREADS"] = "5"
    pin_device(WORLD)
    assert environ["OMP_NUM_THREADS"] == "5"
