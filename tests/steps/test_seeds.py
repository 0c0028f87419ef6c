"""One stream for all ranks and one for each, never the same numbers; and states to go on from."""

import random

import numpy as np
import pytest

from hvdkit import Topology
from hvdkit.errors import CheckpointError, InvalidArgumentError
from hvdkit.steps.seeds import STATE_BYTES, Seeds, capture_state, integer, restore_state


def seeds(seed, rank=0, size=4):
    return Seeds(seed, Topology(rank, size))


def test_streams_do_not_meet():
    streams = []
    for seed in range(20):
        streams.append(seeds(seed).shared())
        for rank in range(4):
            streams += [seeds(seed, rank).own(*purpose) for purpose in ((), (0,), (1,), (1, 0), (1, 1))]
    numbers = [integer(stream) for stream in streams]
    assert len(set(numbers)) == len(numbers) == 20 * (1 + 4 * 5)


def test_the_shared_stream_is_the_same_on_every_rank_and_in_every_job():
    assert integer(seeds(7, 0).shared()) == integer(seeds(7, 3).shared()) == integer(seeds(7, 1, 2).shared())
    assert integer(seeds(7, 2).own()) == integer(seeds(7, 2, 64).own())


def test_integers_have_the_length_that_was_asked_for():
    numbers = [integer(seeds(seed).own(), bits=31) for seed in range(200)]
    assert max(numbers) < 2**31 and max(numbers) > 2**29
    assert max(integer(seeds(seed).own()) for seed in range(200)) > 2**62


def test_generators_repeat_and_differ():
    first, again, other = seeds(1, 0).generator(5), seeds(1, 0).generator(5), seeds(1, 1).generator(5)
    drawn = first.random(10).tolist()
    assert drawn == again.random(10).tolist() != other.random(10).tolist()


@pytest.mark.parametrize("bad", [-1, 1.0, "3", None, True])
def test_a_seed_is_an_integer(bad):
    with pytest.raises(InvalidArgumentError, match="seed must be an integer >= 0, got"):
        seeds(bad)


def draw():
    return [random.random(), random.gauss(0, 1), *np.random.random(3), np.random.normal()]  # noqa: S311


def test_the_same_numbers_follow_a_state():
    random.seed(3)
    np.random.seed(4)
    draw()  # leaves one normal number over in each generator
    state = capture_state()
    assert state.dtype == np.uint8 and state.shape == (STATE_BYTES,)
    expected = [draw(), draw()]
    restore_state(state)
    assert [draw(), draw()] == expected


@pytest.mark.parametrize("damage", [lambda state: state[:-1], lambda state: state * 0 + 255])
def test_bytes_that_are_no_state_are_refused(damage):
    with pytest.raises(CheckpointError, match="states of the random generators cannot be read"):
        restore_state(damage(capture_state()))
