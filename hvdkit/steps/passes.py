"""Which passes over a loader are epochs of the training, and which only look at its data.

A pass counts once an optimizer that hvdkit knows has stepped in it: train accuracy, ``update_bn`` and a look at the
first batch leave the loader where it is. So does a search for a learning rate: once it has put the weights back, its
steps were none. Where hvdkit knows no optimizer (gradients averaged by hand), every pass
counts in which gradients were not switched off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet, ref

_steps: dict[str, int] = {}
_counters: list[Callable[[], int]] = []
_waits: list[Callable[[], object]] = []
_fits: list[int] = []
_models: dict[int, tuple[ref[Any], Callable[[Any], bytes]]] = {}
_recent: dict[Pass, None] = {}
"""Passes that gave a batch since the last step, in the order of their last batches."""
_settled: list[int] = []
"""How many steps were taken when ``_recent`` was looked at last."""


def expect_steps(counter: Callable[[], int] | None = None, wait: Callable[[], object] | None = None) -> None:
    """There is an optimizer whose steps are seen: from now on a pass without a step is no epoch.

    Args:
        counter: says how many there were, where they are not told to ``stepped``.
        wait: returns when all steps that were begun have been told, where they run behind the program.
    """
    _steps.setdefault("told", 0)
    if wait is not None and wait not in _waits:
        _waits.append(wait)
    if counter is not None and counter not in _counters:
        _settled[:] = [sum(_settled) + counter()]
        _counters.append(counter)


def stepped(*_: Any) -> None:
    """An optimizer has stepped."""
    _steps["told"] = _steps.get("told", 0) + 1


def told() -> int:
    """How often ``stepped`` was called."""
    return _steps.get("told", 0)


def stepped_behind() -> None:
    """An optimizer has stepped, some time after the program began that step."""
    if not _fits:
        stepped()


@contextmanager
def fit() -> Iterator[None]:
    """In here Keras' ``fit`` trains, and tells its loader of each step by ``Pass.train``."""
    _fits.append(1)
    try:
        yield
    finally:
        _fits.pop()


def look_at_weights(model: Any, sample: Callable[[Any], bytes]) -> None:
    """Steps change what ``sample`` reads of the model; when it is as before the first of them, they were undone.

    A list or dict of models is not looked at: it cannot be referred to weakly.
    """
    if hasattr(model, "__weakref__"):
        key = id(model)
        _models[key] = ref(model, lambda _: _models.pop(key, None)), sample


def _weights() -> list[bytes]:
    living = [(held(), sample) for held, sample in list(_models.values())]
    return [sample(model) for model, sample in living if model is not None]


def go_on_elsewhere() -> None:
    """What steps there were belong to none of the passes so far: state was put back, or Keras' ``fit`` took them."""
    _recent.clear()
    _settled[:] = [_steps_taken()]


def wait_for_steps() -> None:
    """Return when every step that was begun has been taken, where they run behind the program."""
    for wait in _waits:
        wait()


def _steps_taken() -> int:
    return sum(_steps.values()) + sum(counter() for counter in _counters)


def _settle() -> None:
    """Say of the passes that gave the last batches that they train, where a step was taken since."""
    steps, before = _steps_taken(), sum(_settled)
    if steps == before:
        return
    recent = list(_recent)
    go_on_elsewhere()
    if steps < before:  # an optimizer is no longer in use
        return
    is_open = [one for one in recent if one.is_open]
    # A batch of next(iter(loader)) is trained on after its pass; longer ones that were over were no part of the step.
    closed = [one for one in recent if one.taken == 1] or recent[-1:]
    found = [one for one in is_open if not one.looks] or is_open or closed
    goes_on = {one.passes: one.passes.trained in is_open for one in found}
    for one in sorted(found, key=lambda one: one.start.epoch):
        one.trained = one.taken
        if not goes_on[one.passes]:
            one.passes.trained = one
    for passes in goes_on:
        passes.note_weights()


