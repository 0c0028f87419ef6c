"""``hvdkit launch --explain-job`` around scripts as they are: one rank's input sleeps in two of three batches."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest
from ranks import warm

from hvdkit.cli import run

MISSING = [name for name in ("torch", "tensorflow", "keras", "horovod") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (`make test` installs all)"),
]
SLEEP_S = 0.3
TORCH = """
import time
import torch
import hvdkit.torch as hk
world = hk.init()

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 2 * 32
    def __getitem__(self, index):
        self.count = getattr(self, "count", 0) + 1
        if world.rank == 1 and self.count % 3:
            time.sleep(SLEEP)
        return torch.ones(4)

model = torch.nn.Linear(4, 1)
optimizer = hk.distribute(torch.optim.SGD(model.parameters(), lr=0.01), model)
hk.broadcast_state(model, optimizer)
for x in hk.shard(Samples(), world, batch_size=1):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
"""
HOROVOD = TORCH.replace("import hvdkit.torch as hk", "import horovod.torch as hvd")
HOROVOD = HOROVOD.replace("world = hk.init()", "hvd.init()").replace("world.rank", "hvd.rank()")
HOROVOD = HOROVOD.replace("hk.distribute(torch.optim.SGD(model.parameters(), lr=0.01), model)",
    "hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())")  # fmt: skip
HOROVOD = HOROVOD.replace("2 * 32", "32")  # of which each rank takes all
HOROVOD = HOROVOD.replace("hk.broadcast_state(model, optimizer)", "hvd.broadcast_parameters(model.state_dict(), 0)")
HOROVOD = HOROVOD.replace("hk.shard(Samples(), world, batch_size=1)", "torch.utils.data.DataLoader(Samples())")
TENSORFLOW = """
import time
from lean_imports import lean_imports
with lean_imports():
    import tensorflow as tf
    import hvdkit.tensorflow as hk
world = hk.init()

def slept(x):
    if world.rank == 1 and int(x) % 3:
        time.sleep(SLEEP)
    return x

data = tf.data.Dataset.range(32).map(lambda x: tf.cast(tf.py_function(slept, [x], tf.int64), tf.float32))
variable = tf.Variable(1.0)

@tf.function
def step(x):
    with hk.distribute(tf.GradientTape()) as tape:
        loss = x * variable
    variable.assign_sub(0.01 * tape.gradient(loss, [variable])[0])

for x in data:
    step(x)
"""
KERAS = """
import time
from lean_imports import lean_imports
with lean_imports():
    import keras
    import numpy as np
    import tensorflow as tf
    import hvdkit.keras as hk
world = hk.init()

def slept(x):
    if world.rank == 1 and int(x) % 3:
        time.sleep(SLEEP)
    return np.float32(x)

def pair(x):
    x = tf.reshape(tf.py_function(slept, [x], tf.float32), (1, 1))
    return x, x

data = tf.data.Dataset.range(32).map(pair)
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile(hk.distribute(keras.optimizers.SGD(1e-4)), "mse")
model.fit(data, epochs=1, verbose=0, callbacks=[hk.BroadcastState()])
"""


def explained(tmp_path, script, framework):
    """What such a job says of itself, line by line, and the directory of its recordings.

    With a framework its ranks are forks of a process that has imported it. Plain Horovod's are not: what is replaced
    in it has to be so when it is imported.
    """
    (tmp_path / "train.py").write_text(script.replace("SLEEP", str(SLEEP_S)))
    ours = ("HOROVOD_", "OMPI_", "PMIX_", "PMI_", "SLURM_", "HVDKIT_")
    outer = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment = {**outer, "PYTHONPATH": os.path.dirname(__file__)}  # noqa: PTH120  # a word of the environment
    command = warm(framework).stub("rank_script", "train.py") if framework else ["train.py"]
    done = subprocess.run(
        [sys.executable, "-m", "hvdkit.cli", "launch", "-n", "2", "--explain-job", "--", *command],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (directory,) = tmp_path.glob("hvdkit-job-*")
    lines = done.stderr.splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith("hvdkit launch: what this job's time went to"))
    return lines[begin + 1 :], directory


@pytest.mark.parametrize(
    ("framework", "script"),
    [("torch", TORCH), ("", HOROVOD), ("tensorflow", TENSORFLOW), ("keras", KERAS)],
    ids=["torch", "horovod.torch", "tensorflow", "keras"],
)
def test_the_first_line_names_rank_cause_and_milliseconds(tmp_path, capsys, framework, script):
    lines, directory = explained(tmp_path, script, framework)
    first = re.fullmatch(r"Rank 1 waits for its input\. It costs ([\d.]+) ms per step \((\d+)%\)\.", lines[0])
    assert first, lines
    assert float(first[1]) > 0, "how much is benchmarks/explain.py's: a busy machine hides a part of any wait"
    assert len(lines) <= 10
    assert run(["explain", str(directory)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == lines[0], "the directory alone says the same"
    assert (directory / "timeline.json").stat().st_size > 1000, "of the steps after the first 20"
    assert any("timeline (" in line for line in lines)
    launched = json.loads((directory / "launch.json").read_text())
    assert launched["ranks"] == 2 and launched["cores"] >= 1


def test_a_script_that_takes_no_steps_is_told_so(tmp_path):
    (tmp_path / "train.py").write_text("print('x')")
    done = subprocess.run(
        [sys.executable, "-m", "hvdkit.cli", "launch", "-n", "1", "--explain-job", "--", "train.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0 and "no rank recorded its steps" in done.stderr
    again = [sys.executable, "-m", "hvdkit.cli", "launch", "-n", "1", "--explain-dir", "d", "--", "train.py"]
    refused = subprocess.run(again, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert refused.returncode == 2 and "--explain-dir needs --explain-job" in refused.stderr
