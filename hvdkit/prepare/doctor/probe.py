"""Gathers the facts: what each child process shall try, and what they wrote, put together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdkit.common.mpi_names import identify
from hvdkit.errors import HvdkitError, InstallError
from hvdkit.prepare.doctor import host, inside
from hvdkit.prepare.doctor.children import Children
from hvdkit.prepare.doctor.facts import (
    CONTROLLERS,
    FRAMEWORKS,
    Build,
    Devices,
    DoctorFacts,
    Extension,
    Failure,
    MpiLibrary,
    Package,
)
from hvdkit.prepare.install.record import FILE_NAME as RECORD_NAME
from hvdkit.prepare.install.record import BuildRecord, read_record
from hvdkit.steps import step_times

DEFAULT_SECONDS = 60.0
"""Time that one child process may take; a first import from a parallel file system can take most of a minute."""

_METADATA_NAMES = {"pytorch": "torch", "tensorflow": "tensorflow"}
"""Horovod's names in its metadata.json -> import names (horovod setup.py, 0.28)."""


def gather(
    python: str = sys.executable, environ: Mapping[str, str] | None = None, seconds: float = DEFAULT_SECONDS
) -> DoctorFacts:
    """Look at the environment of an interpreter: about 10 seconds with TensorFlow on 2 cores.

    Args:
        python: interpreter whose packages are looked at.
        environ: environment of the training to come; default: that of this process.
        seconds: time that one child process may take, > 0.
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
            launchers = pool.submit(host.mpi_launchers, environ, own_mpis)
            outcomes = {stage: outcome for future in futures for stage, outcome in future.result().items()}
        except BaseException:
            children.stop()
            raise
    facts = _Assembly(inventory, outcomes)
    extensions = {name: facts.extension(name) for name in FRAMEWORKS} if facts.package("horovod").present else {}
    usable = [name for name, extension in extensions.items() if None in extension.runs.values()]
    problem = None
    if usable and python == sys.executable:  # hvdkit launch starts the Python that it is installed in
        problem = _launch_problem(usable[0], environ, 2 * seconds)
    return DoctorFacts(
        python=inventory["python"],
        python_tag=inventory["python_tag"],
        prefix=inventory["prefix"],
        host=seen,
        packages={name: facts.package(name) for name in inside.DISTRIBUTIONS},
        tensorflow_keras=facts.value("tensorflow.keras").get("version"),
        tensorflow_keras_failure=facts.failure("tensorflow.keras"),
        keras_backend=facts.value("keras").get("backend"),
        devices={name: facts.devices(name) for name in FRAMEWORKS if facts.package(name).works},
        extensions=extensions,
        builds=builds,
        build_error=build_error,
        mpi4py_mpi=_mpi_library(facts.value("mpi4py").get("mpi")),
        mpi4py_run=facts.failure("mpi4py.run"),
        mpi_launchers=launchers.result(),
        environ=host.relevant(environ),
        timeline_problem=host.timeline_problem(environ),
        launch_problem=problem,
        seconds_allowed=seconds,
    )


def _launch_problem(framework: str, environ: Mapping[str, str], seconds: float) -> str | None:
    """Why a training of 2 ranks that ``hvdkit test`` starts, as every training is, fails; None where it works."""
    writing = ("HOROVOD_TIMELINE", "HOROVOD_AUTOTUNE", "HOROVOD_AUTOTUNE_LOG", step_times.MONITOR)
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "hvdkit.cli",
            "test",
            "--json",
            "--framework",
            framework,
            "--timeout",
            str(seconds),
        ],
        env={name: value for name, value in environ.items() if name not in writing},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    try:
        checks = json.loads(done.stdout)["checks"]
    except ValueError:
        return done.stderr.decode(errors="replace").strip() or f"'hvdkit test' ended with status {done.returncode}"
    return next((str(check["what"]) for check in checks if not check["ok"]), None)


def plan(inventory: Mapping[str, Any]) -> list[list[str]]:
    """Stages for each child process: the slow ones first, nothing for what is not installed.

    MPI and Gloo get a process each: Horovod cannot change its controller once it has started.
    """
    present = {name for name, package in inventory["packages"].items() if package["present"]}
    processes = []
    for name in ("tensorflow", "torch"):
        extension = inventory["extensions"].get(name, {}).get("file") is not None
        first = [name, f"{name}.devices"] if name in present else []
        if name == "tensorflow" and {"tensorflow", "keras"} <= present:
            first.append("tensorflow.keras")
        if name in present and extension:
            first += [f"{name}.extension", f"{name}.run.Gloo"]
            processes.append([f"{name}.run.MPI"])
        if name == "tensorflow" and "keras" in present:
            first.append("keras")  # last, for it imports TensorFlow too and is quick where that has been done
        processes.append(first)
    others = (["jax"], ["mpi4py", "mpi4py.run"], ["horovod"])
    processes += [stages for stages in others if stages[0] in present]
    return [stages for stages in processes if stages]


@dataclass(frozen=True)
class _Assembly:
    """The outcomes of all stages, as facts."""

    inventory: Mapping[str, Any]
    outcomes: Mapping[str, Any]

    def value(self, stage: str) -> Mapping[str, Any]:
        outcome = self.outcomes.get(stage)
        return outcome if isinstance(outcome, Mapping) else {}

    def failure(self, stage: str) -> Failure | None:
        outcome = self.outcomes.get(stage)
        return outcome if isinstance(outcome, Failure) else None

    def package(self, name: str) -> Package:
        found = self.inventory["packages"][name]
        return Package(name=name, **found, version=self.value(name).get("version"), failure=self.failure(name))

    def devices(self, framework: str) -> Devices:
        value, failure = self.value(f"{framework}.devices"), self.failure(f"{framework}.devices")
        return Devices(value.get("build"), tuple(value.get("gpus", ())), failure)

    def extension(self, framework: str) -> Extension:
        files = self.inventory["extensions"][framework]
        stage = f"{framework}.extension"
        value, failure = self.value(stage), self.failure(stage)
        built = tuple(value.get("built", ()))
        runs = {name: self.failure(f"{framework}.run.{name}") for name in CONTROLLERS if name in built}
        return Extension(
            framework=framework,
            file=files["file"],
            other_files=tuple(files["other_files"]),
            loaded=bool(value),
            failure=failure,
            built=built,
            mpi=_mpi_library(value.get("mpi")),
            runs=runs,
        )


def _builds(horovod: str | None) -> tuple[tuple[Build, ...], str | None]:
    """Records of what Horovod was built for, and why one of them could not be read."""
    if horovod is None:
        return (), None
    record, problem = None, None
    try:
        record = read_record(Path(horovod))
    except InstallError as error:
        problem = str(error)
    builds = (record and _from_record(record), _horovod_metadata(Path(horovod) / "metadata.json"))
    return tuple(build for build in builds if build), problem


def _from_record(record: BuildRecord) -> Build:
    versions = {"torch": record.torch, "tensorflow": record.tensorflow}
    return Build(
        source=RECORD_NAME,
        frameworks={name: version for name, version in versions.items() if version is not None},
        mpi_implementation=record.mpi.implementation if record.mpi else None,
        mpi_version=record.mpi.version if record.mpi else None,
        mpi_bin=record.mpi.bin if record.mpi else None,
        python=record.python,
        by_hvdkit=True,
    )


def _horovod_metadata(file: Path) -> Build | None:
    """Horovod's own note of the framework versions; None without one, or when it is not what Horovod writes."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict):
        return None
    versions = {name: content.get(key) for key, name in _METADATA_NAMES.items()}
    return Build("metadata.json", {name: version for name, version in versions.items() if isinstance(version, str)})


def _mpi_library(value: Mapping[str, str] | None) -> MpiLibrary | None:
    if value is None:
        return None
    implementation, version = identify(value["text"])
    return MpiLibrary(value["path"], implementation, version)
