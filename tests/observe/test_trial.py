"""A trial: what a script's loaders and optimizers did, and the same batches for another script."""

import json
import random

import numpy as np
import pytest

from hvdkit.errors import DataError
from hvdkit.observe import trial
from hvdkit.observe.trial import Trial, TrialRecording, WantedTrial


def batch(start, rows=2):
    x = np.arange(start, start + 3 * rows, dtype=np.float32).reshape(rows, 3)
    return {"x": x, "y": [np.arange(rows), ("names", None)]}


def drawn(values):
    return iter(values).__next__


def recorded(directory, values, steps=2, rank=0):
    """A script that takes a step with each batch, and asks once more."""
    seen, weights = Trial(WantedTrial(str(directory), steps), rank), np.zeros(4)
    draw = drawn(values)
    with pytest.raises((SystemExit, StopIteration)):
        while True:
            given = seen.batch(draw)
            seen.begin("sgd", [weights], [weights + 1])
            weights = weights - given["x"].sum()
            seen.end("sgd", [weights], 0.1)
    seen.write()
    return trial.read(directory, rank)


def same(one, other):
    assert one.keys() == other.keys() and one["y"][1] == other["y"][1]
    np.testing.assert_array_equal(one["x"], other["x"])
    np.testing.assert_array_equal(one["y"][0], other["y"][0])


def test_a_script_ends_after_its_steps_and_leaves_what_it_did(tmp_path):
    made = recorded(tmp_path, [batch(0), batch(1), batch(2)])
    assert [list(event) for event in made.events] == [["batch"], ["batch"]]
    assert [step["rate"] for step in made.steps] == [0.1, 0.1] and all(step["finite"] for step in made.steps)
    assert made.steps[0]["digest"] == made.steps[1]["start"] != made.steps[0]["start"]
    np.testing.assert_array_equal(made.arrays["s0"], np.zeros(4))
    np.testing.assert_array_equal(made.arrays["w0"], np.full(4, -15.0))
    np.testing.assert_array_equal(made.arrays["g1"], made.arrays["w0"] + 1)


def test_another_script_is_given_its_batches_and_their_end(tmp_path):
    recorded(tmp_path / "first", [batch(0), batch(1)], steps=3)
    for own, alike in (([batch(0), batch(1)], True), ([batch(5), batch(6), batch(7)], False)):
        given = Trial(WantedTrial(str(tmp_path / "second"), 9, str(tmp_path / "first")), 0)
        draw = drawn(own)
        for value in (batch(0), batch(1)):
            same(given.batch(draw), value)
        with pytest.raises(StopIteration):
            given.batch(draw)
        assert given.made.same is alike
        with pytest.raises(SystemExit):  # the recording is over
            given.batch(draw)


def test_one_process_is_given_the_batches_of_all_ranks_together(tmp_path):
    ranks = [recorded(tmp_path, [batch(10 * rank, 1 + rank), batch(50)], rank=rank) for rank in (0, 1)]
    made, why = trial.union(ranks)
    assert why == ""
    made.write(tmp_path / "union", 0)
    given = Trial(WantedTrial(str(tmp_path / "out"), 9, str(tmp_path / "union")), 0)
    both = given.batch(drawn([batch(0)]))
    np.testing.assert_array_equal(both["x"], np.concatenate([batch(0, 1)["x"], batch(10)["x"]]))
    np.testing.assert_array_equal(both["y"][0], [0, 0, 1])
    same(given.batch(drawn([batch(0)])), batch(50))  # all ranks had it: an evaluation
    assert given.rate() == 0.1 and not trial.on_same_batches(ranks)
    alike = [recorded(tmp_path / "alike", [batch(1), batch(2)], rank=rank) for rank in (0, 1)]
    assert trial.on_same_batches(alike)
    constant = [recorded(tmp_path / "ones", [{"x": np.ones(3)}] * 2, rank=rank) for rank in (0, 1)]
    assert not trial.on_same_batches(constant)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"x": np.zeros((2, 4))}, "shapes (2, 3), (2, 4)"),
        ({"x": np.zeros((2, 3)), "z": 1}, "different forms"),
        ({"x": object()}, "not asked alike"),
    ],
)
def test_batches_that_cannot_be_put_together_are_told(tmp_path, value, why):
    ranks = []
    for rank, one in enumerate(({"x": np.ones((2, 3))}, value)):
        seen = Trial(WantedTrial(str(tmp_path), 5), rank)
        seen.batch(drawn([one]))
        ranks.append(seen.made)
    _, told = trial.union(ranks)
    assert why in told


def test_numbers_drawn_in_a_step_are_seen(tmp_path):
    for draws, seen in ((lambda: None, False), (random.random, True), (lambda: np.random.rand(700), True)):
        one = Trial(WantedTrial(str(tmp_path), 5), 0)
        one.batch(drawn([batch(0)]))
        draws()
        one.begin("sgd", [np.zeros(1)], [np.ones(1)])
        one.end("sgd", [np.zeros(1)], 0.1)
        assert one.made.steps[0]["drew"] is seen


def test_a_large_model_is_recorded_in_part_and_digested_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "_MOST_NUMBERS", 10)
    digests = []
    for last in (0, 1):
        seen, weights = Trial(WantedTrial(str(tmp_path), 5), 0), np.zeros(100)
        weights[-1] = last
        seen.begin("sgd", [weights], [weights + 1])
        seen.end("sgd", [weights], 1.0)
        assert seen.made.arrays["w0"].size == 10
        digests.append(seen.made.steps[0]["digest"])
    assert digests[0] != digests[1]


def test_what_is_no_recording_is_one_sentence(tmp_path):
    with pytest.raises(DataError, match="rank 1 left no recording"):
        trial.read(tmp_path, 1)
    TrialRecording().write(tmp_path, 1)
    (tmp_path / "rank-1.json").write_text(json.dumps({"other": 1}))
    with pytest.raises(DataError, match="rank 1 left no recording"):
        trial.read(tmp_path, 1)


def test_a_step_that_only_makes_slots_is_none(tmp_path):
    seen, zero = Trial(WantedTrial(str(tmp_path), 5), 0), np.zeros(2)
    for gradient, weights, count in ((zero, zero, 0), (zero + 1, zero, 1), (zero, zero + 1, 2)):
        seen.begin("sgd", [zero], [gradient])
        seen.end("sgd", [weights], 0.1)
        assert len(seen.made.steps) == count


def test_ranks_begin_with_different_seeds(tmp_path):
    """What a broadcast makes equal is not equal before it; one process begins as the root does."""
    assert Trial(WantedTrial("", 5), 0).seed != Trial(WantedTrial("", 5), 1).seed
