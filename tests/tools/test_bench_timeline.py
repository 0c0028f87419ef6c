"""Where the steps of a job went that also recorded Horovod's timeline."""

import json

import pytest

from hvdkit.errors import DataError
from hvdkit.measure.bench import accounting
from hvdkit.steps.step_files import RankTimes, Step


def test_time_between_epochs_is_no_time_of_a_step(tmp_path):
    """Two epochs of five steps with ten seconds between them; the timeline shows the same."""
    begins = [index + (10.0 if index >= 5 else 0.0) for index in range(10)]
    steps = tuple(Step(at, at + 0.1, at + 0.7, at + 1.0) for at in begins)
    path = tmp_path / "t.json"
    events = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": 0}}]
    for at in begins:
        events += [
            {"ph": "B", "name": "ALLREDUCE", "ts": (at + 0.7) * 1e6, "pid": 1},
            {"ph": "B", "name": "MPI_ALLREDUCE", "ts": (at + 0.7) * 1e6, "pid": 1},
            {"ph": "E", "ts": (at + 0.9) * 1e6, "pid": 1},
            {"ph": "E", "ts": (at + 0.9) * 1e6, "pid": 1, "args": {"dtype": "float32", "shape": "[1]"}},
        ]
    path.write_text(json.dumps(events))
    found = accounting.account([RankTimes(0, steps)], path, 0)
    assert found.timeline_step_s == pytest.approx(1.0)
    assert found.off == pytest.approx(0.0, abs=1e-6)
    assert found.windows[-1].activities["transfer"] == pytest.approx(0.2)


def test_a_timeline_without_its_start_is_refused(tmp_path):
    path = tmp_path / "t.json"
    path.write_text('[{"ph": "B", "name": "ALLREDUCE", "ts": 1, "pid": 1}, {"ph": "E", "ts": 2, "pid": 1}]')
    with pytest.raises(DataError, match="does not say when it was started"):
        accounting.account([RankTimes(0, (Step(0.0, 0.1, 0.2, 0.3),))], path, 0)
