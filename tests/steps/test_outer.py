"""Outer steps between groups of ranks (DiLoCo): against the formulas, with ranks that are threads of one process."""

import re
import threading
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hvdkit.core.communicator import ALLGATHER, ALLREDUCE, ALLTOALL, Communicator, PendingCollective
from hvdkit.errors import AgreementError, InvalidArgumentError
from hvdkit.steps import outer
from hvdkit.steps.outer import OuterLoop, OuterOptions, Weights
from hvdkit.steps.topology import Topology


class Room:
    """Where threads meet, by the name of a collective and how often it was called."""

    def __init__(self, size):
        self.size, self.given, self.ready = size, {}, threading.Condition()

    def meet(self, name, rank, array):
        with self.ready:
            self.given.setdefault(name, {})[rank] = np.array(array)
            self.ready.notify_all()
            assert self.ready.wait_for(lambda: len(self.given[name]) == self.size, timeout=20), name
            return [self.given[name][other] for other in range(self.size)]


class Threads(Communicator):
    def __init__(self, room, rank):
        self.room, self._rank, self.calls = room, rank, Counter()

    def rank(self):
        return self._rank

    def size(self):
        return self.room.size

    def start(self, collective, array, name, *, op="sum", root=0, counts=None):
        name = re.sub(r"outer\.\d+", "outer", name)  # ranks of one process count together
        self.calls[name] += 1
        everyone = self.room.meet((name, self.calls[name]), self._rank, array)
        if collective == ALLREDUCE:
            found = np.sum(everyone, axis=0) if op == "sum" else np.min(everyone, axis=0)
        elif collective == ALLGATHER:
            found = np.concatenate(everyone)
        elif collective == ALLTOALL:
            found = np.stack([rows[self._rank] for rows in everyone])
        else:
            found = everyone[root]
        return PendingCollective(lambda: True, lambda: found)

    def broadcast_object(self, value, name):
        raise NotImplementedError


class Arrays(Weights):
    def __init__(self, *arrays):
        self.arrays = list(arrays)
        self.rows = [f"w{place} float64 {array.shape}" for place, array in enumerate(arrays)]
        self.sizes = [array.size for array in arrays]

    def get(self, places):
        return [self.arrays[place].copy() for place in places]

    def put(self, places, values):
        for place, value in zip(places, values, strict=True):
            self.arrays[place][...] = value.reshape(self.arrays[place].shape)

    def average_slots(self, mean):
        pass


def on_threads(size, program):
    """What ``program(communicator)`` returns on each of so many ranks."""
    room = Room(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: program(Threads(room, rank)), range(size)))


def gradient(rank, step, weights):
    """Each rank's pull is to a place of its own, and changes with the step."""
    return weights - np.random.default_rng(100 * rank + step).normal(size=weights.shape)


def trained(ranks, options, steps, *, finish=True, saved=None, begin=0, weights=None):
    """Weights, and what the outer optimizer keeps, after so many steps of SGD on this rank."""
    own = Arrays(np.linspace(-1, 1, 6).reshape(2, 3), np.ones(5)) if weights is None else weights
    outer_steps = OuterLoop(options, ranks)
    if saved is not None:
        outer_steps.forget(saved)
    outer_steps.begin(own)
    for step in range(begin, begin + steps):
        for array in own.arrays:
            array -= 0.1 * gradient(ranks.rank(), step, array)
        number, due = outer_steps.tick()
        if due:
            outer_steps.take(number)
    if finish:
        outer_steps.finish()
    return own, outer_steps


def reference(ranks, every, steps, lr, momentum):
    """DiLoCo as algorithm 1 of arXiv:2311.08105 says it."""
    anchor = np.concatenate([np.linspace(-1, 1, 6), np.ones(5)])
    velocity = np.zeros_like(anchor)
    replicas = [anchor.copy() for _ in range(ranks)]
    for step in range(steps):
        for rank, replica in enumerate(replicas):
            for part, shape in ((replica[:6], (2, 3)), (replica[6:], (5,))):
                part -= 0.1 * gradient(rank, step, part.reshape(shape)).reshape(-1)
        if (step + 1) % every == 0:
            mean = np.mean([anchor - replica for replica in replicas], axis=0)
            velocity = momentum * velocity + mean
            anchor = anchor - lr * (mean + momentum * velocity)
            replicas = [anchor.copy() for _ in range(ranks)]
    return np.mean(replicas, axis=0)


