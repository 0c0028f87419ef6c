"""A link between two network namespaces with a rate and a delay, for kernels without tc's netem (root, Linux).

Each namespace gets a TAP device ``eth0``; this process carries what one sends to the other. A packet waits until
those before it have passed at the rate, and then for the delay. Where it would wait for the rate longer than QUEUE_S
it is lost, as at a switch. Packets pass as TCP hands them on, of up to 64 KiB, and all that are there once in
TURN_S: a wake-up for each of them takes more of a core.

    python benchmarks/delayed_link.py NAMESPACE NAMESPACE --mbit 100 --delay-ms 20
"""

import argparse
import contextlib
import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

QUEUE_S = 0.05
"""What tests/parallel/namespaces.py gives its links."""
TURN_S = 0.001
"""How much later than the delay a packet may be."""
HEADER = 10
"""Bytes of struct virtio_net_hdr, in which a packet says how it is to be cut and summed up."""
PACKET = HEADER + 18 + (1 << 16)
# linux/if_tun.h, linux/sched.h and linux/prctl.h
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
TAP, NO_PACKET_INFORMATION, VIRTIO_HEADER = 0x0002, 0x1000, 0x4000
CHECKSUMS, TSO4, TSO6 = 1, 2, 4
CLONE_NEWNET, PR_SET_TIMERSLACK = 0x40000000, 29


@contextlib.contextmanager
def between(names: list[str], addresses: list[str], mbit: float, delay_ms: float) -> Iterator[subprocess.Popen[str]]:
    """The link in place of the ``eth0`` of two namespaces, while the block runs: its process."""
    for name in names:
        subprocess.run(["ip", "-n", name, "link", "del", "eth0"], capture_output=True)
    command = [sys.executable, __file__, *names, "--mbit", str(mbit), "--delay-ms", str(delay_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as link:
        try:
            if not (link.stdout and link.stdout.readline()):
                raise RuntimeError(f"`{' '.join(command)}` could not make the link")
            for name, address in zip(names, addresses, strict=True):
                subprocess.run(["ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0"], check=True)
                subprocess.run(["ip", "-n", name, "link", "set", "eth0", "up"], check=True)
            yield link
        finally:
            link.terminate()


def tap(namespace: str) -> int:
    """A new ``eth0`` in a namespace; this process stays there."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as place:
        if libc.setns(place.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"eth0", TAP | NO_PACKET_INFORMATION | VIRTIO_HEADER))
    fcntl.ioctl(device, TUNSETOFFLOAD, CHECKSUMS | TSO4 | TSO6)
    return device


class Way:
    """One direction."""

    def __init__(self, source: int, target: int, bytes_per_s: float, delay_s: float) -> None:
        self.source, self.target, self.bytes_per_s, self.delay_s = source, target, bytes_per_s, delay_s
        self.free_at = 0.0
        self.waiting: deque[tuple[float, bytes]] = deque()

    def take(self) -> None:
        """What the source has sent."""
        now = time.monotonic()
        self.free_at = max(self.free_at, now)
        with contextlib.suppress(BlockingIOError):
            while packet := os.read(self.source, PACKET):
                if self.free_at - now <= QUEUE_S:
                    self.free_at += (len(packet) - HEADER) / self.bytes_per_s
                    self.waiting.append((self.free_at + self.delay_s, packet))

    def give(self) -> None:
        """Every packet that is due."""
        now = time.monotonic()
        while self.waiting and self.waiting[0][0] <= now:
            with contextlib.suppress(OSError):  # a device that is down loses it
                os.write(self.target, self.waiting.popleft()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("namespaces", nargs=2, metavar="NAMESPACE")
    parser.add_argument("--mbit", type=float, required=True, help="rate of each direction, Mbit/s")
    parser.add_argument("--delay-ms", type=float, required=True, help="of each packet each way")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    one, other = (tap(name) for name in options.namespaces)
    rate, delay_s = options.mbit * 1e6 / 8, options.delay_ms / 1e3
    ways = [Way(one, other, rate, delay_s), Way(other, one, rate, delay_s)]
    print("ready", flush=True)
    while True:
        if not any(way.waiting for way in ways):
            select.select([one, other], [], [])
        time.sleep(TURN_S)
        for way in ways:
            way.take()
            way.give()


if __name__ == "__main__":
    main()
