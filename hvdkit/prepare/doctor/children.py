"""Child processes that run ``inside.py``, each with a time limit; whatever becomes of them is an outcome."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from hvdkit.common import masked
from hvdkit.common.signals import signal_name
from hvdkit.errors import HvdkitError
from hvdkit.prepare.doctor import inside
from hvdkit.prepare.doctor.facts import Failure
from hvdkit.steps import launchers

_PART_OF_A_JOB = re.compile(r"HOROVOD_(?!GLOO_IFACE$)|PMI|PRTE_|HYDRA|PALS_|SLURM_(STEP|PMI|MPI)")
"""Beside what places a rank: what changes how Horovod behaves, or how an MPI starts. A probe is one plain process."""


class Children:
    """Child processes of one interpreter and environment, which can all be ended from another thread.

    Args:
        python: interpreter to start.
        environ: environment to start from; a launcher's variables are taken out.
        seconds: time that one child may take, > 0.
    """

    def __init__(self, python: str, environ: Mapping[str, str], seconds: float) -> None:
        self.python = python
        self.seconds = seconds
        plain = launchers.without_place(environ)
        self.environ = {name: value for name, value in plain.items() if not _PART_OF_A_JOB.match(name)}
        self.environ["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"  # a look must not take the whole memory of a shared GPU
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def run(self, stages: Sequence[str]) -> dict[str, Any]:
        """What each stage found, or its Failure; where one kills its process, the others go on in a new one."""
        outcomes: dict[str, Any] = {}
        remaining = list(stages)
        while remaining and not self._stopped:
            lines, end = self._one_child(remaining)
            outcomes.update({line["stage"]: _outcome(line) for line in lines if "stage" in line})
            if end is None:
                break
            begun = [line["begin"] for line in lines if "begin" in line and line["begin"] not in outcomes]
            fatal = begun[-1] if begun else remaining[0]
            outcomes[fatal] = end
            failed = {stage for stage, outcome in outcomes.items() if isinstance(outcome, Failure)}
            later = remaining[remaining.index(fatal) + 1 :]
            remaining = [stage for stage in later if inside.is_possible(stage, failed)]
        return outcomes

    def stop(self) -> None:
        """End every child now; ``run`` starts no further ones."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                with suppress(ProcessLookupError):  # it has just ended
                    os.killpg(process.pid, signal.SIGKILL)

    def _one_child(self, stages: Sequence[str]) -> tuple[list[dict[str, Any]], Failure | None]:
        """Lines that a child wrote, and its end when that was not the regular one."""
        files = (os.fdopen(os.memfd_create(f"hvdkit-{name}"), "rb") for name in ("results", "stderr"))
        with next(files) as results, next(files) as errors:
            numbers = results.fileno(), errors.fileno()
            status = self._wait([str(numbers[0]), str(int(self.seconds) + 10), *stages], *numbers)
            lines = [json.loads(line) for line in _all_of(results).splitlines(keepends=True) if line.endswith("\n")]
            finished = {line["stage"] for line in lines if "stage" in line}
            complete = status == 0 and all(line["begin"] in finished for line in lines if "begin" in line) and lines
            return lines, None if complete else self._end(status, _all_of(errors))

    def _wait(self, arguments: Sequence[str], results: int, errors: int) -> int | None:
        """Exit status of a child (negative: its signal), None when it took too long."""
        with self._lock:
            if self._stopped:
                return None
            process = self._start(arguments, results, errors)
            self._running.add(process)
        try:
            return process.wait(self.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None
        finally:
            with self._lock:
                self._running.discard(process)

    def _start(self, arguments: Sequence[str], results: int, errors: int) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                [self.python, "-P", inside.__file__, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(results,),
                env=self.environ,
                start_new_session=True,  # so that what it starts ends with it
            )
        except OSError as error:
            raise HvdkitError(
                f"{self.python} cannot be started: {error.strerror}; reinstall the environment."
            ) from error

    def _end(self, status: int | None, errors: str) -> Failure:
        detail = _shareable(errors)[-inside.MAX_DETAIL :].strip()
        told = [line.strip() for line in detail.splitlines() if re.search(r"\w", line)]
        last = f": {told[-1]}" if told else ""
        if status is None:
            return Failure("timeout", f"did not end within {self.seconds:g} s", detail)
        if status < 0:
            return Failure("signal", f"killed by {signal_name(-status)}{last}", detail)
        return Failure("exit", f"the process ended with exit status {status}{last}", detail)


def _outcome(line: Mapping[str, Any]) -> Any:
    if "failure" not in line:
        return line["value"]
    return Failure(**{name: _shareable(text) for name, text in line["failure"].items()})


def _all_of(file: IO[bytes]) -> str:
    file.seek(0)  # the child has moved it
    return file.read().decode(errors="replace")


def _shareable(text: str) -> str:
    return masked.without_secrets(masked.without_host_name(text))
