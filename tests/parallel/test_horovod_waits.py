"""The Horovod that hvdkit builds does not sleep out its cycle while a thread waits for a result."""

import importlib.util
import os
import threading
import time
from typing import Any

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
CYCLE_MS = 5000


def torch_waits() -> tuple[float, dict[str, Any]]:
    """Seconds and results of collectives that a thread waits for: this one, two others, out of order, a late rank."""
    os.environ["HOROVOD_CYCLE_TIME"] = str(CYCLE_MS)
    import horovod.torch as hvd
    import torch

    hvd.init()
    results: dict[str, Any] = {}

    def reduce(name: str, count: int) -> None:
        tensors = [torch.ones(2) * (i + hvd.rank()) for i in range(count)]
        results[name] = [hvd.allreduce(t, op=hvd.Sum, name=f"{name}{i}").tolist() for i, t in enumerate(tensors)]

    start = time.monotonic()
    reduce("main", 8)
    threads = [threading.Thread(target=reduce, args=(name, 3)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    handles = [hvd.allreduce_async(torch.full((3,), float(i)), op=hvd.Sum, name=f"h{i}") for i in range(20)]
    results["handles"] = [hvd.synchronize(handle).tolist() for handle in reversed(handles)]
    if hvd.rank() == 0:
        time.sleep(1)
    results["late"] = [hvd.allreduce(torch.ones(1), op=hvd.Sum, name="late").item()]
    return time.monotonic() - start, results


def tensorflow_waits() -> tuple[float, list[list[list[float]]]]:
    os.environ["HOROVOD_CYCLE_TIME"] = str(CYCLE_MS)
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()

    @tf.function
    def reduce(x: Any) -> Any:
        return hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum)

    start = time.monotonic()
    results = [[y.numpy().tolist() for y in reduce(tf.ones(2) * float(i))] for i in range(6)]
    return time.monotonic() - start, results


@pytest.mark.parametrize("mpi", [True, False], ids=["mpi", "gloo"])
def test_a_waiting_thread_starts_the_cycle(run_job, mpi):
    """Sleeping out cycles of 5 s, these 16 collectives that wait for one another would take more than 70 s."""
    for seconds, results in run_job("torch", torch_waits, mpi=mpi):
        assert results["main"] == [[2 * i + 1.0] * 2 for i in range(8)]
        assert results["a"] == results["b"] == [[2 * i + 1.0] * 2 for i in range(3)]
        assert results["handles"] == [[2.0 * i] * 3 for i in reversed(range(20))]
        assert results["late"] == [2.0]
        assert seconds < 40


def idle_cycles(path: str) -> None:
    """Do nothing for a second of 200 cycles, between two collectives."""
    os.environ.update(HOROVOD_CYCLE_TIME="5", HOROVOD_TIMELINE=path, HOROVOD_TIMELINE_MARK_CYCLES="1")
    import horovod.torch as hvd
    import torch

    hvd.init()
    for name in ("before", "after"):
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum, name=name).tolist() == [2.0, 2.0]
        time.sleep(1)
    hvd.shutdown()


@pytest.mark.parametrize("mpi", [True, False], ids=["mpi", "gloo"])
def test_ranks_without_a_tensor_leave_cycles_out(run_job, tmp_path, mpi):
    """A cycle of each 5 ms would be 200 in a second; a slow machine makes fewer, never more."""
    timeline = tmp_path / "timeline.json"
    run_job("torch", idle_cycles, path=str(timeline), mpi=mpi)
    after = timeline.read_text().rpartition('"before"')[2]
    assert 1 <= after.count("CYCLE_START") < 100


def test_a_group_starts_the_cycle(run_job):
    """TensorFlow has no thread that waits; sleeping out cycles of 5 s, six groups would take more than 25 s."""
    for seconds, results in run_job("tensorflow", tensorflow_waits, mpi=True):
        assert results == [[[2.0 * i] * 2, [4.0 * i] * 2] for i in range(6)]
        assert seconds < 18
