"""Horovod and torch.distributed under launchers that this MPI does not know: torchrun, and the variables of srun."""

import contextlib
import hmac
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
from ranks import on_ranks, warm

from hvdkit.steps import meeting, secret
from hvdkit.steps.secret import Key

MISSING = [name for name in ("torch", "horovod", "sklearn") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (`make test` installs all)"),
]

EXAMPLES = Path(__file__).parents[2] / "examples" / "pytorch"


def sum_of_ranks(directory, job):
    """The command of a rank; each is a fork of a process that has imported PyTorch."""
    program, arguments = Path(__file__).with_name("programs_launchers.py"), {"directory": str(directory), "job": job}
    return warm("torch").stub("rank_main", str(program), "sum_of_ranks", str(directory), json.dumps(arguments))


def start_as_srun(n, job, command, environment, ranks=None):
    """Start n processes, or some of them, with what ``srun --mpi=none`` gives its tasks."""
    step = {"SLURM_JOB_ID": job, "SLURM_STEP_ID": "0", "SLURM_NTASKS": str(n), "SLURM_STEP_NUM_TASKS": str(n)}
    step["SLURM_STEP_NODELIST"] = socket.gethostname()
    return [
        subprocess.Popen(
            command,
            env={**environment, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (range(n) if ranks is None else ranks)
    ]


def throw_at_rank_0(job, secret):
    """Say to a waiting rank 0 what strangers say, and stay; the connections that are kept open."""
    keys = Key(hmac.digest(secret.encode(), f"srun/{os.getuid()}/{job}/0/horovod".encode(), "sha256"), "")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for port in meeting.ports(keys)[:3]:
            with contextlib.suppress(ConnectionRefusedError):
                address = (socket.gethostbyname(socket.gethostname()), port)
                said = (b"5\n", b"GET / HTTP/1.1\r\n\r\n", bytes(5000), b"hvdkit-meeting 2 " + b"0" * 32 + b"\n", b"")
                strangers = [socket.create_connection(address, timeout=20) for _ in range(60)]
                for number, stranger in enumerate(strangers):
                    stranger.sendall(said[number % len(said)])
                assert [strangers[number].recv(4096) for number in (0, 1)] == [b"", b""]  # rank 0 hung up
                return strangers
        time.sleep(0.05)
    raise AssertionError("rank 0 does not listen")


def outputs(processes):
    texts = [process.communicate(timeout=180)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), texts
    return texts


def test_two_jobs_of_srun_without_mpi_beside_each_other_and_strangers(ranks_command, tmp_path):
    _, environment = ranks_command(1, "mpi")
    environment[secret.VARIABLE] = secret.new()
    first = start_as_srun(2, "501", sum_of_ranks(tmp_path, "501"), environment, ranks=[0])
    other = start_as_srun(2, "502", sum_of_ranks(tmp_path, "502"), environment)
    with contextlib.ExitStack() as stack:
        for stranger in throw_at_rank_0("501", environment[secret.VARIABLE]):
            stack.enter_context(stranger)
        first += start_as_srun(2, "501", sum_of_ranks(tmp_path, "501"), environment, ranks=[1])
        outputs([*first, *other])
    for job in ("501", "502"):
        for rank in range(2):
            facts = json.loads((tmp_path / f"{job}-{rank}.json").read_text())
            assert facts == [2, rank, 2, 0, 1, "srun", 1.0]


def torchrun(n, *command):
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(n),
        "--master-port",
        "29517",
        *command,
    ]


def test_horovod_under_torchrun(ranks_command, tmp_path):
    _, environment = ranks_command(1, "mpi")
    command = torchrun(2, "--no-python", *sum_of_ranks(tmp_path, "t"))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert json.loads((tmp_path / f"t-{rank}.json").read_text()) == [2, rank, 2, 0, 1, "torchrun", 1.0]


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_the_ddp_example_trains_under_each_launcher_and_goes_on_in_one_process(ranks_command, tmp_path, launcher):
    """Under mpirun, which hvdkit launch starts, it is a command of docs/tutorials.md: see test_tutorials.py.

    Here its ranks are forks of a process that has imported PyTorch.
    """
    _, environment = ranks_command(1, "mpi")
    script = warm("torch").stub("rank_script", str(EXAMPLES / "cnn_ddp.py"), "--checkpoint_dir", str(tmp_path / "run"))
    command = [*script, "--epochs", "4"]
    if launcher == "srun":
        text = outputs(start_as_srun(2, "503", command, environment))[0]
    else:
        command = torchrun(2, "--no-python", *command)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr
        text = done.stdout
    assert float(re.search(r"Test accuracy: ([\d.]+) %", text)[1]) > 90
    assert re.search(r"Hvd Procs 2 Total time: [\d.]+ second", text)
    assert len(list((tmp_path / "run").glob("step-*"))) == 3
    if launcher == "torchrun":
        command = [*script, "--epochs", "5", "--resume"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "epoch 5/5" in done.stdout and "epoch 4/5" not in done.stdout
        assert "no launcher" not in done.stdout


def test_one_process_over_gloo_alone(ranks_command, tmp_path):
    """Ray, Spark and scripts set HOROVOD_CONTROLLER whatever the number of ranks."""
    _, environment = ranks_command(1, "mpi")
    program = tmp_path / "program.py"
    program.write_text("import torch, hvdkit.torch as hk; hk.init(); print(hk.hvd.allreduce(torch.ones(2)).tolist())")
    command = warm("torch").stub("rank_script", str(program))
    environment["HOROVOD_CONTROLLER"] = "gloo"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("[1.0, 1.0]\n", 0), done.stderr


ENDS_AT_ONCE = """
import atexit
import torch
import torch.distributed as dist
import hvdkit.torch as hk
works = []
atexit.register(lambda: print(sum(work.is_completed() for work in works)))
hk.init_process_group()
kept = dist.group.WORLD  # as a model in DistributedDataParallel does
whole, part = [torch.zeros(10**7)], torch.zeros(10**7)
works += [dist.all_gather(whole, part, async_op=True) for _ in range(20)]
dist.destroy_process_group()
"""


def test_a_process_ends_after_the_threads_of_its_process_group_rest():
    """PyTorch aborts a process that ends while one of them still holds a tensor."""
    done = subprocess.run([sys.executable, "-c", ENDS_AT_ONCE], capture_output=True, text=True, timeout=180)
    assert (done.stdout, done.returncode) == ("20\n", 0), done.stderr
    assert "no launcher started this process" in done.stderr


@pytest.mark.parametrize(("operations", "backend"), [("CPU", "gloo"), ("NCCL", "nccl")])
@on_ranks("torch", n=1)
def test_ranks_that_share_a_gpu_meet_over_gloo(hk, monkeypatch, operations, backend):
    """NCCL refuses two ranks on one device."""
    import torch

    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", operations)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with mock.patch.object(torch.distributed, "init_process_group") as begun:
        hk.init_process_group()
    assert begun.call_args.args == (backend,)
