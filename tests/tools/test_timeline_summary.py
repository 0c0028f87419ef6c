import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from timeline_files import ATPESC, REAL

from hvdkit.cli import run
from hvdkit.common import json_files
from hvdkit.read import spans
from hvdkit.read.timeline import cli, summarize
from hvdkit.read.timeline.columns import collect, exchanges
from hvdkit.read.timeline.reader import read
from hvdkit.read.timeline.summary import repeating, step_numbers


def raw_counts(path):
    """Top-level operations per tensor, counted from the raw events without the code under test."""
    events = json.loads(path.read_text())
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name" and "name" in e["args"]}
    kinds = ("ALLREDUCE", "BROADCAST", "ALLGATHER")
    return Counter((names[e["pid"]], e["name"]) for e in events if e["ph"] == "B" and e["name"] in kinds)


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_counts_per_tensor_are_those_of_the_raw_events(path):
    summary = summarize(path)
    assert {(one.tensor, one.kind): one.count for one in summary.tensors} == raw_counts(path)
    assert summary.operations == raw_counts(path).total()
    assert summary.communication <= summary.duration


def test_the_public_run_on_8_ranks_is_recognised():
    summary = summarize(ATPESC)
    assert summary.ranks == 8
    assert summary.steps.tensors == 8
    assert summary.steps.count == 154
    gradients = [one for one in summary.tensors if one.kind == "ALLREDUCE" and one.count == 154]
    assert len(gradients) == 8
    assert all(re.search(r"HorovodAllreduce_grads_(\d_)?0$", one.tensor) for one in gradients)
    assert summary.steps.bytes == sum(one.bytes for one in gradients) == 4_799_528
    biggest = max(summary.tensors, key=lambda one: one.bytes or 0)
    assert biggest.tensor.endswith("HorovodAllreduce_grads_4_0")
    assert biggest.bytes == 9216 * 128 * 4
    assert biggest.shape == (9216, 128)


class Writer:
    """Writes steps of a model of equal tensors, all times in microseconds."""

    def __init__(self):
        self.events = []
        self.names = {}

    def pid(self, name):
        if name not in self.names:
            self.names[name] = len(self.names) + 1
            self.events.append({"ph": "M", "name": "process_name", "pid": self.names[name], "args": {"name": name}})
        return self.names[name]

    def exchange(self, tensors, start, *, negotiate=10, wire=100, elements=1000, ticks=None, kind="ALLREDUCE"):
        fused = len(tensors) > 1
        pids = [self.pid(name) for name in tensors]
        begin, work = start + negotiate, start + negotiate + 5
        for pid in pids:
            self.events.append({"ph": "B", "name": f"NEGOTIATE_{kind}", "ts": start, "pid": pid})
            for rank, late in (ticks or {}).items():
                self.events.append({"ph": "X", "name": str(rank), "ts": start + late, "pid": pid, "dur": 0})
        self.events += [{"ph": "E", "ts": begin, "pid": pid} for pid in pids]
        self.events += [{"ph": "B", "name": kind, "ts": work + i, "pid": pid} for i, pid in enumerate(pids)]
        now = work + len(pids)
        copies = [("MEMCPY_IN_FUSION_BUFFER", 20), (f"MPI_{kind}", wire), ("MEMCPY_OUT_FUSION_BUFFER", 10)]
        for name, length in copies if fused else copies[1:2]:
            self.events += [{"ph": "B", "name": name, "ts": now + i, "pid": pid} for i, pid in enumerate(pids)]
            now += length
            self.events += [{"ph": "E", "ts": now + i, "pid": pid} for i, pid in enumerate(pids)]
            now += len(pids)
        args = {"dtype": "float32", "shape": f"[{elements}]"}
        self.events += [{"ph": "E", "ts": now, "pid": pid, "args": args} for pid in pids]
        return now

    def cycles(self, times):
        self.events += [{"ph": "i", "name": "CYCLE_START", "ts": time, "s": "g"} for time in times]

    def summary(self, tmp_path):
        path = tmp_path / "timeline.json"
        path.write_text(json.dumps(self.events))
        return summarize(path)


def steps_of(writer, count=10, period=10_000, batches=(("a", "b"), ("c",)), **options):
    for step in range(count):
        for batch, tensors in enumerate(batches):
            writer.exchange(tensors, 1000 + step * period + batch * 1000, **options)
    return writer


def test_fused_tensors_are_one_exchange_and_their_time_counts_once(tmp_path):
    summary = steps_of(Writer()).summary(tmp_path)
    assert (summary.batches.fused, summary.batches.single) == (10, 10)
    assert summary.batches.tensors.p50 == 2
    assert summary.batches.bytes.max == 8000
    assert summary.communication == pytest.approx(10 * (101 + 100)), "the two of a batch end one microsecond apart"


