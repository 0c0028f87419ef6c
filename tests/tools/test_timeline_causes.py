from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import replace as changed
from timeline_files import ATPESC, allreduce, metadata, write

from hvdkit.cli import run
from hvdkit.read.causes import by_cost
from hvdkit.read.timeline import summarize
from hvdkit.read.timeline.results import Batches, Distribution, Steps, TensorSummary, TimelineSummary, causes, otherwise


def every(value, count=100):
    return Distribution(count, value * count, value, value, value, value)


def reductions(negotiate, whole, tensor="", size=None):
    phases = {"negotiate": every(negotiate), "whole": every(whole)}
    return TensorSummary(tensor, "ALLREDUCE", "float32", None, 100, size, phases)


STEPS = Steps(
    count=100,
    tensors=20,
    bytes=10 << 20,
    duration=every(100_000.0),
    communication=every(8_000.0),
    idle=every(30_000.0),
    first=120_000.0,
    missed=0.0,
    late=500.0,
    negotiation=800.0,
    begins=np.arange(0.0, 1e7, 1e5),
)
BATCHES = Batches(300, 100, 100, 40_000.0, 0.9, every(5.0), every(2.5 * (1 << 20)))
HEALTHY = TimelineSummary(
    path="timeline.json",
    start_time_since_epoch=0,
    origin=0.0,
    duration=1e7,
    events=1,
    operations=2000,
    missed=20,
    ranks=2,
    communication=3e6,
    setup=0.0,
    steps=STEPS,
    tensors=[reductions(1000.0, 10_000.0, f"layer.{i}", 1 << 19) for i in range(20)],
    batches=BATCHES,
    cycle=every(1000.0),
    costs={0: 300.0, 1: 200.0},
    dropped={},
)


def steps(**changes):
    return changed(HEALTHY, steps=replace(STEPS, **changes))


def batches(**changes):
    return changed(HEALTHY, batches=replace(BATCHES, **changes))


def late(*costs):
    return changed(HEALTHY, costs=dict(enumerate(costs)))


def unmeasured(**changes):
    return changed(steps(**changes), costs=None)


CASES = {
    "late": (late(100.0, 13_000.0), late(100.0, 1900.0), "Rank 1 comes late", "--explain-job"),
    "random-late": (late(6000.0, 7000.0), late(900.0, 1000.0), "Now one rank is late", "Even out"),
    "negotiation": (steps(negotiation=11_000.0), steps(negotiation=9000.0), "the next cycle", "HOROVOD_CYCLE_TIME=0.2"),
    "small-tensors": (
        batches(little=3000, little_time=500_000.0),
        batches(little=3000, little_time=190_000.0),
        "30 times per step",
        "num_groups",
    ),
    "large-tensors": (
        steps(communication=every(60_000.0)),
        steps(communication=every(10_000.0)),
        "10.5 MB per step",
        "backward_passes_per_step",
    ),
    "setup": (changed(HEALTHY, setup=4e6), changed(HEALTHY, setup=1e5), "NCCL is set up", "NCCL_SOCKET_IFNAME"),
}


def worth(summary):
    return by_cost(causes(summary))


def test_a_healthy_recording_has_no_cause():
    assert worth(HEALTHY) == []


@pytest.mark.parametrize("kind", CASES)
def test_a_cause_says_what_it_is_and_the_setting(kind):
    (found,) = worth(CASES[kind][0])
    assert found.kind == kind
    assert CASES[kind][2] in found.what
    assert CASES[kind][3] in found.advice


@pytest.mark.parametrize("kind", CASES)
def test_a_cause_that_costs_little_is_not_said(kind):
    assert worth(CASES[kind][1]) == []


def test_without_a_cause_the_limits_are_said():
    """9 % in collectives and 6 % of negotiation are no cause, and more than the 2 % from which on one is named."""
    summary = steps(communication=every(10_000.0), negotiation=6000.0)
    assert worth(summary) == []
    assert "collectives and negotiation from 10%" in otherwise(summary)


@pytest.mark.parametrize("field", ["steps", "batches", "cycle", "costs"])
def test_what_a_recording_lacks_is_no_cause(field):
    assert worth(changed(HEALTHY, **{field: None})) == []


def test_without_ticks_it_says_how_to_record_the_rank_and_with_them_it_does_not():
    (found,) = worth(unmeasured(late=20_000.0))
    assert found.ranks == () and "--skew" in found.advice
    assert "--skew" not in worth(CASES["late"][0])[0].advice


def test_misses_are_the_cause_unless_the_cache_was_off():
    changing, off = steps(negotiation=20_000.0, missed=0.5), steps(negotiation=20_000.0, missed=1.0)
    assert "50% of the operations" in worth(changing)[0].what
    assert "cache" not in worth(off)[0].what and "CACHE" not in worth(off)[0].advice


def once(names, kind="ALLREDUCE"):
    """A recording with one operation of each of these names, in this order."""
    events = metadata(names)
    for pid in range(1, len(names) + 1):
        events += [{**event, "name": event["name"].replace("ALLREDUCE", kind)} if "name" in event else event
                   for event in allreduce(pid, 1000 + 300 * pid, 50)]  # fmt: skip
    return events


