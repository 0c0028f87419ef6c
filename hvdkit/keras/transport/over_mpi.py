"""Keras' jax backend: gradients travel in buffers on the host; one inside of ``hvdkit.keras``."""

from __future__ import annotations

import os
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from hvdkit.core.communicator import ALLGATHER, ALLREDUCE, BACKGROUND_POLL_S, OverMpi, end_the_job_with_the_process
from hvdkit.errors import InvalidArgumentError
from hvdkit.keras.transport.interface import Ranks, Transport
from hvdkit.keras.transport.over_horovod import Array, OverTorch, by_sent_type, is_alone, naming
from hvdkit.steps import agreement, passes, starting, step_times
from hvdkit.steps.allreduce_counts import COUNTS
from hvdkit.steps.gradients import GradientOptions, refuse_clipped
from hvdkit.steps.streams import Total
from hvdkit.steps.topology import Topology
from hvdkit.tf_shared.keras_optimizer import Reduce

_LAST_WORDS_S = 1.0
"""Seconds for the rank that failed to print its error, before the job ends."""


class HostBuffers(Transport):
    """JAX: all gradients of one type in one flat buffer on the host, from inside ``jax.jit``."""

    @abstractmethod
    def reduce_buffer(self, flat: Array, name: str, options: GradientOptions, process_set: Any) -> Array:
        """Combine a buffer that may be overwritten."""

    @abstractmethod
    def host_sends_bfloat16(self, process_set: Any) -> bool:
        """Whether it is combined as it is where it holds bfloat16."""

    @abstractmethod
    def host_ranks(self, process_set: Any) -> Ranks:
        """The ranks that it is combined over."""

    def digests(self, variables: Sequence[Any]) -> npt.NDArray[np.int64]:
        """On the host as well, where the gradients pass, too."""
        return agreement.array_digests(np.asarray(keras.ops.convert_to_numpy(variable)) for variable in variables)

    def reducer(self, options: GradientOptions, process_set: Any) -> tuple[Reduce, Ranks]:
        import jax
        import jax.numpy as jnp
        from jax.experimental import io_callback

        from hvdkit.keras.transport import jax_clips

        passes.expect_steps(wait=jax.effects_barrier)
        name, ranks = naming(), self.host_ranks(process_set)

        def on_host(*buffers: Any) -> list[Array]:
            step_times.ready()
            passes.stepped_behind()
            return [
                self.reduce_buffer(np.array(buffer), f"{name()}.{number}", options, process_set)
                for number, buffer in enumerate(buffers)
            ]

        def reduce(gradients: list[Any], variables: list[Any]) -> list[Any]:  # noqa: ARG001
            present = [gradient for gradient in gradients if gradient is not None]
            if not present or is_alone(ranks, self.size()):
                jax.debug.callback(passes.stepped_behind)
                return gradients
            refuse_clipped(present, is_clipped=jax_clips.is_clipped)
            types = [str(gradient.dtype) for gradient in present]
            groups = by_sent_type(types, options, self.host_sends_bfloat16(process_set))
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


class HostBuffersOverTorch(HostBuffers, OverTorch):
    """The transport of the jax backend where Horovod is built for PyTorch."""

    def host_ranks(self, process_set: Any) -> Ranks:
        return self.ranks(process_set)

    def host_sends_bfloat16(self, process_set: Any) -> bool:
        return self.sends_bfloat16("cpu", process_set)

    def reduce_buffer(self, flat: Array, name: str, options: GradientOptions, process_set: Any) -> Array:
        import torch

        scaling = self.scaling(options, process_set)
        if flat.dtype.name == "bfloat16":  # which PyTorch does not take from NumPy
            tensor = torch.from_numpy(flat.view(np.int16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(flat)
        with COUNTS.allreduce([scaling["process_set"]]):
            self.hvd.allreduce_(tensor, name=name, **scaling)
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

    def host_ranks(self, process_set: Any) -> Ranks:
        if process_set is not None:
            raise InvalidArgumentError("process_set needs Horovod, and this process has mpi4py only; leave it out.")
        return None

    def reducer(self, options: GradientOptions, process_set: Any) -> tuple[Reduce, Ranks]:
        if options.compression != "none":
            raise InvalidArgumentError(
                f"compression={options.compression!r} needs Horovod, MPI cannot add up half precision; leave it out, "
                "or run `hvdkit install --frameworks torch`."
            )
        return super().reducer(options, process_set)

    def reduce_buffer(self, flat: Array, name: str, options: GradientOptions, process_set: Any) -> Array:  # noqa: ARG002
        kept = flat.dtype
        flat = flat.astype(np.float32) if kept == np.float16 else flat
        flat /= options.gradient_predivide_factor
        self._within_step.run(ALLREDUCE, flat, name)
        flat *= options.gradient_predivide_factor / (self.size() if options.op == "average" else 1)
        return flat.astype(kept)
