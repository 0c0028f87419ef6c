import gzip
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timeline_files import ATPESC, DATA, REAL, allreduce, metadata, write

from hvdkit.cli import run
from hvdkit.errors import DataError, InvalidArgumentError
from hvdkit.read.timeline import CycleMark, read, slicing
from hvdkit.read.timeline.slicing import slice_timeline


def as_set(items):
    return sorted(
        ("cycle", item.time)
        if isinstance(item, CycleMark)
        else (item.tensor, item.kind, item.begin, item.end, tuple(item.phases), tuple(item.ticks.items()), item.bytes)
        for item in items
    )


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
@pytest.mark.parametrize("share", [0.3, 0.65])
def test_two_slices_that_follow_one_another_hold_everything_once(tmp_path, path, share):
    operations = list(read(path))
    first = min(operation.begin for operation in operations) / 1e6
    at = first + share * (max(operation.end for operation in operations) / 1e6 - first)
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    slice_timeline(path, before, until=at)
    slice_timeline(path, after, since=at)
    parts = [list(read(part).items()) for part in (before, after)]
    assert as_set(parts[0] + parts[1]) == as_set(read(path).items())
    assert all(operation.begin < at * 1e6 for operation in read(before))
    assert all(operation.begin >= at * 1e6 for operation in read(after))


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_events_are_copied_as_they_are_and_the_start_is_kept(tmp_path, path):
    operations = sorted(operation.begin for operation in read(path))
    slice_timeline(path, tmp_path / "s.json", since=operations[len(operations) // 2] / 1e6)
    events = json.loads((tmp_path / "s.json").read_text())
    source = [json.dumps(event, sort_keys=True) for event in json.loads(path.read_text())]
    assert {json.dumps(event, sort_keys=True) for event in events} <= set(source)
    assert events[0] == json.loads(source[0])
    sliced, whole = read(tmp_path / "s.json"), read(path)
    assert len(list(sliced)) < len(list(whole))
    assert sliced.start_time_since_epoch == whole.start_time_since_epoch
    assert not sliced.dropped
    used = {event["pid"] for event in events if event["ph"] == "B"}
    named = {event["pid"] for event in events if event["name" if "name" in event else "ph"] == "process_name"}
    assert named == used | {0}


def test_an_operation_is_whole_or_not_there(tmp_path):
    source = write(tmp_path / "t.json", metadata(["early", "late"]) + allreduce(1, 50) + allreduce(2, 155))
    slice_timeline(source, tmp_path / "s.json", since=100e-6, until=160e-6)
    (only,) = read(tmp_path / "s.json")
    assert (only.tensor, only.begin, only.end) == ("late", 155, 266)


def test_training_steps(tmp_path):
    written = slice_timeline(ATPESC, tmp_path / "s.json.gz", steps=(3, 5))
    operations = list(read(tmp_path / "s.json.gz"))
    assert (tmp_path / "s.json.gz").read_bytes()[:2] == b"\x1f\x8b"
    assert written.operations == len(operations) == 3 * 8
    assert len({operation.tensor for operation in operations}) == 8


@settings(max_examples=60)
@given(data=st.data())
def test_damage_costs_events_but_never_the_slice(data):
    source = (DATA / "torch-mpi-2ranks-cycles.json").read_bytes()
    position = data.draw(st.integers(0, len(source)))
    damaged = (
        source[:position] + data.draw(st.binary(max_size=20)) + source[position + data.draw(st.integers(0, 200)) :]
    )
    if data.draw(st.booleans()):
        damaged = damaged[: data.draw(st.integers(0, len(damaged)))]
    with TemporaryDirectory() as folder:
        path, output = Path(folder) / "t.json", Path(folder) / "s.json"
        path.write_bytes(damaged)
        try:
            slice_timeline(path, output, since=0)
        except DataError:
            assert not list(read(path))
        else:
            json.loads(output.read_text())
            assert as_set(read(output)) == as_set(read(path))


def test_a_compressed_file_that_was_cut_off(tmp_path):
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(ATPESC.read_bytes())[:20_000])
    slice_timeline(path, tmp_path / "s.json", since=0)
    assert as_set(read(tmp_path / "s.json")) == as_set(read(path)) != []


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ({"since": 5.0, "until": 5.0}, "empty"),
        ({"since": -1.0}, "at least 0"),
        ({"since": float("nan")}, "empty"),
        ({"since": 1.0, "steps": (1, 2)}, "one of them"),
    ],
)
def test_a_window_that_cannot_be(tmp_path, window, message):
    with pytest.raises(InvalidArgumentError, match=message):
        slice_timeline(ATPESC, tmp_path / "s.json", **window)


