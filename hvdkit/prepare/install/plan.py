"""From facts and options to everything that a build is told: settings, run paths, cache key. Pure."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hvdkit.prepare.install import adjust, requirements
from hvdkit.prepare.install.adjust import Patch
from hvdkit.prepare.install.facts import (
    BUILD_TOOLS,
    HOROVOD_SHA256,
    HOROVOD_VERSION,
    TITLES,
    BuildFacts,
    CompilerFacts,
    CudaFacts,
    Options,
    PythonFacts,
)
from hvdkit.prepare.install.record import BuildRecord, MpiRecord

KEYED_VARIABLES = (
    "CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CUDAFLAGS", "AR", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH", "CRAY_CPU_TARGET", "OMPI_CPPFLAGS", "OMPI_CXXFLAGS", "OMPI_LDFLAGS", "OMPI_LIBS",
)  # fmt: skip
"""Environment variables that choose or change compilers and MPI wrappers: they stay, and are part of the key."""

# Anything else that would change the binary behind the key's back is taken out of the build's environment, as are
# settings of programs whose output is read here.
_DROPPED_PREFIXES = ("HOROVOD_", "CMAKE_", "CCL_", "SETUPTOOLS_", "NINJA_", "CLICOLOR")
_DROPPED_VARIABLES = (
    "CUDACXX", "CUDAHOSTCXX", "CUDA_HOME", "CUDA_PATH", "DIST_EXTRA_CONFIG", "MAKEFLAGS", "MPI_HOME", "PYTHONSAFEPATH",
    "VERBOSE",
)  # fmt: skip
_BUILD_VARIABLES = (
    "HOROVOD_WITH", "HOROVOD_GPU", "HOROVOD_CPU_OPERATIONS", "HOROVOD_BUILD_ARCH", "HOROVOD_CMAKE", "CMAKE_",
)  # fmt: skip


@dataclass(frozen=True)
class BuildPlan:
    """A build, decided.

    Attributes:
        options: what was asked for, with the names of the frameworks that were found.
        facts: the machine, with what of it is used: ``mpi`` is None for Gloo alone.
        run_paths: for the library of each framework, where it looks for others besides what the linker notes.
        key_fields: everything that changes the binary.
        record: what is written into the wheel; holds the key.
        adjustments: patches that are applied to the source.
        settings: environment variables that are set for the build.
        path_first: directories put first on the build's PATH.
        nccl_link: a library to be offered to the linker as ``libnccl.so``, which pip's NCCL has not.
        notes: what the user should know, one sentence each.
    """

    options: Options
    facts: BuildFacts
    run_paths: Mapping[str, tuple[str, ...]]
    key_fields: Mapping[str, Any]
    record: BuildRecord
    adjustments: tuple[Patch, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    path_first: tuple[Path, ...] = ()
    nccl_link: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The cache key, 64 hexadecimal digits."""
        return self.record.key


def make_plan(facts: BuildFacts, options: Options) -> BuildPlan:
    """Decide how Horovod is built here.

    Raises:
        InvalidArgumentError: the options contradict each other.
        InstallError: something is missing; one sentence with the command that fixes it.
    """
    used, options = _used(facts, options)
    cxx, cc = requirements.check_toolchain(used)
    requirements.check_mpi(used, options)
    requirements.check_gpu(used, options)
    requirements.check_space(used)

    patches = adjust.applying(options)
    settings = _settings(used, options, cxx, cc)
    run_paths = _run_paths(used)
    fields = {
        **_run_fields(used),
        **_build_fields(used, [cxx.identity, cc.identity], settings, patches),
        "run_paths": {name: list(paths) for name, paths in run_paths.items()},
    }
    key = hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    return BuildPlan(
        options=options,
        facts=used,
        adjustments=patches,
        settings=settings,
        path_first=tuple(place for place in (used.mpi and used.mpi.bin, used.cuda and used.cuda.home / "bin") if place),
        run_paths=run_paths,
        nccl_link=used.nccl.library if used.nccl and used.nccl.library.name == "libnccl.so.2" else None,
        key_fields=fields,
        record=_record(used, options.gpu, cxx.name, patches, key),
        notes=tuple(_notes(used, options)),
    )


