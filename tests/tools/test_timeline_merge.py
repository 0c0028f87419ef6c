import gzip
import json

import pytest
from timeline_files import EPOCH, allreduce, metadata, write

from hvdkit.cli import run
from hvdkit.errors import DataError, DataNotFoundError
from hvdkit.read.trace.merging import merge

BASE = (EPOCH - 5_000_000) * 1000
"""Nanoseconds since 1970 of the traces' time 0: five seconds before the timelines'."""
MS = 1000


def timeline(path, *operations, epoch=EPOCH):
    """``operations``: (start of the collective, its length) in ms; one tensor each."""
    events = metadata([f"t{number}" for number in range(len(operations))], epoch)
    for pid, (start, length) in enumerate(operations, start=1):
        events += allreduce(pid, start * MS - 11, 10, length * MS)
    return write(path, events)


def slice_event(start, length, category="cpu_op", name="aten::mm", tid=7):
    """A complete event whose times are in ms on the timelines' clock."""
    return {
        "ph": "X", "cat": category, "name": name, "pid": 42, "tid": tid,
        "ts": 5_000_000 + start * MS, "dur": length * MS, "args": {"Ev Idx": 1},
    }  # fmt: skip


def trace(path, *events, **entries):
    values = {"schemaVersion": 1, "baseTimeNanoseconds": BASE, "traceEvents": list(events), **entries}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    return path


@pytest.fixture
def files(tmp_path):
    """Collectives at 10-20 (twice, fused) and 30-50 ms, operators at 0-15 and, nested, 40-60 ms."""
    return (
        timeline(tmp_path / "t.json", (10, 10), (10, 10), (30, 20)),
        trace(tmp_path / "p.json", slice_event(0, 15), slice_event(40, 20), slice_event(45, 5, name="aten::add")),
        tmp_path / "m.json",
    )


def test_exposed_communication_is_what_no_computation_hides(tmp_path, files):
    overlap = merge(*files)
    found = overlap.found
    assert found.window == pytest.approx(50 - 10, abs=0.02)
    assert found.communication == pytest.approx(10 + 20)
    assert found.computation == pytest.approx(5 + 10, abs=0.02)
    assert found.overlapped == pytest.approx(5 + 10)
    assert found.exposed == pytest.approx(5 + 10)
    assert found.other == pytest.approx(10)
    assert overlap.operations == 3
    assert overlap.computed_by == "CPU operators of the thread that computed longest"


def test_both_are_on_the_axis_of_the_trace_and_nothing_is_lost(files):
    merge(*files)
    merged = json.loads(files[2].read_text())
    source = json.loads(files[1].read_text())
    assert merged["traceEvents"][: len(source["traceEvents"])] == source["traceEvents"]
    assert {**merged, "traceEvents": source["traceEvents"]} == source
    added = merged["traceEvents"][len(source["traceEvents"]) :]
    assert {event["pid"] for event in added} == {43}
    collectives = [event for event in added if event["name"] == "MPI_ALLREDUCE"]
    assert [(event["ts"], event["dur"]) for event in collectives] == [
        (5_010_000, 10_000), (5_010_000, 10_000), (5_030_000, 20_000),
    ]  # fmt: skip
    names = {event["tid"]: event["args"]["name"] for event in added if event["name"] == "thread_name"}
    assert [names[event["tid"]] for event in collectives] == ["t0", "t1", "t2"]


def test_with_gpus_their_kernels_count_but_not_those_that_communicate(tmp_path, files):
    events = [
        slice_event(0, 60),
        slice_event(12, 2, "kernel", "sgemm"),
        slice_event(30, 20, "kernel", "ncclDevKernel_AllReduce"),
    ]
    found = merge(files[0], trace(tmp_path / "g.json", *events), files[2])
    assert found.computed_by == "GPU kernels"
    assert (found.found.computation, found.found.exposed) == (pytest.approx(2), pytest.approx(30 - 2))


def test_the_training_thread_is_the_one_that_computes_longest(tmp_path, files):
    events = [slice_event(0, 60, tid=7), slice_event(0, 61, tid=8), slice_event(0, 1, tid=7)]
    found = merge(files[0], trace(tmp_path / "g.json", *events), files[2])
    assert found.found.exposed == pytest.approx(0, abs=1e-9)


def test_calls_that_communicate_are_no_computation_as_for_hvdkit_trace(tmp_path, files):
    events = [slice_event(0, 15), slice_event(30, 20), slice_event(30, 20, name="c10d::allreduce_")]
    found = merge(files[0], trace(tmp_path / "c.json", *events), files[2])
    assert found.found.computation == pytest.approx(5, abs=0.02)


def test_compressed_files(tmp_path, files):
    packed = [tmp_path / f"{path.name}.gz" for path in files]
    for path, target in zip(files[:2], packed, strict=False):
        target.write_bytes(gzip.compress(path.read_bytes()))
    assert merge(*packed) == merge(*files)
    assert gzip.decompress(packed[2].read_bytes()) == files[2].read_bytes()


def refused(error, message, *files):
    with pytest.raises(error, match=message):
        merge(*files)
    assert not files[2].exists()


def test_clocks_that_cannot_be_aligned_are_refused(tmp_path, files):
    unknown = trace(tmp_path / "u.json", slice_event(0, 15), baseTimeNanoseconds=None)
    refused(DataError, "baseTimeNanoseconds", files[0], unknown, files[2])
    strange = trace(tmp_path / "s.json", slice_event(0, 15), baseTimeNanoseconds="noon")
    refused(DataError, "nanoseconds since 1970", files[0], strange, files[2])
    headless = write(tmp_path / "h.json", allreduce(1, 100))
    refused(DataError, "start_time_since_epoch_in_micros", headless, files[1], files[2])


def test_files_of_different_runs_are_refused(tmp_path, files):
    later = timeline(tmp_path / "l.json", (10, 10), epoch=EPOCH + 3600 * 10**6)
    refused(DataError, r"recorded 3\.6e\+03 s apart", later, *files[1:])


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\x1f\x8bxx", b'{"traceEvents": 3}', b'{"traceEvents": [{}]}'])
def test_what_is_no_trace(tmp_path, files, content):
    bad = tmp_path / "bad.json"
    bad.write_bytes(content)
    refused(DataError, "bad.json", files[0], bad, files[2])


@pytest.mark.parametrize("odd", [3, [], "x", {"pid": {}, "ts": []}, {"pid": 41, "name": 7}], ids=str)
def test_an_event_that_is_none_stays_as_it_is(tmp_path, files, odd):
    assert merge(files[0], trace(tmp_path / "odd.json", odd, slice_event(0, 15)), files[2]).found.computation > 0
    assert json.loads(files[2].read_text())["traceEvents"][0] == odd


def test_files_that_are_missing(tmp_path, files):
    refused(DataNotFoundError, "export_chrome_trace", files[0], tmp_path / "none.json", files[2])
    refused(DataNotFoundError, "timeline", tmp_path / "none.json", files[1], files[2])


def test_the_command(files, capsys):
    arguments = ["timeline", "merge", *map(str, files[:2]), "-o", str(files[2])]
    assert run(arguments) == 0
    assert "exposed communication  15.000    37%" in capsys.readouterr().out
    assert run([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["exposed_s"] == pytest.approx(0.015)
