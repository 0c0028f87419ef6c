from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hvdkit.read.timeline import diagnose, summarize
from hvdkit.read.timeline.diagnosis import RULES
from hvdkit.read.timeline.measures import Distribution
from hvdkit.read.timeline.results import (
    Bandwidth,
    Batches,
    LastTensor,
    RankSkew,
    Skew,
    Steps,
    Summary,
    TensorSummary,
)

ATPESC = Path(__file__).parent.parent / "data" / "timelines" / "atpesc-2023-cpu-8ranks.json"


def every(value, count=100):
    return Distribution(count, value * count, value, value, value, value)


def reductions(negotiate, whole, tensor="", size=None):
    phases = {"negotiate": every(negotiate), "whole": every(whole)}
    return TensorSummary(tensor, "ALLREDUCE", "float32", None, 100, size, 0, phases, whole, 100, 0)


STEPS = Steps(
    count=100,
    tensors=20,
    bytes=10 << 20,
    duration=every(100_000.0),
    communication=every(30_000.0),
    idle=every(30_000.0),
    first=120_000.0,
    missed=0.0,
    last=LastTensor("first.weight", 1.0, every(2000.0)),
    begins=np.arange(0.0, 1e7, 1e5),
)
BATCHES = Batches(128 << 20, 300, 100, 100, 4.0, every(5.0), every(2.5 * (1 << 20)), every(0.02))
SKEW = Skew(50, every(5000.0), [RankSkew(0, 26, every(4000.0)), RankSkew(1, 24, every(4000.0))])
HEALTHY = Summary(
    path="timeline.json",
    start_time_since_epoch=0,
    since=0.0,
    until=1e7,
    events=1,
    operations=2000,
    missed=20,
    ranks=2,
    communication=3e6,
    busy=4e6,
    steps=STEPS,
    kinds=[reductions(1000.0, 10_000.0)],
    tensors=[reductions(1000.0, 10_000.0, f"layer.{i}", 1 << 19) for i in range(20)],
    batches=BATCHES,
    bandwidth=Bandwidth(1e9, 1e9, 2e9, 2e9, 1e6),
    cycle=every(1000.0),
    skew=SKEW,
    dropped={},
)


def steps(**changes):
    return replace(HEALTHY, steps=replace(STEPS, **changes))


def batches(**changes):
    return replace(HEALTHY, batches=replace(BATCHES, **changes))


def skew(*last, late=5000.0):
    ranks = [RankSkew(rank, count, every(late)) for rank, count in enumerate(last)]
    return replace(HEALTHY, skew=Skew(50, every(late), ranks))


def negotiation(wait, whole, cycle=1000.0):
    return replace(HEALTHY, kinds=[reductions(wait, whole)], cycle=every(cycle) if cycle else None)


def largest(size, total):
    tensors = [*HEALTHY.tensors, reductions(1.0, 2.0, "embedding", size)]
    return replace(HEALTHY, tensors=tensors, steps=replace(STEPS, bytes=total))


def one_batch(size, tensors=20.0):
    return replace(
        HEALTHY,
        steps=replace(STEPS, bytes=size),
        batches=replace(BATCHES, fused=100, single=0, small=0, per_step=1.0, tensors=every(tensors)),
    )


