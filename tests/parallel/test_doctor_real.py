"""The doctor on the real PyTorch, TensorFlow, Horovod and MPI of this environment."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import missing

from hvdkit.prepare.doctor.children import Children

pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(missing("torch")), reason="needs PyTorch and Horovod (`make test` installs all)"),
]

REPOSITORY = Path(__file__).parent.parent.parent


def doctor(*packages: Path, **variables: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, report and output of ``hvdkit doctor --json`` with ``packages`` in front of the installed ones."""
    paths = os.pathsep.join(map(str, [*packages, REPOSITORY]))
    result = subprocess.run(
        [sys.executable, "-m", "hvdkit.cli", "doctor", "--json"],
        env={**os.environ, "PYTHONPATH": paths, **variables},
        capture_output=True,
        text=True,
        timeout=280,
    )
    return result.returncode, json.loads(result.stdout), result.stdout


def test_what_is_here_is_working() -> None:
    status, report, output = doctor()
    assert {name: report["components"][name]["status"] for name in ("PyTorch", "Horovod", "MPI", "Gloo")} == {
        "PyTorch": "working",
        "Horovod": "working",
        "MPI": "working",
        "Gloo": "working",
    }
    assert status == 0
    assert report["ok"] is True
    assert report["facts"]["mpi4py_mpi"] == report["facts"]["extensions"]["torch"]["mpi"]
    assert len(socket.gethostname()) < 4 or f'"{socket.gethostname()}"' not in output


def test_another_pytorch_in_front_of_the_one_horovod_was_built_for(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text('__version__ = "1.99.0"')
    for other in ("tensorflow", "keras", "jax"):  # seconds each, and no matter here
        (tmp_path / f"{other}.py").write_text("raise ImportError('hidden')")
    status, report, _ = doctor(tmp_path)
    (drift,) = [finding for finding in report["findings"] if finding["check"] == "drift-torch"]
    assert status == 1
    assert drift["level"] == "error"
    assert "1.99.0" in drift["what"]
    assert report["facts"]["builds"][0]["frameworks"]["torch"] in drift["what"]


def test_a_pytorch_that_dies_leaves_the_rest_of_the_report(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    (tmp_path / "jax.py").write_text("raise ImportError('hidden')")  # TensorFlow would import it, and it takes seconds
    status, report, _ = doctor(tmp_path)
    assert status == 1
    assert "SIGSEGV" in next(f["what"] for f in report["findings"] if f["check"] == "import-torch")
    assert report["components"]["mpi4py"]["status"] == "working"
    if report["components"]["TensorFlow"]["status"] != "missing":
        assert report["components"]["MPI"]["status"] == "working"  # through TensorFlow


def test_gloo_that_finds_no_interface_ends_the_probe_and_not_the_doctor() -> None:
    children = Children(sys.executable, {**os.environ, "HOROVOD_GLOO_IFACE": "nope0"}, 120)
    outcomes = children.run(["torch", "torch.extension", "torch.run.Gloo", "mpi4py"])
    assert outcomes["torch.extension"]["built"]
    failure = outcomes["torch.run.Gloo"]
    assert failure is not None
    assert failure.how == "signal"
    assert "nope0" in failure.message
    assert "mpi4py" in outcomes


def test_inside_a_job_a_probe_is_still_a_single_process() -> None:
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if mpirun is None:
        pytest.skip("no mpirun")
    program = (
        "import os, sys; from hvdkit.prepare.doctor.children import Children; "
        "print(Children(sys.executable, os.environ, 120).run(['torch.run.MPI'])['torch.run.MPI'])"
    )
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [mpirun, "-n", "2", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", sys.executable, "-c", program]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280)
    assert result.stdout.split() == ["None", "None"], result.stderr


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs prlimit")
def test_training_does_not_work_where_no_launcher_can_start_ranks() -> None:
    """Every probe of a single process succeeds with so few open files."""
    command = ["prlimit", "--nofile=24", sys.executable, "-m", "hvdkit.cli", "doctor", "--json"]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280)
    (error,) = [finding for finding in json.loads(result.stdout)["findings"] if finding["level"] == "error"]
    assert (result.returncode, error["check"]) == (1, "launch")
    assert "this process may have 24 files open, too few for 2 ranks" in error["what"]
