"""The recorder of steps: nothing without the variable, every step with it, never an error for the training."""

import gc
import json
import os
import time
from pathlib import Path

import pytest

from hvdkit.core import listeners
from hvdkit.errors import DataError
from hvdkit.observe import step_files


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
    monkeypatch.setattr(step_files.time, "perf_counter", clock)
    monkeypatch.setattr(step_files.time, "time", lambda: clock.now + 1_000_000)
    return clock


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(listeners, "RECORDERS", [])
    monkeypatch.setenv(listeners.STEP_TIMES, str(tmp_path))
    monkeypatch.setenv("HOROVOD_RANK", "1")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    return tmp_path


def slow(clock, count, seconds):
    for number in range(count):
        clock.sleep(seconds)
        yield number


def test_without_the_variable_the_batches_are_given_back_themselves(monkeypatch):
    monkeypatch.setattr(listeners, "RECORDERS", [])
    monkeypatch.delenv(listeners.STEP_TIMES, raising=False)
    batches = [1, 2]
    assert step_files.record_steps(batches) is batches
    listeners.ready()


def test_every_step_is_written_with_its_input_apart(clock, directory):
    for _ in step_files.record_steps(slow(clock, 3, 0.25)):
        clock.sleep(0.5)
        listeners.ready()
        clock.sleep(0.125)
        listeners.ready()
    (times,) = step_files.read(directory)
    assert times.rank == 1
    assert len(times.steps) == 3
    for step in times.steps:
        assert step.given - step.asked == pytest.approx(0.25)
        assert step.ready - step.given == pytest.approx(0.5)
        assert step.ended - step.given == pytest.approx(0.625)
    assert times.steps[0].asked == pytest.approx(1_000_100)


def test_epochs_are_written_one_after_the_other_and_what_is_between_them_is_no_step(clock, directory):
    for _ in range(2):
        for _ in step_files.record_steps([1, 2]):
            clock.sleep(1.0)
        clock.sleep(30.0)
    (times,) = step_files.read(directory)
    assert [step.ended - step.asked for step in times.steps] == pytest.approx([1.0] * 4)


def test_a_step_that_ends_with_break_counts(clock, directory):
    for number in step_files.record_steps(slow(clock, 9, 0.0)):
        clock.sleep(1.0)
        if number == 2:
            break
    (times,) = step_files.read(directory)
    assert [step.ended - step.given for step in times.steps] == pytest.approx([1.0] * 3)


def test_the_recorded_batches_are_like_the_batches(directory):
    class Loader(list):
        epoch = 7

    steps = step_files.record_steps(Loader([1, 2]))
    assert len(steps) == 2 and steps.epoch == 7 and list(steps) == [1, 2]
    with pytest.raises(TypeError, match="generator has no length"):
        len(step_files.record_steps(number for number in [1]))


def test_what_cannot_be_written_is_a_warning(directory, monkeypatch):
    monkeypatch.setenv(listeners.STEP_TIMES, str(directory / "missing"))
    with pytest.warns(UserWarning, match="the times of the steps are lost"):
        assert list(step_files.record_steps([1, 2])) == [1, 2]


@pytest.mark.parametrize(
    "lines",
    [
        ["[1, 2, 3, 4]"],
        ['{"hvdkit": "tune", "version": 1, "rank": 0}'],
        ['{"hvdkit": "step times", "version": 1, "rank": 0}', "[1, 2"],
        ['{"hvdkit": "step times", "version": 1, "rank": 0}', "[1, 2, null]"],
        ['{"hvdkit": "step times", "version": 1, "rank": 0}', "[1, 2, null, 3, 4, 5]"],
        ['{"hvdkit": "step times", "version": 1, "rank": 0}', '["1", 2, null, 3]'],
        ['{"hvdkit": "step times", "version": 1, "rank": 0}', "[NaN, 2, null, 3]"],
    ],
    ids=str,
)
def test_a_file_that_is_something_else_is_refused(tmp_path, lines):
    (tmp_path / "rank-0.jsonl").write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(DataError, match=r"rank-0\.jsonl"):
        step_files.read(tmp_path)


