"""Builds the wheel, and installs it: tools, source, compiler, wheel; then the one step that changes the environment.

A build runs in a temporary directory and leaves a wheel in the cache. An install is a single pip install, undone whole
when anything goes wrong.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdkit.common import files, json_files
from hvdkit.common.programs import handled
from hvdkit.errors import InstallError
from hvdkit.prepare.install import adjust
from hvdkit.prepare.install.cache import Cache, sha256
from hvdkit.prepare.install.facts import (
    BUILD_TOOLS,
    HOROVOD_SHA256,
    HOROVOD_VERSION,
    RUNTIME_NEEDS,
    TITLES,
    BuildFacts,
    PythonFacts,
)
from hvdkit.prepare.install.here import distribution
from hvdkit.prepare.install.plan import BuildPlan, build_environ, run_path
from hvdkit.prepare.install.record import RECORD_NAME, horovod_directory, read_record
from hvdkit.prepare.install.runner import InstallProgress, run

JOB_BYTES = 3 << 30
"""Memory that the largest source file takes to compile, in bytes."""

SOURCE = f"horovod-{HOROVOD_VERSION}.tar.gz"
"""File of the released source."""

_REDIRECTING = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_CONSTRAINT", "PIP_REQUIREMENT", "PIP_DRY_RUN")
"""Settings of pip that would put packages elsewhere, or other ones."""

_HOROVODS = re.compile(r"horovod(?:$|-.*\.dist-info$|run$)")
_OURS = re.compile(r"(?:~?.?orovod|~|cloudpickle|psutil|_?yaml|pyyaml|packaging|_?cffi|pycparser)", re.IGNORECASE)

_CHECK = """
import importlib, json
found = {}
for name in %r:
    module = importlib.import_module("horovod." + name)
    found[name] = [bool(module.mpi_built()), bool(module.gloo_built()), bool(module.nccl_built())]
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Workshop:
    """What all steps of a build share: its directory, log, progress line, and environment."""

    directory: Path
    facts: BuildFacts
    log: Path
    progress: InstallProgress
    environ: Mapping[str, str]

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
        where = ["--target", str(directory / "tools")]
        shop.pip(["install", "--quiet", *where, "--no-deps", "--only-binary", ":all:", *BUILD_TOOLS])
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
    """Make a wheel relocatable and put the build record into it; the finished one, in the build's directory."""
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
    prefix, moved = python.prefix.resolve(), []
    for entry in entries:
        path, real = Path(entry), Path(entry).resolve()
        if path.is_relative_to(work) or real.is_relative_to(work.resolve()):
            continue
        if entry.startswith("$ORIGIN"):
            moved.append(entry)
            continue
        if not path.is_relative_to(python.prefix) and real.is_relative_to(prefix):
            path = python.prefix / real.relative_to(prefix)  # by its own name, where the linker took it through a link
        moved.append(run_path(path, package, python))
    return list(dict.fromkeys([*moved, *extra]))


# The environment ------------------------------------------------------------------------------------------------------


def pip_command(python: PythonFacts) -> list[str]:
    """How pip of the environment is called; a directory named ``pip`` beside the user is not taken for it."""
    return [str(python.executable), "-P", "-m", "pip", "--disable-pip-version-check", "--no-input"]


