"""What a framework binding asks of the other ranks about its state, with NumPy arrays: the same in every framework."""

from __future__ import annotations

import functools
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdkit.steps.root import on_root, stop_together

Words = npt.NDArray[np.int64]
CHUNK = 64 * 2**20  # bytes in one broadcast
BACKGROUND_POLL_S = 0.01
"""Pause between two looks for what other ranks say in the background."""


def words_of(text: str, count: int) -> Words:
    """A text, cut after 8 * ``count`` bytes, as int64 (count,): what takes as much room on every rank."""
    return np.frombuffer(bytearray(text.encode()[: 8 * count].ljust(8 * count, b"\0")), np.int64)


def text_of(words: Words) -> str:
    """The text of ``words_of``, without a character that was cut."""
    return words.tobytes().rstrip(b"\0").decode(errors="ignore")


class Collectives(ABC):
    """Between all ranks. All methods but ``rank`` and ``size`` are collectives; a name tells calls apart in records."""

    @abstractmethod
    def rank(self) -> int:
        """This process among all."""

    @abstractmethod
    def size(self) -> int:
        """The number of processes."""

    @abstractmethod
    def gather(self, rows: npt.NDArray[Any], name: str) -> list[npt.NDArray[Any]]:
        """Every rank's ``rows``, in rank order; the first axes may differ."""

    @abstractmethod
    def sum(self, values: npt.NDArray[np.float64], name: str) -> npt.NDArray[np.float64]:
        """The sum over all ranks, the same bits on each; the same shape everywhere."""

    @abstractmethod
    def minimum(self, values: Words, name: str) -> Words:
        """The element-wise minimum over all ranks; the same shape everywhere."""

    @abstractmethod
    def broadcast(self, flat: npt.NDArray[np.uint8], root: int, name: str) -> npt.NDArray[np.uint8]:
        """The root's bytes; the same length everywhere."""

    @abstractmethod
    def broadcast_object(self, value: Any, name: str) -> Any:
        """Rank 0's ``value``."""

    def on_root(self, action: Callable[[], Any]) -> Any:
        """Run ``action`` on rank 0 and give every rank its result or its error."""
        return on_root(self.rank() == 0, action, lambda outcome: self.broadcast_object(outcome, "hvdkit.on_root"))

    def together(self, action: Callable[[], Any]) -> Any:
        """Run ``action`` on every rank; an error on one of them is an error on all, so that none waits.

        Raises:
            AgreementError: the action failed on other ranks only; else what it raised here.
        """
        result: Any = None
        failure: Exception | None = None
        try:
            result = action()
        except Exception as error:
            failure = error
        self.raise_together(failure)
        return result

    def raise_together(self, failure: Exception | None) -> None:
        """Raise this rank's failure, or on the other ranks an AgreementError that tells of it."""
        everyone = self.gather_texts("\0" if failure is None else f"\1{failure}", "hvdkit.together")  # never empty
        stop_together([None if text == "\0" else text[1:] for text in everyone], failure)

    def gather_texts(self, text: str, name: str) -> list[str]:
        """Every rank's ``text``, which is not empty, in rank order."""
        rows = self.gather(np.frombuffer(bytearray(text.encode()), np.uint8), name)
        return [row.tobytes().decode() for row in rows]

    def broadcast_arrays(self, arrays: Sequence[npt.NDArray[Any]], root: int) -> list[npt.NDArray[Any]]:
        """The root's values of arrays that have the same shapes and types on all ranks, sent as bytes: exact."""
        flat = np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays])
        for start in range(0, len(flat), CHUNK):
            part = slice(start, start + CHUNK)
            flat[part] = self.broadcast(flat[part], root, "hvdkit.broadcast_state")
        ends = np.cumsum([array.nbytes for array in arrays])
        parts = np.split(flat, ends[:-1])
        return [part.view(array.dtype).reshape(array.shape) for array, part in zip(arrays, parts, strict=True)]

    def broadcast_variables(
        self, variables: Iterable[Any], value_of: Callable[[Any], npt.NDArray[Any]], root: int
    ) -> None:
        """Give every rank the root's values of variables that have an ``assign``.

        Args:
            value_of: a variable's value on the host.
        """
        for bucket in _buckets(variables, value_of):
            received = self.broadcast_arrays([value for _, value in bucket], root)
            if self.rank() != root:
                for (variable, _), value in zip(bucket, received, strict=True):
                    variable.assign(value)

    def largest_difference(self, mine: npt.NDArray[Any]) -> float:
        """The largest absolute difference between any rank's values and the root's; nan where a value is none."""
        # float64 does not hold every int64
        exact: dict[str, Any] = {"c": np.complex128, "i": np.longdouble, "u": np.longdouble}
        own: npt.NDArray[Any] = mine.astype(exact.get(mine.dtype.kind, np.float64))
        (root,) = self.broadcast_arrays([own], 0)
        with np.errstate(all="ignore"):  # an error here alone would leave the others waiting
            gap = np.abs(own - root).max().astype(np.float64) if own.size else np.float64("nan")
        everyone = self.gather(gap.reshape(1).view(np.int64), "hvdkit.largest_difference")
        return float(np.concatenate(everyone).view(np.float64).max())