class Pass:
    """One iteration of a loader, from a position on; ``share`` says which samples are this rank's."""

    exchange: Any = None  # of a stream, what the ranks tell each other in this pass

    def __init__(self, passes: Passes, start: Any, share: Any) -> None:
        self.passes, self.start, self.share = passes, start, share
        self.taken = 0  # batches that the loop has got
        self.trained = 0  # those of them that it had got when the last step was taken
        self.looks = False  # gradients were switched off
        self.is_open, self.has_ended = True, False  # it may give another batch, or gave all
        self.is_counted = True  # somebody counts the batches

    @property
    def reached(self) -> int:
        """Batches that a training which goes on need not take again."""
        return self.taken if self.has_ended or not self.trained else self.trained

    def take(self, *, looks: bool = False) -> None:
        """The loop gets another batch."""
        _settle()
        self.taken += 1
        self.looks = looks
        if not self.passes.is_of(self):
            return
        _recent.pop(self, None)
        _recent[self] = None
        if not looks:
            self.passes.last = self

    def train(self, steps: int) -> None:
        """The loop got so many batches, and trained on them."""
        self.taken += steps
        self.trained = self.taken
        if self.passes.is_of(self):
            self.passes.trained = self.passes.last = self

    def lose_count(self) -> None:
        """Nobody counts its batches from now on."""
        if self.is_counted:
            self.take()
        self.is_counted = False

    def close(self, *, has_ended: bool = False) -> None:
        """It gives no batch any more."""
        if _settle is not None:  # Python is ending
            _settle()
        self.is_open, self.has_ended = False, self.has_ended or has_ended

    def counting(self, batches: Iterable[Any], looks: Callable[[], bool] = lambda: False) -> Iterator[Any]:
        """The batches, counted when the loop gets them; ``looks`` says whether gradients are off then."""
        try:
            for contents in batches:
                self.take(looks=looks())
                yield contents
            self.has_ended = True
        finally:
            self.close()


class Passes:
    """All passes over one loader since it was made, or was put elsewhere."""

    def __init__(self, base: Any) -> None:
        self.begin_at(base)

    def begin_at(self, base: Any) -> None:
        """Have what comes begin at this position."""
        self.base = base
        self.trained: Pass | None = None  # the last one in which a step was taken
        self.last: Pass | None = None  # the last one of which the loop got a batch
        self.in_fit: Pass | None = None  # the one that Keras' ``fit`` is in, or was in last
        self._before: list[bytes] = []
        self._have_changed = False
        self._begun: WeakSet[Pass] = WeakSet()
        for one in [one for one in _recent if one.passes is self]:
            del _recent[one]

    def is_of(self, one: Pass) -> bool:
        """Whether it began after the loader was put where it is."""
        return one in self._begun

    def note_weights(self) -> None:
        """A step was taken."""
        self._have_changed = self._have_changed or _weights() != self._before

    def begin(self, start: Any, share: Any) -> Pass:
        """A pass from ``start`` on; those of zip(loader, loader), which begin together, have orders of their own."""
        wait_for_steps()
        _settle()
        for one in self._begun:
            one.is_open = one.is_open and one.is_counted
        for one in [one for one in _recent if one.passes is self and not one.is_open]:
            del _recent[one]
        while any(one.is_open and not one.taken and one.start.epoch == start.epoch for one in self._begun):
            start = start.next_epoch()
        if self.trained is None:
            self._before = _weights()
        begun = Pass(self, start, share)
        self._begun.add(begun)
        return begun

    def epoch(self) -> Pass | None:
        """The last one that counts as an epoch."""
        wait_for_steps()
        _settle()
        if self._have_changed and _weights() == self._before:  # put back
            self.begin_at(self.base)
        return self.trained if _steps else self.last

    def current(self) -> Pass | None:
        """The one that says where the training is; where no step was taken yet, a loop that is under way."""
        epoch, last = self.epoch(), self.last
        return last if last is not None and last.is_open and last.taken > 1 and not _steps_taken() else epoch
