"""Submit a batch script, wait with its owner, show what the job prints. Each batch system is a row of a table."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import click

from hvdkit.errors import LaunchError
from hvdkit.jobs.job.site import BatchJob

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
        code: its exit status once it has ended, None before.
        log: the file that it prints to, "" where it is not said.
        why: why it waits, "" where it does not or nothing says so.
    """

    word: str
    code: int | None = None
    log: str = ""
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
    word, log, why = _field(text, "JobState"), _field(text, "StdOut", r".+"), _field(text, "Reason")
    if word not in _SLURM_ENDS:
        return State(word, None, log, why if word == "PENDING" and why != "None" else "") if word else None
    code, _, number = _field(text, "ExitCode").partition(":")
    status = int(code or 0) or (128 + int(number) if number.isdigit() and int(number) else 0)
    return State(word, status or int(word != "COMPLETED"), log)


_PBS_WORDS = {"Q": "queued", "R": "running", "E": "exiting", "F": "finished", "H": "held", "W": "waiting"}


def _pbs(text: str) -> State | None:
    """Source: PBS Professional, qstat(1B) ``-x -f``; long lines go on after a tab. A signal is 256 and its number."""
    text = text.replace("\n\t", "")
    word, log = _field(text, "job_state"), _field(text, "Output_Path", r".+").rpartition(":")[2]  # HOST:PATH, or PATH
    if word != "F":
        why = _field(text, "comment", r".+") if word == "Q" else ""
        return State(_PBS_WORDS.get(word, word), None, log, why) if word else None
    code = int(_field(text, "Exit_status", r"-?\d+") or 1)
    if code < 0:
        code = 1
    return State(_PBS_WORDS[word], code if code < 256 else 128 + code % 256, log)


def _lsf(text: str) -> State | None:
    """Source: bjobs(1), ``-noheader -o 'stat exit_code'``."""
    words = text.split()
    if not words or not words[0].isupper():
        return None
    code = int(words[1]) if len(words) > 1 and words[1].isdigit() else 1
    return State(words[0], {"DONE": 0, "EXIT": code or 1}.get(words[0]))


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
    number = match[1]
    click.echo(f"Job {number} is submitted to {system}.", err=True)
    if job.array and not stopped:
        return 0
    log = (job.log or f"{job.name}.%J.log").replace("%J", number) if system == "lsf" else ""
    try:
        if stopped:
            raise KeyboardInterrupt
        with ExitStack() as stack:
            last = _follow(way, number, log, stack)
    except KeyboardInterrupt:
        click.echo(f"\nJob {number} goes on; to end it: {way.cancel} {number}", err=True)
        return 130
    click.echo(f"Job {number} has ended: {last.word}, exit status {last.code}.", err=True)
    return last.code or 0


def _follow(way: Following, number: str, log: str, stack: ExitStack) -> State:
    """Ask and show, until it has ended; its last state.

    Args:
        log: the file that it prints to, "" where the batch system says it.
        stack: closes what is opened.
    """
    before, unseen, shown = "", 0, None
    while unseen < _UNSEEN:
        state = None
        try:
            done = subprocess.run([*way.ask, number], capture_output=True, text=True, check=False, timeout=_ASK_S)
            state = way.read(done.stdout)
        except (OSError, subprocess.TimeoutExpired):  # a busy controller; it is asked again
            pass
        unseen = unseen + 1 if state is None else 0
        if state is not None:
            log = log or state.log
            said = f"{state.word.lower()} ({state.why})" if state.why else state.word.lower()
            if said != before and state.code is None:
                click.echo(f"Job {number}: {said}", err=True)
            before = said
        shown = shown or _opened(log, stack)
        _show(shown)
        if state is not None and state.code is not None:
            end = time.monotonic() + _LATE_S
            while log and time.monotonic() < end:  # PBS copies the log only now, and file servers are late
                time.sleep(POLL_S)
                shown = shown or _opened(log, stack)
                if not _show(shown) and shown is not None:
                    break
            if log and shown is None:
                click.echo(f"Its log, {log}, is not here.", err=True)
            return state
        time.sleep(POLL_S)
    raise LaunchError(
        f"{way.ask[0]} no longer knows job {number} (last seen: {before.upper() or 'never'}), nor therefore hvdkit how "
        "it ended; look at its log."
    )


def _opened(log: str, stack: ExitStack) -> BinaryIO | None:
    return stack.enter_context(Path(log).open("rb")) if log and Path(log).is_file() else None


def _show(log: BinaryIO | None) -> bool:
    """Print what is new in a log; whether there was anything."""
    if log is not None and os.fstat(log.fileno()).st_size < log.tell():
        log.seek(0)  # the job was queued again, and its log begins anew
    new = b"" if log is None else log.read()
    sys.stdout.flush()
    sys.stdout.buffer.write(new)  # as it is: a character may be in two parts
    sys.stdout.buffer.flush()
    return bool(new)