class Alone(Collectives):
    """One process, where nothing was started."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def gather(self, rows: npt.NDArray[Any], name: str) -> list[npt.NDArray[Any]]:  # noqa: ARG002
        return [rows]

    def sum(self, values: npt.NDArray[np.float64], name: str) -> npt.NDArray[np.float64]:  # noqa: ARG002
        return values

    def minimum(self, values: Words, name: str) -> Words:  # noqa: ARG002
        return values

    def broadcast(self, flat: npt.NDArray[np.uint8], root: int, name: str) -> npt.NDArray[np.uint8]:  # noqa: ARG002
        return flat

    def broadcast_object(self, value: Any, name: str) -> Any:  # noqa: ARG002
        return value


class OverHorovod(Collectives):
    """Over Horovod, for any framework whose tensors turn into NumPy arrays.

    Args:
        hvd: ``horovod.torch`` or ``horovod.tensorflow``.
        tensor: makes that framework's tensor of a NumPy array.
        process_set: between the ranks of this one alone; default: all.
    """

    def __init__(self, hvd: Any, tensor: Callable[[Any], Any], process_set: Any = None) -> None:
        self.hvd, self._tensor = hvd, tensor
        self._among = {} if process_set is None else {"process_set": process_set}

    def rank(self) -> int:
        return int(self._among["process_set"].rank() if self._among else self.hvd.rank())

    def size(self) -> int:
        return int(self._among["process_set"].size() if self._among else self.hvd.size())

    def gather(self, rows: npt.NDArray[Any], name: str) -> list[npt.NDArray[Any]]:
        count = self._tensor(np.array([len(rows)], dtype=np.int64))
        lengths = self.hvd.allgather(count, name=f"{name}.lengths", **self._among).numpy()
        everyone = self.hvd.allgather(self._tensor(rows), name=name, **self._among).numpy()
        return np.split(everyone, np.cumsum(lengths)[:-1])

    def sum(self, values: npt.NDArray[np.float64], name: str) -> npt.NDArray[np.float64]:
        total: npt.NDArray[np.float64] = self.hvd.allreduce(
            self._tensor(values), op=self.hvd.Sum, name=name, **self._among
        ).numpy()
        return total

    def minimum(self, values: Words, name: str) -> Words:
        lowest: Words = self.hvd.allreduce(self._tensor(values), op=self.hvd.Min, name=name, **self._among).numpy()
        return lowest

    def broadcast(self, flat: npt.NDArray[np.uint8], root: int, name: str) -> npt.NDArray[np.uint8]:
        received: npt.NDArray[np.uint8] = self.hvd.broadcast(self._tensor(flat), root, name=name, **self._among).numpy()
        return received

    def broadcast_object(self, value: Any, name: str) -> Any:
        return self.hvd.broadcast_object(value, root_rank=0, name=name, **self._among)

    def background_allgather(self, words: Words, name: str) -> Words:
        """Every rank's words, int64 (size, n), in a second thread, whatever the first one waits for; over PyTorch."""
        handle = self.hvd.allgather_async(self._tensor(words[None].copy()), name=name)
        while not self.hvd.poll(handle):  # waiting in Horovod would take a core
            time.sleep(BACKGROUND_POLL_S)
        everyone: Words = self.hvd.synchronize(handle).numpy()
        return everyone


class OverMpi(Collectives):
    """Over mpi4py, whose calls pair up in order and not by name.

    Args:
        comm: of the ranks.
        mpi: ``mpi4py.MPI``.
    """

    def __init__(self, comm: Any, mpi: Any) -> None:
        self._comm, self._mpi = comm, mpi

    def _in_order(self) -> Any:
        """The communicator, when this process's other calls have been made."""
        return self._comm

    def rank(self) -> int:
        return int(self._comm.Get_rank())

    def size(self) -> int:
        return int(self._comm.Get_size())

    def gather(self, rows: npt.NDArray[Any], name: str) -> list[npt.NDArray[Any]]:  # noqa: ARG002
        return list(self._in_order().allgather(rows))

    def sum(self, values: npt.NDArray[np.float64], name: str) -> npt.NDArray[np.float64]:  # noqa: ARG002
        total = np.empty_like(values)
        self._in_order().Allreduce(values, total)
        return total

    def minimum(self, values: Words, name: str) -> Words:  # noqa: ARG002
        lowest = np.empty_like(values)
        self._in_order().Allreduce(values, lowest, op=self._mpi.MIN)
        return lowest

    def broadcast(self, flat: npt.NDArray[np.uint8], root: int, name: str) -> npt.NDArray[np.uint8]:  # noqa: ARG002
        received = flat.copy()
        self._in_order().Bcast(received, root=root)
        return received

    def broadcast_object(self, value: Any, name: str) -> Any:  # noqa: ARG002
        return self._in_order().bcast(value, root=0)


def background_allgather(comm: Any, words: Words) -> Words:
    """Every rank's words, int64 (size, n), in a second thread, over a communicator that nothing else uses."""
    everyone = np.empty((comm.Get_size(), len(words)), dtype=np.int64)
    request = comm.Iallgather(words, everyone)
    while not request.Test():  # waiting in MPI would take a core
        time.sleep(BACKGROUND_POLL_S)
    return everyone


def end_the_job_with_the_process(comm: Any) -> None:
    """Without this, a rank that raises leaves the others waiting in their next MPI call forever."""
    report, process = sys.excepthook, os.getpid()

    def abort(*error: Any) -> None:
        report(*error)
        sys.stderr.flush()
        if os.getpid() == process:  # one that it forked is no rank
            comm.Abort(1)

    sys.excepthook = functools.wraps(report)(abort)


def _buckets(
    variables: Iterable[Any], value_of: Callable[[Any], npt.NDArray[Any]]
) -> Iterator[list[tuple[Any, npt.NDArray[Any]]]]:
    """Variables with their values, about ``CHUNK`` bytes at a time, so that the host never holds them all."""
    bucket: list[tuple[Any, npt.NDArray[Any]]] = []
    size = 0
    for variable in variables:
        bucket.append((variable, value_of(variable)))
        size += bucket[-1][1].nbytes
        if size >= CHUNK:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
