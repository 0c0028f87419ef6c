"""``hvdkit test`` without ranks: what it finds missing, and what it makes of what a job says."""

import importlib.util
import json
import subprocess

import pytest

from hvdkit import cli
from hvdkit.prepare.doctor.probe import RANKS, train

OVER = "hvdkit test: controller: MPI\n"
SUM = OVER + "hvdkit test: allreduce: 1 + 2 = 3 on every rank, under Open MPI\n"
SAME = "hvdkit test: training: after 10 steps all ranks have the same weights, bit for bit\n"
TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\nValueError: no such thing\n'


@pytest.fixture
def installed(monkeypatch):
    """Names the packages that are found."""
    names = ["torch", "horovod"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in names else None)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.28.1")
    return names


@pytest.fixture
def job(monkeypatch):
    """Jobs end as ``job["ends"]`` says; their command lines are kept in ``job["argv"]``."""
    found = {"argv": [], "ends": (0, (SUM + SAME) * RANKS)}

    def run(argv, *, timeout, env, **_):
        found["argv"].append(argv)
        found["env"] = env
        status, text = found["ends"]
        if status is None:
            raise subprocess.TimeoutExpired(argv, timeout, text.encode())
        return subprocess.CompletedProcess(argv, status, text.encode())

    monkeypatch.setattr(subprocess, "run", run)
    return found


def said(capsys, *options):
    status = cli.run(["test", *options])
    return status, capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            ["horovod"],
            "failed  framework             None of torch, tensorflow, keras is installed.  Fix: 'pip install",
        ),
        (["torch"], "failed  Horovod               Horovod is not installed.  Fix: 'hvdkit install'"),
    ],
)
def test_what_is_missing_is_a_sentence_and_nothing_is_started(installed, job, capsys, found, sentence):
    installed[:] = found
    status, lines = said(capsys)
    assert (status, job["argv"], lines[-1]) == (1, [], "1 of 1 checks failed.")
    assert lines[0].startswith(sentence)


def test_each_framework_that_is_found_is_trained_by_launch(installed, job, capsys):
    installed += ["keras", "tensorflow"]
    status, lines = said(capsys)
    assert status == 0 and lines[-1] == "Training works here."
    trained = [f"{name} {check}" for name in ("torch", "tensorflow", "keras") for check in ("allreduce", "training")]
    assert [line[8:28].strip() for line in lines[:-2]] == ["Horovod", *trained]
    assert all(line.startswith("ok  ") for line in lines[:-2])
    assert job["argv"][1][4:] == [
        "launch", "-n", "2", "--no-tag", "--", "python", "-m", "hvdkit.synthetic.smoke", "tensorflow", "2", "cpu",
    ]  # fmt: skip
    assert said(capsys, "--framework", "keras")[0] == 0 and len(job["argv"]) == 4


def test_ranks_take_gpus_where_there_is_one_for_each(installed, job, monkeypatch, capsys):
    for gpus, device in (((), "cpu"), (("H200",), "cpu"), (("H200", "H200"), "gpu")):
        monkeypatch.setattr("hvdkit.prepare.doctor.host.gpus", lambda root, gpus=gpus: gpus)
        assert said(capsys)[0] == 0
        assert job["argv"][-1][-1] == device


@pytest.mark.parametrize(
    ("status", "text", "failed", "why"),
    [
        (1, SUM + "[noise]\n" + TRACEBACK, "allreduce", "ValueError: no such thing"),
        (1, SUM * 2 + TRACEBACK + "hvdkit launch: rank 1 failed first\n", "training", "ValueError: no such thing"),
        (137, SUM * 2 + "hvdkit launch: rank 1 was killed\n", "training", "hvdkit launch: rank 1 was killed"),
        (2, "hvdkit: hvdkit.torch needs X; run `pip`.\n", "allreduce", "hvdkit.torch needs X; run `pip`."),
        (139, "noise\n", "allreduce", "The job ended with exit status 139."),
        (0, SUM * 2 + SAME, "training", "The job ended with exit status 0."),
        (0, "", "allreduce", "The job ended with exit status 0."),
        (1, (SUM + SAME) * 2, "training", "The job ended with exit status 1."),
        (None, SUM * 2, "training", "It did not end within 120 s."),
    ],
)
def test_a_check_passes_only_if_both_ranks_say_so(installed, job, capsys, status, text, failed, why):
    job["ends"] = status, text
    assert cli.run(["test", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    last = found["checks"][-1]
    assert not found["ok"] and not last["ok"] and [one["ok"] for one in found["checks"]].count(False) == 1
    assert last["check"] == f"torch {failed}" and last["what"].startswith(why)
    assert "hvdkit launch -n 2 --no-tag -- python -m hvdkit.synthetic.smoke torch 2 cpu" in last["fix"]
    assert ("--timeout 600" in last["fix"]) == (status is None)


def test_the_job_writes_over_no_file_and_says_what_it_ran_over(job):
    found = train("torch", 60, {"HOROVOD_TIMELINE": "mine.json", "HOROVOD_GLOO_IFACE": "lo"})
    assert job["env"] == {"HOROVOD_GLOO_IFACE": "lo"}
    assert (found.controller, found.problem) == ("MPI", None)
    job["ends"] = 213, "hvdkit launch: no loopback.\n"
    found = train("torch", 60, {})
    assert (found.controller, found.problem) == ("", "hvdkit launch: no loopback")
