"""Submit a batch script, wait with its owner, show what the job prints. Each batch system is a row of a table."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import click

from hvdkit.errors import LaunchError
from hvdkit.run.job.model import BatchJob

POLL_S = 2.0
"""Seconds between two questions to the batch system."""
_ASK_S = 60.0
_LATE_S = 20.0
"""Seconds that a log may take to be copied, after the batch system calls the job finished."""
_UNSEEN = 5
"""So many questions without an answer, one after the other, end the following."""


@dataclass(frozen=True, slots=True)
class State:
    """What a batch system says of a job.

    Attributes:
        word: its own word for the state.
        over: it has ended.
        code: its exit status, None while it has none.
        log: the file that it prints to, None where it is not said.
        why: why it waits, "" where it does not or nothing says so.
    """

    word: str
    over: bool = False
    code: int | None = None
    log: Path | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Following:
    """How to submit to a batch system and how to ask about a job.

    Attributes:
        submit: takes the script on its standard input.
        number: finds the job's number in what that prints.
        ask: up to the number.
        read: what the answer says; None where the job is not in it.
        cancel: up to the number.
    """

    submit: tuple[str, ...]
    number: re.Pattern[str]
    ask: tuple[str, ...]
    read: Callable[[str], State | None]
    cancel: str


def _field(text: str, name: str, words: str = r"\S+") -> str:
    match = re.search(rf"(?:^|\s){name} ?= ?({words})", text, re.MULTILINE)
    return match[1] if match else ""


_SLURM_ENDS = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL",
               "OUT_OF_MEMORY", "PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT"}  # fmt: skip
"""Every other state is that of a job that waits or runs, such as SIGNALING or STAGE_OUT."""


def _slurm(text: str) -> State | None:
    """Source: scontrol(1), ``show job``; squeue(1), job state codes. The exit status is CODE:SIGNAL."""
    word = _field(text, "JobState")
    if not word:
        return None
    over = word in _SLURM_ENDS
    code, _, number = _field(text, "ExitCode").partition(":")
    status = int(code or 0) or (128 + int(number) if number.isdigit() and int(number) else 0)
    if over and word != "COMPLETED":
        status = status or 1
    log = _field(text, "StdOut", r".+")
    why = _field(text, "Reason") if word == "PENDING" else ""
    return State(word, over, status if over else None, Path(log) if log else None, "" if why == "None" else why)


_PBS_WORDS = {"Q": "queued", "R": "running", "E": "exiting", "F": "finished", "H": "held", "W": "waiting"}


def _pbs(text: str) -> State | None:
    """Source: PBS Professional, qstat(1B) ``-x -f``; long lines go on after a tab. A signal is 256 and its number."""
    text = text.replace("\n\t", "")
    word = _field(text, "job_state")
    if not word:
        return None
    over, status = word == "F", _field(text, "Exit_status", r"-?\d+")
    code = int(status) if status else None
    if code is not None and not 0 <= code < 256:
        code = 128 + code % 256 if code > 0 else 1
    log = _field(text, "Output_Path", r".+").rpartition(":")[2]  # HOST:PATH, or the path alone
    return State(
        _PBS_WORDS.get(word, word),
        over,
        (1 if code is None else code) if over else None,
        Path(log) if log else None,
        _field(text, "comment", r".+") if word == "Q" else "",
    )


def _lsf(text: str) -> State | None:
    """Source: bjobs(1), ``-noheader -o 'stat exit_code'``."""
    words = text.split()
    if not words or not words[0].isupper():
        return None
    over = words[0] in ("DONE", "EXIT")
    code = int(words[1]) if len(words) > 1 and words[1].isdigit() else 1
    return State(words[0], over, (0 if words[0] == "DONE" else code or 1) if over else None)


SYSTEMS = {
    "slurm": Following(
        ("sbatch", "--parsable"),
        re.compile(r"^(\d+)(?:;.*)?$", re.MULTILINE),
        ("scontrol", "show", "job"),
        _slurm,
        "scancel",
    ),
    "pbs": Following(("qsub",), re.compile(r"^(\d+\S*)$", re.MULTILINE), ("qstat", "-x", "-f"), _pbs, "qdel"),
    "lsf": Following(
        ("bsub",), re.compile(r"Job <(\d+)>"), ("bjobs", "-noheader", "-o", "stat exit_code"), _lsf, "bkill"
    ),
}
"""The batch systems whose jobs can be followed."""


def submit(system: str, job: BatchJob, script: str) -> int:
    """Submit a script, show what the job prints until it ends, and return its exit status.

    An array of jobs is submitted only. Ctrl-C ends the following, not the job.

    Raises:
        LaunchError: the batch system is not here, takes no job, or no longer says what became of it.
    """
    way = SYSTEMS.get(system)
    if way is None:
        raise LaunchError(f"Jobs of {system} cannot be followed; write the script with -o, and submit it yourself.")
    number, stopped = _submitted(way, script)
    click.echo(f"Job {number} is submitted to {system}.", err=True)
    if job.array and not stopped:
        return 0
    log = Path((job.log or f"{job.name}.%J.log").replace("%J", number)) if system == "lsf" else None
    try:
        if stopped:
            raise KeyboardInterrupt
        with contextlib.closing(_Shown(log)) as shown:
            last = _follow(way, number, shown)
    except KeyboardInterrupt:
        click.echo(f"\nJob {number} goes on; to end it: {way.cancel} {number}", err=True)
        return 130
    click.echo(f"Job {number} has ended: {last.word}, exit status {last.code}.", err=True)
    return last.code or 0


def _submitted(way: Following, script: str) -> tuple[str, bool]:
    """Submit it; the job's number, and whether Ctrl-C came meanwhile."""
    program = shutil.which(way.submit[0])
    if program is None:
        raise LaunchError(f"There is no {way.submit[0]} on PATH; submit on a login node, or write the script with -o.")
    stopped, words = False, [program, *way.submit[1:]]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # In a session of its own Ctrl-C does not reach it, and cannot leave a job of which nobody knows.
    with subprocess.Popen(words, **pipes, start_new_session=True) as submitting:  # type: ignore[call-overload]
        try:
            out, error = submitting.communicate(script)
        except KeyboardInterrupt:
            stopped = True
            out, error = submitting.communicate()
    match = way.number.search(out)
    if submitting.returncode != 0 or match is None:
        said = " ".join((error.strip() or out.strip() or f"status {submitting.returncode}").split())
        raise LaunchError(f"{way.submit[0]} took no job: {said}")
    return match[1], stopped


