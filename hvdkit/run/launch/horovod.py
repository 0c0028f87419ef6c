"""What the installed Horovod was built with, as far as launching goes."""

from __future__ import annotations

import re
from pathlib import Path

from hvdkit.common.ask import ask
from hvdkit.errors import LaunchError
from hvdkit.prepare.install.record import horovod_directory, mpi_bin, read_record
from hvdkit.run.launch.model import Horovod

# The first framework whose part of Horovod loads answers for all: they share one build of the controllers.
_PROBE = """
import importlib
reasons = []
for framework in ("torch", "tensorflow"):
    try:
        module = importlib.import_module("horovod." + framework)
        print(f"\\nhvdkit: built {bool(module.mpi_built())} {bool(module.gloo_built())}")
        break
    except Exception as error:
        reasons.append(f"horovod.{framework}: {error}".splitlines()[0])
else:
    raise SystemExit("\\nhvdkit: failed " + "; ".join(reasons))
"""
_ANSWER = re.compile(r"^hvdkit: (?:built (\w+) (\w+)|failed (.*))$", re.MULTILINE)


def installed_horovod(python: Path) -> Horovod | None:
    """What Horovod was built with: from the record of ``hvdkit install``, else by loading it in another process.

    Args:
        python: the interpreter to load it in.
    Returns:
        None when it is not installed.
    Raises:
        LaunchError: it is installed and cannot be loaded.
        InstallError: its build record cannot be read.
    """
    if horovod_directory() is None:
        return None
    return recorded_horovod() or _probe(python)


def recorded_horovod() -> Horovod | None:
    """The same from the record alone; None without one.

    Raises:
        InstallError: the build record cannot be read.
    """
    record = read_record()
    return None if record is None else Horovod(record.mpi is not None, record.gloo, mpi_bin(record))


def _probe(python: Path) -> Horovod:
    """Ask a Horovod that was built by hand.

    Raises:
        LaunchError: it cannot be loaded.
    """
    answer = ask([str(python), "-c", _PROBE])
    match = _ANSWER.search(answer.text)
    if match is None or match[3] is not None:
        reason = answer.problem if match is None else match[3]
        raise LaunchError(
            f"Horovod is installed but cannot be loaded ({reason}); run 'hvdkit doctor', or name a launcher for a "
            "command that does not use Horovod: --launcher mpirun."
        )
    return Horovod(match[1] == "True", match[2] == "True")
