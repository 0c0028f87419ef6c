"""Ranks that are threads of one process: a communicator with the calls that hvdkit.arrays makes, without MPI."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np

MPI = SimpleNamespace(
    IN_PLACE=object(),
    MIN=np.minimum,
    COMM_TYPE_SHARED=object(),
    buffer=SimpleNamespace(frombuffer=lambda array: array),
    Datatype=SimpleNamespace(fromcode=lambda code: code),
)
ONE_HOST = [False]
"""Whether ranks share a host, where a test does not say."""


class Meeting:
    """Where the threads meet; every rank brings something and sees what all brought."""

    def __init__(self, size, one_host=False):
        self.one_host = one_host
        self.size, self.barrier, self.brought = size, threading.Barrier(size, timeout=20), [None] * size

    def exchange(self, rank, value):
        self.brought[rank] = value
        self.barrier.wait()
        everyone = list(self.brought)
        self.barrier.wait()
        return everyone


class Done:
    """A request that is complete."""

    def Wait(self):  # noqa: N802
        return True

    Test = Wait


class Ranks:
    """One thread's communicator. ``sent`` counts the bytes of its collective calls."""

    def __init__(self, meeting, rank):
        self.meeting, self.rank, self.sent = meeting, rank, []

    def Dup(self):  # noqa: N802
        return self

    def Split_type(self, kind):  # noqa: N802
        """Hosts of one rank each, unless the meeting says that all share one."""
        return self if self.meeting.one_host else Ranks(Meeting(1), 0)

    def Free(self):  # noqa: N802
        """Nothing to free."""

    def Barrier(self):  # noqa: N802
        self.meeting.exchange(self.rank, None)

    def Ibarrier(self):  # noqa: N802
        self.Barrier()
        return Done()

    def Get_rank(self):  # noqa: N802
        return self.rank

    def Get_size(self):  # noqa: N802
        return self.meeting.size

    def allgather(self, value):
        return self.meeting.exchange(self.rank, value)

    def bcast(self, value, root=0):
        return self.meeting.exchange(self.rank, value)[root]

    def Bcast(self, message, root=0):  # noqa: N802
        array = message[0]
        array[...] = self.meeting.exchange(self.rank, array.copy())[root]

    def Allreduce(self, source, target, op=np.add):  # noqa: N802
        target = target[0] if isinstance(target, list) else target
        mine = target if source is MPI.IN_PLACE else source
        self.sent.append(mine.nbytes)
        every = self.meeting.exchange(self.rank, mine.copy())
        total = every[0].copy()
        with np.errstate(all="ignore"):  # MPI adds up without NumPy
            for other in every[1:]:
                op(total, other, out=total)
        target[...] = total

    def Iallreduce(self, source, target):  # noqa: N802
        self.Allreduce(source, target)
        return Done()

    def Ialltoall(self, source, target):  # noqa: N802
        self.sent.append(source.nbytes)
        every = self.meeting.exchange(self.rank, source.reshape(self.meeting.size, -1).copy())
        target.reshape(self.meeting.size, -1)[...] = [one[self.rank] for one in every]
        return Done()

    def Ibcast(self, message, root=0):  # noqa: N802
        self.Bcast(message, root)
        return Done()

    def Allgather(self, source, target):  # noqa: N802
        self.Iallgather(source, target)

    def Alltoall(self, source, target):  # noqa: N802
        self.Ialltoall(source, target)

    def Iallgather(self, source, target):  # noqa: N802
        self.sent.append(source.nbytes)
        target[...] = np.concatenate(self.meeting.exchange(self.rank, source.copy()))
        return Done()


def on_ranks(size, function, one_host=None):
    """What ``function(comm)`` returned, or the error that it raised, on each of ``size`` ranks."""
    meeting = Meeting(size, ONE_HOST[0] if one_host is None else one_host)

    def one(rank):
        try:
            return function(Ranks(meeting, rank))
        except threading.BrokenBarrierError:
            raise
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(one, range(size)))
