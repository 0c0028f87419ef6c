"""Every form in which a trace of torch.profiler comes, and what is refused."""

import gzip
import json

import numpy as np
import pytest
from trace_files import data, event, kernel, step, text, write

from hvdkit.errors import CorruptDataError, DataError, DataNotFoundError
from hvdkit.read.trace.reader import TraceFile, collect, rank_of

EVENTS = [
    step(3, 0, 50),
    data(0, 5),
    event("aten::mm", 10, 10, **{"Input Dims": [[], [2, 3]]}),
    kernel('odd "name" }, { "ph": [', 12, 3),
    {"ph": "M", "name": "process_name", "pid": 42, "tid": 0, "args": {"name": "python"}},
    {"ph": "s", "id": 3, "pid": 1, "tid": 2, "ts": 5.0, "cat": "ac2g", "name": "ac2g"},
]


def same(a, b):
    assert a.names == b.names and a.events == b.events
    for name in ("start", "end", "kind"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name


@pytest.fixture
def plain(tmp_path):
    return write(tmp_path / "trace-1-of-4.json", *EVENTS)


def test_what_a_trace_holds(plain):
    found = collect(plain)
    assert found.events == 6 and found.skipped == 0
    assert sorted(found.names) == sorted(one["name"] for one in EVENTS[:4])
    assert (found.rank, found.size) == (1, 4)


def test_compressed_bare_and_without_what_stands_behind(plain, tmp_path):
    expected = collect(plain)
    packed = tmp_path / "packed.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    same(collect(packed), expected)
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(EVENTS))
    same(collect(bare), expected)
    same(collect(write(tmp_path / "short.json", *EVENTS, behind=False)), expected)
    compact = tmp_path / "compact.json"
    compact.write_text(json.dumps({"traceEvents": EVENTS, "distributedInfo": {"rank": 1}}, separators=(",", ":")))
    same(collect(compact), expected)


def test_times_from_1970_keep_their_nanoseconds(tmp_path):
    found = collect(write(tmp_path / "t.json", {**event("a", 0, 0), "ts": 1759000000000001.5, "dur": 0.25}))
    assert found.end[0] - found.start[0] == 0.25


def test_events_without_a_usable_time_are_counted_and_left_out(tmp_path):
    odd = [{**event("a", 0, 1), field: value} for field, value in (("ts", None), ("ts", "noon"), ("dur", -1))]
    odd.append({**event("a", 0, 1), "name": 7})
    found = collect(write(tmp_path / "t.json", event("aten::mm", 0, 1), *odd))
    assert found.skipped == 4 and len(found.start) == 1 and found.events == 5


@pytest.mark.parametrize(
    ("name", "distributed", "expected"),
    [
        ("trace-3-of-8.json", None, (3, 8)),
        ("cuda_pt_2p8-11-of-16.json.gz", None, (11, 16)),
        ("trace-3-of-8.json", {"rank": 5, "world_size": 8}, (5, 8)),
        ("trace-3-of-8.json", {"rank": 0, "world_size": 1}, (3, 8)),
        ("plain.json", {"rank": 0, "world_size": 1}, (0, 1)),
        ("host_4711.1759.pt.trace.json", None, (None, None)),
        ("trace-3-of-8.json", {"rank": "none"}, (3, 8)),
    ],
)
def test_the_rank_is_that_of_the_file_or_of_its_name(tmp_path, name, distributed, expected):
    entries = {} if distributed is None else {"distributedInfo": json.dumps(distributed).encode()}
    assert rank_of(TraceFile(tmp_path / name, entries, [])) == expected


def test_distributed_info_before_and_behind_the_events(tmp_path):
    assert collect(write(tmp_path / "a.json", *EVENTS, rank=2, size=4)).rank == 2
    behind = tmp_path / "b.json"
    behind.write_text(json.dumps({"traceEvents": EVENTS, "distributedInfo": {"rank": 6, "world_size": 9}}))
    assert (collect(behind).rank, collect(behind).size) == (6, 9)


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("packed", [False, True])
def test_a_file_that_is_cut_off_is_refused(tmp_path, keep, packed):
    content = text(*EVENTS * 50).encode()
    content = gzip.compress(content) if packed else content
    path = tmp_path / ("t.json.gz" if packed else "t.json")
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(CorruptDataError, match=r"t\.json.*record it again"):
        collect(path)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{}", b"[]", b"hello", b"\x1f\x8bxx", b'{"traceEvents": 3}', b'{"traceEvents": []}',
        b'{"traceEvents": [{}]}', b'{"traceEvents": [}', b'{"traceEvents": [{"ph": "X"} nonsense]}', b"\x00" * 100,
    ],
)  # fmt: skip
def test_what_is_no_trace_is_one_sentence(tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(CorruptDataError, match=r"bad\.json"):
        collect(path)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(DataNotFoundError, match=r"no trace at .*none\.json"):
        collect(tmp_path / "none.json")
    with pytest.raises(DataError, match="cannot read"):
        collect(tmp_path)
