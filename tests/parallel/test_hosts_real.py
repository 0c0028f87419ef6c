"""Trainings on four hosts: network namespaces with an address each, over Gloo."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import namespaces
import pytest

MISSING = [name for name in ("torch", "horovod") if importlib.util.find_spec(name) is None] + namespaces.missing()
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.root,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
]

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def hosts():
    machines = namespaces.Hosts()
    try:
        try:
            machines.start()
        except RuntimeError as error:
            pytest.skip(str(error))
        yield machines
    finally:
        machines.stop()


@pytest.fixture
def trained(ranks_command, run_ranks, tmp_path):
    """The command of a rank that trains on its own, its environment, and how to read what all ranks ended with."""
    _, environment = ranks_command(1, "mpi")
    arguments = [HERE / "programs_hosts.py", "train", tmp_path, "{}"]
    command = [sys.executable, str(HERE / "rank_main.py"), *map(str, arguments)]

    def weights():
        ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(namespaces.HOSTS)]
        local = run_ranks("programs_hosts.py", "train", namespaces.HOSTS)
        assert [rank["hosts"] for rank in ranks] == [namespaces.HOSTS] * namespaces.HOSTS
        assert [rank["hosts"] for rank in local] == [1] * namespaces.HOSTS
        for rank in ranks:
            assert rank["weights"] == ranks[0]["weights"]
            assert rank["weights"] == pytest.approx(local[0]["weights"], rel=1e-10, abs=1e-12)

    return command, environment, weights


def test_over_gloo_as_under_srun(hosts, trained):
    command, environment, compare = trained
    job = {"SLURM_JOB_ID": "900", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0"}
    job["SLURM_STEP_NODELIST"] = ",".join(hosts.addresses)
    ranks = [
        subprocess.Popen(
            [*hosts.inside(rank), *command],
            env={**environment, **job, "SLURM_PROCID": str(rank), "SLURMD_NODENAME": f"node{rank}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(namespaces.HOSTS)
    ]
    texts = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * namespaces.HOSTS, texts
    compare()
