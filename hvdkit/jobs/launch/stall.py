"""A collective that some ranks never arrive at: read from Horovod's stall reports, timed, put into words.

Horovod's coordinator looks once per ``HOROVOD_STALL_CHECK_TIME_SECONDS`` (c) at what waits, and writes::

    [... stall_inspector.cc:107] One or more tensors were submitted ... for more than 3 seconds. ...
    Missing ranks:
    1: [allreduce.metrics, allreduce.loss]

A tensor is reported when it has waited longer than c: after c to 2 c, or up to 4 c when it is in Horovod's cache. The
same tensor in the next report is the same wait (a new one would not yet be c old), so k reports in a row mean k c at
least. With c a quarter of the limit, the fourth report comes 1 to 1.75 limits after the start of the wait.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdkit.errors import name_ranks
from hvdkit.jobs.launch.output import LineBuffer

DUMP_S = 1.5
"""Seconds that the ranks have to hand in their stacks."""

_SHOWN_TENSORS = 3
_BEGIN = re.compile(rb"stall_inspector\.cc:\d+\]|submitted to be reduced, gathered or broadcasted by subset of ranks")
_BESIDE = ("hvdkit.watch", "hvdkit.allreduce_counts")
"""Collectives of hvdkit's second threads: no training waits for them, and a rank that compiles may be late for them."""
_HEADING = b"Missing ranks:"
_MISSING = re.compile(rb"(\d+)!?: \[(.*?)\]?\s*$")
_OPERATION = re.compile(r"((?:grouped_)?(?:allreduce|allgather|broadcast|alltoall|reducescatter))\.(.+)", re.DOTALL)


def check_period(limit_s: float) -> int:
    """Seconds between two looks of Horovod, a whole number >= 1, for a limit in seconds."""
    return max(1, int(limit_s / 4))


@dataclass(frozen=True, slots=True)
class Stall:
    """What waits, and for whom.

    Attributes:
        missing: the tensors that each rank did not arrive at, by rank; at least one.
    """

    missing: Mapping[int, tuple[str, ...]]

    def __str__(self) -> str:
        ranks_of: dict[tuple[str, ...], list[int]] = {}
        for rank, tensors in sorted(self.missing.items()):
            ranks_of.setdefault(tensors, []).append(rank)
        return ", ".join(
            f"{name_ranks(ranks)} did not arrive at {_tensors(names)}" for names, ranks in ranks_of.items()
        )

    def of(self, rank: int) -> str:
        """What one rank does, as a sentence's end: ``rank 1 did not arrive at allreduce 'metrics'``."""
        if rank in self.missing:
            return str(Stall({rank: self.missing[rank]}))
        return f"rank {rank} is not named by Horovod: it waits for another rank, or works"


class StallReports:
    """Follows the stall reports in one rank's standard error.

    Args:
        limit_s: seconds that a collective may wait, > 0.
    """

    def __init__(self, limit_s: float) -> None:
        self._period = check_period(limit_s)
        self._enough = math.ceil(limit_s / self._period)
        self._buffer = LineBuffer()
        self._in_report = False
        self._previous: dict[tuple[int, str], int] = {}
        self._current: dict[tuple[int, str], int] = {}
        self._reported_at = -math.inf

    def feed(self, data: bytes, now: float | None = None) -> bool:
        """Take the next bytes of the stream; True when a report is in them.

        Args:
            data: as they come, lines may be in pieces.
            now: seconds on a monotonic clock, the real one if None.
        """
        found = False
        for line in self._buffer.feed(data):
            if _BEGIN.search(line):
                now = time.monotonic() if now is None else now
                in_a_row = now - self._reported_at < 1.75 * self._period
                self._previous, self._current = self._current if in_a_row else {}, {}
                self._reported_at = now
                self._in_report = found = True
            elif self._in_report and not line.startswith(_HEADING):
                match = _MISSING.match(line)
                self._in_report = match is not None
                if match is None:
                    continue
                for tensor in match[2].decode(errors="replace").split(", "):
                    if not tensor.endswith(_BESIDE):
                        waits = int(match[1]), tensor
                        self._current[waits] = self._previous.get(waits, 0) + 1
        return found

    def overdue(self) -> dict[int, tuple[str, ...]]:
        """What has waited longer than the limit in the newest report: tensors by missing rank, empty if nothing."""
        found: dict[int, tuple[str, ...]] = {}
        for (rank, tensor), reports in self._current.items():
            if reports >= self._enough:
                found[rank] = (*found.get(rank, ()), tensor)
        return found


def write_stacks(directory: Path, stall: Stall, stacks: Mapping[int, bytes]) -> str:
    """Write ``rank-K.txt`` for each rank; where they are, or why not, as the middle of a sentence.

    Args:
        directory: made if it does not exist.
        stall: why they are written; the first line of each file.
        stacks: what each rank handed in.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for rank, text in stacks.items():
            text = text or b"It handed in no stacks within the time it had.\n"
            (directory / f"rank-{rank}.txt").write_bytes(f"{stall.of(rank)}\n\n".encode() + text)
    except OSError as error:
        return f"the stacks cannot be written to {directory} ({error.strerror})"
    return f"the Python stacks of every rank are in {directory}"


def _tensors(names: tuple[str, ...]) -> str:
    shown = ", ".join(map(_tensor, names[:_SHOWN_TENSORS]))
    return shown if len(names) <= _SHOWN_TENSORS else f"{shown} and {len(names) - _SHOWN_TENSORS} more tensors"


def _tensor(name: str) -> str:
    match = _OPERATION.fullmatch(name)
    return f"{match[1]} {match[2]!r}" if match is not None else repr(name)
