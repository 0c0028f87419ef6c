"""``hvdkit job --submit`` on batch systems that are not here: programs of their names answer as their manuals say."""

import os

import pytest

from hvdkit import cli
from hvdkit.jobs.job import submit

WORDS = ["--nodes", "1", "--ppn", "2", "--walltime", "1:00:00", "--submit", "--", "python", "train.py"]
PBS = """    Job_Name = hvdkit
    job_state = {state}
{status}    Output_Path = login1:{directory}/a long directory of\n\t results/hvdkit.o17
"""


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Writes programs that are found first; each answers with its texts in turn, the last one again and again."""
    monkeypatch.setattr(submit, "POLL_S", 0.01)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)

    def write(name, *answers, status=0, error="", extra=""):
        for number, answer in enumerate(answers, 1):
            (tmp_path / f"{name}.{number}").write_text(answer)
        script = f"""#!/bin/sh
cd {tmp_path}
echo "$@" >> {name}.asked
n=$(wc -l < {name}.asked); [ "$n" -gt {len(answers)} ] && n={len(answers)}
{extra}
cat {name}.$n; echo "{error}" >&2; exit {status}
"""
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)

    return write


def run(capsys, system, *before):
    status = cli.run(["job", "--system", system, *before, *WORDS])
    return status, *capsys.readouterr()


@pytest.mark.parametrize(("status", "expected"), [("0", 0), ("7", 7), ("271", 143), ("-3", 1)])
def test_pbs(programs, capsys, tmp_path, status, expected):
    log = tmp_path / "a long directory of results/hvdkit.o17"
    log.parent.mkdir()
    log.write_text("it trains\n")
    states = [("Q", ""), ("R", ""), ("F", f"    Exit_status = {status}\n")]
    answers = [PBS.format(state=state, status=more, directory=tmp_path) for state, more in states]
    programs("qsub", "17.server\n", extra="cat > script")
    programs("qstat", *answers)
    code, out, err = run(capsys, "pbs", "--account", "me")
    assert (code, out) == (expected, "it trains\n"), err
    assert "#PBS -A me" in (tmp_path / "script").read_text()
    assert (tmp_path / "qstat.asked").read_text().splitlines() == ["-x -f 17.server"] * 3
    assert "Job 17.server: queued\nJob 17.server: running\nJob 17.server has ended: finished" in err


def test_slurm(programs, capsys, tmp_path):
    log = tmp_path / "slurm-17.out"
    log.write_bytes("größer\n".encode())
    answer = "JobId=17 JobName=hvdkit JobState={} Reason=None ExitCode={}\n   StdOut=" + f"{log}\n   Power=\n"
    states = [("PENDING", "0:0"), ("SIGNALING", "0:0"), ("TIMEOUT", "0:15")]
    programs("sbatch", "A site's greeting\n17;cluster\n", extra="cat > script")
    programs("scontrol", *(answer.format(*one) for one in states))
    code, out, err = run(capsys, "slurm")
    assert (code, out) == (143, "größer\n"), err
    assert "Job 17: pending\nJob 17: signaling\nJob 17 has ended: TIMEOUT, exit status 143." in err


def test_a_log_that_comes_when_the_job_is_over_is_shown(programs, capsys, tmp_path, monkeypatch):
    log, waited, files = tmp_path / "hvdkit.o17", [], []
    answer = PBS.format(state="F", status="    Exit_status = 0\n", directory="x").replace(
        "login1:x/a long directory of\n\t results/hvdkit.o17", str(log)
    )
    programs("qsub", "17.server\n")
    programs("qstat", answer)

    def sleep(_seconds):
        waited.append(1)
        if len(waited) in (3, 4):
            with log.open("a") as file:
                file.write(f"part {len(waited)}\n")

    opened = submit.Path.open
    monkeypatch.setattr(submit.time, "sleep", sleep)
    monkeypatch.setattr(submit.Path, "open", lambda *words, **more: files.append(opened(*words, **more)) or files[-1])
    code, out, err = run(capsys, "pbs", "--account", "me")
    assert (code, out) == (0, "part 3\npart 4\n"), err
    read = [file for file in files if file.name == str(log)]
    assert read and all(file.closed for file in read)
    log.unlink()
    monkeypatch.setattr(submit, "_LATE_S", 0)
    assert f"Its log, {log}, is not here." in run(capsys, "pbs", "--account", "me")[2]


@pytest.mark.parametrize(("answer", "expected"), [("DONE -\n", 0), ("EXIT 130\n", 130), ("EXIT -\n", 1)])
def test_lsf(programs, capsys, tmp_path, answer, expected):
    programs("bsub", "Job <42> is submitted to default queue <normal>.\n", extra="cat > script")
    programs("bjobs", "PEND -\n", "", "RUN -\n", answer, extra="echo epoch $n >> hvdkit.42.log")
    code, out, err = run(capsys, "lsf")
    assert (code, out) == (expected, "epoch 1\nepoch 2\nepoch 3\nepoch 4\n"), err


def test_a_job_that_is_no_longer_known_is_said(programs, capsys):
    programs("bsub", "Job <42> is submitted.\n")
    programs("bjobs", "RUN -\n", "", error="Job <42> is not found")
    code, _, err = run(capsys, "lsf")
    assert code == 1 and "bjobs no longer knows job 42 (last seen: RUN)" in err


def test_a_refusal_and_a_missing_program_are_one_sentence(programs, capsys, monkeypatch, tmp_path):
    programs("qsub", "", status=1, error="qsub: Unknown queue")
    assert run(capsys, "pbs")[::2] == (1, "hvdkit: qsub took no job: qsub: Unknown queue\n")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert "There is no bsub on PATH" in run(capsys, "lsf")[2]
    assert "Jobs of cobalt cannot be followed" in run(capsys, "cobalt")[2]


def test_ctrl_c_leaves_the_job(programs, capsys, monkeypatch):
    def stop(_seconds):
        raise KeyboardInterrupt

    programs("bsub", "Job <42> is submitted.\n")
    programs("bjobs", "RUN -\n")
    monkeypatch.setattr(submit.time, "sleep", stop)
    code, _, err = run(capsys, "lsf")
    assert code == 130 and "Job 42 goes on; to end it: bkill 42" in err


def test_ctrl_c_while_it_is_submitted_tells_the_number(programs, capsys, monkeypatch, tmp_path):
    programs("bsub", "Job <42> is submitted.\n", extra="touch asked; while [ ! -e go ]; do sleep 0.01; done")
    communicate, calls = submit.subprocess.Popen.communicate, []

    def interrupted(self, *words, **more):
        calls.append(words)
        if len(calls) == 1:
            self.stdin.close()
            while not (tmp_path / "asked").exists():
                pass
            raise KeyboardInterrupt
        (tmp_path / "go").touch()
        self.stdin = None
        return communicate(self, *words, **more)

    monkeypatch.setattr(submit.subprocess.Popen, "communicate", interrupted)
    code, _, err = run(capsys, "lsf")
    assert code == 130 and "Job 42 goes on; to end it: bkill 42" in err
    assert not (tmp_path / "bjobs.asked").exists()
