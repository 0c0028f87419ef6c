"""What importing hvdkit.keras says where the communication library is missing: tried before it is imported for good."""

import importlib
import sys

import keras


def import_without(*packages: str) -> str:
    """The error of importing hvdkit.keras where these are missing; after it nothing of hvdkit is imported."""
    before = {name: sys.modules[name] for name in packages if name in sys.modules}
    sys.modules.update(dict.fromkeys(packages))
    try:
        importlib.import_module("hvdkit.keras")
    except ImportError as error:
        return f"{type(error).__module__}.{type(error).__name__}: {error}"
    finally:
        for name in [*packages, *(name for name in sys.modules if name.split(".")[0] == "hvdkit")]:
            del sys.modules[name]
        sys.modules.update(before)
    return ""


_PACKAGES = {"torch": ("horovod",), "jax": ("horovod", "mpi4py")}.get(keras.backend.backend())
LACKING = import_without(*_PACKAGES) if _PACKAGES else ""
