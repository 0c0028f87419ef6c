"""The command ``hvdkit test``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from hvdkit.common import json_files
from hvdkit.common.commands import JSON, time_limit
from hvdkit.common.json_files import Document, Part
from hvdkit.prepare.doctor import host

FRAMEWORKS = ("torch", "tensorflow", "keras")
RANKS = 2
CHECKS = ("allreduce", "training")
"""What a rank says of, in this order."""
_SAID = re.compile(r"hvdkit test: (\w+): (.*)")
_REASONS = (r"hvdkit: .*|(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*", r"hvdkit launch: .*")
"""Lines of a failed job that say why, the better ones first: a sentence of a rank, or the end of its traceback."""


class Tested(Part, frozen=True):
    """One check.

    Attributes:
        check: "Horovod", "framework", or a framework and what was done in it, such as "torch training".
        ok: it passed.
        what: what was seen, or what is wrong.
        fix: what to do; "" where it passed.
    """

    check: str
    ok: bool
    what: str
    fix: str = ""


class SmokeTest(Document, frozen=True):
    """What ``hvdkit test`` found.

    Attributes:
        ok: every check passed.
        checks: in their order.
    """

    kind = "test"
    written_by = "hvdkit test --json"

    ok: bool
    checks: tuple[Tested, ...]


@click.command()
@JSON
@click.option(
    "--framework",
    "frameworks",
    multiple=True,
    type=click.Choice(FRAMEWORKS),
    help="Framework to test; repeatable  [default: all that are installed]",
)
@time_limit(120.0, "Time limit for each framework; raise it on a slow network file system.")
def test(json_: bool, frameworks: tuple[str, ...], timeout: float) -> int:
    """Train on 2 ranks of this machine, in every installed framework, to see that it works.

    Builds and changes nothing. For each of PyTorch, TensorFlow and Keras, `hvdkit launch` starts 2 ranks. They add up
    their numbers through Horovod, each takes 10 training steps on data of its own, and their weights must be the same
    afterwards, bit for bit. GPUs are used where there is one for each rank. Takes about half a minute.

    \b
    Examples:
      hvdkit test
      hvdkit test --framework torch
      hvdkit test --json > test.json

    One line a check: "ok", or what is wrong and the fix; `hvdkit doctor` tells the reasons. The JSON object has "ok"
    and "checks" (check, ok, what, fix).

    Exit status: 0 when all works, 1 when a check failed, 2 for bad usage.
    """
    found = []
    for one in checks(frameworks, timeout):
        found.append(one)
        if not json_:
            click.echo(line(one))
    ok = all(one.ok for one in found)
    if json_:
        click.echo(json_files.encode(SmokeTest(ok, tuple(found))), nl=False)
    else:
        failed = sum(not one.ok for one in found)
        click.echo("\nTraining works here." if ok else f"\n{failed} of {len(found)} checks failed.")
    return 0 if ok else 1


def line(one: Tested) -> str:
    """A check for people."""
    word = click.style("ok    ", fg="green") if one.ok else click.style("failed", fg="red")
    return f"{word}  {one.check.ljust(20)}  {one.what}" + (f"  Fix: {one.fix}" if one.fix else "")


def checks(frameworks: Sequence[str], timeout_s: float) -> Iterator[Tested]:
    """Every check as it is done.

    Args:
        frameworks: those to test; () for all that are installed.
        timeout_s: seconds for each of them.
    """
    wanted = frameworks or tuple(name for name in FRAMEWORKS if importlib.util.find_spec(name) is not None)
    if not wanted:
        fix = "'pip install torch' or 'pip install tensorflow', then 'hvdkit install'."
        yield Tested("framework", False, f"None of {', '.join(FRAMEWORKS)} is installed.", fix)
        return
    if importlib.util.find_spec("horovod") is None:
        yield Tested("Horovod", False, "Horovod is not installed.", "'hvdkit install' builds it for what is here.")
        return
    yield Tested("Horovod", True, f"{importlib.metadata.version('horovod')} is installed")
    device = "gpu" if len(host.gpus(Path("/"))) >= RANKS else "cpu"
    for framework in wanted:
        yield from train(framework, device, timeout_s)


def train(
    framework: str, device: str, timeout_s: float, environment: Mapping[str, str] | None = None
) -> Iterator[Tested]:
    """Start the ranks of a framework, and read what they say; after a check that failed there is no other.

    Args:
        framework: one of ``FRAMEWORKS``.
        device: "gpu" or "cpu".
        timeout_s: seconds until the job is ended.
        environment: of the job, None for that of this process.
    """
    job = ["launch", "-n", str(RANKS), "--no-tag", "--", "python", "-m", "hvdkit.synthetic.smoke"]
    job += [framework, str(RANKS), device]
    again = f"'hvdkit doctor' tells more, and so does the job itself: {shlex.join(['hvdkit', *job])}"
    try:
        done = subprocess.run(
            [sys.executable, "-m", "hvdkit.cli", *job],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
            env=environment,
        )
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:  # hvdkit launch leaves no rank behind, even when it is killed
        status, output = None, late.stdout or b""
    lines = output.decode(errors="replace").splitlines()
    said = [(match[1], match[2]) for text in lines if (match := _SAID.search(text))]
    for check in CHECKS:
        told = [what for name, what in said if name == check]
        if len(told) == RANKS and (status == 0 or check != CHECKS[-1]):
            yield Tested(f"{framework} {check}", True, told[0])
        else:
            if status is None:
                why = f"It did not end within {timeout_s:g} s."
                again = f"'--timeout {5 * timeout_s:g}' if it is only slow; else {again}"
            else:
                why = reason(lines, status)
            yield Tested(f"{framework} {check}", False, why, again)
            return


def reason(lines: Sequence[str], status: int) -> str:
    """Why a job failed, from its last line that says so."""
    for pattern in _REASONS:
        told = [text.strip() for text in lines if re.fullmatch(pattern, text.strip())]
        if told:
            return told[-1].removeprefix("hvdkit: ")
    return f"The job ended with exit status {status}."
