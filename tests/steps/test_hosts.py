"""The hosts of a job, from what batch systems say."""

import pytest

from hvdkit.errors import LauncherError
from hvdkit.steps.launchers import expand_hostlist, hosts_of_job


@pytest.mark.parametrize(
    ("hostlist", "hosts"),
    [
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[1-3,7],gpu-[01-02]", ["n1", "n2", "n3", "n7", "gpu-01", "gpu-02"]),
        ("x[098-101]", ["x098", "x099", "x100", "x101"]),
        ("r[1-2]n[3-4].cluster", ["r1n3.cluster", "r1n4.cluster", "r2n3.cluster", "r2n4.cluster"]),
        (" a , b ", ["a", "b"]),
        ("", []),
    ],
)
def test_host_lists_are_expanded_in_their_order(hostlist, hosts):
    assert expand_hostlist(hostlist) == hosts


@pytest.mark.parametrize("hostlist", ["n[1-3", "n1-3]", "n[3-1]", "n[a-b]", "n[1,,2]", "n[]"])
def test_bad_host_lists_are_named(hostlist):
    with pytest.raises(LauncherError, match="the host list"):
        expand_hostlist(hostlist)


def test_each_batch_system_is_read(tmp_path):
    nodefile, rankfile = tmp_path / "nodes", tmp_path / "ranks"
    nodefile.write_text("x1\nx1\nx2\nx2\n")
    rankfile.write_text("batch5\nh1\nh1\nh2\n")
    assert hosts_of_job({"SLURM_STEP_NODELIST": "n2", "SLURM_JOB_NODELIST": "n[1-2]"}) == ["n2"]
    assert hosts_of_job({"PBS_NODEFILE": str(nodefile)}) == ["x1", "x2"]
    assert hosts_of_job({"COBALT_NODEFILE": str(nodefile)}) == ["x1", "x2"]
    assert hosts_of_job({"LSB_DJOB_RANKFILE": str(rankfile)}) == ["h1", "h2"]
    assert hosts_of_job({}) == []
    rankfile.write_text("h1\nh2\n")  # plain LSF, a slot on each host
    assert hosts_of_job({"LSB_DJOB_RANKFILE": str(rankfile)}) == ["h1", "h2"]
    rankfile.write_text("h1\nh1\nh2\n")
    assert hosts_of_job({"LSB_DJOB_RANKFILE": str(rankfile)}) == ["h1", "h2"]
    rankfile.write_text("only1\n")
    assert hosts_of_job({"LSB_DJOB_RANKFILE": str(rankfile)}) == ["only1"]
    with pytest.raises(LauncherError, match=r"PBS_NODEFILE names .*nowhere, which cannot be read"):
        hosts_of_job({"PBS_NODEFILE": str(tmp_path / "nowhere")})
