"""hvdkit doctor --job in real jobs, sound ones and such with a fault that the test causes."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import warm

MISSING = [name for name in ("torch", "horovod", "mpi4py") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (`make test` installs all)"),
]

HVDKIT = [sys.executable, "-m", "hvdkit.cli"]


@pytest.fixture
def doctor_job(ranks_command, tmp_path):
    """Run the command on n ranks, each first doing what ``before`` (a line of shell) says; its exit status and text.

    Each is a fork of a process that has imported PyTorch, or one of its own, where what it finds must be looked for.
    """

    def run(n, *options, before=":", controller="mpi", forked=True):
        start, environment = ranks_command(n, "mpi")
        if controller == "gloo":
            start = [*HVDKIT, "launch", "-n", str(n), "--launcher", "horovodrun", "--no-tag", "--"]
        doctor_job = [*(warm("torch").stub("hvdkit.__main__") if forked else HVDKIT), "doctor", "--job", *options]
        command = [*start, "sh", "-c", f'{before}; exec "$@"', "sh", *doctor_job]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    return run


@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_a_sound_job(doctor_job, controller):
    done = doctor_job(2, "--json", controller=controller)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout[done.stdout.index("{") :])
    assert found["ok"] and [rank["horovod"]["rank"] for rank in found["ranks"]] == [0, 1]
    assert found["ranks"][0]["versions"]["horovod"] == "0.28.1"


def test_every_process_is_rank_0_of_1(doctor_job):
    done = doctor_job(1, before="export SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_ID=0")
    assert done.returncode == 1
    assert "error [start]" in done.stdout and "srun started rank 0 of 4, but Horovod (over Open MPI" in done.stdout


def test_another_version_on_one_rank(doctor_job, tmp_path):
    metadata = tmp_path / "other" / "torch-9.9.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    other = f'[ "$OMPI_COMM_WORLD_RANK" = 0 ] || export PYTHONPATH={tmp_path}/other:$PYTHONPATH'
    done = doctor_job(2, "--json", before=other, forked=False)
    assert done.returncode == 0  # they train
    found = json.loads(done.stdout[done.stdout.index("{") :])
    (what,) = [one["what"] for one in found["findings"] if one["check"] == "versions"]
    assert what.endswith("on rank 0; 9.9 on rank 1.")


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_asked(doctor_job):
    late = '[ "$OMPI_COMM_WORLD_RANK" = 0 ] || sleep 100'
    done = doctor_job(2, "--timeout", "3", before=late)
    assert done.returncode != 0
    assert "rank 0 of 2 has not met the others after 3 s" in done.stderr


def test_launch_does_not_start_what_cannot_train(tmp_path):
    launch = [*HVDKIT, "launch", "--preflight", "-n", "2", "--", "echo", "trained"]
    paths = [str(Path(__file__).parents[2])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    sound = subprocess.run(launch, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert sound.returncode == 0, sound.stderr
    assert "trained" in sound.stdout and "The job can train: 2 of 2 ranks" in sound.stderr
    for name in ("torch", "tensorflow"):
        (tmp_path / "broken").mkdir(exist_ok=True)
        (tmp_path / "broken" / f"{name}.py").write_text("raise ImportError('no driver')")
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "broken"), *paths])
    refused = subprocess.run(launch, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 1
    assert "trained" not in refused.stdout and "error [start]" in refused.stderr
    assert "hvdkit.torch needs PyTorch, which cannot be imported" in refused.stderr
    assert "echo was not started" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]
