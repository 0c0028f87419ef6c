"""Collectives between ranks, of NumPy arrays, over Horovod or mpi4py: written once, for the steps, bindings and tools.

=============  ==========================================  ====================================================
collective     a rank gives                                and gets
=============  ==========================================  ====================================================
allreduce      values of the same shape everywhere         their sum or minimum over the ranks
allgather      rows, of any number                         all ranks' rows, in rank order
broadcast      values of the same shape everywhere         the root's
reducescatter  values of the same shape everywhere         its ``shares`` of their sum
alltoall       rows for each rank                          the rows that each rank has for it
=============  ==========================================  ====================================================

A library says how a collective starts; to wait for it, to do so in a second thread, and what is made of several, such
as one error on all ranks, is the same over each. Imports no framework.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdkit.errors import AgreementError, HvdkitError, RootError, name_ranks

Array = npt.NDArray[Any]
Words = npt.NDArray[np.int64]
ALLREDUCE, ALLGATHER, BROADCAST = "allreduce", "allgather", "broadcast"
REDUCESCATTER, ALLTOALL = "reducescatter", "alltoall"
CHUNK = 64 * 2**20  # bytes in one broadcast
BACKGROUND_POLL_S = 0.01
"""Pause of a second thread between two looks for what other ranks give."""


@dataclass(frozen=True, slots=True)
class PendingCollective:
    """A collective on its way: whether ``receive`` would return at once, and what waits for what this rank gets."""

    done: Callable[[], bool]
    receive: Callable[[], Any]

    def wait(self, poll_s: float | None = None) -> Any:
        """What this rank gets; with ``poll_s`` seconds of sleep between two looks: the library's wait takes a core."""
        while poll_s is not None and not self.done():
            time.sleep(poll_s)
        return self.receive()


class Communicator(ABC):
    """Between all ranks. All methods but ``rank`` and ``size`` are collectives; a name tells calls apart in records."""

    @abstractmethod
    def rank(self) -> int:
        """This process among all."""

    @abstractmethod
    def size(self) -> int:
        """The number of processes."""

    @abstractmethod
    def start(
        self, collective: str, array: Array, name: str, *, op: str = "sum", root: int = 0, counts: Any = None
    ) -> PendingCollective:
        """Start a collective and go on.

        Args:
            collective: one of the five, see the table at the top.
            array: what this rank gives, in C order. An allreduce and a broadcast put what it gets in its place.
            op: of an allreduce: "sum" or "min".
            root: of a broadcast.
            counts: rows of each rank (allgather), or for each rank (alltoall), the same on every rank; default: as many
                for one as for another.
        """

    @abstractmethod
    def broadcast_object(self, value: Any, name: str) -> Any:
        """Rank 0's ``value``, which can be pickled."""

    def run(self, collective: str, array: Array, name: str, **options: Any) -> Any:
        """As ``start``, and wait."""
        return self.start(collective, array, name, **options).wait()

    def background(
        self, collective: str, name: str, poll_s: float = BACKGROUND_POLL_S, **options: Any
    ) -> Callable[[Array], Array]:
        """A collective for a second thread, by a name that no other uses; made in the first one, on all ranks."""
        return lambda array: self.start(collective, np.asarray(array), name, **options).wait(poll_s)

    def has_ended(self, error: Exception) -> bool:
        """Whether what ``background`` raised is the end of the library: then whoever waits for a rank gets an error."""
        return type(error).__module__.partition(".")[0] not in ("builtins", "numpy")

    def allreduce(self, values: npt.ArrayLike, name: str, op: str = "sum") -> Array:
        """The sum ("min": the element-wise minimum) over all ranks, the same bits on each."""
        return self.run(ALLREDUCE, np.array(values, order="C"), name, op=op)  # type: ignore[no-any-return]

    def allgather(self, rows: Array, name: str) -> list[Array]:
        """Every rank's ``rows``, in rank order; their number may differ."""
        lengths = self.run(ALLGATHER, np.array([len(rows)], dtype=np.int64), f"{name}.lengths")
        return np.split(self.run(ALLGATHER, rows, name, counts=lengths), np.cumsum(lengths)[:-1])

    def broadcast(self, values: Array, root: int, name: str) -> Array:
        """The root's values."""
        return self.run(BROADCAST, np.array(values, order="C"), name, root=root)  # type: ignore[no-any-return]

    # What is made of them ---------------------------------------------------------------------------------------------

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
        if failure is not None:
            raise failure
        failed = [rank for rank, text in enumerate(everyone) if text != "\0"]
        if failed:
            raise AgreementError(f"{name_ranks(failed)} failed, and the others stop with it: {everyone[failed[0]][1:]}")

    def gather_texts(self, text: str, name: str) -> list[str]:
        """Every rank's ``text``, which is not empty, in rank order."""
        rows = self.allgather(np.frombuffer(bytearray(text.encode()), np.uint8), name)
        return [row.tobytes().decode() for row in rows]

    def broadcast_arrays(self, arrays: Sequence[Array], root: int) -> list[Array]:
        """The root's values of arrays that have the same shapes and types on all ranks, sent as bytes: exact."""
        flat = np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays])
        for start in range(0, len(flat), CHUNK):
            self.run(BROADCAST, flat[start : start + CHUNK], "hvdkit.broadcast_state", root=root)
        ends = np.cumsum([array.nbytes for array in arrays])
        parts = np.split(flat, ends[:-1])
        return [part.view(array.dtype).reshape(array.shape) for array, part in zip(arrays, parts, strict=True)]

    def broadcast_variables(self, variables: Iterable[Any], value_of: Callable[[Any], Array], root: int) -> None:
        """Give every rank the root's values of variables that have an ``assign``; ``value_of``: one's on the host."""
        for bucket in _buckets(variables, value_of):
            received = self.broadcast_arrays([value for _, value in bucket], root)
            if self.rank() != root:
                for (variable, _), value in zip(bucket, received, strict=True):
                    variable.assign(value)

    def largest_difference(self, mine: Array) -> float:
        """The largest absolute difference between any rank's values and the root's; nan where a value is none."""
        # float64 does not hold every int64
        exact: dict[str, Any] = {"c": np.complex128, "i": np.longdouble, "u": np.longdouble}
        own: Array = mine.astype(exact.get(mine.dtype.kind, np.float64))
        (root,) = self.broadcast_arrays([own], 0)
        with np.errstate(all="ignore"):  # an error here alone would leave the others waiting
            gap = np.abs(own - root).max().astype(np.float64) if own.size else np.float64("nan")
        everyone = self.allgather(gap.reshape(1).view(np.int64), "hvdkit.largest_difference")
        return float(np.concatenate(everyone).view(np.float64).max())