def test_nothing_there_leaves_nothing_behind(tmp_path):
    with pytest.raises(DataError, match=r"between 3\.83\d* s and 31\.7\d* s"):
        slice_timeline(ATPESC, tmp_path / "s.json", since=1000)
    with pytest.raises(DataError, match=r"steps 0\.\.\d+"):
        slice_timeline(ATPESC, tmp_path / "s.json", steps=(5, 100_000))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("between", [",\r\n", ", ", "\n,\n"])
def test_a_large_file_of_another_writer_loses_nothing(tmp_path, between):
    path = tmp_path / "other.json"
    path.write_bytes(f"[{between.join(map(json.dumps, json.loads(ATPESC.read_text())))}]\r\n".encode())
    slice_timeline(path, tmp_path / "part.json", since=0.0)
    assert as_set(read(tmp_path / "part.json").items()) == as_set(read(ATPESC).items())


def test_a_file_without_events_has_no_times_to_choose_from(tmp_path):
    (tmp_path / "empty.json").write_text("[]")
    with pytest.raises(DataError, match="no event of Horovod") as raised:
        slice_timeline(tmp_path / "empty.json", tmp_path / "part.json", since=1.0)
    assert "inf" not in str(raised.value)


def test_damage_of_many_braces_is_passed_over_once(tmp_path, monkeypatch):
    """Each stretch of bytes is looked at a bounded number of times: trying at each brace anew takes minutes."""
    tried = []
    decode = slicing.decode_one
    monkeypatch.setattr(slicing, "decode_one", lambda text: tried.append(len(text)) or decode(text))
    path = tmp_path / "damaged.json"
    path.write_text(
        "[" + '{"ph":"B",' * 30_000 + "\n" + ",".join(map(json.dumps, [*metadata(["a"]), *allreduce(1, 0)]))
    )
    assert slice_timeline(path, tmp_path / "part.json", since=0.0).operations == 1
    assert sum(tried) < 4 * path.stat().st_size


def test_the_input_is_never_overwritten(tmp_path):
    source = tmp_path / "t.json"
    source.write_bytes(ATPESC.read_bytes())
    (tmp_path / "link.json").symlink_to(source)
    for output in (source, tmp_path / "link.json"):
        with pytest.raises(InvalidArgumentError, match="is the input"):
            slice_timeline(source, output, since=5)
    assert source.read_bytes() == ATPESC.read_bytes()


def test_the_command(tmp_path, capsys):
    output = tmp_path / "s.json"
    assert run(["timeline", "slice", str(ATPESC), "--steps", "3..5", "-o", str(output), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["operations"] == 24
    assert run(["timeline", "slice", str(ATPESC), "--since", "5", "--until", "6", "-o", str(output)]) == 0
    assert "from 5 s to 6 s" in capsys.readouterr().out
    assert run(["timeline", "slice", str(ATPESC), "--since", "900", "-o", str(output)]) == 1
    for wrong in (["--steps", "5..3"], ["--steps", "a"], []):
        assert run(["timeline", "slice", str(ATPESC), *wrong, "-o", str(output)]) == 2
    assert run(["timeline", "summary", str(output)]) == 0
