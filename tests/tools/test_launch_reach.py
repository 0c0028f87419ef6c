"""What the launcher itself says and ends with, and which hosts were lost: here a Python that starts no rank."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hvdkit.jobs.launch import reach, supervise
from hvdkit.jobs.launch.model import Host, LaunchPlan

REPOSITORY = Path(__file__).parents[2]
LOST = "PRTE has lost communication with a remote daemon.\n"


def run(program, hosts=()):
    there = tuple(Host(name, 1) for name in hosts)
    launcher = (sys.executable, "-c", program)
    plan = LaunchPlan(1, "mpirun", launcher, ("true",), {}, os.environ, "", hosts=there, elsewhere=True)
    return supervise.run(plan, tagged=False)


def test_output_and_status_are_those_of_a_launcher_whose_ranks_nobody_sees(capfd):
    done = run("import os, sys; os.write(1, b'no end of line'); os.write(2, b'\\xff\\n' * 40000)")
    out, err = capfd.readouterr()
    assert (done.status, done.interrupted, out) == (0, False, "")
    assert err.count("\n") == 40000 and err.startswith("no end of line")
    assert run("import sys; sys.exit(3)").status == 3
    assert (
        capfd.readouterr().err
        == "hvdkit launch: mpirun exited with status 3 before any rank started; the job was ended.\n"
    )
    assert run("import os; os.kill(os.getpid(), 9)").status == 137


def test_a_signal_that_comes_while_the_launcher_starts_ends_it(monkeypatch):
    def start(*arguments, **options):
        signal.raise_signal(signal.SIGTERM)
        return began(*arguments, **options)

    began = supervise.start
    monkeypatch.setattr(supervise, "start", start)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        done = run("import time; time.sleep(60)")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (done.status, done.interrupted) == (128 + signal.SIGTERM, True)


def test_the_launcher_ends_where_this_process_is_killed_and_hands_the_grace_on(tmp_path, capfd):
    """Ranks that do not reach this process have nobody else to end them."""
    began, told = tmp_path / "began", tmp_path / "told"
    launcher = ["sh", "-c", f"trap 'touch {told}; exit' TERM; touch {began}; while :; do sleep 0.1; done"]
    starts = (
        f"import os, time\nfrom hvdkit.jobs.launch import start\nstart.start({launcher}, os.environ)\ntime.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", starts], env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    wait_for(began)
    parent.kill()
    parent.wait()
    wait_for(told)
    run("import sys; print(sys.argv[-3:])")
    assert capfd.readouterr().err == "['3.0', '', 'true']\n"


def wait_for(file):
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline, f"{file} did not come"
        time.sleep(0.05)


def test_the_launcher_is_in_a_session_of_its_own_which_ctrl_c_does_not_reach(capfd):
    assert run("import os; print(os.getsid(0) == os.getpid())").status == 0
    assert capfd.readouterr().err == "True\n"


@pytest.mark.parametrize("fd", [1, 2])
def test_mpirun_that_lost_a_host_has_failed_whatever_its_status(capfd, fd):
    in_two = f"import os, time; t = {LOST.encode()!r}; os.write({fd}, t[:20]); time.sleep(0.2); os.write({fd}, t[20:])"
    assert run(in_two).status == 1
    assert capfd.readouterr().err.startswith(f"{LOST}hvdkit launch: mpirun lost contact with a host")
    assert run(f"print({LOST!r}); raise SystemExit(5)").status == 5
    assert run("print('a daemon')").status == 0


def test_the_hosts_that_no_longer_answer_are_named_on_a_line_of_their_own(capfd, monkeypatch, tmp_path):
    down = tmp_path / "down"

    def ask(host, _wait_s):
        return None if host == "firewalled" or (host in "bc" and down.exists()) else host

    monkeypatch.setattr(reach, "_ask", ask)
    program = f"import os, sys; open({str(down)!r}, 'w'); os.write(2, b'ends here'); sys.exit({{}})"
    assert run(program.format(7), ["a", "b", "firewalled"]).status == 7
    begin = "ends here\nhvdkit launch: host"
    end = "the network between, or the host itself, failed, and the ranks there are lost.\n"
    assert capfd.readouterr().err == f"{begin} b answered when the job began and no longer does: {end}"
    down.unlink()
    run(program.format(7), ["a", "b", "c"])
    assert capfd.readouterr().err.startswith(f"{begin}s b and c answered when the job began and no longer do: ")
    down.unlink()
    assert run(program.format(0), ["a", "b"]).status == 0
    assert capfd.readouterr().err == "ends here\n"


def test_hosts_that_nothing_knows_are_named_when_the_launcher_fails(capfd, monkeypatch):
    monkeypatch.setattr(reach, "_ask", lambda host, _: host if host == "a" else None)
    monkeypatch.setattr(reach, "_addresses", lambda host: [] if host.startswith("no") else ["a"])
    known = "no name server has an address; correct --hosts or the host file, unless ssh has such an alias.\n"
    run("raise SystemExit(1)", ["a", "nosuch", "firewalled"])
    assert capfd.readouterr().err == f"hvdkit launch: host nosuch is unknown: {known}"
    run("raise SystemExit(1)", ["nosuch", "nor"])
    assert capfd.readouterr().err == f"hvdkit launch: hosts nosuch and nor are unknown: {known}"
    run("raise SystemExit(0)", ["nosuch"])
    assert capfd.readouterr().err == ""


def test_this_host_answers_and_one_without_a_name_does_not():
    assert reach.Reach(["127.0.0.1", "no-such-host.invalid", "no..name"]).lost() is None
    assert reach._answering({"here": "127.0.0.1", "nowhere": "no-such-host.invalid"}) == {"here": "127.0.0.1"}


def test_a_name_server_that_does_not_answer_holds_nobody_up(monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(reach.socket, "getaddrinfo", lambda *_words, **_more: answers.wait(60) and [])
    monkeypatch.setattr(reach, "_LOOK_UP_S", 0.05)
    asked = reach.Reach(["silent"])
    assert asked.lost() is None and "unknown" not in str(asked.unreached(b"")), "nothing is known of it"
    assert not answers.is_set()
    answers.set()


def test_hosts_are_asked_as_soon_as_one_is_lost(monkeypatch, capfd, tmp_path):
    """What the last ranks and the launcher take to end is not added to what a silent host takes."""
    asked, suspected = [], tmp_path / "suspected"

    def ask(host, wait_s):
        asked.append((host, wait_s))
        if asked.count(("b", reach._WAIT_S)) == 2:
            suspected.touch()
        return None if host == "b" and suspected.exists() else host

    monkeypatch.setattr(reach, "_ask", ask)
    waits = f"import os, sys, time\nos.write(2, {LOST.encode()!r})\nfor _ in range(1000):\n"
    waits += f"    if os.path.exists({str(suspected)!r}): break\n    time.sleep(0.01)\nsys.exit(1)"
    assert run(waits, ["a", "b"]).status == 1
    assert "host b answered when the job began and no longer does" in capfd.readouterr().err
    assert sorted(asked[-2:]) == [("a", reach._WAIT_S), ("b", reach._AGAIN_S)]
    assert len(asked) == 6


def test_a_host_that_answers_again_is_not_named(monkeypatch):
    answers = iter(["b", None, "b"])
    monkeypatch.setattr(reach, "_ask", lambda host, _: next(answers))
    hosts = reach.Reach(["b"])
    for _ in range(3):  # a rank's traceback names it more than once
        hosts.suspect()
    assert hosts.lost() is None
    assert next(answers, "all") == "all"


def test_a_host_without_this_environment_and_one_that_is_silent_are_named(capfd, monkeypatch):
    monkeypatch.setattr(reach, "_ask", lambda host, _: host if host == "a" else None)
    monkeypatch.setattr(reach, "_addresses", lambda _host: ["a"])
    say = "import os; os.write(2, b'sh: 1: /site/venv/bin/prted: not found\\n'); raise SystemExit(127)"
    assert run(say, ["a"]).status == 127
    assert (
        "hvdkit launch: /site/venv/bin/prted does not exist on another host: this environment" in capfd.readouterr().err
    )
    assert run("raise SystemExit(1)", ["a", "firewalled"]).status == 1
    assert "hvdkit launch: host firewalled does not answer on port 22, that of ssh" in capfd.readouterr().err
