"""What a trial of real steps finds, by a clock that the tests set."""

import itertools
import logging

import numpy as np
import pytest

from hvdkit.core import compression
from hvdkit.core.communicator import Alone

KINDS = ("none", "bf16", "int8")


def trial(monkeypatch, kinds, seconds):
    """The kinds that a whole trial went through, and the trial; ``seconds`` says what a step of a kind takes."""
    made, now, seen = compression.CompressionTrial(kinds), 0.0, []
    monkeypatch.setattr(compression, "clock", lambda: now)
    while not made.over:
        made.begin()
        seen.append(made.kind)
        now += seconds(made.kind, len(seen))
        made.end_on(Alone())
    return made, seen


@pytest.mark.parametrize(
    ("took", "wanted"),
    [
        ((1.0, 0.5, 0.3), "int8"),
        ((1.0, 0.5, 0.48), "bf16"),  # 4 % are not worth its rounding
        ((1.0, 0.96, 0.96), "none"),
        ((1.0, 0.96, 0.94), "int8"),
        ((1.0, 1.2, 1.5), "none"),
    ],
)
def test_a_kind_that_rounds_more_has_to_be_shorter_by_5_percent(monkeypatch, took, wanted):
    made, seen = trial(monkeypatch, KINDS, lambda kind, _: took[KINDS.index(kind)])
    assert made.kind == wanted and {kind: seen.count(kind) for kind in KINDS} == {"none": 10, "bf16": 9, "int8": 9}


def test_kinds_take_turns_in_another_order_each_round(monkeypatch):
    _, seen = trial(monkeypatch, KINDS, lambda kind, _: 1.0)
    assert [seen[place : place + 3] for place in (0, 3, 6)] == [
        ["none", "bf16", "int8"],
        ["bf16", "int8", "none"],
        ["int8", "none", "bf16"],
    ]


@pytest.mark.parametrize("kinds", [KINDS, ("none", "int8")])
def test_noise_and_what_happens_in_every_third_step_choose_nothing(monkeypatch, kinds):
    """And in a slow job one kind is taken in spite of both."""
    taken = {"none": 0, "bf16": 0, "int8": 0}
    for seed in range(200):
        noise = np.random.default_rng(seed).normal(1, 0.04, 100)
        made, _ = trial(monkeypatch, kinds, lambda kind, step, noise=noise: noise[step] + (step % 3 == 0))
        taken[made.kind] += 1
        half = {"none": 1.0, "bf16": 0.5, "int8": 0.5}
        slow, _ = trial(monkeypatch, kinds, lambda kind, step, noise=noise, half=half: half[kind] * noise[step])
        assert slow.kind == kinds[1]
    assert taken["none"] >= 190


def test_first_steps_and_a_pause_do_not_count(monkeypatch):
    """Steps that compile or make buffers, a validation between two of them."""
    seconds = {"none": 1.0, "bf16": 0.5, "int8": 0.5}
    made, _ = trial(monkeypatch, KINDS, lambda kind, step: seconds[kind] + 60 * (step < 7 or step == 11))
    assert made.kind == "bf16"


def test_an_exchange_that_begins_again_is_one(monkeypatch):
    made, times = compression.CompressionTrial(("none", "int8")), itertools.count()
    monkeypatch.setattr(compression, "clock", lambda: float(next(times)))
    for number in range(19):
        for _ in range(1 + number % 2):
            made.begin()
        made.end_on(Alone())
    assert made.over and made.kind == "none"
    made.begin()
    assert next(times) == 19 + 9  # nobody asked it since


def test_the_first_rank_says_what_it_found(monkeypatch, caplog):
    class Second(Alone):
        def rank(self):
            return 1

    with caplog.at_level(logging.WARNING, "hvdkit"):
        trial(monkeypatch, KINDS, lambda kind, _: {"none": 0.714, "bf16": 0.39, "int8": 0.345}[kind])
    assert caplog.messages == [
        "hvdkit: compression=\"auto\" takes 'int8' from now on: a step takes 714 ms with 'none', 390 ms with 'bf16', "
        "345 ms with 'int8'."
    ]
    caplog.clear()
    monkeypatch.setattr(Alone, "rank", Second.rank)
    trial(monkeypatch, KINDS, lambda kind, _: 1.0)
    assert not caplog.messages


def test_other_ranks_try_anew(monkeypatch):
    made, _ = trial(monkeypatch, KINDS, lambda kind, _: {"none": 1.0, "bf16": 0.9, "int8": 0.5}[kind])
    assert made.over and made.kind == "int8"
    compression.start_anew()
    assert not made.over and made.kind == "none"
    assert made.end() is None  # no exchange has begun
