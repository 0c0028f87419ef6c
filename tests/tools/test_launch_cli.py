"""``hvdkit launch`` as it is typed. No job is started here."""

import os
import shlex
from pathlib import Path

import pytest

from hvdkit import cli
from hvdkit.jobs.launch import facts, supervise
from hvdkit.jobs.launch.model import Horovod, LaunchFacts, Mpi


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A machine of 4 cores with Open MPI, and a directory with train.py in it; starting a job is an error."""
    found = LaunchFacts(
        cores=4,
        root=False,
        python=Path("/venv/bin/python"),
        path=os.environ["PATH"],
        horovod=Horovod(mpi=True, gloo=True),
        mpi=Mpi(Path("/venv/bin/mpirun"), "Open MPI", (5, 0, 11)),
        horovodrun=None,
    )
    monkeypatch.setattr(facts, "gather", lambda request, environ: found)
    monkeypatch.setattr(facts, "own_python", lambda: found.python)
    monkeypatch.setattr(supervise, "run", lambda job, tagged, verbose, write: pytest.fail("a job was started"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)


def ended(status):
    return supervise.JobEnd(status, interrupted=False)


def test_preflight_writes_over_no_file_of_the_job(monkeypatch, capsys):
    """A timeline, a tuner's log and the monitor's report are the training's own."""
    seen = []
    monkeypatch.setattr(supervise, "run", lambda job, **_: seen.append(job.environment) or ended(0))
    writing = ["HOROVOD_TIMELINE", "HOROVOD_AUTOTUNE", "HOROVOD_AUTOTUNE_LOG", "HVDKIT_MONITOR"]
    words = [word for name in writing for word in ("--env", f"{name}=1")]
    status, _, _ = launch(capsys, "-n", "2", "--preflight", *words, "--env", "MINE=1", "train.py")
    assert status == 1 and len(seen) == 1, "no rank has left a report"
    assert seen[0]["MINE"] == "1" and not seen[0].keys() & set(writing)


def launch(capsys, *words):
    status = cli.run(["launch", *words])
    return status, *capsys.readouterr()


@pytest.mark.parametrize(
    "words",
    [
        ["-n", "0", "train.py"],
        ["-n", "two", "train.py"],
        ["train.py"],
        ["-m", "train"],
        ["-n", "2"],
        ["--min-np", "1", "--ppn", "2", "train.py"],
        ["-n", "2", "--tf-config", "--min-np", "1", "train.py"],
        ["-n", "2", "nosuch.py"],
        ["-n", "2", "python", "nosuch.py"],
        ["-n", "2", "nosuchprogram"],
        ["-n", "2", "--launcher", "teleport", "train.py"],
        ["-n", "2", "--launcher", "horovodrun", "train.py"],
        ["-n", "2", "--threads", "0", "train.py"],
        ["-n", "2", "--bind", "soul", "train.py"],
        ["-n", "5", "--bind", "core", "train.py"],
        ["-n", "2", "--env", "NAME", "train.py"],
        ["-n", "2", "--env", "=value", "train.py"],
        ["-n", "2", "--timeline", "nosuch/trace.json", "train.py"],
        ["-n", "2", "--timeline", ".", "train.py"],
        ["-n", "2", "--stall-timeout", "0", "train.py"],
        ["-n", "2", "--stall-timeout", "nan", "train.py"],
        ["-n", "2", "--stall-dir", "stacks", "train.py"],
        ["-n", "2", "--stall-timeout", "9", "--env", "HOROVOD_STALL_CHECK_TIME_SECONDS=3", "train.py"],
        ["-n", "2", "--torch-profile-steps", "3,1,2", "train.py"],
        ["-n", "2", "--torch-profile", "train.py", "train.py"],
        *(
            ["-n", "2", "--torch-profile", "profile", "--torch-profile-steps", steps, "train.py"]
            for steps in ("", "3,1", "3,1,2,4", "3,1,soon", "-1,1,2", "1,1,0", "0,0,1")
        ),
        ["-n", "2", "--nosuch", "train.py"],
    ],
)
def test_bad_usage_is_one_sentence_exit_2_and_nothing_written(capsys, words):
    before = sorted(Path.cwd().iterdir())
    status, out, err = launch(capsys, *words)
    assert status == 2
    assert out == ""
    assert err.startswith("hvdkit: ") and err.count("\n") == 1
    assert sorted(Path.cwd().iterdir()) == before


@pytest.mark.parametrize("separator", [[], ["--"]])
def test_the_flags_of_the_command_are_left_alone(capsys, separator):
    command = ["train.py", "--epochs", "3", "-n", "7", "--dry-run", "--", "-h"]
    status, out, _ = launch(capsys, "-n", "2", "--dry-run", *separator, *command)
    assert status == 0
    assert shlex.split(out)[-len(command) - 1 :] == ["/venv/bin/python", *command]


