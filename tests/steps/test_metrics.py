"""Metrics averaged over ranks, and what the root does for everybody."""

import pickle
import threading
import traceback

import pytest

from hvdkit import AgreementError, CheckpointError, InvalidArgumentError, RootError
from hvdkit.core.communicator import on_root
from hvdkit.steps.agreement import digest_table
from hvdkit.steps.metrics import average, require_same_names, sums_and_counts


class Others:
    """What a rank gets that is told of the others' names, and adds up theirs."""

    def __init__(self, *names, adding=(0.0, 0.0)):
        self._names, self._adding = names, adding

    def allgather(self, rows, name):
        return [rows, digest_table(self._names)]

    def allreduce(self, values, name):
        return values + self._adding


def test_numbers_count_once_and_pairs_by_their_count():
    pairs = sums_and_counts({"loss": 2, "accuracy": (3, 10)})
    assert pairs == {"accuracy": (3.0, 10.0), "loss": (2.0, 1.0)}
    others = Others("accuracy", "loss", adding=[(3.0, 10.0), (3.0, 1.0)])
    assert average(others, {"loss": 2, "accuracy": (3, 10)}, 2) == {"accuracy": 0.3, "loss": 2.5}
    assert average(None, {"loss": 2, "accuracy": (3, 10)}, 1) == {"accuracy": 0.3, "loss": 2.0}


@pytest.mark.parametrize("value", ["high", None, (1, 2, 3), (1, -1), (1, float("nan"))])
def test_what_is_no_metric_is_named(value):
    with pytest.raises(InvalidArgumentError, match="metric 'loss' must"):
        sums_and_counts({"loss": value})


def test_nothing_counted_is_an_error():
    with pytest.raises(InvalidArgumentError, match="total count of 0 over all 4 ranks"):
        average(Others("accuracy"), {"accuracy": (0.0, 0.0)}, 4)


def test_other_names_on_another_rank_are_an_error():
    require_same_names(Others("accuracy", "loss"), ["loss", "accuracy"])
    with pytest.raises(AgreementError, match=r"different metrics .*this rank gives loss"):
        require_same_names(Others("lost"), ["loss"])


def by_root_and_another(action):
    """What happens on the root, and on another rank, which the pickled outcome reaches."""
    wire = []

    def sent(outcome):
        wire.append(pickle.dumps(outcome))
        return outcome

    def result(*arguments):
        try:
            return on_root(*arguments)
        except BaseException as error:
            return error

    mine = result(True, action, sent)
    return mine, result(False, lambda: pytest.fail("only the root acts"), lambda _: pickle.loads(wire.pop()))  # noqa: S301


def raising(error):
    def act():
        raise error

    return act


class OddError(Exception):
    """One that pickle can write and not read."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_the_roots_result_reaches_every_rank():
    assert by_root_and_another(lambda: 7) == (7, 7)
    mine, theirs = by_root_and_another(lambda: [CheckpointError("no failure")])
    assert [str(one) for one in mine + theirs] == ["no failure"] * 2


def test_the_roots_error_reaches_every_rank():
    """Whatever it is; the root raises its own, whose traceback says where."""
    full, key = CheckpointError("full"), KeyError("loss")
    mine, theirs = by_root_and_another(raising(full))
    assert mine is full and type(theirs) is CheckpointError and str(theirs) == "full"
    locked = RuntimeError(threading.Lock())
    for error, told in (
        (key, "KeyError: 'loss'"),
        (OddError(1, 2), "OddError: 1 and 2"),
        (locked, "RuntimeError: <unlocked"),
    ):
        mine, theirs = by_root_and_another(raising(error))
        assert mine is error and any(frame.name == "act" for frame in traceback.extract_tb(mine.__traceback__))
        assert type(theirs) is RootError and told in str(theirs)
    mine, theirs = by_root_and_another(lambda: threading.Lock())
    assert isinstance(mine, TypeError) and "cannot pickle '_thread.lock' object" in str(theirs)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), SystemExit("why"), SystemExit()], ids=repr)
def test_a_root_that_ends_ends_every_rank(error):
    mine, theirs = by_root_and_another(raising(error))
    assert mine is error and type(theirs) is type(error)
    assert getattr(theirs, "code", None) == getattr(error, "code", None)


def test_a_lost_connection_does_not_hide_the_roots_error():
    def lost(outcome):
        raise ConnectionError("gone")

    with pytest.raises(KeyError, match="loss"):
        on_root(True, raising(KeyError("loss")), lost)
