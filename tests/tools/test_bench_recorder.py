"""The recorder of steps: nothing without the variable, every step with it, never an error for the training."""

import json

import pytest

from hvdkit.errors import DataError
from hvdkit.steps import step_times
from hvdkit.steps.step_times import VARIABLE


class Clock:
    """A clock that goes on when it is told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(step_times.time, "perf_counter", clock)
    monkeypatch.setattr(step_times.time, "time", lambda: clock.now + 1_000_000)
    return clock


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(step_times, "_recorder", None)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setenv("HOROVOD_RANK", "1")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    return tmp_path


def slow(clock, count, seconds):
    for number in range(count):
        clock.sleep(seconds)
        yield number


def test_without_the_variable_the_batches_are_given_back_themselves(monkeypatch):
    monkeypatch.setattr(step_times, "_recorder", None)
    monkeypatch.delenv(VARIABLE, raising=False)
    batches = [1, 2]
    assert step_times.record_steps(batches) is batches
    step_times.ready()


def test_every_step_is_written_with_its_input_apart(clock, directory):
    for _ in step_times.record_steps(slow(clock, 3, 0.25)):
        clock.sleep(0.5)
        step_times.ready()
        clock.sleep(0.125)
        step_times.ready()
    (times,) = step_times.read(directory)
    assert times.rank == 1
    assert len(times.steps) == 3
    for step in times.steps:
        assert step.given - step.asked == pytest.approx(0.25)
        assert step.ready - step.given == pytest.approx(0.5)
        assert step.ended - step.given == pytest.approx(0.625)
    assert times.steps[0].asked == pytest.approx(1_000_100)


def test_epochs_are_written_one_after_the_other_and_what_is_between_them_is_no_step(clock, directory):
    for _ in range(2):
        for _ in step_times.record_steps([1, 2]):
            clock.sleep(1.0)
        clock.sleep(30.0)
    (times,) = step_times.read(directory)
    assert [step.ended - step.asked for step in times.steps] == pytest.approx([1.0] * 4)


def test_a_step_that_ends_with_break_counts(clock, directory):
    for number in step_times.record_steps(slow(clock, 9, 0.0)):
        clock.sleep(1.0)
        if number == 2:
            break
    (times,) = step_times.read(directory)
    assert [step.ended - step.given for step in times.steps] == pytest.approx([1.0] * 3)


def test_the_recorded_batches_are_like_the_batches(directory):
    class Loader(list):
        epoch = 7

    steps = step_times.record_steps(Loader([1, 2]))
    assert len(steps) == 2 and steps.epoch == 7 and list(steps) == [1, 2]
    with pytest.raises(TypeError, match="generator has no length"):
        len(step_times.record_steps(number for number in [1]))


def test_what_cannot_be_written_is_a_warning(directory, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(directory / "missing"))
    with pytest.warns(UserWarning, match="the times of the steps are lost"):
        assert list(step_times.record_steps([1, 2])) == [1, 2]


@pytest.mark.parametrize(
    "lines",
    [
        ["[1, 2, 3, 4]"],
        ['{"hvdkit": "tune", "version": 1, "rank": 0}'],
        ['{"hvdkit": "step times", "version": 1, "rank": 0}', "[1, 2"],
        ['{"hvdkit": "step times", "version": 1, "rank": 0}', "[1, 2, null]"],
        ['{"hvdkit": "step times", "version": 1, "rank": 0}', '["1", 2, null, 3]'],
        ['{"hvdkit": "step times", "version": 1, "rank": 0}', "[NaN, 2, null, 3]"],
    ],
    ids=str,
)
def test_a_file_that_is_something_else_is_refused(tmp_path, lines):
    (tmp_path / "rank-0.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"rank-0\.jsonl"):
        step_times.read(tmp_path)


def test_an_empty_file_is_refused_and_an_empty_directory_is_nothing(tmp_path):
    assert step_times.read(tmp_path) == []
    (tmp_path / "rank-0.jsonl").touch()
    with pytest.raises(DataError):
        step_times.read(tmp_path)


def test_the_file_is_json_lines(clock, directory):
    list(step_times.record_steps([1]))
    header, step = [json.loads(line) for line in (directory / "rank-1.jsonl").read_text().splitlines()]
    assert header == {"hvdkit": "step times", "version": 1, "rank": 1}
    assert len(step) == 4 and step[2] is None
