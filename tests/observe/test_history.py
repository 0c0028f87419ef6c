"""observe/history.py: what is on the disk is valid after a kill, and no step is read twice."""

import json
import subprocess
import sys
import warnings

import pytest

from hvdkit.observe.history import History, read

RANKS = {"step": [0.5, 1.5], "input": [0.1, None], "compute": [0.2, 0.2], "wait": [0, 0], "rss": [1, 2], "device": []}


def begin(directory, step, *steps, **logs):
    history = History(directory, "1.2")
    history.begin(step, {"world_size": 2, "steps": None, "epochs": 3})
    for one in steps:
        history.write("window", step=one, epoch=0, steps=10, samples_per_s=None, logs=logs, ranks=RANKS, grad_norm=1.0)
    return history


def steps_of(path):
    return [line["step"] for line in read(path) if line["kind"] == "window"]


def test_a_history_is_lines_of_json(tmp_path):
    begin(tmp_path / "new" / "run", 0, 10, 20, loss=float("nan")).close()
    path = tmp_path / "new" / "run" / "metrics.jsonl"
    first, *windows = [json.loads(line) for line in path.read_text().splitlines()]
    assert first.pop("time") > 0
    assert first == {
        "kind": "start", "schema": 2, "hvdkit": "1.2", "step": 0, "world_size": 2, "steps": None, "epochs": 3,
    }  # fmt: skip
    assert [line["step"] for line in windows] == [10, 20]
    assert windows[0]["logs"] == {"loss": None}


@pytest.mark.parametrize(
    "torn",
    [
        b'{"kind": "window", "step": 3',
        b'{"kind": "end", "step": 1e999}\n',
        b"\0\0\0\n",
        b'{"kind": "window", "step": 30}\n',
    ],
)
def test_what_a_kill_cut_off_goes(tmp_path, torn):
    begin(tmp_path, 0, 10, 20).close()
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    begin(tmp_path, 20, 30).close()
    assert path.read_bytes().startswith(whole)
    assert steps_of(path) == [10, 20, 30]


def test_a_damaged_line_takes_nothing_with_it_that_follows(tmp_path):
    begin(tmp_path, 0, 10, 20, 30).close()
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    odd = lines[1].replace(b'"step": 10', b'"step": "20"')
    path.write_bytes(b"".join([*lines[:2], b'{"kind": "wi\0\0\n', b"{}\n", odd, *lines[3:], b'{"kind": "en']))
    assert steps_of(path) == [10, 30]
    begin(tmp_path, 30, 40).close()
    assert steps_of(path) == [10, 30, 40]


def test_a_training_that_goes_back_has_no_step_twice_and_loses_nothing(tmp_path):
    history = begin(tmp_path, 0, 10, 20, 30)
    history.write("report", step=30, text="rank 1 is slow")
    history.write("checkpoint", step=20)
    history.close()
    path = tmp_path / "metrics.jsonl"
    before = path.read_bytes()
    begin(tmp_path, 20, 30, 40).close()
    assert steps_of(path) == [10, 20, 30, 40]
    kinds = [line["kind"] for line in read(path)]
    assert kinds == ["start", "window", "window", "report", "checkpoint", "start", "window", "window"]
    begin(tmp_path, 0, 10).close()
    assert steps_of(path) == [10] and path.read_bytes().startswith(before)


def test_a_history_that_begins_again_is_no_other_job(tmp_path):
    history = begin(tmp_path, 0, 10, 20)
    history.begin(10, {"world_size": 1})
    history.write("end", step=10)
    history.close()
    assert [line["kind"] for line in read(tmp_path / "metrics.jsonl")] == ["start", "window", "start", "end"]


def test_two_jobs_do_not_write_into_one_history(tmp_path):
    first = begin(tmp_path, 0, 10)
    code = f"""
from pathlib import Path
from hvdkit.observe.history import History
history = History(Path({str(tmp_path)!r}), "other")
history.begin(0, {{}})
history.write("end", step=5)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "another job writes there" in done.stderr
    first.write("end", step=10)
    first.close()
    assert [line["kind"] for line in read(tmp_path / "metrics.jsonl")] == ["start", "window", "end"]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_history_that_cannot_be_written_is_one_warning(tmp_path):
    (tmp_path / "file").write_text("")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        begin(tmp_path / "file" / "run", 0, 10, 20).close()
    assert [str(one.message) for one in caught if "the history of this run is not kept" in str(one.message)] != []
    assert len(caught) == 1
