"""Timelines recorded here, by real ranks: what the reader says of them equals what the ranks did."""

import json
import os
import signal
import time
from collections import Counter

import numpy as np
import pytest

from hvdkit.core.layout import ControlWord
from hvdkit.measure.emulate.plan import of_timeline
from hvdkit.read.timeline import CycleMark, read, summarize

pytestmark = pytest.mark.parallel

STEPS = 12
FEATURES, BATCH = 6, 4


def record(file):
    """Has to come before init, which starts the recording."""
    os.environ.update(HOROVOD_TIMELINE=file, HOROVOD_TIMELINE_MARK_CYCLES="1")


def torch_steps(file, steps, killed_after=None, compression="none"):
    record(file)
    import torch

    import hvdkit.torch as hk

    world = hk.init()
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 50), torch.nn.Tanh(), torch.nn.Linear(50, 3)).double()
    optimizer = hk.distribute(torch.optim.SGD(model.parameters(), lr=0.01), model, compression=compression)
    hk.broadcast_state(model, optimizer)
    start = time.perf_counter()
    for step in range(steps):
        if step == killed_after and world.is_root:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.ones(BATCH, FEATURES, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    # One bucket: its gradients, and the control word behind them.
    sizes = [parameter.numel() for parameter in model.parameters()]
    return ended(start, [8 * (sum(sizes) + len(ControlWord(len(sizes))))])


def tensorflow_steps(file, steps):
    record(file)
    import tensorflow as tf

    import hvdkit.tensorflow as hk

    hk.init()
    kernel, bias = tf.Variable(tf.ones((FEATURES, 50))), tf.Variable(tf.zeros(50))
    start = time.perf_counter()

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.ones((BATCH, FEATURES)) @ kernel + bias))
        tape = hk.distribute(tape)
        for variable, gradient in zip([kernel, bias], tape.gradient(loss, [kernel, bias]), strict=True):
            variable.assign_sub(0.01 * gradient)

    for _ in range(steps):
        step()
    return ended(start, [FEATURES * 50 * 4, 50 * 4])


def keras_steps(file, steps):
    record(file)
    import keras

    import hvdkit.keras as hk

    hk.init()
    keras.utils.set_random_seed(1)
    layers = [keras.Input((FEATURES,)), keras.layers.Dense(50, activation="tanh"), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    model.compile(hk.distribute(keras.optimizers.SGD(0.01)), "mse")
    start = time.perf_counter()
    x, y = np.ones((BATCH * steps, FEATURES), "float32"), np.ones((BATCH * steps, 3), "float32")
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return ended(start, [int(np.prod(weight.shape)) * 4 for weight in model.trainable_weights])


def ended(start, sizes):
    wall = time.perf_counter() - start
    time.sleep(0.3)  # the writer of the timeline is a thread of its own
    return {"gradients": sorted(sizes), "wall": wall}


def reduced(path):
    """Bytes of each reduced tensor, from the raw text of the file: its last shape."""
    sizes = {"float32": 4, "float64": 8}
    names, found = {}, {}
    for event in json.loads(path.read_text()):
        if event.get("name") == "process_name" and "name" in event["args"]:
            names[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "E" and "args" in event:
            shape = json.loads(event["args"]["shape"])
            count = 1
            for length in shape:
                count *= length
            found[names[event["pid"]]] = count * sizes.get(event["args"]["dtype"], 0)
    return found


@pytest.mark.parametrize(
    ("framework", "controller"), [("torch", "mpi"), ("torch", "gloo"), ("tensorflow", "mpi"), ("keras", "gloo")]
)
def test_steps_and_bytes_are_those_of_the_model(framework, controller, run_job, tmp_path):
    path = tmp_path / "timeline.json"
    function = globals()[f"{framework}_steps"]
    ranks = run_job(framework, function, mpi=controller == "mpi", file=str(path), steps=STEPS)
    summary = summarize(path)
    gradients = ranks[0]["gradients"]
    assert summary.steps.count == STEPS
    assert summary.steps.bytes == sum(gradients)
    assert summary.ranks == 2
    assert not summary.dropped
    in_steps = [one for one in summary.tensors if one.kind == "ALLREDUCE" and one.count == STEPS]
    assert sorted(one.bytes for one in in_steps) == gradients
    sizes = reduced(path)
    assert all(sizes[one.tensor] == one.bytes for one in in_steps)
    assert 0 < summary.communication <= summary.duration
    step_time = summary.steps.begins[-1] - summary.steps.begins[0]
    assert summary.steps.communication.total <= step_time <= ranks[0]["wall"] * 1e6
    prefix = {"mpi": "MPI_", "gloo": "GLOO_"}[controller]
    phases = Counter(phase.name for operation in read(path) for phase in operation.phases)
    assert phases[f"{prefix}ALLREDUCE"] >= STEPS * len(gradients)
    assert any(isinstance(item, CycleMark) for item in read(path).items())
    assert summary.cycle is not None


def test_packed_gradients_of_a_job_are_told_as_such(run_job, tmp_path):
    path = tmp_path / "timeline.json"
    run_job("torch", torch_steps, mpi=False, file=str(path), steps=STEPS, compression="int8")
    summary = summarize(path)
    packed = {one.kind: one for one in summary.tensors if one.role == "packed gradients"}
    assert {kind: one.count for kind, one in packed.items()} == {"ALLTOALL": STEPS, "ALLGATHER": STEPS}
    row = 256 + 4  # of each rank: 503 numbers fill two parts of 256
    assert packed["ALLGATHER"].bytes == 2 * row
    word = len(ControlWord(4)) * 4
    assert (summary.steps.count, summary.steps.bytes) == (STEPS, 2 * row + word)
    (gradients,) = [one for one in of_timeline(path)[0] if one.elements > 100]
    assert (gradients.elements, gradients.dtype) == (512, "float32"), "the plan of an emulation has them unpacked"


def test_a_job_whose_writer_was_killed(run_ranks, tmp_path):
    path = tmp_path / "timeline.json"
    run_ranks(torch_steps, 2, warm="torch", fails=True, file=str(path), steps=400, killed_after=200)
    summary = summarize(path)
    assert 1 < summary.steps.count <= 200
    assert summary.steps.bytes == (6 * 50 + 50 + 50 * 3 + 3 + len(ControlWord(4))) * 8
    assert set(summary.dropped) <= {"cut off at the end", "operation not finished at the end"}
    assert summary.communication <= summary.duration