def _follow(way: Following, number: str, shown: _Shown) -> State:
    """Ask and show, until it has ended; its last state."""
    before, unseen = "", 0
    while True:
        state = _asked(way, number)
        if state is None:
            unseen += 1
            if unseen == _UNSEEN:
                seen = before.upper() or "never"
                raise LaunchError(
                    f"{way.ask[0]} no longer knows job {number} (last seen: {seen}), nor therefore hvdkit how it "
                    "ended; look at its log."
                )
        else:
            unseen = 0
            shown.log = shown.log or state.log
            said = f"{state.word.lower()} ({state.why})" if state.why else state.word.lower()
            if said != before and not state.over:
                click.echo(f"Job {number}: {said}", err=True)
            before = said
        shown.go_on()
        if state is not None and state.over:
            shown.rest()
            return state
        time.sleep(POLL_S)


def _asked(way: Following, number: str) -> State | None:
    words: Sequence[str] = [*way.ask, number]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_ASK_S)
    except (OSError, subprocess.TimeoutExpired):  # a busy controller; it is asked again
        return None
    return way.read(done.stdout)


class _Shown:
    """The part of a growing file that has been printed.

    Attributes:
        log: the file, None while it is not known.
    """

    def __init__(self, log: Path | None) -> None:
        self.log = log
        self._file: BinaryIO | None = None

    def go_on(self) -> bool:
        """Print what is new; whether there was anything."""
        if self._file is None and self.log is not None and self.log.is_file():
            self._file = self.log.open("rb")
        if self._file is not None and os.fstat(self._file.fileno()).st_size < self._file.tell():
            self._file.seek(0)  # the job was queued again, and its log begins anew
        new = b"" if self._file is None else self._file.read()
        sys.stdout.flush()
        sys.stdout.buffer.write(new)  # as it is: a character may be in two parts
        sys.stdout.buffer.flush()
        return bool(new)

    def rest(self) -> None:
        """Print what comes when the job is over: PBS copies the log then, and file servers are late."""
        end = time.monotonic() + _LATE_S
        while self.log is not None and time.monotonic() < end:
            time.sleep(POLL_S)
            if not self.go_on() and self._file is not None:
                return
        if self.log is not None and self._file is None:
            click.echo(f"Its log, {self.log}, is not here.", err=True)

    def close(self) -> None:
        """Print no more."""
        if self._file is not None:
            self._file.close()
