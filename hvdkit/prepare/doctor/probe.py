"""Gathers the facts: of child processes that import, of 2 ranks that train, and of the machine.

Whatever becomes of a child is an outcome: a crash or a hang of an import is what the doctor is here to find. The ranks
are started by ``hvdkit launch``, in the environment and within the limits of a user's training: whether training works
here is what they say, for ``hvdkit doctor`` and for ``hvdkit test``.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from hvdkit.common.programs import identify_mpi, signal_name
from hvdkit.errors import HvdkitError, InstallError
from hvdkit.prepare.doctor import host, inside
from hvdkit.prepare.doctor.facts import Devices, DoctorFacts, Extension, Failure, Package, Tested, TwoRanks
from hvdkit.prepare.doctor.host import MpiLibrary
from hvdkit.prepare.install.facts import DISTRIBUTIONS, TITLES
from hvdkit.prepare.install.record import BuildRecord, read_record
from hvdkit.steps import launchers

DEFAULT_SECONDS = 60.0
"""Time that one child process may take; a first import from a parallel file system can take most of a minute."""
_STAGES = (
    ("tensorflow", "tensorflow.extension", "keras", "tensorflow.keras", "tensorflow.devices"),
    ("torch", "torch.extension", "torch.devices"),
    ("mpi4py",),
    ("horovod",),
)
"""What each child process looks at; devices last, since a crash in it leaves nothing else unknown."""
_METADATA_NAMES = {"pytorch": "torch", "tensorflow": "tensorflow"}
"""Horovod's names in its metadata.json -> import names (horovod setup.py, 0.28)."""
_PART_OF_A_JOB = re.compile(r"HOROVOD_(?!GLOO_IFACE$)|PMI|PRTE_|HYDRA|PALS_|SLURM_(STEP|PMI|MPI)")
"""Beside what places a rank: what changes how Horovod behaves, or how an MPI starts. A probe is one plain process."""
RANKS = 2
SAID_BY_RANKS = ("allreduce", "training")
"""What a rank says of, in this order."""
_SAID = re.compile(r"hvdkit test: (\w+): (.*)")
_REASONS = (r"hvdkit: .*|(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*", r"hvdkit launch: .*")
"""Lines of a failed job that say why, the better ones first: a sentence of a rank, or the end of its traceback."""


def gather(
    python: str = sys.executable, environ: Mapping[str, str] | None = None, seconds: float = DEFAULT_SECONDS
) -> DoctorFacts:
    """Look at the environment of an interpreter, and train on 2 ranks in each framework that Horovod loads in.

    Args:
        python: interpreter whose packages are looked at; ``hvdkit launch`` starts the one that runs this, and no other.
        environ: environment of the training to come; default: that of this process.
        seconds: time that one child process may take, > 0; a training may take twice as long.
    Raises:
        HvdkitError: the interpreter does not run.
    """
    environ = dict(os.environ if environ is None else environ)
    inventory = run(python, [["inventory"]], environ, max(seconds, DEFAULT_SECONDS))["inventory"]
    if isinstance(inventory, Failure):
        raise HvdkitError(f"{python} cannot look at its packages ({inventory.message}); does it run at all?")
    outcomes = run(python, processes(inventory), environ, seconds)
    record, metadata = _notes(inventory["packages"]["horovod"]["location"])
    # Where the MPI of this environment is, on PATH or not; a record's directory can be relative to the prefix.
    prefix = Path(inventory["prefix"])
    own_mpis = [prefix / "bin", *([prefix / record.mpi.bin] if record and record.mpi else [])]

    def value(stage: str) -> Mapping[str, Any]:
        outcome = outcomes.get(stage)
        return outcome if isinstance(outcome, Mapping) else {}

    def failure(stage: str) -> Failure | None:
        outcome = outcomes.get(stage)
        return outcome if isinstance(outcome, Failure) else None

    packages = {
        name: Package(name, **found, version=value(name).get("version"), failure=failure(name))
        for name, found in inventory["packages"].items()
    }
    devices, extensions = {}, {}
    for name in TITLES:
        if (stage := f"{name}.devices") in outcomes:
            devices[name] = Devices(value(stage).get("build"), tuple(value(stage).get("gpus", ())), failure(stage))
        if packages["horovod"].present:
            stage = f"{name}.extension"
            extensions[name] = Extension(
                framework=name,
                file=inventory["extensions"][name],
                loaded=bool(value(stage)),
                failure=failure(stage),
                built=tuple(value(stage).get("built", ())),
                mpi=_mpi_library(value(stage).get("mpi")),
            )
    trained = {}
    if python == sys.executable:
        loaded = [name for name, extension in extensions.items() if extension.loaded]
        trained = {name: train(name, 2 * seconds, environ) for name in loaded}
    return DoctorFacts(
        python=inventory["python"],
        prefix=inventory["prefix"],
        host=host.look(),
        packages=packages,
        tensorflow_keras=value("tensorflow.keras").get("version"),
        devices=devices,
        extensions=extensions,
        record=record,
        metadata=metadata,
        mpi4py_mpi=_mpi_library(value("mpi4py").get("mpi")),
        mpi_launchers=host.mpi_launchers(environ, own_mpis),
        environ=host.relevant(environ),
        trained=trained,
        seconds_allowed=seconds,
    )


