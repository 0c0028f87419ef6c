"""The mean of all ranks' gradients, waited for or while other things are computed (step 4).

The head, a control word (``hvdkit.core.layout``) before the gradients, travels with them or, when they are many,
before them. It says of each rank how much its gradients count, which are missing, and whether it failed, so that an
error on one rank is an error on all of them and none waits forever.
"""

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from hvdkit.arrays import mpi
from hvdkit.arrays.buffers import Layout
from hvdkit.arrays.shared_memory import quiet
from hvdkit.core import listeners
from hvdkit.core.communicator import ALLREDUCE
from hvdkit.core.compression import CompressionTrial, kinds_of
from hvdkit.core.layout import FLAGS, ControlWord, Flags, is_held, read_flags
from hvdkit.errors import AgreementError, InvalidArgumentError
from hvdkit.steps import passes
from hvdkit.steps.gradients import GradientOptions

_SMALLEST, _LARGEST = 1e-15, 1e15  # of a weight: beyond, weight * gradient soon leaves float32
_UNUSUAL, _FAILED, _WEIGHTED, _WEIGHT = map(Flags._fields.index, ("unusual", "failed", "weighted", "weight"))


def distribute(
    parameters: Any,
    *,
    op: str = "average",
    compression: str = "none",
    backward_passes_per_step: int = 1,
    comm: Any = None,
) -> Reduce:
    """What gives the mean of all ranks' gradients (step 4): ``gradients = reduce(gradients)``. A collective.

    ``pending = reduce.start(gradients)`` goes on at once, ``pending.wait()`` then returns the mean. Gradients written
    to ``reduce.buffers`` are not copied. Distribute parts of a model one by one to have the first ones travel while the
    others are computed.

    Args:
        parameters: containers of arrays of the gradients' shapes and types; None where there is never a gradient.
        op: "average" or "sum".
        compression: see ``GradientOptions``; what travels in fewer bytes is added up in float32 or float64. On
            GPUs "none" alone.
        backward_passes_per_step: calls whose gradients are added up on each rank before they are exchanged, >= 1; the
            others return None. They are summed, as elsewhere in hvdkit: divide the loss by their number for a mean.
        comm: ranks to average over, an mpi4py communicator; default: all.
    Raises:
        InvalidArgumentError: bad options, an array whose type has no mean, or no communicator with this rank.
        AgreementError: the ranks give different names, shapes, types or options, or another rank failed. On every rank.
    """
    options = GradientOptions(op, compression, backward_passes_per_step)
    if op == "adasum":
        raise InvalidArgumentError("op='adasum' needs Horovod (hvdkit.torch, hvdkit.tensorflow); use average or sum.")
    among = mpi.duplicate(comm)
    passes.expect_steps()
    return Reduce(parameters, options, among, threaded=mpi.threads_may_call())


