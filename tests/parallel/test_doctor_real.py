"""The doctor on the real PyTorch, TensorFlow, Horovod and MPI of this environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ranks import missing

pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(missing("torch")), reason="needs PyTorch and Horovod (`make test` installs all)"),
]

REPOSITORY = Path(__file__).parent.parent.parent


def doctor(*packages: Path, within: Sequence[str] = ()) -> tuple[int, dict[str, Any]]:
    """Exit status and report of ``hvdkit doctor --json`` with ``packages`` in front of the installed ones."""
    paths = os.pathsep.join(map(str, [*packages, REPOSITORY]))
    result = subprocess.run(
        [*within, sys.executable, "-m", "hvdkit.cli", "doctor", "--json", "--timeout", "250"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=900,
    )
    return result.returncode, json.loads(result.stdout)


def test_what_is_here_is_working() -> None:
    status, report = doctor()
    assert {report["components"][name]["status"] for name in ("PyTorch", "Horovod", "MPI")} == {"working"}
    assert all(check["ok"] for trained in report["facts"]["trained"].values() for check in trained["checks"])
    assert report["facts"]["trained"]["torch"]["controller"] == "MPI"
    assert status == 0
    assert report["ok"] is True
    assert report["facts"]["mpi4py_mpi"] == report["facts"]["extensions"]["torch"]["mpi"]


def test_another_pytorch_in_front_of_the_one_horovod_was_built_for(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text('__version__ = "1.99.0"')
    for other in ("tensorflow", "keras"):  # seconds each, and no matter here
        (tmp_path / f"{other}.py").write_text("raise ImportError('hidden')")
    status, report = doctor(tmp_path)
    (drift,) = [finding for finding in report["findings"] if finding["check"] == "drift-torch"]
    assert status == 1
    assert drift["level"] == "error"
    assert "1.99.0" in drift["what"]
    assert report["facts"]["record"]["torch"] in drift["what"]


def test_a_pytorch_that_dies_leaves_the_rest_of_the_report(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    status, report = doctor(tmp_path)
    assert status == 1
    assert "SIGSEGV" in next(f["what"] for f in report["findings"] if f["check"] == "import-torch")
    assert report["components"]["mpi4py"]["status"] == "working"
    if report["components"]["TensorFlow"]["status"] != "missing":
        assert report["components"]["MPI"]["status"] == "working"  # through TensorFlow


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs prlimit")
def test_training_does_not_work_where_no_launcher_can_start_ranks() -> None:
    """Every import succeeds with so few open files."""
    status, report = doctor(within=["prlimit", "--nofile=24"])
    (error,) = [finding for finding in report["findings"] if finding["level"] == "error"]
    assert (status, error["check"]) == (1, "launch")
    assert "this process may have 24 files open, too few for 2 ranks" in error["what"]
