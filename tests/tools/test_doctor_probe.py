"""The doctor's probes against packages that crash, hang, lie and print: each is a fact, none stops the doctor.

The packages are a few lines of Python in an environment that holds nothing else, so that no framework is needed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from msgspec.structs import replace
from test_doctor_checks import RECORD

from hvdkit.common import json_files
from hvdkit.errors import HvdkitError
from hvdkit.prepare.doctor import probe
from hvdkit.prepare.doctor.checks import CHECKS
from hvdkit.prepare.doctor.facts import DoctorFacts
from hvdkit.prepare.doctor.finding import Found, examine
from hvdkit.prepare.doctor.probe import gather, plain, run
from hvdkit.prepare.install.record import MpiRecord

HOROVOD_TORCH = """
def mpi_built(): return True
def gloo_built(): return True
def nccl_built(): return 0
def cuda_built(): return False
rocm_built = ccl_built = ddl_built = cuda_built
"""
TORCH = """
__version__ = "{version}"
class version: cuda = None
class cuda:
    @staticmethod
    def is_available(): return False
"""


Write = Callable[..., dict[str, str]]
"""Writes packages (name -> source of its __init__.py); returns the environment that finds them."""


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Interpreter of an environment without any package."""
    directory = tmp_path_factory.mktemp("bare")
    venv.create(directory, with_pip=False, symlinks=True)
    return str(directory / "bin" / "python")


@pytest.fixture
def packages(tmp_path: Path) -> Write:
    def write(**sources: str) -> dict[str, str]:
        for name, source in sources.items():
            (tmp_path / name).mkdir(parents=True)
            (tmp_path / name / "__init__.py").write_text(source)
        return {**os.environ, "PYTHONPATH": str(tmp_path)}

    return write


@pytest.fixture
def sound(packages: Write, tmp_path: Path) -> dict[str, str]:
    """Finds PyTorch 2.9, and a Horovod with an extension for it, in plain Python."""
    root = tmp_path / "horovod"
    (root / "torch").mkdir(parents=True)
    (root / "__init__.py").write_text('__version__ = "0.28.1"')
    (root / "torch" / "__init__.py").write_text(HOROVOD_TORCH)
    (root / "torch" / ("mpi_lib_v2" + sysconfig.get_config_var("EXT_SUFFIX"))).touch()
    (root / "metadata.json").write_text(json.dumps({"pytorch": "2.9.0+cpu"}))
    return packages(torch=TORCH.format(version="2.9.0+cpu"))


def found(facts: DoctorFacts) -> dict[str, Found]:
    return {one.check: one for one in examine(CHECKS, facts)}


def test_an_environment_without_anything_gets_the_commands_that_fill_it(bare_python: str) -> None:
    facts = gather(bare_python, {"PATH": os.environ["PATH"]})
    findings = found(facts)
    assert not any(package.present for package in facts.packages.values())
    assert "pip install torch" in findings["no-framework"].fix
    assert "hvdkit install" in findings["horovod-missing"].fix
    assert findings["no-framework"].level == findings["horovod-missing"].level == "error"
    assert facts.prefix == str(Path(bare_python).parent.parent)


def test_a_sound_environment_is_working_and_has_no_error(bare_python: str, sound: dict[str, str]) -> None:
    facts = gather(bare_python, sound)
    assert facts.packages["torch"].version == "2.9.0+cpu"
    assert facts.horovod.version == "0.28.1"
    assert facts.extensions["torch"].built == ("MPI", "Gloo")
    assert facts.trained == {}  # another Python than the one that hvdkit launch starts
    assert not [finding for finding in found(facts).values() if finding.level == "error"]