def processes(inventory: Mapping[str, Any]) -> list[list[str]]:
    """Stages for each child process: the slow ones first, nothing for what is not installed."""
    absent = {name for name, package in inventory["packages"].items() if not package["present"]}
    absent |= {f"{name}.extension" for name in TITLES if inventory["extensions"].get(name) is None}
    if "keras" in absent:
        absent.add("tensorflow.keras")
    found = [[stage for stage in stages if not {stage, stage.partition(".")[0]} & absent] for stages in _STAGES]
    return [stages for stages in found if stages]


def _notes(horovod: str | None) -> tuple[BuildRecord | None, dict[str, str]]:
    """Of an installed Horovod hvdkit's record, and Horovod's own note of framework versions, where they can be read."""
    if horovod is None:
        return None, {}
    record, content = None, None
    with suppress(InstallError):  # without one it counts as built by somebody else
        record = read_record(Path(horovod))
    with suppress(OSError, ValueError):  # there is none, or not what Horovod writes
        content = json.loads((Path(horovod) / "metadata.json").read_text(encoding="utf-8"))
    noted = content if isinstance(content, dict) else {}
    versions = {name: noted.get(key) for key, name in _METADATA_NAMES.items()}
    return record, {name: version for name, version in versions.items() if isinstance(version, str)}


def _mpi_library(value: Mapping[str, str] | None) -> MpiLibrary | None:
    return None if value is None else MpiLibrary(value["path"], *identify_mpi(value["text"]))


# Child processes that import ------------------------------------------------------------------------------------------


def plain(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without what makes a process part of a job: a probe is one plain process."""
    alone = {name: value for name, value in launchers.without_place(environ).items() if not _PART_OF_A_JOB.match(name)}
    return {**alone, "TF_FORCE_GPU_ALLOW_GROWTH": "true"}  # a look must not take the whole memory of a shared GPU


def run(python: str, processes: Sequence[Sequence[str]], environ: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """What each stage of each process found, or its Failure; all processes run at the same time.

    Args:
        python: interpreter to start.
        processes: the stages of each, in order.
        environ: see ``plain``.
        seconds: time that they may take, > 0.
    """
    outcomes: dict[str, Any] = {}
    deadline = time.monotonic() + seconds
    with ExitStack() as ended:
        started = []
        for stages in processes:
            written, errors = (ended.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            command = [python, "-P", inside.__file__, str(written.fileno()), str(int(seconds) + 10)]
            try:
                child = subprocess.Popen(
                    [*command, json.dumps(DISTRIBUTIONS), *stages], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    stderr=errors, pass_fds=(written.fileno(),), env=plain(environ), start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                why = f"{python} cannot be started: {error.strerror}; reinstall the environment."
                raise HvdkitError(why) from error
            ended.callback(_kill, child)
            started.append((child, stages, written, errors))
        for child, stages, written, errors in started:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
            status = child.returncode
            _kill(child)
            lines = [json.loads(line) for line in _all_of(written).splitlines(keepends=True) if line.endswith("\n")]
            found = {line["stage"]: line for line in lines if "stage" in line}
            for stage, line in found.items():
                outcomes[stage] = Failure(**line["failure"]) if "failure" in line else line["value"]
            begun = [line["begin"] for line in lines if "begin" in line and line["begin"] not in found]
            if status != 0 or begun or not lines:
                outcomes[(*begun, stages[0])[0]] = _end(status, _all_of(errors), seconds)
    return outcomes


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End a process now, with what it has started in its session."""
    with suppress(ProcessLookupError):  # all have ended
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _all_of(file: IO[bytes]) -> str:
    file.seek(0)  # the child has moved it
    return file.read().decode(errors="replace")


def _end(status: int | None, errors: str, seconds: float) -> Failure:
    """Why a process did not end as it should; None: it did not end."""
    detail = errors[-inside.MAX_DETAIL :].strip()
    told = [line.strip() for line in detail.splitlines() if re.search(r"\w", line)]
    last = f": {told[-1]}" if told else ""
    if status is None:
        return Failure("timeout", f"did not end within {seconds:g} s", detail)
    if status < 0:
        return Failure("signal", f"killed by {signal_name(-status)}{last}", detail)
    return Failure("exit", f"the process ended with exit status {status}{last}", detail)


# 2 ranks that train ---------------------------------------------------------------------------------------------------


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
            env={name: value for name, value in environ.items() if name not in host.WRITING},
        )
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:  # hvdkit launch leaves no rank behind, even when it is killed
        status, output = None, late.stdout or b""
    lines = output.decode(errors="replace").splitlines()
    said = [(match[1], match[2]) for text in lines if (match := _SAID.search(text))]
    controller = dict(said).get("controller", "")
    checks: list[Tested] = []
    for check in SAID_BY_RANKS:
        told = [what for name, what in said if name == check]
        if len(told) == RANKS and (status == 0 or check != SAID_BY_RANKS[-1]):
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