def gpu_batch(tensors, start, wait, wire, pids):
    """One batch as NCCL's is written: what happens on the GPU when a second thread sees it, all tensors at once."""
    events = [{"ph": "B", "name": "ALLREDUCE", "ts": start, "pid": pids[name]} for name in tensors]
    now = start + 1
    for name, length in (("QUEUE", wait), ("MEMCPY_IN_FUSION_BUFFER", 5), ("NCCL_ALLREDUCE", wire)):
        events += [{"ph": "B", "name": name, "ts": now, "pid": pids[tensor]} for tensor in tensors]
        now += length
        events += [{"ph": "E", "ts": now, "pid": pids[tensor]} for tensor in tensors]
    args = {"dtype": "float32", "shape": "[1000]"}
    return events + [{"ph": "E", "ts": now, "pid": pids[name], "args": args} for name in tensors]


def test_phases_of_one_kind_add_up(tmp_path):
    names = {0: "ALLREDUCE", 1: "MEMCPY_IN_HOST_BUFFER", 3: "", 5: "MEMCPY_IN_FUSION_BUFFER", 9: "", 20: ""}
    events = [{"ph": "B" if name else "E", "name": name, "ts": at, "pid": 1} for at, name in names.items()]
    (tmp_path / "timeline.json").write_text(json.dumps(events))
    assert summarize(tmp_path / "timeline.json").tensors[0].phases["memcpy in"].total == 2 + 4


@pytest.mark.parametrize("wire", [100, 0])
def test_a_batch_on_a_gpu_may_start_before_the_collective_of_the_one_before(tmp_path, wire):
    pids = {name: number for number, name in enumerate("abcd", start=1)}
    events = []
    for step in range(5):
        events += gpu_batch("ab", step * 1000, 40, wire, pids)
        events += gpu_batch("cd", step * 1000 + 20, 200, wire, pids)
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(sorted(events, key=lambda event: event["ts"])))
    batches = summarize(path).batches
    assert (batches.fused, batches.tensors.max, batches.bytes.max) == (10, 2, 8000)
    columns = collect(read(path))
    found = exchanges(columns, np.ones(20, bool))
    assert (len(found.bytes), found.fused, found.tensors.tolist()) == (10, 10, [2] * 10)


def test_steps_are_found_from_the_tensors_that_repeat(tmp_path):
    writer = Writer()
    writer.exchange(("weights",), 0, kind="BROADCAST")
    steps_of(writer)
    for time in range(3000, 90_000, 30_000):
        writer.exchange(("loss",), time, elements=1)
    summary = writer.summary(tmp_path)
    assert (summary.steps.count, summary.steps.tensors, summary.steps.bytes) == (10, 3, 12_000)
    assert summary.steps.duration.p50 == summary.steps.first == 10_000
    assert summary.steps.begins.tolist() == list(range(1000, 101_000, 10_000))
    assert summary.steps.duration.count == 8, "all but the first and the last, whose end is unknown"


def test_the_first_step_is_apart(tmp_path):
    writer = Writer()
    writer.exchange(("a", "b"), 0)
    for step in range(9):
        writer.exchange(("a", "b"), 500_000 + step * 10_000)
    summary = writer.summary(tmp_path)
    assert summary.steps.first == 500_000
    assert summary.steps.duration.max == 10_000


def packed_steps(count=10):
    """Steps of two packed gradients, as ``compression="int8"`` sends them, and an outer step after every fifth."""
    writer = Writer()
    for step in range(count):
        start = 1000 + step * 10_000
        for number, name in enumerate(("gradients.0.0.weight", "gradients.0.2.weight")):
            now = start + 1000 * number
            writer.exchange((f"allreduce.{name}.word",), now, elements=9)
            writer.exchange((f"alltoall.{name}.0.parts",), now + 150, kind="ALLTOALL")
            writer.events[-1].pop("args")  # Horovod writes none of an alltoall
            writer.exchange((f"allgather.{name}.0.mean",), now + 350, kind="ALLGATHER", elements=65_000, wire=200)
        writer.exchange(("broadcast.hvdkit.shard_state.0.0",), start + 4000, kind="BROADCAST", elements=500, wire=100)
        writer.exchange(("allgather.hvdkit.batch_norm.0",), start + 4500, kind="ALLGATHER", elements=33, wire=50)
        if step % 5 == 4:
            writer.exchange(("allreduce.hvdkit.outer.0",), start + 5000, elements=1 << 20, wire=700)
    return writer


