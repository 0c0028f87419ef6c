"""Four hosts on one machine: network namespaces on a bridge, each with an address and a rate of its own."""

import os
import shutil
import subprocess

HOSTS = 4
RATE = "1gbit"


def missing() -> list[str]:
    """What these hosts need and this machine has not."""
    lacking = [name for name in ("ip", "tc") if shutil.which(name) is None]
    lacking += ["root"] if os.geteuid() != 0 else []
    if not lacking:
        tried = subprocess.run(["ip", "netns", "add", "hvdkit-try"], capture_output=True)
        subprocess.run(["ip", "netns", "del", "hvdkit-try"], capture_output=True)
        lacking = ["network namespaces"] if tried.returncode else []
    return lacking


class Hosts:
    """``addresses`` by number; ``inside(number)`` goes before a command to run it there."""

    def __init__(self) -> None:
        self._prefix = f"hvd{os.getpid() % 10000}"
        self._bridge = f"{self._prefix}br"
        self.addresses = [f"10.77.0.{number + 1}" for number in range(HOSTS)]

    def start(self) -> None:
        self._do(f"ip link add {self._bridge} type bridge")
        self._do(f"ip link set {self._bridge} up")
        for number, address in enumerate(self.addresses):
            name, outside = self._name(number), f"{self._prefix}v{number}"
            self._do(f"ip netns add {name}")
            self._do(f"ip link add {outside} type veth peer name eth0 netns {name}")
            self._do(f"ip link set {outside} master {self._bridge} up")
            self._do(f"ip -n {name} addr add {address}/24 dev eth0")
            self._do(f"ip -n {name} link set eth0 up")
            self._do(f"ip -n {name} link set lo up")
            self._do(f"tc qdisc add dev {outside} root tbf rate {RATE} burst 1mb latency 50ms")

    def stop(self) -> None:
        for number in range(HOSTS):
            subprocess.run(["ip", "netns", "del", self._name(number)], capture_output=True)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True)

    def inside(self, number: int) -> list[str]:
        return ["ip", "netns", "exec", self._name(number)]

    def _name(self, number: int) -> str:
        return f"{self._prefix}n{number}"

    def _do(self, command: str) -> None:
        done = subprocess.run(command.split(), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"this machine does not allow `{command}`: {done.stderr.strip()}")