def plan_of_ready(facts: BuildFacts, options: Options, key: str, fields: Mapping[str, Any]) -> BuildPlan | str:
    """The plan of a wheel that was built elsewhere for environments like this one: no compiler is needed.

    Args:
        facts, options: as for ``make_plan``.
        key, fields: of the wheel, from its manifest.
    Returns:
        The plan, or why the wheel does not fit here: "torch 2.13.0, here 2.12.1".
    Raises:
        InstallError: as ``make_plan``, for what is needed to run.
    """
    used, options = _used(facts, options)
    here = json.loads(json.dumps(_run_fields(used)))
    different = [
        f"{name} {json.dumps(fields.get(name))}, here {json.dumps(here[name])}"
        for name in here
        if here[name] != fields.get(name)
    ]
    gpu = str(fields["settings"].get("HOROVOD_GPU_OPERATIONS", "none")).lower()
    if gpu != options.gpu:
        different.append(f"--gpu {gpu}, here --gpu {options.gpu}")
    paths = {name: tuple(entries) for name, entries in fields["run_paths"].items()}
    for name, mine in _run_paths(used).items():
        if not set(mine) <= set(paths.get(name, ())):
            different.append(
                f"{name} in {' and '.join(paths.get(name, ())) or 'no place'}, here in {' and '.join(mine)}"
            )
    if different:
        return "; ".join(different)
    return BuildPlan(options, used, paths, fields, _record(used, options.gpu, "", (), key))


def _used(facts: BuildFacts, options: Options) -> tuple[BuildFacts, Options]:
    """What of the facts the options ask for, and the options with the frameworks that this is."""
    requirements.check_options(options)
    requirements.check_environment(facts)
    frameworks = requirements.chosen_frameworks(facts, options)
    used = replace(
        facts,
        frameworks=frameworks,
        mpi=facts.mpi if options.mpi else None,
        cuda=facts.cuda if options.gpu != "none" else None,
        nccl=facts.nccl if options.gpu == "nccl" else None,
    )
    return used, replace(options, frameworks=tuple(framework.name for framework in frameworks))