@pytest.mark.parametrize("cut", ["", "[1", "[1, 2, null, 3]", '{"steps": 1, "ra'])
def test_of_a_rank_that_was_killed_as_it_wrote_the_complete_lines_count(tmp_path, cut):
    head = '{"hvdkit": "step times", "version": 1, "rank": 0}'
    (tmp_path / "rank-0.jsonl").write_text(f"{head}\n[0, 1, null, 2]\n{cut}")
    (times,) = step_files.read(tmp_path)
    assert [step.ended for step in times.steps] == [2]


def test_an_empty_file_is_refused_and_an_empty_directory_is_nothing(tmp_path):
    assert step_files.read(tmp_path) == []
    (tmp_path / "rank-0.jsonl").touch()
    with pytest.raises(DataError):
        step_files.read(tmp_path)


def test_the_file_is_json_lines(clock, directory):
    list(step_files.record_steps([1]))
    header, step = [json.loads(line) for line in (directory / "rank-1.jsonl").read_text().splitlines()]
    assert header.items() >= {"hvdkit": "step times", "version": 1, "rank": 1}.items()
    assert len(step) == 8 and step[2] is None and step[4] is None


def test_a_host_is_a_number_and_no_name(clock, directory):
    list(step_files.record_steps([1]))
    (times,) = step_files.read(directory)
    assert isinstance(times.host, int) and os.uname().nodename not in (directory / "rank-1.jsonl").read_text()


def test_what_the_processor_gave_is_written_where_the_kernel_says_it(clock, directory):
    list(step_files.record_steps(range(9)))
    (times,) = step_files.read(directory)
    if Path("/proc/self/schedstat").exists():
        written = json.loads((directory / "rank-1.jsonl").read_text().splitlines()[-1])
        assert written["steps"] == 4 and min(times.cores) >= 0
        assert times.cores == pytest.approx([written[name] / 4 for name in ("ran", "queued", "of_all")])
    else:
        assert times.cores is None


def test_of_each_step_it_is_written_what_the_thread_got_until_its_gradients_were_there(clock, directory):
    for _ in step_files.record_steps(range(3)):
        begun = time.thread_time()
        while time.thread_time() < begun + 0.02:
            pass
        listeners.ready()
        while time.thread_time() < begun + 0.05:
            pass
        listeners.arrived()
    (times,) = step_files.read(directory)
    assert times.cpus == os.sched_getaffinity(0)
    for step in times.steps:
        ran, queued, of_all = step.used
        assert 0.02 <= ran < 0.045 and queued >= 0 and of_all >= 0.9 * ran
        assert step.arrived is not None


def test_garbage_collection_that_takes_a_while_is_written(directory):
    for _ in step_files.record_steps([1]):
        held = [[number] for number in range(200_000)]
        gc.collect()
        del held
    (times,) = step_files.read(directory)
    assert any(one.name == "gc" and one.seconds >= 5e-4 and one.at >= times.steps[0].asked for one in times.events)


def test_many_short_collections_leave_room_for_what_takes_long(tmp_path):
    recorder = step_files.Recorder(tmp_path, 0)
    for number in range(5000):
        recorder.event("gc", 100.0 + number, 1e-5)
    recorder.event("saving", 6000.0, 2.0)
    list(step_files.RecordedSteps([1], recorder))
    (times,) = step_files.read(tmp_path)
    assert [(one.name, one.seconds) for one in times.events] == [("saving", 2.0)]


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="the kernel does not say it")
def test_a_recorder_of_the_processor_leaves_no_open_file():
    step_files.Processor()
    before = open_files()
    kept = [step_files.Processor() for _ in range(20)]
    assert open_files() == before + 20
    del kept
    assert open_files() == before


def test_many_steps_are_written_before_the_end(clock, directory):
    steps = iter(step_files.record_steps(range(1000)))
    for _ in range(600):
        next(steps)
    (times,) = step_files.read(directory)
    assert len(times.steps) == 512


