import csv
import gzip
import json
from collections import Counter, defaultdict

import pytest
from timeline_files import ATPESC, EPOCH, REAL, allreduce, metadata, write

from hvdkit.cli import run
from hvdkit.errors import CorruptDataError, InvalidArgumentError
from hvdkit.read.timeline import CycleMark, read
from hvdkit.read.timeline.export import export

PACKET, TIMESTAMP, CLOCKS, SEQUENCE, EVENT, DESCRIPTOR = 1, 8, 6, 10, 11, 60
ANNOTATION, KIND, TRACK, NAME = 4, 9, 11, 23
BEGIN, END, INSTANT = 1, 2, 3


def varint(data, position):
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position


def fields(data):
    """Field number to values, of one message in the wire format of protocol buffers."""
    found, position = defaultdict(list), 0
    while position < len(data):
        key, position = varint(data, position)
        assert key & 7 in (0, 2), "only numbers and messages are expected"
        value, position = varint(data, position)
        if key & 7 == 2:
            value, position = data[position : position + value], position + value
        found[key >> 3].append(value)
    assert position == len(data)
    return found


def packets(path):
    content = path.read_bytes()
    return [fields(packet) for packet in fields(content)[PACKET]]


def tracks_and_slices(path):
    """Each track's (name, parent's name), and (track's name, name, start, end) of all slices and instants, in ns."""
    descriptors, slices, stacks = {}, [], defaultdict(list)
    for packet in packets(path):
        if DESCRIPTOR in packet:
            descriptor = fields(packet[DESCRIPTOR][0])
            parent = descriptor.get(5, [None])[0]
            assert parent is None or parent in descriptors, "a track is described before what lies below it"
            name = descriptor[2][0].decode()
            descriptors[descriptor[1][0]] = (name, descriptors[parent][0] if parent else None)
        if EVENT in packet:
            assert packet[SEQUENCE] == [1]
            event, time = fields(packet[EVENT][0]), packet[TIMESTAMP][0]
            track = event[TRACK][0]
            assert track in descriptors
            if event[KIND] == [BEGIN]:
                stacks[track].append((event[NAME][0].decode(), time))
            elif event[KIND] == [END]:
                name, start = stacks[track].pop()
                assert time >= start
                slices.append((descriptors[track], name, start, time))
            else:
                slices.append((descriptors[track], event[NAME][0].decode(), time, time))
    assert not any(stacks.values()), "every slice ends"
    return list(descriptors.values()), slices


def expected_slices(path):
    for item in read(path).items():
        if isinstance(item, CycleMark):
            yield ("cycles", "Horovod"), "CYCLE_START", item.time * 1000, item.time * 1000
            continue
        own, below = (item.tensor, "Horovod"), ("negotiation", item.tensor)
        yield own, item.kind, item.start * 1000, item.end * 1000
        for name, start, end in item.phases:
            yield own, name, start * 1000, end * 1000
        if item.negotiate_end is not None:
            yield below, f"NEGOTIATE_{item.kind}", item.negotiate_start * 1000, item.negotiate_end * 1000
            for rank, time in item.ticks.items():
                yield below, f"rank {rank} ready", time * 1000, time * 1000


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_a_decoder_of_its_own_finds_every_phase_on_its_track(tmp_path, path):
    output = tmp_path / "t.pftrace"
    exported = export(path, output)
    tracks, slices = tracks_and_slices(output)
    assert Counter(slices) == Counter(expected_slices(path))
    tensors = {operation.tensor for operation in read(path)}
    assert Counter(tracks) == Counter(
        [("Horovod", None), ("cycles", "Horovod")]
        + [(tensor, "Horovod") for tensor in tensors]
        + [("negotiation", tensor) for tensor in tensors]
    )
    assert exported.tensors == len(tensors)