def flat(weights):
    return np.concatenate([array.reshape(-1) for array in weights.arrays])


@pytest.mark.parametrize("overlap", [0, 2])
def test_in_pieces_of_any_length_it_is_the_same_step(monkeypatch, overlap):
    options = OuterOptions(3, overlap=overlap)
    whole = [flat(own) for own, _ in on_threads(2, lambda ranks: trained(ranks, options, 9))]
    monkeypatch.setattr(outer.agreement, "CHUNK", 4)
    for found, expected in zip(on_threads(2, lambda ranks: trained(ranks, options, 9)), whole, strict=True):
        assert np.array_equal(flat(found[0]), expected)


def test_an_outer_step_that_was_interrupted_is_taken_before_the_next_one(monkeypatch):
    """Ctrl-C in a notebook while a rank is late; here with one rank, whose mean is its own difference."""
    monkeypatch.setattr(OuterLoop, "_land", interrupted_once(monkeypatch, OuterLoop._land))
    own = Arrays(np.ones((2, 3)), np.ones(5))

    def program(ranks):
        loop = OuterLoop(OuterOptions(1), ranks)
        loop.begin(own)
        for array in own.arrays:
            array += 1
        with pytest.raises(KeyboardInterrupt):
            loop.take(loop.tick()[0])
        loop.take(loop.tick()[0])

    on_threads(1, program)
    velocity, anchor = -1.0, 1 + 0.7 * (1 + 0.9)
    np.testing.assert_allclose(flat(own), anchor - 0.7 * 0.9 * (0.9 * velocity), rtol=0, atol=1e-12)


def interrupted_once(monkeypatch, land):
    def raises(loop, fragment):
        monkeypatch.setattr(OuterLoop, "_land", land)
        raise KeyboardInterrupt

    return raises


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("options", "lr", "momentum"),
    [({}, 0.7, 0.9), ({"outer": "average"}, 1.0, 0.0), ({"lr": 0.5, "momentum": 0.3}, 0.5, 0.3)],
)
def test_as_published(size, options, lr, momentum):
    found = on_threads(size, lambda ranks: flat(trained(ranks, OuterOptions(4, **options), 21)[0]))
    assert all(np.array_equal(own, found[0]) for own in found)
    np.testing.assert_allclose(found[0], reference(size, 4, 21, lr, momentum), rtol=0, atol=1e-12)


def test_a_window_of_one_step_is_synchronous_sgd():
    """SGD is linear in the gradient: the mean of the weights is the weights of the mean."""
    found = on_threads(3, lambda ranks: flat(trained(ranks, OuterOptions(1, lr=1, momentum=0), 10)[0]))
    weights = Arrays(np.linspace(-1, 1, 6).reshape(2, 3), np.ones(5))
    for step in range(10):
        for array in weights.arrays:
            array -= 0.1 * np.mean([gradient(rank, step, array) for rank in range(3)], axis=0)
    np.testing.assert_allclose(found[0], flat(weights), rtol=0, atol=1e-12)


def test_fragments_that_travel_behind_steps(monkeypatch):
    """Two fragments, half a window apart; each comes back two steps after it left, to half of what there is."""
    monkeypatch.setattr(outer, "_FRAGMENT", 5)
    found = on_threads(2, lambda ranks: flat(trained(ranks, OuterOptions(4, overlap=2), 13, finish=False)[0]))
    parts = [slice(0, 6), slice(6, 11)]
    anchor = np.concatenate([np.linspace(-1, 1, 6), np.ones(5)])
    velocity, replicas = np.zeros_like(anchor), [anchor.copy(), anchor.copy()]
    sent = {}
    for step in range(1, 14):
        for rank, replica in enumerate(replicas):
            for part, shape in zip(parts, ((2, 3), (5,)), strict=True):
                replica[part] -= 0.1 * gradient(rank, step - 1, replica[part].reshape(shape)).reshape(-1)
        for number, part in enumerate(parts):
            if step >= 4 + 2 * number and (step - 2 * number) % 4 == 0:
                sent[number] = step, np.mean([anchor[part] - replica[part] for replica in replicas], axis=0)
            if number in sent and sent[number][0] + 2 == step:
                mean = sent[number][1]
                velocity[part] = 0.9 * velocity[part] + mean
                anchor[part] -= 0.7 * (mean + 0.9 * velocity[part])
                for replica in replicas:
                    replica[part] = (anchor[part] + replica[part]) / 2
    for own, replica in zip(found, replicas, strict=True):
        np.testing.assert_allclose(own, replica, rtol=0, atol=1e-12)
    assert not np.allclose(found[0], found[1])


