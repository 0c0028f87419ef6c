"""Builds the wheel: tools and source into a temporary directory, adjusted, compiled, finished, kept in the cache."""

from __future__ import annotations

import os
import re
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdkit.common import files, json_files
from hvdkit.errors import InstallError
from hvdkit.prepare.install import adjust
from hvdkit.prepare.install.cache import Cache, sha256
from hvdkit.prepare.install.environment import pip_command, pip_environ
from hvdkit.prepare.install.facts import BUILD_TOOLS, HOROVOD_SHA256, HOROVOD_VERSION, TITLES, BuildFacts, PythonFacts
from hvdkit.prepare.install.plan import BuildPlan, build_environ, run_path
from hvdkit.prepare.install.record import FILE_NAME as RECORD_NAME
from hvdkit.prepare.install.runner import InstallProgress, run

JOB_BYTES = 3 << 30
"""Memory that the largest source file takes to compile, in bytes."""

SOURCE = f"horovod-{HOROVOD_VERSION}.tar.gz"
"""File of the released source."""


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


def build_wheel(plan: BuildPlan, cache: Cache, progress: InstallProgress, log: Path) -> Path:
    """Build the wheel of a plan and keep it in the cache; the caller holds the lock of its key.

    Returns:
        Its path in the cache.
    Raises:
        InstallError: a step failed; nothing is left but the log.
    """
    parent = plan.facts.build_directory
    with tempfile.TemporaryDirectory(prefix="hvdkit-build-", dir=parent, ignore_cleanup_errors=True) as name:
        directory = Path(name)
        shop = Workshop(directory, plan.facts, log, progress, _environ(plan, directory))
        progress.say(f"Full output: {log}")
        _check_frameworks(shop)
        progress.say("Fetching the build tools")
        shop.pip(
            ["install", "--quiet", "--target", str(shop.tools), "--no-deps", "--only-binary", ":all:", *BUILD_TOOLS]
        )
        progress.say(f"Fetching the source of Horovod {HOROVOD_VERSION}")
        download = directory / "download"
        download.mkdir()
        tree = unpack(fetch(cache.room("sources"), download, shop.pip), directory)
        adjust.apply(tree, plan.adjustments)
        progress.say(f"Adjusted the source by {len(plan.adjustments)} patches of {adjust.PATCHES}")
        compiled = _compile(shop, tree)
        return cache.put(plan.key, _finish(compiled, plan, shop), plan.key_fields)


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


def _environ(plan: BuildPlan, directory: Path) -> dict[str, str]:
    """The environment of the compilation: tools of ``directory``, jobs that fit the memory, NCCL."""
    environ = build_environ(plan, plan.facts.environ)
    tools = directory / "tools"
    memory = available_bytes(files.text_if_there(Path("/proc/meminfo")))
    jobs = job_count(len(os.sched_getaffinity(0)), memory, plan.facts.environ.get("MAX_JOBS"))
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


def _check_frameworks(shop: Workshop) -> None:
    """CMake asks each framework for its settings by importing it, so one that cannot be imported ends here."""
    for framework in shop.facts.frameworks:
        title = f"{TITLES[framework.name]} {framework.version}"
        shop.progress.say(f"Importing {title}")
        try:
            shop.python(["-P", "-c", f"import {framework.name}"], f"Importing {title}", shop.directory)
        except InstallError as error:
            raise InstallError(
                f"{error}; 'pip install --force-reinstall {framework.name}' repairs it, or leave it out with "
                "--frameworks."
            ) from error


def _compile(shop: Workshop, tree: Path) -> Path:
    shop.progress.say(
        f"Compiling for {' and '.join(TITLES[framework.name] for framework in shop.facts.frameworks)}, "
        f"{shop.environ['CMAKE_BUILD_PARALLEL_LEVEL']} at a time"
    )
    # The options stand before the command: so Horovod's setup.py takes this for no build action and does not want
    # its run-time needs installed first; and --quiet keeps it from passing make's VERBOSE=1 to Ninja.
    setup = ["setup.py", "--no-user-cfg", "--quiet", "bdist_wheel", "--dist-dir", str(shop.directory / "compiled")]
    shop.python(setup, "Compiling Horovod", tree, shop.progress.compiling)
    return next((shop.directory / "compiled").glob("*.whl"))


# The source -----------------------------------------------------------------------------------------------------------


def is_released(tarball: Path) -> bool:
    """Whether a file is the released source distribution, byte for byte."""
    return tarball.is_file() and sha256(tarball) == HOROVOD_SHA256


