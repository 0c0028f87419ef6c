"""horovodrun over Gloo, on one machine and on several. Its MPI mode is never used: it fails with Open MPI 5."""

from __future__ import annotations

from pathlib import Path

from hvdkit.errors import InvalidArgumentError
from hvdkit.run.launch.model import LauncherLine, Request, Setting

RANK_VARIABLE = "HOROVOD_RANK"

UNREAD = Setting("horovodrun takes options of the command for its own, but nothing behind '--'", ("env", "--"))

_NEEDS_SSH = (
    "horovodrun reaches other hosts by ssh: 'ssh HOST true' must work from here without a password, and this directory "
    "and Python must lie at the same path there."
)


def line(request: Request, horovodrun: Path) -> LauncherLine:
    """The command line of horovodrun up to the user's command.

    Raises:
        InvalidArgumentError: ranks are to be tied to cores, which horovodrun cannot do over Gloo.
    """
    if request.bind != "none":
        raise InvalidArgumentError(
            f"--bind {request.bind} needs mpirun, and this job is started by 'horovodrun --gloo', which cannot "
            "tie ranks to cores; leave --bind out."
        )
    settings = [
        Setting("Horovod's own transport, no MPI", ("--gloo",)),
        Setting("one process per rank", ("-np", str(request.n))),
    ]
    if request.hosts:
        hosts = ",".join(map(str, request.hosts))
        settings.append(Setting("hosts, and the ranks that each may take", ("-H", hosts)))
        return LauncherLine(horovodrun, (*settings, UNREAD), "", notes=(_NEEDS_SSH,))
    local = "all ranks are on this machine, so none has to be looked for"
    settings.append(Setting(local, ("--network-interface", "lo")))
    # It loads every framework once to see whether Gloo was built; TensorFlow reports itself at length.
    return LauncherLine(horovodrun, (*settings, UNREAD), RANK_VARIABLE, noisy_start=True)
