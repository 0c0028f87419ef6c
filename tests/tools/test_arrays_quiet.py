"""Arithmetic that raises nothing, whatever the caller has told NumPy."""

from types import SimpleNamespace

import numpy as np
import pytest

from hvdkit.arrays import shared_memory


@pytest.mark.parametrize("numpy", ["as it is", "before 2.0"])
def test_nothing_is_raised_and_the_callers_state_stays(monkeypatch, numpy):
    if numpy == "before 2.0":  # its state is the thread's, whatever the context
        context = SimpleNamespace(run=lambda function, *arguments: function(*arguments))
        geterr = {"over": "warn"}
        monkeypatch.setattr(shared_memory.contextvars, "copy_context", lambda: context)
        monkeypatch.setattr(shared_memory.np, "geterr", lambda: geterr)
    calling = shared_memory.quiet()
    assert (getattr(calling, "__name__", "") == "run") == (numpy == "as it is")  # of a context
    monkeypatch.undo()
    with np.errstate(all="raise"):
        assert calling(np.multiply, np.float32(3e38), np.float32(10)) == np.inf
        assert np.geterr()["over"] == "raise"
        with pytest.raises(FloatingPointError):
            np.multiply(np.float32(3e38), np.float32(10))


def test_what_is_called_may_fail():
    calling = shared_memory.quiet()
    with pytest.raises(KeyError):
        calling({}.__getitem__, "x")
    assert calling(max, 1, 2) == 2