@pytest.mark.parametrize(
    ("source", "how", "words"),
    [
        ("raise ImportError('libfoo.so: undefined symbol: _Zfoo')", "raised", "undefined symbol: _Zfoo"),
        ("import numpy_that_is_not_here", "raised", "No module named 'numpy_that_is_not_here'"),
        ("def f(): return (", "raised", "SyntaxError"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "signal", "SIGSEGV"),
        ("import os, sys; sys.stderr.write('what(): bad\\n\\n---\\n'); os.abort()", "signal", "SIGABRT: what(): bad"),
        ("import sys; sys.exit(3)", "raised", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "raised", "KeyboardInterrupt"),
        ("import os; os._exit(0)", "exit", "exit status 0"),
        ("import os; os.close(2); os.close(1); os._exit(7)", "exit", "exit status 7"),
        ("", "raised", "no __version__"),
    ],
)
def test_an_import_that_crashes_is_a_finding_with_its_message(
    bare_python: str, packages: Write, source: str, how: str, words: str
) -> None:
    facts = gather(bare_python, packages(torch=source))
    failure = facts.packages["torch"].failure
    assert failure.how == how
    assert words in failure.message
    finding = found(facts)["import-torch"]
    assert finding.level == "error"
    assert words in finding.what
    assert "PYTHONPATH" in finding.fix or "pip install" in finding.fix


def test_one_crash_does_not_hide_the_others(bare_python: str, packages: Write) -> None:
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    facts = gather(bare_python, packages(torch=crash, tensorflow="1/0", mpi4py="1/0", horovod=crash))
    findings = found(facts)
    assert "ZeroDivisionError" in facts.packages["mpi4py"].failure.message
    assert {"import-torch", "import-tensorflow", "import-horovod"} <= findings.keys()
    assert "ZeroDivisionError" in findings["import-tensorflow"].what


def test_the_missing_dependency_is_what_the_fix_installs(bare_python: str, packages: Write) -> None:
    facts = gather(bare_python, packages(horovod="import cloudpickle"))
    assert "pip install cloudpickle" in found(facts)["import-horovod"].fix


EXTENSIONS = {"torch": "/a/mpi_lib_v2.so", "tensorflow": "/a/mpi_lib.so"}
WHOLE = [
    ["tensorflow", "tensorflow.extension", "keras", "tensorflow.keras", "tensorflow.devices"],
    ["torch", "torch.extension", "torch.devices"],
    ["mpi4py"],
    ["horovod"],
]


@pytest.mark.parametrize(
    ("present", "extensions", "stages"),
    [
        ("torch tensorflow keras mpi4py horovod", EXTENSIONS, WHOLE),
        ("torch horovod", {**EXTENSIONS, "torch": None}, [["torch", "torch.devices"], ["horovod"]]),
        ("torch tensorflow", {}, [["tensorflow", "tensorflow.devices"], ["torch", "torch.devices"]]),
        ("keras horovod", EXTENSIONS, [["keras"], ["horovod"]]),
        ("", {}, []),
    ],
)
def test_what_is_absent_is_not_looked_at(
    present: str, extensions: dict[str, str | None], stages: list[list[str]]
) -> None:
    names = ("torch", "tensorflow", "keras", "mpi4py", "horovod")
    packages = {name: {"present": name in present.split()} for name in names}
    assert probe.processes({"packages": packages, "extensions": extensions}) == stages


@pytest.mark.slow
def test_a_hanging_import_ends_at_the_time_limit_with_what_it_started(bare_python: str, packages: Write) -> None:
    environ = packages(torch="import subprocess; subprocess.run(['sleep', '1000'])")
    outcomes = run(bare_python, [["torch", "torch.devices"]], environ, 2)
    failure = outcomes["torch"]
    assert failure.how == "timeout"
    assert "2 s" in failure.message
    assert "torch.devices" not in outcomes


