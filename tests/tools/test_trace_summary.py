"""What the time was spent on, on traces whose unions are known."""

import json
from pathlib import Path

import numpy as np
import pytest
from trace_files import data, event, gloo, kernel, step, wait, write

from hvdkit.cli import run
from hvdkit.errors import DataError, InvalidArgumentError
from hvdkit.read.causes import by_cost
from hvdkit.read.spans import common, joined, length, without
from hvdkit.read.trace import summarize
from hvdkit.read.trace.results import otherwise

TRACES = Path(__file__).parents[1] / "data" / "traces"


def times(path, *events):
    return summarize([write(path, *events)]).ranks[0]


def check(found, **expected):
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, abs=1e-6), name


def test_ddp_on_cpus(tmp_path):
    """Step 0-100: loading 0-10 (with an operator inside), computing 10-60, gloo 50-80, optimizer 80-90."""
    found = times(
        tmp_path / "t.json",
        step(5, 0, 100),
        data(0, 10), event("aten::stack", 2, 3),
        event("aten::mm", 10, 50), event("aten::add", 20, 10),
        event("c10d::allreduce_", 50, 1), gloo(50, 30),
        event("aten::mul", 80, 10),
    )  # fmt: skip
    check(
        found.times, window=100, data=10, exposed_data=10, computation=59, communication=30, overlapped=9, exposed=21,
        other=10, copies=0,
    )  # fmt: skip
    assert found.notes == ()
    assert [one.number for one in found.steps] == [5]
    check(found.steps[0], duration=100, computation=59, exposed=21, data=10)


def test_the_wait_for_horovod_is_exposed_and_said_to_be_all_that_is_seen(tmp_path):
    found = times(
        tmp_path / "t.json", step(0, 0, 50), event("aten::mm", 0, 20), wait(20, 10), event("aten::set_", 22, 1)
    )
    check(found.times, computation=20, communication=10, overlapped=0, exposed=10, other=20)
    assert "timeline merge" in found.notes[0]


def test_a_merged_timeline_shows_what_the_wait_hides(tmp_path):
    found = times(
        tmp_path / "t.json", step(0, 0, 50), event("aten::mm", 0, 20), wait(20, 10),
        event("ALLREDUCE", 4, 24, "horovod", tid=1, pid=43), event("NEGOTIATE_ALLREDUCE", 2, 2, "horovod", 1, 43),
        event("MPI_ALLREDUCE", 5, 20, "horovod", tid=1, pid=43), event("MPI_ALLREDUCE", 5, 20, "horovod", 2, 43),
    )  # fmt: skip
    check(found.times, communication=25, overlapped=15, exposed=10)
    assert found.notes == ()
    assert [one.name for one in found.operators] == ["aten::mm", "hvdkit:allreduce_wait"], "fused tensors repeat times"


@pytest.mark.parametrize(
    ("why", "host", "says"),
    [
        ("synchronising", event("aten::item", 2, 20), "(aten::item)"),
        ("synchronising", event("cudaStreamSynchronize", 2, 20, "cuda_runtime"), "(cudaStreamSynchronize)"),
        ("copying", event("Memcpy HtoD", 2, 20, "gpu_memcpy", tid=7, pid=0), "copied between host and GPU"),
        ("launching", event("cudaLaunchKernel", 2, 20, "cuda_runtime"), "host-bound"),
        ("loading", data(2, 30), None),
    ],
)
def test_a_gpu_that_has_nothing_to_do_is_the_first_line_and_says_why(tmp_path, why, host, says):
    summary = summarize([write(tmp_path / "t.json", step(0, 0, 40), host, kernel("sgemm", 33, 4))])
    found = summary.ranks[0].gpu
    check(found, idle=36)
    assert found.idle == found.loading + found.copying + found.synchronising + found.launching
    assert getattr(found, why) >= 19.9
    first = summary.causes[0]
    assert first.kind == ("idle-gpu" if says else "input-everywhere")
    if says:
        assert says in first.what and first.lost_s == pytest.approx(0.036) and first.share == pytest.approx(0.9)


def test_an_idle_gpu_that_copies_while_a_batch_is_loaded_copies(tmp_path):
    events = data(2, 20), event("Memcpy HtoD", 12, 20, "gpu_memcpy", tid=7, pid=0)
    (rank,) = summarize([write(tmp_path / "t.json", step(0, 0, 40), *events, kernel("sgemm", 36, 4))]).ranks
    check(rank.gpu, idle=36, copying=20, loading=10, synchronising=0, launching=6)