def test_packed_gradients_are_what_a_step_reduces_and_outer_steps_are_not(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    summary = packed_steps().summary(tmp_path)
    assert (summary.steps.count, summary.steps.tensors) == (10, 6)
    assert summary.steps.bytes == 2 * (4 * 65_000 + 36), "of packed gradients the mean counts, once"
    roles = Counter(one.role for one in summary.tensors)
    assert roles == {"": 2, "packed gradients": 4, "outer step": 1, "shard_state": 1, "sync_batch_norm": 1}
    assert run(["timeline", "summary", str(tmp_path / "timeline.json")]) == 0
    text = capsys.readouterr().out
    assert " alltoall " not in text and text.count(" packed gradients ") == 4


def test_where_only_weights_are_averaged_it_says_so_and_finds_no_steps(tmp_path, capsys):
    writer = Writer()
    for step in range(6):
        writer.exchange(("allreduce.hvdkit.outer.0",), 1000 + step * 10_000, elements=1 << 20)
    assert writer.summary(tmp_path).steps is None
    assert run(["timeline", "summary", str(tmp_path / "timeline.json")]) == 0
    text = capsys.readouterr().out
    assert "averaged in outer steps, and no gradient is reduced between" in text


def test_a_tensor_that_is_only_called_like_a_packed_one_is_none(tmp_path):
    writer = steps_of(Writer(), batches=(("allreduce.layer.mean",), ("allreduce.layer.parts",)))
    summary = writer.summary(tmp_path)
    assert not any(one.role for one in summary.tensors) and summary.steps.bytes == 8000


def test_a_fused_exchange_goes_from_its_first_tensor_to_its_last(tmp_path):
    writer = Writer()
    writer.exchange(("a", "b", "c"), 1000, wire=100)
    writer.summary(tmp_path)
    columns = collect(read(tmp_path / "timeline.json"))
    assert exchanges(columns, np.ones(3, bool)).times.tolist() == [102]


def test_ticks_belong_to_the_operation_that_began_first_not_to_the_one_that_ended_first(tmp_path):
    writer = Writer()
    writer.exchange(("long",), 1000, wire=50_000, ticks={0: 0, 1: 700})
    writer.exchange(("short",), 5000, wire=10, ticks={0: 400, 1: 0})
    writer.events.sort(key=lambda event: event.get("ts", -1))
    writer.summary(tmp_path)
    columns = collect(read(tmp_path / "timeline.json"))
    names = [columns.tensors[columns.tensor[row]].name for row in columns.tick_row.tolist()]
    late = zip(names, columns.tick_rank.tolist(), columns.tick_late.tolist(), strict=True)
    assert [one for one in late if one[0] == "long"] == [("long", 0, 0), ("long", 1, 700)]


def test_late_ranks_are_those_of_the_ticks_and_else_not_guessed(tmp_path, capsys):
    assert steps_of(Writer(), ticks={0: 0, 1: 2, 2: 4}).summary(tmp_path).costs == {0: 0, 1: 0, 2: 0}, "together"
    assert steps_of(Writer(), ticks={0: 0, 1: 200, 2: 4000}).summary(tmp_path).costs == {0: 0, 1: 0, 2: 3800}
    assert run(["timeline", "summary", str(tmp_path / "timeline.json")]) == 0
    assert "rank 2 costs a step 3.80 ms" in capsys.readouterr().out
    assert steps_of(Writer()).summary(tmp_path).costs is None
    assert run(["timeline", "summary", str(tmp_path / "timeline.json")]) == 0
    assert "--cache-capacity 0" in capsys.readouterr().out


def test_a_rank_that_is_late_in_the_first_step_alone_is_not_to_blame(tmp_path):
    costs = {}
    for slow in (0, 1):
        writer = Writer()
        for step in range(11):
            late = 8000 if step == slow else 4
            writer.exchange(("a",), 1000 + step * 20_000, ticks={0: 0, 1: 2, 2: late})
        costs[slow] = writer.summary(tmp_path).costs
    assert costs == {0: {0: 0, 1: 0, 2: 0}, 1: {0: 0, 1: 0, 2: pytest.approx(799.8)}}


def test_steps_that_a_coarse_clock_does_not_tell_apart_are_one(tmp_path):
    writer = Writer()
    for start in (1000, 1000, 21_000, 21_000, 41_000, 61_000):
        writer.exchange(("a",), start)
    steps = writer.summary(tmp_path).steps
    assert (steps.count, steps.bytes, steps.first, steps.duration.p50) == (4, 6000, 20_000, 20_000)


@pytest.mark.parametrize("content", ["", "[]", "hello", "\x1f\x8b", '[{"ph": "B"}]'])
def test_a_file_without_operations_is_one_sentence(content, tmp_path, capsys):
    (tmp_path / "no.json").write_text(content)
    assert summarize(tmp_path / "no.json").operations == 0
    assert run(["timeline", "summary", str(tmp_path / "no.json")]) == 1
    assert "no operation of Horovod" in capsys.readouterr().err


def test_the_command_prints_text_and_json(capsys):
    assert run(["timeline", "summary", str(ATPESC), "--top", "2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Verdict: 4.80 MB per step is reduced") and "154 of 8 tensors, 4.80 MB each" in text
    assert "tensor (2 of 58)" in text and "26.2 / 39.2" in text, "median and 99th percentile"
    assert run(["timeline", "summary", str(ATPESC), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert len(values["tensors"]) == 58
    assert (values["ranks"], values["missed"], values["costs_s"]) == (8, 59, None)
    assert values["steps"]["count"] == 154 and "begins" not in values["steps"]
    whole = values["tensors"][0]["phases_s"]["whole"]
    found = summarize(ATPESC)
    assert values["duration_s"] == pytest.approx(1e-6 * found.duration) and values["kind"] == "timeline-summary"
    assert values["steps"]["duration_s"]["p50"] == pytest.approx(1e-6 * found.steps.duration.p50)
    assert whole["count"] == found.tensors[0].phases["whole"].count, "a number, no time"
    assert whole["total"] == pytest.approx(1e-6 * found.tensors[0].phases["whole"].total)
    assert [cause["kind"] for cause in values["causes"]] == ["large-tensors", "late"]
    assert run(["timeline", "summary", "/nonexistent"]) == 2


def test_names_reach_the_terminal_as_text_that_it_can_show_and_does_not_obey(tmp_path):
    steps_of(Writer(), batches=(("gr\u00f6\u00dfe", "\x1b[31mred\x07", "[bold]b"),)).summary(tmp_path)
    command = [sys.executable, "-m", "hvdkit", "timeline", "summary", str(tmp_path / "timeline.json")]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in (r"gr\xf6\xdfe", r"\x1b[31mred\x07", "[bold]b"))
    assert "\x1b" not in done.stdout


times = st.one_of(st.integers(0, 50), st.sampled_from([0, 1e16, 1e17, -1, 1e300, 0.5]))
raw_events = st.one_of(
    st.builds(
        lambda ts, pid, name: {"ph": "B", "ts": ts, "pid": pid, "name": name},
        times,
        st.integers(0, 3),
        st.sampled_from(["NEGOTIATE_ALLREDUCE", "ALLREDUCE", "MPI_ALLREDUCE", "MEMCPY_IN_FUSION_BUFFER", "BROADCAST"]),
    ),
    st.builds(
        lambda ts, pid, shape: {"ph": "E", "ts": ts, "pid": pid, "args": {"dtype": "float32", "shape": shape}},
        times,
        st.integers(0, 3),
        st.sampled_from(["[]", "[2]", "[0]", "x", f"[{', '.join(['9' * 18] * 30)}]"]),
    ),
    st.builds(lambda ts, pid: {"ph": "X", "ts": ts, "pid": pid, "name": str(pid)}, times, st.integers(0, 3)),
    st.builds(lambda ts: {"ph": "i", "ts": ts, "name": "CYCLE_START"}, times),
)


@settings(max_examples=300)
@given(st.lists(raw_events, max_size=60))
def test_no_events_make_the_summary_fail(events):
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(events * 4))
        file.flush()
        summary = summarize(file.name)
    json.loads(json_files.encode(summary))
    cli.page(summary, 5).show(Console(file=io.StringIO(), width=100))
    assert summary.communication <= summary.duration * (1 + 1e-6)


intervals = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 30)), max_size=12)


@given(intervals)
def test_the_union_counts_every_moment_once(pairs):
    starts = np.array([start for start, _ in pairs], float)
    ends = np.array([start + length for start, length in pairs], float)
    first, last = spans.union(starts, ends)
    covered = {moment for start, length in pairs for moment in range(start, start + length)}
    assert (last - first).sum() == len(covered)
    windows = np.arange(0, 130, 13.0)
    found = spans.covered((first, last), windows[:-1], windows[1:])
    assert found.tolist() == [len(covered & set(range(int(a), int(a) + 13))) for a in windows[:-1]]


def test_tensors_that_repeat_equally_often_are_a_step():
    assert repeating([154, 154, 153, 22, 1, 0]) == [0, 1, 2]
    assert repeating([2, 2, 2]) == []
    assert repeating([3, 3, 1]) == [0, 1]
    assert repeating([30, 500]) == [1]


def test_a_step_that_lost_a_tensor_does_not_shift_the_next():
    tensors = np.array([0, 1, 2, 0, 2, 0, 1, 2, 1, 0, 2], np.int32)
    assert step_numbers(tensors).tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3]
