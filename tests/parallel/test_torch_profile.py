"""PyTorch's profiler on every rank: ``hvdkit launch --torch-profile`` around scripts as they are."""

import gzip
import importlib.util
import json
import os
import subprocess
import sys

import pytest
from ranks import warm

MISSING = [name for name in ("torch", "horovod") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (`make test` installs all)"),
]
HOROVOD = """
import sys
import torch
import hvdkit.torch as hk
world = hk.init()
model = torch.nn.Linear(8, 4)
optimizer = hk.distribute(torch.optim.SGD(model.parameters(), lr=0.1), model)
hk.broadcast_state(model, optimizer)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.ones(3, 8)).sum().backward()
    optimizer.step()
print("arguments", sys.argv[1:], __name__)
"""
DDP = """
import os, sys, time
for name in ("horovod", "hvdkit"):
    sys.modules[name] = None  # cannot be imported
import torch
import torch.distributed as dist

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return int(sys.argv[1])
    def __getitem__(self, index):
        return torch.ones(8)

if __name__ == "__main__":
    rank, size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/meeting", rank=rank, world_size=size)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.utils.data.DataLoader(Samples(), num_workers=1, multiprocessing_context="spawn"):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
    time.sleep(1)  # PyTorch aborts where Gloo's threads drop their last tensor while Python ends
"""


def launched(tmp_path, n, script, *options, launcher="mpirun", command=(), steps="9", forked=False):
    """The end of a job that profiles ``script``, which is started with ``steps`` as its argument.

    Its ranks are processes of the launcher, or forks of one that has imported PyTorch.
    """
    command = warm("torch").stub("rank_script") if forked else command
    (tmp_path / "train it.py").write_text(script)
    ours = ("HOROVOD_", "OMPI_", "PMIX_", "PMI_", "SLURM_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    start = [sys.executable, "-m", "hvdkit.cli", "launch", "-n", str(n), "--launcher", launcher, *options]
    words = [*start, "--torch-profile", "profile", "--", *command, "train it.py", steps]
    return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)


def names_in(file):
    with gzip.open(file) as opened:
        return [event.get("name", "") for event in json.load(opened)["traceEvents"]]


def files_of(size):
    ranks = [f"{rank}-of-{size}" for rank in range(size)]
    return sorted([f"trace-{rank}.json.gz" for rank in ranks] + [f"operators-{rank}.txt" for rank in ranks])


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_every_rank_leaves_the_steps_that_were_asked_for(tmp_path, launcher):
    how = {"launcher": launcher, "forked": launcher == "horovodrun"}
    done = launched(tmp_path, 2, HOROVOD, "--torch-profile-steps", "3,1,2", **how)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("arguments ['9'] __main__\n") == 2
    assert f"PyTorch profile of 2 ranks; look at it with 'hvdkit trace summary {tmp_path / 'profile'}'." in done.stderr
    profile = tmp_path / "profile"
    assert sorted(path.name for path in profile.iterdir()) == files_of(2)
    for rank in range(2):
        names = names_in(profile / f"trace-{rank}-of-2.json.gz")
        steps = sorted({name for name in names if name.startswith("ProfilerStep#")})
        assert steps == ["ProfilerStep#4", "ProfilerStep#5"]
        assert sum(name == "aten::addmm" for name in names) == 2, "one forward pass in each step"
        assert sum(name == "hvdkit:allreduce_wait" for name in names) == 2
        assert "aten::addmm" in (profile / f"operators-{rank}-of-2.txt").read_text()


def test_a_ddp_script_needs_neither_horovod_nor_hvdkit(tmp_path):
    """Its loop ends within the steps to record, after its process group: what was recorded is written nevertheless."""
    done = launched(tmp_path, 2, DDP, "--torch-profile-steps", "1,1,5", "--stall-timeout", "60", steps="4")
    assert done.returncode == 0, done.stderr
    profile = tmp_path / "profile"
    assert sorted(path.name for path in profile.iterdir()) == files_of(2), "and none of the loader's workers"
    for rank in range(2):
        names = names_in(profile / f"trace-{rank}-of-2.json.gz")
        assert sum(name == "aten::addmm" for name in names) == 2
        assert "gloo:all_reduce" in names


def test_ranks_that_torchrun_starts_are_profiled(tmp_path):
    """``hvdkit launch`` starts torchrun, and that the ranks."""
    script = DDP.replace("OMPI_COMM_WORLD_RANK", "RANK").replace("OMPI_COMM_WORLD_SIZE", "WORLD_SIZE")
    script = script.replace('num_workers=1, multiprocessing_context="spawn"', "num_workers=0")  # seen above
    assert "num_workers=0" in script
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    done = launched(tmp_path, 1, script, "--torch-profile-steps", "0,1,2", command=torchrun, steps="5")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == files_of(2)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ("3", "no profile was written: the loop ended after 3 steps, and step 13 is the first to be recorded"),
        ("0", None),
    ],
)
def test_a_loop_that_ends_before_is_told(tmp_path, steps, said):
    done = launched(tmp_path, 1, HOROVOD, steps=steps, forked=True)
    assert done.returncode == 0
    assert "hvdkit launch: no rank wrote a profile: none took enough steps of a PyTorch optimizer" in done.stderr
    assert said is None or said in done.stderr
    assert list((tmp_path / "profile").iterdir()) == []