def test_who_is_interrupted_leaves_no_child(bare_python: str, packages: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = packages(torch="1/0", horovod="import threading; threading.Event().wait()")
    children = []
    start = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *given, **more: children.append(start(*given, **more)) or children[-1]
    )
    monkeypatch.setattr(probe, "_all_of", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(bare_python, [["torch"], ["horovod"]], environ, 600)
    assert children[1].returncode == -signal.SIGKILL


def test_what_a_package_prints_is_not_taken_for_an_answer(bare_python: str, packages: Write) -> None:
    noise = """
import os, sys
line = '{"stage": "torch", "value": {"version": "6.6.6"}}\\n{"begin": "torch"}\\n\\xff garbage'
print(line); sys.stderr.write(line); os.write(1, line.encode("latin-1")); os.write(2, line.encode("latin-1"))
__version__ = "2.9.0"
"""
    assert gather(bare_python, packages(torch=noise)).packages["torch"].version == "2.9.0"


def test_drift_is_an_error_when_the_extension_fails(bare_python: str, sound: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "torch/__init__.py").write_text(TORCH.format(version="2.8.1+cpu"))
    (tmp_path / "horovod/torch/__init__.py").write_text("raise ImportError('mpi_lib_v2.so: undefined symbol: _ZN2at')")
    findings = found(gather(bare_python, sound))
    assert findings["drift-torch"].level == "error"
    assert "_ZN2at" in findings["drift-torch"].why
    assert "extension-torch" not in findings  # one cause, one finding


def test_an_extension_for_another_python_is_none(bare_python: str, sound: dict[str, str], tmp_path: Path) -> None:
    (built,) = (tmp_path / "horovod/torch").glob("mpi_lib_v2*")
    built.rename(built.with_name("mpi_lib_v2.cpython-39-x86_64-linux-gnu.so"))
    facts = gather(bare_python, sound)
    assert (facts.extensions["torch"].file, facts.extensions["torch"].failure) == (None, None)
    assert found(facts)["extension-missing-torch"].level == "error"


def test_nothing_is_said_of_gpus_where_an_extension_kills_the_process(
    bare_python: str, sound: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "horovod/torch/__init__.py").write_text("import os; os._exit(3)")
    facts = gather(bare_python, sound)
    assert facts.extensions["torch"].failure.how == "exit" and facts.devices == {}


def test_a_broken_tensorflow_is_not_imported_again_for_keras(bare_python: str, packages: Write) -> None:
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    facts = gather(bare_python, packages(tensorflow=crash, keras="import tensorflow"))
    assert facts.packages["keras"].failure is None
    assert facts.packages["keras"].version is None
    assert "import-tensorflow" in found(facts)


def test_the_build_record_is_read_with_the_mpirun_it_names(
    bare_python: str, sound: dict[str, str], tmp_path: Path
) -> None:
    mpirun = tmp_path / "mpi" / "bin" / "mpirun"
    mpirun.parent.mkdir(parents=True)
    mpirun.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'\n")
    mpirun.chmod(0o755)
    record = replace(RECORD, torch="2.8.0", mpi=MpiRecord("Open MPI", "4.1.4", str(mpirun.parent), wheel=False))
    (tmp_path / "horovod" / "hvdkit-build.json").write_text(json_files.encode(record))
    facts = gather(bare_python, sound)
    assert facts.record == record
    assert (str(mpirun), "4.1.4") in [(launcher.path, launcher.version) for launcher in facts.mpi_launchers]
    findings = found(facts)
    assert "2.8.0 (hvdkit-build.json)" in findings["drift-torch"].what


def test_a_damaged_build_record_counts_as_none(bare_python: str, sound: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "horovod" / "hvdkit-build.json").write_bytes(b"\xff{")
    (tmp_path / "horovod" / "metadata.json").write_text("[not json")
    facts = gather(bare_python, sound)
    assert (facts.record, facts.metadata) == (None, {})


def test_a_probe_is_no_part_of_a_job() -> None:
    launched = {
        "HOROVOD_RANK": "1",
        "HOROVOD_SIZE": "2",
        "HOROVOD_TIMELINE": "/tmp/never-written.json",
        "OMPI_COMM_WORLD_RANK": "1",
        "PMIX_NAMESPACE": "n",
        "PMI_RANK": "1",
        "SLURM_PROCID": "1",
        "SLURM_STEP_ID": "0",
    }
    kept = {"HOROVOD_GLOO_IFACE": "lo", "OMPI_MCA_btl": "self,tcp", "CUDA_VISIBLE_DEVICES": "0", "SLURM_JOB_ID": "7"}
    environ = plain({**launched, **kept})
    assert not launched.keys() & environ.keys()
    assert kept.items() <= environ.items()


def test_an_interpreter_that_does_not_run_is_one_clear_error(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no such library' >&2\nexit 127\n")
    broken.chmod(0o755)
    with pytest.raises(HvdkitError, match="no such library"):
        gather(str(broken), dict(os.environ))
    with pytest.raises(HvdkitError, match="cannot be started: No such file"):
        gather(str(tmp_path / "absent"), dict(os.environ))
