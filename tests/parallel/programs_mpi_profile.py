"""What each rank does in the tests of the MPI profile: calls whose number and bytes are known beforehand."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
rank, size = world.rank, world.size
one, other = np.ones(1000, "f4"), np.empty(1000, "f4")


def collectives():
    """Blocking and non-blocking ones, in place and not."""
    for _ in range(7):
        world.Allreduce(one, other)
    for _ in range(5):
        world.Allreduce(MPI.IN_PLACE, other, op=MPI.MAX)
    for _ in range(3):
        world.Iallreduce(one[:10], other[:10]).Wait()
    for _ in range(4):
        world.Bcast(other[:250], root=1)
    everyone = np.empty(100 * size, "f8")
    everyone[100 * rank : 100 * rank + 100] = rank
    world.Allgather(np.full(100, rank, "f8"), everyone)
    world.Allgather(MPI.IN_PLACE, everyone)
    counts = [rank_ + 1 for rank_ in range(size)]
    room = np.empty(sum(counts), "f8")
    world.Allgatherv(np.ones(rank + 1), [room, counts])
    world.Gather(np.ones(3, "i4"), np.empty(3 * size, "i4") if rank == 0 else None)
    world.Reduce(one[:50], other[:50], root=0)
    world.Reduce_scatter(np.ones(sum(counts)), np.empty(rank + 1), counts)
    world.Alltoall(np.ones(2 * size), np.empty(2 * size))
    world.Barrier()
    half = world.Split(rank % 2, rank)
    half.Allreduce(one[:1], other[:1])
    half.Free()


def messages():
    """A ring of blocking and non-blocking messages; the last one is shorter than the room for it."""
    to, source = (rank + 1) % size, (rank - 1) % size
    for _ in range(6):
        requests = [world.Isend(one, to), world.Irecv(other, source)]
        MPI.Request.Waitall(requests)
    world.Sendrecv(one[:20], to, recvbuf=other, source=source)
    if rank == 0:
        world.Send(one[:10], 1)
    elif rank == 1:
        world.Recv(other, 0)


def threads():
    """Four threads at once, each over a communicator of its own; as many calls of each as if they took turns."""
    own = [world.Dup() for _ in range(4)]

    def reduce(communicator):
        mine = np.empty(4, "f8")
        for _ in range(500):
            communicator.Allreduce(np.ones(4), mine)

    workers = [threading.Thread(target=reduce, args=(communicator,)) for communicator in own]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def killed():
    """Rank 1 is killed after some calls, without a word."""
    for _ in range(50):
        world.Allreduce(one, other)
    threading.Event().wait(0.1)
    world.Allreduce(one, other)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world.Allreduce(one, other)


def paused():
    """Only what is between the two levels is recorded."""
    MPI.Pcontrol(0)
    world.Allreduce(one, other)
    MPI.Pcontrol(1)
    for _ in range(2):
        world.Allreduce(one, other)


def child():
    """A forked child and a program that is started leave the record alone."""
    world.Allreduce(one, other)
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).exit(0)  # libraries clean up; Python, which would finalize MPI, does not
    os.waitpid(pid, 0)
    assert not (Path(os.environ["HVDKIT_MPI_PROFILE"]) / f"mpi_profile.{rank}.json").exists()
    subprocess.run(["/bin/sh", "-c", 'test -z "$LD_PRELOAD"'], check=True)
    world.Allreduce(one, other)


def wait():
    """Rank 0 comes late to each of five allreduces."""
    for _ in range(5):
        if rank == 0:
            threading.Event().wait(0.05)
        world.Allreduce(one, other)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
