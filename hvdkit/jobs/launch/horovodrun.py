"""horovodrun: for elastic jobs, whose hosts a script names, and run in a process of its own.

It is started as ``python -P -m hvdkit.jobs.launch.horovodrun horovodrun ARGUMENT...``, with its rendezvous closed to
strangers. Its own server listens on all interfaces, and whoever reaches it can read and change where the ranks find one
another; that of an elastic job unpickles what it is sent. See ``hvdkit.steps.bootstrap``. It also starts sooner: what
Horovod was built with stands in its record.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from hvdkit.common.units import bytes_text
from hvdkit.errors import InvalidArgumentError, LaunchError
from hvdkit.jobs.launch import rank
from hvdkit.jobs.launch.hosts import is_here
from hvdkit.jobs.launch.model import Host
from hvdkit.jobs.launch.options import Request
from hvdkit.steps import launchers

SCRIPT_S = 15.0
"""Seconds that a host discovery script may take; horovodrun asks it again every second."""
_ANSWER_BYTES = 1 << 20
_LOOK_S = 0.02
_HOST = re.compile(r"([A-Za-z0-9_.\-]+):([1-9][0-9]*)")


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
    there = discovered(script, {**launchers.without_place(environ), **request.variables})
    here = all(is_here(host.name) for host in there)
    notes = request.notes
    if len({host.name for host in there}) == 1 and n > 1:
        notes += (
            "a failed worker takes its host out for a while, and there is one host: the job stops and waits. Give each "
            "worker a line of its own (localhost:1 and 127.0.0.1:1 are two hosts to Horovod).",
        )
    if sum(host.slots for host in there) < least:
        notes += (f"the hosts have fewer slots than --min-np {least}: the job waits for more.",)
    where = () if here else there
    return replace(request, launcher="horovodrun", min_np=least, max_np=most, elastic=True, hosts=where, notes=notes)


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


# Run in a process of its own


def guarded(argv: list[str]) -> list[str]:
    """The command line to start instead: this Python's horovodrun in place of any; other launchers are left alone.

    Raises:
        LaunchError: this Python has no Horovod.
    """
    if Path(argv[0]).name != "horovodrun":
        return argv
    if importlib.util.find_spec("horovod") is None:
        raise LaunchError(
            f"{argv[0]} belongs to another Python, where it would write your environment, passwords too, into command "
            f"lines; install hvdkit beside Horovod, or use --launcher mpirun."
        )
    return [sys.executable, "-P", "-m", "hvdkit.jobs.launch.horovodrun", *argv]


def main(argv: list[str]) -> Any:
    """Run horovodrun in this process, with another server."""
    from horovod.runner import gloo_run, launch
    from horovod.runner.common.util import env as exported
    from horovod.runner.common.util.timeout import TimeoutException
    from horovod.runner.driver import driver_service
    from horovod.runner.elastic import discovery
    from horovod.runner.http import http_server
    from horovod.runner.util import network

    from hvdkit.jobs.launch.facts import recorded_horovod
    from hvdkit.steps import bootstrap

    token, listen_on = secrets.token_hex(16), ""
    variables: dict[str, Any] = {}

    def find_port(new_server: Any) -> tuple[Any, int]:
        server = new_server((listen_on, 0))
        return server, server.server_address[1]

    def command_of_ranks(command: Sequence[str], address: str, nics: Any, port: int, elastic: bool = False) -> str:
        variables.update(gloo_run.create_run_env_vars(address, nics, port, elastic))
        variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = bootstrap.address_with(token, address, port)
        return shlex.join(command)

    def command_of_rank(command: str, environment: Mapping[str, str]) -> Any:
        os.environ.update({**environment, **{name: str(value) for name, value in variables.items()}})

        def build(slot: Any) -> str:
            place = gloo_run.create_slot_env_vars(slot)
            return " ".join(["env", *(f"{name}={shlex.quote(value)}" for name, value in place.items()), command])

        return build

    def elsewhere(command: str, **to: Any) -> str:
        receive = f"{shlex.join([sys.executable, '-I', '-S', rank.__file__])} {command}"
        left = [word for name in os.environ if not exported.is_exportable(name) for word in ("-u", name)]
        return f"{shlex.join(['env', *left, '-0'])} | {plain_remote(shlex.quote(receive), **to)}"

    def interfaces(settings: Any, names: Any, remote: Any = None, fn_cache: Any = None) -> Any:  # noqa: ARG001
        others = network.filter_local_addresses(names) if remote is None else remote
        if settings.nics or not others:
            return settings.nics or driver_service.get_local_interfaces(settings)
        return [bootstrap.interface_of(bootstrap.own_address(*others))]

    def run(settings: Any, nics: Any, env: Any, address: str, command: Any) -> Any:
        nonlocal listen_on
        listen_on = address
        return gloo_run.gloo_run(settings, nics, env, address, command)

    def run_elastic(settings: Any, *rest: Any) -> Any:
        nonlocal listen_on
        listen_on = network.get_driver_ip(settings.nics) if settings.nics else ""
        return gloo_run.gloo_run_elastic(settings, *rest)

    plain_remote = gloo_run.get_remote_command
    gloo_run.get_run_command, gloo_run._slot_info_to_command_fn = command_of_ranks, command_of_rank
    gloo_run.get_remote_command, driver_service.get_common_interfaces = elsewhere, interfaces
    launch.gloo_run, launch.gloo_run_elastic = run, run_elastic
    if (built := recorded_horovod()) is not None:  # else horovodrun loads every framework to ask it
        launch.gloo_built = lambda verbose: built.gloo  # noqa: ARG005
    http_server.find_port = find_port
    http_server.RendezvousHandler.parse_request = bootstrap.only_with(token)
    for name, value in bootstrap.SERVER.items():
        setattr(http_server.RendezvousHTTPServer, name, value)
    discovery.HostDiscoveryScript._execute_discovery_script = lambda self: answer_of(
        Path(self._discovery_script), os.environ
    )
    sys.argv = argv
    try:
        return launch.run_commandline()
    except TimeoutException as error:
        return f"horovodrun: {error}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
