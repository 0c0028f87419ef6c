"""Runs one step of a build: every line into the log, and no process left behind however it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, cast

from hvdkit.errors import InstallError
from hvdkit.prepare.install.failure import first_error, is_out_of_memory

PATIENCE_SECONDS = 5.0
"""How long processes get to end by themselves before they are killed."""


def run(
    argv: Sequence[str],
    *,
    what: str,
    environ: Mapping[str, str],
    cwd: Path,
    log: Path,
    on_line: Callable[[str], None] | None = None,
) -> list[str]:
    """Run a program to its end and return its lines.

    Args:
        argv: program and arguments.
        what: the step in words, for the error: "Compiling Horovod".
        environ: its whole environment.
        cwd: its working directory.
        log: file that gets the command and every line after what it has.
        on_line: called with each line as it comes.
    Raises:
        InstallError: it failed; the message holds its first error and the path of the log.
    """
    lines: list[str] = []
    with log.open("a", encoding="utf-8", errors="replace") as file, _process(argv, environ, cwd) as process:
        file.write(f"\n$ {' '.join(argv)}\n")
        for line in cast(IO[str], process.stdout):
            file.write(line)
            file.flush()
            lines.append(line)
            if on_line is not None:
                on_line(line)
        status = process.wait()
    if status != 0:
        raise InstallError(_message(what, status, lines, log))
    return lines


@contextlib.contextmanager
def _process(argv: Sequence[str], environ: Mapping[str, str], cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """Start ``argv`` in a session of its own; whatever happens, all of it has ended afterwards."""
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            cwd=cwd,
            encoding="utf-8",
            errors="replace",
            # A session of its own: Ctrl-C reaches hvdkit alone, which then ends them all.
            start_new_session=True,
        )
    except OSError as error:
        raise InstallError(f"{argv[0]} cannot be run: {error.strerror}.") from error
    try:
        yield process
    finally:
        end_session(process)
        cast(IO[str], process.stdout).close()


def end_session(process: subprocess.Popen[str]) -> None:
    """End a process and all that it started, also those that Ninja puts into process groups of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        members = session_members(process.pid)
        for member in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, number)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while members and time.monotonic() < deadline:
            process.poll()
            members = session_members(process.pid)
            time.sleep(0.01)
        if not members:
            break
    process.wait()


def session_members(session: int) -> list[int]:
    """Process ids in a session, without those that have ended and only wait to be collected."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        # After the name, which is in parentheses and may hold anything: state, parent, group, session.
        state, _parent, _group, its_session = text.rpartition(")")[2].split()[:4]
        if int(its_session) == session and state not in "ZX":
            found.append(int(entry.name))
    return found


def _message(what: str, status: int, lines: Sequence[str], log: Path) -> str:
    error = first_error(lines)
    if status == -signal.SIGKILL and not is_out_of_memory(error):
        error = "the process was killed"
    fix = ""
    if is_out_of_memory(error):
        fix = " (usually for want of memory: 'MAX_JOBS=1 hvdkit install' compiles one file at a time)"
    return f"{what} failed: {error}{fix}; the full log is {log}"