def fetch(sources: Path, work: Path, pip: Callable[[list[str]], None]) -> Path:
    """The source distribution, from ``sources`` when it is there, else through pip.

    Args:
        sources: where it is kept between builds.
        work: an empty directory for the download.
        pip: runs pip with the given arguments.
    Raises:
        InstallError: it cannot be had, or is not the released one.
    """
    kept = sources / SOURCE
    if is_released(kept):
        return kept
    requirements = work / "requirements.txt"
    requirements.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{HOROVOD_SHA256}\n", encoding="utf-8")
    where = ["--dest", str(work), "--requirement", str(requirements)]
    pip(["download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--require-hashes", *where])
    fresh = work / SOURCE
    if not is_released(fresh):
        found = sha256(fresh) if fresh.is_file() else "no file"
        raise InstallError(f"The downloaded {SOURCE} is not the released one: {found}, expected {HOROVOD_SHA256}.")
    with files.complete_or_absent(kept) as file:
        file.write(fresh.read_bytes())
    return kept


def unpack(tarball: Path, into: Path) -> Path:
    """Unpack the source distribution below ``into`` and return its tree.

    Raises:
        InstallError: the archive is damaged, or has a member that would land elsewhere.
    """
    try:
        with tarfile.open(tarball) as archive:
            # Python 3.11.4 and later; before that the check of the archive's SHA-256 alone vouches for it.
            safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            archive.extractall(into, **safely)  # type: ignore[arg-type]  # noqa: S202
    except (tarfile.TarError, OSError, EOFError) as error:
        raise InstallError(f"{tarball} cannot be unpacked: {error}.") from error
    tree = into / f"horovod-{HOROVOD_VERSION}"
    if not (tree / "setup.py").is_file():
        raise InstallError(f"{tarball} has no horovod-{HOROVOD_VERSION}/setup.py, so it is not Horovod's source.")
    return tree


# The wheel ------------------------------------------------------------------------------------------------------------


def _finish(wheel: Path, plan: BuildPlan, shop: Workshop) -> Path:
    """Make a wheel relocatable and put the build record into it.

    Args:
        wheel: as setup.py made it.
        plan: gives the run paths and the record.
        shop: the build's; run paths below its directory are dropped.
    Returns:
        The finished wheel, in the build's directory.
    Raises:
        InstallError: the library of a framework is not in the wheel.
    """
    work, python = shop.directory, shop.facts.python
    shop.tool(["wheel", "unpack", "--dest", str(work / "unpacked"), str(wheel)])
    tree = work / "unpacked" / f"horovod-{HOROVOD_VERSION}"
    for package, extra in plan.run_paths.items():
        libraries = list((tree / "horovod" / package).glob("*.so"))
        if not libraries:
            raise InstallError(f"The build made no library for {package}, although it was asked for and succeeded.")
        for library in libraries:
            lines = shop.tool(["patchelf", "--print-rpath", str(library)])
            entries = [entry for entry in "".join(lines).strip().split(os.pathsep) if entry]
            moved = relocated(entries, package, python, work, extra)
            shop.tool(["patchelf", "--set-rpath", os.pathsep.join(moved), str(library)])
    (tree / "horovod" / RECORD_NAME).write_text(json_files.encode(plan.record), encoding="utf-8")
    finished = work / "finished"
    finished.mkdir()
    shop.tool(["wheel", "pack", "--dest-dir", str(finished), str(tree)])
    return next(finished.glob("*.whl"))


def relocated(
    entries: Iterable[str], package: str, python: PythonFacts, work: Path, extra: Iterable[str] = ()
) -> list[str]:
    """Run paths that work wherever the environment lies.

    Args:
        entries: as the linker wrote them.
        package: "torch" or "tensorflow", whose library they belong to.
        python: the environment it was built in; entries inside it become relative to the library.
        work: the build's directory; entries inside it are dropped.
        extra: further entries, kept as they are.
    """
    moved: list[str] = []
    for entry in entries:
        path = Path(entry)
        if path.is_relative_to(work) or path.resolve().is_relative_to(work.resolve()):
            continue
        moved.append(entry if entry.startswith("$ORIGIN") else run_path(_as_named(path, python), package, python))
    moved += [entry for entry in extra if entry not in moved]
    return list(dict.fromkeys(moved))


def _as_named(path: Path, python: PythonFacts) -> Path:
    """A path inside the environment, by the environment's own name where the linker took it through a link."""
    if path.is_relative_to(python.prefix):
        return path
    real, prefix = path.resolve(), python.prefix.resolve()
    return python.prefix / real.relative_to(prefix) if real.is_relative_to(prefix) else path
