import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timeline_files import REAL

from hvdkit.errors import DataError, DataNotFoundError
from hvdkit.read.timeline import CycleMark, Operation, reader
from hvdkit.read.timeline.reader import Phase, group_of, shape_and_bytes


def event(ph, ts, pid, name=None, **args):
    values = {"ph": ph, "ts": ts, "pid": pid}
    return values | ({"name": name} if name else {}) | ({"args": args} if args else {})


def operation(pid, ts, shape="[2, 3]"):
    return [
        event("B", ts, pid, "NEGOTIATE_ALLREDUCE"),
        event("X", ts + 1, pid, "1"),
        event("X", ts + 2, pid, "0"),
        event("E", ts + 3, pid),
        event("B", ts + 10, pid, "ALLREDUCE"),
        event("B", ts + 11, pid, "MPI_ALLREDUCE"),
        event("E", ts + 15, pid),
        event("E", ts + 16, pid, dtype="float32", shape=shape),
    ]


def named(pid, name):
    return {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}


def read_bytes(tmp_path, content):
    path = tmp_path / "timeline.json"
    path.write_bytes(content)
    recording = reader.read(path)
    return list(recording), recording


def as_json(events):
    return json.dumps(events).encode()


def test_an_operation_has_its_tensor_times_ticks_phases_and_bytes(tmp_path):
    (found,), recording = read_bytes(tmp_path, as_json([named(7, "grads"), *operation(7, 100)]))
    phases = [Phase("MPI_ALLREDUCE", 111, 115)]
    assert found == Operation("grads", "ALLREDUCE", 110, 116, 100, 103, {1: 101, 0: 102}, phases, "float32", (2, 3), 24)
    assert found.begin == 100
    assert not recording.dropped


def test_a_recording_says_when_it_started(tmp_path):
    start = {"ph": "M", "name": "process_name", "pid": 0, "args": {"start_time_since_epoch_in_micros": 17}}
    _, recording = read_bytes(tmp_path, as_json([start, named(1, "b"), named(2, "a"), *operation(1, 5)]))
    assert recording.start_time_since_epoch == 17
    assert recording.events == 11


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_real_files_are_read_whole(path):
    raw = json.loads(path.read_text())
    recording = reader.read(path)
    items = list(recording.items())
    assert not recording.dropped
    assert recording.events == len(raw)
    tops = Counter(one["name"] for one in raw if one["ph"] == "E" and "args" in one and "name" in one)
    assert not tops
    kinds = {"ALLREDUCE", "BROADCAST", "ALLGATHER"}
    expected = Counter(one["name"] for one in raw if one["ph"] == "B" and one["name"] in kinds)
    assert Counter(item.kind for item in items if isinstance(item, Operation)) == expected
    assert sum(isinstance(item, CycleMark) for item in items) == sum(
        one["name"] == "CYCLE_START" for one in raw if "name" in one
    )
    ticks = sum(one["ph"] == "X" for one in raw)
    assert sum(len(item.ticks) for item in items if isinstance(item, Operation)) == ticks
    phases = sum(one["ph"] == "B" and not one["name"].startswith("NEGOTIATE_") for one in raw) - sum(expected.values())
    assert sum(len(item.phases) for item in items if isinstance(item, Operation)) == phases


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_a_file_cut_anywhere_gives_the_operations_that_ended_before(path, tmp_path):
    content = path.read_bytes()
    whole = list(reader.read(path))
    ends = {(one.tensor, one.end) for one in whole}
    counts = []
    middle, closely = len(content) // 2, 40 if len(content) > 500_000 else 150
    step = max(1, len(content) // 60)
    offsets = [*range(0, len(content), step), *range(middle, middle + closely), len(content) - 1]
    for offset in sorted(offsets):
        found, recording = read_bytes(tmp_path, content[:offset])
        assert {(one.tensor, one.end) for one in found} <= ends, offset
        assert set(recording.dropped) <= {"cut off at the end", "operation not finished at the end"}, offset
        counts.append(len(found))
    assert counts == sorted(counts)
    assert counts[-1] == len(whole), "the closing bracket belongs to no operation"


def test_what_was_cut_off_is_counted(tmp_path):
    content = as_json([named(1, "a"), *operation(1, 5), *operation(1, 50)])
    found, recording = read_bytes(tmp_path, content[: content.rindex(b'"ph": "B"') + 30])
    assert len(found) == 1
    assert recording.dropped == {"cut off at the end": 1, "operation not finished at the end": 1}


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[:-1] + b",",
        lambda content: content[:-1] + b",\n]",
        lambda content: content.replace(b", {", b",\n\n{"),
        lambda content: content.replace(b"[", b"", 1),
        lambda content: gzip.compress(content),
        lambda content: content.replace(b"}, {", b"}{"),
    ],
)
def test_what_does_not_change_the_events_drops_nothing(damage, tmp_path):
    content = as_json([named(1, "a"), *operation(1, 5), *operation(1, 50)])
    found, recording = read_bytes(tmp_path, damage(content))
    assert len(found) == 2
    assert not recording.dropped


