"""The timeline of some steps, recorded by real ranks and read back."""

import json
import os
from collections import Counter

import pytest

from hvdkit.read.timeline import read
from hvdkit.read.trace.merging import merge

pytestmark = pytest.mark.parallel
FEATURES, HIDDEN, CLASSES = 16, 32, 4
GRADIENTS = "allreduce.gradients.0.2.bias .. 0.weight"  # one bucket: the model is small


def torch_training():
    """The adapter, and a function that takes one step."""
    os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
    import torch

    import hvdkit.torch as hk

    hk.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, CLASSES))
    optimizer = hk.distribute(torch.optim.SGD(model.parameters(), lr=0.1), model)
    x, y = torch.randn(8, FEATURES), torch.randint(0, CLASSES, (8,))

    def step():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return hk, step


def torch_steps(path, first, stop, total, second):
    """Some steps to one file, and, after it, all steps of another block to a second one."""
    hk, step = torch_training()
    during = []
    with hk.record_timeline(path, steps=range(first, stop)) as recording:
        for _ in range(total):
            during.append(recording.recording)
            step()
            recording.step()
    with hk.record_timeline(second) as recording:
        for _ in range(3):
            step()
            recording.step()
    step()
    return during


def torch_profiled(timeline, trace, steps):
    """A timeline and a profiler trace of the same steps; each step is a range of the trace."""
    hk, step = torch_training()
    import horovod.torch as hvd
    import torch

    step()
    with hk.record_timeline(timeline), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        for number in range(steps):
            with torch.profiler.record_function(f"step {number}"):
                step()
    if hvd.rank() == 0:
        seen.export_chrome_trace(trace)


def keras_and_tensorflow_steps(keras_path, tensorflow_path):
    os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
    import horovod.tensorflow as hvd
    import keras
    import numpy as np
    import tensorflow as tf

    import hvdkit.keras as hk
    import hvdkit.tensorflow as hk_tensorflow

    world = hk.init()
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(CLASSES)])
    model.compile(hk.distribute(keras.optimizers.SGD(0.1)), "mse")
    hk.broadcast_state(model, model.optimizer)
    data = hk.shard((np.ones((64, FEATURES)), np.ones((64, CLASSES))), world, 4)
    model.fit(data, epochs=2, verbose=0, callbacks=[hk.RecordTimeline(keras_path, range(6, 10))])
    with hk_tensorflow.record_timeline(tensorflow_path, steps=range(2, 5)) as recording:
        for number in range(7):
            hvd.allreduce(tf.ones(10), name=f"step{number}")
            recording.step()


def gradient_counts(path):
    return Counter(operation.tensor for operation in read(path) if "gradients" in operation.tensor)


def test_only_the_chosen_steps_are_recorded_and_a_second_block_has_its_own_file(run_job, tmp_path):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    steps = {"first": 2, "stop": 6, "total": 9}
    ranks = run_job("torch", torch_steps, mpi=True, path=str(first), second=str(second), **steps)
    assert ranks == [[False] * 2 + [True] * 4 + [False] * 3] * 2
    assert gradient_counts(first) == {GRADIENTS: 4}
    assert gradient_counts(second) == {GRADIENTS: 3}
    json.loads(first.read_text())


def test_a_profiler_trace_lies_on_the_same_time_axis(run_job, tmp_path):
    """Every reduction of a step must lie inside the range that the profiler recorded around that step."""
    timeline, trace, merged = (tmp_path / name for name in ("timeline.json", "trace.json", "merged.json"))
    files = {"timeline": str(timeline), "trace": str(trace)}
    run_job("torch", torch_profiled, steps=5, **files)
    overlap = merge(timeline, trace, merged)
    times = overlap.found
    events = json.loads(merged.read_text())["traceEvents"]
    ranges = {
        event["name"]: (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith("step ")
    }
    (track,) = [one["tid"] for one in events if one["name"] == "thread_name" and one["args"]["name"] == GRADIENTS]
    reductions = [one for one in events if (one.get("cat"), one["name"], one["tid"]) == ("horovod", "ALLREDUCE", track)]
    placed = Counter(
        name
        for event in reductions
        for name, (start, end) in ranges.items()
        if start <= event["ts"] + 1 and event["ts"] + event["dur"] <= end + 1
    )
    assert placed == {f"step {number}": 1 for number in range(5)}
    assert len(events) > len(json.loads(trace.read_text())["traceEvents"]) + 5 * 3
    assert 0 < times.exposed <= times.communication
    assert times.overlapped + times.exposed == pytest.approx(times.communication)
    busy = times.communication + times.computation - times.overlapped
    assert busy + times.exposed_data + times.other == pytest.approx(times.window)
    assert "CPU operators" in overlap.computed_by


def test_keras_and_tensorflow_record_the_chosen_steps(run_job, tmp_path):
    """Keras' steps 6 to 9 lie in two epochs of eight."""
    keras, tensorflow = tmp_path / "keras.json", tmp_path / "tensorflow.json"
    files = {"keras_path": str(keras), "tensorflow_path": str(tensorflow)}
    run_job("keras", keras_and_tensorflow_steps, **files)
    gradients = Counter(operation.tensor for operation in read(keras) if "hvdkit.gradients" in operation.tensor)
    assert gradients
    assert set(gradients.values()) == {4}
    assert Counter(operation.kind for operation in read(tensorflow)) == {"ALLREDUCE": 3}
