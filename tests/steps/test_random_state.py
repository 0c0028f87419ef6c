"""Python's and NumPy's generators go on where they were."""

import random

import numpy as np
import pytest

from hvdkit.errors import CheckpointError
from hvdkit.steps import random_state


def draw():
    return [random.random(), random.gauss(0, 1), *np.random.random(3), np.random.normal()]  # noqa: S311


def test_the_same_numbers_follow():
    random.seed(3)
    np.random.seed(4)
    draw()  # leaves one normal number over in each generator
    state = random_state.capture()
    assert state.dtype == np.uint8 and state.shape == (random_state.BYTES,)
    expected = [draw(), draw()]
    random_state.restore(state)
    assert [draw(), draw()] == expected


@pytest.mark.parametrize("damage", [lambda state: state[:-1], lambda state: state * 0 + 255])
def test_bytes_that_are_no_state_are_refused(damage):
    with pytest.raises(CheckpointError, match="states of the random generators cannot be read"):
        random_state.restore(damage(random_state.capture()))