def pip_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for pip, without the settings that would make it install elsewhere."""
    kept = {name: value for name, value in environ.items() if name not in _REDIRECTING}
    # Said, not left out: pip's own configuration file may say otherwise.
    return {**kept, "PIP_USER": "0"}


def missing_needs() -> list[str]:
    """Names of the packages that Horovod imports when it runs and that are not installed."""
    return [name for name in RUNTIME_NEEDS if distribution(name) is None]


def is_installed(plan: BuildPlan) -> bool:
    """Whether the very build of the plan is installed here, with its libraries whole and everything it needs."""
    try:
        record = read_record()
    except InstallError:
        return False
    directory, found = horovod_directory(), distribution("horovod")
    if record is None or directory is None or record.key != plan.key or missing_needs():
        return False
    installed = [file for file in (found.files if found else None) or () if file.suffix == ".so"]
    for package in plan.run_paths:
        sizes = {directory / package / file.name: file.size for file in installed if file.parent.name == package}
        if not sizes or not all(path.is_file() and path.stat().st_size == size for path, size in sizes.items()):
            return False
    return True


def put_in_place(
    wheel: Path, plan: BuildPlan, cache: Cache, untried: bool, progress: InstallProgress, log: Path
) -> None:
    """Install a wheel; one that was never imported where it is now is tried, and forgotten where that fails."""
    progress.say(f"Installing into {plan.facts.python.prefix}")
    with restored_on_failure(plan.facts.python):
        install(wheel, plan, log)
        if not untried:
            return
        try:
            check_import(plan, log)
        except InstallError:
            # What does not work where it was built is no use to anybody else.
            cache.drop(plan.key)
            raise


def install(wheel: Path, plan: BuildPlan, log: Path) -> None:
    """Install the wheel and what it lacks at run time, in one pip install that touches nothing else.

    Raises:
        InstallError: pip failed; undo with ``restored_on_failure``.
    """
    python, needs = plan.facts.python, missing_needs()
    # --no-deps: no framework can ever be pulled in or replaced. --force-reinstall: another build of the same version.
    arguments = ["install", "--no-deps", "--force-reinstall", "--no-warn-script-location"]
    if not needs:
        arguments.append("--no-index")
    run(
        [*pip_command(python), *arguments, str(wheel), *needs],
        what="Installing the wheel",
        environ=pip_environ(plan.facts.environ),
        cwd=wheel.parent,
        log=log,
    )
    importlib.invalidate_caches()
    if not is_installed(plan):
        raise InstallError(f"pip installed the wheel and {python.site_packages} does not have it; the log is {log}")


def check_import(plan: BuildPlan, log: Path) -> None:
    """Import the installed Horovod in a process of its own and compare what it has with the plan.

    Raises:
        InstallError: it cannot be imported, or was built with other controllers than planned.
    """
    lines = run(
        [str(plan.facts.python.executable), "-P", "-c", _CHECK % (tuple(plan.run_paths),)],
        what="Importing the new Horovod",
        environ=plan.facts.environ,
        cwd=Path(tempfile.gettempdir()),
        log=log,
    )
    found = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
    expected = [plan.facts.mpi is not None, True, plan.options.gpu == "nccl"]
    for package, built in found.items():
        if built != expected:
            raise InstallError(
                f"The new Horovod for {package} has MPI, Gloo, NCCL = {built}, expected {expected}; the log is {log}"
            )


@contextlib.contextmanager
def restored_on_failure(python: PythonFacts) -> Iterator[None]:
    """Put the environment back as it was when the block raises, also by Ctrl-C."""
    with tempfile.TemporaryDirectory(prefix="hvdkit-backup-") as backup:
        before = _entries(python)
        copies = {entry: Path(backup) / str(number) for number, entry in enumerate(sorted(before))}
        for entry, copy in copies.items():
            if _HOROVODS.match(entry.name):
                _copy(entry, copy)
        try:
            yield
        except BaseException:
            with handled((signal.SIGINT,), signal.SIG_IGN):  # a second Ctrl-C must not stop the undoing half-way
                for entry in _entries(python):
                    if entry in before and not _HOROVODS.match(entry.name):
                        continue
                    if entry.is_dir() and not entry.is_symlink():
                        shutil.rmtree(entry)
                    else:
                        entry.unlink()
                for entry, copy in copies.items():
                    if copy.exists():
                        _copy(copy, entry)
                importlib.invalidate_caches()
            raise


def _entries(python: PythonFacts) -> set[Path]:
    """What the install can add or replace, at the top of site-packages and among the scripts.

    Found by name and not through pip, which cannot remove a package that it was stopped at installing.
    """
    directories = (python.site_packages, python.scripts)
    return {entry for directory in directories for entry in directory.iterdir() if _OURS.match(entry.name)}


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy2(source, target)