class Alone(Communicator):
    """One process, where nothing was started."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def start(self, collective: str, array: Array, name: str, **options: Any) -> PendingCollective:  # noqa: ARG002
        return PendingCollective(lambda: True, lambda: array)

    def broadcast_object(self, value: Any, name: str) -> Any:  # noqa: ARG002
        return value


class OverHorovod(Communicator):
    """Over ``horovod.torch`` or ``horovod.tensorflow``; ``tensor`` makes that framework's tensor of a NumPy array."""

    def __init__(self, hvd: Any, tensor: Callable[[Any], Any], process_set: Any = None) -> None:
        self.hvd, self._tensor = hvd, tensor
        self._among = {} if process_set is None else {"process_set": process_set}

    def rank(self) -> int:
        return int(self._among["process_set"].rank() if self._among else self.hvd.rank())

    def size(self) -> int:
        return int(self._among["process_set"].size() if self._among else self.hvd.size())

    def start(
        self, collective: str, array: Array, name: str, *, op: str = "sum", root: int = 0, counts: Any = None
    ) -> PendingCollective:
        begun = self.call(collective, name, op=op, root=root, counts=counts)(self._tensor(array))
        waits = hasattr(self.hvd, "poll")  # horovod.tensorflow has waited

        def receive() -> Array:
            got = self.hvd.synchronize(begun) if waits else begun
            found: Array = (got[0] if isinstance(got, tuple) else got).numpy()  # beside it an alltoall's counts
            if collective in (ALLREDUCE, BROADCAST) and not np.shares_memory(found, array):
                array[...] = found
                return array
            return found

        return PendingCollective((lambda: bool(self.hvd.poll(begun))) if waits else (lambda: True), receive)

    def call(
        self, collective: str, name: str, *, op: str = "sum", root: int = 0, counts: Any = None
    ) -> Callable[[Any], Any]:
        """Horovod's function of a tensor; over PyTorch it returns a handle."""
        options: dict[str, Any] = {"name": name, **self._among}
        if collective in (ALLREDUCE, REDUCESCATTER):
            options["op"] = self.hvd.Min if op == "min" else self.hvd.Sum
        elif collective == BROADCAST:
            options["root_rank"] = root
        elif collective == ALLTOALL and counts is not None:
            options["splits"] = self._tensor(np.array(counts, dtype=np.int32))
        in_place = "_" if collective in (ALLREDUCE, BROADCAST) else ""
        kind = f"_async{in_place}" if hasattr(self.hvd, "poll") else ""
        return functools.partial(getattr(self.hvd, f"{collective}{kind}"), **options)

    def broadcast_object(self, value: Any, name: str) -> Any:
        return self.hvd.broadcast_object(value, root_rank=0, name=name, **self._among)

    def has_ended(self, error: Exception) -> bool:
        return super().has_ended(error) or not self.hvd.is_initialized()