class Reduce:
    """Gives the mean, or the sum, of all ranks' gradients. Made by ``hvdkit.arrays.distribute``.

    Call it to wait for the mean; ``start`` it to compute something else before ``Pending.wait``. Every rank makes the
    same calls in the same order. Results come in the framework of the parameters, in containers like theirs, which are
    the caller's to change. NumPy results are views of the buffers and hold until the next call.

    Args:
        parameters, options, comm: see ``Layout``.
        threaded: whether a second thread may call MPI, in which started gradients travel.
    """

    def __init__(self, parameters: Any, options: GradientOptions, comm: Any, *, threaded: bool) -> None:
        self._options, self._comm = options, comm
        self._size = int(comm.Get_size())
        self._layout = Layout(parameters, options, comm)
        self._head = self._layout.head
        self._usual = ControlWord(len(self._layout.leaves)).usual.astype(self._head.dtype)
        self._word = self._head[: len(self._usual)]
        self._first = self._layout.buffers[0]
        self._add_up = self._first.in_one_message() if len(self._layout.buffers) == 1 else None
        tries = self._size > 1 and options.compression == "auto" and any(one.packed for one in self._layout.buffers)
        self._trial = CompressionTrial(kinds_of(bfloat16=True)) if tries else None
        threaded = threaded and self._size > 1 and self._layout.views is not None  # GPUs do it themselves
        self._worker = ThreadPoolExecutor(1, "hvdkit-reduce") if threaded else None
        self._heads = mpi.ranks(comm).repeated(ALLREDUCE, self._head)
        self._mean = 1.0 / self._size if options.op == "average" else 1.0
        self._quiet = quiet()
        self._passes, self._weights, self._own = 0, 0.0, 1.0
        self._failure: Exception | None = None
        self._pending: Pending | None = None

    @property
    def buffers(self) -> Any:
        """The memory that is sent: NumPy arrays in the parameters' containers. Gradients written there are not copied.

        ``reduce(reduce.buffers)`` reduces what is in them, in place. Half-precision gradients have float32 here.

        Raises:
            InvalidArgumentError: gradients are on a GPU, or are added up over several passes.
        """
        if self._layout.views is None or self._options.backward_passes_per_step > 1:
            raise InvalidArgumentError(
                "these gradients have no buffers to write to: they are on a GPU, or backward_passes_per_step adds them "
                "up; give the gradients to the call instead."
            )
        return self._layout.views

    def __call__(self, gradients: Any, *, weight: float | None = None) -> Any:
        """The mean of all ranks' gradients; waits for it. A collective.

        Args:
            gradients: in the containers that ``distribute`` was given, arrays of any framework. None where this rank
                has none: it counts as zeros, and is None in the result where no rank has it. ``buffers`` itself: what
                was written there.
            weight: how much this rank's gradients count, >= 0, such as the number of samples m_k behind them: the
                result is sum_k (m_k / m) g_k. With 0 they are not looked at: they may be NaN, as the mean over no
                sample is. On all ranks or on none; without it all count the same.
        Returns:
            The mean; None in the passes before the last of ``backward_passes_per_step``.
        Raises:
            InvalidArgumentError: gradients that do not fit the parameters, a bad weight, or weights that are 0 on all
                ranks.
            AgreementError: it failed on another rank, or only some ranks gave a weight; none is left waiting.
        """
        if not self._put(gradients, weight):
            return None
        self._quiet(self._exchange)
        return self._results()

    def start(self, gradients: Any, *, weight: float | None = None) -> Pending:
        """As a call, but go on at once: the gradients travel while this process computes something else.

        The gradients may be changed at once, ``buffers`` only after ``Pending.wait``. Errors are raised there.
        """
        if not self._put(gradients, weight):
            return Pending(self, None)
        if self._worker is not None:
            future = self._worker.submit(self._quiet, self._exchange)
        else:
            future = Future()
            try:
                future.set_result(self._quiet(self._exchange))
            except Exception as error:
                future.set_exception(error)
        self._pending = Pending(self, future)
        return self._pending

    def _put(self, gradients: Any, weight: float | None) -> bool:
        """Put gradients into the buffers; whether that was the last pass. What fails is told to all in the exchange."""
        if self._pending is not None:
            raise InvalidArgumentError(
                "gradients of an earlier call are still on their way; call wait() on them first."
            )
        if self._passes == 0:
            self._word[...] = self._usual
            self._failure = None
        try:
            self._check(weight)
            if gradients is None or gradients is not self._layout.views:  # on a GPU there are no views
                self._put_each(self._layout.gradients(gradients), weight)
            elif not self._layout.is_intact():
                raise InvalidArgumentError(
                    "an array in reduce.buffers was replaced by another one, which is not sent; write into the one "
                    "that is there: reduce.buffers[name][...] = gradient."
                )
        except Exception as error:  # also one of the framework's own, which may compute the gradients only now
            self._failure = error
        self._passes += 1
        if self._passes < self._options.backward_passes_per_step:
            return False
        self._passes = 0
        if self._failure is not None:
            self._head[_FAILED] = self._head[_UNUSUAL] = 1
        self._own = self._weights if self._head[_WEIGHTED] and self._options.backward_passes_per_step == 1 else 1.0
        if self._own == 0.0:  # a mean over no samples is not a number, and times 0 it would still be none
            for buffer in self._layout.buffers:
                buffer.clear()
        listeners.ready()
        passes.stepped()
        return True

    def _check(self, weight: float | None) -> None:
        """Put this pass's weight, None where none was given, into the head that travels with the gradients.

        Refuse a bad one.
        """
        head = self._head
        if self._passes and (weight is not None) != bool(head[_WEIGHTED]):
            raise InvalidArgumentError("a weight was given in some passes of one step only; give it in all or in none.")
        if weight is None:
            return
        if self._options.op != "average":
            raise InvalidArgumentError(f"weight={weight} weighs a mean, but op is {self._options.op!r}; leave it out.")
        try:
            number = float(weight)
        except (TypeError, ValueError):
            number = math.nan
        if not (math.isfinite(number) and number >= 0):
            raise InvalidArgumentError(f"weight must be a finite number >= 0, got {weight!r}.")
        if number and not _SMALLEST <= number <= _LARGEST:
            raise InvalidArgumentError(
                f"weight must be 0 or in {_SMALLEST:g} .. {_LARGEST:g}, such as a number of samples, got {weight!r}."
            )
        weight = number
        self._weights = weight + (self._weights if self._passes else 0.0)
        head[_UNUSUAL] = head[_WEIGHTED] = 1
        head[_WEIGHT] = self._weights

    def _put_each(self, gradients: list[Any], weight: float | None) -> None:
        adds_up = self._options.backward_passes_per_step > 1
        if adds_up and self._passes == 0:
            for buffer in self._layout.buffers:
                buffer.clear()
        factor = (1.0 if weight is None else float(weight)) if adds_up else None
        held = self._word[FLAGS:]
        for position, ((buffer, number), gradient) in enumerate(zip(self._layout.places, gradients, strict=True)):
            buffer.put(number, gradient, factor)
            if gradient is None and self._passes == 0:
                held[position], self._head[_UNUSUAL] = 0, 1
            elif gradient is not None and self._passes:
                held[position] = 1

    def _exchange(self) -> None:
        """Put the mean into the buffers, a collective; what failed on any rank is an error on all."""
        if self._size == 1:
            if self._failure is not None:
                raise self._failure
            factor = self._factor() * self._own
            if factor != 1.0:
                for buffer in self._layout.buffers:
                    buffer.scale(factor)
        elif self._add_up is not None:
            # One message: the sum of weights comes with the gradients, which are divided by it afterwards.
            if self._own != 1.0:
                self._first.scale(self._own)
            self._add_up()
            factor = self._factor()
            if factor != 1.0:
                self._first.scale(factor)
        else:
            self._turn()
            for buffer in self._layout.buffers:
                buffer.announce(self._own)
            self._heads.run()
            factor = self._factor()
            for buffer in self._layout.buffers:
                buffer.exchange(self._own, factor)

    def _turn(self) -> None:
        """An exchange begins, which ends the one before: see ``CompressionTrial.turn``."""
        trial = self._trial
        if trial is None:
            return
        if trial.turn(mpi.ranks(self._comm)):
            self._trial = None
        for buffer in self._layout.buffers:
            buffer.kind = trial.kind
            if trial.over:
                buffer.packed = {kind: one for kind, one in buffer.packed.items() if kind == trial.kind}

    def _factor(self) -> float:
        """What the sum of all ranks' own * gradient is multiplied by, from the head that was exchanged."""
        if not self._head[_UNUSUAL]:
            return self._mean
        flags = read_flags(self._word.real.tolist())
        if flags.failed:
            mpi.ranks(self._comm).raise_together(self._failure)
        if flags.weighted == 0:
            return self._mean
        if flags.weighted < self._size:
            raise AgreementError(
                f"{flags.weighted:.0f} of {self._size} ranks gave a weight for their gradients; give one on all or on "
                "none."
            )
        if not flags.weight > 0:
            raise InvalidArgumentError("the gradients of all ranks have the weight 0: they have no mean.")
        return self._options.backward_passes_per_step / flags.weight

    def _results(self) -> Any:
        layout = self._layout
        if layout.gives_views and not self._head[_UNUSUAL]:
            return layout.in_containers([buffer.views[number] for buffer, number in layout.places])
        word = self._word.real.tolist()
        return layout.in_containers(
            [
                buffer.result(number) if is_held(word, position) else None
                for position, (buffer, number) in enumerate(layout.places)
            ]
        )


class Pending:
    """Gradients on their way to and from the other ranks. Made by ``Reduce.start``."""

    def __init__(self, reduce: Reduce, future: Future[None] | None) -> None:
        self._reduce, self._future = reduce, future  # None: of a pass before the last
        self._result: Any = None

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._future is None or self._future.done()

    def wait(self) -> Any:
        """The mean, once it is there; see ``Reduce.__call__`` for what is returned and raised. Again: the same."""
        if self._future is None:
            return None
        failure = self._future.exception()
        if self._reduce._pending is self:  # not before: who was interrupted may wait again
            self._reduce._pending = None
            if failure is None:
                self._result = self._reduce._results()
        if failure is not None:
            raise failure
        return self._result