@pytest.mark.parametrize("kind", ["ALLREDUCE", "BROADCAST"])
def test_of_a_single_step_nothing_is_claimed(tmp_path, kind):
    names = [f"h.{layer}.{part}" for layer in range(79, -1, -1) for part in ("weight", "bias")]
    summary = summarize(write(tmp_path / "timeline.json", once(names, kind)))
    assert summary.operations == len(names) and worth(summary) == []
    assert otherwise(summary).startswith("It cannot tell: there are no whole steps")


def test_names_with_braces_are_text():
    summary = steps(communication=every(60_000.0))
    tensors = [*HEALTHY.tensors, reductions(1.0, 2.0, "{0.__class__}", 8 << 20)]
    (found,) = worth(changed(summary, tensors=tensors))
    assert "80% of the bytes are {0.__class__}" in found.evidence


def test_the_public_run_on_8_ranks():
    """Most bytes are one tensor's, and ranks wait for one another; the cycles and the first step cost little."""
    large, waiting = worth(summarize(ATPESC))
    assert (large.kind, waiting.kind) == ("large-tensors", "late")
    assert large.lost_s == pytest.approx(0.0267, rel=0.01)
    assert "98% of the bytes" in large.evidence and "HorovodAllreduce_grads_4_0" in large.evidence
    assert "--skew" in waiting.advice


# Timelines of a kind


def ticked(pid, ts, late, collective=100, tensors=1):
    """An allreduce outside the cache: rank r is ready ``late[r]`` microseconds after ``ts``."""
    begin, end, *rest = allreduce(pid, ts, max(late) + 1, collective)
    ticks = [{"ph": "X", "name": str(rank), "ts": ts + one, "dur": 0, "pid": pid} for rank, one in enumerate(late)]
    return [begin, *sorted(ticks, key=lambda tick: tick["ts"]), end, *rest]


def test_the_job_whose_rank_1_waits_for_its_input_in_two_of_three_batches(tmp_path, capsys):
    """Recorded with --skew: 100 % of the operations are outside the cache, which is no finding."""
    events, now = metadata(["grad.0", "grad.1", "grad.2"]), 1000
    for step in range(60):
        late = (0, 20_000) if step % 3 else (1500 * (step % 2), 0)
        for pid in (1, 2, 3):
            events += ticked(pid, now + 100 * pid, late)
        now += 30_000
    path = write(tmp_path / "timeline.json", events)
    (found,) = worth(summarize(path))
    assert (found.kind, found.ranks) == ("late", (1,))
    assert found.lost_s == pytest.approx(0.020 * 2 / 3, rel=0.05) and found.share == pytest.approx(0.45, abs=0.03)
    assert run(["timeline", "summary", str(path)]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("Verdict: Rank 1 comes late, and the others wait. It costs 13.") and "per step (4" in first
    assert "--skew" not in "".join(rest) and "outside the cache" not in "".join(rest)


def nccl(pid, ts, init=0, copy=20, collective=30):
    """A fused allreduce over NCCL, in the order of Horovod's activities."""
    phases = [("INIT_NCCL", init), ("QUEUE", 5), ("MEMCPY_IN_FUSION_BUFFER", copy), ("NCCL_ALLREDUCE", collective)]
    begin, end, start, *_ = allreduce(pid, ts)
    events, now = [begin, end, start], start["ts"]
    for name, length in [*phases, ("MEMCPY_OUT_FUSION_BUFFER", copy)]:
        if length:
            events += [
                {"ph": "B", "name": name, "ts": now, "pid": pid},
                {"ph": "E", "ts": (now := now + length), "pid": pid},
            ]
    return [*events, {"ph": "E", "ts": now, "pid": pid, "args": {"dtype": "float32", "shape": "[25]"}}]


def test_nccl_is_set_up_and_neither_copied_nor_compiled(tmp_path, capsys):
    """Set-up 4.32 s of 6.7 s, copies 2 x 45 ms, collectives 1.2 %: nothing is advised about these."""
    events, now = metadata(["grad.0", "grad.1"]), 1000
    for step in range(100):
        for pid in (1, 2):
            events += nccl(pid, now, 0 if step else 4_320_000, 450, 800)
        now += 23_000 if step else 4_400_000
    path = write(tmp_path / "timeline.json", events)
    summary = summarize(path)
    assert summary.setup == pytest.approx(4.32e6)
    (found,) = worth(summary)
    assert found.kind == "setup" and found.lost_s == pytest.approx(4.32) and not found.per_step
    assert run(["timeline", "summary", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Verdict: NCCL is set up before the first collective. It costs 4.32 s once (6")
    assert "80.0 ms (1.2%) in collectives, 4.32 s (65%) in NCCL's set-up" in out
    assert "fp16" not in out and "ompil" not in out
    assert run(["timeline", "summary", str(path), "--json"]) == 0
