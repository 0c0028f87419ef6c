"""The five collectives on real ranks, over Horovod for PyTorch and TensorFlow and over MPI: all give the same."""

import contextlib
import os
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from ranks import on_ranks

from hvdkit.core import communicator
from hvdkit.core.communicator import ALLGATHER, ALLREDUCE, ALLTOALL, BROADCAST, REDUCESCATTER, shares


def ranks_of(hk):
    """Between all ranks of what this test runs on."""
    if hk.__name__.endswith("arrays"):
        from hvdkit.arrays import mpi

        return mpi.ranks()
    return __import__(f"{hk.__name__}.state", fromlist=["RANKS"]).RANKS


def rows_of(rank, dtype=np.float64):
    """Two columns, and as many rows as there are ranks and ten more: no rank's like another's."""
    return (np.arange(24).reshape(12, 2) + 100 * rank).astype(dtype)


def expected(collective, rank, size):
    """What a rank must get of ``rows_of`` each."""
    everyone = [rows_of(other) for other in range(size)]
    starts = np.cumsum([0, *shares(12, size)])
    mine = slice(starts[rank], starts[rank + 1])
    return {
        ALLREDUCE: sum(everyone),
        ALLGATHER: np.concatenate(everyone),
        BROADCAST: everyone[1],
        REDUCESCATTER: sum(everyone)[mine],
        ALLTOALL: np.concatenate([rows[mine] for rows in everyone]),
    }[collective]


@pytest.mark.parametrize("collective", [ALLREDUCE, ALLGATHER, BROADCAST, REDUCESCATTER, ALLTOALL])
@on_ranks("torch", "tensorflow", "arrays", n=(2, 3), mpi=[("arrays", 2), ("arrays", 3)])
def test_each_collective_gives_what_it_must(hk, world, collective):
    ranks, right = ranks_of(hk), expected(collective, world.rank, world.size)
    options = {BROADCAST: {"root": 1}, ALLTOALL: {"counts": shares(12, world.size)}}.get(collective, {})
    given = rows_of(world.rank)
    request = ranks.start(collective, given, f"started.{collective}", **options)
    np.testing.assert_array_equal(request.wait(poll_s=0.001), right)
    in_place = collective in (ALLREDUCE, BROADCAST)
    np.testing.assert_array_equal(given, right if in_place else rows_of(world.rank))
    np.testing.assert_array_equal(ranks.run(collective, rows_of(world.rank), f"run.{collective}", **options), right)


@on_ranks("torch", "tensorflow", "arrays", n=(2, 3), mpi=[("arrays", 2), ("arrays", 3)])
def test_the_forms_that_wait_leave_what_they_are_given(hk, world):
    ranks, given = ranks_of(hk), rows_of(world.rank)
    np.testing.assert_array_equal(ranks.allreduce(given, "sum"), expected(ALLREDUCE, world.rank, world.size))
    np.testing.assert_array_equal(ranks.allreduce(given, "min", op="min"), rows_of(0))
    np.testing.assert_array_equal(ranks.broadcast(given, 1, "root"), rows_of(1))
    turned = np.asfortranarray(given)
    np.testing.assert_array_equal(ranks.broadcast(turned, 1, "turned"), rows_of(1))
    np.testing.assert_array_equal(given, rows_of(world.rank))
    uneven = ranks.allgather(given[: 2 * world.rank].astype(np.float32), "uneven")
    assert [len(rows) for rows in uneven] == [2 * rank for rank in range(world.size)]
    assert all((rows == rows_of(rank)[: 2 * rank]).all() for rank, rows in enumerate(uneven))
    assert ranks.gather_texts(f"rank {world.rank}" * (world.rank + 1), "texts")[1] == "rank 1rank 1"
    assert ranks.broadcast_object({"from": world.rank}, "object") == {"from": 0}


