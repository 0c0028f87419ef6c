"""``hvdkit.run``: a function on real ranks, from Python."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from ranks import missing

import hvdkit
from hvdkit.jobs import function
from hvdkit.jobs.launch import wire

pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(missing("torch")), reason="needs PyTorch and Horovod (`make test` installs all)"),
]


class UnlikeItsArgumentsError(Exception):
    """Pickle calls its class with what ``args`` holds: one argument too few."""

    def __init__(self, batch, reason):
        super().__init__(f"batch {batch}: {reason}")


def reduced(scale, *, bad=None):
    import horovod.torch as hvd
    import torch

    hvd.init()
    print(f"hello from {hvd.rank()}")
    if hvd.rank() == bad:
        raise UnlikeItsArgumentsError(3, "not finite")
    whole = scale * hvd.allreduce(torch.tensor(float(hvd.rank())), op=hvd.Sum).item()
    return hvd.rank(), whole, os.environ.get("MINE")


@pytest.mark.parametrize("n", [2, 3])
def test_results_come_back_by_rank_and_output_is_tagged(capsys, n):
    results = hvdkit.run(reduced, n, args=(10,), env={"MINE": "yes"}, threads=1)
    assert results == [(rank, 10.0 * n * (n - 1) / 2, "yes") for rank in range(n)]
    printed = capsys.readouterr().out.splitlines()
    assert sorted(printed) == [f"[{rank}] hello from {rank}" for rank in range(n)]


def test_the_error_of_the_rank_that_failed_first_is_raised(capsys):
    with pytest.raises(hvdkit.LaunchError, match="UnlikeItsArgumentsError: batch 3: not finite") as caught:
        hvdkit.run(reduced, 2, args=(1,), kwargs={"bad": 1})
    assert "On rank 1:" in caught.value.__notes__[0]
    with pytest.raises(ZeroDivisionError):
        hvdkit.run(lambda: 1 / 0, 1)
    assert "[1]" in capsys.readouterr().err


def test_a_result_that_is_read_slowly_is_waited_for(monkeypatch):
    """By this process alone: its ranks load the file anew."""
    receive = function.receive

    def slowly(stream):
        time.sleep(0.5)
        return receive(stream)

    monkeypatch.setattr(function, "receive", slowly)
    assert hvdkit.run(lambda: "there", 1) == ["there"]
    with pytest.raises(ZeroDivisionError):
        hvdkit.run(lambda: 1 / 0, 1)


def test_a_rank_that_is_gone_without_a_result_is_named():
    with pytest.raises(hvdkit.LaunchError, match="rank 0 ended before the function returned"):
        hvdkit.run(sys.exit, 2)
    with pytest.raises(hvdkit.LaunchError, match=r"rank 0 \(pid \d+\) was killed by SIGKILL"):
        hvdkit.run(lambda: os.kill(os.getpid(), signal.SIGKILL), 1)


def test_a_result_that_cannot_be_sent_is_said():
    with pytest.raises(hvdkit.InvalidArgumentError, match=r"returned cannot be sent .*'generator'.*; return arrays"):
        hvdkit.run(lambda: (_ for _ in ()), 1)


def test_a_job_that_starts_again_gives_the_results_of_the_last_attempt():
    assert hvdkit.run(lambda: 1 / int(os.environ["HVDKIT_RESTART"]), 1, restarts=1) == [1.0]

    def first_attempt_alone():
        if (os.environ["HVDKIT_RESTART"], os.environ["RANK"]) == ("1", "0"):
            sys.exit()
        if os.environ["RANK"] == "1":
            time.sleep(1)
            return 1 / int(os.environ["HVDKIT_RESTART"])
        return "of the first attempt"

    with pytest.raises(hvdkit.LaunchError, match="rank 0 ended before the function returned"):
        hvdkit.run(first_attempt_alone, 2, restarts=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"treads": 1}, "no option 'treads'"),
        ({"threads": "many"}, "'many' is not a valid integer"),
        ({"n": 0}, "0 is not in the range"),
        ({"n": None}, "The number of processes is missing"),
        ({"dry_run": True}, "no option 'dry_run'"),
        ({"hosts": "h1:0"}, "'h1:0'"),
        ({"args": 0.1}, r"tuple or a list, got 0.1; .* args=\(0.1,\)"),
        ({"args": "runs"}, r"tuple or a list, got 'runs'; .* args=\('runs',\)"),
        ({"args": [threading.Lock()]}, r"an argument cannot be sent .*lock.*; make it in the function"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(options, message):
    with pytest.raises(hvdkit.InvalidArgumentError, match=message):
        hvdkit.run(len, **{"n": 1, **options})


def test_only_who_knows_the_secret_gets_the_function():
    listener = socket.create_server(("127.0.0.1", 0))
    with function._Server(listener, b"work") as server:
        server.secret = "s" * 64
        with socket.create_connection(listener.getsockname(), 5) as stranger:
            stranger.settimeout(20)
            nonce = stranger.recv(wire.NONCE_BYTES)
            stranger.sendall(nonce + wire.proof("t" * 64, b"rank", nonce + nonce))
            assert stranger.recv(100) == b""
    assert not server.results and not server.errors


def test_ctrl_c_ends_every_rank(tmp_path):
    call = (
        "import hvdkit, pathlib, time\n"
        f"hvdkit.run(lambda: (pathlib.Path({str(tmp_path)!r}, 'begun').touch(), time.sleep(600)), 1)"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", call],
        stderr=subprocess.PIPE,
        text=True,
        # A suite that runs in the background ignores Ctrl-C, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while not (tmp_path / "begun").exists():
        assert started.poll() is None, started.communicate()
        time.sleep(0.05)
    started.send_signal(signal.SIGINT)
    _, errors = started.communicate(timeout=60)
    assert "interrupted by SIGINT; every process was ended" in errors
    assert errors.rstrip().endswith("KeyboardInterrupt")
