"""Starts ranks once for many checks, each a test of its own.

To start a rank with Keras costs seconds of processor time, most checks cost less. So a program file has a function that
runs many checks on the same ranks, one after the other (``programs_checks.run_checks``), and a test asks for its own:
``start_once(...)("name of the check")`` is what each rank found in it. A check that fails fails only its own test.
"""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
TIMEOUT = 280  # seconds for all checks of a start
# A check that fails on one rank leaves the others waiting in theirs: after so many seconds Horovod ends them all.
STALLED = "150"

# Most of a small training on jax is compiling; this is a third less, and all ranks compute with the same code.
COMPILE_FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def environment_of(backend: str) -> dict[str, str]:
    """What a start on a backend of Keras has in its environment."""
    return {"KERAS_BACKEND": backend, **({"XLA_FLAGS": COMPILE_FAST} if backend == "jax" else {})}


class Start:
    """What n ranks left in a directory."""

    def __init__(self, directory: Path, n: int) -> None:
        self.directory, self.n = directory, n

    def said(self) -> str:
        """How the job ended."""
        file = self.directory / "ended"
        return file.read_text() if file.exists() else "nothing, it was interrupted"

    def __call__(self, check: str) -> list[Any]:
        """What each rank found in a check, by rank; fails the test where the check failed or was not reached."""
        files = [self.directory / f"{check}.{rank}.json" for rank in range(self.n)]
        missing = [rank for rank, file in enumerate(files) if not file.exists()]
        outcomes = [json.loads(file.read_text()) for file in files if file.exists()]
        failures = [outcome["failed"] for outcome in outcomes if "failed" in outcome]
        if missing:
            failures.append(f"not reached by ranks {missing}; the job said: {self.said()}")
        if failures:
            pytest.fail(f"check {check!r}:\n" + "\n".join(failures), pytrace=False)
        return [outcome["found"] for outcome in outcomes]


class StartOnce:
    """Starts a program on ranks when the first test asks, in whichever of pytest's workers; the others wait for it.

    Args:
        ranks_command: the fixture of that name.
        tmp_path_factory: pytest's.
    """

    def __init__(self, ranks_command: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> None:
        self._ranks_command = ranks_command
        base = tmp_path_factory.getbasetemp()
        self._base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def __call__(
        self, program: str, function: str, n: int, backend: str, *, controller: str = "mpi", **arguments: Any
    ) -> Start:
        """Run ``function(directory, **arguments)`` of a program file on n ranks, with Keras on a backend."""
        directory = self._base / f"{Path(program).stem}-{function}-{n}-{backend}-{controller}"
        with directory.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not directory.exists():
                directory.mkdir()
                values = json.dumps({"directory": str(directory), **arguments})
                launch, environment = self._ranks_command(n, controller)
                environment.update(environment_of(backend), HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=STALLED)
                start = [*launch, sys.executable, str(HERE / "rank_main.py"), str(HERE / program), function]
                said = run([*start, str(directory), values], environment, directory)
                (directory / "ended").write_text(said)
        return Start(directory, n)


def run(command: list[str], environment: dict[str, str], directory: Path) -> str:
    """Run a command to its end, if it has one; its exit status and what it said last."""
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, cwd=directory)
    except subprocess.TimeoutExpired as error:
        return str(error)
    return f"exit {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
