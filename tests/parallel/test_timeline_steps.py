"""The timeline of some steps, recorded by real ranks and read back."""

import json
from collections import Counter

import pytest

from hvdkit.read.timeline import read
from hvdkit.read.trace.merging import merge

pytestmark = pytest.mark.parallel
PROGRAM = "programs_timeline_steps.py"
GRADIENTS = "allreduce.gradients.0.2.bias .. 0.weight"  # one bucket: the model is small


def gradient_counts(path):
    return Counter(operation.tensor for operation in read(path) if "gradients" in operation.tensor)


def test_only_the_chosen_steps_are_recorded_and_a_second_block_has_its_own_file(run_ranks, tmp_path):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    steps = {"first": 2, "stop": 6, "total": 9}
    ranks = run_ranks(PROGRAM, "torch_steps", 2, warm="torch", path=str(first), second=str(second), **steps)
    assert [rank["during"] for rank in ranks] == [[False] * 2 + [True] * 4 + [False] * 3] * 2
    assert gradient_counts(first) == {GRADIENTS: 4}
    assert gradient_counts(second) == {GRADIENTS: 3}
    json.loads(first.read_text())


def test_a_profiler_trace_lies_on_the_same_time_axis(run_ranks, tmp_path):
    """Every reduction of a step must lie inside the range that the profiler recorded around that step."""
    timeline, trace, merged = (tmp_path / name for name in ("timeline.json", "trace.json", "merged.json"))
    files = {"timeline": str(timeline), "trace": str(trace)}
    run_ranks(PROGRAM, "torch_profiled", 2, warm="torch", controller="gloo", steps=5, **files)
    overlap = merge(timeline, trace, merged)
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
    assert 0 < overlap.exposed <= overlap.communication
    assert overlap.overlapped + overlap.exposed == pytest.approx(overlap.communication)
    assert overlap.communication + overlap.computation - overlap.overlapped + overlap.neither == pytest.approx(
        overlap.window
    )
    assert "CPU operators" in overlap.computed_by


def test_keras_and_tensorflow_record_the_chosen_steps(run_ranks, tmp_path):
    """Keras' steps 6 to 9 lie in two epochs of eight."""
    keras, tensorflow = tmp_path / "keras.json", tmp_path / "tensorflow.json"
    files = {"keras_path": str(keras), "tensorflow_path": str(tensorflow)}
    run_ranks(PROGRAM, "keras_and_tensorflow_steps", 2, warm="keras", controller="gloo", **files)
    gradients = Counter(operation.tensor for operation in read(keras) if "hvdkit.gradients" in operation.tensor)
    assert gradients
    assert set(gradients.values()) == {4}
    assert Counter(operation.kind for operation in read(tensorflow)) == {"ALLREDUCE": 3}