def test_of_several_gpus_the_share_is_one_that_all_have(tmp_path):
    """Of 40 ms rank 0 loads for 14 and is host-bound for 12, rank 1 is host-bound for 16."""
    loads = write(tmp_path / "r0.json", step(0, 0, 40), data(1, 14), kernel("sgemm", 15, 14), rank=0)
    waits = write(tmp_path / "r1.json", step(0, 0, 40), kernel("sgemm", 1, 24), rank=1)
    (idle,) = (cause for cause in summarize([loads, waits]).causes if cause.kind == "idle-gpu")
    assert idle.what.startswith("Every GPU is idle for at least 30%") and idle.share == pytest.approx(0.3)


def test_a_gpu_that_computes_or_communicates_nearly_always_is_not_idle(tmp_path):
    busy = kernel("sgemm", 1, 20), kernel("ncclDevKernel_AllReduce", 21, 18)
    found = summarize([write(tmp_path / "t.json", step(0, 0, 40), event("aten::item", 1, 38), *busy)])
    check(found.ranks[0].gpu, idle=2)
    assert not any(one.kind == "idle-gpu" for one in found.causes)


def test_without_a_cause_the_limits_are_said(tmp_path):
    """Communication of 9 % of a step is no cause, and more than the 2 % from which on a late rank is one."""
    paths = [
        write(tmp_path / f"trace-{rank}-of-2.json", step(0, 0, 100), event("aten::mm", 0, 91), gloo(91, 9))
        for rank in range(2)
    ]
    found = summarize(paths)
    assert not by_cost(found.causes)
    assert "collectives and an idle GPU from 10%" in otherwise(found)


def test_gpus_streams_and_copies(tmp_path):
    """Two streams that compute at once count once; NCCL's kernel counts, the calls that start it do not."""
    found = times(
        tmp_path / "t.json",
        step(0, 0, 40),
        event("aten::mm", 0, 4), event("aten::bmm", 1, 2),
        event("nccl:all_reduce", 5, 20, "user_annotation"), event("c10d::allreduce_", 5, 20),
        kernel("sgemm", 10, 10, stream=7), kernel("bmm_kernel", 15, 10, stream=20),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 20, 30, stream=30),
        event("Memcpy HtoD", 2, 3, "gpu_memcpy", tid=7, pid=0),
        event("ProfilerStep#0", 10, 38, "gpu_user_annotation", tid=7, pid=0),
    )  # fmt: skip
    check(found.times, window=50, computation=15, communication=30, overlapped=5, exposed=25, copies=3, other=7)
    assert found.computed_by == "GPU kernels"
    operators = {one.name: one for one in found.operators}
    check(operators["aten::mm"], self_ms=2)
    check(operators["sgemm"], self_ms=10)
    assert operators["sgemm"].kind == "kernel" and operators["Memcpy HtoD"].kind == "copy"
    assert operators["ncclDevKernel_AllReduce_Sum_f32_RING_LL"].kind == "communication"
    assert len(found.steps) == 1


