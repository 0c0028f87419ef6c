"""Which variables ranks on other hosts need, where the launcher passes on only those that it is told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_NAMES = (
    "PATH",
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "VIRTUAL_ENV",
    "PYTHONUNBUFFERED",
    "TF_CPP_MIN_LOG_LEVEL",
)
_PREFIXES = ("HOROVOD_", "HVDKIT_", "OMP_", "NCCL_", "KERAS_")
_NOT_MEANT_FOR_RANKS = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "PRTE_MCA_")


def names(environ: Iterable[str], added: Mapping[str, str]) -> list[str]:
    """The variables to pass on: those that this job adds, and of the inherited ones those that training reads.

    Args:
        environ: names of the inherited variables.
        added: what the job gets beside them.
    """
    inherited = [name for name in environ if name in _NAMES or name.startswith(_PREFIXES)]
    wanted = [name for name in (*added, *sorted(inherited)) if not name.startswith(_NOT_MEANT_FOR_RANKS)]
    return list(dict.fromkeys(wanted))