@dataclass(frozen=True, slots=True)
class RepeatedCall:
    """A collective over MPI of the same memory, again and again."""

    run: Callable[[], object]  # carries it out and waits
    begin: Callable[[], Any]  # starts it, and returns MPI's request
    got: Array  # what this rank gets


class OverMpi(Communicator):
    """Over mpi4py (``mpi`` is ``mpi4py.MPI``), whose calls pair up in order and not by name."""

    def __init__(self, comm: Any, mpi: Any) -> None:
        self._comm, self._mpi = comm, mpi
        self._apart: dict[str, OverMpi] = {}

    def _in_order(self) -> Any:
        """The communicator, when this process's other calls have been made."""
        return self._comm

    def rank(self) -> int:
        return int(self._comm.Get_rank())

    def size(self) -> int:
        return int(self._comm.Get_size())

    def start(self, collective: str, array: Array, name: str, **options: Any) -> PendingCollective:  # noqa: ARG002
        self._in_order()
        call = self.repeated(collective, array, **options)
        request = call.begin()

        def receive() -> Array:
            request.Wait()
            return call.got

        return PendingCollective(request.Test, receive)

    def run(self, collective: str, array: Array, name: str, **options: Any) -> Any:  # noqa: ARG002
        self._in_order()
        call = self.repeated(collective, array, **options)
        call.run()
        return call.got

    def repeated(
        self, collective: str, array: Array, *, op: str = "sum", root: int = 0, counts: Any = None
    ) -> RepeatedCall:
        """A collective of the same memory, again and again: MPI is told of it once; for the arguments see ``start``."""
        rank, size, row = self.rank(), self.size(), array.shape[1:]
        if collective == ALLREDUCE:
            operation = () if op == "sum" else (self._mpi.MIN,)
            return self._repeated("Allreduce", array, self._mpi.IN_PLACE, self._message(array), *operation)
        if collective == BROADCAST:
            return self._repeated("Bcast", array, self._message(_bits(array)), root)
        width = int(np.prod(row, dtype=np.int64))
        if collective == REDUCESCATTER:
            parts = shares(len(array), size)
            got = np.empty((parts[rank], *row), array.dtype)
            return self._repeated("Reduce_scatter", got, array, got, [part * width for part in parts])
        sent = _bits(array)
        width *= array.itemsize // sent.itemsize
        if counts is None:
            got = np.empty((size * len(array), *row), array.dtype) if collective == ALLGATHER else np.empty_like(array)
            call = "Allgather" if collective == ALLGATHER else "Alltoall"
            return self._repeated(call, got, sent, _bits(got))
        lengths = [int(count) * width for count in counts]
        if collective == ALLGATHER:
            got = np.empty((int(sum(counts)), *row), array.dtype)
            return self._repeated("Allgatherv", got, sent, [_bits(got), lengths])
        got = np.empty((int(counts[rank]) * size, *row), array.dtype)
        return self._repeated("Alltoallv", got, [sent, lengths], [_bits(got), [lengths[rank]] * size])

    def _repeated(self, call: str, got: Array, *arguments: Any) -> RepeatedCall:
        waiting, starting = getattr(self._comm, call), getattr(self._comm, f"I{call.lower()}")
        return RepeatedCall(functools.partial(waiting, *arguments), functools.partial(starting, *arguments), got)

    def _message(self, array: Array) -> list[Any]:
        """An array as mpi4py takes it without looking at it again in every call: memory, count and type."""
        mpi = self._mpi
        return [mpi.buffer.frombuffer(array), array.size, mpi.Datatype.fromcode(array.dtype.char)]

    def allgather(self, rows: Array, name: str) -> list[Array]:  # noqa: ARG002
        return list(self._in_order().allgather(rows))

    def background(
        self, collective: str, name: str, poll_s: float = BACKGROUND_POLL_S, **options: Any
    ) -> Callable[[Array], Array]:
        """As elsewhere; the messages of each name travel apart from others."""
        if name not in self._apart:
            self._apart[name] = OverMpi(self._in_order().Dup(), self._mpi)
        apart = self._apart[name]
        return lambda array: apart.start(collective, np.asarray(array), name, **options).wait(poll_s)

    def broadcast_object(self, value: Any, name: str) -> Any:  # noqa: ARG002
        return self._in_order().bcast(value, root=0)