@pytest.mark.parametrize("dtype", ["float16", "bool", "complex128", "uint8", "int64"])
@on_ranks("arrays", n=3, mpi=True)
def test_over_mpi_rows_of_any_type_move(hk, world, dtype):
    ranks = ranks_of(hk)
    everyone = [rows_of(rank).astype(dtype) for rank in range(3)]
    mine = everyone[world.rank]
    np.testing.assert_array_equal(ranks.run(BROADCAST, mine.copy(), "", root=2), everyone[2])
    np.testing.assert_array_equal(ranks.run(ALLGATHER, mine, ""), np.concatenate(everyone))
    counts = [3, 1, 2]
    part = mine[: counts[world.rank]]
    right = np.concatenate([rows[:count] for rows, count in zip(everyone, counts, strict=True)])
    np.testing.assert_array_equal(ranks.run(ALLGATHER, part, "", counts=counts), right)
    right = np.concatenate([rows[4 * world.rank : 4 * world.rank + 4] for rows in everyone])
    np.testing.assert_array_equal(ranks.run(ALLTOALL, mine, ""), right)


@on_ranks("torch", "tensorflow", "arrays", n=(2, 3), mpi=[("arrays", 2), ("arrays", 3)])
def test_a_second_thread_meets_the_others_while_the_first_one_uses_the_same_ranks(hk, world):
    """The ranks begin in another order in the two threads, and no call pairs with one of the other thread."""
    ranks, found = ranks_of(hk), []
    gather = ranks.background(ALLGATHER, "second", poll_s=0.001)
    add_up = ranks.background(ALLREDUCE, "third", poll_s=0.001)

    def second():
        for turn in range(5):
            found.append(gather(np.array([[world.rank, turn]])).tolist())
            found.append(add_up(np.array([1.0 + world.rank])).tolist())

    thread = threading.Thread(target=second)
    if world.is_root:
        thread.start()
        time.sleep(0.3)  # its first call begins before any of this thread, on the other ranks after all of them
    mine = [ranks.allreduce(np.array([turn + world.rank]), "first").tolist() for turn in range(5)]
    if not world.is_root:
        thread.start()
    thread.join()
    total = sum(range(world.size))
    assert mine == [[turn * world.size + total] for turn in range(5)]
    assert found[::2] == [[[rank, turn] for rank in range(world.size)] for turn in range(5)]
    assert found[1::2] == [[float(world.size + total)]] * 5


@on_ranks("torch", "tensorflow", "arrays", n=3, mpi=[("arrays", 3)])
def test_an_error_of_one_rank_is_an_error_of_all(hk, world):
    from hvdkit.errors import AgreementError

    def action():
        if world.rank == 1:
            raise ValueError("no such file")
        return world.rank

    kind = ValueError if world.rank == 1 else AgreementError
    with pytest.raises(kind, match="no such file" if world.rank == 1 else "rank 1 failed, .*: no such file"):
        ranks_of(hk).together(action)
    assert ranks_of(hk).together(lambda: world.rank) == world.rank


def test_a_process_alone_gets_what_it_gives():
    alone = communicator.Alone()
    rows = rows_of(0)
    assert (alone.rank(), alone.size()) == (0, 1)
    assert alone.allgather(rows, "rows")[0] is not None and (alone.allgather(rows, "rows")[0] == rows).all()
    assert (alone.allreduce(rows, "sum") == rows).all() and alone.broadcast_object("x", "object") == "x"
    assert alone.together(lambda: 3) == 3


@on_ranks("torch", n=2)
def test_a_reducescatter_over_gloo_leaves_the_kernel_to_size_its_buffers(hk, world):
    """Gloo set them to the few bytes of its message, and whatever was reduced later left in parts of 2 kB."""
    ranks_of(hk).run(REDUCESCATTER, rows_of(world.rank), "share")
    sizes = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as one:
            if one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername():
                sizes.append(one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
    _, default, _ = map(int, Path("/proc/sys/net/ipv4/tcp_wmem").read_text().split())
    assert sizes and min(sizes) >= default
