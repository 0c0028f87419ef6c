"""Elastic trainings: one of two workers is killed, the other goes on, a replacement joins."""

import importlib.util
import itertools
import json
import os
import random
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from ranks import warm

from hvdkit.observe.history import read
from hvdkit.steps.checkpoint import CheckpointDirectory

MISSING = [name for name in ("torch", "horovod") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (`make test` installs all)"),
]

HERE = Path(__file__).parent
SAMPLES, EPOCHS, COMMIT_EVERY = 210, 4, 3


@pytest.fixture
def elastic(ranks_command, tmp_path):
    """Run a program of two workers on two "hosts" (names of this one), since a failed host is left out for a while.

    Each worker is a fork of a process that has imported the framework.
    """
    hosts = tmp_path / "hosts.sh"
    hosts.write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.1:1\n")
    hosts.chmod(0o755)

    def run(framework, *words):
        program = str(HERE / f"programs_elastic_{framework}.py")
        horovodrun, variables = ranks_command(2, "gloo")
        options = ["--min-np", "1", "--max-np", "2", "--host-discovery-script", str(hosts)]
        options += ["--blacklist-cooldown-range", "2", "5"]
        worker = warm(framework).stub("rank_script", program, str(tmp_path), *map(str, words))
        command = [*horovodrun, *options, *worker]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240, cwd=tmp_path)
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
        events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
        return events, [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]

    return run


@pytest.mark.parametrize("framework", ["torch", "tensorflow", "keras"])
def test_a_killed_worker_is_replaced_and_no_sample_is_lost_or_repeated(elastic, monkeypatch, tmp_path, framework):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"needs {framework}")
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    draw = random.Random(None if "HVDKIT_FUZZ" in os.environ else framework)  # noqa: S311
    killed_at = draw.randrange(4, 20)
    print(f"killed after step {killed_at}")
    events, ranks = elastic(framework, killed_at)
    (killed,) = [when for event, when, *_ in events if event == "killed"]
    (alone,) = [event for event in events if event[0] == "enter" and event[2] == 1]
    assert alone[1] - killed < 100, "the other one waited out a time limit"
    assert killed_at - COMMIT_EVERY <= alone[3] <= killed_at
    assert [event[2] for event in events if event[0] == "enter"] == [2, 2, 1, 2, 2]
    for rank in ranks:
        counts = Counter((epoch, index) for epoch, indices in rank["seen"] for index in indices)
        assert set(counts) == {(epoch, index) for epoch in range(EPOCHS) for index in range(SAMPLES)}
        assert set(counts.values()) == {1}
        assert rank["weights"] == ranks[0]["weights"] and rank["step"] == len(rank["sizes"])
        assert [size for size, after in zip(rank["sizes"], [*rank["sizes"][1:], 0], strict=True) if size != after] == [
            2,
            1,
            2,
        ]
        assert rank["rate"] == pytest.approx(0.02)
    seen = read(tmp_path / "seen" / "metrics.jsonl")
    assert [one["world_size"] for one in seen if one["kind"] == "start"] == [2, 1, 2]
    windows = [one for one in seen if one["kind"] == "window"]
    assert [before["step"] + one["steps"] for before, one in itertools.pairwise(windows)][-5:] == [
        one["step"] for one in windows
    ][-5:]
    assert len({one["step"] for one in windows}) == len(windows) > 10
    assert (seen[-1]["kind"], seen[-1]["step"]) == ("end", ranks[0]["step"])
    assert {len(window["ranks"]["step"]) for window in windows} <= {1, 2}
    assert len(windows[-1]["ranks"]["step"]) == 2  # of the first one the killed rank may not have told its part
    if framework == "torch":  # here the root was killed, and another one writes
        last = CheckpointDirectory(tmp_path / "run").latest()
        assert last.step == ranks[0]["step"] // COMMIT_EVERY * COMMIT_EVERY and last.metadata["size_then"] == 2


@pytest.mark.parametrize("every", [1, 5])
def test_outer_steps_go_on_when_a_worker_is_killed_and_replaced(elastic, every):
    """In the middle of a window of outer steps; the ranks end with the same weights, and every sample is seen once."""
    events, ranks = elastic("torch", 13, every)
    assert [event[2] for event in events if event[0] == "enter"] == [2, 2, 1, 2, 2]
    for rank in ranks:
        counts = Counter((epoch, index) for epoch, indices in rank["seen"] for index in indices)
        assert set(counts) == {(epoch, index) for epoch in range(EPOCHS) for index in range(SAMPLES)}
        assert set(counts.values()) == {1}
        assert rank["weights"] == ranks[0]["weights"]
        assert {1, 2} == set(rank["sizes"])