def test_dry_run_prints_one_line_and_explain_goes_to_stderr(capsys):
    options = ["--threads", "3", "--env", "A=1", "--env", "B=x=y", "--timeline", "trace.json"]
    status, out, err = launch(capsys, "-n", "2", "--dry-run", "--explain", *options, "train.py")
    assert (status, out.count("\n")) == (0, 1)
    words = shlex.split(out)
    assert words[0] == "env"
    for assignment in ("OMP_NUM_THREADS=3", "A=1", "B=x=y", f"HOROVOD_TIMELINE={Path.cwd() / 'trace.json'}"):
        assert assignment in words
        assert assignment in err
    assert "--bind-to none\n    tied to one core" in err


def test_the_job_that_is_planned_is_run_and_its_status_passed_on(capsys, monkeypatch):
    jobs = []
    monkeypatch.setattr(supervise, "run", lambda job, tagged, verbose, write: jobs.append((job, tagged)) or ended(3))
    status, _, err = launch(capsys, "-n", "5", "--no-tag", "train.py")
    ((job, tagged),) = jobs
    assert (status, job.n, tagged) == (3, 5, False)
    assert err == "hvdkit launch: 5 processes share 4 cores: timings will measure how they wait for one another.\n"


def test_a_limit_for_collectives_reaches_horovod_and_the_job(capsys, monkeypatch):
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "error")
    jobs = []
    monkeypatch.setattr(supervise, "run", lambda job, tagged, verbose, write: jobs.append(job) or ended(0))
    launch(capsys, "-n", "2", "--stall-timeout", "60", "--stall-dir", "stacks", "train.py")
    launch(capsys, "-n", "2", "--stall-timeout", "0.5", "train.py")
    launch(capsys, "-n", "2", "train.py")
    limited, short, plain = jobs
    assert (limited.stall_timeout, limited.stall_dir) == (60, Path.cwd() / "stacks")
    names = ("HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_CHECK_DISABLE", "HOROVOD_LOG_LEVEL")
    assert [limited.environment[name] for name in names] == ["15", "0", "warning"]
    assert short.environment[names[0]] == "1"
    assert short.stall_dir.parent == Path.cwd() and short.stall_dir.name.startswith("hvdkit-stall-")
    assert (plain.stall_timeout, names[0] in plain.environment) == (None, False)
    assert not list(Path.cwd().glob("hvdkit-stall*"))


def profile_variables(job):
    return job.environment["HVDKIT_TORCH_PROFILE"], job.environment["PYTHONPATH"].split(os.pathsep)


def test_a_profile_reaches_every_python_of_the_ranks_beside_the_users_own_path(capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine:/yours")
    jobs = []

    def run(job, tagged, verbose, write):
        jobs.append(job)
        if len(jobs) == 1:
            (Path("profile") / "trace-0-of-2.json.gz").touch()
        return ended(0)

    monkeypatch.setattr(supervise, "run", run)
    _, _, err = launch(capsys, "-n", "2", "--torch-profile", "profile", "train.py")
    assert err == (
        f"hvdkit launch: PyTorch profile of 1 rank; look at it with 'hvdkit trace summary {Path.cwd() / 'profile'}'.\n"
    )
    options = ["--torch-profile-steps", "3,0,2", "--env", "PYTHONPATH=/given"]
    _, _, err = launch(capsys, "-n", "2", "--torch-profile", "profile", *options, "train.py")
    assert "no rank wrote a profile" in err, "that of the job before does not count"
    (asked, path), (_, given) = map(profile_variables, jobs)
    assert asked == f"10,2,5:{Path.cwd() / 'profile'}"
    assert profile_variables(jobs[1])[0] == f"3,0,2:{Path.cwd() / 'profile'}"
    assert (path[1:], given[1:]) == (["/mine", "/yours"], ["/given"])
    assert path[0] == given[0] and (Path(path[0]) / "sitecustomize.py").is_file()


@pytest.mark.parametrize("launcher", ["srun", "mpiexec", "aprun", "jsrun", "mpirun", "horovodrun"])
def test_a_profile_can_be_planned_with_every_launcher(capsys, launcher):
    words = ["-n", "2", "--launcher", launcher, "--dry-run", "--torch-profile", "profile", "train.py"]
    status, out, _ = launch(capsys, *words)
    assert status == 0 and not Path("profile").exists()
    assert f"HVDKIT_TORCH_PROFILE=10,2,5:{Path.cwd() / 'profile'}" in out


def test_help_teaches(capsys):
    status, out, _ = launch(capsys, "--help")
    assert status == 0
    for words in (
        "--dry-run",
        "--env NAME[=VALUE]",
        "hvdkit launch -n 2 train.py --epochs 3",
        "exit status",
        "Ctrl-C",
        "75",
    ):
        assert words in out