def test_perfettos_own_definitions_read_it_and_know_the_date(tmp_path):
    protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    source = write(tmp_path / "t.json", metadata(["<script>"]) + allreduce(1, 100, memcpy=5))
    export(source, tmp_path / "t.pftrace")
    trace = protos.Trace.FromString((tmp_path / "t.pftrace").read_bytes())
    clocks = {clock.clock_id: clock.timestamp for clock in trace.packet[0].clock_snapshot.clocks}
    assert clocks == {protos.BUILTIN_CLOCK_REALTIME: EPOCH * 1000, protos.BUILTIN_CLOCK_BOOTTIME: 0}
    (event,) = [packet.track_event for packet in trace.packet if packet.track_event.name == "ALLREDUCE"]
    notes = {note.name: note.string_value or note.uint_value for note in event.debug_annotations}
    assert notes == {"dtype": "float32", "shape": "[25]", "bytes": 100}


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_the_table_has_a_row_per_operation(tmp_path, path):
    export(path, tmp_path / "t.csv")
    with (tmp_path / "t.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    operations = list(read(path))
    assert len(rows) == len(operations)
    for row, operation in zip(rows, operations, strict=True):
        assert (row["tensor"], row["kind"]) == (operation.tensor, operation.kind)
        assert (float(row["begin_us"]), float(row["end_us"])) == (operation.begin, operation.end)
        assert row["bytes"] == ("" if operation.bytes is None else str(operation.bytes))
        exchanged = [phase.end - phase.start for phase in operation.phases if phase.name.startswith(("MPI_", "GLOO_"))]
        assert row["collective_us"] == (f"{sum(exchanged):g}" if exchanged else "")


def test_names_that_need_quotes_survive_the_table(tmp_path):
    name = 'a,"b"\nc'
    export(write(tmp_path / "t.json", metadata([name]) + allreduce(1, 100, 7, 30, memcpy=5)), tmp_path / "t.csv")
    with (tmp_path / "t.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["tensor"] == name
    assert (row["negotiate_us"], row["collective_us"], row["memcpy_in_us"]) == ("7", "30", "5")
    assert (row["fused"], row["queue_us"], row["shape"], row["begin_us"]) == ("1", "", "25", "100")


def test_the_parts_of_a_hierarchical_exchange_are_added_up(tmp_path):
    events = metadata(["t"]) + allreduce(1, 100, 7, 30)
    second = [{"ph": "B", "name": "NCCL_BCAST", "ts": 138, "pid": 1}, {"ph": "E", "ts": 150, "pid": 1}]
    events = [*events[:-1], *second, {**events[-1], "ts": 150}]
    export(write(tmp_path / "t.json", events), tmp_path / "t.csv")
    with (tmp_path / "t.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["collective_us"] == "42"


def test_zipped(tmp_path):
    for ending in ("csv", "pftrace"):
        export(ATPESC, tmp_path / f"t.{ending}")
        export(ATPESC, tmp_path / f"t.{ending}.gz")
        packed = (tmp_path / f"t.{ending}.gz").read_bytes()
        assert gzip.decompress(packed) == (tmp_path / f"t.{ending}").read_bytes()


@pytest.mark.parametrize("start", [-5, 10**40])
def test_a_date_that_cannot_be_is_left_out(tmp_path, start):
    source = write(tmp_path / "t.json", [*metadata(["a"], start), *allreduce(1, 100)])
    assert export(source, tmp_path / "out.pftrace").operations == 1
    assert read(source).start_time_since_epoch is None
    recording = read(source)
    assert len(list(recording)) == 1 and recording.start_time_since_epoch is None


def test_nothing_to_export(tmp_path):
    empty = write(tmp_path / "t.json", metadata(["x"]))
    for ending in ("csv", "pftrace"):
        with pytest.raises(CorruptDataError, match="no complete operation"):
            export(empty, tmp_path / f"out.{ending}")
    with pytest.raises(InvalidArgumentError, match=r"\.pftrace or \.csv"):
        export(ATPESC, tmp_path / "out.json")
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def test_the_command(tmp_path, capsys):
    output = tmp_path / "t.pftrace"
    assert run(["timeline", "export", str(ATPESC), "-o", str(output)]) == 0
    assert "1304 operations of 58 tensors" in capsys.readouterr().out
    assert run(["timeline", "export", str(ATPESC), "-o", str(tmp_path / "t.csv"), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert (written.pop("kind"), written.pop("schema"), "hvdkit" in written) == ("timeline-export", 1, True)
    del written["hvdkit"]
    assert written == {"path": str(tmp_path / "t.csv"), "operations": 1304, "tensors": 58, "cycles": 0}
    assert run(["timeline", "export", str(ATPESC), "-o", str(tmp_path / "t.txt")]) == 2
    assert run(["timeline", "export", str(tmp_path / "none"), "-o", str(output)]) == 2
