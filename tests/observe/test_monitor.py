"""observe/monitor.py in a job of one process; tests/parallel/test_monitor.py has several, in each framework."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from hvdkit.core import listeners
from hvdkit.core.communicator import Alone
from hvdkit.errors import InvalidArgumentError
from hvdkit.observe import history, monitor, step_files, trackers
from hvdkit.observe.history import read
from hvdkit.observe.monitor_thread import stalls_of
from hvdkit.steps.topology import Topology

WORLD = Topology(0, 1)


class Monitor(monitor.Monitor):
    _ranks = Alone()


class Tracker:
    def __init__(self):
        self.said = []

    def log(self, step, values):
        self.said.append((step, values))

    def report(self, text):
        self.said.append(text)

    def close(self):
        self.said.append("closed")


@pytest.fixture(autouse=True)
def no_step_was_restored(monkeypatch):
    monkeypatch.setattr(listeners, "restored_step", 0)


def train(monitor, steps, loss=1.0):
    for number, _ in enumerate(monitor([np.zeros((4, 2))] * steps)):
        monitor.log(loss=loss + number)


def test_the_history_of_a_loop(tmp_path):
    tracker = Tracker()
    with Monitor(tmp_path, WORLD, every=3, trackers=[tracker], epochs=2) as watching:
        train(watching, 4)
        train(watching, 4, loss=10.0)
    start, *windows, end = read(tmp_path / "metrics.jsonl")
    assert (start["kind"], start["step"], start["steps"], start["epochs"], start["world_size"]) == ("start", 0, 8, 2, 1)
    assert [(one["step"], one["epoch"], one["steps"]) for one in windows] == [(3, 0, 3), (6, 1, 3), (8, 1, 2)]
    assert [one["logs"]["loss"] for one in windows] == pytest.approx([2.0, (4 + 10 + 11) / 3, 12.5])
    assert (end["kind"], end["step"]) == ("end", 8)
    ranks = windows[0]["ranks"]
    assert set(ranks) == {"step", "input", "compute", "wait", "rss", "device"}
    assert ranks["step"][0] == pytest.approx(ranks["input"][0] + ranks["compute"][0]) and ranks["wait"] == [0]
    assert ranks["rss"][0] > 1e6 and ranks["device"] == [None]
    assert windows[0]["samples_per_s"] > 0
    assert [one[0] for one in tracker.said[:-1]] == [3, 6, 8] and tracker.said[-1] == "closed"
    assert tracker.said[0][1]["loss"] == 2.0 and "grad_norm" not in tracker.said[0][1]
    assert listeners.MONITORS == []


@pytest.mark.parametrize("also_recorded", [False, True])
def test_a_loop_that_is_watched_is_recorded_for_bench(tmp_path, monkeypatch, also_recorded):
    monkeypatch.setenv(listeners.STEP_TIMES, str(tmp_path))
    monkeypatch.setattr(listeners, "RECORDERS", [])
    with Monitor(None, WORLD, every=3) as watching:
        batches = [np.zeros((4, 2))] * 4
        for _ in range(2):
            for _ in watching(step_files.record_steps(batches) if also_recorded else batches):
                pass
    _, *steps = (tmp_path / "rank-0.jsonl").read_text().splitlines()
    times = [json.loads(line) for line in steps if line.startswith("[")]
    assert len(times) == 8 and all(asked <= given <= end for asked, given, _, end, *_ in times)


def test_times_of_the_history_have_all_digits(tmp_path, monkeypatch):
    monkeypatch.setattr(history.time, "time", lambda: 1795634613.456)
    with Monitor(tmp_path, WORLD, every=1) as watching:
        train(watching, 1)
    assert {line["time"] for line in read(tmp_path / "metrics.jsonl")} == {1795634613.456}, (
        "nine digits are tens of seconds"
    )


def test_a_window_says_in_how_many_steps_its_stalls_are(tmp_path):
    assert stalls_of([0.1] * 20) == (pytest.approx(0.1), 0)
    assert stalls_of([0.1] * 19 + [2.1]) == (pytest.approx(0.1), 1)
    assert stalls_of([0.1, 0.2] * 10)[1] == 0, "every second step is no stall"
    assert math.isnan(stalls_of([])[0])


def test_the_mean_is_weighted_by_samples(tmp_path):
    with Monitor(tmp_path, WORLD, every=2) as watching:
        for batch in watching([np.zeros((3, 1)), np.zeros((1, 1))]):
            watching.log(loss=float(len(batch)))
    assert read(tmp_path / "metrics.jsonl")[1]["logs"] == {"loss": 2.5}


class Odd:
    def shape(self):
        raise AssertionError("a batch of anything may come")


def test_a_batch_without_a_shape_counts_no_samples(tmp_path):
    with Monitor(tmp_path, WORLD) as watching:
        assert len(list(watching([Odd(), (), "text"]))) == 3
    assert read(tmp_path / "metrics.jsonl")[1]["samples_per_s"] is None


@pytest.mark.parametrize("arrives", [True, False])
def test_where_the_time_goes(tmp_path, arrives):
    def slow():
        for _ in range(2):
            time.sleep(0.1)
            yield {"x": np.zeros((5, 1))}

    with Monitor(tmp_path, WORLD, every=2) as watching:
        for _ in watching(slow()):
            time.sleep(0.05)
            watching.ready()
            time.sleep(0.2)
            if arrives:
                watching.arrived()
    ranks = read(tmp_path / "metrics.jsonl")[1]["ranks"]
    assert ranks["input"][0] >= 0.1 and ranks["compute"][0] >= 0.05 and ranks["wait"][0] >= 0.2
    assert ranks["compute"][0] < ranks["step"][0] - 0.29


def test_a_training_that_goes_on_writes_into_the_same_history(tmp_path):
    with Monitor(tmp_path, WORLD, every=2) as watching:
        train(watching, 6)
    listeners.restored(4)
    with Monitor(tmp_path, WORLD, every=2) as watching:
        train(watching, 4)
        listeners.saved(8)
    with Monitor(tmp_path, WORLD, every=2, step=8) as watching:
        train(watching, 1)
    lines = read(tmp_path / "metrics.jsonl")
    assert [one["step"] for one in lines if one["kind"] == "window"] == [2, 4, 6, 8, 9]
    assert [one["step"] for one in lines if one["kind"] == "start"] == [0, 4, 8]
    assert [one["step"] for one in lines if one["kind"] == "checkpoint"] == [8]


def test_a_monitor_follows_an_elastic_training(tmp_path):
    tracker = Tracker()
    with Monitor(tmp_path, WORLD, every=2, trackers=[tracker]) as watching:
        train(watching, 5)
        assert listeners.done() == 5
        listeners.go_to(3, epoch=0)  # the last commit
        listeners.follow(WORLD)
        train(watching, 3)
        listeners.go_to(6, epoch=1)
        listeners.follow(Topology(1, 2))  # another rank is the root now
        assert tracker.said[-1] == "closed"
        listeners.follow(WORLD)
        train(watching, 1)
    lines = read(tmp_path / "metrics.jsonl")
    assert [one["step"] for one in lines if one["kind"] == "start"] == [0, 3, 6]
    assert [(one["step"], one["epoch"]) for one in lines if one["kind"] == "window"] == [(2, 0), (5, 0), (7, 1)]
    assert (lines[-1]["kind"], lines[-1]["step"]) == ("end", 7)


def test_monitors_of_an_elastic_training_have_names_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    names = []
    for _ in range(2):  # a rank that joins makes its first ones while another one has made more
        with Monitor(tmp_path / "a", WORLD) as first, Monitor(tmp_path / "b", WORLD) as second:
            names += [first._name, second._name]
    assert len(set(names)) == 2 and names[:2] == names[2:]


def test_what_is_done_with_a_report(tmp_path, capfd):
    tracker = Tracker()
    with Monitor(tmp_path / "a", WORLD, every=5, trackers=[tracker]) as watching:
        train(watching, 10, loss=math.nan)
    assert "Rank 0: a logged value is not finite in step 1." in tracker.said
    assert "hvdkit monitor: Rank 0: a logged value" in capfd.readouterr().err
    (line,) = [one for one in read(tmp_path / "a" / "metrics.jsonl") if one["kind"] == "report"]
    assert (line["about"], line["rank"], line["cause"], line["since"], line["cost"]) == ("health", 0, "nonfinite", 1, 0)


def test_gradients_that_are_not_finite_are_named_when_it_lasts(tmp_path):
    class Named(Monitor):
        def _parameters(self):
            return {"dense": "dense.weight"}

    with Named(tmp_path, WORLD, every=5) as watching:
        for step, _ in enumerate(watching(range(20)), start=1):
            if step in (4, 5) or step > 12:  # two in a row: what a scaler of half precision leaves out
                listeners.looked("dense", math.inf)
            if listeners.wants_norm():
                listeners.tell_norm(2.0)
    lines = read(tmp_path / "metrics.jsonl")
    (report,) = [one for one in lines if one["kind"] == "report"]
    assert report["text"] == "Rank 0: the gradient of dense.weight is not finite in step 13."
    assert (report["since"], report["step"]) == (13, 15)
    assert [one["grad_norm"] for one in lines if one["kind"] == "window"] == [2.0] * 4


def test_parameters_are_named_in_the_thread_that_trains(tmp_path):
    """It alone may look at what it changes at any time: exchanges and their parameters."""
    threads = set()

    class Named(Monitor):
        def _parameters(self):
            threads.add(threading.current_thread())
            return {}

    with Named(tmp_path, WORLD, every=2) as watching:
        for _ in watching(range(4)):
            listeners.looked("dense", math.nan)
    assert threads == {threading.current_thread()}


def test_a_loop_that_is_left_goes_on_in_the_same_window(tmp_path):
    with Monitor(tmp_path, WORLD, every=3) as watching:
        for number in watching(range(9)):
            if number == 2:
                break
        train(watching, 2)
    windows = [one for one in read(tmp_path / "metrics.jsonl") if one["kind"] == "window"]
    assert [(one["step"], one["steps"]) for one in windows] == [(4, 4), (5, 1)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 0}, "every must be an integer >= 1"),
        ({"step": -1}, "step must be an integer >= 0"),
        ({"steps": 1e3}, "steps must be an integer >= 0"),
        ({"epochs": "3"}, "epochs must be an integer >= 0"),
        ({"trackers": "mlflow"}, "trackers must be a list"),
        (
            {"directory": None, "trackers": ["progress", "prometheus"]},
            "'prometheus' needs a directory, got None",
        ),
        ({"trackers": [3]}, "a tracker has log, report and close, got 3"),
    ],
)
def test_wrong_arguments(tmp_path, options, said):
    with pytest.raises(InvalidArgumentError, match=said):
        Monitor(**{"directory": tmp_path, "world": WORLD, **options})
    assert listeners.MONITORS == []


def test_what_cannot_be_logged(tmp_path):
    with Monitor(tmp_path, WORLD) as watching:
        with pytest.raises(InvalidArgumentError, match="log takes numbers, got loss='x'"):
            watching.log(loss="x")
        with pytest.raises(InvalidArgumentError, match="log takes 16 names at most, got 'n16'"):
            watching.log(**{f"n{number}": number for number in range(17)})


def test_a_tracker_that_fails_ends_no_training(tmp_path):
    class Failing(Tracker):
        def log(self, step, values):
            raise OSError("disk full")

    with (
        Monitor(tmp_path, WORLD, every=2, trackers=[Failing()]) as watching,
        pytest.warns(UserWarning, match="disk full"),
    ):
        train(watching, 2)
        watching.close()
    assert [one["kind"] for one in read(tmp_path / "metrics.jsonl")] == ["start", "window", "end"]


def test_progress_needs_no_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with Monitor(None, WORLD, every=2, trackers=["progress"], epochs=2) as watching:
        train(watching, 3)
        train(watching, 3)
    said = capsys.readouterr().out.splitlines()
    assert [line.partition("  ")[0] for line in said] == ["step 2/6", "step 4/6", "step 6/6"]
    assert "loss 1.5" in said[0] and "samples/s" in said[0] and " left" in said[0]
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(listeners.MONITOR, str(tmp_path / "asked"))  # by hvdkit launch --monitor
    with Monitor(None, WORLD) as watching:
        train(watching, 3)
    assert (tmp_path / "asked" / "metrics.jsonl").exists()


@pytest.mark.parametrize("steps", [0, 3])
def test_trackers_hear_that_a_training_has_failed(tmp_path, steps):
    class Knowing(Tracker):
        def fail(self):
            self.said.append("failed")

    plain, knowing, well = Tracker(), Knowing(), Knowing()
    with pytest.raises(ZeroDivisionError), Monitor(tmp_path / "a", WORLD, trackers=[plain, knowing]) as watching:
        train(watching, steps)
        raise ZeroDivisionError
    with Monitor(tmp_path / "b", WORLD, trackers=[well]) as watching:
        train(watching, steps)
    assert knowing.said[-2:] == ["failed", "closed"]
    assert plain.said[-1] == "closed" and "failed" not in well.said


def test_a_tracker_that_the_root_cannot_make_is_a_warning(tmp_path, monkeypatch):
    class Refusing:
        def __init__(self, directory):
            raise ConnectionError("the server of the trackers is away")

    other = Tracker()
    monkeypatch.setitem(trackers._KINDS, "prometheus", Refusing)
    with (
        pytest.warns(UserWarning, match="ConnectionError: the server of the trackers is away"),
        Monitor(tmp_path, WORLD, every=2, trackers=["prometheus", other]) as watching,
    ):
        train(watching, 2)
    assert [one["kind"] for one in read(tmp_path / "metrics.jsonl")] == ["start", "window", "end"]
    assert other.said[-1] == "closed"


def test_trackers_are_closed_where_no_step_was_taken(tmp_path):
    tracker = Tracker()
    (tmp_path / "metrics.prom").write_text("of the job before")
    with Monitor(tmp_path, WORLD, trackers=[tracker, "prometheus"]):
        pass
    assert tracker.said == ["closed"]
    assert (tmp_path / "metrics.prom").read_text() == "of the job before"
    assert not (tmp_path / "metrics.jsonl").exists()


PROGRAM = """
import sys, time
sys.path[:0] = [{here!r}]
from test_monitor import Monitor, WORLD
watching = Monitor({directory!r}, WORLD, every=5, step=int(sys.argv[1]))
for _ in watching(range(100000)):
    watching.log(loss=1.0)
    time.sleep(0.001)
"""


def test_a_job_that_is_killed_leaves_a_valid_history_which_goes_on(tmp_path):
    program = PROGRAM.format(here=str(Path(__file__).parent), directory=str(tmp_path))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    path, step = tmp_path / "metrics.jsonl", 0
    for _ in range(3):
        job = subprocess.Popen([sys.executable, "-c", program, str(step)], env=environment)
        deadline = time.monotonic() + 240
        while len(read(path)) < step // 5 + 8 and time.monotonic() < deadline:
            time.sleep(0.01)
        job.send_signal(signal.SIGKILL)
        job.wait()
        steps = [one["step"] for one in read(path) if one["kind"] == "window"]
        assert steps == list(range(5, steps[-1] + 1, 5)) and steps[-1] > step
        step = steps[-1] - 5
