"""Starts real ranks for the tests of this directory."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent


def rank_environment() -> dict[str, str]:
    """The environment of a rank: this one without an outer job's variables, one compute thread."""
    outer = ("HOROVOD_", "OMPI_", "PMIX_", "PMI_", "SLURM_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    environment.update(OMP_NUM_THREADS="1", TF_CPP_MIN_LOG_LEVEL="2", PYTHONPATH=str(HERE.parent.parent))
    environment["PATH"] = f"{BIN}{os.pathsep}{environment['PATH']}"
    if os.geteuid() == 0:
        environment.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    return environment


def launcher_argv(n: int, controller: str) -> list[str]:
    """How this directory starts n ranks: by plain mpirun or horovodrun, not by the launcher that it also tests."""
    if controller == "gloo":
        return [str(BIN / "horovodrun"), "--gloo", "--network-interface", "lo", "-np", str(n)]
    mpirun = shutil.which("mpirun", path=rank_environment()["PATH"])
    assert mpirun is not None, "no mpirun beside this Python or on PATH"
    yielding = ["--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
    return [mpirun, "-n", str(n), "--map-by", ":OVERSUBSCRIBE", *yielding]


@pytest.fixture
def ranks_command() -> Callable[[int, str], tuple[list[str], dict[str, str]]]:
    """What to put before a command to start it on n ranks, and their environment."""
    return lambda n, controller: (launcher_argv(n, controller) if n > 1 else [], rank_environment())


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[..., list[Any]]:
    """Run ``function`` of a program file beside the tests on n ranks; returns each rank's JSON result, by rank.

    With ``fails=True`` the job must fail, and what it wrote to stderr is returned.
    """

    def run(
        program: str, function: str, n: int, *, controller: str = "mpi", fails: bool = False, **arguments: Any
    ) -> list[Any]:
        out = tmp_path / f"{function}-{n}-{len(list(tmp_path.iterdir()))}"
        out.mkdir()
        command = [sys.executable, HERE / "rank_main.py", HERE / program, function, out, json.dumps(arguments)]
        start = launcher_argv(n, controller) if n > 1 else []
        done = subprocess.run(
            [*start, *map(str, command)], env=rank_environment(), capture_output=True, text=True, timeout=240, cwd=out
        )
        if fails:
            assert done.returncode != 0, done.stdout[-4000:]
            return [done.stderr]
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(n)]

    return run
