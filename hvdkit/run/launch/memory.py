"""Whether the kernel killed a rank because its cgroup ran out of memory: a batch job's, a container's, systemd's."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from hvdkit.common.units import bytes_text

_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_LIMITS = {"memory.events": "memory.max", "memory.oom_control": "memory.limit_in_bytes"}
"""The file of a cgroup's limit by the file that counts what was killed for want of memory, of versions 2 and 1."""
_NO_LIMIT = 1 << 60


class MemoryKills:
    """Counts the processes that the kernel has killed in the cgroups of a job's ranks.

    Args:
        proc, cgroups: where these file systems are mounted.
    """

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc, self._cgroups = proc, cgroups
        self._before: dict[Path, int] = {}

    def watch(self, pid: int) -> None:
        """Count in the cgroup of this process from now on."""
        for counter in self._counters(pid):
            self._before.setdefault(counter, _count(counter))

    def cause(self) -> str:
        """What to add to the sentence on a process that was killed: "" where the kernel has killed none."""
        for counter, before in self._before.items():
            if _count(counter) > before:
                return f" because memory ran out{_limit(counter.with_name(_LIMITS[counter.name]))}"
        return ""

    def _counters(self, pid: int) -> list[Path]:
        found = []
        with contextlib.suppress(OSError):  # it has just ended
            for line in (self._proc / str(pid) / "cgroup").read_text().splitlines():
                number, controllers, path = line.split(":", 2)
                if number == "0" or "memory" in controllers.split(","):
                    mounted = self._cgroups if number == "0" else self._cgroups / "memory"
                    inside = mounted / path.lstrip("/")
                    # In a container the path may be that of the host, and only the container's own cgroup is mounted.
                    here = inside if inside.is_dir() else mounted
                    found.append(here / ("memory.events" if number == "0" else "memory.oom_control"))
        return found


def _count(counter: Path) -> int:
    with contextlib.suppress(OSError):  # no such version of cgroups here, or it is gone
        if (kills := _KILLS.search(counter.read_text())) is not None:
            return int(kills[1])
    return 0


def _limit(file: Path) -> str:
    with contextlib.suppress(OSError, ValueError):  # "max", or gone
        if (limit := int(file.read_text())) < _NO_LIMIT:
            return f" (the limit of its cgroup is {bytes_text(limit)})"
    return ""
