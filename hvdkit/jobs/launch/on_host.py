"""What a rank's environment becomes on its host: ``rank`` asks for its place, and horovodrun for what ssh brought.

``python -I -S on_host.py SHELL_COMMAND`` takes the environment from standard input, as NUL-separated NAME=VALUE, and
runs the command: on a command line, as horovodrun puts it there, every user of both hosts could read it.
"""

import json
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

if __name__ == "__main__":  # without site, nothing else of the environment is on it
    sys.path.append(str(Path(__file__).parents[3]))

from hvdkit.errors import LauncherError

WORKERS = "HVDKIT_WORKERS"
"""HOST:PORT of every rank in turn, of which TF_CONFIG is made (``--tf-config``)."""
STARTUP = Path(__file__).parents[2] / "observe" / "startup"
"""Of the ``sitecustomize`` that gets a rank's Pythons ready for what ``hvdkit launch`` asks."""
_OF_THE_USER = ("MASTER_ADDR", "GLOO_SOCKET_IFNAME")
"""Given by --env, they stay."""


def main(arguments: list[str]) -> None:
    """Become the command, with the environment from standard input, which then has nothing more."""
    from hvdkit.steps import bootstrap

    words = sys.stdin.buffer.read().split(b"\0")
    if len(words) < 2:
        sys.exit("hvdkit launch: the job's environment did not come: what is used as ssh must pass standard input on.")
    for name, _, value in (word.partition(b"=") for word in words if word):
        os.environb[name] = value
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    root = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"].partition(":")[0]
    interface = bootstrap.interface_of(bootstrap.own_address(root))  # it may have another name on each host
    os.environ.update(HOROVOD_GLOO_IFACE=interface, NCCL_SOCKET_IFNAME=interface)
    os.execv("/bin/sh", ["sh", "-c", arguments[0]])  # noqa: S606


def rank_of(variable: str) -> int:
    """This rank, from the variable of the launcher, or from whatever the launcher of a batch system sets.

    Raises:
        ValueError: nothing says it.
    """
    if variable:
        rank = os.environ.get(variable, "")
        if not rank.isdigit():
            raise ValueError(f"{variable} must be the rank, got {rank!r}: another launcher started this process.")
        return int(rank)
    from hvdkit.steps import launchers

    try:
        launched = launchers.detect(os.environ)
    except LauncherError as error:
        raise ValueError(str(error)) from error
    if launched is None:
        raise ValueError("the launcher says in no variable that is known here which rank this is.")
    return launched.rank


def settle_place(rank: int, root: str) -> None:
    """Add what torchrun gives a rank to this environment, under every launcher, and TF_CONFIG.

    Programs that start ``torch.distributed`` from the environment then train as one job.

    Args:
        root: the first hosts of the job, that of rank 0 before the others, by commas; "" where the batch system says
            them, or all are this one.
    """
    if workers := os.environ.get(WORKERS):
        task = {"type": "worker", "index": rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers.split(",")}, "task": task})
    if "WORLD_SIZE" not in os.environ:  # ranks come and go
        return
    if os.environ["WORLD_SIZE"] == os.environ.get("LOCAL_WORLD_SIZE"):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        return
    try:
        os.environ.update(place([name for name in root.split(",") if name]))
    except (LauncherError, OSError) as error:  # which only programs need that start torch.distributed by themselves
        sys.stderr.write(f"hvdkit launch: this rank gets no RANK and MASTER_ADDR: {error}\n")


def place(named: list[str]) -> dict[str, str]:
    """RANK, LOCAL_RANK, ... as far as the launcher says them, and where rank 0 is.

    Args:
        named: the first hosts of the job; empty where the batch system says them.
    Raises:
        LauncherError: the launcher's environment is incomplete, or a host list cannot be read.
        OSError: a host's name has no address.
    """
    from hvdkit.steps import bootstrap, launchers

    launched = launchers.detect(os.environ)
    if launched is None:
        return {}
    found = {"RANK": launched.rank, "LOCAL_RANK": launched.local_rank, "LOCAL_WORLD_SIZE": launched.local_size}
    variables = {name: str(value) for name, value in found.items() if value is not None}
    addresses = [bootstrap.address_of(name) for name in named or launchers.hosts_of_job(os.environ)[:2]]
    if os.environ["WORLD_SIZE"] == variables.get("LOCAL_WORLD_SIZE"):
        variables["MASTER_ADDR"] = "127.0.0.1"
    elif addresses:
        variables["MASTER_ADDR"] = addresses[0]
        variables["GLOO_SOCKET_IFNAME"] = bootstrap.interface_of(bootstrap.own_address(*addresses))
    port = os.environ.get("MASTER_PORT", "0")
    if launched.rank == 0:
        try:
            socket.create_server(("", int(port))).close()
        except OSError as error:
            sys.stderr.write(
                f"hvdkit launch: port {port} of {socket.gethostname()} is taken ({error.strerror}), so that "
                "torch.distributed cannot start from the environment; start the job again, which takes another port.\n"
            )
    return {**variables, **{name: os.environ[name] for name in _OF_THE_USER if name in os.environ}}


def with_startup(environ: Mapping[str, str]) -> str:
    """PYTHONPATH with the directory of our ``sitecustomize`` in front."""
    return os.pathsep.join([str(STARTUP), *filter(None, [environ.get("PYTHONPATH")])])


if __name__ == "__main__":
    main(sys.argv[1:])
