"""The output of several ranks in one stream, byte for byte."""

import os

import pytest

from hvdkit.jobs.launch import output as out_
from hvdkit.jobs.launch.output import STDERR, ErrorStream, JobOutput, LineBuffer, last_words


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


# Of the errors of several ranks the cause is read last, its consequences in one line each


CAUSE = b"""Traceback (most recent call last):
  File "train.py", line 3, in <module>
KeyError: 'a'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train.py", line 5, in <module>
package.errors.BadBatch: a message
File of a message with: several lines
"""
KNOCK_ON = b"""Traceback (most recent call last):
  File "mpi_ops.py", line 1285, in synchronize
RuntimeError: Horovod has been shut down. This was caused by an exception on one of the ranks

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 8, in <module>
horovod.common.exceptions.HorovodInternalError: Horovod has been shut down.
"""


def stream(*pieces):
    errors = ErrorStream()
    shown = [line for piece in pieces for line in errors.feed(piece)]
    return errors, b"".join([*shown, *errors.close()])


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_ordinary_lines_stream_and_a_traceback_is_held_whole(size):
    text = b"a warning\n10%\r20%\r" + CAUSE
    errors, shown = stream(*(text[i : i + size] for i in range(0, len(text), size)))
    assert shown == b"a warning\n10%\r20%\r"
    assert (errors.holding, errors.knock_on, errors.last_report) == (True, False, CAUSE)
    assert errors.release() == CAUSE
    assert not errors.holding


def test_a_traceback_behind_a_progress_bar_is_held_too():
    errors, shown = stream(b"step 1\n 10%|x   " + CAUSE)
    assert shown == b"step 1\n"
    assert errors.holding


def test_the_stack_of_a_crash_is_held_like_a_traceback():
    crash = b"Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n  File x\n"
    errors, shown = stream(crash)
    assert (shown, errors.last_report) == (b"", crash)


@pytest.mark.parametrize(
    ("report", "name"),
    [
        (CAUSE, b"BadBatch"),
        (b"Traceback (most recent call last):\n  File x\nKeyboardInterrupt\n", b"KeyboardInterrupt"),
        (b"Traceback (most recent call last):\n  File x\n", b"an error"),
    ],
)
def test_what_the_exception_is_called(report, name):
    same = {rank: stream(report)[0] for rank in (0, 1)}
    assert last_words(same, 0, None, True)[0] == (1, b"failed like rank 0: " + name + b"\n")


def test_an_own_error_after_a_lost_peer_that_was_survived_is_no_consequence():
    errors, _ = stream(KNOCK_ON)
    assert errors.knock_on
    errors.release()
    errors.feed(b"going on\n" + CAUSE)
    assert not errors.knock_on


QUOTED = "Horovod has been shut down. This was caused by an exception on one of the ranks"


@pytest.mark.parametrize(
    ("chain", "knock_on"),
    [
        ([f"ValueError: another job said: {QUOTED}"], False),
        ([f"ValueError: its log:\n{KNOCK_ON.decode()}"], False),
        ([f"RuntimeError: {QUOTED}", f"horovod.common.exceptions.HorovodInternalError: {QUOTED}"], True),
        (["RuntimeError: x", f"horovod.common.exceptions.HorovodInternalError: {QUOTED}"], False),
        (["ValueError: bad", f"horovod.common.exceptions.HorovodInternalError: {QUOTED}"], False),
        ([f"horovod.common.exceptions.HorovodInternalError: {QUOTED}", "SystemError: in a handler"], True),
        ([f"tensorflow.python.framework.errors_impl.UnknownError: {{{{node}}}} {QUOTED} [Op:f]"], True),
        (["hvdkit.errors.RootError: the root failed"], True),
        (["hvdkit.errors.AgreementError: rank 1 stopped", "horovod.common.exceptions.HorovodInternalError: it"], True),
    ],
)
def test_a_consequence_is_known_by_what_the_first_cause_is_not_by_words_that_it_quotes(chain, knock_on):
    head = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n'
    while_handling = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
    raised_from = "\n\nThe above exception was the direct cause of the following exception:\n\n"
    between = raised_from if chain[0].startswith("hvdkit") else while_handling
    errors, _ = stream((between.join(head + one for one in chain) + "\n").encode())
    assert errors.knock_on is knock_on


def test_consequences_are_folded_and_the_cause_comes_last():
    texts = (KNOCK_ON, CAUSE, CAUSE, CAUSE.replace(b"BadBatch", b"Other"), b"no traceback\n", KNOCK_ON)

    def errors():
        return {rank: stream(text)[0] for rank, text in enumerate(texts)}

    other = CAUSE.replace(b"BadBatch", b"Other")
    assert last_words(errors(), 1, None, True) == [
        (0, b"lost its peers: HorovodInternalError\n"),
        (2, b"failed like rank 1: BadBatch\n"),
        (3, other),
        (5, b"lost its peers: HorovodInternalError\n"),
        (1, CAUSE),
    ]
    assert last_words(errors(), 1, None, False)[0] == (0, b"rank 0 lost its peers: HorovodInternalError\n")
    assert [rank for rank, _ in last_words(errors(), None, None, True)] == [0, 1, 2, 3, 5]


@pytest.mark.parametrize(("last_writer", "expected"), [(("1", 2), []), (("0", 1), [(1, CAUSE)]), (None, [(1, CAUSE)])])
def test_a_cause_that_was_shown_is_repeated_only_if_something_came_after_it(last_writer, expected):
    errors, _ = stream(CAUSE)
    errors.release()
    assert last_words({0: stream(b"")[0], 1: errors}, 1, last_writer, True) == expected
