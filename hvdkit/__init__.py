"""The eight steps of data-parallel training with Horovod, and the tools around them.

Training scripts import one framework binding (``hvdkit.torch``, ``hvdkit.tensorflow`` or ``hvdkit.keras``); this
module itself loads the standard library only.
"""

from typing import TYPE_CHECKING, Any

from hvdkit.errors import (
    AgreementError,
    CheckpointError,
    CorruptDataError,
    DataError,
    DataNotFoundError,
    HvdkitError,
    InstallError,
    InvalidArgumentError,
    LauncherError,
    LaunchError,
    MissingFrameworkError,
    RootError,
    TopologyMismatchError,
)
from hvdkit.steps.topology import Topology

if TYPE_CHECKING:
    from hvdkit.jobs.function import run

__version__ = "0.3.0"

__all__ = [
    "AgreementError",
    "CheckpointError",
    "CorruptDataError",
    "DataError",
    "DataNotFoundError",
    "HvdkitError",
    "InstallError",
    "InvalidArgumentError",
    "LaunchError",
    "LauncherError",
    "MissingFrameworkError",
    "RootError",
    "Topology",
    "TopologyMismatchError",
    "__version__",
    "run",
]


def __getattr__(name: str) -> Any:
    """``run``, which loads the launcher."""
    if name == "run":
        from hvdkit.jobs.function import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