@pytest.mark.parametrize(("compression", "off"), [("int8", 0.03), ("bf16", 0.03), ("fp16", 0.003)])
def test_differences_in_fewer_bytes(compression, off):
    whole, packed = (
        on_threads(2, lambda ranks, how=how: flat(trained(ranks, OuterOptions(4, compression=how), 8)[0]))[0]
        for how in ("none", compression)
    )
    np.testing.assert_allclose(packed, whole, rtol=0, atol=off)
    assert not np.array_equal(packed, whole)


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize(("compression", "fragment"), [("none", 100), ("none", 5), ("int8", 100), ("fp16", 5)])
def test_ranks_that_take_other_numbers_of_steps_end_alike(overlap, compression, fragment, monkeypatch):
    """The one with fewer takes part in the others' outer steps until all have ended, also of fragments on their way."""
    monkeypatch.setattr(outer, "_FRAGMENT", fragment)
    options = OuterOptions(3, overlap=overlap, compression=compression)
    found = on_threads(3, lambda ranks: flat(trained(ranks, options, (5, 14, 9)[ranks.rank()])[0]))
    assert all(np.array_equal(own, found[0]) for own in found)
    assert np.isfinite(found[0]).all()


def test_the_end_of_a_window_is_the_mean_and_sent_once():
    def program(ranks):
        own, outer_steps = trained(ranks, OuterOptions(5), 7, finish=False)
        before = flat(own)
        outer_steps.finish()
        ended = flat(own)
        calls = Counter(ranks.calls)
        outer_steps.finish()
        assert np.array_equal(flat(own), ended)
        more = ranks.calls - calls
        return before, ended, sorted(more)

    (mine, ended, more), (other, *_) = on_threads(2, program)
    np.testing.assert_allclose(ended, (mine + other) / 2, rtol=0, atol=1e-12)
    assert more == [name for name in more if name.endswith(".word")] != []


def test_what_an_outer_step_has_made_alike_is_not_sent_again():
    def program(ranks):
        own, outer_steps = trained(ranks, OuterOptions(5), 12, finish=False)
        apart = outer_steps.lost()
        outer_steps.finish()
        assert outer_steps.lost() == 0
        own, outer_steps = trained(ranks, OuterOptions(5), 10, finish=False)
        before, calls = flat(own), Counter(ranks.calls)
        together = outer_steps.lost()
        outer_steps.finish()
        assert np.array_equal(flat(own), before)
        return apart, together, [name for name in ranks.calls - calls if not name.endswith(".word")]

    assert on_threads(2, program) == [(2, 0, [])] * 2


@pytest.mark.parametrize("overlap", [0, 2])
def test_a_training_goes_on_from_what_was_saved(overlap):
    options = OuterOptions(3, overlap=overlap)

    def whole(ranks):
        own, outer_steps = trained(ranks, options, 8)
        for step in range(8, 15):
            for array in own.arrays:
                array -= 0.1 * gradient(ranks.rank(), step, array)
            number, due = outer_steps.tick()
            if due:
                outer_steps.take(number)
        outer_steps.finish()
        return flat(own)

    def cut(ranks):
        own, outer_steps = trained(ranks, options, 8)
        saved = outer_steps.velocity() if ranks.rank() == 0 else {}  # the root alone has read them
        weights = Arrays(*(array.copy() for array in own.arrays))
        return flat(trained(ranks, options, 7, saved=saved, begin=8, weights=weights)[0])

    np.testing.assert_array_equal(on_threads(2, whole), on_threads(2, cut))


