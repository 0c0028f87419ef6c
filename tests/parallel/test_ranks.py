"""Ranks that stay alive for many tests: they find out what a process that has just begun would find out."""

import os
import random
import signal
import sys
from pathlib import Path

import pytest
from ranks import KERAS, FailedOnRanks, Kind, Ranks, on_ranks

ALL = ("torch", "tensorflow", *KERAS)


@on_ranks(*ALL)
def test_a_rank_knows_its_place_and_what_the_others_found(hk, world, everyone, tmp_path):
    assert everyone(world.rank) == [0, 1] and world.size == 2
    assert Path.cwd().samefile(tmp_path)
    assert hk.average_metrics({"rank": float(world.rank)}, world) == {"rank": 0.5}


def here(world):
    return [world.rank, world.size, world.launcher]


@on_ranks("torch", n=2)
def test_a_process_alone_has_no_launcher(alone):
    assert alone(here) == [0, 1, "none"]


@on_ranks("torch", mpi=True)
def test_ranks_over_mpi(world):
    import horovod.torch as hvd

    assert world.launcher == "Open MPI" and hvd.mpi_enabled()


@on_ranks(*ALL)
@pytest.mark.parametrize("time", ["first", "second"])
def test_nothing_of_a_test_is_left_to_the_next(hk, world, monkeypatch, time):
    seeds = sys.modules[f"{hk.__name__}.seeds"]
    assert seeds.CURRENT.seeds is None and "LEFT" not in os.environ and os.sep == "/"
    monkeypatch.setattr(os, "sep", "replaced")
    hk.seed_everything(3, world)
    if "keras" in sys.modules:
        import keras

        assert keras.config.floatx() == "float32" and keras.layers.Dense(1).name == "dense"
        keras.config.set_floatx("float64")
    if "torch" in sys.modules:
        import torch

        assert torch.get_default_dtype() == torch.float32
        torch.set_default_dtype(torch.float64)
    os.environ["LEFT"] = "behind"


@on_ranks("torch", n=2)
def test_random_numbers_are_no_rank_s_and_no_test_s_own(everyone):
    first, second = everyone(random.random())  # noqa: S311
    assert first != second


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("fails", ["rank 1 of torch-2-gloo: Traceback", "mistake = 'of rank 1'", "AssertionError: here"]),
        ("dies", ["rank 1 of torch-2-gloo: the process ended"]),
        ("hangs", ["rank 0 of torch-2-gloo: was still in it after 15 s", "rank 1 of torch-2-gloo: was still in it"]),
        ("ends_horovod", ["the test has shut Horovod down"]),
        ("replaces", ["the test has left hvdkit.torch.join replaced"]),
    ],
)
def test_what_happens_on_a_rank_is_told_and_the_ranks_are_gone(tmp_path, capfd, body, told):
    ranks = Ranks(Kind("torch", 2, "gloo", False))
    with pytest.raises(FailedOnRanks) as failed:
        ranks.run(__file__, f"body_{body}", {}, tmp_path, timeout=15 if body == "hangs" else 120)
    for part in told:
        assert part in str(failed.value)
    said = capfd.readouterr().out
    assert "a rank said this" in said
    assert ("body_hangs" in said) == (body == "hangs")
    for pid in ranks._pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def body_fails(world):
    print("a rank said this")
    if world.rank == 1:
        mistake = f"of rank {world.rank}"
        assert mistake == "", "here"


def body_dies(world):
    print("a rank said this", flush=True)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def body_hangs(hk, world):
    print("a rank said this", flush=True)
    if world.rank == 0:
        hk.average_metrics({"loss": 1.0}, world)
    else:
        signal.pause()


def body_replaces(hk, world):
    print("a rank said this", flush=True)
    hk.join = print


def body_ends_horovod(world):
    import horovod.torch as hvd

    print("a rank said this", flush=True)
    hvd.shutdown()
