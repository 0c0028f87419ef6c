"""Ranks whose framework is imported once: ``fork_ranks`` of a test file instead of ``run_ranks``. See fork_main.py."""

import atexit
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import HERE, rank_environment

DIGITS = ("sklearn.datasets", "sklearn.model_selection")
TENSORFLOW = ("keras", "tensorflow", "horovod.tensorflow", *DIGITS)
TORCH = ("torch", "torch._dynamo", "horovod.torch", *DIGITS)
TIMEOUT_S = 240


class Forks:
    """A process that has imported ``modules``, started with the first job; it ends with the tests."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "fork_main.py"), *modules],
            env=rank_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        atexit.register(self._end)

    def run(self, words: list[str], n: int, out: Path) -> list[int]:
        """The exit statuses of n ranks of a job, by rank."""
        assert self._process.stdin is not None and self._process.stdout is not None
        job = {"words": words, "n": n, "out": str(out), "timeout": TIMEOUT_S}
        try:
            print(json.dumps(job), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        except BaseException:  # as when a test's time is over: what comes later is no answer to the next job
            os.killpg(self._process.pid, signal.SIGKILL)
            _forks.cache_clear()
            raise
        assert answer, f"the process that forks the ranks ended with status {self._process.wait()}"
        return list(json.loads(answer))

    def _end(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


_forks = functools.cache(Forks)


def starter(modules: tuple[str, ...], directory: Path) -> Callable[..., list[Any]]:
    """What a test file's fixture ``fork_ranks`` gives: runs a function of a program file on n ranks over Gloo.

    Returns each rank's JSON result, by rank. With ``fails=True`` the job must fail, and what it wrote is returned.
    """

    def run(program: str, function: str, n: int, *, fails: bool = False, **arguments: Any) -> list[Any]:
        out = directory / f"{function}-{n}-{len(list(directory.iterdir()))}"
        out.mkdir()
        words = [str(HERE / program), function, str(out), json.dumps(arguments)]
        statuses = _forks(modules).run(words, n, out)
        output = (out / "output").read_text(errors="replace")
        assert any(statuses) == fails, f"exit {statuses}\n{output[-8000:]}"
        return [output] if fails else [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(n)]

    return run
