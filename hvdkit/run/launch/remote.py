"""Which variables ranks on other hosts need, where the launcher passes on only those that it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from hvdkit.run.launch.model import Setting

_NAMES = (
    "PATH",
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "VIRTUAL_ENV",
    "GLIBC_TUNABLES",
    "PYTHONHASHSEED",
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


def told(option: str, *, values: bool) -> Callable[[Mapping[str, str], Mapping[str, str]], Setting]:
    """A ``LauncherLine.pass_on``: an option for each variable, with its value or only its name."""

    def pass_on(added: Mapping[str, str], _environ: Mapping[str, str]) -> Setting:
        told = [f"{name}={value}" if values else name for name, value in added.items()]
        return Setting("variables for the ranks on every host", tuple(word for one in told for word in (option, one)))

    return pass_on
