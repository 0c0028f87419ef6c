"""horovodrun over Gloo, on one machine and on several, and for elastic jobs, whose hosts a script names.

Its MPI mode is never used: it fails with Open MPI 5.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from hvdkit.common.units import bytes_text
from hvdkit.errors import InvalidArgumentError
from hvdkit.jobs.launch import placement
from hvdkit.jobs.launch.model import Host, LauncherLine, Setting
from hvdkit.jobs.launch.options import Request
from hvdkit.steps import launchers

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
_HOST = re.compile(r"([A-Za-z0-9_.\-]+):([1-9][0-9]*)")


def line(request: Request, horovodrun: Path) -> LauncherLine:
    """The command line of horovodrun up to the user's command."""
    settings = [
        Setting("Horovod's own transport, no MPI", ("--gloo",)),
        Setting("one process per rank", ("-np", str(request.n))),
    ]
    if request.elastic:
        settings += [
            Setting("ranks below which the job waits", ("--min-np", str(request.min_np))),
            Setting("ranks that it never exceeds", ("--max-np", str(request.max_np))),
            Setting(
                "asked again and again for the hosts", ("--host-discovery-script", str(request.host_discovery_script))
            ),
            Setting(
                "a host with a failed worker is left out for a while, not forever",
                ("--blacklist-cooldown-range", *map(str, COOLDOWN_S)),
            ),
        ]
    elif request.hosts:
        hosts = ",".join(map(str, request.hosts))
        settings.append(Setting("hosts, and the ranks that each may take", ("-H", hosts)))
    if not request.hosts:
        local = "all ranks are on this machine, so none has to be looked for, nor another host waited for"
        settings.append(Setting(local, ("--network-interface", "lo")))
    settings.append(
        Setting("horovodrun takes options of the command for its own, but nothing behind '--'", ("env", "--"))
    )
    return LauncherLine(horovodrun, tuple(settings), "HOROVOD_RANK", notes=(_NEEDS_SSH,) if request.hosts else ())


def elastic(request: Request, environ: Mapping[str, str]) -> Request:
    """The request of an elastic job, with the hosts that its script prints now, () where all are this machine.

    Raises:
        InvalidArgumentError: options that do not go together, or the script does not say what hosts there are.
    """
    n, script = request.n, request.host_discovery_script
    alone = not (request.preflight or request.restarts or request.hosts_chosen or request.stage or request.ppn)
    if not alone or request.stall_timeout is not None or request.launcher not in ("auto", "horovodrun"):
        raise InvalidArgumentError(
            "an elastic job is horovodrun's alone: leave --preflight, --restarts, --stall-timeout, --hosts, "
            "--hostfile, --ppn, --stage and other launchers out."
        )
    if script is None:
        raise InvalidArgumentError(
            "--min-np and --max-np need --host-discovery-script, which says what hosts there are."
        )
    least = request.min_np or n
    most = request.max_np or max(n, least)
    if not least <= n <= most:
        raise InvalidArgumentError(f"an elastic job needs --min-np <= -n <= --max-np, got {least}, {n} and {most}.")
    hosts = discovered(script, {**launchers.without_place(environ), **request.variables})
    here = all(placement.is_here(host.name) for host in hosts)
    notes = request.notes
    if len({host.name for host in hosts}) == 1 and n > 1:
        notes += (
            "a failed worker takes its host out for a while, and there is one host: the job stops and waits. Give each "
            "worker a line of its own (localhost:1 and 127.0.0.1:1 are two hosts to Horovod).",
        )
    if sum(host.slots for host in hosts) < least:
        notes += (f"the hosts have fewer slots than --min-np {least}: the job waits for more.",)
    found: dict[str, Any] = {"hosts": () if here else hosts, "notes": notes}
    return replace(request, launcher="horovodrun", min_np=least, max_np=most, elastic=True, **found)


def discovered(script: Path, environ: Mapping[str, str]) -> tuple[Host, ...]:
    """The hosts that the script prints now.

    Raises:
        InvalidArgumentError: it cannot be run, fails, prints no host or something else.
    """
    found = []
    for number, text in enumerate(answer_of(script, environ).splitlines(), start=1):
        match = _HOST.fullmatch(text.strip())
        if match is None:
            raise InvalidArgumentError(
                f"the host discovery script {script} printed {text!r} as line {number}, where HOST:SLOTS was expected."
            )
        found.append(Host(match[1], int(match[2])))
    if not found:
        raise InvalidArgumentError(
            f"the host discovery script {script} printed no host; let it print one HOST:SLOTS a line, this machine's "
            "at least (localhost:1)."
        )
    return tuple(found)


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
