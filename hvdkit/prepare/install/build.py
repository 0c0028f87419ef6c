"""Builds the wheel: tools and source into a temporary directory, adjusted, compiled, finished, kept in the cache."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdkit.errors import InstallError
from hvdkit.prepare.install import adjust, source, wheel
from hvdkit.prepare.install.cache import Cache
from hvdkit.prepare.install.environment import pip_command, pip_environ
from hvdkit.prepare.install.facts import TITLES, BuildFacts
from hvdkit.prepare.install.pins import BUILD_TOOLS, HOROVOD_VERSION
from hvdkit.prepare.install.plan import BuildPlan, build_environ
from hvdkit.prepare.install.progress import InstallProgress
from hvdkit.prepare.install.runner import run

JOB_BYTES = 3 << 30
"""Memory that the largest source file takes to compile, in bytes."""

_PREFIX = "hvdkit-build-"
_OWNER = "owner.lock"


@dataclass(frozen=True)
class Workshop:
    """What all steps of a build share: its directory, log, progress line, and environment."""

    directory: Path
    facts: BuildFacts
    log: Path
    progress: InstallProgress
    environ: Mapping[str, str]

    @property
    def tools(self) -> Path:
        """Directory of the build tools."""
        return self.directory / "tools"

    def tool(self, argv: list[str]) -> list[str]:
        """Run a build tool and return its lines."""
        return run(argv, what=f"'{argv[0]}'", environ=self.environ, cwd=self.directory, log=self.log)

    def python(self, arguments: list[str], what: str, cwd: Path, on_line: Callable[[str], None] | None = None) -> None:
        """Run the environment's interpreter, with the build tools in reach."""
        argv = [str(self.facts.python.executable), *arguments]
        run(argv, what=what, environ=self.environ, cwd=cwd, log=self.log, on_line=on_line)

    def pip(self, arguments: list[str]) -> None:
        """Run the environment's pip, with the build tools in reach."""
        argv = [*pip_command(self.facts.python), *arguments]
        environ = pip_environ(self.environ)
        run(argv, what=f"pip {arguments[0]}", environ=environ, cwd=self.directory, log=self.log)


def build_wheel(plan: BuildPlan, facts: BuildFacts, cache: Cache, progress: InstallProgress, log: Path) -> Path:
    """Build the wheel of a plan and keep it in the cache; the caller holds the lock of its key.

    Returns:
        Its path in the cache.
    Raises:
        InstallError: a step failed; nothing is left but the log.
    """
    with build_directory(facts.build_directory) as directory:
        shop = Workshop(directory, facts, log, progress, _environ(plan, facts, directory))
        progress.say(f"Full output: {log}")
        _check_frameworks(plan, shop)
        progress.say("Fetching the build tools")
        shop.pip(
            ["install", "--quiet", "--target", str(shop.tools), "--no-deps", "--only-binary", ":all:", *BUILD_TOOLS]
        )
        progress.say(f"Fetching the source of Horovod {HOROVOD_VERSION}")
        download = directory / "download"
        download.mkdir()
        tarball = source.fetch(cache.room("sources"), download, shop.pip)
        tree = source.unpack(tarball, directory)
        adjust.apply(tree, plan.adjustments)
        progress.say(f"Adjusted the source ({len(plan.adjustments)} changes; 'hvdkit install --explain' lists them)")
        compiled = _compile(plan, shop, tree)
        finished = wheel.finish(compiled, plan, facts.python, directory, shop.tool)
        return cache.put(plan.key, finished, plan.key_fields)


