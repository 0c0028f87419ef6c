"""The Horovod that hvdkit builds does not sleep out its cycle while a thread waits for a result."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hvdkit.prepare.install.record import read_record

MISSING = [name for name in ("torch", "tensorflow", "horovod") if importlib.util.find_spec(name) is None]
RECORD = None if MISSING else read_record()
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (`make test` installs all)"),
    pytest.mark.skipif(
        RECORD is None or "cycle-on-request" not in RECORD.adjustments,
        reason="Horovod was built without hvdkit, or with --plain",
    ),
]
HERE = Path(__file__).parent
CYCLE_MS = 5000
TORCH = """
import json, sys, threading, time
from lean_imports import lean_imports
with lean_imports():
    import torch
    import horovod.torch as hvd
hvd.init()
results = {}
def reduce(name, count):
    tensors = [torch.ones(2) * (i + hvd.rank()) for i in range(count)]
    results[name] = [hvd.allreduce(t, op=hvd.Sum, name=f"{name}{i}").tolist() for i, t in enumerate(tensors)]
start = time.monotonic()
reduce("main", 8)
threads = [threading.Thread(target=reduce, args=(name, 3)) for name in "ab"]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
handles = [hvd.allreduce_async(torch.full((3,), float(i)), op=hvd.Sum, name=f"h{i}") for i in range(20)]
results["handles"] = [hvd.synchronize(handle).tolist() for handle in reversed(handles)]
if hvd.rank() == 0:
    time.sleep(1)
results["late"] = [hvd.allreduce(torch.ones(1), op=hvd.Sum, name="late").item()]
seconds = time.monotonic() - start
open(f"{sys.argv[1]}/{hvd.rank()}.json", "w").write(json.dumps([seconds, results]))
"""
TENSORFLOW = """
import json, sys, time
from lean_imports import lean_imports
with lean_imports():
    import tensorflow as tf
    import horovod.tensorflow as hvd
hvd.init()
@tf.function
def reduce(x):
    return hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum)
start = time.monotonic()
results = [[y.numpy().tolist() for y in reduce(tf.ones(2) * float(i))] for i in range(6)]
seconds = time.monotonic() - start
open(f"{sys.argv[1]}/{hvd.rank()}.json", "w").write(json.dumps([seconds, results]))
"""


def results_of(ranks_command, tmp_path, controller, script):
    start, environment = ranks_command(2, controller)
    environment.update(HOROVOD_CYCLE_TIME=str(CYCLE_MS), PYTHONPATH=str(HERE))
    command = [*start, sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_a_waiting_thread_starts_the_cycle(ranks_command, tmp_path, controller):
    """Sleeping out cycles of 5 s, these 16 collectives that wait for one another would take more than 60 s."""
    for seconds, results in results_of(ranks_command, tmp_path, controller, TORCH):
        assert results["main"] == [[2 * i + 1.0] * 2 for i in range(8)]
        assert results["a"] == results["b"] == [[2 * i + 1.0] * 2 for i in range(3)]
        assert results["handles"] == [[2.0 * i] * 3 for i in reversed(range(20))]
        assert results["late"] == [2.0]
        assert seconds < 40


def test_a_group_starts_the_cycle(ranks_command, tmp_path):
    """TensorFlow has no thread that waits; sleeping out cycles of 5 s, six groups would take more than 25 s."""
    for seconds, results in results_of(ranks_command, tmp_path, "mpi", TENSORFLOW):
        assert results == [[[2.0 * i] * 2, [4.0 * i] * 2] for i in range(6)]
        assert seconds < 20
