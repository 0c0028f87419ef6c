import pytest

from hvdkit.errors import DataError, InvalidArgumentError
from hvdkit.observe.recording import TimelineSteps


class Horovod:
    """Says when it is told to start and to stop."""

    def __init__(self, rank=0):
        self.told, self._rank = [], rank

    def rank(self):
        return self._rank

    def start_timeline(self, file_path, mark_cycles=False):
        self.told.append(("start", file_path, mark_cycles))

    def stop_timeline(self):
        self.told.append("stop")


@pytest.fixture(autouse=True)
def dynamic(monkeypatch):
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")


def steps_recorded(horovod, path, steps, total):
    recorded = []
    with TimelineSteps(horovod, path, steps, mark_cycles=True) as recording:
        for number in range(total):
            if horovod.told and horovod.told[-1] != "stop":
                recorded.append(number)
            recording.step()
    return recorded


@pytest.mark.parametrize(
    ("steps", "total", "expected"),
    [(range(2, 5), 9, [2, 3, 4]), (range(0, 1), 3, [0]), (range(1, 9), 3, [1, 2]), (None, 2, [0, 1])],
)
def test_it_records_these_steps_and_no_other(tmp_path, steps, total, expected):
    horovod = Horovod()
    assert steps_recorded(horovod, tmp_path / "t.json", steps, total) == expected
    assert horovod.told == [("start", str(tmp_path / "t.json"), True), "stop"]


def test_an_error_in_the_training_ends_the_recording_and_is_not_hidden(tmp_path):
    horovod = Horovod()
    with pytest.raises(ZeroDivisionError), TimelineSteps(horovod, tmp_path / "t.json"):
        1 / 0  # noqa: B018
    assert horovod.told[-1] == "stop"


def test_a_training_that_ends_before_the_steps_says_so(tmp_path):
    with pytest.warns(UserWarning, match=r"took 3 steps.*range\(5, 9\)"):
        assert steps_recorded(Horovod(), tmp_path / "t.json", range(5, 9), 3) == []


@pytest.mark.parametrize("setting", [None, "/tmp/t.json"])
def test_without_the_setting_the_error_comes_at_once_and_says_how_to_start(tmp_path, monkeypatch, setting):
    monkeypatch.delenv("HOROVOD_TIMELINE")
    if setting:
        monkeypatch.setenv("HOROVOD_TIMELINE", setting)
    horovod = Horovod()
    with (
        pytest.raises(InvalidArgumentError, match="hvdkit launch --env HOROVOD_TIMELINE=DYNAMIC"),
        TimelineSteps(horovod, tmp_path / "t.json", range(5, 9)),
    ):
        pass
    assert horovod.told == []


def test_only_rank_0_needs_the_directory(tmp_path):
    path = tmp_path / "missing" / "t.json"
    with pytest.raises(DataError, match="rank 0"), TimelineSteps(Horovod(), path):
        pass
    with TimelineSteps(Horovod(rank=1), path):
        pass


@pytest.mark.parametrize("steps", [range(3, 3), range(-1, 3), range(0, 9, 2), [1, 2], 5])
def test_steps_that_are_no_range_of_steps(tmp_path, steps):
    with pytest.raises(InvalidArgumentError, match="range"):
        TimelineSteps(Horovod(), tmp_path / "t.json", steps)