CASES = {
    "small-tensors-alone": (
        batches(single=400, small=330),
        batches(single=400, small=150),
        "330 exchanges (47%",
        "CYCLE_TIME",
    ),
    "cycle-bound": (
        negotiation(1100.0, 1500.0),
        negotiation(700.0, 1500.0),
        "about one cycle (1.00 ms",
        "CYCLE_TIME=0.2",
    ),
    "waiting-for-ranks": (negotiation(9000.0, 12_000.0), negotiation(5000.0, 12_000.0), "75%", "CACHE_CAPACITY=0"),
    "fusion-threshold-small": (batches(fill=every(0.9)), batches(fill=every(0.6)), "90%", "FUSION_THRESHOLD=268435456"),
    "fusion-threshold-large": (one_batch(100 << 20), one_batch(1 << 20), "105 MB", "FUSION_THRESHOLD=16777216"),
    "one-large-tensor": (
        largest(8 << 20, 10 << 20),
        largest(4 << 20, 10 << 20),
        "80% of the bytes of a step: embedding",
        "fp16",
    ),
    "one-tensor-last": (
        steps(last=LastTensor("conv.weight", 0.95, every(15_000.0))),
        steps(last=LastTensor("conv.weight", 0.5, every(15_000.0))),
        "95% of the steps end with conv.weight, 15.0 ms (15%",
        "num_groups",
    ),
    "one-rank-last": (skew(2, 45), skew(2, 45, late=1500.0), "Rank 1 was the last in 90% of 50", "rank 1"),
    "cache-misses": (steps(missed=0.3), steps(missed=0.1), "30%", "HOROVOD_CACHE_CAPACITY"),
    "communication-bound": (
        steps(communication=every(60_000.0)),
        steps(communication=every(40_000.0)),
        "60%",
        "compression",
    ),
    "gaps": (
        steps(idle=every(70_000.0)),
        steps(idle=every(40_000.0)),
        "70.0 ms of a step of 100 ms (70%)",
        "data loading",
    ),
    "first-step": (steps(first=900_000.0), steps(first=140_000.0), "900 ms, 9.0 times the usual 100 ms", "first step"),
}


def test_every_rule_has_a_case():
    assert list(CASES) == [rule.name for rule in RULES]


def test_a_healthy_recording_has_no_finding():
    assert diagnose(HEALTHY) == []


@pytest.mark.parametrize("name", CASES)
def test_a_rule_says_its_number_and_the_setting(name):
    triggers, _, number, setting = CASES[name]
    (found,) = diagnose(triggers)
    assert found.rule == name
    assert number in found.sentence
    assert setting in found.advice


@pytest.mark.parametrize("name", CASES)
def test_a_rule_keeps_silent_below_its_limit(name):
    assert diagnose(CASES[name][1]) == []


@pytest.mark.parametrize("field", ["steps", "batches", "bandwidth", "cycle", "skew"])
def test_what_a_recording_lacks_is_not_diagnosed(field):
    assert diagnose(replace(HEALTHY, **{field: None})) == []


def test_one_of_two_cases_of_negotiation_is_said():
    without_marks = negotiation(1100.0, 1500.0, cycle=None)
    (found,) = diagnose(without_marks)
    assert "Horovod's default; record with --mark-cycles" in found.sentence


def test_a_short_negotiation_is_not_called_a_cycle():
    assert diagnose(negotiation(100.0, 150.0)) == []


def test_one_cycle_time_is_advised_not_two():
    both = replace(negotiation(1100.0, 1500.0), batches=replace(BATCHES, single=400, small=330))
    assert [finding.rule for finding in diagnose(both)] == ["small-tensors-alone"]


def test_names_with_braces_are_text():
    summary = steps(last=LastTensor("{0.__class__}", 1.0, every(15_000.0)))
    assert "{0.__class__}" in diagnose(summary)[0].sentence


def test_the_public_run_on_8_ranks():
    """What a reader of the file sees: one tensor is nearly all bytes, small ones go alone, the rest is waiting."""
    found = {finding.rule: finding.sentence for finding in diagnose(summarize(ATPESC))}
    assert set(found) == {
        "small-tensors-alone",
        "waiting-for-ranks",
        "one-large-tensor",
        "one-tensor-last",
        "gaps",
        "first-step",
    }
    assert "98%" in found["one-large-tensor"]
    assert "HorovodAllreduce_grads_4_0 (4.72 MB)" in found["one-large-tensor"]
    assert "506 exchanges (53% of all, 3.3 per step)" in found["small-tensors-alone"]
    assert "175 ms" in found["gaps"]
