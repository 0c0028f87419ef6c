"""The ring of ``hvdkit emulate`` on ranks that are threads: any number of ranks, any number of elements."""

import queue
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.measure.emulate import ring

TIMEOUT_S = 20


class Message:
    """A message that is copied only when its receiver waits for it: a sender that changes it before is found out."""

    def __init__(self, array):
        self.array = array
        self.copied = threading.Event()
        self.done = False

    def __call__(self):
        assert self.copied.wait(TIMEOUT_S), "nobody received it"
        self.done = True


class Receive:
    def __init__(self, messages, array, receives):
        self.messages, self.array, self.receives = messages, array, receives
        receives.append(self)

    def __call__(self):
        assert self.receives.pop(0) is self, "receives are not waited for in order"
        message = self.messages.get(timeout=TIMEOUT_S)
        assert message.array.nbytes == self.array.nbytes
        self.array[:] = message.array
        message.copied.set()


class Threads:
    """The messages of one rank; ``links[a, b]`` holds those from a to b."""

    def __init__(self, rank, size, links):
        self.rank, self.size, self.links = rank, size, links
        self.sent, self.partners, self.receives, self.messages = 0, set(), [], []

    def send(self, array, to):
        self.sent += array.nbytes
        self.partners.add(to)
        message = Message(array)
        self.messages = [one for one in self.messages if not one.done] + [message]
        self.links[self.rank, to].put(message)
        return message

    def receive(self, array, source):
        self.partners.add(source)
        busy = any(np.shares_memory(array, one.array) for one in self.messages if not one.done)
        assert not busy, "a receive is posted into what is still being sent"
        return Receive(self.links[source, self.rank], array, self.receives)


def on_ranks(size, elements, *steps, dtype=np.float32):
    """Run steps of the ring on threads; each rank's array and its messages."""
    links = {(a, b): queue.Queue() for a in range(size) for b in range(size)}
    transports = [Threads(rank, size, links) for rank in range(size)]
    arrays = [given_by(rank, elements, dtype) for rank in range(size)]
    errors = []

    def run(rank):
        try:
            for step in steps:
                step(transports[rank], arrays[rank])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), "the ring does not come to its end"
    assert errors == []
    return arrays, transports


def given_by(rank, elements, dtype=np.float32):
    return ((np.arange(elements) * 7 + rank * 5) % 13).astype(dtype)


def total(size, elements, dtype=np.float32):
    return sum(given_by(rank, elements, dtype) for rank in range(size))


@pytest.fixture
def small_segments(monkeypatch):
    monkeypatch.setattr(ring, "SEGMENT_BYTES", 16)


@settings(max_examples=60)
@given(size=st.integers(1, 6), elements=st.integers(1, 90), segment=st.sampled_from([4, 16, 52, 1 << 20]))
def test_every_rank_has_the_sums_whatever_the_sizes(size, elements, segment):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "SEGMENT_BYTES", segment)
        arrays, _ = on_ranks(size, elements, ring.allreduce)
    for array in arrays:
        assert np.array_equal(array, total(size, elements))


@pytest.mark.parametrize(("size", "elements"), [(4, 650), (3, 2), (5, 1), (2, 803840 // 4), (4, 300_001)])
def test_sizes_that_are_not_divisible(size, elements):
    arrays, _ = on_ranks(size, elements, ring.allreduce)
    assert all(np.array_equal(array, total(size, elements)) for array in arrays)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int8, np.int64])
def test_types(size, dtype, small_segments):
    arrays, _ = on_ranks(size, 37, ring.allreduce, dtype=dtype)
    assert all(np.array_equal(array, total(size, 37, dtype)) and array.dtype == dtype for array in arrays)


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_a_broadcast_brings_the_root_s_values_to_all(size, small_segments):
    arrays, transports = on_ranks(size, 41, ring.broadcast)
    assert all(np.array_equal(array, given_by(0, 41)) for array in arrays)
    assert [one.sent for one in transports] == [164] * (size - 1) + [0]


@pytest.mark.parametrize(("size", "elements"), [(2, 100), (4, 800), (5, 777)])
def test_every_rank_sends_what_the_bandwidth_bound_allows_and_to_its_neighbour_alone(size, elements, small_segments):
    _, transports = on_ranks(size, elements, ring.allreduce)
    least = 2 * (size - 1) / size * elements * 4
    for one in transports:
        assert least - 8 * size <= one.sent <= least + 8 * size  # a chunk may have an element more
        assert one.partners <= {(one.rank + 1) % size, (one.rank - 1) % size}


def test_several_in_a_row_do_not_mix(small_segments):
    arrays, _ = on_ranks(3, 40, ring.allreduce, ring.allreduce)
    assert all(np.array_equal(array, 3 * total(3, 40)) for array in arrays)