SELF_TIMES = {
    "nested, once in itself, and in another thread": (
        [event("outer", 0, 100), event("inner", 10, 20), event("outer", 40, 50), event("inner", 50, 10),
         event("inner", 0, 100, tid=8)],
        {"outer": (70, 2), "inner": (130, 3)},
    ),
    "communication in the background holds nothing": (
        [event("node", 0, 20), gloo(5, 40), event("aten::mm", 10, 5), event("z", 30, 5)],
        {"node": (15, 1), "gloo:all_reduce": (40, 1), "z": (5, 1)},
    ),
    "a range that outlasts what it began in holds nothing": (
        [event("outer", 0, 20), event("span", 5, 40, "user_annotation"), event("aten::mm", 10, 5)],
        {"outer": (15, 1), "span": (40, 1)},
    ),
    "launch --torch-profile begins a step within step()": (
        [step(0, 0, 50), step(1, 50, 50), event("Optimizer.step#SGD.step", 20, 31, "user_annotation"), wait(21, 20),
         event("aten::add", 42, 5)],
        {"Optimizer.step#SGD.step": (6, 1)},
    ),
    "whole microseconds may let a call end after its caller": (
        [{**event("outer", 0, 0), "ts": 10, "dur": 5}, {**event("inner", 0, 0), "ts": 12, "dur": 4}],
        {"outer": (0.002, 1)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SELF_TIMES)
def test_self_times_and_calls(tmp_path, case):
    events, expected = SELF_TIMES[case]
    operators = {one.name: (one.self_ms, one.calls) for one in times(tmp_path / "t.json", *events).operators}
    for name, (self_ms, calls) in expected.items():
        assert operators[name] == (pytest.approx(self_ms, abs=1e-6), calls), name


def test_steps_with_the_same_number_and_what_lies_outside(tmp_path):
    """The number 7 appears for two steps; what is before the first and after the last does not count."""
    found = times(
        tmp_path / "t.json",
        event("before", -20, 10), step(7, 0, 10), step(7, 10, 30), step(8, 40, 10), event("after", 60, 5),
        event("aten::mm", 12, 10), event("aten::mm", 41, 2),
    )  # fmt: skip
    assert [(one.number, one.duration) for one in found.steps] == [(7, 10), (7, 30), (8, 10)]
    assert [one.computation for one in found.steps] == pytest.approx([0, 10, 2])
    assert [one.name for one in found.operators] == ["aten::mm"]
    check(found.times, window=50, computation=12)


def test_a_step_of_thousands_of_digits_is_no_step(tmp_path):
    found = times(tmp_path / "t.json", step(1, 0, 10), step("9" * 5000, 10, 10), event("aten::mm", 2, 5))
    assert [one.number for one in found.steps] == [1]


def ranks(tmp_path, *lengths, **options):
    """Rank r computes lengths[r] ms and then meets the others at 100 ms; twice."""
    paths = []
    for rank, computing in enumerate(lengths):
        events = []
        for number in range(2):
            at = 110 * number + 1e6 * rank  # clocks that have nothing in common
            events += [step(number, at, 110), event("aten::mm", at, computing), wait(at + computing, 100 - computing)]
        paths.append(write(tmp_path / f"trace-{rank}-of-{len(lengths)}.json.gz", *events, **options))
    return paths


def test_skew_between_ranks_needs_no_common_clock(tmp_path):
    paths = ranks(tmp_path, 40, 90, 60)
    found = summarize([paths[2], paths[0], paths[1]])
    assert [rank.rank for rank in found.ranks] == [0, 1, 2]
    assert [one.waiting for one in found.ranks] == pytest.approx([50, 0, 30])
    assert [one.cost for one in found.ranks] == pytest.approx([0, 30, 0]), "behind the typical rank"
    (cause,) = found.causes
    assert (cause.kind, cause.ranks) == ("compute", (1,)) and cause.lost_s == pytest.approx(0.03)
    assert summarize([tmp_path]) == summarize(paths)


@pytest.mark.parametrize(("marked", "kind"), [(data, "input"), (lambda start, length: event("x", 0, 0), "host")])
def test_the_job_whose_rank_1_waits_for_its_input_in_two_of_three_batches(marked, kind, tmp_path, capsys):
    """Rank 0 waits in most steps: that is no communication."""
    for rank in (0, 1):
        events = []
        for number in range(6):
            slow = 20 if number % 3 else 0
            load, at = (slow if rank else 0.1), 30 * number
            events += [step(number, at, slow + 6), marked(at, load), event("aten::mm", at + load, 4)]
            events += [wait(at + load + 4, slow + 2 - load)]
        write(tmp_path / f"trace-{rank}-of-2.json", *events)
    assert run(["trace", "summary", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "Verdict: Rank 1 waits for its input. " if kind == "input" else "Verdict: Rank 1 comes late, neither "
    )
    assert "It costs 13." in out.splitlines()[0]
    (row,) = (line for line in out.splitlines() if "waiting for other ranks" in line)
    assert row.split()[4].startswith("13.") and row.split()[6].startswith("0.0")
    (cause,) = summarize([tmp_path]).causes
    assert (cause.kind, cause.ranks) == (kind, (1,))


def test_the_hosts_calls_of_c10d_are_no_communication(tmp_path):
    found = times(
        tmp_path / "t.json", step(0, 0, 50), event("c10d::allreduce_", 5, 30), event("record_param_comms", 5, 30),
        kernel("sgemm", 5, 40),
    )  # fmt: skip
    check(found.times, communication=0)


def test_one_trace_does_not_call_waiting_communication(tmp_path, capsys):
    path = write(tmp_path / "trace-0-of-2.json", step(0, 0, 50), event("aten::mm", 0, 10), wait(10, 35))
    assert run(["trace", "summary", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Verdict: A rank exchanges data or waits for a later one")
    assert "communication or waiting" in out and "Give the traces of all ranks" in out


def test_skew_that_cannot_be_told_says_why(tmp_path):
    paths = ranks(tmp_path, 40, 90)
    assert "one trace" in summarize(paths[:1]).skew_note
    other = write(tmp_path / "other-1-of-2.json", step(0, 0, 10), event("aten::mm", 0, 5))
    assert "no collective" in summarize([paths[0], other]).skew_note
    nameless = write(tmp_path / "nameless.json", step(0, 0, 10), wait(0, 5))
    assert "whose" in summarize([paths[0], nameless]).skew_note


def test_two_files_of_one_rank_and_empty_directories_are_refused(tmp_path):
    (path, _) = ranks(tmp_path, 40, 90)
    again = write(tmp_path / "again-0-of-2.json", step(0, 0, 10), wait(0, 5))
    with pytest.raises(InvalidArgumentError, match="both of rank 0"):
        summarize([path, again])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"\*\.json"):
        summarize([tmp_path / "empty"])


def test_traces_of_jobs_of_different_size_are_not_one_run(tmp_path):
    first = write(tmp_path / "trace-0-of-4.json", step(0, 0, 10), wait(0, 5))
    second = write(tmp_path / "trace-1-of-2.json", step(0, 0, 10), wait(0, 5))
    with pytest.raises(InvalidArgumentError, match=r"not of one run: .*of 4 ranks and .*of 2 ranks"):
        summarize([first, second])


def test_intervals_against_a_grid():
    """Sets of time on a grid of whole numbers, where counting cells gives the answer."""
    random = np.random.default_rng(3)
    for _ in range(200):
        sets, cells = [], []
        for _ in range(2):
            count = int(random.integers(0, 6))
            starts = random.integers(0, 30, count).astype(float)
            ends = starts + random.integers(0, 8, count)
            cell = np.zeros(40, bool)
            for start, end in zip(starts.astype(int), ends.astype(int), strict=True):
                cell[start:end] = True
            sets.append(joined((starts, ends)))
            cells.append(cell)
        assert length(common(*sets)) == np.sum(cells[0] & cells[1])
        assert length(without(*sets)) == np.sum(cells[0] & ~cells[1])
        assert length(joined(*sets)) == np.sum(cells[0] | cells[1])


def test_the_command(tmp_path, capsys):
    ranks(tmp_path, 40, 90)
    assert run(["trace", "summary", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "rank 0 of 2: 2 steps (0 to 1)" in out and "hvdkit:allreduce_wait" in out
    assert run(["trace", "summary", str(tmp_path), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["ranks"][1]["times"]["exposed_s"] == pytest.approx(0.02)
    assert values["ranks"][0]["waiting_s"] == pytest.approx(0.05)


def test_mistakes_on_the_command_line(tmp_path, capsys):
    assert run(["trace", "summary"]) == 2
    assert run(["trace", "summary", str(tmp_path / "none.json")]) == 2
    assert "no trace at" in capsys.readouterr().err
    ranks(tmp_path, 40)
    assert run(["trace", "summary", str(tmp_path), str(tmp_path)]) == 2


@pytest.mark.parametrize(
    ("kind", "share", "says"),
    [
        ("busy", None, ""),
        ("small", 0.92, "the host is slower than the GPU (host-bound)"),
        ("copies", 0.46, "data is copied between host and GPU meanwhile"),
        ("loader", 0.11, "data is copied between host and GPU meanwhile"),  # what is loaded is ready in time
    ],
)
def test_what_an_h100_waited_for(kind, share, says):
    found = summarize([TRACES / f"h100-{kind}.json.gz"])
    assert len(found.ranks[0].steps) == 6
    idle = [cause for cause in found.causes if cause.kind == "idle-gpu"]
    assert [says in cause.what for cause in found.causes] == ([] if share is None else [True])
    assert [cause.share for cause in idle] == ([] if share is None else [pytest.approx(share, abs=0.01)])
