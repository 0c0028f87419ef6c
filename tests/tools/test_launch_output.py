"""The output of several ranks in one stream, byte for byte."""

import os

import pytest

from hvdkit.jobs.launch import output as out_
from hvdkit.jobs.launch.output import STDERR, JobOutput, LineBuffer


@pytest.fixture
def written():
    """A descriptor to write to, and what has been written to it so far."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)

    def content() -> bytes:
        return os.read(read_end, 1 << 20)

    yield write_end, content
    os.close(read_end)
    os.close(write_end)


def output(*, tagged=True, patient=True, unread=lambda: None):
    made = JobOutput("mpirun", tagged=tagged, verbose=False)
    made.give_up, made.on_unread = lambda: not patient, unread
    return made


def write(fd, pieces, **options):
    out = output(**options)
    for source, data in pieces:
        if data is None:
            out.end_of(source)
        else:
            out.show(source, fd, data)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([("0", b"one\ntwo\n")], b"[0] one\n[0] two\n"),
        ([("0", b"on"), ("1", b"uno\n"), ("0", b"e\n")], b"[1] uno\n[0] one\n"),
        ([("0", b"last"), ("1", b"other"), ("1", None), ("0", None)], b"[1] other\n[0] last\n"),
        ([("0", b"\n\n")], b"[0] \n[0] \n"),
        ([("0", b"\xff\xfe\x00\n")], b"[0] \xff\xfe\x00\n"),
        ([("0", b"")], b""),
        ([("0", None)], b""),
        # a progress bar that ends its updates with \r, and one that begins them with it
        ([("0", b"10%\r"), ("0", b"20%\r"), ("0", b"done\n")], b"[0] 10%\r[0] 20%\r[0] done\n"),
        ([("0", b"\r10%"), ("0", b"\r20%"), ("0", b"\n")], b"[0] 10%\r[0] 20%\n"),
        ([("0", b"10%\r"), ("1", b"x\n"), ("0", b"20%\n")], b"[0] 10%\r\n[1] x\n[0] 20%\n"),
        # \r\n is one line end, even when it comes in two pieces or another rank comes between
        ([("0", b"one\r\ntwo\r\n")], b"[0] one\r\n[0] two\r\n"),
        ([("0", b"one\r"), ("0", b"\ntwo\n")], b"[0] one\r\n[0] two\n"),
        ([("0", b"one\r"), ("1", b"x\n"), ("0", b"\ntwo\n")], b"[0] one\r\n[1] x\n[0] two\n"),
    ],
)
def test_lines_of_ranks_do_not_mix(written, pieces, expected):
    fd, content = written
    os.write(fd, b"|")
    write(fd, pieces)
    assert content() == b"|" + expected


def test_without_tags_lines_stay_whole(written):
    fd, content = written
    write(fd, [("0", b"on"), ("1", b"uno\n"), ("0", b"e\n")], tagged=False)
    assert content() == b"uno\none\n"


def test_an_endless_line_is_written_in_pieces(monkeypatch):
    monkeypatch.setattr(out_, "MAX_LINE_BYTES", 10)
    buffer = LineBuffer()
    assert buffer.feed(b"1234567") == []
    assert buffer.feed(b"89012") == [b"123456789012\n"]
    assert buffer.close() == []


def test_a_message_of_the_program_begins_on_its_own_line(capfd):
    out = output()
    out.show("0", STDERR, b"10%\r")
    out.say("the end")
    assert capfd.readouterr().err == "[0] 10%\r\nhvdkit launch: the end\n"


@pytest.mark.parametrize("closed", [False, True])
def test_a_reader_that_is_gone_and_one_that_takes_nothing(closed):
    told, (read_end, write_end) = [], os.pipe()
    out = output(patient=False, unread=lambda: told.append(out.unread))
    if closed:
        os.close(read_end)
    out.show("0", write_end, b"x" * (1 << 20) + b"\n")  # more than any pipe holds
    out.show("1", write_end, b"x\n")
    assert told == [True], "once"
    os.close(write_end)
    if not closed:
        os.close(read_end)
