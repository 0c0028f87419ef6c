"""Adding up in memory that all ranks of one host share; the inside of ``hvdkit.arrays``.

MPI_Allreduce of a long buffer copies it into and out of memory that the processes share, and knows sums only: a mean
takes one more pass over it. Here the gradients lie in shared memory from the beginning. Each rank adds up one part of
all ranks' gradients, piece by piece in its cache, scales it there, and writes it back to all of them.
"""

from __future__ import annotations

import contextlib
import contextvars
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

DIRECTORY = Path("/dev/shm")  # noqa: S108  a file system in memory
PIECE_BYTES = 1 << 16
_LINE = 64
_PAGE = 4096


def segments(comm: Any, length: int) -> list[Array] | None:
    """Memory of every rank, uint8 (length,) each, that all can read and write; a collective.

    The file behind it is gone when this returns: nothing is left behind, whatever becomes of the job.

    Returns:
        By rank; None, on every rank, where some rank has no such memory (too little, or none that it shares).
    """
    whole = -(-length // _PAGE) * _PAGE
    path: Path | None = None
    if comm.Get_rank() == 0:
        path = _made(whole * comm.Get_size())
    path = comm.bcast(path, root=0)
    memory = None if path is None else _opened(path, whole * comm.Get_size())
    everyone = all(comm.allgather(memory is not None))
    if path is not None and comm.Get_rank() == 0:
        path.unlink(missing_ok=True)
    if memory is None or not everyone:
        return None
    flat = np.frombuffer(memory, dtype=np.uint8)
    return [flat[rank * whole : rank * whole + length] for rank in range(comm.Get_size())]


def buffer(comm: Any, length: int, head: int, dtype: np.dtype[Any]) -> tuple[Array, SharedSum | None]:
    """This rank's buffer, (length,), and what adds up all ranks' behind their heads; a collective.

    Without shared memory: a buffer in memory of its own, and None.
    """
    before = -(-8 * comm.Get_size() // _LINE) * _LINE  # the weights, in whole cache lines
    memory = segments(comm, before + length * dtype.itemsize)
    if memory is None:
        return np.zeros(length, dtype=dtype), None
    messages = [one[before:].view(dtype) for one in memory]
    weights = memory[0][: 8 * comm.Get_size()].view(np.float64)
    rank = comm.Get_rank()
    return messages[rank], SharedSum([message[head:] for message in messages], weights, rank)


def _made(length: int) -> Path | None:
    path = DIRECTORY / f"hvdkit-{secrets.token_hex(16)}"
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except OSError:
        return None
    try:
        os.posix_fallocate(file, 0, length)  # an error now rather than a bus error later
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    finally:
        os.close(file)
    return path


def _opened(path: Path, length: int) -> mmap.mmap | None:
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:  # another container, with a /dev/shm of its own
        return None
    try:
        return mmap.mmap(file, length)
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)


class SharedSum:
    """Adds up the ranks' payloads where they are.

    Args:
        payloads: of each rank, by rank; the same length and type.
        weights: float64 (ranks,), shared: what each rank's gradients are multiplied by.
        rank: this one.
    """

    def __init__(self, payloads: Sequence[Array], weights: Array, rank: int) -> None:
        self._weights = weights
        self._rank = rank
        count, size = len(payloads[0]), len(payloads)
        piece = max(1, PIECE_BYTES // payloads[0].itemsize)
        part = -(-count // (size * 64)) * 64  # whole cache lines: no two ranks write to the same
        first, last = min(count, rank * part), min(count, (rank + 1) * part)
        ends = [(start, min(start + piece, last)) for start in range(first, last, piece)]
        self._pieces = [[payload[start:end] for payload in payloads] for start, end in ends]
        self._total = np.empty(min(piece, max(1, count)), dtype=payloads[0].dtype)
        self._term = np.empty_like(self._total)

    def announce(self, weight: float) -> None:
        """Say what this rank's gradients are multiplied by, before the ranks meet."""
        self._weights[self._rank] = weight

    def add_up(self, factor: float) -> None:
        """Add up this rank's part of weight * gradient * factor, for all ranks.

        They must have met since they put their gradients here, and must meet again before they read the result.
        """
        weights = self._weights.tolist()
        alike = len(set(weights)) == 1
        factors = [weight * factor for weight in weights]
        for pieces in self._pieces:
            total, term = self._total[: len(pieces[0])], self._term[: len(pieces[0])]
            if alike:
                np.add(pieces[0], pieces[1], out=total)
                for piece in pieces[2:]:
                    np.add(total, piece, out=total)
                if factors[0] != 1.0:
                    np.multiply(total, factors[0], out=total)
            else:
                np.multiply(pieces[0], factors[0], out=total)
                for piece, own in zip(pieces[1:], factors[1:], strict=True):
                    np.multiply(piece, own, out=term)
                    np.add(total, term, out=total)
            for piece in pieces:
                piece[:] = total


def quiet() -> Callable[..., Any]:
    """What calls a function with NumPy's floating point errors ignored: ``quiet()(function, *arguments)``.

    With ``np.seterr(all="raise")``, or with warnings that are errors, a gradient that overflows on one rank would end
    the exchange there, and leave the others waiting. The sum is infinite on every rank instead, as MPI's own is.

    Not for two threads at once.
    """
    with np.errstate(all="ignore"):
        context = contextvars.copy_context()
    if context.run(np.geterr)["over"] == "ignore":
        return context.run  # a tenth of what np.errstate costs
    return lambda function, *arguments: np.errstate(all="ignore")(function)(*arguments)  # before NumPy 2.0: by thread
