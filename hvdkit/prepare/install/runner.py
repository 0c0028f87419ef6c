"""Runs one step of a build: every line into the log, its first error into the message, and no process left behind.

``InstallProgress`` shows how far it is.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import IO, TextIO, cast

from hvdkit.common.files import text_if_there
from hvdkit.common.units import share_text
from hvdkit.errors import InstallError

PATIENCE_SECONDS = 5.0
"""How long processes get to end by themselves before they are killed."""
LONGEST = 400
"""Characters of an error that are shown; the log has all of it."""
STEP = 10
"""Percent between two lines."""

_NINJA = re.compile(r"^\[\s*(?P<percent>\d+)%\] (?P<what>Building \w+ object|Linking \w+ \w+ library) (?P<path>\S+)")

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_COMPILER = re.compile(
    r"^(?:\S[^:\n]*:\d+(?::\d+)?: (?:fatal )?error: "  # GCC, Clang
    r"|\S[^(\n]*\(\d+\): (?:fatal |catastrophic )?error(?: #\d+)?: "  # nvcc, Intel
    r"|\S+: (?:fatal error|error|internal compiler error): "  # the driver: no such file, unknown option, killed
    r"|nvcc fatal\s*: "
    r"|virtual memory exhausted)"
)
_LINKER = re.compile(r"undefined reference to|undefined symbol|\bcannot find -l|ld: .*(?:error|cannot find|not found)")
_DISK = re.compile(r"No space left on device|Disk quota exceeded")
_CMAKE = re.compile(r"^CMake Error")
_KILLED = re.compile(r"[Kk]illed|virtual memory exhausted|cannot allocate memory|out of memory", re.IGNORECASE)
_NOT_FOUND_BY_SHELL = re.compile(r": (?:command )?not found$|: Permission denied$")
_PIP = re.compile(r"^ERROR: ")
_EXCEPTION = re.compile(r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt))(?:: |$)")


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
    if status == 0:
        return lines
    error, fix = first_error(lines), ""
    if status == -signal.SIGKILL and not is_out_of_memory(error):
        error = "the process was killed"
    if is_out_of_memory(error):
        fix = " (usually for want of memory: 'MAX_JOBS=1 hvdkit install' compiles one file at a time)"
    raise InstallError(f"{what} failed: {error}{fix}; the full log is {log}")


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
    for entry in Path("/proc").glob("[0-9]*"):
        # After the name, which is in parentheses and may hold anything: state, parent, group, session.
        state, *_, its_session = text_if_there(entry / "stat").rpartition(")")[2].split()[:4] or ["X", "X"]
        if its_session == str(session) and state not in "ZX":
            found.append(int(entry.name))
    return found


# What went wrong first, among the thousands of lines around it -------------------------------------------------------


def first_error(lines: Sequence[str]) -> str:
    """The first error that a person can act on, on one line.

    Errors of compiler, linker and CMake, in the order they appear; else pip's or Python's; else the last line.
    """
    clean = [_ANSI.sub("", line).rstrip() for line in lines]
    for number, line in enumerate(clean):
        if _CMAKE.match(line):
            return _short(_cmake_error(clean[number : number + 80]))
        if _COMPILER.match(line) or _LINKER.search(line) or _DISK.search(line):
            return _short(line)
    for pattern in (_NOT_FOUND_BY_SHELL, _PIP, _EXCEPTION):
        for line in clean:
            if pattern.search(line):
                return _short(line)
    last = [line for line in clean if line.strip()]
    return _short(last[-1]) if last else "it ended without saying why"


def is_out_of_memory(error: str) -> bool:
    """Whether an error is that of a compiler that the system ended, which it does when memory runs out."""
    return bool(_KILLED.search(error))


def _cmake_error(block: Sequence[str]) -> str:
    """CMake's own error with its text, or the compiler's when CMake only reports that one."""
    body = [line.strip() for line in takewhile(lambda line: not line or line.startswith(" "), block[1:])]
    compilers = next(filter(_COMPILER.match, body), None)
    return compilers or " ".join([block[0], *filter(None, body)])


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


# How far it is --------------------------------------------------------------------------------------------------------


class InstallProgress:
    """What the user sees while Horovod is installed: a line for each step, and for each tenth of the compilation."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._start = clock()
        self._next_percent = 0

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return self._clock() - self._start

    def say(self, text: str) -> None:
        """Show a line."""
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def compiling(self, line: str) -> None:
        """Take a line of the compile's output and show what it tells, a step of percent later than the last time."""
        match = _NINJA.match(line)
        if match is None or int(match["percent"]) < self._next_percent:
            return
        percent, name = int(match["percent"]), match["path"].rpartition("/")[2]
        file = f"linking {name}"
        if match["what"].startswith("Building"):
            file = f"{match['path'].partition('/CMakeFiles/')[0]}: {name.removesuffix('.o')}"
        self._next_percent = percent - percent % STEP + STEP
        minutes, seconds = divmod(int(self.seconds), 60)
        self.say(f"  compiling {share_text(percent / 100):>4}  {minutes}:{seconds:02d}  {file}")
