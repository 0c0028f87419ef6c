"""Gathers the facts: child processes that run ``inside.py``, each with a time limit, and what they wrote put together.

Whatever becomes of a child is an outcome: a crash or a hang of an import is what the doctor is here to find.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from hvdkit.common import masked
from hvdkit.common.mpi_names import identify
from hvdkit.common.signals import signal_name
from hvdkit.errors import HvdkitError, InstallError
from hvdkit.prepare.doctor import host, inside, two_ranks
from hvdkit.prepare.doctor.facts import FRAMEWORKS, Build, Devices, DoctorFacts, Extension, Failure, MpiLibrary, Package
from hvdkit.prepare.install.record import FILE_NAME as RECORD_NAME
from hvdkit.prepare.install.record import read_record
from hvdkit.steps import launchers

DEFAULT_SECONDS = 60.0
"""Time that one child process may take; a first import from a parallel file system can take most of a minute."""
_METADATA_NAMES = {"pytorch": "torch", "tensorflow": "tensorflow"}
"""Horovod's names in its metadata.json -> import names (horovod setup.py, 0.28)."""
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
    children = Children(python, environ, seconds)
    inventory = Children(python, environ, max(seconds, DEFAULT_SECONDS)).run(["inventory"])["inventory"]
    if isinstance(inventory, Failure):
        raise HvdkitError(f"{python} cannot look at its packages ({inventory.message}); does it run at all?")
    builds, build_error = _builds(inventory["packages"]["horovod"]["location"])
    seen, prefix = host.look(environ), Path(inventory["prefix"])
    # Where the MPI of this environment is, on PATH or not; a record's directory can be relative to the prefix.
    own_mpis = [prefix / "bin", *(prefix / build.mpi_bin for build in builds if build.mpi_bin)]
    with ThreadPoolExecutor(max(2, seen.usable_cores)) as pool:
        try:
            futures = [pool.submit(children.run, stages) for stages in plan(inventory)]
            mpiruns = pool.submit(host.mpi_launchers, environ, own_mpis)
            outcomes = {stage: outcome for future in futures for stage, outcome in future.result().items()}
        except BaseException:
            children.stop()
            raise

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
    for name in FRAMEWORKS:
        if packages[name].works:
            stage = f"{name}.devices"
            devices[name] = Devices(value(stage).get("build"), tuple(value(stage).get("gpus", ())), failure(stage))
        if packages["horovod"].present:
            files, stage = inventory["extensions"][name], f"{name}.extension"
            extensions[name] = Extension(
                framework=name,
                file=files["file"],
                other_files=tuple(files["other_files"]),
                loaded=bool(value(stage)),
                failure=failure(stage),
                built=tuple(value(stage).get("built", ())),
                mpi=_mpi_library(value(stage).get("mpi")),
            )
    trained = {}
    if python == sys.executable:
        loaded = [name for name, extension in extensions.items() if extension.loaded]
        trained = {name: two_ranks.train(name, 2 * seconds, environ) for name in loaded}
    return DoctorFacts(
        python=inventory["python"],
        python_tag=inventory["python_tag"],
        prefix=inventory["prefix"],
        host=seen,
        packages=packages,
        tensorflow_keras=value("tensorflow.keras").get("version"),
        tensorflow_keras_failure=failure("tensorflow.keras"),
        keras_backend=value("keras").get("backend"),
        devices=devices,
        extensions=extensions,
        builds=builds,
        build_error=build_error,
        mpi4py_mpi=_mpi_library(value("mpi4py").get("mpi")),
        mpi_launchers=mpiruns.result(),
        environ=host.relevant(environ),
        timeline_problem=host.timeline_problem(environ),
        trained=trained,
        seconds_allowed=seconds,
    )


def plan(inventory: Mapping[str, Any]) -> list[list[str]]:
    """Stages for each child process: the slow ones first, nothing for what is not installed."""
    present = {name for name, package in inventory["packages"].items() if package["present"]}
    processes = []
    for name in ("tensorflow", "torch"):
        stages = [name, f"{name}.devices"] if name in present else []
        if {"tensorflow", "keras"} <= present and name == "tensorflow":
            stages.append("tensorflow.keras")
        if name in present and inventory["extensions"].get(name, {}).get("file") is not None:
            stages.append(f"{name}.extension")
        if name == "tensorflow" and "keras" in present:
            stages.append("keras")  # last, for it imports TensorFlow too and is quick where that has been done
        processes.append(stages)
    processes += [[name] for name in ("jax", "mpi4py", "horovod") if name in present]
    return [stages for stages in processes if stages]


def _builds(horovod: str | None) -> tuple[tuple[Build, ...], str | None]:
    """Records of what Horovod was built for, hvdkit's first, and why that one could not be read."""
    if horovod is None:
        return (), None
    builds, problem = [], None
    try:
        if record := read_record(Path(horovod)):
            versions = {"torch": record.torch, "tensorflow": record.tensorflow}
            builds.append(
                Build(
                    source=RECORD_NAME,
                    frameworks={name: version for name, version in versions.items() if version is not None},
                    mpi_implementation=record.mpi.implementation if record.mpi else None,
                    mpi_version=record.mpi.version if record.mpi else None,
                    mpi_bin=record.mpi.bin if record.mpi else None,
                    python=record.python,
                    by_hvdkit=True,
                )
            )
    except InstallError as error:
        problem = str(error)
    with suppress(OSError, ValueError, AttributeError):  # Horovod's own note, if it is what Horovod writes
        content = json.loads((Path(horovod) / "metadata.json").read_text(encoding="utf-8"))
        versions = {name: content.get(key) for key, name in _METADATA_NAMES.items()}
        known = {name: version for name, version in versions.items() if isinstance(version, str)}
        builds.append(Build("metadata.json", known))
    return tuple(builds), problem


def _mpi_library(value: Mapping[str, str] | None) -> MpiLibrary | None:
    return None if value is None else MpiLibrary(value["path"], *identify(value["text"]))