def shares(rows: int, parts: int) -> list[int]:
    """Rows of each part of an array that is divided as evenly as can be: the first parts have one more."""
    least, more = divmod(rows, parts)
    return [least + (part < more) for part in range(parts)]


def words_of(text: str, count: int) -> Words:
    """A text, cut after 8 * ``count`` bytes, as int64 (count,): what takes as much room on every rank."""
    return np.frombuffer(bytearray(text.encode()[: 8 * count].ljust(8 * count, b"\0")), np.int64)


def text_of(words: Words) -> str:
    """The text of ``words_of``, without a character that was cut."""
    return words.tobytes().rstrip(b"\0").decode(errors="ignore")


def on_root(is_root: bool, action: Callable[[], Any], broadcast_object: Callable[[Any], Any]) -> Any:
    """Run ``action`` on the root and give every rank its result or its error, so that none waits for a failed one.

    Raises:
        HvdkitError: the one that the action raised, on every rank.
        RootError: on the other ranks, when it raised any other. The root raises that one itself.
        KeyboardInterrupt, SystemExit: on every rank, so that a job ends as its root does.
    """
    if not is_root:
        result, failure = broadcast_object(None)
        if failure is not None:
            raise failure
        return result
    try:
        result = action()
    except BaseException as error:
        _tell(error, broadcast_object)
        raise
    try:
        broadcast_object((result, None))
    except Exception as error:  # it cannot be pickled, and nothing was sent; or the connection is lost
        _tell(error, broadcast_object)
        raise
    return result


def _tell(error: BaseException, broadcast_object: Callable[[Any], Any]) -> None:
    with contextlib.suppress(Exception):  # a lost connection's error would hide the first one
        broadcast_object((None, _for_others(error)))


def _for_others(error: BaseException) -> BaseException:
    """What the other ranks raise: nothing that pickle or another rank may not know."""
    if type(error).__module__ == HvdkitError.__module__:
        return error
    if isinstance(error, KeyboardInterrupt):
        return KeyboardInterrupt()
    if isinstance(error, SystemExit):
        return SystemExit(error.code if isinstance(error.code, int | str | None) else 1)
    told = "".join(traceback.format_exception_only(error)).strip()
    return RootError(f"the root failed at what it does for every rank: {told} (its own traceback says where).")


def end_the_job_with_the_process(comm: Any) -> None:
    """Without this, a rank that raises leaves the others waiting in their next MPI call forever."""
    report, process = sys.excepthook, os.getpid()

    def abort(*error: Any) -> None:
        report(*error)
        sys.stderr.flush()
        if os.getpid() == process:  # one that it forked is no rank
            comm.Abort(1)

    sys.excepthook = functools.wraps(report)(abort)


def _bits(array: Array) -> Array:
    """An array as MPI sends any: by its bits, since it knows neither float16 nor bool."""
    size = array.dtype.itemsize
    return array.reshape(-1).view(f"u{size}" if size in (1, 2, 4, 8) else np.uint8)


def _buckets(variables: Iterable[Any], value_of: Callable[[Any], Array]) -> Iterator[list[tuple[Any, Array]]]:
    """Variables with their values, about ``CHUNK`` bytes at a time, so that the host never holds them all."""
    bucket: list[tuple[Any, Array]] = []
    size = 0
    for variable in variables:
        bucket.append((variable, value_of(variable)))
        size += bucket[-1][1].nbytes
        if size >= CHUNK:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
