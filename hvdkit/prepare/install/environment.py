"""The one step that changes the environment: a single pip install, undone whole when anything goes wrong."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from hvdkit.common.programs import handled
from hvdkit.errors import InstallError
from hvdkit.prepare.install.facts import RUNTIME_NEEDS, PythonFacts
from hvdkit.prepare.install.here import distribution
from hvdkit.prepare.install.plan import BuildPlan
from hvdkit.prepare.install.record import horovod_directory, read_record
from hvdkit.prepare.install.runner import run

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
    """Whether the very build of the plan is installed here, with its libraries and everything it needs."""
    try:
        record = read_record()
    except InstallError:
        return False
    directory = horovod_directory()
    if record is None or directory is None or record.key != plan.key or missing_needs():
        return False
    return all(_is_whole(directory, package) for package in plan.run_paths)


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


def _is_whole(horovod: Path, package: str) -> bool:
    """Whether a framework's library is there with the size that was installed."""
    found = distribution("horovod")
    installed = (found.files if found else None) or ()
    sizes = {file.name: file.size for file in installed if file.suffix == ".so" and file.parent.name == package}
    libraries = {horovod / package / name: size for name, size in sizes.items()}
    return bool(libraries) and all(path.is_file() and path.stat().st_size == size for path, size in libraries.items())