def test_two_writes_through_each_other_lose_only_what_they_hit(tmp_path):
    events = [json.dumps(one) for one in [named(1, "a"), *operation(1, 5), *operation(1, 50), *operation(1, 90)]]
    events[10] = events[10][:14] + events[11] + events[10][14:]
    found, recording = read_bytes(tmp_path, f"[{','.join(events)}]".encode())
    assert {one.begin for one in found} >= {5, 90}
    assert recording.dropped["unreadable"] >= 1


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([event("E", 5, 1)], "end without a begin"),
        ([event("B", 5, 1, "NEGOTIATE_ALLREDUCE"), *operation(1, 50)], "begin without an end"),
        ([*operation(1, 5)[:3], *operation(1, 5)[4:]], "begin without an end"),
        ([event("B", 9, 1, "ALLREDUCE"), event("E", 5, 1)], "ends before it begins"),
        ([{"ph": "B", "name": "ALLREDUCE", "pid": 1}], "no time"),
        ([{"ph": "B", "name": "ALLREDUCE", "pid": 1, "ts": "now"}], "unreadable"),
        ([event("C", 9, 1, "counter")], "unknown event"),
        ([event("X", 9, 1, "3")], "unknown event"),
        ([event("B", 9, 1, "ALLREDUCE"), event("X", 9, 1, "x"), event("E", 10, 1)], "unknown event"),
    ],
)
def test_what_cannot_be_used_is_counted_by_reason(events, reason, tmp_path):
    found, recording = read_bytes(tmp_path, as_json([named(1, "a"), *events, *operation(1, 1000)]))
    assert recording.dropped == {reason: 1}
    assert found[-1].end == 1016
    assert {phase.name for one in found for phase in one.phases} == {"MPI_ALLREDUCE"}
    assert {one.begin: one.ticks for one in found}[1000] == {1: 1001, 0: 1002}


def test_a_negotiation_of_another_kind_is_of_no_operation(tmp_path):
    events = operation(1, 100)
    events[0]["name"] = "NEGOTIATE_BROADCAST"
    (found,), _ = read_bytes(tmp_path, as_json([named(1, "a"), *events]))
    assert (found.kind, found.negotiate_start, found.begin) == ("ALLREDUCE", None, 110)


def test_names_with_braces_quotes_and_broken_utf8_are_text(tmp_path):
    names = ['a},{"ph": "B"}', 'quote " and \\', "naïve ✓"]
    events = [event for pid, name in enumerate(names) for event in (named(pid, name), *operation(pid, 10 * pid))]
    found, recording = read_bytes(tmp_path, as_json(events))
    assert [one.tensor for one in found] == names
    assert not recording.dropped
    found, _ = read_bytes(tmp_path, as_json([named(1, "abc"), *operation(1, 1)]).replace(b"abc", b"a\xffc"))
    assert found[0].tensor == "a\ufffdc"


@pytest.mark.parametrize("piece", [64, 200, 1000])
def test_the_pieces_in_which_a_file_is_read_do_not_matter(piece, tmp_path, monkeypatch):
    whole = list(reader.read(REAL[1]).items())
    monkeypatch.setattr(reader, "PIECE", piece)
    recording = reader.read(REAL[1])
    assert list(recording.items()) == whole
    assert not recording.dropped


