"""Asks a program on this machine one question, such as its version."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PATIENCE_SECONDS = 120
"""On a slow parallel file system a wrapper or a small compilation may take seconds; what takes longer is broken."""


@dataclass(frozen=True)
class Answer:
    """What the program said (standard output and error together) and whether it succeeded."""

    text: str
    ok: bool

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


def ask(argv: Sequence[str], stdin: str = "", environ: Mapping[str, str] | None = None) -> Answer:
    """Run a program to its end and return what it said; one that cannot be run is an answer too.

    Args:
        argv: program and arguments.
        stdin: what it reads.
        environ: its environment; default: that of this process.
    """
    try:
        done = subprocess.run(
            list(argv),
            input=stdin.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PATIENCE_SECONDS,
            env={**(os.environ if environ is None else environ), "LC_ALL": "C"},
            check=False,
        )
    except OSError as error:
        return Answer(f"{argv[0]} cannot be run: {error.strerror}", ok=False)
    except subprocess.TimeoutExpired:
        return Answer(f"{argv[0]} did not answer within {PATIENCE_SECONDS} s", ok=False)
    return Answer(done.stdout.decode(errors="replace"), ok=done.returncode == 0)
