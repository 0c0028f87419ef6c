"""Trains on 2 ranks of this machine: ``hvdkit launch`` starts ``hvdkit.synthetic.smoke``, and this reads what it says.

This is the start that a user's training has, in its environment and within its limits: whether training works here is
what it says, for ``hvdkit test`` and for ``hvdkit doctor``.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdkit.common.json_files import Part
from hvdkit.core import listeners
from hvdkit.prepare.doctor import host

RANKS = 2
CHECKS = ("allreduce", "training")
"""What a rank says of, in this order."""
_SAID = re.compile(r"hvdkit test: (\w+): (.*)")
_REASONS = (r"hvdkit: .*|(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*", r"hvdkit launch: .*")
"""Lines of a failed job that say why, the better ones first: a sentence of a rank, or the end of its traceback."""
WRITING = ("HOROVOD_TIMELINE", "HOROVOD_AUTOTUNE", "HOROVOD_AUTOTUNE_LOG", listeners.MONITOR)
"""Variables that have a training write files, which these few steps must not replace."""


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


class TwoRanks(Part, frozen=True):
    """What 2 ranks, started by ``hvdkit launch``, said in one framework.

    Attributes:
        checks: those that passed, and the first that failed.
        controller: "MPI" or "Gloo", over which they trained; "" where they did not come so far.
    """

    checks: tuple[Tested, ...]
    controller: str = ""

    @property
    def failed(self) -> Tested | None:
        """The check that failed, None where they train."""
        return next((one for one in self.checks if not one.ok), None)

    @property
    def problem(self) -> str | None:
        """Why they do not train, None where they do."""
        return self.failed.what.rstrip(".") if self.failed else None


def train(framework: str, timeout_s: float, environ: Mapping[str, str] = os.environ) -> TwoRanks:
    """Start the ranks of a framework, on GPUs where there is one for each, and read what they say.

    Args:
        framework: "torch", "tensorflow" or "keras".
        timeout_s: seconds until the job is ended.
        environ: of the job.
    """
    device = "gpu" if len(host.gpus(Path("/"))) >= RANKS else "cpu"
    job = ["launch", "-n", str(RANKS), "--no-tag", "--", "python", "-m", "hvdkit.synthetic.smoke"]
    job += [framework, str(RANKS), device]
    again = f"the job itself tells more: {shlex.join(['hvdkit', *job])}"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "hvdkit.cli", *job],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
            env={name: value for name, value in environ.items() if name not in WRITING},
        )
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:  # hvdkit launch leaves no rank behind, even when it is killed
        status, output = None, late.stdout or b""
    lines = output.decode(errors="replace").splitlines()
    said = [(match[1], match[2]) for text in lines if (match := _SAID.search(text))]
    controller = dict(said).get("controller", "")
    checks: list[Tested] = []
    for check in CHECKS:
        told = [what for name, what in said if name == check]
        if len(told) == RANKS and (status == 0 or check != CHECKS[-1]):
            checks.append(Tested(f"{framework} {check}", True, told[0]))
            continue
        if status is None:
            why = f"It did not end within {timeout_s:g} s."
            again = f"'--timeout {5 * timeout_s:g}' if it is only slow; else {again}"
        else:
            why = _reason(lines, status)
        checks.append(Tested(f"{framework} {check}", False, why, again))
        break
    return TwoRanks(tuple(checks), controller)


def _reason(lines: Sequence[str], status: int) -> str:
    """Why a job failed, from its last line that says so."""
    for pattern in _REASONS:
        told = [text.strip() for text in lines if re.fullmatch(pattern, text.strip())]
        if told:
            return told[-1].removeprefix("hvdkit: ")
    return f"The job ended with exit status {status}."
