"""``hvdkit doctor`` as a user sees it: text, JSON, exit status; on facts made by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hvdkit import cli
from hvdkit.prepare.doctor.facts import DoctorFacts, DoctorHost, Extension, Failure, MpiLauncher, MpiLibrary, Package
from hvdkit.prepare.doctor.report import components

OPEN_MPI = MpiLibrary("/env/lib/libmpi.so.40", "Open MPI", "5.0.11")
TORCH = Package("torch", True, "/env/torch", "torch", "2.13.0+cpu", "2.13.0+cpu")
SOUND = DoctorFacts(
    python="3.11.7",
    python_tag="cp311",
    prefix="/env",
    host=DoctorHost("Linux 6.1 x86_64", cores=8, affinity=8, shm_bytes=2**30, compiler="/usr/bin/g++"),
    packages={
        **{name: Package(name) for name in ("tensorflow", "keras", "tf_keras", "jax")},
        "torch": TORCH,
        "mpi4py": Package("mpi4py", True, "/env/mpi4py", "mpi4py", "4.1.2", "4.1.2"),
        "horovod": Package("horovod", True, "/env/horovod", "horovod", "0.28.1", "0.28.1"),
    },
    extensions={
        "torch": Extension(
            "torch", "/env/a.so", (), True, None, ("MPI", "Gloo"), OPEN_MPI, {"MPI": None, "Gloo": None}
        ),
        "tensorflow": Extension("tensorflow"),
    },
    mpi4py_mpi=OPEN_MPI,
    mpi_launchers=(MpiLauncher("/env/bin/mpirun", False, "Open MPI", "5.0.11"),),
)
BROKEN = replace(
    SOUND, packages={**SOUND.packages, "torch": replace(TORCH, version=None, failure=Failure("exit", "?"))}
)


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> list[DoctorFacts]:
    """Put the facts in here that the doctor shall find."""
    found: list[DoctorFacts] = []
    monkeypatch.setattr("hvdkit.prepare.doctor.cli.gather", lambda seconds: found[0])
    return found


def statuses(facts: DoctorFacts) -> dict[str, str]:
    return {name: component.status for name, component in components(facts).items()}


def test_json_is_alone_on_standard_output(facts: list[DoctorFacts], capsys: pytest.CaptureFixture[str]) -> None:
    facts.append(SOUND)
    assert cli.run(["doctor", "--json"]) == 0
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert output.err == ""
    assert report["ok"] is True
    assert [report["components"][name]["status"] for name in ("PyTorch", "Horovod", "MPI", "Gloo")] == ["working"] * 4
    assert report["components"]["PyTorch"]["version"] == "2.13.0+cpu"
    assert report["facts"]["extensions"]["torch"]["built"] == ["MPI", "Gloo"]
    assert [finding["level"] for finding in report["findings"]] == ["info"]  # not built by hvdkit


def test_an_error_makes_exit_status_1(facts: list[DoctorFacts], capsys: pytest.CaptureFixture[str]) -> None:
    facts.append(BROKEN)
    assert cli.run(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert set(report["findings"][0]) == {"check", "level", "what", "why", "fix"}
    assert report["components"]["PyTorch"]["status"] == "broken"


def test_a_warning_does_not(facts: list[DoctorFacts], capsys: pytest.CaptureFixture[str]) -> None:
    facts.append(replace(SOUND, environ={"OMP_NUM_THREADS": "99"}))
    assert cli.run(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "warning [omp-threads]" in text
    assert "Training works here: 0 errors, 1 warning, 1 note." in text


def test_text_has_each_component_and_what_why_fix(facts: list[DoctorFacts], capsys: pytest.CaptureFixture[str]) -> None:
    facts.append(BROKEN)
    assert cli.run(["doctor"]) == 1
    text = capsys.readouterr().out
    for words in ("PyTorch", "Horovod", "Gloo", "error [import-torch]", "what: ", "why: ", "fix: "):
        assert words in text
    assert "Training would not work: 1 error, 0 warnings, 1 note." in text
    assert "\x1b" not in text  # no colours into a pipe
    assert max(len(line) for line in text.splitlines()) <= 110


def test_components_say_what_was_done_and_not_what_is_hoped() -> None:
    assert statuses(SOUND)["Horovod"] == "working"
    assert statuses(SOUND)["TensorFlow"] == "missing"
    unknown = Extension("torch", "/env/a.so")
    found = statuses(replace(BROKEN, extensions={**SOUND.extensions, "torch": unknown}))
    assert (found["PyTorch"], found["Horovod"], found["MPI"]) == ("broken", "untested", "untested")
    stopped = replace(SOUND.extensions["torch"], runs={"MPI": Failure("signal", "?"), "Gloo": None})
    found = statuses(replace(SOUND, extensions={**SOUND.extensions, "torch": stopped}))
    assert (found["MPI"], found["Gloo"], found["Horovod"]) == ("broken", "working", "working")
    gloo_only = replace(SOUND.extensions["torch"], built=("Gloo",), mpi=None, runs={"Gloo": None})
    assert statuses(replace(SOUND, extensions={**SOUND.extensions, "torch": gloo_only}))["MPI"] == "not built"
    unloaded = Extension("torch", "/env/a.so", failure=Failure("raised", "?"))
    found = statuses(replace(SOUND, extensions={**SOUND.extensions, "torch": unloaded}))
    assert (found["MPI"], found["Gloo"], found["Horovod"]) == ("untested", "untested", "broken")


@pytest.mark.parametrize("arguments", [["--timeout", "0"], ["--timeout", "soon"], ["--jsno"], ["extra"]])
def test_bad_usage_is_one_sentence_and_exit_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) == 1


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor", "--help"]) == 0
    text = capsys.readouterr().out
    for words in ("Examples:", "hvdkit doctor --json", "--timeout", "Exit status"):
        assert words in text


def test_the_command_loads_no_framework(tmp_path: Path) -> None:
    """Importing the doctor must not import what it is there to doubt."""
    program = (
        "import sys, hvdkit.prepare.doctor.cli\n"
        "print(*{'torch', 'tensorflow', 'horovod', 'mpi4py', 'numpy'} & {*sys.modules})"
    )
    paths = [str(Path(cli.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert (result.returncode, result.stdout.strip()) == (0, "")


def test_a_report_to_paste_has_no_host_no_user_and_no_colour(facts, capsys, monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.setattr("socket.gethostname", lambda: "node17")
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: os.terminal_size((20, 5)))
    mine = MpiLauncher("/scratch/ada_2/bin/mpirun", True, "Open MPI", "5.0.11")
    variables = {"HOROVOD_TIMELINE": "/home/ada/t.json on node17", "HOROVOD_AUTOTUNE_LOG": "/home/adam/canada/ada"}
    variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = "10.0.0.1:5/5ekr1t"
    facts.append(replace(SOUND, prefix="/home/ada/env", mpi_launchers=(mine,), environ=variables))
    monkeypatch.setattr("click.style", lambda text, **_: f"\x1b[31m{text}\x1b[0m")
    assert cli.run(["doctor", "--report"]) == 0
    said = capsys.readouterr().out
    assert " in ~/env, Linux" in said and "/scratch/USER_2/bin/mpirun" in said
    assert "HOROVOD_TIMELINE=~/t.json on HOST\n" in said
    assert "HOROVOD_AUTOTUNE_LOG=/home/USER/canada/USER\n" in said
    assert "\x1b" not in said and "5ekr1t" not in said
    assert cli.run(["doctor", "--report", "--json"]) == 2
    assert "give one of them" in capsys.readouterr().err