def build_environ(plan: BuildPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the build: the caller's, without what would change the binary unseen, with the settings."""
    kept = {
        name: value
        for name, value in environ.items()
        if not name.startswith(_DROPPED_PREFIXES) and name not in _DROPPED_VARIABLES
    }
    path = [str(directory) for directory in plan.path_first] + [kept.get("PATH", "")]
    return {**kept, **plan.settings, "PATH": os.pathsep.join(entry for entry in path if entry)}


def run_path(target: Path, package: str, python: PythonFacts) -> str:
    """How a library of Horovod finds a directory at run time.

    Args:
        target: absolute directory.
        package: "torch" or "tensorflow": the library lies in ``horovod/<package>``.
        python: the environment that Horovod is installed into.
    Returns:
        "$ORIGIN/..." when ``target`` is inside the environment, so that it moves with it; else ``target`` itself.
    """
    if not (target.is_relative_to(python.prefix) and python.site_packages.is_relative_to(python.prefix)):
        return str(target)
    return os.path.join("$ORIGIN", os.path.relpath(target, python.site_packages / "horovod" / package))  # noqa: PTH118


def relative_to_environment(path: Path, python: PythonFacts) -> str:
    """A path as it is noted in key and record: relative when inside the environment, so that it moves with it."""
    return os.path.relpath(path, python.prefix) if path.is_relative_to(python.prefix) else str(path)


def _settings(used: BuildFacts, options: Options, cxx: CompilerFacts, cc: CompilerFacts) -> dict[str, str]:
    """What Horovod's build is told by variables, name to value, of the parts that will be used."""
    settings = {
        "CXX": shlex.join(cxx.command),
        "CC": shlex.join(cc.command),
        "CMAKE_GENERATOR": "Ninja",
        # Gloo's own CMake file asks for a policy version that CMake 4 no longer has.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        # Messages are read here, so they must be in English.
        "LC_ALL": "C",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        f"HOROVOD_{'WITH' if used.mpi else 'WITHOUT'}_MPI": "1",
    }
    for name, title in TITLES.items():
        settings[f"HOROVOD_{'WITH' if name in (options.frameworks or ()) else 'WITHOUT'}_{title.upper()}"] = "1"
    if used.system.arch_flags:
        settings["HOROVOD_BUILD_ARCH_FLAGS"] = " ".join(used.system.arch_flags)
    if used.mpi is not None:
        settings["MPI_HOME"] = str(used.mpi.bin.parent)
    if used.cuda is not None:
        settings |= _cuda_settings(used.cuda, options.gpu, used.environ)
    else:
        settings["HOROVOD_WITHOUT_NVTX"] = "1"
    if used.nccl is not None:
        settings["HOROVOD_NCCL_INCLUDE"] = str(used.nccl.include)
        settings["HOROVOD_NCCL_LIB"] = str(used.nccl.library.parent)
        settings["HOROVOD_NCCL_LINK"] = "STATIC" if used.nccl.library.suffix == ".a" else "SHARED"
    return settings


def _cuda_settings(cuda: CudaFacts, gpu: str, environ: Mapping[str, str]) -> dict[str, str]:
    settings = {
        "HOROVOD_GPU_OPERATIONS": gpu.upper(),
        "HOROVOD_CUDA_HOME": str(cuda.home),
        # PyTorch's build helper looks here, and must find the same toolkit.
        "CUDA_HOME": str(cuda.home),
    }
    if cuda.nvtx:
        settings |= {"HOROVOD_WITH_NVTX": "1", "HOROVOD_NVTX_INCLUDE": str(cuda.home / "include")}
    else:
        settings["HOROVOD_WITHOUT_NVTX"] = "1"
    if environ.get("HOROVOD_BUILD_CUDA_CC_LIST"):
        settings["HOROVOD_BUILD_CUDA_CC_LIST"] = environ["HOROVOD_BUILD_CUDA_CC_LIST"]
    return settings


def _run_paths(used: BuildFacts) -> dict[str, tuple[str, ...]]:
    libraries = {"torch": "lib", "tensorflow": "."}
    found = {}
    for framework in used.frameworks:
        directories = [framework.location / libraries[framework.name]]
        if used.nccl is not None and used.nccl.library.suffix != ".a":
            directories.append(used.nccl.library.parent)
        found[framework.name] = tuple(run_path(directory, framework.name, used.python) for directory in directories)
    return found


def _run_fields(used: BuildFacts) -> dict[str, Any]:
    """What has to be the same wherever the wheel is installed."""
    mpi, place = used.mpi, functools.partial(relative_to_environment, python=used.python)
    return {
        "horovod": [HOROVOD_VERSION, HOROVOD_SHA256],
        "python": used.python.tag,
        "system": [used.system.os, used.system.machine, used.system.libc],
        "layout": place(used.python.site_packages),
        # The last was ROCm's version: it stays, so that keys do.
        "frameworks": {row.name: [row.version, row.build, row.cuda, None] for row in used.frameworks},
        "mpi": mpi and [mpi.implementation, mpi.version, place(mpi.bin), mpi.wheel],
    }


def _build_fields(
    used: BuildFacts, compilers: list[str], settings: Mapping[str, str], patches: Iterable[Patch]
) -> dict[str, Any]:
    """What else changes the binary."""
    # Settings that name places are told by other fields, as far as their place matters.
    places = {"CXX", "CC", "MPI_HOME", "HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB", "HOROVOD_NVTX_INCLUDE"}
    places |= {"HOROVOD_CUDA_HOME", "CUDA_HOME"}
    cuda, nccl = used.cuda, used.nccl
    return {
        "adjustments": adjust.digest(patches),
        "tools": list(BUILD_TOOLS),
        "cuda": cuda and [cuda.version, relative_to_environment(cuda.home, used.python), cuda.nvtx],
        "nccl": nccl and [nccl.version, relative_to_environment(nccl.library, used.python)],
        "compilers": compilers,
        "settings": {name: value for name, value in settings.items() if name not in places},
        "variables": {name: used.environ[name] for name in KEYED_VARIABLES if used.environ.get(name)},
    }


def _record(used: BuildFacts, gpu: str, compiler: str, patches: Iterable[Patch], key: str) -> BuildRecord:
    versions = {framework.name: framework.version for framework in used.frameworks}
    mpi = None
    if used.mpi is not None:
        place = relative_to_environment(used.mpi.bin, used.python)
        mpi = MpiRecord(used.mpi.implementation, used.mpi.version, place, used.mpi.wheel)
    return BuildRecord(
        horovod=HOROVOD_VERSION,
        python=used.python.tag,
        torch=versions.get("torch"),
        tensorflow=versions.get("tensorflow"),
        mpi=mpi,
        gloo=True,
        gpu=gpu,
        compiler=compiler,
        adjustments=tuple(patch.name for patch in patches),
        key=key,
    )


def _notes(facts: BuildFacts, options: Options) -> Iterable[str]:
    ignored = sorted(name for name in facts.environ if name.startswith(_BUILD_VARIABLES))
    if ignored:
        yield f"Ignored from the environment, since hvdkit sets what the build is told: {', '.join(ignored)}."
    for framework in facts.frameworks:
        if options.gpu == "none" and framework.cuda is not None:
            yield (
                f"{framework.name} {framework.version} is a GPU build; with --gpu none Horovod reduces CPU tensors "
                "only, --gpu nccl is for tensors on GPUs."
            )
    if options.gpu == "mpi":
        yield "--gpu mpi needs an MPI that takes GPU memory, which is not looked for."