def test_a_job_that_is_killed_leaves_at_least_half_of_its_time_and_all_but_a_minute(clock, directory):
    steps = iter(step_files.record_steps(slow(clock, 300, 1.0)))
    left = []
    for _ in range(300):
        next(steps)
        written = [times.steps[-1].ended for times in step_files.read(directory)]
        left.append(clock.now + 1_000_000 - max(written, default=1_000_100))
    assert all(lost <= max(4.0, seconds / 2 + 2) for seconds, lost in enumerate(left, start=1))
    assert max(left) < 64 and sum(lost == 1 for lost in left) < 12


# What is only seen of a script: its loader and its optimizer


@pytest.fixture
def seen(clock, directory):
    return step_files.recorder()


def load(recorder, clock, seconds, *, more=True):
    recorder.loading()
    clock.sleep(seconds)
    recorder.loaded(more)


def recorded(recorder, directory):
    recorder.finished()
    (times,) = step_files.read(directory)
    return [
        (step.given - step.asked, None if step.ready is None else step.ready - step.asked, step.ended - step.asked)
        for step in times.steps
    ]


def test_steps_are_seen_by_loader_and_optimizer(seen, clock, directory):
    for _ in range(3):
        load(seen, clock, 0.25)
        clock.sleep(1.0)
        seen.ready()
        clock.sleep(0.5)
        seen.stepped()
    load(seen, clock, 0.125, more=False)
    assert recorded(seen, directory) == [pytest.approx((0.25, 1.25, 1.75))] * 3


def test_several_batches_to_a_step_are_its_input(seen, clock, directory):
    for _ in range(2):
        for _ in range(2):
            load(seen, clock, 0.25)
            clock.sleep(1.0)
            seen.ready()
        seen.stepped()
    assert recorded(seen, directory) == [pytest.approx((0.5, 2.5, 2.5))] * 2


def test_a_validation_between_epochs_is_no_step(seen, clock, directory):
    for _ in range(2):
        load(seen, clock, 0.25)
        seen.stepped()
        load(seen, clock, 0.25, more=False)
        for more in (True, True, False):
            load(seen, clock, 8.0, more=more)
    assert [whole for _, _, whole in recorded(seen, directory)] == pytest.approx([0.25, 0.25])


def test_a_script_without_a_loader_has_steps_from_the_second_on(seen, clock, directory):
    for _ in range(3):
        clock.sleep(1.0)
        seen.stepped()
    assert [whole for _, _, whole in recorded(seen, directory)] == pytest.approx([1.0, 1.0])


def test_who_records_by_hand_goes_first(seen, clock, directory):
    load(seen, clock, 9.0)
    for _ in step_files.record_steps([1, 2]):
        load(seen, clock, 0.25)
        seen.asked(by_hand=False)
        seen.given(by_hand=False)
        seen.stepped()
    assert [whole for _, _, whole in recorded(seen, directory)] == pytest.approx([0.25, 0.25])


def test_a_batch_taken_within_the_step_is_waited_for_until_then(seen, clock, directory):
    seen.taken()
    seen.asked()
    seen.given()
    clock.sleep(0.25)
    seen.taken()
    clock.sleep(1.0)
    seen.asked()
    assert recorded(seen, directory) == [(pytest.approx(0.25), None, pytest.approx(1.25))]


def test_a_file_is_of_one_process_and_of_the_last_attempt(clock, directory, monkeypatch):
    list(step_files.record_steps([1]))
    monkeypatch.setattr(listeners, "RECORDERS", [])
    with pytest.warns(UserWarning, match="File exists"):
        list(step_files.record_steps([1, 2, 3]))
    assert [len(times.steps) for times in step_files.read(directory)] == [1]
    monkeypatch.setattr(listeners, "RECORDERS", [])
    monkeypatch.setenv("HVDKIT_RESTART", "1")
    list(step_files.record_steps([1, 2]))
    assert [len(times.steps) for times in step_files.read(directory)] == [2]
