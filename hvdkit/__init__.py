"""The eight steps of data-parallel training with Horovod, and the tools around them.

Training scripts import one framework binding (``hvdkit.torch``, ``hvdkit.tensorflow`` or ``hvdkit.keras``); this
module itself loads the standard library only.
"""

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
]
