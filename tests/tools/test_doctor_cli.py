"""``hvdkit doctor`` as a user sees it: text, JSON, exit status; on facts made by hand."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_doctor_checks import (
    NOT_LOADED,
    SOUND,
    TRAINS,
    built_for,
    extension,
    not_training,
    with_package,
    without_package,
)

from hvdkit import cli
from hvdkit.prepare.doctor.cli import components
from hvdkit.prepare.doctor.facts import Failure
from hvdkit.prepare.doctor.host import MpiLauncher

TORCH_ALONE = replace(
    without_package("tensorflow", without_package("keras")),
    extensions={"torch": extension("torch")},
    trained={"torch": TRAINS},
    record=None,
)
BROKEN = with_package("torch", TORCH_ALONE, version=None, failure=Failure("exit", "?"))


@pytest.fixture
def facts(monkeypatch):
    """Put the facts in here that the doctor shall find."""
    found = []
    monkeypatch.setattr("hvdkit.prepare.doctor.cli.gather", lambda seconds: found[0])
    return found


def statuses(facts):
    return {name: component.status for name, component in components(facts).items()}


def test_json_is_alone_on_standard_output(facts, capsys):
    facts.append(TORCH_ALONE)
    assert cli.run(["doctor", "--json"]) == 0
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert output.err == "" and report["ok"] is True
    assert [report["components"][name]["status"] for name in ("PyTorch", "Horovod", "MPI")] == ["working"] * 3
    assert report["components"]["PyTorch"]["version"] == "2.13.0+cpu"
    assert report["facts"]["extensions"]["torch"]["built"] == ["MPI", "Gloo"]
    assert report["findings"] == [] and "not by 'hvdkit install'" in report["components"]["Horovod"]["detail"]
    facts[0] = BROKEN
    assert cli.run(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False and report["components"]["PyTorch"]["status"] == "broken"
    assert set(report["findings"][0]) == {"check", "level", "what", "why", "fix"}


def test_text_has_each_component_and_what_why_fix(facts, capsys):
    facts.append(BROKEN)
    assert cli.run(["doctor"]) == 1
    text = capsys.readouterr().out
    for words in ("PyTorch", "Horovod", "Gloo", "error [import-torch]", "what: ", "why: ", "fix: "):
        assert words in text
    assert "Training does not work here: 1 error, 0 warnings, 0 notes." in text
    assert "\x1b" not in text  # no colours into a pipe
    assert max(len(line) for line in text.splitlines()) <= 110
    facts[0] = replace(TORCH_ALONE, environ={"OMP_NUM_THREADS": "99"})
    assert cli.run(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "warning [omp-threads]" in text and "Training works here: 0 errors, 1 warning, 0 notes." in text
    facts[0] = replace(TORCH_ALONE, trained={})
    assert cli.run(["doctor"]) == 0
    assert "No training was tried: 0 errors" in capsys.readouterr().out


def test_components_say_what_was_done_and_not_what_is_hoped():
    found = statuses(TORCH_ALONE)
    assert (found["Horovod"], found["MPI"], found["Gloo"]) == ("working", "working", "untested")
    assert found["TensorFlow"] == "missing"
    found = statuses(replace(TORCH_ALONE, trained={"torch": replace_controller("Gloo")}))
    assert (found["Horovod"], found["MPI"], found["Gloo"]) == ("working", "untested", "working")
    found = statuses(replace(BROKEN, extensions={"torch": extension("torch", **NOT_LOADED)}, trained={}))
    assert (found["PyTorch"], found["Horovod"], found["MPI"]) == ("broken", "untested", "untested")
    found = statuses(not_training("no loopback", TORCH_ALONE))
    assert (found["MPI"], found["Gloo"], found["Horovod"]) == ("untested", "untested", "broken")
    failed = replace_controller("MPI", ok=False)
    found = statuses(replace(TORCH_ALONE, trained={"torch": failed}))
    assert (found["MPI"], found["Gloo"], found["Horovod"]) == ("broken", "untested", "broken")
    gloo_only = extension("torch", built=("Gloo",), mpi=None)
    assert statuses(replace(TORCH_ALONE, extensions={"torch": gloo_only}, trained={}))["MPI"] == "not built"
    unloaded = extension("torch", failure=Failure("raised", "?"), **NOT_LOADED)
    found = statuses(replace(TORCH_ALONE, extensions={"torch": unloaded}, trained={}))
    assert (found["MPI"], found["Gloo"], found["Horovod"]) == ("untested", "untested", "broken")


def replace_controller(name, *, ok=True):
    checks = [type(TRAINS.checks[0])(one.check, ok, one.what) for one in TRAINS.checks]
    return type(TRAINS)(tuple(checks), name)


@pytest.mark.parametrize(
    "arguments",
    [["--timeout", "0"], ["--timeout", "soon"], ["--jsno"], ["extra"], ["--report", "--json"], ["--report", "--job"]],
)
def test_bad_usage_is_one_sentence_and_exit_status_2(arguments, capsys):
    assert cli.run(["doctor", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == "" and len(output.err.splitlines()) == 1


def test_the_command_loads_no_framework(tmp_path):
    """Importing the doctor must not import what it is there to doubt."""
    program = (
        "import sys, hvdkit.prepare.doctor.cli\n"
        "print(*{'torch', 'tensorflow', 'horovod', 'mpi4py', 'numpy'} & {*sys.modules})"
    )
    paths = [str(Path(cli.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert (result.returncode, result.stdout.strip()) == (0, "")


def test_a_report_to_paste_has_no_host_no_user_and_no_colour(facts, capsys, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("socket.gethostname", lambda: "node17")
    mine = MpiLauncher("/scratch/ada_2/bin/mpirun", "Open MPI", "5.0.11", first_on_path=True)
    variables = {"HOROVOD_TIMELINE": "/home/ada/t.json on node17", "HOROVOD_AUTOTUNE_LOG": "/home/adam/canada/ada"}
    variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = "10.0.0.1:5/5ekr1t"
    facts.append(built_for(replace(SOUND, prefix="/home/ada/env", mpi_launchers=(mine,), environ=variables), "1.0"))
    assert cli.run(["doctor", "--report"]) == 0
    said = capsys.readouterr().out
    assert " in ~/env, Linux" in said and "/scratch/USER_2/bin/mpirun" in said and "warning [drift-torch]" in said
    assert "HOROVOD_TIMELINE=~/t.json on HOST\n" in said
    assert "HOROVOD_AUTOTUNE_LOG=/home/USER/canada/USER\n" in said
    assert "\x1b" not in said and "5ekr1t" not in said
