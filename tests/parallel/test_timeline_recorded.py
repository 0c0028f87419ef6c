"""Timelines recorded here, by real ranks: what the reader says of them equals what the ranks did."""

import json
from collections import Counter

import pytest

from hvdkit.read.timeline import CycleMark, read, summarize

pytestmark = pytest.mark.parallel

STEPS = 12
PROGRAM = "programs_timeline.py"


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
    ("function", "controller"),
    [("torch_steps", "mpi"), ("torch_steps", "gloo"), ("tensorflow_steps", "mpi"), ("keras_steps", "gloo")],
)
def test_steps_and_bytes_are_those_of_the_model(function, controller, run_ranks, tmp_path):
    path = tmp_path / "timeline.json"
    framework = function.partition("_")[0]
    ranks = run_ranks(PROGRAM, function, 2, warm=framework, controller=controller, file=str(path), steps=STEPS)
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
    assert 0 < summary.communication <= summary.busy <= summary.duration
    step_time = summary.steps.begins[-1] - summary.steps.begins[0]
    assert summary.steps.communication.total <= step_time <= ranks[0]["wall"] * 1e6
    prefix = {"mpi": "MPI_", "gloo": "GLOO_"}[controller]
    phases = Counter(phase.name for operation in read(path) for phase in operation.phases)
    assert phases[f"{prefix}ALLREDUCE"] >= STEPS * len(gradients)
    assert any(isinstance(item, CycleMark) for item in read(path).items())
    assert summary.cycle is not None


def test_a_job_whose_writer_was_killed(run_ranks, tmp_path):
    path = tmp_path / "timeline.json"
    run_ranks(PROGRAM, "torch_steps", 2, warm="torch", fails=True, file=str(path), steps=400, killed_after=200)
    summary = summarize(path)
    assert 1 < summary.steps.count <= 200
    assert summary.steps.bytes == (6 * 50 + 50 + 50 * 3 + 3 + 4 + 3) * 8
    assert set(summary.dropped) <= {"cut off at the end", "operation not finished at the end"}
    assert summary.communication <= summary.duration