def test_a_damaged_gzip_file_gives_what_was_before_the_damage(tmp_path):
    content = gzip.compress(REAL[0].read_bytes())
    found, recording = read_bytes(tmp_path, content[: len(content) // 2])
    assert 500 < len(found) < 900
    assert recording.dropped["compressed data damaged or cut off"] == 1


def fragments():
    pieces = [json.dumps(one).encode() for one in [named(1, "a"), *operation(1, 5), *operation(2, 9)]]
    noise = [
        b"{", b"}", b'"', b"[", b"]", b",", b"\\", b"\xff", b'{"ph"', b"},{", b"\n", b'{"args": {"name": 1}}', b"1e999",
    ]  # fmt: skip
    return st.lists(st.one_of(st.sampled_from(pieces + noise), st.binary(max_size=12)), max_size=40).map(b"".join)


@settings(max_examples=400)
@given(content=st.one_of(st.binary(max_size=400), fragments()), compressed=st.booleans(), piece=st.integers(1, 90))
def test_no_bytes_make_it_fail(content, compressed, piece, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "fuzz.json"
    path.write_bytes(b"\x1f\x8b" + content if compressed else content)
    before, reader.PIECE = reader.PIECE, piece
    try:
        for item in reader.read(path).items():
            assert isinstance(item, CycleMark) or item.end >= item.start
    finally:
        reader.PIECE = before


@pytest.mark.parametrize(
    "content", [b"{" * 300_000, b'{"' * 200_000, b'{"a":' * 100_000, b"[" * 300_000, b"\0" * 300_000]
)
def test_a_large_file_of_rubbish_ends(content, tmp_path):
    found, recording = read_bytes(tmp_path, content)
    assert not found
    assert sum(recording.dropped.values()) <= 20


@pytest.mark.parametrize("gap", [100, 300])
def test_a_file_is_not_read_far_beyond_its_events(gap, tmp_path, monkeypatch):
    """Zeros that a gzip file unpacks to, or that a hole holds, cost no time."""
    monkeypatch.setattr(reader, "PIECE", 1 << 10)
    monkeypatch.setattr(reader, "LONGEST_GAP", 200 << 10)
    first, last = (as_json([named(7, "grads"), *operation(7, time)]) for time in (100, 200))
    found, recording = read_bytes(tmp_path, first + bytes(gap << 10) + b"," + last)
    assert (len(found), recording.events) == ((2, 18) if gap == 100 else (1, 9))
    assert any("not read further" in reason for reason in recording.dropped) == (gap == 300)


@pytest.mark.parametrize("between", [",\r\n", ", ", "\n,\n"])
def test_a_large_file_of_another_writer_loses_nothing(tmp_path, between):
    content = f"[{between.join(map(json.dumps, json.loads(REAL[0].read_text())))}]\r\n".encode()
    found, recording = read_bytes(tmp_path, content)
    assert found == list(reader.read(REAL[0])) and not recording.dropped


def test_damage_of_many_braces_is_passed_over_once(tmp_path, monkeypatch):
    """Each stretch of bytes is looked at a bounded number of times: trying at each brace anew takes minutes."""
    tried = []
    decode = reader._decode_one
    monkeypatch.setattr(reader, "_decode_one", lambda text: tried.append(len(text)) or decode(text))
    content = b"[" + b'{"ph":"B",' * 30_000 + b"\n" + as_json([named(7, "grads"), *operation(7, 100)])
    found, _ = read_bytes(tmp_path, content)
    assert len(found) == 1 and sum(tried) < 4 * len(content)


def test_a_missing_file_and_a_directory_are_explained(tmp_path):
    with pytest.raises(DataNotFoundError, match="only rank 0 writes it"):
        reader.read(tmp_path / "none.json")
    with pytest.raises(DataError, match="readable file"):
        reader.read(tmp_path)


@pytest.mark.parametrize(
    ("text", "shape"),
    [("[]", ()), ("[3, 4]", (3, 4)), ("[5]", (5,)), ("", None), ("[a]", None), ("[-1]", None), ("[,]", None)],
)
def test_shapes(text, shape):
    assert shape_and_bytes("string", text) == (shape, None)


def test_sizes_and_groups():
    assert shape_and_bytes("bfloat16", "[3, 4]") == ((3, 4), 24)
    assert shape_and_bytes("float64", "[]") == ((), 8)
    assert shape_and_bytes("int8", f"[{2**31}, {2**31}]")[1] is None, "more than any memory holds"
    groups = {
        "NCCL_ALLREDUCE": "collective",
        "GLOO_BROADCAST": "collective",
        "NEGOTIATE_ALLREDUCE": "negotiate",
        "WAIT_FOR_OTHER_TENSOR_DATA": "wait for data",
        "QUEUE": "queue",
        "INIT_NCCL": "set up",
        "ALLOCATE_OUTPUT": "set up",
        "MEMCPY_IN_HOST_BUFFER": "memcpy in",
        "MEMCPY_OUT_HOST_BUFFER": "memcpy out",
        "SOMETHING_NEW": "other",
    }
    assert {phase: group_of(phase) for phase in groups} == groups


def test_a_file_that_opens_and_cannot_be_read_is_refused():
    memory = Path("/proc/self/mem")  # reading its beginning is an input/output error, as on a file system that is gone
    if not memory.exists():
        pytest.skip("there is no /proc")
    with pytest.raises(DataError, match="cannot read the timeline"):
        reader.read(memory)
