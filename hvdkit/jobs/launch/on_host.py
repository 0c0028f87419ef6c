"""What runs on a rank's host before its command: ``python -I -S on_host.py receive|place ...``.

``receive SHELL_COMMAND`` takes the environment from standard input, as NUL-separated NAME=VALUE, and runs the command:
on a command line, as horovodrun puts it there, every user of both hosts could read it.

``place HOSTS COMMAND ...`` adds what torchrun gives a rank, so that programs that start ``torch.distributed`` from the
environment train as one job; under every launcher, from its own variables. On one machine, ``rank`` does so.
"""

import os
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # without site, nothing else of the environment is on it

from hvdkit.errors import LauncherError
from hvdkit.jobs.launch import rank
from hvdkit.steps import bootstrap, hosts, launchers

_OF_THE_USER = ("MASTER_ADDR", "GLOO_SOCKET_IFNAME")
"""Given by --env, they stay."""


def main(arguments: list[str]) -> None:
    """Become the command."""
    what, *rest = arguments
    if what == "receive":
        receive()
        os.execv("/bin/sh", ["sh", "-c", rest[0]])  # noqa: S606
    named, *command = rest
    try:
        os.environ.update(place([name for name in named.split(",") if name]))
    except (LauncherError, OSError) as error:  # which only programs need that start torch.distributed by themselves
        sys.stderr.write(f"hvdkit launch: this rank gets no RANK and MASTER_ADDR: {error}\n")
    sys.exit(rank.become(command))


def receive() -> None:
    """Take the environment from standard input, which then has nothing more; and find Horovod's network interface."""
    words = sys.stdin.buffer.read().split(b"\0")
    if len(words) < 2:
        sys.exit("hvdkit launch: the job's environment did not come: what is used as ssh must pass standard input on.")
    for name, _, value in (word.partition(b"=") for word in words if word):
        os.environb[name] = value
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    root = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"].partition(":")[0]
    name = bootstrap.interface_of(hosts.own_address(root))  # it may have another name on each host
    os.environ.update(HOROVOD_GLOO_IFACE=name, NCCL_SOCKET_IFNAME=name)


def place(named: list[str]) -> dict[str, str]:
    """RANK, LOCAL_RANK, ... as far as the launcher says them, and where rank 0 is.

    Args:
        named: the first hosts of the job, that of rank 0 before the others; empty where the batch system says them.
    Raises:
        LauncherError: the launcher's environment is incomplete, or a host list cannot be read.
        OSError: a host's name has no address.
    """
    launched = launchers.detect(os.environ)
    if launched is None:
        return {}
    found = {"RANK": launched.rank, "LOCAL_RANK": launched.local_rank, "LOCAL_WORLD_SIZE": launched.local_size}
    variables = {name: str(value) for name, value in found.items() if value is not None}
    addresses = [hosts.address(name) for name in named or hosts.of_job(os.environ)[:2]]
    if os.environ.get("WORLD_SIZE") == variables.get("LOCAL_WORLD_SIZE"):
        variables["MASTER_ADDR"] = "127.0.0.1"
    elif addresses:
        variables["MASTER_ADDR"] = addresses[0]
        variables["GLOO_SOCKET_IFNAME"] = bootstrap.interface_of(hosts.own_address(*addresses))
    if launched.rank == 0:
        _say_if_taken(os.environ.get("MASTER_PORT", "0"))
    return {**variables, **{name: os.environ[name] for name in _OF_THE_USER if name in os.environ}}


def _say_if_taken(port: str) -> None:
    try:
        socket.create_server(("", int(port))).close()
    except OSError as error:
        sys.stderr.write(
            f"hvdkit launch: port {port} of {socket.gethostname()} is taken ({error.strerror}), so that "
            "torch.distributed cannot start from the environment; start the job again, which takes another port.\n"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
