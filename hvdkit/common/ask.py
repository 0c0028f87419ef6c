"""Asks a program on this machine one question, such as its version."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

PATIENCE_SECONDS = 120
"""On a slow parallel file system a wrapper or a small compilation may take seconds; what takes longer is broken."""
_VERSION_SECONDS = 30
LONGEST = 1 << 20
"""Bytes of an answer; who says more is broken too."""


@dataclass(frozen=True)
class Answer:
    """What the program said (standard output and error together), whether it succeeded, and whether it ended at all."""

    text: str
    ok: bool
    ended: bool = True

    @property
    def first_line(self) -> str:
        """The first line that is not empty, "" when there is none."""
        return next(iter(self._lines), "")

    @property
    def problem(self) -> str:
        """The first line that speaks of an error, else the last one."""
        last = self._lines[-1] if self._lines else "it says nothing"
        return next((line for line in self._lines if "error" in line.lower()), last)

    @property
    def _lines(self) -> list[str]:
        return [line.strip() for line in self.text.splitlines() if line.strip()]


def version(program: Path, environ: Mapping[str, str]) -> Answer:
    """What a program says of its version."""
    return ask([str(program), "--version"], environ=environ, seconds=_VERSION_SECONDS)


def ask(
    argv: Sequence[str],
    stdin: str = "",
    environ: Mapping[str, str] | None = None,
    seconds: float = PATIENCE_SECONDS,
) -> Answer:
    """Run a program to its end and return what it said; one that cannot be run is an answer too.

    Args:
        argv: program and arguments.
        stdin: what it reads.
        environ: its environment; default: that of this process.
        seconds: that it may take.
    """
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**(os.environ if environ is None else environ), "LC_ALL": "C"},
            start_new_session=True,  # so that what it starts ends with it
        )
    except OSError as error:
        return Answer(f"{argv[0]} cannot be run: {error.strerror}", ok=False)
    said, status = _hear(process, stdin.encode(), seconds)
    if status == -signal.SIGKILL and len(said) < LONGEST:
        return Answer(f"{argv[0]} did not answer within {seconds:g} s", ok=False, ended=False)
    return Answer(said.decode(errors="replace"), ok=status == 0)


def _hear(process: subprocess.Popen[bytes], stdin: bytes, seconds: float) -> tuple[bytes, int]:
    """What a process says and its exit status; it is killed when it takes too long, or says too much."""

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    patience = threading.Timer(seconds, end)
    patience.start()
    with process:
        try:
            with contextlib.suppress(BrokenPipeError), cast(IO[bytes], process.stdin) as asked:
                asked.write(stdin)
            said = cast(IO[bytes], process.stdout).read(LONGEST)
            if len(said) == LONGEST:
                end()
            return said, process.wait()
        except BaseException:
            end()
            raise
        finally:
            patience.cancel()
