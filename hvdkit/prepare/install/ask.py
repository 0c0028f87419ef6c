"""Asks a program on this machine one question, such as its version."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

PATIENCE_SECONDS = 60
"""A wrapper on a slow parallel file system may take seconds; one that takes longer is broken."""


@dataclass(frozen=True)
class Answer:
    """What the program said (standard output and error together) and whether it succeeded."""

    text: str
    ok: bool

    @property
    def first_line(self) -> str:
        """The first line that is not empty, "" when there is none."""
        return next((line.strip() for line in self.text.splitlines() if line.strip()), "")


def ask(argv: Sequence[str], stdin: str = "") -> Answer:
    """Run a program to its end and return what it said; one that cannot be run is an answer too."""
    try:
        done = subprocess.run(
            list(argv),
            input=stdin.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PATIENCE_SECONDS,
            env={**os.environ, "LC_ALL": "C"},
            check=False,
        )
    except OSError as error:
        return Answer(f"{argv[0]} cannot be run: {error.strerror}", ok=False)
    except subprocess.TimeoutExpired:
        return Answer(f"{argv[0]} did not answer within {PATIENCE_SECONDS} s", ok=False)
    return Answer(done.stdout.decode(errors="replace"), ok=done.returncode == 0)
