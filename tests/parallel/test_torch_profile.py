"""PyTorch's profiler on every rank, in a script and around one as it is."""

import gzip
import importlib.util
import json
import subprocess
import sys

import pytest

MISSING = [name for name in ("torch", "horovod") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (`make test` installs all)"),
]
SCRIPT = """
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


def profiled(ranks_command, tmp_path, n, *words):
    script = tmp_path / "train it.py"
    script.write_text(SCRIPT)
    start, environment = ranks_command(n, "mpi")
    command = [
        *start,
        sys.executable,
        "-m",
        "hvdkit.torch.profiler",
        "--directory",
        str(tmp_path / "profile"),
        *words[:-1],
    ]
    return subprocess.run(
        [*command, str(script), words[-1]], env=environment, capture_output=True, text=True, timeout=240
    )


def test_every_rank_leaves_the_steps_that_were_asked_for(ranks_command, tmp_path):
    done = profiled(ranks_command, tmp_path, 2, "--wait", "3", "--warmup", "1", "--active", "2", "9")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("arguments ['9'] __main__\n") == 2
    found = sorted(path.name for path in (tmp_path / "profile").iterdir())
    ranks = [f"{rank}-of-2" for rank in range(2)]
    assert found == sorted([f"trace-{rank}.json.gz" for rank in ranks] + [f"operators-{rank}.txt" for rank in ranks])
    for rank in ranks:
        with gzip.open(tmp_path / "profile" / f"trace-{rank}.json.gz") as file:
            names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
        assert sorted({name for name in names if name.startswith("ProfilerStep#")}) == [
            "ProfilerStep#4",
            "ProfilerStep#5",
        ]
        assert sum(name == "aten::addmm" for name in names) == 2, "one forward pass in each step"
        assert "aten::addmm" in (tmp_path / "profile" / f"operators-{rank}.txt").read_text()


def test_a_loop_that_ends_before_is_told(ranks_command, tmp_path):
    done = profiled(ranks_command, tmp_path, 1, "--wait", "3", "--warmup", "1", "3")
    assert done.returncode == 0
    assert "no profile was written: the loop ended after 3 steps, and step 5 is the first to be recorded" in done.stderr
    assert list((tmp_path / "profile").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--active", "0", "9"], 2, "active is a number of steps from 1 on, got 0"),
        (["--wait", "-1", "9"], 2, "wait is a number of steps from 0 on, got -1"),
        (["--wait", "soon", "9"], 2, "soon"),
    ],
)
def test_bad_counts_are_one_sentence(ranks_command, tmp_path, words, status, said):
    done = profiled(ranks_command, tmp_path, 1, *words)
    assert done.returncode == status
    assert said in done.stderr and "Traceback" not in done.stderr
