"""horovodrun over Gloo, on one machine and on several, and for elastic jobs, whose hosts a script names.

Its MPI mode is never used: it fails with Open MPI 5.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hvdkit.common.units import bytes_text
from hvdkit.errors import InvalidArgumentError
from hvdkit.run.launch import placement
from hvdkit.run.launch.model import LauncherLine, Setting
from hvdkit.run.launch.options import Request

_UNREAD = Setting("horovodrun takes options of the command for its own, but nothing behind '--'", ("env", "--"))
_NEEDS_SSH = (
    "horovodrun reaches other hosts by ssh: 'ssh HOST true' must work from here without a password, and this directory "
    "and Python must lie at the same path there."
)
COOLDOWN_S = (2, 10)
"""Seconds, at least and at most, that a host is left out after one of its workers failed."""
SCRIPT_S = 15.0
"""Seconds that a host discovery script may take; horovodrun asks it again every second."""
_ANSWER_BYTES = 1 << 20
_LOOK_S = 0.02
_HOST = re.compile(r"([A-Za-z0-9_.\-]+)(?::([1-9][0-9]*))?")


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
        return LauncherLine(horovodrun, (*settings, _UNREAD), "HOROVOD_RANK", notes=(_NEEDS_SSH,))
    local = "all ranks are on this machine, so none has to be looked for"
    settings.append(Setting(local, ("--network-interface", "lo")))
    # It loads every framework once to see whether Gloo was built; TensorFlow reports itself at length.
    return LauncherLine(horovodrun, (*settings, _UNREAD), "HOROVOD_RANK", noisy_start=True)


@dataclass(frozen=True, slots=True)
class Elastic:
    """What makes a job elastic.

    Attributes:
        min_np, max_np: ranks below which it waits for more, and that it never exceeds; None: no limit.
        script: prints one ``host:slots`` a line; asked again and again.
    """

    min_np: int | None
    max_np: int | None
    script: Path


def elastic(n: int, min_np: int | None, max_np: int | None, script: Path | None) -> Elastic | None:
    """What the options come to; None for a job that is not elastic.

    Raises:
        InvalidArgumentError: options that do not go together.
    """
    if script is None:
        if min_np is None and max_np is None:
            return None
        raise InvalidArgumentError(
            "--min-np and --max-np need --host-discovery-script, which says what hosts there are."
        )
    least, most = min_np or n, max_np or max(n, min_np or n)
    if not least <= n <= most:
        raise InvalidArgumentError(f"an elastic job needs --min-np <= -n <= --max-np, got {least}, {n} and {most}.")
    return Elastic(least, most, script.absolute())


def discovered(script: Path, environ: Mapping[str, str], slots: int | None = None) -> dict[str, int]:
    """What the script prints now: slots by host.

    Args:
        script: of the user, or of the MPI Operator.
        environ: its environment.
        slots: of a host that is printed without.
    Raises:
        InvalidArgumentError: it cannot be run, fails, or prints something else; a host without slots has none.
    """
    found: dict[str, int] = {}
    for number, line in enumerate(answer_of(script, environ).splitlines(), start=1):
        match = _HOST.fullmatch(line.strip())
        if match is None:
            raise InvalidArgumentError(
                f"the host discovery script {script} printed {line!r} as line {number}, where HOST:SLOTS was expected."
            )
        if match[2] is None and slots is None:  # horovodrun would end with a stack trace
            raise InvalidArgumentError(
                f"the host discovery script {script} printed {line!r} without slots; let it print HOST:SLOTS, or say "
                "--ppn."
            )
        found[match[1]] = int(match[2] or slots or 0)
    return found


def answer_of(script: Path, environ: Mapping[str, str]) -> str:
    """What a host discovery script prints; it is killed where it does not end.

    Raises:
        InvalidArgumentError: it cannot be run, fails, takes longer than ``SCRIPT_S`` or prints more than a megabyte.
    """
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as said:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": printed, "stderr": said}
        try:
            process = subprocess.Popen([str(script)], env=dict(environ), start_new_session=True, **streams)
        except OSError as error:
            raise _cannot_be_run(script, error.strerror or str(error)) from error
        deadline = time.monotonic() + SCRIPT_S
        try:
            while process.poll() is None and time.monotonic() < deadline and not _is_large(printed, said):
                time.sleep(_LOOK_S)
            ended = process.poll() is not None
        finally:
            with contextlib.suppress(ProcessLookupError):  # what it left behind, too
                os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        if _is_large(printed, said):
            raise InvalidArgumentError(
                f"the host discovery script {script} printed more than {bytes_text(_ANSWER_BYTES)} and was ended; let "
                "it print one HOST:SLOTS a line, and end."
            )
        if not ended:
            raise InvalidArgumentError(
                f"the host discovery script {script} did not end within {SCRIPT_S:g} s and was ended; let it print "
                "the hosts that it knows of, and limit what it calls: timeout 5 COMMAND."
            )
        answer, reasons = (
            os.pread(file.fileno(), _ANSWER_BYTES, 0).decode(errors="replace") for file in (printed, said)
        )
    if status:
        raise _cannot_be_run(script, ": ".join([f"status {status}", *reasons.strip().splitlines()[-1:]]))
    return answer


def _is_large(*files: IO[bytes]) -> bool:
    return any(os.fstat(file.fileno()).st_size > _ANSWER_BYTES for file in files)


def _cannot_be_run(script: Path, reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the host discovery script {script} cannot be run: {reason}; it must be executable, begin with #! and end "
        "with status 0."
    )


def elastic_settings(n: int, job: Elastic, found: Mapping[str, int], slots: int | None = None) -> list[Setting]:
    """horovodrun's options and why; ``slots`` as in ``discovered``."""
    chosen = [
        Setting("Horovod Elastic works over Gloo", ("--gloo",)),
        Setting("ranks to begin with", ("-np", str(n))),
        Setting("ranks below which the job waits", ("--min-np", str(job.min_np))),
        Setting("ranks that it never exceeds", ("--max-np", str(job.max_np))),
        Setting("asked again and again for the hosts", ("--host-discovery-script", str(job.script))),
        Setting(
            "a host with a failed worker is left out for a while, not forever",
            ("--blacklist-cooldown-range", *map(str, COOLDOWN_S)),
        ),
    ]
    if slots is not None:
        chosen.append(Setting("ranks on a host that the script prints without slots", ("--slots-per-host", str(slots))))
    if found and not are_elsewhere(found):
        chosen.append(
            Setting("all hosts are this one; without it horovodrun waits for another", ("--network-interface", "lo"))
        )
    return [*chosen, _UNREAD]


def elastic_notes(n: int, job: Elastic, found: Mapping[str, int]) -> list[str]:
    """What the user should know before it starts."""
    said = []
    if not found:
        said.append(f"{job.script} names no host yet: the job waits for one.")
    if len(found) == 1 and n > 1:
        said.append(
            "a failed worker takes its host out for a while, and there is one host: the job stops and waits. Give each "
            "worker a line of its own (localhost:1 and 127.0.0.1:1 are two hosts to Horovod)."
        )
    if found and sum(found.values()) < (job.min_np or n):
        said.append(f"the hosts have fewer slots than --min-np {job.min_np}: the job waits for more.")
    return said


def are_elsewhere(found: Mapping[str, int]) -> bool:
    """Whether there are hosts other than this one."""
    return not all(placement.is_here(host, socket.gethostname()) for host in found)
