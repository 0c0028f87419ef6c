"""Four hosts on one machine: namespaces on a bridge, each with a name, an address and a rate of its own.

Names matter: ranks whose hosts have one name pass for ranks of one host, with Open MPI as with Gloo.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

HOSTS = 4
RATE = "1gbit"
BURST_BYTES = 256 * 1024
"""What a link lets pass at once after a pause: 2 ms of its rate. With 64 KiB, the size of the largest packet, each late
timer costs throughput."""
SYSTEM = Path("/etc/netns")
"""Holds what ``ip netns exec`` lays over /etc, by namespace."""
SSH = """#!/bin/sh
skip='while :; do case $1 in -[op]) shift 2 ;; -*) shift ;; *) break ;; esac; done'
eval "$skip"; name=$1; shift; eval "$skip"
set -- unshare --uts sh -c "hostname $name; mount --bind {disks}/$name {disks}/own; $*"
exec env -i HOME="$HOME" PATH="$PATH" ip netns exec "$name" "$@"
"""
"""What launchers take for ``ssh [OPTION]... HOST COMMAND``; like it, it hands no environment on."""


def missing() -> list[str]:
    """What these hosts need and this machine has not."""
    lacking = [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]
    lacking += ["root"] if os.geteuid() != 0 else []
    if not lacking:
        name = f"hvdkit-try-{os.getpid()}"  # pytest-xdist's workers try at the same time
        tried = subprocess.run(["ip", "netns", "add", name], capture_output=True)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
        lacking = ["network namespaces"] if tried.returncode else []
    return lacking


def pids(name):
    """What runs on a host."""
    return subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()


class Hosts:
    """``names`` and ``addresses`` by number; ``inside(number)`` goes before a command to run it there.

    As on Debian, each host knows its own name as 127.0.1.1 and the others by their addresses. With ``bin`` first on
    PATH, launchers reach all of them. Each has a disk of its own at ``disk``; from outside, ``disks`` has all by name.
    """

    def __init__(self, bin: Path) -> None:
        self.bin = bin
        self.disks = bin / "disks"
        self.disk = self.disks / "own"
        self._prefix = f"hvd{os.getpid() % 10000}"
        self._bridge = f"{self._prefix}br"
        self.names = [f"{self._prefix}n{number}" for number in range(HOSTS)]
        self.addresses = [f"10.77.0.{number + 1}" for number in range(HOSTS)]

    def start(self) -> None:
        (self.bin / "ssh").write_text(SSH.replace("{disks}", str(self.disks)))
        (self.bin / "ssh").chmod(0o755)
        for name in (*self.names, self.disk.name):
            (self.disks / name).mkdir(parents=True)
        self._do(f"ip link add {self._bridge} type bridge")
        self._do(f"ip link set {self._bridge} up")
        for number, address in enumerate(self.addresses):
            name, outside = self.names[number], self._outside(number)
            self._do(f"ip netns add {name}")
            known = {**dict(zip(self.names, self.addresses, strict=True)), "localhost": "127.0.0.1", name: "127.0.1.1"}
            (SYSTEM / name).mkdir(parents=True, exist_ok=True)
            (SYSTEM / name / "hosts").write_text("".join(f"{where} {who}\n" for who, where in known.items()))
            self._do(f"ip link add {outside} type veth peer name eth0 netns {name}")
            self._do(f"ip link set {outside} master {self._bridge} up")
            self._do(f"ip -n {name} addr add {address}/24 dev eth0")
            self._do(f"ip -n {name} link set eth0 up")
            self._do(f"ip -n {name} link set lo up")
            self._do(f"tc qdisc add dev {outside} root tbf rate {RATE} burst {BURST_BYTES} latency 50ms")

    def stop(self) -> None:
        self.clear()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(SYSTEM / name, ignore_errors=True)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True)

    def inside(self, number: int) -> list[str]:
        name = self.names[number]
        enter = (
            f'hostname "$0"; mount --bind {shlex.quote(str(self.disks))}/"$0" {shlex.quote(str(self.disk))}; exec "$@"'
        )
        return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", enter, name]

    def clear(self) -> None:
        """End everything that still runs on them."""
        for name in self.names:
            for pid in pids(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def cut(self, number: int) -> None:
        """Pull the cable of a host at the switch: what is sent to it or by it is lost, and nobody is told."""
        self._do(f"ip link set {self._outside(number)} down")

    def mend(self, number: int) -> None:
        """Put it back, and wait until it and the others reach each other: addresses they gave up take a moment."""
        self._do(f"ip link set {self._outside(number)} up")
        for other in range(HOSTS):
            for here, there in ((number, other), (other, number)):
                self._wait_for_answer(here, there)

    def _wait_for_answer(self, here: int, there: int) -> None:
        ask = f"import socket; socket.create_connection(('{self.addresses[there]}', 9), timeout=1)"
        for _ in range(30):
            command = ["ip", "netns", "exec", self.names[here], sys.executable, "-c", ask]
            if b"ConnectionRefusedError" in subprocess.run(command, capture_output=True).stderr:
                return
        raise RuntimeError(f"{self.names[here]} does not reach {self.names[there]} after its link was mended")

    def _outside(self, number: int) -> str:
        return f"{self._prefix}v{number}"

    def _do(self, command: str) -> None:
        done = subprocess.run(command.split(), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"this machine does not allow `{command}`: {done.stderr.strip()}")
