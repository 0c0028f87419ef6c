"""Which pass over a loader a step belongs to; loaders themselves need a framework: tests/parallel/test_resume.py."""

from dataclasses import dataclass

import pytest

from hvdkit.steps import passes


@dataclass(frozen=True)
class Start:
    epoch: int = 0

    def next_epoch(self) -> "Start":
        return Start(self.epoch + 1)


@pytest.fixture(autouse=True)
def no_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_steps", {}), ("_counters", []), ("_waits", []), ("_recent", {}), ("_settled", [])):
        monkeypatch.setattr(passes, name, value)
    passes.expect_steps()


@pytest.mark.parametrize("looks_first", [True, False])
def test_a_step_beside_a_pass_without_gradients_is_not_of_that_pass(looks_first: bool) -> None:
    loader = passes.Passes(Start())
    training, look = loader.begin(Start(), None), None
    if looks_first:
        look = loader.begin(Start(), None)
        look.take(looks=True)
    training.take()
    if look is None:
        look = loader.begin(Start(), None)
        look.take(looks=True)
    passes.stepped()
    assert loader.epoch() is training and training.trained == 1 and look.trained == 0


def test_steps_that_run_behind_the_program_are_waited_for_before_a_pass_begins() -> None:
    loader = passes.Passes(Start())
    behind = [True]
    passes.expect_steps(wait=lambda: passes.stepped_behind() if behind and behind.pop() else None)
    training = loader.begin(Start(), None)
    behind.append(True)  # the step of this batch ends later
    training.take()
    training.close(has_ended=True)
    look = loader.begin(Start(), None)
    look.take()
    look.close(has_ended=True)
    assert loader.epoch() is training and look.trained == 0


def test_steps_of_fit_are_counted_by_its_loader_alone() -> None:
    loader = passes.Passes(Start())
    with passes.fit():
        look = loader.begin(Start(), None)
        look.take()
        passes.stepped_behind()
    assert loader.epoch() is None and passes.told() == 0


def test_a_pass_whose_steps_were_undone_is_no_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model:
        weights = b"first"

    model = Model()
    monkeypatch.setattr(passes, "_models", {})
    passes.look_at_weights(model, lambda model: model.weights)
    loader = passes.Passes(Start())
    search = loader.begin(Start(), None)
    search.take()
    model.weights = b"moved"
    passes.stepped()
    assert loader.epoch() is search
    model.weights = b"first"
    assert loader.epoch() is None
