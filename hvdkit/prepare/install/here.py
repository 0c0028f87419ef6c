"""Gathers the facts of this machine. Nothing is written, downloaded or imported."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from dataclasses import replace
from pathlib import Path

from hvdkit.errors import InstallError
from hvdkit.prepare.install import find_gpu, find_mpi, find_toolchain
from hvdkit.prepare.install.facts import BuildFacts, PythonFacts, SystemFacts
from hvdkit.prepare.install.find_frameworks import find_frameworks


def gather_facts(gpu: bool) -> BuildFacts:
    """What is here; CUDA and NCCL are looked for only when ``gpu`` is true.

    Raises:
        InstallError: there is no directory for the cache, because no home directory is known.
    """
    environ = dict(os.environ)
    python = _python()
    mpi, passed_over = find_mpi.find_mpi(environ, python.prefix)
    build_directory = Path(tempfile.gettempdir())
    cache = cache_directory()
    facts = BuildFacts(
        python=python,
        system=_system(),
        frameworks=find_frameworks(),
        mpi=mpi,
        mpi_passed_over=passed_over,
        cxx=find_toolchain.find_cxx(environ),
        cc=find_toolchain.find_cc(environ),
        build_directory=build_directory,
        build_bytes_free=shutil.disk_usage(build_directory).free,
        # Linux alone has the flag, and the plan refuses any other system with a sentence of its own.
        no_exec=bool(os.statvfs(build_directory).f_flag & getattr(os, "ST_NOEXEC", 0)),
        cache_directory=cache,
        cache_problem=_unwritable(cache),
        environ=environ,
    )
    return _with_gpu(facts) if gpu else facts


def cache_directory() -> Path:
    """``hvdkit`` below the XDG cache directory; a relative XDG_CACHE_HOME is ignored, as its specification says.

    Raises:
        InstallError: neither XDG_CACHE_HOME nor a home directory is known.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if named.is_absolute():
        return named / "hvdkit"
    home = Path()
    with contextlib.suppress(RuntimeError):  # no HOME, and the user has no entry, as in containers
        home = Path.home()
    if not home.is_absolute():
        raise InstallError(
            f"There is no home directory for the cache (HOME is {os.environ.get('HOME', 'not set')}): set "
            "XDG_CACHE_HOME to an absolute path."
        )
    return home / ".cache" / "hvdkit"


def _with_gpu(facts: BuildFacts) -> BuildFacts:
    environ = facts.environ
    directories = [Path(entry) for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    cuda = find_gpu.find_cuda(environ, directories)
    nccl = find_gpu.find_nccl(environ, facts.python.prefix, directories, cuda)
    mpi = facts.mpi and replace(facts.mpi, gpu_aware=find_mpi.ask_gpu_aware(facts.mpi))
    return replace(facts, cuda=cuda, nccl=nccl, mpi=mpi)


def _python() -> PythonFacts:
    paths = sysconfig.get_paths()
    site_packages = Path(paths["platlib"])
    include = Path(paths["include"])
    base = {"cpython": "cp", "pypy": "pp"}.get(sys.implementation.name, sys.implementation.name)
    return PythonFacts(
        version=sys.version_info[:3],
        tag=f"{base}{sys.version_info[0]}{sys.version_info[1]}{sys.abiflags}",
        executable=Path(sys.executable),
        prefix=Path(sys.prefix),
        site_packages=site_packages,
        scripts=Path(paths["scripts"]),
        headers=(include / "Python.h").is_file(),
        headers_directory=include,
        pip=importlib.util.find_spec("pip") is not None,
        writable=os.access(site_packages, os.W_OK),
        externally_managed=sys.prefix == sys.base_prefix and (Path(paths["stdlib"]) / "EXTERNALLY-MANAGED").is_file(),
    )


def _system() -> SystemFacts:
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        cpuinfo = ""
    return SystemFacts(
        os=sys.platform,
        machine=platform.machine(),
        libc=find_toolchain.libc(),
        arch_flags=find_toolchain.arch_flags(cpuinfo),
    )


def _unwritable(directory: Path) -> str:
    """Why files cannot be made below a directory that need not exist yet; "" when they can."""
    existing = next(parent for parent in (directory, *directory.parents) if parent.exists())
    if not existing.is_dir():
        return f"{existing} is not a directory"
    return "" if os.access(existing, os.W_OK | os.X_OK) else f"{existing} is not writable"