def job_count(cores: int, available_bytes: int, wanted: str | None) -> int:
    """How many source files are compiled at a time.

    Args:
        cores: that this process may use.
        available_bytes: memory that is free.
        wanted: the user's MAX_JOBS, None when not set.
    Raises:
        InstallError: MAX_JOBS is not a whole number above 0.
    """
    if wanted:
        if not wanted.isdecimal() or int(wanted) < 1:
            raise InstallError(f"MAX_JOBS is {wanted!r}; expected a whole number above 0, or 'unset MAX_JOBS'.")
        return int(wanted)
    return max(1, min(cores, available_bytes // JOB_BYTES))


@contextlib.contextmanager
def build_directory(parent: Path) -> Iterator[Path]:
    """A temporary directory that is removed at the end; ones that killed builds have left are removed first."""
    for left in parent.glob(f"{_PREFIX}*"):
        _remove_if_left(left)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent, ignore_cleanup_errors=True) as name:
        directory = Path(name)
        with (directory / _OWNER).open("w") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX)
            yield directory


def _remove_if_left(directory: Path) -> None:
    """Remove a build directory of this user whose owner is dead, which its lock tells."""
    try:
        if directory.is_symlink() or directory.stat().st_uid != os.getuid():
            return
        with (directory / _OWNER).open("r+") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
    except OSError:
        # In use by a living build, or already gone.
        return


def _environ(plan: BuildPlan, facts: BuildFacts, directory: Path) -> dict[str, str]:
    """The environment of the compilation: tools of ``directory``, jobs that fit the memory, NCCL."""
    environ = build_environ(plan, facts.environ)
    tools = directory / "tools"
    memory = available_bytes(Path("/proc/meminfo").read_text(encoding="utf-8"))
    jobs = job_count(len(os.sched_getaffinity(0)), memory, facts.environ.get("MAX_JOBS"))
    environ |= {
        "PATH": os.pathsep.join([str(tools / "cmake" / "data" / "bin"), str(tools / "bin"), environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(tools)] + [part for part in [environ.get("PYTHONPATH", "")] if part]),
        "PYTHONUNBUFFERED": "1",
        "NINJA_STATUS": "[%p] ",
        "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs),
        # Horovod's setup.py asks for eight jobs unless this is set; Ninja itself does not read it.
        "MAKEFLAGS": f"-j{jobs}",
    }
    if plan.nccl_link is not None:
        links = directory / "links"
        links.mkdir()
        (links / "libnccl.so").symlink_to(plan.nccl_link)
        environ["HOROVOD_NCCL_LIB"] = str(links)
    return environ


def available_bytes(meminfo: str) -> int:
    """Memory that programs can still get, in bytes, the file cache included.

    Args:
        meminfo: the text of ``/proc/meminfo``; when it does not say, enough for one job is assumed.
    """
    found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    return int(found.group(1)) * 1024 if found else JOB_BYTES


def _check_frameworks(plan: BuildPlan, shop: Workshop) -> None:
    """CMake asks each framework for its settings by importing it, so one that cannot be imported ends here."""
    for framework in plan.frameworks:
        title = f"{TITLES[framework.name]} {framework.version}"
        shop.progress.say(f"Importing {title}")
        try:
            shop.python(["-P", "-c", f"import {framework.name}"], f"Importing {title}", shop.directory)
        except InstallError as error:
            raise InstallError(
                f"{error}; 'pip install --force-reinstall {framework.name}' repairs it, or leave it out with "
                "--frameworks."
            ) from error


def _compile(plan: BuildPlan, shop: Workshop, tree: Path) -> Path:
    shop.progress.say(
        f"Compiling for {' and '.join(TITLES[framework.name] for framework in plan.frameworks)}, "
        f"{shop.environ['CMAKE_BUILD_PARALLEL_LEVEL']} at a time"
    )
    # The options stand before the command: so Horovod's setup.py takes this for no build action and does not want
    # its run-time needs installed first; and --quiet keeps it from passing make's VERBOSE=1 to Ninja.
    setup = ["setup.py", "--no-user-cfg", "--quiet", "bdist_wheel", "--dist-dir", str(shop.directory / "compiled")]
    shop.python(setup, "Compiling Horovod", tree, shop.progress.compiling)
    shop.progress.clear()
    return next((shop.directory / "compiled").glob("*.whl"))
