"""Options of elastic jobs, the host discovery script, horovodrun's command line; restarts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hvdkit.errors import InvalidArgumentError
from hvdkit.jobs.launch import horovodrun, lines
from hvdkit.jobs.launch.cli import launch
from hvdkit.jobs.launch.model import Host
from hvdkit.jobs.launch.options import Request


@pytest.fixture
def script(tmp_path):
    def write(*lines, status=0):
        file = tmp_path / "hosts.sh"
        file.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines) + f"exit {status}\n")
        file.chmod(0o755)
        return file

    return write


def asked(n, script, **more):
    return horovodrun.elastic(Request(n, ("x",), host_discovery_script=script, **more), {})


def words(request):
    return [word for setting in lines.horovodrun(request, Path("horovodrun")).settings for word in setting.words]


def test_the_command_line_on_one_machine_and_on_several(script):
    file = script("localhost:1", "127.0.0.1:1")
    request = asked(2, file, min_np=1)
    assert words(request) == [
        "--gloo", "-np", "2", "--min-np", "1", "--max-np", "2", "--host-discovery-script", str(file),
        "--blacklist-cooldown-range", "2", "10", "--network-interface", "lo", "env", "--",
    ]  # fmt: skip
    assert (request.hosts, request.launcher) == ((), "horovodrun")
    elsewhere = asked(2, script("node1:4", "localhost:1"))
    assert (elsewhere.hosts, elsewhere.min_np) == ((Host("node1", 4), Host("localhost", 1)), 2)
    assert "--network-interface" not in words(elsewhere) and "-H" not in words(elsewhere)


ONE_HOST = "a failed worker takes its host out for a while, and there is one host: the job stops and waits."
FEW_SLOTS = "the hosts have fewer slots than --min-np 2: the job waits for more."


@pytest.mark.parametrize(
    ("n", "lines", "said"),
    [
        (2, ["localhost:2"], [ONE_HOST]),
        (2, ["localhost:1"], [ONE_HOST, FEW_SLOTS]),
        (2, ["localhost:1", "127.0.0.1:1"], []),
        (1, ["localhost:1"], []),
    ],
)
def test_what_will_stop_the_job_is_said_at_its_start(script, n, lines, said):
    notes = asked(n, script(*lines)).notes
    assert [note.startswith(text) for note, text in zip(notes, said, strict=True)] == [True] * len(said)


def test_the_script_is_told_nothing_of_an_outer_jobs_place(script):
    file = script("a:1' $RANK $HOROVOD_RANK $KEPT '")
    request = Request(1, ("x",), host_discovery_script=file)
    with pytest.raises(InvalidArgumentError, match="printed 'a:1 kept ' as line 1"):
        horovodrun.elastic(request, {"RANK": "3", "HOROVOD_RANK": "3", "KEPT": "kept"})


@pytest.mark.parametrize(
    ("n", "least", "most", "message"),
    [(2, 3, 4, "got 3, 2 and 4"), (5, 1, 4, "got 1, 5 and 4"), (2, 4, None, "got 4, 2 and 4")],
)
def test_numbers_that_do_not_go_together(script, n, least, most, message):
    with pytest.raises(InvalidArgumentError, match=message):
        asked(n, script("a:1"), min_np=least, max_np=most)


def test_bad_scripts_are_named(script, tmp_path):
    with pytest.raises(InvalidArgumentError, match="need --host-discovery-script"):
        asked(2, None, min_np=1)
    with pytest.raises(InvalidArgumentError, match=r"printed 'b:x' as line 2, where HOST:SLOTS was expected"):
        horovodrun.discovered(script("a:1", "b:x"), {})
    with pytest.raises(InvalidArgumentError, match="cannot be run"):
        horovodrun.discovered(script("a:1", status=3), {})
    with pytest.raises(InvalidArgumentError, match="printed no host"):
        horovodrun.discovered(script(), {})
    plain = tmp_path / "plain"
    plain.write_text("a:1\n")
    with pytest.raises(InvalidArgumentError, match="cannot be run: Permission denied"):
        horovodrun.discovered(plain, {})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        pytest.param("sleep 60", "did not end within 1 s and was ended", marks=pytest.mark.slow),
        ("exec yes a:1", r"printed more than 1\.05 MB and was ended"),
        ("cat; echo down >&2; exit 4", "cannot be run: status 4: down"),
    ],
)
def test_a_script_that_does_not_answer_is_ended_and_named(tmp_path, monkeypatch, line, said):
    monkeypatch.setattr(horovodrun, "SCRIPT_S", 1.0)
    file = tmp_path / "hosts.sh"
    file.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\n{line}\n")
    file.chmod(0o755)
    with pytest.raises(InvalidArgumentError, match=said):
        horovodrun.discovered(file, os.environ)
    group = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        while True:  # killed, but perhaps not yet gone
            os.killpg(group, 0)


def test_what_a_script_leaves_behind_is_ended_and_its_answer_counts(script):
    found = horovodrun.discovered(script("a:1'; sleep 600 & echo 'b:2"), os.environ)
    assert found == (Host("a", 1), Host("b", 2))


def test_elastic_jobs_refuse_what_horovodrun_does_itself(script):
    options = ["-n", "1", "--host-discovery-script", str(script("a:1")), "--restarts", "2", "--", sys.executable]
    with pytest.raises(InvalidArgumentError, match="leave --preflight, --restarts"):
        CliRunner().invoke(launch, options, catch_exceptions=False, standalone_mode=False)


@pytest.mark.slow
def test_a_job_is_started_again_until_it_succeeds(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(
        "import os, sys\n"
        "attempt = int(os.environ['HVDKIT_RESTART'])\n"
        "print('attempt', attempt, flush=True)\n"
        "sys.exit(0 if attempt == 2 else 7)\n"
    )
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}

    def start(restarts):
        command = [sys.executable, "-m", "hvdkit.cli", "launch", "-n", "1", "--no-tag", "--restarts", str(restarts)]
        return subprocess.run(
            [*command, "--", str(program)], env={**os.environ, **environment}, capture_output=True, text=True,
            timeout=120,
        )  # fmt: skip

    enough, too_few = start(3), start(1)
    assert enough.returncode == 0 and enough.stdout.split() == ["attempt", "0", "attempt", "1", "attempt", "2"]
    assert "restart 2 of 3 after status 7" in enough.stderr
    assert too_few.returncode == 7 and too_few.stdout.split() == ["attempt", "0", "attempt", "1"]
