"""From Horovod's stall reports to a verdict: after how many reports, about whom, in which words."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdkit.jobs.launch import processes
from hvdkit.jobs.launch.stall import Stall, StallReports, check_period, write_stacks
from hvdkit.steps import stalls

BEGIN = (
    b"[2026-11-21 03:03:34.933618: W /x/horovod/common/stall_inspector.cc:107] One or more tensors were submitted to "
    b"be reduced, gathered or broadcasted by subset of ranks and are waiting for remainder of ranks for more than 3 "
    b"seconds. This may indicate that different ranks are trying to submit different tensors or that only subset of "
    b"ranks is submitting tensors, which will cause deadlock. \nMissing ranks:\n"
)
METRICS = BEGIN + b"1: [allreduce.metrics]\n"


@pytest.mark.parametrize(("limit", "period"), [(0.5, 1), (1, 1), (5, 1), (8, 2), (60, 15), (62, 15), (3600, 900)])
def test_horovod_looks_four_times_within_the_limit_but_at_most_once_a_second(limit, period):
    assert check_period(limit) == period


def overdue_after(limit, reports):
    """Feed reports, (seconds, bytes), and give what is overdue after each."""
    stream = StallReports(limit)
    found = []
    for at, data in reports:
        stream.feed(data, at)
        found.append(stream.overdue())
    return found


def test_a_wait_is_overdue_when_reports_in_a_row_add_up_to_the_limit():
    found = overdue_after(60, [(30, METRICS), (45, METRICS), (60.1, METRICS), (75.2, METRICS)])
    assert found == [{}, {}, {}, {1: ("allreduce.metrics",)}]


def test_slow_steps_that_each_wait_a_while_are_not_one_long_wait():
    assert overdue_after(60, [(30 * i, METRICS) for i in range(1, 20)]) == [{}] * 19
    other = BEGIN + b"1: [allreduce.loss]\n"
    assert overdue_after(60, [(15 * i, METRICS if i % 2 else other) for i in range(20)]) == [{}] * 20


def test_reports_in_pieces_among_other_lines_and_of_several_ranks():
    text = b"a warning\n" + BEGIN + b"0: [b]\n2: [a.x, a.y]\n3!: [a.x, a.y]\n7: [not a report any more\nmore\n7: [x]\n"
    stream = StallReports(1)
    for i in range(0, len(text), 7):
        stream.feed(text[i : i + 7], 5.0)
    assert stream.overdue() == {0: ("b",), 2: ("a.x", "a.y"), 3: ("a.x", "a.y"), 7: ("not a report any more",)}


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ({1: ("allreduce.hvdkit.metrics",)}, "rank 1 did not arrive at allreduce 'hvdkit.metrics'"),
        ({1: ("a", "b"), 3: ("a", "b")}, "ranks 1, 3 did not arrive at 'a', 'b'"),
        ({0: ("y",), 1: ("x",)}, "rank 0 did not arrive at 'y', rank 1 did not arrive at 'x'"),
        ({2: tuple("abcde")}, "rank 2 did not arrive at 'a', 'b', 'c' and 2 more tensors"),
    ],
)
def test_a_stall_in_words(missing, expected):
    assert str(Stall(missing)) == expected


def test_stacks_are_written_one_file_for_each_rank(tmp_path):
    where = write_stacks(tmp_path / "a/b", Stall({1: ("x",)}), {0: b"stack of 0\n", 1: b""})
    assert str(tmp_path / "a/b") in where
    assert (tmp_path / "a/b/rank-0.txt").read_text().endswith("\n\nstack of 0\n")
    assert (tmp_path / "a/b/rank-1.txt").read_text().startswith("rank 1 did not arrive at 'x'\n")


def test_a_directory_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").touch()
    assert "cannot be written to" in write_stacks(tmp_path / "file", Stall({1: ("x",)}), {0: b""})


def test_a_process_shows_all_its_threads_and_goes_on():
    """A real process that waits in a lock; its child inherits the variable, not the pipe, and is left alone."""
    reader, writer = os.pipe()
    value = f"{writer}:{os.fstat(writer).st_ino}:{int(signal.SIGRTMAX) - 2}"
    code = """
import subprocess, sys, threading
from hvdkit.steps import stalls
assert stalls.hand_in_stacks_when_asked()
child = "import os; from hvdkit.steps import stalls; print(stalls.hand_in_stacks_when_asked())"
print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout.strip(), flush=True)
def wait_in_a_thread(): sys.stdin.read()
threading.Thread(target=wait_in_a_thread).start()
def wait_for_a_lock(): threading.Event().wait(60)
threading.Thread(target=wait_for_a_lock, daemon=True).start()
print("ready", flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, stalls.VARIABLE: value}, pass_fds=[writer],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0,
    )  # fmt: skip
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["False\n", "ready\n"]
    assert processes.handles(process.pid, signal.SIGRTMAX - 2)
    assert not processes.handles(process.pid, signal.SIGRTMAX - 3)
    os.kill(process.pid, signal.SIGRTMAX - 2)
    text, deadline = b"", time.monotonic() + 60
    os.set_blocking(reader, False)
    while b"wait_in_a_thread" not in text or b"wait_for_a_lock" not in text:
        assert time.monotonic() < deadline, text
        time.sleep(0.05)
        try:
            text += os.read(reader, 1 << 16)
        except BlockingIOError:
            continue
    process.communicate("")
    assert process.returncode == 0


def test_nothing_is_registered_without_the_launcher(monkeypatch):
    monkeypatch.delenv(stalls.VARIABLE, raising=False)
    assert stalls.hand_in_stacks_when_asked() is False


@pytest.mark.parametrize("number", ["999", str(os.open(Path(__file__), os.O_RDONLY))])
def test_a_number_that_is_not_the_launchers_pipe_is_left_alone(monkeypatch, number):
    monkeypatch.setenv(stalls.VARIABLE, f"{number}:1:{int(signal.SIGRTMAX)}")
    assert stalls.hand_in_stacks_when_asked() is False


LOOP = """
import sys, time
from hvdkit.steps.stalls import must_go_on
with must_go_on(float(sys.argv[1]), sys.argv[2], 3) as going_on:
    for step in range(8):
        time.sleep(0.05)
        going_on()
if len(sys.argv) > 3:
    with must_go_on(0.2, sys.argv[2], 3) as going_on:
        time.sleep(60)
"""


def run_loop(*words):
    return subprocess.run([sys.executable, "-c", LOOP, *map(str, words)], capture_output=True, text=True, timeout=60)


def test_a_process_that_goes_on_is_left_alone_and_one_that_does_not_shows_where_it_is(tmp_path):
    assert run_loop(30, tmp_path / "stacks").returncode == 0
    assert not (tmp_path / "stacks").exists()
    stuck = run_loop(30, tmp_path / "stacks", "stay")
    assert (stuck.returncode, stuck.stderr.count("\n")) == (75, 1)
    text = (tmp_path / "stacks/rank-3.txt").read_text()
    assert text.startswith("rank 3 made no progress for 0.2 s\n")
    assert 'File "<string>", line 10 in <module>' in text


def test_a_limit_that_cannot_be_is_one_sentence():
    assert "seconds must be a number above 0, got -1.0" in run_loop(-1, "x").stderr
