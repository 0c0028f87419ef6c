"""A process that the kernel killed for want of memory is told from another that got SIGKILL: cgroups of version 2."""

import pytest

from hvdkit.run.launch.memory import MemoryKills

EVENTS = "low 0\nhigh 12\nmax 7\noom {n}\noom_kill {n}\noom_group_kill 0\n"


@pytest.mark.parametrize("path", ["/job_7/step_0", "/of/the/host"])
@pytest.mark.parametrize(
    ("limit", "cause"),
    [
        ("2000000000\n", " because memory ran out (the limit of its cgroup is 2.00 GB)"),
        ("max\n", " because memory ran out"),
    ],
)
def test_kills_of_the_kernel_are_counted_in_the_ranks_cgroup(tmp_path, path, limit, cause):
    inside = tmp_path / "cgroup" / "job_7" / "step_0"
    (tmp_path / "proc" / "11").mkdir(parents=True)
    (tmp_path / "proc" / "11" / "cgroup").write_text(f"0::{path}\n")
    inside.mkdir(parents=True)
    where = inside if path.startswith("/job") else tmp_path / "cgroup"  # in a container the path may be the host's
    (where / "memory.events").write_text(EVENTS.format(n=1))
    (where / "memory.max").write_text(limit)
    kills = MemoryKills(tmp_path / "proc", tmp_path / "cgroup")
    kills.watch(11)
    kills.watch(12)  # it has just ended
    assert kills.cause() == ""
    (where / "memory.events").write_text(EVENTS.format(n=2))
    assert kills.cause() == cause
