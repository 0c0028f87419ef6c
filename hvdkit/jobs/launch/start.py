"""Starts a launcher: in a session of its own, with its output in a pipe and nothing to read.

horovodrun is started as ``python -P -m hvdkit.jobs.launch.start horovodrun ARGUMENT...``, with its rendezvous closed to
strangers. Its own server listens on all interfaces, and whoever reaches it can read and change where the ranks find one
another; that of an elastic job unpickles what it is sent. See ``hvdkit.steps.bootstrap``. It also starts sooner: what
Horovod was built with stands in its record.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdkit.errors import LaunchError
from hvdkit.jobs.launch import on_host
from hvdkit.jobs.launch.horovodrun import answer_of
from hvdkit.jobs.launch.processes import dying_with_parent
from hvdkit.steps import bootstrap


def start(argv: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a launcher, which ends with this process: ranks that do not reach it have no other end.

    The terminal's Ctrl-C does not reach the launcher: this process then ends the job in order.

    Args:
        argv: the launcher, its options and the command.
        environment: all its variables.
    Raises:
        LaunchError: it cannot be started.
    """
    words = guarded(list(argv))
    try:
        return subprocess.Popen(
            words,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=dying_with_parent(signal.SIGTERM if words == list(argv) else signal.SIGKILL),  # horovodrun
        )
    except OSError as error:
        raise LaunchError(f"{argv[0]} cannot be started: {error.strerror}.") from error


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
    return [sys.executable, "-P", "-m", "hvdkit.jobs.launch.start", *argv]


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
        receive = f"{shlex.join([sys.executable, '-I', '-S', on_host.__file__])} {command}"
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