@pytest.mark.parametrize(("steps", "died"), [(7, False), (10, False), (7, True)])
def test_a_program_that_ends_between_outer_steps_is_told(steps, died, monkeypatch):
    monkeypatch.setattr(outer, "_ALL", [])

    def program(ranks):
        return trained(ranks, OuterOptions(5), steps, finish=False)[1]

    kept = on_threads(2, program)  # alive, as in a program at its end
    if died:
        monkeypatch.setattr(outer.sys, "last_value", RuntimeError(), raising=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        outer._say_what_is_lost()
    expected = ["the last 2 steps were learned by this rank's group alone"] if steps == 7 and not died else []
    assert [str(one.message)[:56] for one in said] == [one[:56] for one in expected]
    assert len(kept) == 2


def test_ranks_that_begin_apart_are_told():
    def program(ranks):
        with pytest.raises(AgreementError, match=r"w1 differs between rank 0 and rank 1.*broadcast"):
            OuterLoop(OuterOptions(3), ranks).begin(Arrays(np.zeros(3), np.full(2, float(ranks.rank()))))
        return True

    assert all(on_threads(2, program))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every must be an integer >= 1, got 0"),
        ({"every": 2.5}, "every must be an integer"),
        ({"outer": "adam"}, "outer must be one of nesterov, average, got 'adam'"),
        ({"overlap": 30}, "outer_overlap=30 must be less than every=30"),
        ({"lr": 0}, "outer_lr must be a positive, finite number"),
        ({"momentum": 1}, "outer_momentum must be in 0 .. 1"),
        ({"outer": "average", "momentum": 0.9}, "has no momentum"),
        ({"compression": "auto"}, "compression"),
        ({"op": "sum"}, "every= averages, but op is 'sum'"),
    ],
)
def test_options_are_refused(options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        OuterOptions(**{"every": 30, **options})


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"lr": 0.5}, "outer_lr"),
        ({"overlap": 2, "momentum": 0}, "outer_momentum and outer_overlap"),
        ({"outer": "average"}, "outer"),
        ({"process_set": "rank"}, "process_set"),
    ],
)
def test_what_belongs_to_outer_steps_is_not_left_out_in_silence(given, named):
    usual = {"outer": "nesterov", "lr": None, "momentum": None, "overlap": 0, "process_set": None}
    assert outer.wanted(None, **usual, compression="int8", op="sum") is None
    with pytest.raises(InvalidArgumentError, match=f"^{named} as given here belong to outer steps; add every=30"):
        outer.wanted(None, **{**usual, **given}, compression="none", op="average")


class Made(tuple):
    process_set_id = 1


class Hosts:
    """Two hosts of two ranks each, as Horovod sees them."""

    global_process_set = object()

    added = 0

    def add_process_set(self, ranks):
        self.added += 1
        return Made(ranks)


def group(size, local_size, process_set, horovod):
    def program(ranks):
        rank = ranks.rank()
        places = rank % local_size, local_size, rank // local_size, size // local_size
        return outer.group_of(Topology(rank, size, *places), ranks, process_set, horovod)

    return on_threads(size, program)


def test_groups_are_hosts(monkeypatch):
    horovod = Hosts()
    assert group(2, 1, None, horovod) == [outer.ALONE] * 2
    assert group(3, 3, "rank", horovod) == [outer.ALONE] * 3
    assert group(2, 2, None, horovod) == [horovod.global_process_set] * 2
    with pytest.raises(InvalidArgumentError, match="HOROVOD_DYNAMIC_PROCESS_SETS=1"):
        group(4, 2, None, horovod)
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
    monkeypatch.setattr(outer, "_HOSTS", {})
    assert group(4, 2, None, horovod) == [(0, 1), (0, 1), (2, 3), (2, 3)]
    added = horovod.added
    assert group(4, 2, None, horovod) == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert horovod.added == added > 0, "Horovod refuses a second process set of the same ranks"
    with pytest.raises(InvalidArgumentError, match="mpi4py alone"):
        group(2, 2, None, None)
    with pytest.raises(InvalidArgumentError, match="'rank' or a ProcessSet"):
        group(2, 1, "hosts", horovod)
