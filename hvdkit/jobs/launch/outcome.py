"""Which rank's end decides how a job ended."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass

from hvdkit.common.programs import signal_name
from hvdkit.common.units import bytes_text
from hvdkit.errors import name_ranks


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank ended.

    Attributes:
        rank: 0 .. n-1.
        status: its exit status, or minus the number of the signal that killed it.
        told: it was told to end, by this launcher or by mpirun, before it ended.
        knock_on: it wrote that Horovod lost a peer, or that the root failed.
        pid: process id of its command, 0 when it is not known.
        host: where it ran; "" on one host.
        out_of_memory: the kernel killed a process of its cgroup because memory ran out.
        limit: bytes that this cgroup may have, 0 for no limit.
        how: what to say where the status does not say how it ended.
    """

    rank: int
    status: int
    told: bool = False
    knock_on: bool = False
    pid: int = 0
    host: str = ""
    out_of_memory: bool = False
    limit: int = 0
    how: str = ""

    @property
    def memory(self) -> str:
        """What to add to a sentence on a process that was killed: "" where the kernel has killed none for memory."""
        if not self.out_of_memory:
            return ""
        limit = f" (the limit of its cgroup is {bytes_text(self.limit)})" if self.limit else ""
        return f" because memory ran out{limit}"

    @property
    def exit_status(self) -> int:
        """The status as a shell gives it: 128 + N after signal N."""
        return self.status if self.status >= 0 else 128 - self.status

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        who = f"rank {self.rank} (pid {self.pid}{where})" if self.pid else f"rank {self.rank}{where}"
        if self.how or self.status >= 0:
            return f"{who} {self.how or f'exited with status {self.status}'}"
        return f"{who} was killed by {signal_name(-self.status)}"


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ended.

    Attributes:
        status: 0, or the exit status of the first rank that failed (128 + N after signal N); without such a rank that
            of the launcher; 128 + N when signal N told this process to end the job.
        interrupted: this process was told to end it, or nobody reads its output any more.
        failure: the rank that failed first by itself, None without one.
    """

    status: int
    interrupted: bool
    failure: RankEnd | None = None


def first_failure(ends: Iterable[RankEnd]) -> RankEnd | None:
    """The rank that failed first by itself, None if none did.

    Args:
        ends: in the order in which they happened.
    Returns:
        The first failure. A rank that failed because it lost a peer may well be gone before that peer (which still
        has its libraries to close), so it counts only if nothing else failed.
    """
    failures = [end for end in ends if end.status != 0 and not end.told]
    return min(failures, key=lambda end: end.knock_on, default=None)


def left_early(ends: Iterable[RankEnd]) -> RankEnd | None:
    """The first rank that ended well while others, which then only lost a peer or were told to end, were not done.

    Args:
        ends: in the order in which they happened.
    Returns:
        None if none did, or if a rank failed by itself.
    """
    known = list(ends)
    failure = first_failure(known)
    if (failure is None and not any(end.told for end in known)) or (failure is not None and not failure.knock_on):
        return None
    first = next((end for end in known if end.status == 0 or end.told), None)
    return None if first is None or first.told else first


def killed_after_grace(ends: Iterable[RankEnd], grace_s: float) -> str:
    """The ranks that were told to end and had to be killed, for the end of a sentence; "" where there are none."""
    killed = sorted(end.rank for end in ends if end.told and end.status == -signal.SIGKILL)
    return f", {name_ranks(killed)} by SIGKILL (--grace allows more than {grace_s:g} s)" if killed else ""


def cause(failure: RankEnd, workers: Iterable[tuple[int, int]]) -> str:
    """What killed a rank, or the process of its own that it had lost, for a sentence's end; "" for neither.

    Args:
        workers: of this rank, those that were killed: process id and signal, in the order in which they were.
    """
    if failure.status == -signal.SIGKILL:
        return failure.memory
    for pid, number in workers:
        memory = failure.memory if number == signal.SIGKILL else ""
        return f" after its worker (pid {pid}) had been killed by {signal_name(number)}{memory}"
    return ""
