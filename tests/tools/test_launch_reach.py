"""What the launcher itself says and ends with, and which hosts do not answer: here a Python that starts no rank."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hvdkit.jobs.launch import horovodrun, processes, supervise
from hvdkit.jobs.launch import hosts as reach
from hvdkit.jobs.launch.lines import SESSIONS
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
    starts = "import os, time\nfrom hvdkit.jobs.launch import supervise\n"
    starts += f"supervise.start({launcher}, os.environ)\ntime.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", starts], env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    wait_for(began)
    parent.kill()
    parent.wait()
    wait_for(told)
    run("import sys; print(sys.argv[-3:])")
    assert capfd.readouterr().err == "['3.0', '', 'true']\n"


def test_what_horovodrun_starts_does_not_outlive_it_and_other_launchers_are_told(monkeypatch):
    numbers = []
    monkeypatch.setattr(processes, "dying_with_parent", numbers.append)
    monkeypatch.setattr(horovodrun, "guarded", lambda argv: ["true"] if argv[0] == "horovodrun" else argv)
    for program in ("horovodrun", "true"):
        with supervise.start([program], os.environ):
            pass
    assert numbers == [signal.SIGKILL, signal.SIGTERM]


def test_what_open_mpi_makes_for_a_job_lies_in_a_directory_that_goes_with_it(capfd):
    looks = f"import os; at = os.environ[{SESSIONS!r}]; print(at, os.path.isdir(at))"
    plan = LaunchPlan(1, "mpirun", (sys.executable, "-c", looks), ("true",), {}, os.environ, "")
    assert supervise.run(plan).status == 0
    at, there = capfd.readouterr().err.split()[-2:]
    assert at.startswith(f"{os.environ[SESSIONS]}/hvdkit-job-") and there == "True" and not Path(at).exists()


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


def test_hosts_that_nobody_knows_lack_this_environment_or_are_silent_are_named_when_the_launcher_fails(
    capfd, monkeypatch
):
    monkeypatch.setattr(reach, "_addresses", lambda host: [] if host.startswith("no") else [host])
    monkeypatch.setattr(reach, "_answers", lambda host: host == "a")
    missing = "import os; os.write(2, b'sh: 1: /site/venv/bin/prted: not found\\n'); raise SystemExit(127)"
    for program, hosts, said in (
        (
            "raise SystemExit(1)",
            ["a", "nosuch", "firewalled"],
            "host nosuch is unknown: no name server has an address;",
        ),
        ("raise SystemExit(1)", ["nosuch", "nor"], "hosts nosuch and nor are unknown: "),
        ("raise SystemExit(1)", ["a", "firewalled"], "host firewalled does not answer on port 22, that of ssh: "),
        (missing, ["a"], "/site/venv/bin/prted does not exist on another host: this environment"),
    ):
        assert run(program, hosts).status != 0
        assert f"hvdkit launch: {said}" in capfd.readouterr().err
    run("raise SystemExit(0)", ["nosuch"])
    assert capfd.readouterr().err == ""


def test_this_host_answers_one_without_a_name_does_not_and_a_silent_name_server_holds_nobody_up(monkeypatch):
    assert reach.silent(["127.0.0.1"]) is None
    assert "hosts no-such-host.invalid and no..name do not answer" in str(
        reach.silent(["no-such-host.invalid", "no..name"])
    )
    answers = threading.Event()
    monkeypatch.setattr(reach.socket, "getaddrinfo", lambda *_words, **_more: answers.wait(60) and [])
    monkeypatch.setattr(reach, "_LOOK_UP_S", 0.05)
    assert "host quiet does not answer" in str(reach.unreached(["quiet"], b"")), "nothing is known of its name"
    assert not answers.is_set()
    answers.set()
